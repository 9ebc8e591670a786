"""All-reduces GPU tensors chunk by chunk through pinned host buffers, on two CUDA streams.

    caller's stream   ... grad kernels ... [ready]                            wait [result] | optimizer ...
    out stream                             wait [ready] | copy 0 [copied] | copy 1 [copied] | ...
    staging thread                                        host waits for [copied] -> all-reduce 0 -> ...
    result stream                                                 ... copy 0 [free] | copy 1 [free] ... [result]

The caller's thread records the event [ready] when it submits a tensor. No host thread waits for the caller's stream.
Each chunk has a slot, which is a pinned buffer with two events:

- [copied] is recorded when the chunk is in the buffer. Only the staging thread waits for it, never the caller.
- [free] is recorded when the result was copied out of the buffer. The out stream waits for it before the next copy into
  the buffer. The host does not wait.

[result] is recorded after the copy of the last chunk, and the caller's stream waits for it.

Deadlines. Every wait of the staging thread has the tensor's deadline, including the wait for [copied]. A device that
hangs is therefore an error, which ends the group. After an error of the device or of a chunk, no later tensor is copied
to the device.

Order. Each chunk is one operation of the group. Chunk sizes depend only on the tensor, so all ranks issue the same
operations in the same order. While one chunk is on the network, the next one is copied out, even if it belongs to the
next tensor.

tests/collectives/test_staging.py tests this order without a GPU. It simulates streams that run as late, or as early, as
their events allow.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from geartrain.core.lifetime import Lifetime
from geartrain.core.threads import DaemonThread, ReentrantEvent
from geartrain.device.device import Device
from geartrain.errors import ConnectionClosedError, WaitTimeoutError

CHUNK_BYTES = 4 << 20
DEPTH = 4  # chunks on the network at once
AHEAD = 2  # chunks being copied out beside them
TIMEOUT_S = 60.0
DRIVER_S = 10.0  # for the staging thread to return from the driver and the group after a deadline


class Reduction(Protocol):
    """An all-reduce in progress."""

    def wait(self, timeout_s: float | None = None) -> Any:
        """Returns when the buffer holds the result; raises a named error."""


# Starts an all-reduce of a host buffer, in place.
Reduce = Callable[[torch.Tensor], Reduction]


@dataclass
class StagedTensor:
    """One tensor in transfer. `error` and `result` may be read once `finished` is set."""

    flat: torch.Tensor
    reduce: Reduce
    after: Callable[[], None] | None
    ready: Any
    until_s: float
    result: Any = None
    error: BaseException | None = None
    finished: ReentrantEvent = field(default_factory=ReentrantEvent)
    chunks_left: int = 0

    def wait(self, timeout_s: float | None) -> None:
        """Returns when the last copy is queued on the device. Raises the error of a chunk, or `WaitTimeoutError`.

        Without a timeout it ends by the tensor's own deadline, and some seconds for a driver that does not return.
        """
        if timeout_s is None:
            timeout_s = max(self.until_s - time.monotonic(), 0.0) + DRIVER_S
        if not self.finished.wait(timeout_s):
            raise WaitTimeoutError(f"the all-reduce was not done within the {timeout_s:.3g} s of this wait")
        if self.error is not None:
            raise self.error


@dataclass
class _Slot:
    buffer: torch.Tensor
    copied: Any
    free: Any


@dataclass
class _Chunk:
    job: StagedTensor
    part: torch.Tensor  # of the tensor on the device
    slot: _Slot | None  # none, where the tensor had failed before
    host: torch.Tensor | None  # of the slot's buffer
    reduction: Reduction | None = None


class Staging(Lifetime, error=ConnectionClosedError, elsewhere="each process group makes its own"):
    """Copies tensors of one device to the group and back, in the order they are submitted.

    Args:
        device: of the tensors.
        abort: ends the group, with a reason: after a chunk failed here, ranks would disagree on the next operation.
        chunk_bytes, depth: bytes of an operation, and how many are on the network at once; the same on all ranks.
    """

    def __init__(
        self,
        device: Device,
        abort: Callable[[str], None],
        *,
        chunk_bytes: int = CHUNK_BYTES,
        depth: int = DEPTH,
    ) -> None:
        super().__init__("the process group")
        self._device = device
        self._abort = abort
        self._chunk_bytes = chunk_bytes
        self._depth = depth
        self._out, self._back = device.new_stream(), device.new_stream()
        self._slots: deque[_Slot] = deque()
        self._slots_made = 0
        self._copying: deque[_Chunk] = deque()
        self._reducing: deque[_Chunk] = deque()
        self._jobs: queue.SimpleQueue[StagedTensor | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a signal's handler may close in between
        self._broken: BaseException | None = None
        self._thread = DaemonThread(self._run, "geartrain-staging")
        self._thread.start()

    def submit(
        self,
        flat: torch.Tensor,
        reduce: Reduce,
        after: Callable[[], None] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> StagedTensor:
        """Queues an all-reduce of a contiguous tensor of the device, in place; returns at once.

        Args:
            flat: as the caller's current stream will leave it.
            reduce: called by the staging thread with one chunk after the other.
            after: more device work once the result is in `flat`, on the stream that `join` waits for.
            timeout_s: deadline of the whole, from now.
        """
        ready = self._device.record(self._device.new_event())
        self.record_streams(flat)
        job = StagedTensor(flat.view(-1), reduce, after, ready, time.monotonic() + timeout_s)
        with self._lock:
            self._check_open()
            self._jobs.put(job)
            self._check_open()  # closed by a signal handler, the thread may have ended before it comes to this one
        return job

    def record_streams(self, tensor: torch.Tensor) -> None:
        """Marks a tensor as used by the streams of this class, so that its memory is not reused before that is over."""
        for stream in (self._out, self._back):
            with self._device.on(stream):
                self._device.record_stream(tensor)

    def join(self, job: StagedTensor) -> None:
        """Makes the caller's current stream wait for the result of a finished job."""
        self._device.wait(job.result)

    def on_result_stream(self) -> AbstractContextManager[Any]:
        """A context whose device work is queued behind the results."""
        return self._device.on(self._back)

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after the jobs it has; close the group first to make these fail."""
        if self._forked:  # the child has no such thread, and perhaps a lock that is held for ever
            return
        with self._lock:
            if not self._end():
                return
            self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        self._device.enter()
        while True:
            job = self._next()
            if job is None:
                break
            for part in self._parts(job):
                self._begin_chunk(job, part)
                self._send(leave=AHEAD)
        self._drain()

    def _next(self) -> StagedTensor | None:
        """The next job. While there is none, it advances the chunks in transfer."""
        while self._copying or self._reducing:
            with contextlib.suppress(queue.Empty):
                return self._jobs.get_nowait()
            self._step()
        return self._jobs.get()

    def _parts(self, job: StagedTensor) -> list[torch.Tensor]:
        per_chunk = max(1, self._chunk_bytes // job.flat.element_size())
        parts = list(job.flat.split(per_chunk))  # type: ignore[no-untyped-call]
        job.chunks_left = len(parts)
        return parts

    def _begin_chunk(self, job: StagedTensor, part: torch.Tensor) -> None:
        """Queues the copy of a chunk into a slot that may still be read: the stream waits for it, not the host."""
        slot = host = None
        try:
            if (job.error or self._broken) is None:
                slot = self._free_slot()  # may wait for chunks before, and find them failed
            job.error = job.error or self._broken
            if slot is not None and job.error is None:
                host = slot.buffer[: part.nbytes].view(part.dtype)
                with self._device.on(self._out):
                    self._device.wait(job.ready)
                    self._device.wait(slot.free)
                    self._device.copy(host, part)
                    self._device.record(slot.copied)
        except Exception as error:
            self._fail(job, error)
        self._copying.append(_Chunk(job, part, slot, host))

    def _free_slot(self) -> _Slot:
        while not self._slots:
            if self._slots_made < self._depth + AHEAD:
                self._slots_made += 1
                new_event = self._device.new_event
                slot = _Slot(self._device.pinned(self._chunk_bytes), new_event(), new_event())
                with self._device.on(self._back):
                    self._device.record(slot.free)
                return slot
            self._step()
        return self._slots.popleft()

    def _step(self) -> None:
        """Moves the oldest chunk on."""
        if self._reducing and (len(self._reducing) >= self._depth or not self._copying):
            self._finish(self._reducing.popleft())
        else:
            self._send(leave=len(self._copying) - 1)

    def _send(self, leave: int) -> None:
        """Starts the all-reduce of the oldest chunks, as far as they have been copied out."""
        while len(self._copying) > leave:
            if len(self._reducing) >= self._depth:
                self._finish(self._reducing.popleft())
            chunk = self._copying.popleft()
            chunk.job.error = chunk.job.error or self._broken
            try:
                if chunk.job.error is None and chunk.slot is not None and chunk.host is not None:
                    self._device.sync(chunk.slot.copied, max(chunk.job.until_s - time.monotonic(), 0.0))
                    chunk.reduction = chunk.job.reduce(chunk.host)
            except Exception as error:
                self._fail(chunk.job, error)
            self._reducing.append(chunk)

    def _finish(self, chunk: _Chunk) -> None:
        """Waits for a chunk's result and queues its copy back."""
        job, slot = chunk.job, chunk.slot
        try:
            if chunk.reduction is not None:
                chunk.reduction.wait()  # also after an error: until then the group uses the buffer
            if job.error is None and slot is not None and chunk.host is not None:
                with self._device.on(self._back):
                    self._device.copy(chunk.part, chunk.host)
                    self._device.record(slot.free)
        except Exception as error:
            self._fail(job, error)
        if slot is not None:
            self._slots.append(slot)
        job.chunks_left -= 1
        if job.chunks_left == 0:
            self._complete(job)

    def _complete(self, job: StagedTensor) -> None:
        try:
            if job.error is None:
                with self._device.on(self._back):
                    if job.after is not None:
                        job.after()
                    job.result = self._device.record(self._device.new_event())
        except Exception as error:
            self._fail(job, error)
        job.finished.set()

    def _fail(self, job: StagedTensor, error: Exception) -> None:
        if job.error is None:
            job.error = error
        if self._broken is None:
            self._broken = error
            self._abort(f"{type(error).__name__}: {error}")

    def _drain(self) -> None:
        while self._copying or self._reducing:
            self._step()
