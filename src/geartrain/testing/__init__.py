"""For tests, ours and yours: ranks that are threads, and hosts that are network namespaces."""

from __future__ import annotations

from geartrain.testing.hosts import Hosts, HostsError, Moved
from geartrain.testing.ranks import ThreadRanks, run_ranks

__all__ = ["Hosts", "HostsError", "Moved", "ThreadRanks", "run_ranks"]
