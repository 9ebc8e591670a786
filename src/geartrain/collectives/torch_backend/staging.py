"""All-reduce of tensors in a GPU's memory: chunk by chunk through pinned buffers, on streams of its own.

    caller's stream   ... grad kernels ... [ready]                            wait [back] | optimizer ...
    out stream                             wait [ready] | copy 0 [copied] | copy 1 [copied] | ...
    this thread                                           host waits for [copied] -> all-reduce 0 -> ...
    back stream                                                   ... copy 0 [free] | copy 1 [free] ... [back]

Each chunk has a slot: a pinned buffer with two events. [copied] says the chunk is in the buffer; only this thread waits
for it, never the caller. [free] says the buffer was read out again; the next copy into it waits for that on the out
stream, the host does not. The caller's thread records one event when it submits, and nothing on its stream is waited
for by any host thread. Its stream waits for [back], which is recorded after the last chunk's copy.

A chunk is an operation of the group: sizes depend on the tensor alone, so that all ranks make the same ones in the same
order. The next chunk is copied out while one is on the network, also from one tensor to the next.

Streams and events are taken from `streams`, so that the order of all this is tested without a GPU
(tests/collectives/test_staging.py), on streams that do their work as late, or as early, as their events allow.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from geartrain.errors import ConnectionClosedError, WaitTimeoutError

CHUNK_BYTES = 4 << 20
DEPTH = 4  # chunks on the network at once
AHEAD = 2  # chunks being copied out beside them


class Streams(Protocol):
    """Of one device: as torch.cuda has them."""

    def current(self) -> Any:
        """The calling thread's current stream."""

    def stream(self) -> Any:
        """A new stream."""

    def event(self) -> Any:
        """A new event: `record(stream)`, `synchronize()`."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Work of this thread goes to the stream."""

    def pinned(self, count: int) -> torch.Tensor:
        """Bytes of the host that the device copies from and to by itself."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy on this thread's current stream."""

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """The tensor's memory is not given to anybody else before what is on the stream now has run."""


class CudaStreams:
    """The real ones."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> Any:
        """Of the calling thread."""
        return torch.cuda.current_stream(self.device)

    def stream(self) -> Any:
        """One more."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def event(self) -> Any:
        """Without timing."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Switches the device as well."""
        return torch.cuda.stream(stream)

    def pinned(self, count: int) -> torch.Tensor:
        """Page-locked by CUDA."""
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Asynchronous where one side is pinned."""
        to.copy_(source, non_blocking=True)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Told to CUDA's caching allocator."""
        tensor.record_stream(stream)


class Reduction(Protocol):
    """What the group returns for an operation."""

    def wait(self, timeout_s: float | None = None) -> Any:
        """Returns when the buffer holds the result; raises a named error."""


# Starts an all-reduce of a buffer of the host, in place.
Reduce = Callable[[torch.Tensor], Reduction]


@dataclass
class Staged:
    """One tensor on its way. `error` and `back` may be read once `finished` is set."""

    flat: torch.Tensor
    reduce: Reduce
    after: Callable[[], None] | None
    ready: Any
    back: Any = None
    error: BaseException | None = None
    finished: threading.Event = field(default_factory=threading.Event)
    chunks_left: int = 0

    def wait(self, timeout_s: float | None) -> None:
        """Until the last copy was queued on the device. Raises what went wrong, or `WaitTimeoutError`."""
        if not self.finished.wait(timeout_s):
            raise WaitTimeoutError(f"the all-reduce was not done within the {timeout_s} s of this wait")
        if self.error is not None:
            raise self.error


@dataclass
class _Slot:
    buffer: torch.Tensor
    copied: Any
    free: Any


@dataclass
class _Chunk:
    job: Staged
    part: torch.Tensor  # of the device's tensor
    slot: _Slot
    host: torch.Tensor  # of the slot's buffer
    reduction: Reduction | None = None


