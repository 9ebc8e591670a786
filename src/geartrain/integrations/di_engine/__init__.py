"""Message queue for DI-engine: carries its events, contexts and models over geartrain's transports instead of nng.

    import geartrain.integrations.di_engine                                 # in the module of your main
    Parallel.runner(n_parallel_workers=3, mq_type="geartrain")(main)

`geartrain-ditask ... --mq-type geartrain` instead of `ditask` needs no import. Importing this package registers the
queue with DI-engine (`install`). If DI-engine is not installed, the import does nothing. docs/di-engine.md is the
manual.

The files:

- `options`: options of the queue
- `discovery`: addresses of nodes
- `bus`: events; independent of DI-engine
- `membership`: the bus's peers
- `peer_queue`: events in flight to one peer
- `message_queue`: the methods of DI-engine that are replaced
- `ditask`: the command line
"""

from __future__ import annotations

import importlib.util

from geartrain.integrations.di_engine.bus import Bus
from geartrain.integrations.di_engine.message_queue import PEER_JOINED, PEER_LOST, Queue, install
from geartrain.integrations.di_engine.options import MQ_TYPES
from geartrain.integrations.di_engine.peer_queue import Window

if importlib.util.find_spec("ding") is not None:
    install()

__all__ = ["MQ_TYPES", "PEER_JOINED", "PEER_LOST", "Bus", "Queue", "Window", "install"]
