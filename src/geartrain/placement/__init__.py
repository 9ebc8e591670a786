"""Placement of rows: in the shards whose hosts train on them."""
