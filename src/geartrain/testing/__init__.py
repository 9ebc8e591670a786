"""For tests, ours and yours: ranks that are threads, hosts that are network namespaces, and a GPU that is not there."""

from __future__ import annotations

from geartrain.testing.cluster import Hosts, HostsError, Moved
from geartrain.testing.device import SimulatedDevice
from geartrain.testing.ranks import ThreadRanks, run_ranks

__all__ = ["Hosts", "HostsError", "Moved", "SimulatedDevice", "ThreadRanks", "run_ranks"]
