"""Builds batches in a GPU's memory, by one of two paths.

    gather   The segment is pinned in place (device/pinned_memory.py). One Triton kernel reads the drawn rows from it
             (device/kernels/gather.py). The CPU copies nothing.
    staged   One native call draws and gathers into a pinned buffer. One asynchronous copy moves the buffer to the
             device. Works for any segment, pinned or not.

Both paths give the same batches. Each writes a batch into one buffer of device memory, its *arena*, on a side stream
and records an event at the end. The consumer's stream waits for this event; the consumer's thread does not.

Arenas come from torch's caching allocator and are recorded for the consumer's stream. The allocator reuses an arena
once the batch was dropped and the consumer's stream has finished with it.

| file | contents |
|---|---|
| `options` | arguments of `Replay(device=...)`: `DeviceOptions`, `Convert` |
| `session` | `DeviceSession`: a replay's device, stream and segments, their closing, and the handoff of batches |
| `target` | `DeviceTarget`: one store's segment, pinned or not, and its path |
| `transfer` | `Transfer`: one batch in flight; `ReadyBatch`: its end, and the consumer's stream |
| `arena_batch` | `ArenaBatch`: a batch whose tensors are views of its arena, created on first access |
| `copied_rows` | rows that copy engines read from the pinned segment |
| `staged_batches` | `StagedBatches`: a replay's batches in pinned host memory, sampled there |
| `staging` | `StagedTransfer`: rows in pinned host memory, fetched here or sent by other ranks |
| `pinned_pool` | `PinnedPool`: pinned buffers that are reused |
| `layout` | conversion, packing and scattering within device memory |
| `priority_mirror` | `DevicePriorities`: a store's priorities in device memory |
| `mirrors` | `Mirrors`: which stores' rows are drawn on the device |
| `device_rows` | `DeviceRows` |
| `fetch` | `geartrain.fetch(out=)` into tensors on a device |
"""

from geartrain.replay.device.options import Convert, DeviceOptions

__all__ = ["Convert", "DeviceOptions"]
