"""All-reduce through the C interface (geartrain_allreduce.h), called by ctypes."""

from __future__ import annotations

import ctypes
from typing import Any

from geartrain.collectives import library_path
from geartrain_bench.allreduce.profile import COUNTS, STAGES
from geartrain_bench.allreduce.rounds import Array

_ADDRESS_BYTES = 512
_FLOAT32, _SUM = 0, 0


class _Options(ctypes.Structure):
    _fields_ = (
        ("bytes", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("world", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("host", ctypes.c_char_p),
        ("secret", ctypes.c_char_p),
        ("reducers", ctypes.POINTER(ctypes.c_char_p)),
        ("reducer_count", ctypes.c_uint32),
        ("ring", ctypes.c_uint32),
        ("shares", ctypes.POINTER(ctypes.c_double)),
        ("rates", ctypes.POINTER(ctypes.c_double)),
        ("tcp_only", ctypes.c_uint32),
    )


class _Profile(ctypes.Structure):
    _fields_ = (
        ("bytes", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in COUNTS),
        ("ns", ctypes.c_uint64 * len(STAGES)),
        ("entered", ctypes.c_uint64 * len(STAGES)),
    )


class GroupInC:
    """A rank's group, which float32 arrays are summed with.

    Args:
        store: where ranks exchange their addresses: a `torch.distributed` store.
        rank, size: this process's number, and of how many.
        timeout_s: of every wait.
        secret: of the group.
        spin_us: of `gt_group_spin`.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout_s: float, secret: str = "", spin_us: float | None = None
    ) -> None:
        self._library = library = ctypes.CDLL(str(library_path()))
        library.gt_last_error.restype = ctypes.c_char_p
        library.gt_allreduce.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_double,
        ]  # fmt: skip
        self._call = library.gt_allreduce
        self._known: dict[int, tuple[Array, int, int]] = {}
        options = _Options(bytes=ctypes.sizeof(_Options), rank=rank, world=size, secret=secret.encode() or None)
        self._group = ctypes.c_void_p()
        self._timeout_s = timeout_s
        mine = ctypes.create_string_buffer(_ADDRESS_BYTES)
        self._check(library.gt_group_listen(ctypes.byref(options), ctypes.byref(self._group), mine))
        store.set(f"address/{rank}", mine.raw)
        addresses = b"".join(bytes(store.get(f"address/{other}")) for other in range(size))
        self._check(library.gt_group_connect(self._group, addresses, ctypes.c_double(timeout_s)))
        if spin_us is not None:
            self._check(library.gt_group_spin(self._group, ctypes.c_double(spin_us)))

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"status {status}: {self._library.gt_last_error().decode()}")

    def all_reduce(self, array: Array) -> None:
        """Sums the array over all ranks, in place."""
        _, at, count = self._known.get(id(array)) or self._know(array)
        status = self._call(self._group, at, count, _FLOAT32, _SUM, self._timeout_s)
        if status != 0:
            self._check(status)

    def _know(self, array: Array) -> tuple[Array, int, int]:
        """The array, which stays alive, its address and its size: as a program in C has them, which asks nobody."""
        self._known[id(array)] = known = (array, array.ctypes.data, array.size)
        return known

    def profile(self, on: bool) -> None:
        """Measures from now on where the time goes, or no more."""
        self._check(self._library.gt_group_profile(self._group, int(on)))

    def profiled(self) -> dict[str, Any]:
        """Counts and bytes since the group began; nanoseconds and entries of each stage since `profile(True)`."""
        found = _Profile(bytes=ctypes.sizeof(_Profile))
        self._check(self._library.gt_group_profiled(self._group, ctypes.byref(found)))
        counts = {name: getattr(found, name) for name in COUNTS}
        return {
            **counts,
            "ns": dict(zip(STAGES, found.ns, strict=True)),
            "entered": dict(zip(STAGES, found.entered, strict=True)),
        }

    def close(self) -> None:
        """Leaves the group."""
        self._library.gt_group_close(self._group, ctypes.c_double(self._timeout_s))
        self._group = ctypes.c_void_p()
