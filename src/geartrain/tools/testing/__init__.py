"""Test doubles: ranks as threads, hosts as network namespaces, simulated devices."""

from __future__ import annotations

from geartrain.tools.testing.cluster import Hosts, LinkTraffic
from geartrain.tools.testing.namespaces import HostsError
from geartrain.tools.testing.simulated_device import SimulatedDevice
from geartrain.tools.testing.simulated_ipc import SimulatedRuntime, SimulatedTensor
from geartrain.tools.testing.thread_ranks import ThreadRankGroup, run_ranks

__all__ = [
    "Hosts",
    "HostsError",
    "LinkTraffic",
    "SimulatedDevice",
    "SimulatedRuntime",
    "SimulatedTensor",
    "ThreadRankGroup",
    "run_ranks",
]
