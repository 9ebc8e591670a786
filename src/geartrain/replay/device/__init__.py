"""Batches in a GPU's memory: gathered by the GPU from pinned segments, or staged through pinned buffers.

Two paths, the same batches:

    gather   the segment is pinned where it is (device/pinned_memory.py) and one Triton kernel reads the drawn rows from
             it (device/kernels/gather.py). The CPU copies nothing.
    staged   one native call draws and gathers into a pinned buffer, and one asynchronous copy takes it to the device.
             Works for any segment, pinned or not.

Either runs on a stream of its own, into one buffer of device memory a batch (an *arena*), with an event at its end. The
consumer's stream waits for the event; its host does not wait. The arena comes from torch's allocator and is recorded
for the consumer's stream: its memory is reused once the batch was dropped and that stream is done with it.

| file | contents |
|---|---|
| `options` | arguments of `Replay(device=...)`: `DeviceOptions`, `Convert` |
| `gather_threshold` | the largest rows that the GPU gathers by itself |
| `session` | `DeviceSession`: a replay's device, stream and segments, and their closing |
| `target` | `DeviceTarget`: one store's segment, pinned or not, and its path |
| `transfer` | `BatchTransfer`: one batch in flight; `ReadyBatch`; `StreamHandoff` to the consumer's stream |
| `arena_batch` | `ArenaBatch`: a batch whose tensors are cut from its arena when they are asked for |
| `staged_batches` | `StagedBatches`: a replay's batches in pinned host memory, sampled there |
| `staging` | `StagingBuffer`: rows that were fetched, or sent by ranks, in pinned host memory |
| `pinned_pool` | `PinnedPool`: pinned buffers that are reused |
| `layout` | conversion, packing and scattering within device memory |
| `priority_mirror` | `DevicePriorities`: a store's priorities in device memory |
| `mirrors` | `Mirrors`: which stores' rows are drawn on the device |
| `builder` | `DeviceBatchBuilder` |
| `fetch` | `geartrain.fetch(out=)` into tensors on a device |
"""

from geartrain.replay.device.options import Convert, DeviceOptions

__all__ = ["Convert", "DeviceOptions"]
