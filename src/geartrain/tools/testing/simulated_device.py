"""Simulated device: an accelerator on the CPU with asynchronous streams, for tests of stream ordering.

By default, work on a stream runs only when a host thread waits for it. By chance it may run earlier, with streams in
random order. That is later than on any GPU, so a missing wait shows as wrong bytes.

The next allocation on the same stream reuses freed device memory at once, unless another stream still uses it. torch's
allocator may do the same; this device always does.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.threads import DaemonThread
from geartrain.errors import PinError, WaitTimeoutError

_POLL_S = 1e-4


class Mark:
    """A point in a stream's work, recorded by an event."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._reached = False

    @property
    def reached(self) -> bool:
        """Whether the stream has reached it."""
        return self._reached

    def reach(self) -> None:
        """Marks it as reached."""
        self._reached = True


class Event:
    """As in CUDA: a wait refers to the work recorded at the time of the call."""

    def __init__(self) -> None:
        self.mark: Mark | None = None

    def record(self, stream: Stream) -> Mark:
        """A new mark, for the end of the stream's work."""
        self.mark = Mark(stream)
        return self.mark


class Stream:
    """A queue of work. Each piece returns None when it is done, or the mark that it waits for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.work: deque[Callable[[], Mark | None]] = deque()

    def run_one(self) -> Mark | None:
        """Runs the next piece; the mark that it waits for, if it cannot run."""
        piece = self.work.popleft()
        blocked = piece()
        if blocked is not None:
            self.work.appendleft(piece)
        return blocked


class SimulatedDevice:
    """A `geartrain.device.device.Device` on the CPU.

    Args:
        seed: of the order in which streams run.
        kernels: run the Triton kernels, in Triton's interpreter (TRITON_INTERPRET=1), and run everything at once. Rows
            can be selected on such a device only; on any other the references stand in for the kernels.
        most_pinned: registering more bytes than this fails, as with a driver that enforces RLIMIT_MEMLOCK.
        chance: probability that a piece of work runs when another is given. 0 runs only work that the host waits for,
            as late as events allow. 1 runs everything that can run, at once.
        obeys_waits: False ignores `wait`, so that a test can show that its events are needed.
        delay_s: if not None, a thread of the device runs each piece of work after this delay, for work that another
            process waits for.

    Attributes:
        registered: address -> bytes of memory that is registered now.
        host_waits: (thread, stream) of each wait of a host thread.
        used_by: (address, stream) of each `record_stream`.
        copies: number of copies given to the device.
        failures: errors of work on the device's thread.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        kernels: bool = False,
        most_pinned: int | None = None,
        chance: float = 0.3,
        obeys_waits: bool = True,
        delay_s: float | None = None,
    ) -> None:
        self.name = f"simulated:{seed}"
        self.collectives = "gloo"
        self.delay_s = delay_s
        self.registered: dict[int, int] = {}
        self.host_waits: list[tuple[str, str]] = []
        self.used_by: list[tuple[int, str]] = []
        self.failures: list[BaseException] = []
        self.gathers = 0
        self.copies = 0
        self._breaks_at: int | None = None
        self._broken = False
        self._kernels = kernels
        self._most_pinned = most_pinned
        self._chance = chance
        self._obeys_waits = obeys_waits
        self._random = random.Random(seed)
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._main = Stream("main")
        self._streams = [self._main]
        self._local = threading.local()
        self._blocks: dict[int, _Block] = {}
        self._free: list[_Block] = []
        self._freed_meanwhile: deque[_Block] = deque()  # while another thread had the lock
        self._reading: dict[int, int] = {}  # segments that launched work reads, by address

    # --- memory ------------------------------------------------------------------------------------------------

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Counted, and nothing else."""
        if self._most_pinned is not None and sum(self.registered.values()) + memory.nbytes > self._most_pinned:
            raise PinError("simulated: out of memory that can be locked")
        if memory.ctypes.data in self.registered:
            raise PinError("simulated: registered already")
        self.registered[memory.ctypes.data] = memory.nbytes

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        """Raises while work that reads the memory has not run."""
        if self._reading.get(memory.ctypes.data, 0):
            raise PinError("simulated: memory is being read by the device")
        del self.registered[memory.ctypes.data]

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Memory that was freed a moment ago where there is some; filled with 0xAB otherwise."""
        import torch

        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self._lock:
            while self._freed_meanwhile:
                self._reuse(self._freed_meanwhile.popleft())
            stream = self.current_stream()
            block = next((b for b in self._free if b.fits(nbytes, stream)), None)
            if block is None:
                block = _Block(np.full(max(nbytes, 1), 0xAB, np.uint8), stream)
            else:
                self._free.remove(block)
            self._blocks[block.address] = block
            array = block.memory[:nbytes]
            weakref.finalize(array, self._freed, block).atexit = False
        return torch.from_numpy(array).view(dtype).view(shape)

    def _freed(self, block: _Block) -> None:
        if os.getpid() != self._process:
            return  # the parent's memory, in a forked child: a thread that is not there may have held the lock
        # The last reference may go in a thread that has locks of its own, of Gloo for one, for which whoever holds ours
        # may wait: a finaliser waits for no lock.
        if self._lock.acquire(blocking=False):
            try:
                self._reuse(block)
            finally:
                self._lock.release()
        else:
            self._freed_meanwhile.append(block)

    def _reuse(self, block: _Block) -> None:
        del self._blocks[block.address]
        block.busy = [self._mark(stream) for stream in block.streams]
        block.streams = []
        self._free.append(block)

    def record_stream(self, tensor: Any) -> None:
        """The current stream uses it too."""
        with self._lock:
            stream, address = self.current_stream(), tensor.untyped_storage().data_ptr()
            self.used_by.append((address, stream.name))
            if address in self._blocks:  # else memory that the test has allocated itself
                self._blocks[address].streams.append(stream)

    def pinned(self, nbytes: int) -> Any:
        """Plain memory."""
        import torch

        return torch.full((nbytes,), 0xCD, dtype=torch.uint8)

    def host_view(self, memory: NDArray[np.uint8]) -> Any:
        """A tensor over registered memory; refuses any other."""
        from geartrain.core.dtypes import writable_tensor

        if memory.ctypes.data not in self.registered:
            raise PinError("simulated: the device cannot read memory that is not registered")
        return writable_tensor(memory)

    # --- streams -----------------------------------------------------------------------------------------------

    def enter(self, stream: Stream | None = None) -> None:
        """Makes it the thread's stream."""
        if stream is not None:
            self._local.__dict__.setdefault("stack", []).append(stream)

    def new_stream(self) -> Stream:
        """One more."""
        with self._lock:
            self._streams.append(Stream(f"stream {len(self._streams)}"))
            return self._streams[-1]

    def current_stream(self) -> Stream:
        """Of the calling thread; by default the main one."""
        stack: list[Stream] = getattr(self._local, "stack", [])
        return stack[-1] if stack else self._main

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Makes it the calling thread's current stream."""
        stack = self._local.__dict__.setdefault("stack", [])
        stack.append(stream)
        try:
            yield
        finally:
            stack.pop()

    def entered(self, stream: Stream) -> AbstractContextManager[None]:
        """As `on`."""
        return self.on(stream)

    def new_event(self) -> Event:
        """One that has recorded nothing."""
        return Event()

    def record(self, event: Any = None) -> Any:
        """Of the current stream."""
        self._check()
        event = Event() if event is None else event
        with self._lock:
            stream = self.current_stream()
            self._give(stream, event.record(stream).reach)
        return event

    def _mark(self, stream: Stream) -> Mark:
        mark = Mark(stream)
        self._give(stream, mark.reach)
        return mark

    def wait(self, event: Any) -> None:
        """The current stream stops there."""
        mark = event.mark
        if mark is not None and self._obeys_waits:
            self._give(self.current_stream(), lambda: None if mark.reached else mark)

    def done(self, event: Any) -> bool:
        """As it is now."""
        self._check()
        return event.mark is None or event.mark.reached

    def sync(self, event: Any, timeout_s: float | None = None) -> None:
        """Runs the device until it has reached the event's mark."""
        mark = event.mark
        self._check()
        if mark is None:
            return
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            self.host_waits.append((threading.current_thread().name, mark.stream.name if mark.stream else ""))
            while not mark.reached:
                if self.delay_s is None and (self._run_until(mark) if self._chance == 0 else self._step()):
                    continue
                if until_s is None and self.delay_s is None:
                    raise RuntimeError("simulated: deadlock: the host waits for an event that no work records")
                if until_s is not None and time.monotonic() > until_s:
                    raise WaitTimeoutError(f"{self.name} did not reach an event within {timeout_s:.3g} s")
                self._changed.wait(_POLL_S)
        self._check()

    # --- faults ------------------------------------------------------------------------------------------------

    def stall(self, stream: str) -> None:
        """Nothing given to the stream of that name from now on ever runs: events behind it are never signalled."""
        never = Mark(None)
        with self._lock:
            self._give(next(one for one in self._streams if one.name == stream), lambda: never)

    def break_copy(self, number: int) -> None:
        """The copy of that number, from 0, fails when the device comes to it: every later wait, record and copy raises,
        as in CUDA."""
        self._breaks_at = number

    def _check(self) -> None:
        if self._broken:
            raise RuntimeError("simulated: a copy has failed: an illegal memory access was encountered")

    @property
    def syncs(self) -> Counter[str]:
        """Number of waits of a host thread, by its name."""
        return Counter(thread for thread, _ in self.host_waits)

    def finish(self) -> None:
        """Runs the device until no work is left. Raises the first error of the device's thread."""
        with self._lock:
            if self.delay_s is not None:
                while self._thread is not None:
                    self._changed.wait(_POLL_S)
                if self.failures:
                    raise self.failures[0]
                return
            while self._step():
                pass
            stuck = [stream.name for stream in self._streams if stream.work]
            if stuck:
                raise RuntimeError(f"simulated: {stuck} deadlock: wait for events that no work records")

    def _give(self, stream: Stream, work: Callable[[], Mark | None]) -> None:
        with self._lock:
            stream.work.append(work)
            if self.delay_s is not None:
                if self._thread is None:
                    thread = DaemonThread(self._run_all, self.name)
                    thread.start()
                    self._thread = thread
            elif self._kernels:
                self.finish()
            else:
                while self._random.random() < self._chance and self._step():
                    pass

    def _step(self) -> bool:
        """Runs one piece of work of some stream that is not blocked; False when there is none."""
        streams = [stream for stream in self._streams if stream.work]
        self._random.shuffle(streams)
        return any(stream.run_one() is None for stream in streams)

    def _run_until(self, mark: Mark) -> bool:
        """Runs only the work that a mark depends on; False where that waits for an event that no work records."""
        while not mark.reached:
            if mark.stream is None or not mark.stream.work:
                return False
            blocked = mark.stream.run_one()
            if blocked is not None and not self._run_until(blocked):
                return False
        return True

    def _run_all(self) -> None:
        """The device's thread: ends when no work is left."""
        while True:
            with self._lock:
                if not any(stream.work for stream in self._streams):
                    self._thread = None
                    self._changed.notify_all()
                    return
            time.sleep(self.delay_s or 0)
            with self._lock:
                try:
                    ran = self._step()
                except BaseException as error:
                    self.failures.append(error)
                    ran = True
                self._changed.notify_all()
            if not ran:
                time.sleep(_POLL_S)  # blocked by another process

    # --- work --------------------------------------------------------------------------------------------------

    def run(self, work: Callable[[], object]) -> None:
        """Later."""

        def run_now() -> None:
            work()

        self._give(self.current_stream(), run_now)

    def copy(self, to: Any, source: Any) -> None:
        """Later."""
        self._check()
        number, self.copies = self.copies, self.copies + 1

        def copy_now() -> None:
            self._broken |= number == self._breaks_at
            if not self._broken:
                to.copy_(source)

        self.run(copy_now)

    def copy_many(
        self, to: Any, source: Any, at: NDArray[np.uint64], begins: NDArray[np.uint64], sizes: NDArray[np.uint64]
    ) -> None:
        """Later, one after the other in random order, the larger ones in two parts."""
        self._check()
        address, registered = source.data_ptr(), self.registered
        assert address in registered, "simulated: an illegal memory access: the memory is not registered"
        pieces = [
            (place + part, begin + part, min(half, size - part))
            for place, begin, size in zip(at.tolist(), begins.tolist(), sizes.tolist(), strict=True)
            for half in [max(64, -(-size // 2))]
            for part in range(0, size, half)
        ]
        self._random.shuffle(pieces)
        with self._lock:
            self._reading[address] = self._reading.get(address, 0) + len(pieces)
        for place, begin, size in pieces:

            def work(place: int = place, begin: int = begin, size: int = size) -> None:
                to[place : place + size].copy_(source[begin : begin + size])
                self._reading[address] -= 1

            self.run(work)

    def gather(self, plan: Any, segment: Any, *args: Any, **named: Any) -> None:
        """The kernel in the interpreter, or its reference."""
        from geartrain.device.kernels.gather_reference import reference_gather

        address = segment.data_ptr()
        self.gathers += 1
        if self._kernels:
            plan.launch(segment, *args, **named)
            return
        self._reading[address] = self._reading.get(address, 0) + 1

        def work() -> None:
            arena, layout, rows, generations = args
            listed = {name: _listed(value) for name, value in named.items()}
            reference_gather(plan, segment, arena, layout, rows.tolist(), generations.tolist(), **listed)
            self._reading[address] -= 1

        self.run(work)

    def count_steps(self, plan: Any, to: Any, segment: Any, rows: Any, **named: Any) -> None:
        """The kernel in the interpreter, or its reference."""
        from geartrain.device.kernels.gather_reference import reference_count_steps

        if self._kernels:
            to.copy_(plan.count_steps(segment, rows, **named))
            return

        def work() -> None:
            listed = {name: _listed(value) for name, value in named.items()}
            to.copy_(reference_count_steps(plan, segment, rows.tolist(), **listed))

        self.run(work)

    def why_no_selection(self) -> str | None:
        """Only the kernels select."""
        return None if self._kernels else "the simulated device runs no kernels"


class _Block:
    """Device memory, of the stream it was allocated on."""

    def __init__(self, memory: NDArray[np.uint8], stream: Stream) -> None:
        self.memory = memory
        self.address = memory.ctypes.data
        self.stream = stream
        self.streams: list[Stream] = []  # others that use it
        self.busy: list[Mark] = []

    def fits(self, nbytes: int, stream: Stream) -> bool:
        return (
            self.stream is stream
            and nbytes <= len(self.memory) <= 2 * nbytes + 64
            and all(mark.reached for mark in self.busy)
        )


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


__all__ = ["Event", "Mark", "SimulatedDevice", "Stream"]
