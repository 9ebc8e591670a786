"""One MPI rank of `geartrain bench allreduce`, in an environment of its own with mpi4py; geartrain is not needed there.

    mpiexec -n 4 python mpi_worker.py '{"file": PATH, "baidu": null, "cases": [[nbytes, calls, rounds, warm], ...]}'

Rank 0 prints one JSON line: {"versions": {...}, "seconds": {"nbytes": [[...] of each rank], ...}}. With `baidu`, a
shared library of baidu-allreduce that was built against the same MPI is measured.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

import numpy as np

try:
    from geartrain_bench.allreduce.rounds import Array, RoundBarrier, raise_priority, timed_rounds
except ImportError:  # where geartrain is not installed, the module is found in this script's folder
    from rounds import Array, RoundBarrier, raise_priority, timed_rounds  # type: ignore[import-not-found,no-redef]


def _baidu(path: str) -> Any:
    """RingAllreduce of a library: it allocates its result, which is freed at the next call."""
    library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    # The C++ names of InitCollectives(int) and RingAllreduce(float*, size_t, float**).
    library._Z15InitCollectivesi(ctypes.c_int(-1))
    call = library._Z13RingAllreducePfmPS_
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)]
    call.restype = None
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    kept: list[ctypes.c_void_p] = []

    def all_reduce(array: Array) -> Array:
        while len(kept) > 64:  # more than a round has calls
            free(kept.pop(0))
        out = ctypes.c_void_p()
        call(array.ctypes.data, array.size, ctypes.byref(out))
        kept.append(out)
        found: Array = np.ctypeslib.as_array(ctypes.cast(out, ctypes.POINTER(ctypes.c_float)), (array.size,))
        return found

    return all_reduce


def main(asked: dict[str, Any]) -> None:
    """All cases, one after the other."""
    import mpi4py

    raise_priority()
    mpi4py.rc.initialize = asked["baidu"] is None  # baidu's library starts MPI itself
    all_reduce = None if asked["baidu"] is None else _baidu(asked["baidu"])
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    if all_reduce is None:

        def all_reduce(array: Array) -> None:
            world.Allreduce(MPI.IN_PLACE, array)

    barrier = RoundBarrier(asked["file"], size, rank)
    seconds = {}
    for nbytes, calls, rounds, warm in asked["cases"]:
        mine = timed_rounds(
            all_reduce, barrier=barrier, rank=rank, size=size, nbytes=nbytes, calls=calls, rounds=rounds, warm=warm
        )
        seconds[nbytes] = world.gather(mine)
    if rank == 0:
        said = MPI.Get_library_version().split("\n")[0].split(",")[0].replace("\t", " ").strip("\0 ")
        versions = {"mpi4py": mpi4py.__version__, "library": " ".join(said.split())}
        sys.stdout.write("RESULT " + json.dumps({"versions": versions, "seconds": seconds}) + "\n")
        sys.stdout.flush()
    world.Barrier()
    if asked["baidu"] is not None:
        os._exit(0)  # MPI was not started by mpi4py, which therefore does not finalize it


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
