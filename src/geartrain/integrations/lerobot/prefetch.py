"""Prefetch of batches: a thread that samples ahead of the loop that trains on them."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from geartrain.core.arguments import check_whole
from geartrain.errors import ArgumentError, GeartrainError

# A reader that waits looks so often whether the thread is still there.
_LOOK_S = 0.5
_JOIN_S = 5.0


class _Queue:
    """What the thread and its reader share; it does not know the reader, which may so be collected."""

    def __init__(self, sample: Callable[[], Any], size: int) -> None:
        self.sample = sample
        self.size = size
        self.batches: deque[Any] = deque()
        self.changed = threading.Condition()
        self.stopped = False
        self.error: BaseException | None = None

    def run(self) -> None:
        """The thread: samples until it is stopped or sampling fails."""
        while True:
            with self.changed:
                while len(self.batches) >= self.size and not self.stopped:
                    self.changed.wait()
                if self.stopped:
                    return
            try:
                batch = self.sample()
            except BaseException as error:  # it is raised where batches are asked for
                with self.changed:
                    self.error = error
                    self.changed.notify_all()
                return
            with self.changed:
                self.batches.append(batch)
                self.changed.notify_all()


class BatchPrefetch:
    """An endless iterator of batches that a thread of its own has sampled; `close` ends the thread.

    Args:
        sample: makes a batch.
        size: batches that are kept ready.

    Raises:
        GeartrainError: from `next`, in a forked child: the thread stayed with the parent. What `sample` raises is
            raised by `next` too, after the batches that were made before.
    """

    def __init__(self, sample: Callable[[], Any], size: int) -> None:
        if check_whole("queue_size", size) < 1:
            raise ArgumentError(f"queue_size must be at least 1, found {size}")
        self._queue = _Queue(sample, size)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._queue.run, name="geartrain-lerobot-prefetch", daemon=True)
        # Also at the interpreter's end, before threads are cut off in the middle of a batch.
        self._end = weakref.finalize(self, _end, self._queue, self._thread)
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        queue = self._queue
        if os.getpid() != self._pid:  # the lock may be held by a thread that is not here
            raise GeartrainError("the thread that samples is not in this process, which was forked from its own")
        with queue.changed:
            while not queue.batches:
                if queue.error is not None:
                    raise queue.error
                if queue.stopped:
                    raise StopIteration
                if not self._thread.is_alive():
                    raise GeartrainError("the thread that samples is gone")
                queue.changed.wait(_LOOK_S)
            batch = queue.batches.popleft()
            queue.changed.notify_all()
            return batch

    def close(self) -> None:
        """Ends the thread, after the batch that it is making."""
        self._end()


def _end(queue: _Queue, thread: threading.Thread) -> None:
    if not thread.is_alive():  # in a forked child its lock may be held for ever
        return
    with queue.changed:
        queue.stopped = True
        queue.batches.clear()
        queue.changed.notify_all()
    if thread is not threading.current_thread():
        thread.join(_JOIN_S)


__all__ = ["BatchPrefetch"]
