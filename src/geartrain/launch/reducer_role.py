"""The role "reducers" of a job: a process that owns shares of the learners' all-reduces, on any host."""

from __future__ import annotations

import os
import time

from geartrain.collectives.reducer import Reducer
from geartrain.launch.context import REDUCER_KEY, Context

#: Period of heartbeats.
_BEAT_S = 0.1


def reduce(context: Context, window_bytes: int = 16 << 20, threads: int = 1) -> None:
    """Function that the processes of `launch.reducers` run, until the job ends.

    It publishes the reducer's address in the job's name service, once for each thread. The learners' launchers read it
    there. It reports operations as steps, and GB received and ranks connected as metrics.
    """
    bind = "127.0.0.1:0" if context.hosts == 1 else "0.0.0.0:0"
    secret = os.environ.get("GEARTRAIN_SECRET", "").encode() or None
    with Reducer(bind, secret=secret, max_window_bytes=window_bytes, threads=threads) as reducer:
        port = reducer.address.rpartition(":")[2]
        addresses = ",".join([f"{context.address}:{port}"] * threads)
        context.node().directory.store.set(REDUCER_KEY + context.name, addresses)
        print(f"reducer listening on {addresses}", flush=True)
        while not context.stopping:
            seen = reducer.metrics()
            context.report(steps=seen["operations"], received_gb=seen["bytes_received"] / 1e9, ranks=seen["ranks"])
            time.sleep(_BEAT_S)


__all__ = ["reduce"]
