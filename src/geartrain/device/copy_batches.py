"""Copies many pieces of pinned host memory to a GPU by its copy engines, in one driver call.

    batches = CopyBatches(ctypes.CDLL("libcuda.so.1"))
    batches.submit(targets, sources, sizes, stream)

The driver's version decides which call is used, the newest one first:

- CUDA 13: `cuMemcpyBatchAsync_v2`.
- CUDA 12.8: `cuMemcpyBatchAsync`, which also reports the piece that failed.
- older: one `cuMemcpyHtoDAsync` for each piece.

Both batch calls take the same attributes, and all pieces share them. The attributes ask for two things:

- Sources are read in stream order. The copies see everything that the host wrote before the call. Once the event of a
  piece has completed, its source is not read again.
- The driver should prefer a copy that overlaps with kernels: copy engines, no multiprocessors.

Cost: one call, and about a microsecond a piece on the copy engine.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

_log = logging.getLogger("geartrain.device.copy_batches")

INVALID_VALUE, NOT_SUPPORTED = 1, 801  # CUDA_ERROR_*
_ORDER_OF_STREAM = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_PREFER_OVERLAP = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_LEGACY_STREAMS = (0, 1)  # the default stream of all threads, which the call refuses


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    ]


class CopyBatches:
    """The driver's batched copies, in the form that it has.

    Args:
        driver: the library, as ctypes has loaded it.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._attributes = Attributes(source_order=_ORDER_OF_STREAM, flags=_PREFER_OVERLAP)
        self.form = next(
            (name for name in ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync") if hasattr(driver, name)), None
        )

    def submit(
        self, targets: NDArray[np.uint64], sources: NDArray[np.uint64], sizes: NDArray[np.uint64], stream: int
    ) -> None:
        """Gives the copies to a stream, in no order among themselves. Raises `RuntimeError` where the driver refuses.

        Args:
            targets, sources: (k,) addresses, C-contiguous like the sizes.
            sizes: (k,) bytes, none of them 0.
            stream: its handle.
        """
        if len(sizes) == 0:
            return
        if self.form is not None and stream not in _LEGACY_STREAMS:
            code = self._submit_at_once(targets, sources, sizes, stream)
            if code not in (INVALID_VALUE, NOT_SUPPORTED):
                _check(self.form, code)
                return
            # If it is a piece that is invalid and not the call, the piece's own call says so.
            _log.warning("%s: error %d; from now on each piece is copied by its own call", self.form, code)
            self.form = None
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            code = self._driver.cuMemcpyHtoDAsync_v2(
                ctypes.c_uint64(target), ctypes.c_void_p(source), ctypes.c_size_t(size), ctypes.c_void_p(stream)
            )
            _check("cuMemcpyHtoDAsync", code)

    def _submit_at_once(
        self, targets: NDArray[np.uint64], sources: NDArray[np.uint64], sizes: NDArray[np.uint64], stream: int
    ) -> int:
        assert self.form is not None
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        told = () if self.form.endswith("_v2") else (ctypes.byref(failed),)
        call = getattr(self._driver, self.form)
        return int(
            call(
                ctypes.c_void_p(targets.ctypes.data),
                ctypes.c_void_p(sources.ctypes.data),
                ctypes.c_void_p(sizes.ctypes.data),
                ctypes.c_size_t(len(sizes)),
                ctypes.byref(self._attributes),
                ctypes.byref(first),  # of the pieces with these attributes
                ctypes.c_size_t(1),
                *told,
                ctypes.c_void_p(stream),
            )
        )


def _check(name: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{name}: error {code}")


__all__ = ["INVALID_VALUE", "NOT_SUPPORTED", "Attributes", "CopyBatches"]
