"""Checkpoints of a job: the shards of all ranks, saved together and restored to any number of ranks."""