class Staging:
    """Moves tensors of one device to the group and back, in the order they are submitted.

    Args:
        streams: of the device.
        abort: ends the group, with a reason: after a chunk failed here the ranks would no longer agree on what is next.
        chunk_bytes, depth: bytes of an operation, and how many are on the network at once; the same on all ranks.
    """

    def __init__(
        self,
        streams: Streams,
        abort: Callable[[str], None],
        *,
        chunk_bytes: int = CHUNK_BYTES,
        depth: int = DEPTH,
    ) -> None:
        self.streams = streams
        self._abort = abort
        self._chunk_bytes = chunk_bytes
        self._depth = depth
        self._out, self._back = streams.stream(), streams.stream()
        self._slots: deque[_Slot] = deque()
        self._slots_made = 0
        self._copying: deque[_Chunk] = deque()
        self._reducing: deque[_Chunk] = deque()
        self._jobs: queue.SimpleQueue[Staged | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="geartrain-staging", daemon=True)
        self._thread.start()

    def submit(self, flat: torch.Tensor, reduce: Reduce, after: Callable[[], None] | None = None) -> Staged:
        """Queues an all-reduce of a contiguous tensor of the device, in place; returns at once.

        Args:
            flat: as the caller's current stream will leave it.
            reduce: called by the staging thread with one chunk after the other.
            after: more work for the device once the result is in `flat`, on the stream that `wait` joins.
        """
        ready = self.streams.event()
        ready.record(self.streams.current())
        self.keep(flat)
        job = Staged(flat.view(-1), reduce, after, ready)
        with self._lock:
            if self._closed:
                raise ConnectionClosedError("the process group was closed")
            self._jobs.put(job)
        return job

    def keep(self, tensor: torch.Tensor) -> None:
        """The tensor's memory stays its own until what is done with it here has been done."""
        for stream in (self._out, self._back):
            self.streams.keep(tensor, stream)

    def join(self, job: Staged) -> None:
        """The caller's current stream goes on when the result is there. For a finished job."""
        self.streams.current().wait_event(job.back)

    def on_back(self) -> AbstractContextManager[Any]:
        """What is done or recorded here comes after the results."""
        return self.streams.on(self._back)

    def close(self, timeout_s: float) -> None:
        """Ends the thread after the jobs it has; close the group first if they are not to be waited for."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            job = self._next()
            if job is None:
                break
            for part in self._parts(job):
                self._begin(job, part)
                self._send(leave=AHEAD)
        self._drain()

    def _next(self) -> Staged | None:
        """The next job; what is under way is brought forward as long as there is none."""
        while self._copying or self._reducing:
            with contextlib.suppress(queue.Empty):
                return self._jobs.get_nowait()
            self._step()
        return self._jobs.get()

    def _parts(self, job: Staged) -> list[torch.Tensor]:
        per_chunk = max(1, self._chunk_bytes // job.flat.element_size())
        parts = list(job.flat.split(per_chunk))  # type: ignore[no-untyped-call]
        job.chunks_left = len(parts)
        return parts

    def _begin(self, job: Staged, part: torch.Tensor) -> None:
        """Copies a chunk out, into a slot that may still be being read: the stream waits, not the host."""
        slot = self._free_slot()
        host = slot.buffer[: part.nbytes].view(part.dtype)
        try:
            if job.error is None:
                with self.streams.on(self._out):
                    self._out.wait_event(job.ready)
                    self._out.wait_event(slot.free)
                    self.streams.copy(host, part)
                slot.copied.record(self._out)
        except Exception as error:
            self._fail(job, error)
        self._copying.append(_Chunk(job, part, slot, host))

    def _free_slot(self) -> _Slot:
        while not self._slots:
            if self._slots_made < self._depth + AHEAD:
                self._slots_made += 1
                event = self.streams.event
                slot = _Slot(self.streams.pinned(self._chunk_bytes), event(), event())
                slot.free.record(self._back)
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
            try:
                if chunk.job.error is None:
                    chunk.slot.copied.synchronize()
                    chunk.reduction = chunk.job.reduce(chunk.host)
            except Exception as error:
                self._fail(chunk.job, error)
            self._reducing.append(chunk)

    def _finish(self, chunk: _Chunk) -> None:
        """Waits for a chunk's result and copies it back."""
        job, slot = chunk.job, chunk.slot
        try:
            if chunk.reduction is not None:
                chunk.reduction.wait()  # also after an error: the buffer is the group's until then
            if job.error is None:
                with self.streams.on(self._back):
                    self.streams.copy(chunk.part, chunk.host)
                slot.free.record(self._back)
        except Exception as error:
            self._fail(job, error)
        self._slots.append(slot)
        job.chunks_left -= 1
        if job.chunks_left == 0:
            self._complete(job)

    def _complete(self, job: Staged) -> None:
        try:
            if job.error is None:
                if job.after is not None:
                    with self.streams.on(self._back):
                        job.after()
                job.back = self.streams.event()
                job.back.record(self._back)
        except Exception as error:
            self._fail(job, error)
        job.finished.set()

    def _fail(self, job: Staged, error: Exception) -> None:
        if job.error is None:
            job.error = error
            self._abort(f"{type(error).__name__}: {error}")

    def _drain(self) -> None:
        while self._copying or self._reducing:
            self._step()
