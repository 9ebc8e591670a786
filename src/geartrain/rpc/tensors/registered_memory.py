"""Registered host memory that peers write to over NIXL, used again and again."""

from __future__ import annotations

import mmap
import threading
from typing import Any

import numpy as np

from geartrain.transport.nixl import Region, expose


class Landings:
    """A pool of it. `room` lends a landing; when the last view of its array is gone, the memory goes back.

    One that a lost peer may still be writing to is `abandoned`: its pages go back to the system, its address is never
    used for anything else.
    """

    def __init__(self, max_warm_bytes: int = 2 << 30) -> None:
        self._max_warm_bytes = max_warm_bytes
        self._lock = threading.Lock()
        self._warm: dict[int, list[tuple[mmap.mmap, Region]]] = {}
        self._warm_bytes = 0
        self._closed = False
        self.abandoned = 0

    def room(self, nbytes: int) -> Landing:
        """Memory for so many bytes, beginning at a page."""
        size = max(1 << 16, 1 << (nbytes - 1).bit_length() if nbytes < 1 << 24 else -(-nbytes >> 23) << 23)
        with self._lock:
            warm = self._warm.get(size)
            if warm:
                self._warm_bytes -= size
                return Landing(self, *warm.pop())
        memory = mmap.mmap(-1, size)
        return Landing(self, memory, expose(np.frombuffer(memory, np.uint8)))

    def give_back(self, memory: mmap.mmap, region: Region) -> None:
        """It is not used any more."""
        with self._lock:
            if not self._closed and self._warm_bytes + region.nbytes <= self._max_warm_bytes:
                self._warm.setdefault(region.nbytes, []).append((memory, region))
                self._warm_bytes += region.nbytes
                return
        region.close()

    def close(self) -> None:
        """Frees what is not in use; the rest follows when it goes back."""
        with self._lock:
            self._closed, warm, self._warm, self._warm_bytes = True, self._warm, {}, 0
        for entries in warm.values():
            for _, region in entries:
                region.close()


class Landing:
    """One piece of the `Landings`, until it is given back or abandoned."""

    def __init__(self, pool: Landings, memory: mmap.mmap, region: Region) -> None:
        self._pool, self.memory, self.region = pool, memory, region
        self.nbytes = region.nbytes
        self.descriptor = region.descriptor

    def array(self) -> Any:
        """All of it as uint8; it goes back to the pool with the last view of this array."""
        owner = _Views(self._pool, self.memory, self.region)
        return np.asarray(owner)

    def drop(self) -> None:
        """Gives it back: nobody writes to it."""
        self._pool.give_back(self.memory, self.region)

    def abandon(self) -> None:
        """Somebody may still be writing to it."""
        self.region.close()
        self.memory.madvise(mmap.MADV_DONTNEED)
        _abandoned.append(self.memory)
        self._pool.abandoned += 1


class _Views:
    """The base of all views of a landing: gives it back when it is the last."""

    def __init__(self, pool: Landings, memory: mmap.mmap, region: Region) -> None:
        self._parts = pool, memory, region
        self.__array_interface__ = {
            "shape": (region.nbytes,),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }

    def __del__(self) -> None:
        pool, memory, region = self._parts
        pool.give_back(memory, region)


_abandoned: list[mmap.mmap] = []  # for ever
