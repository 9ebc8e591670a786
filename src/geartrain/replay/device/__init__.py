"""Batches that land in a GPU's memory: gathered by the GPU itself, or staged through pinned host memory.

Two paths, the same batches:

    gather   the segment is pinned where it is (pinning.py) and one Triton kernel reads the chosen rows out of it
             (kernels/gather_rows.py). The CPU touches no row.
    staged   native threads gather into a pinned buffer (fetch.py), and one asynchronous copy takes it to the device.
             Works for any segment, pinned or not.

Either runs on a stream of its own, into one buffer of device memory a batch (an *arena*), with an event at its end. The
consumer's stream waits for the event; its host does not wait. The arena comes from torch's allocator and is lent to the
consumer's stream, so that its memory is used again once the batch was dropped and what the consumer had given its
stream by then is done.

| file | one idea |
|---|---|
| `options` | what `Replay(device=...)` is told: `DeviceOptions`, `Convert` |
| `crossover` | up to which size of rows the GPU's own gather is taken |
| `place` | `DeviceTarget`: one plan's segment, pinned or not, and which path it takes |
| `transfer` | `BatchTransfer`: one batch on its way; `ReadyBatch`; `StreamHandoff`: to the consumer's stream |
| `stage` | `StagingBuffer`: a batch as the CPU makes it, in pinned memory |
| `arrange` | conversion, packing and scattering within device memory |
| `pool` | pinned buffers, used again |
"""

from geartrain.replay.device.gather_threshold import CROSSOVER_BYTES
from geartrain.replay.device.layout import arrangement, scatter_lines
from geartrain.replay.device.options import Convert, DeviceOptions
from geartrain.replay.device.pinned_pool import PinnedPool
from geartrain.replay.device.session import DeviceSession
from geartrain.replay.device.staging import StagingBuffer
from geartrain.replay.device.target import DeviceTarget, gather_plan_of
from geartrain.replay.device.transfer import MOST_UNCONSUMED, BatchTransfer, ReadyBatch, StreamHandoff

__all__ = [
    "CROSSOVER_BYTES",
    "MOST_UNCONSUMED",
    "PinnedPool",
    "Convert",
    "BatchTransfer",
    "StreamHandoff",
    "ReadyBatch",
    "DeviceSession",
    "DeviceTarget",
    "DeviceOptions",
    "StagingBuffer",
    "arrangement",
    "gather_plan_of",
    "scatter_lines",
]
