"""Pool of host buffers that are registered with a backend, and into which peers write."""

from __future__ import annotations

import mmap
import threading
from typing import Any

import numpy as np

from geartrain.transport.one_sided import Region, backend


class RegisteredMemoryPool:
    """Leases registered buffers. Keeps at most `max_warm_bytes` of returned buffers for later leases.

    Call `abandon` on a buffer that a lost peer may still be writing to. Its memory is then never used for anything
    else.

    Args:
        name: of the backend.
        max_warm_bytes: see above.
    """

    def __init__(self, name: str, max_warm_bytes: int = 2 << 30) -> None:
        self.name, self.backend = name, backend(name)
        self._max_warm_bytes = max_warm_bytes
        self._lock = threading.RLock()  # a collection of garbage within it may end in `give_back`
        self._warm: dict[int, list[tuple[mmap.mmap, Region]]] = {}
        self._warm_bytes = 0
        self._closed = False
        self.abandoned = 0

    def lease(self, nbytes: int) -> RegisteredBuffer:
        """A buffer of at least this many bytes, which starts at a page boundary."""
        size = max(1 << 16, 1 << (nbytes - 1).bit_length() if nbytes < 1 << 24 else -(-nbytes >> 23) << 23)
        with self._lock:
            warm = self._warm.get(size)
            if warm:
                self._warm_bytes -= size
                return RegisteredBuffer(self, *warm.pop())
        memory = mmap.mmap(-1, size)
        return RegisteredBuffer(self, memory, self.backend.expose(np.frombuffer(memory, np.uint8)))

    def give_back(self, memory: mmap.mmap, region: Region) -> None:
        """The memory of a buffer that is not used any more."""
        with self._lock:
            if not self._closed and self._warm_bytes + region.nbytes <= self._max_warm_bytes:
                self._warm.setdefault(region.nbytes, []).append((memory, region))
                self._warm_bytes += region.nbytes
                return
        region.close()

    def close(self) -> None:
        """Frees the buffers that are not leased. Leased buffers are freed when they are returned."""
        with self._lock:
            self._closed, warm, self._warm, self._warm_bytes = True, self._warm, {}, 0
        for entries in warm.values():
            for _, region in entries:
                region.close()


class RegisteredBuffer:
    """One buffer of a pool, until it is released or abandoned."""

    def __init__(self, pool: RegisteredMemoryPool, memory: mmap.mmap, region: Region) -> None:
        self._pool, self.memory, self.region = pool, memory, region
        self.nbytes = region.nbytes
        self.descriptor = region.descriptor

    def array(self) -> Any:
        """All of it as uint8; it is released with the last view of this array."""
        owner = _Views(self._pool, self.memory, self.region)
        return np.asarray(owner)

    def release(self) -> None:
        """Gives it back to the pool: no peer writes to it."""
        self._pool.give_back(self.memory, self.region)

    def abandon(self) -> None:
        """A peer may still be writing to it: it is never leased again."""
        self.region.close()
        self.memory.madvise(mmap.MADV_DONTNEED)
        _abandoned.append(self.memory)
        self._pool.abandoned += 1


class _Views:
    """The base of all views of a buffer: gives the memory back with the last of them."""

    def __init__(self, pool: RegisteredMemoryPool, memory: mmap.mmap, region: Region) -> None:
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
