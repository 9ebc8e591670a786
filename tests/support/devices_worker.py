"""A peer with simulated GPUs (or none): `devices_worker.py FOLDER COUNT [TRANSPORT]` prints its address."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from geartrain import rpc
from geartrain.tools.testing import SimulatedRuntime, SimulatedTensor

weights: list[Any] = []


@rpc.function
def twice(tensor: Any) -> Any:
    return tensor.times(2) if isinstance(tensor, SimulatedTensor) else tensor * 2


@rpc.function
def where(*tensors: Any) -> list[str]:
    return [f"cuda:{t.device}" if isinstance(t, SimulatedTensor) else f"{type(t).__name__}" for t in tensors]


@rpc.function
def mixed(value: dict[str, Any]) -> dict[str, Any]:
    a, (b, c) = value["a"], value["bc"]
    return {"sum": float(a.numpy().sum()), "back": [c, {"b": b}], "same": value["plain"]}


@rpc.function
def keep(tensor: Any) -> None:
    weights[:] = [tensor]


@rpc.function
def kept() -> Any:
    return weights[0]


@rpc.function
def overwrite(value: float) -> None:
    weights[0].fill_(value)


@rpc.function
def on_your(device: int, value: float) -> Any:
    return node.devices.driver.tensor(device, np.full(1000, value))  # type: ignore[attr-defined]


@rpc.function
def fail(tensor: Any) -> None:
    raise ValueError(f"got {tensor.numpy()[0]}")


@rpc.function
def ranges(n: int) -> list[np.ndarray]:
    return [np.arange(n), np.arange(n, dtype=np.float32)]


@rpc.function
def be(count: int, folder: str, delay_s: float, why: str | None) -> None:
    """Another machine."""
    driver = node.devices.driver
    assert isinstance(driver, SimulatedRuntime)
    driver.become(folder, count, delay_s, why)


@rpc.function(concurrent=True)
def memory() -> dict[str, int]:
    drivers = node.devices.driver
    return {
        "allocated": getattr(drivers, "allocated", 0),
        "opened": getattr(drivers, "opened", 0),
        "held": sum(session.tensors.held for session in node.server.sessions),
        "lent": sum(session.tensors.channels.leased for session in node.server.sessions),
    }


@rpc.function
def nap(seconds: float, *_: Any) -> None:
    time.sleep(seconds)


@rpc.function
def call_back(peer: str, address: str, tensor: Any) -> Any:
    node.directory.known[peer] = address
    return node.call(peer, "mine_times_three", tensor)


if __name__ == "__main__":
    driver = SimulatedRuntime(sys.argv[1], int(sys.argv[2]))
    options = rpc.NodeOptions(driver=driver)
    node = rpc.Node("peer", transport=sys.argv[3] if len(sys.argv) > 3 else None, options=options)
    print(node.address, flush=True)
    sys.stdin.read()
    node.close()
