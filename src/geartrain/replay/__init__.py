"""Replay: an iterator of training batches, sampled and copied ahead of the consumer, on one rank or many."""

from geartrain.replay.batch import Batch
from geartrain.replay.replay import Replay

__all__ = ["Batch", "Replay"]
