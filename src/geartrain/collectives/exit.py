"""Closes the groups that are still open when the interpreter exits."""

from __future__ import annotations

import atexit
import weakref
from contextlib import suppress
from typing import Protocol


class _Closes(Protocol):
    def close(self, timeout_s: float) -> None: ...


_alive: weakref.WeakSet[_Closes] = weakref.WeakSet()


def close_at_exit(group: _Closes) -> None:
    """Closes it before the interpreter drops the arrays of its operations, where it is alive then."""
    _alive.add(group)


@atexit.register
def _close_all() -> None:
    for group in list(_alive):
        with suppress(Exception):
            group.close(1.0)
