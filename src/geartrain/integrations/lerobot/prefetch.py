"""Prefetch of batches: a thread that samples ahead of the training loop."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

from geartrain.core.arguments import check_whole
from geartrain.core.lifetime import on_error
from geartrain.core.threads import DaemonThread
from geartrain.errors import GeartrainError

# A reader that waits looks so often whether the thread is still there.
_LOOK_S = 0.5
_JOIN_S = 5.0


class _Error:
    """What sampling raised, in the place of a batch."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Queue:
    """State that the prefetch thread shares with its reader.

    It has no reference to the reader, so the reader can be garbage-collected while the thread runs.

    The garbage collector may call `stop` in any thread, in the middle of a call that holds locks needed by sampling. So
    `stop` must not wait for a lock. It puts into a `SimpleQueue`, which is safe there.
    """

    _END: Any = object()

    def __init__(self, sample: Callable[[], Any], size: int) -> None:
        self.sample = sample
        self.batches: SimpleQueue[Any] = SimpleQueue()
        self.stopped = False
        self._room = size  # batches that may be made before one is taken; the thread's alone
        self._taken: SimpleQueue[None] = SimpleQueue()  # an entry for each that was taken

    def run(self) -> None:
        """The thread: samples until it is stopped or sampling fails."""
        try:
            while True:
                if self._room:
                    self._room -= 1
                else:
                    self._taken.get()
                if self.stopped:
                    return
                try:
                    batch = self.sample()
                except BaseException as error:  # it is raised where batches are asked for
                    self.batches.put(_Error(error))
                    return
                self.batches.put(batch)
        finally:
            _running.pop(self, None)

    def take(self) -> Any:
        """The next batch; raises `queue.Empty` where none has come for a while."""
        batch = self.batches.get(timeout=_LOOK_S)
        if batch is self._END:
            self.batches.put(batch)
            raise StopIteration
        if isinstance(batch, _Error):
            self.batches.put(batch)  # for whoever asks next
            raise batch.error
        self._taken.put(None)
        return batch

    def stop(self) -> None:
        """Lets the thread end after the batch that it is making, and readers. Waits for nothing."""
        self.stopped = True
        self._taken.put(None)
        self.batches.put(self._END)


#: Threads that were not ended yet.
_running: dict[_Queue, threading.Thread] = {}


@atexit.register
def _end_all() -> None:
    """At the interpreter's end, before threads are cut off in the middle of a batch."""
    running = list(_running.copy().items())
    for queue, _ in running:
        queue.stop()
    until = time.monotonic() + _JOIN_S
    for _, thread in running:
        if thread.is_alive():  # not in a forked child
            thread.join(max(0.0, until - time.monotonic()))


class BatchPrefetch:
    """An endless iterator of batches that a background thread samples. `close` ends the thread.

    Dropping the iterator also ends the thread, after its current batch, and does not wait for it.

    Args:
        sample: function that returns a batch.
        size: number of batches to keep ready.
        about_to_wait: function called before a wait. It raises if the calling thread holds a lock that sampling waits
            for.

    Raises:
        GeartrainError: from `next`, in a forked child: the thread stayed with the parent. What `sample` raises is
            raised by `next` too, after the batches that were made before.
    """

    def __init__(
        self, sample: Callable[[], Any], size: int, about_to_wait: Callable[[], object] = lambda: None
    ) -> None:
        check_whole("queue_size", size, 1)
        self._queue = _Queue(sample, size)
        self._about_to_wait = about_to_wait
        self._pid = os.getpid()
        self._thread = DaemonThread(self._queue.run, "geartrain-lerobot-prefetch")
        weakref.finalize(self, self._queue.stop).atexit = False
        _running[self._queue] = self._thread
        with on_error(_running.pop, self._queue, None):
            self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        queue = self._queue
        if os.getpid() != self._pid:  # what the thread was about to put is not here
            raise GeartrainError(
                "the prefetch thread is not in this process, which was forked from its own: make another iterator here"
            )
        while not queue.stopped:
            alive = self._thread.is_alive()  # asked before: it may end with a last batch
            try:
                return queue.take()
            except Empty:
                if not alive:
                    raise GeartrainError("the prefetch thread has ended: make another iterator") from None
                self._about_to_wait()
        raise StopIteration

    def close(self) -> None:
        """Ends the thread, after the batch that it is making; waits for it, five seconds at most."""
        queue = self._queue
        if queue.stopped or os.getpid() != self._pid:
            return
        queue.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        queue.batches = SimpleQueue()  # those that nobody takes any more


__all__ = ["BatchPrefetch"]
