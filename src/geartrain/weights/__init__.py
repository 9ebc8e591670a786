"""Distribution of model weights: one trainer publishes numbered versions, and any number of processes read them.

    publisher = weights.Publisher("policy", node=node)         # in the trainer; node: geartrain.rpc's, for other hosts
    publisher.publish(7, model.state_dict())

    reader = weights.Reader("policy", node=node, source="trainer")   # in each actor, on whichever host
    snapshot = reader.latest(at_least=7, timeout_s=30)
    model.load_state_dict(snapshot)                            # or assign=True: nothing is copied
    store.row(version=snapshot.version)

Within a host. A version is stored once, in shared memory, and every reader maps it. The tensors of a snapshot are
read-only views of this memory. On a write, torch raises `RuntimeError` (they are inference tensors) and NumPy raises
`ValueError`. The mapping is private, so a write that gets around this changes only this snapshot.

Snapshots. A snapshot has one complete version. It does not change while the snapshot, or any tensor of it, is alive.
The publisher has a few buffers, and writes to one that no reader holds. If readers hold all buffers, the publisher
waits. At its deadline it raises `BuffersHeldError`.

Across hosts. One process of each host is the relay. It fetches a new version and publishes it to the others on its
host (relay.py). A reader detects a publisher on its own host by its shared memory, not by host names.

Crashes. If the publisher is killed in the middle of a version, the previous version stays. A restarted publisher
continues with the same memory. A killed reader holds no buffers. The last process that detaches removes the segment.
`reap()` removes segments whose processes were all killed.

`names()` and `describe(name)` read without attaching. `geartrain inspect` uses them.
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
