"""Distribution of model weights: numbered versions from one trainer to every process that acts with them.

    publisher = weights.Publisher("policy", node=node)         # in the trainer; node: geartrain.rpc's, for other hosts
    publisher.publish(7, model.state_dict())

    reader = weights.Reader("policy", node=node, source="trainer")   # in each actor, on whichever host
    snapshot = reader.latest(at_least=7, timeout_s=30)
    model.load_state_dict(snapshot)                            # or assign=True: nothing is copied
    store.row(version=snapshot.version)

Within a host a version is stored once, in shared memory, and every reader maps it: the tensors of a snapshot are views.
They are read-only. torch raises `RuntimeError` on a write (they are inference tensors), NumPy `ValueError`. A write
that gets around this changes only this snapshot, because the mapping is private.

A snapshot has one complete version. It does not change while it, or any tensor of it, is alive. The publisher has a few
buffers and writes to one that no reader holds. If all are held it waits, and raises `BuffersHeldError` at its deadline.

Across hosts, one process of each host is the relay: it fetches a new version and publishes it to the others (relay.py).
Whether the publisher is on the same host is found out by its shared memory, not by names.

A publisher that is killed in the middle of a version leaves the previous one. When it is restarted, it continues with
the same memory. A killed reader holds nothing. The last process that detaches removes the segment; `reap()` removes
segments whose processes were all killed. `names()` and `describe(name)` read without attaching, as `geartrain inspect`
does.
"""

from geartrain.errors import BuffersHeldError
from geartrain.weights.publisher import Publisher
from geartrain.weights.reader import Reader, Snapshot
from geartrain.weights.segment import WeightsInfo, describe, names, reap, unlink

__all__ = [
    "BuffersHeldError",
    "Publisher",
    "Reader",
    "Snapshot",
    "WeightsInfo",
    "describe",
    "names",
    "reap",
    "unlink",
]
