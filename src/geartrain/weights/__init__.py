"""Distribution of model weights: numbered versions from one trainer to every process that acts with them.

    publisher = weights.Publisher("policy", node=node)         # in the trainer; node: geartrain.rpc's, for other hosts
    publisher.publish(7, model.state_dict())

    reader = weights.Reader("policy", node=node, source="trainer")   # in each actor, on whichever host
    snapshot = reader.latest(at_least=7, timeout_s=30)
    model.load_state_dict(snapshot)                            # or assign=True: nothing is copied
    store.row(version=snapshot.version)

Within a host a version is stored once, in shared memory (format.py draws the bytes), and readers map it: the tensors of
a snapshot are views, without a copy per reader. They are read-only: torch raises `RuntimeError` (they are inference
tensors), NumPy `ValueError`, and a write that gets around that changes pages of this snapshot alone, for the mapping
is private.

A snapshot has one complete version, and does not change for as long as it, or any tensor of it, is alive. The publisher
has a few buffers and writes to one that no reader holds; when all are held it waits, and at its deadline raises
`BuffersHeldError`.

Across hosts, one process of each host is the relay, which fetches a new version and publishes it to the others
(relay.py). Whether the publisher is on the same host is detected by its shared memory, not by names.

A publisher that is killed in the middle leaves the previous version; one that is started again continues with the same
memory. A killed reader holds nothing. The last process that detaches removes the segment; `reap()` removes those whose
processes were all killed. `names()` and `describe(name)` read without attaching, as `geartrain inspect` does.
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
