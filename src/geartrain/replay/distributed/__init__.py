"""One global batch from the shards of many ranks: membership, draws, assignment, row messages, checkpoints, placement."""
