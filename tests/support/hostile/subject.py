"""Subjects: an object under test, its calls, and how it ends; the registry of factories that make them."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geartrain.core.threads import refuse_within

Call = Callable[[], object]


class NotViableError(Exception):
    """A subject cannot be made on this machine, and why."""


@dataclass
class Subject:
    """One object under test.

    Attributes:
        calls: by name; each returns soon while the object is open, and may be called again and again.
        close: ends it, or what it belongs to.
        survives: calls that work on when it is closed, as their docstrings say. All others have to be refused.
        either: calls that may work on or be refused, as it comes.
        blocked: calls that wait until the object is closed.
        work: begins something that goes on, and returns what has to be held meanwhile.
        in_child: calls that a forked child may make with success; the others may be refused there.
        owned: what else must stay alive.
    """

    calls: dict[str, Call]
    close: Call
    survives: frozenset[str] = frozenset()
    either: frozenset[str] = frozenset()
    blocked: dict[str, Call] = field(default_factory=dict)
    work: Call | None = None
    in_child: frozenset[str] = frozenset()
    owned: list[Any] = field(default_factory=list)


class Tools:
    """Names, folders and a stack of things to clean up, for factories.

    Args:
        prefix: of the names of everything in shared memory: what is left of that name when the process has ended is a
            defect.
        factor: how many times longer than on an idle machine things may take.
    """

    def __init__(self, prefix: str, factor: float) -> None:
        self.prefix, self.factor = prefix, factor
        self.stack = contextlib.ExitStack()
        self._numbers = itertools.count()

    def name(self) -> str:
        """A name that nobody else uses."""
        return f"{self.prefix}-{os.getpid()}-{next(self._numbers)}"

    def folder(self) -> Path:
        """An empty folder, removed by `clean` or with this process: a `TemporaryDirectory` goes with a forked child."""
        folder, mine = Path(tempfile.mkdtemp(prefix=self.prefix)), os.getpid()

        def remove() -> None:
            if os.getpid() == mine:
                shutil.rmtree(folder, ignore_errors=True)

        self.stack.callback(remove)
        atexit.register(remove)
        return folder

    def patience(self, seconds: float) -> float:
        """Seconds to wait for what takes less than `seconds` on an idle machine."""
        return seconds * self.factor

    def enter(self, context: Any) -> Any:
        """Enters a context that `clean` leaves."""
        return self.stack.enter_context(context)

    def clean(self) -> None:
        """Leaves all contexts."""
        self.stack.close()


@dataclass
class Factory:
    """How to make subjects of a public class.

    Attributes:
        of: name of the class.
        make: makes one.
        waits: whether it has calls that wait until it is closed.
        one_thread: why no scenario uses it from several threads; "" where it may be.
    """

    of: str
    make: Callable[[Tools], Subject]
    waits: bool = False
    one_thread: str = ""


class order_lock:  # noqa: N801  # a context
    """A lock of a factory's calls, which is free in a forked child: it is the subject's locks that are tried there.

    A signal's handler that makes a call within another one is refused: there is no order that all ranks have, then.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._lock._at_fork_reinit)  # type: ignore[attr-defined]

    def __enter__(self) -> None:
        refuse_within(self._lock, "a call of the factory's")
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


FACTORIES: dict[str, Factory] = {}


def factory(
    of: type | str, variant: str = "", *, waits: bool = False, one_thread: str = ""
) -> Callable[[Callable[[Tools], Subject]], Any]:
    """Registers a function as factory of a class, or of the class of a name; with `variant`, as a further one."""
    of_name = of if isinstance(of, str) else of.__name__

    def register(make: Callable[[Tools], Subject]) -> Callable[[Tools], Subject]:
        name = f"{of_name}: {variant}" if variant else of_name
        assert name not in FACTORIES, name
        FACTORIES[name] = Factory(of_name, make, waits, one_thread)
        return make

    return register
