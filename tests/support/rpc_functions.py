"""Functions that tests of RPC call by name."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
from deadlines import patience

from geartrain import rpc
from geartrain.errors import BusyError

TRANSPORTS = ("inproc", "shm", "tcp")


@rpc.function
def add(a: object, b: object) -> object:
    return a + b  # type: ignore[operator]


@rpc.function
def overwhelmed() -> None:
    raise BusyError("too much")


@rpc.function
def missing() -> None:
    {}["x"]  # type: ignore[index]


@rpc.function
def fail(text: str) -> None:
    raise ValueError(text)


@rpc.function(concurrent=True)
def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@rpc.function
def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


gate = threading.Event()


@rpc.function
def pass_gate() -> bool:
    return gate.wait(patience(30))


@rpc.function(concurrent=True)
def pass_gate_beside() -> bool:
    return gate.wait(patience(30))


seen: list[int] = []


@rpc.function
def note(number: int) -> int:
    seen.append(number)
    return number


@rpc.function
async def later(value: object) -> object:
    await asyncio.sleep(0.01)
    return value


batch_sizes: list[int] = []


@rpc.batched(max_size=4, max_wait_us=None)
def double(values: list[int]) -> list[int]:
    batch_sizes.append(len(values))
    return [2 * value for value in values]


@rpc.batched(max_size=1000, max_wait_us=20_000)
def triple(values: list[int]) -> list[int]:
    batch_sizes.append(len(values))
    return [3 * value for value in values]


@rpc.batched(max_size=3, max_wait_us=None, stack=True)
def total(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows).sum(axis=1)


@rpc.batched(max_size=3, max_wait_us=None, stack=True)
def halves(rows: np.ndarray, wrong: np.ndarray) -> dict[str, Any]:
    sums = np.asarray(rows).sum(axis=1)
    return {"half": rows / 2, "sum": sums[: len(sums) - int(wrong.max())]}


@rpc.batched(max_size=1)
def unstacked_dict(values: list[int]) -> dict[str, list[int]]:
    return {"value": values}


@rpc.batched(max_size=2, max_wait_us=None, max_queued=2)
def never_filled(values: list[int]) -> list[int]:
    return values


@rpc.function
class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, n: int) -> int:
        self.count += n
        return self.count

    def _hidden(self) -> None:
        raise AssertionError("nobody may call this")


def unregistered(x: int) -> int:
    return x + 1000
