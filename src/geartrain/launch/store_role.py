"""Store server of a job: serves the store of a learners' host to processes on hosts without a store."""

from __future__ import annotations

import contextlib
import time

from geartrain.actors.store_server import StoreServer
from geartrain.errors import WaitTimeoutError
from geartrain.launch.context import Context
from geartrain.store.store import Store

#: Period of heartbeats.
_BEAT_S = 0.1


def serve(context: Context) -> None:
    """Function that the processes of the role "store" run, until the job ends (placed_role.py).

    It waits until the learners of this host have created the store. Processes that need the store have timeouts of
    their own. It reports the rows that all processes have inserted into the store.
    """
    store = None
    while store is None:
        with contextlib.suppress(WaitTimeoutError):
            store = context.store()
    assert isinstance(store, Store)  # it runs where learners do
    store.limiter.stopping = lambda: context.stopping  # there may be no learner left to sample what holds an insert up
    with store, StoreServer(context.node(), store, context.job):
        while not context.stopping:
            context.report(rows=store.stats()["inserted"])
            time.sleep(_BEAT_S)


__all__ = ["serve"]
