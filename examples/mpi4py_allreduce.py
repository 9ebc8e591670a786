"""Inside an MPI program: geartrain's all-reduce beside MPI's own, on the same arrays.

    pip install mpi4py mpich
    mpiexec -n 4 python examples/mpi4py_allreduce.py

MPI starts the ranks and tells them where rank 0 keeps the key-value store in which they find each other; geartrain does
the rest over its own connections, and MPI goes on to work as before. Integers come out as MPI has them. Floats may not:
geartrain adds in the order of ranks, so its sums are those of one loop, with any number of ranks and reducers
(GEARTRAIN_REDUCERS=host:port,...).
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from datetime import timedelta
from multiprocessing.managers import BaseManager

import numpy as np
from mpi4py import MPI

from geartrain.collectives import Group


class Served(BaseManager):
    """A dictionary of rank 0's that all reach."""


class Store:
    """What a Group asks of a store."""

    def __init__(self, comm: MPI.Comm) -> None:
        where = None
        if comm.rank == 0:
            values: dict[str, bytes] = {}
            Served.register("values", callable=lambda: values)
            key = secrets.token_bytes(32)
            self.manager = Served((socket.gethostbyname(socket.gethostname()), 0), authkey=key)
            self.manager.start()
            where = (self.manager.address, key)
        address, key = comm.bcast(where)
        if comm.rank > 0:
            Served.register("values")
            self.manager = Served(address, authkey=key)
            self.manager.connect()
        self.values = self.manager.values()

    def set(self, key: str, value: str | bytes) -> None:
        self.values.update({key: value})

    def get(self, key: str) -> str | bytes:
        return self.values.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(self.values.get(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        until = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > until:
                raise RuntimeError(f"{keys} are not there")
            time.sleep(0.005)


def main() -> None:
    comm = MPI.COMM_WORLD
    store = Store(comm)
    reducers = tuple(filter(None, os.environ.get("GEARTRAIN_REDUCERS", "").split(",")))
    with Group(comm.rank, comm.size, store=store, name="mpi", reducers=reducers) as group:
        for count in (1, 1_000, 1_000_000):
            whole = np.arange(count, dtype=np.int64) * (comm.rank + 1)
            of_mpi = np.empty_like(whole)
            comm.Allreduce(whole, of_mpi)
            assert (group.all_reduce(whole) == of_mpi).all()

            parts = np.random.default_rng(comm.rank).normal(size=count).astype(np.float32)
            everybodys = np.array(comm.allgather(parts))
            by_loop = everybodys[0].copy()
            for one in everybodys[1:]:
                by_loop += one
            assert (group.all_reduce(parts) == by_loop).all(), "not the sum in the order of ranks"
        comm.Barrier()
        if comm.rank == 0:
            print(f"{comm.size} ranks: integers as MPI's, floats as one loop's", flush=True)


if __name__ == "__main__":
    main()
