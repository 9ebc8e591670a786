"""For tests, ours and yours: ranks that are threads, and hosts that are network namespaces."""

from __future__ import annotations

from geartrain.testing.ranks import ThreadRanks, run_ranks

__all__ = ["ThreadRanks", "run_ranks"]
