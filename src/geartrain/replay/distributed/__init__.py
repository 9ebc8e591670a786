"""Batches over ranks: one global batch from the shards of many ranks."""
