"""Store server of a job: serves the store of a learners' host to the processes of hosts that have none."""

from __future__ import annotations

import time

from geartrain.actors.store_server import StoreServer
from geartrain.launch.context import REMOTE_STORE_S, Context
from geartrain.store.store import Store

#: Between heartbeats.
_BEAT_S = 0.1


def serve(context: Context) -> None:
    """What the processes of the role "store" run, until the job ends (placed_role.py).

    Reports the rows that the store has taken in, by whomever.

    Raises:
        WaitTimeoutError: the learners of this host have created no store.
    """
    store = context.store(timeout_s=REMOTE_STORE_S)
    assert isinstance(store, Store)  # it runs where learners do
    store.limiter.stopping = lambda: context.stopping  # there may be no learner left to sample what holds an insert up
    with store, StoreServer(context.node(), store, context.job):
        while not context.stopping:
            context.report(rows=store.stats()["inserted"])
            time.sleep(_BEAT_S)


__all__ = ["serve"]
