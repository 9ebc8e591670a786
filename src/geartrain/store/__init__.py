"""Rows in shared memory: the store, its row writers, its rate limiter and its checkpoints."""

from geartrain.store.rate_limiter import LimiterState, RateLimiter
from geartrain.store.row import Row, Rows, RowView
from geartrain.store.store import Store

__all__ = ["LimiterState", "RateLimiter", "Row", "RowView", "Rows", "Store"]
