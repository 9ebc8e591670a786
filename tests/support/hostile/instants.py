"""Calls that are interrupted at a chosen line of theirs, as by a signal's handler, which Python runs between lines."""

from __future__ import annotations

import contextlib
import dis
import inspect
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import geartrain

#: Files in whose lines a handler is run: the package, and what its calls wait in.
_PACKAGE = str(Path(geartrain.__file__).parent)
_LIBRARY = (threading.__file__, queue.__file__, contextlib.__file__)


class Interruption:
    """Of a call of this thread, once: a handler is called before a line that is reached for the first time.

    The end of a function is such a line, too. That a generator yields is none: no handler runs there, and what a trace
    function raises would pass by the generator's own `finally`.

    Args:
        at: number of the line, from 0 on; None for no interruption, which counts them.
        handler: what is called there.

    Attributes:
        lines: how many there were until then.
        where: the line.
    """

    def __init__(self, at: int | None, handler: Callable[[], object]) -> None:
        self._at, self._handler = at, handler
        self._seen: set[tuple[str, int, str]] = set()
        self._over = False
        self.where = "no line"

    @property
    def lines(self) -> int:
        return len(self._seen)

    def during(self, call: Callable[[], object]) -> None:
        """Makes the call, and raises what it raises."""
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, _: str, __: Any) -> Any:
        file = frame.f_code.co_filename
        return self._pass if not self._over and (file.startswith(_PACKAGE) or file in _LIBRARY) else None

    def _pass(self, frame: FrameType, event: str, _: Any) -> Any:
        if event not in ("line", "return") or self._over or (event == "return" and _yields(frame)):
            return self._pass
        line = (frame.f_code.co_filename, frame.f_lineno, event)
        if line not in self._seen and len(self._seen) == self._at:
            self._over = True
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} ({event})"
            sys.settrace(None)
            self._handler()
        self._seen.add(line)
        return self._pass


def _yields(frame: FrameType) -> bool:
    code = frame.f_code
    return bool(code.co_flags & inspect.CO_GENERATOR) and code.co_code[frame.f_lasti] == dis.opmap["YIELD_VALUE"]
