"""Weights with version numbers, from one trainer to every process that acts with them.

    publisher = weights.Publisher("policy", node=node)         # in the trainer; node: geartrain.rpc's, for other hosts
    publisher.publish(7, model.state_dict())

    reader = weights.Reader("policy", node=node, source="trainer")   # in each actor, on whichever host
    snapshot = reader.latest(at_least=7, timeout_s=30)
    model.load_state_dict(snapshot)                            # or assign=True: nothing is copied
    store.row(version=snapshot.version)

Within a host a version stands once, in shared memory (segment.py draws the bytes), and readers map it: the tensors of
a snapshot are views, without a copy per reader. They are not to be written to: torch raises `RuntimeError` (they are
inference tensors), NumPy `ValueError`, and whoever gets around that changes pages of this snapshot alone, for the
mapping is private.

A snapshot is of one version, whole, and stays as it is for as long as it, or any tensor of it, is alive. The publisher
has a few buffers and writes to one that nobody holds; when all are held it waits, and gives up with
`BuffersHeldError`.

Across hosts, one process of each host fetches a new version and publishes it there to all others (relay.py). That the
publisher is on the same host is found by looking at its shared memory, not at names.

A publisher that is killed in the middle leaves the version before; one that is started again carries on with the same
memory. A killed reader holds nothing. The last process that leaves removes the segment; `reap()` those of jobs of
which every process was killed. `names()` and `describe(name)` look from outside, as `geartrain inspect` does.
"""

from geartrain.errors import BuffersHeldError
from geartrain.weights.publisher import Publisher
from geartrain.weights.reader import Reader, Snapshot
from geartrain.weights.segment import Described, describe, names, reap, unlink

__all__ = [
    "BuffersHeldError",
    "Described",
    "Publisher",
    "Reader",
    "Snapshot",
    "describe",
    "names",
    "reap",
    "unlink",
]
