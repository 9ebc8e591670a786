"""For tests, ours and yours: ranks that are threads, hosts that are network namespaces, and a GPU that is not there."""

from __future__ import annotations

from geartrain.tools.testing.cluster import Hosts, HostsError, LinkTraffic
from geartrain.tools.testing.simulated_device import SimulatedDevice
from geartrain.tools.testing.thread_ranks import ThreadRankGroup, run_ranks

__all__ = ["Hosts", "HostsError", "LinkTraffic", "SimulatedDevice", "ThreadRankGroup", "run_ranks"]
