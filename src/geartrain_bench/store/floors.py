"""Floors of fetch and insert: the same bytes are copied, and nothing else, with ordinary or with streaming stores."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
import geartrain_bench.harness.timing as harness
from geartrain.core.schema import Field
from geartrain_bench.harness.timing import Lap, System


def floor_systems(floor: Callable[[bool, int], Lap], threads: int) -> list[System]:
    """Plain and streaming stores, on one thread and, where allowed, on two."""
    systems = []
    for parts in range(1, threads + 1):
        for stream in (False, True):

            def one_lap(stream: bool = stream, parts: int = parts) -> Lap:
                return floor(stream, parts)

            systems.append(System(f"floor {'streaming' if stream else 'memcpy'} {parts}", one_lap, floor=True))
    return systems


def in_parts(calls: int, parts: int, work: Callable[[int, int, int], None]) -> Lap:
    """`work(part, first, last)` runs those of `calls + 1` calls, for every part in parallel, the first one untimed.

    The time is that of the slowest part: from when all were running to its end.
    """
    if parts == 1:
        return harness.lap(calls, lambda: work(0, 1, calls + 1), lambda: work(0, 0, 1))
    ready = threading.Barrier(parts)
    seconds = [0.0] * parts

    def one(part: int) -> None:
        work(part, 0, 1)
        ready.wait(timeout=60)
        began_s = time.perf_counter()
        work(part, 1, calls + 1)
        seconds[part] = time.perf_counter() - began_s

    threads = [threading.Thread(target=one, args=(part,)) for part in range(1, parts)]

    def body() -> None:
        for thread in threads:
            thread.start()
        one(0)
        for thread in threads:
            thread.join()

    return replace(harness.lap(calls, body), seconds=max(seconds) / calls)


def gather(column: NDArray[Any], out: NDArray[Any], rows: NDArray[np.uint32], stream: bool) -> None:
    """The floor of fetch for one field."""
    _native.gather_floor(column, out, rows, out.nbytes // max(1, len(rows)), column.strides[0], stream)


def scatter(array: NDArray[Any], place: NDArray[Any], rows: NDArray[np.uint32], stream: bool) -> None:
    """The floor of insert for one field: the rows one after the other, as if blocks had no padding."""
    row_bytes = array.nbytes // len(array)
    _native.gather_floor(array, place, rows, row_bytes, row_bytes, stream)


def aligned(shape: tuple[int, ...], field: Field) -> NDArray[Any]:
    """A warm array that starts on a cache line, as the recycled buffers do."""
    nbytes = math.prod(shape) * field.itemsize
    memory = np.zeros(nbytes + 64, np.uint8)
    memory += 1  # zeros alone would be one shared page
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes].view(field.numpy_dtype).reshape(shape)
