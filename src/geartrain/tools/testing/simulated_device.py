"""A GPU that is not there: streams that fall behind, memory that is given away as soon as it may be.

What is given to a stream runs when somebody waits for it, or by chance earlier, streams in random order: later than on
any GPU, so that a missing wait shows as wrong bytes. Freed device memory goes to the next who asks on the same stream,
at once, unless it was lent to another stream that is still busy: as torch's allocator does, but always.
"""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import PinError


class Stream:
    """Work in its order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.work: deque[Callable[[], bool]] = deque()  # each says whether it is done; False asks to come back


class Event:
    """A point in a stream's work."""

    def __init__(self) -> None:
        self.done = False


class SimulatedDevice:
    """A `geartrain.device.device.Device` on the CPU.

    Args:
        seed: of what runs when.
        kernels: run the Triton kernels, in Triton's interpreter (TRITON_INTERPRET=1), and run everything at once. Rows
            can be chosen on such a device; on any other the references stand in for the kernels.
        most_pinned: registering more bytes than this fails, as it does with a driver that keeps to RLIMIT_MEMLOCK.

    Attributes:
        registered: address -> bytes of what is registered now.
        syncs: how often a host thread waited, by the name of the thread.
    """

    def __init__(self, seed: int = 0, *, kernels: bool = False, most_pinned: int | None = None) -> None:
        self.name = f"simulated:{seed}"
        self.model = "simulated"
        self.collectives = "gloo"
        self.registered: dict[int, int] = {}
        self.syncs: dict[str, int] = {}
        self.gathers = 0
        self._kernels = kernels
        self._most_pinned = most_pinned
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._main = Stream("main")
        self._streams = [self._main]
        self._local = threading.local()
        self._blocks: dict[int, _Block] = {}
        self._free: list[_Block] = []
        self._reading: dict[int, int] = {}  # segments that launched work reads, by address

    # --- memory ------------------------------------------------------------------------------------------------

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Notes it."""
        if self._most_pinned is not None and sum(self.registered.values()) + memory.nbytes > self._most_pinned:
            raise PinError("simulated: out of memory that can be locked")
        if memory.ctypes.data in self.registered:
            raise PinError("simulated: registered already")
        self.registered[memory.ctypes.data] = memory.nbytes

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        """Refuses while work that reads the memory has not run."""
        if self._reading.get(memory.ctypes.data, 0):
            raise PinError("simulated: memory is being read by the device")
        del self.registered[memory.ctypes.data]

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Memory that was somebody else's a moment ago where there is some, full of 0xAB otherwise."""
        import torch

        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self._lock:
            stream = self.current_stream()
            block = next((b for b in self._free if b.fits(nbytes, stream)), None)
            if block is None:
                block = _Block(np.full(max(nbytes, 1), 0xAB, np.uint8), stream)
            else:
                self._free.remove(block)
            self._blocks[block.address] = block
            array = block.memory[:nbytes]
            weakref.finalize(array, self._freed, block)
        return torch.from_numpy(array).view(dtype).view(shape)

    def _freed(self, block: _Block) -> None:
        with self._lock:
            del self._blocks[block.address]
            block.busy = [self._event(stream) for stream in block.lent]
            block.lent = []
            self._free.append(block)

    def lend(self, tensor: Any) -> None:
        """The current stream uses it too."""
        with self._lock:
            self._blocks[tensor.untyped_storage().data_ptr()].lent.append(self.current_stream())

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

    def enter(self) -> None:
        """Nothing to do."""

    def new_stream(self) -> Stream:
        """One more."""
        with self._lock:
            self._streams.append(Stream(f"stream {len(self._streams)}"))
            return self._streams[-1]

    def current_stream(self) -> Stream:
        """Of the calling thread; the main one unless it said otherwise."""
        stack: list[Stream] = getattr(self._local, "stack", [])
        return stack[-1] if stack else self._main

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Makes it the calling thread's stream meanwhile."""
        stack = self._local.__dict__.setdefault("stack", [])
        stack.append(stream)
        try:
            yield
        finally:
            stack.pop()

    def record(self) -> Event:
        """Of the current stream."""
        return self._event(self.current_stream())

    def _event(self, stream: Stream) -> Event:
        event = Event()

        def come() -> bool:
            event.done = True
            return True

        self._give(stream, come)
        return event

    def wait(self, event: Event) -> None:
        """The current stream stops there."""
        self._give(self.current_stream(), lambda: event.done)

    def done(self, event: Event) -> bool:
        """As it is now."""
        return event.done

    def sync(self, event: Event) -> None:
        """Lets the device run until the event has come."""
        thread = threading.current_thread().name
        self.syncs[thread] = self.syncs.get(thread, 0) + 1
        with self._lock:
            while not event.done:
                if not self._step():
                    raise RuntimeError("simulated: an event is waited for that nothing will bring")

    def finish(self) -> None:
        """Lets the device run until nothing is left."""
        with self._lock:
            while self._step():
                pass
            stuck = [stream.name for stream in self._streams if stream.work]
            if stuck:
                raise RuntimeError(f"simulated: {stuck} wait for what nothing will bring")

    def _give(self, stream: Stream, work: Callable[[], bool]) -> None:
        with self._lock:
            stream.work.append(work)
            if self._kernels:
                self.finish()
            elif self._random.random() < 0.3:
                self._step()

    def _step(self) -> bool:
        """Runs one piece of work of some stream that is not waiting; False when there is none."""
        streams = [stream for stream in self._streams if stream.work]
        self._random.shuffle(streams)
        for stream in streams:
            work = stream.work.popleft()
            if work():
                return True
            stream.work.appendleft(work)
        return False

    # --- work --------------------------------------------------------------------------------------------------

    def run(self, work: Callable[[], object]) -> None:
        """Later."""

        def do() -> bool:
            work()
            return True

        self._give(self.current_stream(), do)

    def copy(self, to: Any, source: Any) -> None:
        """Later."""
        self.run(lambda: to.copy_(source))

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
        """Only the kernels choose."""
        return None if self._kernels else "the simulated device runs no kernels"


class _Block:
    """Device memory, of the stream it was first made on."""

    def __init__(self, memory: NDArray[np.uint8], stream: Stream) -> None:
        self.memory = memory
        self.address = memory.ctypes.data
        self.stream = stream
        self.lent: list[Stream] = []
        self.busy: list[Event] = []

    def fits(self, nbytes: int, stream: Stream) -> bool:
        return (
            self.stream is stream
            and nbytes <= len(self.memory) <= 2 * nbytes + 64
            and all(event.done for event in self.busy)
        )


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


__all__ = ["Event", "SimulatedDevice", "Stream"]
