"""Prefetch of batches: a thread that samples ahead of the training loop."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from geartrain.core.arguments import check_whole
from geartrain.errors import GeartrainError

# A reader that waits looks so often whether the iterator was closed.
_LOOK_S = 0.1
_END_S = 5.0


class BatchPrefetch:
    """An endless iterator of batches that a background thread samples. `close` ends the thread.

    Dropping the iterator also ends the thread, after its current batch, and does not wait for it. The interpreter's
    exit waits until all queued batches are made, so close the iterator before if that takes long.

    Args:
        sample: function that returns a batch.
        size: number of batches to keep ready.
        about_to_wait: function called before a wait. It raises if the calling thread holds a lock that sampling waits
            for.

    Raises:
        GeartrainError: from `next`, in a forked child: the thread stayed with the parent. What `sample` raises is
            raised by `next` in the place of its batch.
    """

    def __init__(
        self, sample: Callable[[], Any], size: int, about_to_wait: Callable[[], object] = lambda: None
    ) -> None:
        check_whole("queue_size", size, 1)
        self._sample, self._about_to_wait = sample, about_to_wait
        self._pid = os.getpid()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="geartrain-lerobot-prefetch")
        self._stop = weakref.finalize(self, _stop, self._thread, self._pid)
        self._stop.atexit = False
        self._batches: deque[Future[Any]] = deque(self._thread.submit(sample) for _ in range(size))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if os.getpid() != self._pid:
            raise GeartrainError(
                "the prefetch thread is not in this process, which was forked from its own: make another iterator here"
            )
        try:
            self._batches.append(self._thread.submit(self._sample))
            batch = self._batches.popleft()
        except (RuntimeError, IndexError):  # closed, or at the interpreter's end
            raise StopIteration from None
        try:
            while not wait([batch], _LOOK_S).done:
                if not self._stop.alive:
                    raise StopIteration
                self._about_to_wait()
        except BaseException:  # also of a signal's handler: whoever asks next gets the batch
            self._batches.appendleft(batch)
            raise
        if batch.cancelled():
            raise StopIteration
        try:
            return batch.result()
        finally:
            del batch  # an error's traceback has this frame, which would keep the error and the iterator

    def close(self) -> None:
        """Ends the thread, after the batch that it is making; waits for that, five seconds at most."""
        if self._stop.detach() is not None and os.getpid() == self._pid:
            with contextlib.suppress(RuntimeError):  # at the interpreter's end, which waits for the thread itself
                last = self._thread.submit(int)  # runs next, as all other batches are cancelled
                for each in self._batches.copy():
                    each.cancel()
                self._thread.shutdown(wait=False)
                wait([last], _END_S)
        self._batches.clear()


def _stop(thread: ThreadPoolExecutor, pid: int) -> None:
    if os.getpid() == pid:  # in a forked child the locks may be those of a thread that it does not have
        thread.shutdown(wait=False, cancel_futures=True)


__all__ = ["BatchPrefetch"]
