"""Distributed replay: global batches from the shards of many ranks, job checkpoints, data placement."""
