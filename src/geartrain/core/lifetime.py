"""Lifetime of public objects: what copies, forks, `close`, signal handlers and the interpreter's exit do to them.

An object that belongs to one process and has a `close` inherits `Lifetime`. Its class statement says what it needs:

    class Node(Lifetime, error=ConnectionClosedError, elsewhere="make another one there", at_exit=True): ...

- `_check_open` raises if the object was closed, or belongs to the process that this one was forked from.
- `_end` is true for exactly one caller, from whichever thread or signal handler it is called. Waits of `_wait_for` end.
- `_after_fork` runs in a forked child for each living object of a class that defines it. It replaces locks, because
  another thread of the parent may have held them at the fork.
- `at_exit` closes the living objects when the interpreter exits.

An object whose state is a native one's, such as a connection, inherits `Closing`. An object without a `close`, such as
a future, inherits `Uncopied`. A helper that only has to know of forks adds itself to a set of `living`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, ParamSpec, SupportsIndex, TypeVar

from geartrain._native import forks
from geartrain.core.threads import DaemonThread, ReentrantEvent
from geartrain.errors import ArgumentError, GeartrainError, StoreClosedError, WaitTimeoutError

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
P = ParamSpec("P")


def living(
    after_fork: Callable[[T], object] | None = None, at_exit: Callable[[T], object] | None = None
) -> weakref.WeakSet[T]:
    """A set for the living objects of a class, which add themselves.

    Args:
        after_fork: called with each of them in a forked child, as `Lifetime._after_fork` is.
        at_exit: called with each of them when the interpreter exits. An error of one does not keep the others open.
    """
    objects: weakref.WeakSet[T] = weakref.WeakSet()

    def call_all(function: Callable[[T], object], *ignored: type[Exception]) -> None:
        for one in list(objects):
            with contextlib.suppress(*ignored):
                function(one)

    if after_fork is not None:
        os.register_at_fork(after_in_child=lambda: call_all(after_fork))
    if at_exit is not None:
        atexit.register(call_all, at_exit, Exception)
    return objects


class on_error:  # noqa: N801  # a context, as contextlib's are
    """Calls `undo` with the arguments if the block raises, also by a signal handler, and lets the error through."""

    __slots__ = ("_undo",)

    def __init__(self, undo: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        self._undo = partial(undo, *args, **kwargs)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._undo()


#: Work may end this long after its deadline, because its own error says best what was missing.
_LATE_S = 5.0


class Uncopied:
    """An object that exists once, in one process: copies and pickles of it are refused.

    Args of the class statement:
        elsewhere: what to do instead of a copy, for the error.
    """

    __slots__ = ()
    _elsewhere: ClassVar[str]

    def __init_subclass__(cls, *, elsewhere: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if elsewhere:
            cls._elsewhere = elsewhere

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ArgumentError(f"a {type(self).__name__} cannot be copied or pickled: {self._elsewhere}")


class Closing(Uncopied):
    """An object with a `close`, which a `with` block calls at its end."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Ends it. Any thread and any signal handler may call this, more than once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Lifetime(Closing):
    """An object that belongs to the process that made it, until `close`.

    Args of the class statement:
        error: what calls of a closed object raise.
        at_exit: the interpreter closes it at exit.
        inherited: a forked child may use its copy.

    Args:
        what: the object, for errors.
    """

    _error: ClassVar[type[GeartrainError]] = StoreClosedError
    _inherited: ClassVar[bool] = False
    _living: ClassVar[weakref.WeakSet[Any] | None] = None

    def __init_subclass__(
        cls,
        *,
        error: type[GeartrainError] | None = None,
        at_exit: bool = False,
        inherited: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init_subclass__(**kwargs)
        if error is not None:
            cls._error = error
        if inherited:
            cls._inherited = True
        after_fork = cls.__dict__.get("_after_fork")
        if after_fork is not None or at_exit:
            cls._living = living(after_fork, (lambda one: one.close()) if at_exit else None)

    def __init__(self, what: str) -> None:
        self._what, self._forks = what, forks()
        self._unended = [True]  # empty once it has ended: `pop` gives it to exactly one caller
        self._waits: list[ReentrantEvent] = []

    def _begin(self) -> None:
        """At the end of the constructor of a class with `_after_fork` or `at_exit`: these reach the object now."""
        assert self._living is not None
        self._living.add(self)

    @property
    def _forked(self) -> bool:
        """Whether it belongs to the process that this one was forked from."""
        return self._forks != forks()

    def _check_owner(self) -> None:
        """Raises `error` in a forked child, unless that may use its copy."""
        if not self._inherited and self._forked:
            raise self._error(f"{self._what} belongs to the process that this one was forked from; make one here")

    def _check_open(self) -> None:
        """Raises `error` as `_check_owner`, and once it is closed."""
        self._check_owner()
        if not self._unended:
            raise self._error(f"{self._what} was closed")

    def _end(self) -> bool:
        """Ends it, and its waits. True for the first caller, whichever thread or signal handler that is."""
        try:
            self._unended.pop()
        except IndexError:
            return False
        for over in tuple(self._waits):
            over.set()
        return True

    def _wait_for(self, work: Callable[[], T], until_s: float, what: str) -> T:
        """What `work` returns or raises. Raises as `_check_open` once the object is closed.

        `work` runs on a thread of its own, because a wait for a store or a dialled peer does not notice `close`. The
        thread cannot start in a signal handler that has interrupted the start of another thread, because `threading`
        holds a lock then.

        Args:
            work: ends by itself at `until_s`, in `time.monotonic()`; raises `WaitTimeoutError` when it does not.
            what: is waited for, for this error.
        """
        outcome: list[tuple[T | None, BaseException | None]] = []

        def run() -> None:
            try:
                outcome.append((work(), None))
            except BaseException as error:
                outcome.append((None, error))
            over.set()

        # No condition: of one that waits, a handler that waits for it as well takes the lock away, and may have its
        # notification.
        over = ReentrantEvent()
        waits = self._waits
        waits.append(over)
        try:
            self._check_open()
            DaemonThread(run, f"geartrain waits for {what}").start()
            over.wait(max(0.0, until_s - time.monotonic()) + _LATE_S)
        finally:
            waits.remove(over)
        if not outcome:
            self._check_open()
            raise WaitTimeoutError(f"no {what} before the deadline")
        value, error = outcome[0]
        if error is None:
            return value  # type: ignore[return-value]
        try:
            raise error
        finally:
            outcome.clear()
            del error  # the traceback holds this frame

    def _after_fork(self) -> None:
        """In a forked child, which has none of the threads that are waited for, but copies of the locks they held."""
        waits, self._waits = self._waits, []
        for over in waits:
            over.set()


__all__ = ["Closing", "Lifetime", "Uncopied", "living", "on_error"]
