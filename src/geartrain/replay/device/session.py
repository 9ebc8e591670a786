"""`DeviceSession`: a replay's device, stream and pinned segments, and the lock that serializes closing them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from geartrain.device.device import Device, open_device
from geartrain.errors import StoreClosedError
from geartrain.replay.device.target import DeviceTarget
from geartrain.replay.device.transfer import ReadyBatch

# Batches that the consumer's stream may be behind before the replay's thread waits for it.
MOST_UNCONSUMED = 4
CLOSE_S = 60.0  # longest wait for the batch that is being built

_log = logging.getLogger("geartrain.replay.device")


class DeviceSession:
    """The device, stream and pinned segments of a replay that builds batches on a device.

    Batches are built on one thread, inside `at_work`. Any other thread may call `close`, which waits for it.

    Args:
        device: as `DeviceOptions.device`.

    Attributes:
        targets: one for each store; `close` unpins their segments.
    """

    def __init__(self, device: Any) -> None:
        self.device: Device = open_device(device)
        self.stream = self.device.new_stream()
        self.targets: list[DeviceTarget] = []
        self._consumed: deque[Any] = deque()  # events on the consumer's stream, one for each batch that it took
        self._lock = threading.Lock()
        self._closed = False

    def enter(self) -> None:
        """Called first on a thread that builds batches."""
        self.device.enter(self.stream)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Held while a batch is built; `close` waits for it. Raises `StoreClosedError` once closed."""
        with self._lock:
            if self._closed:
                raise StoreClosedError("this replay was closed")
            with self.device.entered(self.stream):  # once: whatever makes it current within finds that it is
                yield

    def hold_back(self) -> None:
        """Waits, on the replay's thread, until the consumer's stream is not too many batches behind."""
        while len(self._consumed) > MOST_UNCONSUMED:
            self.device.sync(self._consumed.popleft())

    def deliver(self, ready: ReadyBatch) -> Callable[[], None]:
        """The callback for the consumer's thread when it takes the batch."""
        device, consumed = self.device, self._consumed

        def taken() -> None:
            # What the consumer gave its stream before it asked: the work on earlier batches.
            consumed.append(device.record())
            ready.hand_off(device)

        return taken

    def close(self) -> None:
        """Waits for the stream, and unpins."""
        self._closed = True
        if not self._lock.acquire(timeout=CLOSE_S):
            _log.warning("the replay's thread is still building a batch after %s s; memory stays pinned", CLOSE_S)
            return
        try:
            self._consumed.clear()
            for target in self.targets:
                target.close()
        finally:
            self._lock.release()


__all__ = ["DeviceSession"]
