"""Signals that wait while a library is at work whose callbacks swallow exceptions."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_HELD = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def held_signals() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C and SIGTERM back; the function that it yields, and the end, run the handlers of those that came.

    A handler's exception is lost where Python calls back from a destructor or a weak reference, as h5py has it do for
    each of its objects. Only signals that have a handler in Python are held, and only in the main thread, which alone
    runs handlers.
    """
    came: list[tuple[int, FrameType | None]] = []
    before: dict[int, Any] = {}

    def deliver() -> None:
        while came:
            number, frame = came.pop(0)
            before[number](number, frame)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in _HELD:
                handler = signal.getsignal(number)
                if callable(handler):
                    before[number] = handler
                    signal.signal(number, lambda number, frame: came.append((number, frame)))
        yield deliver
    finally:
        for held, handler in before.items():
            signal.signal(held, handler)
    deliver()


__all__ = ["held_signals"]
