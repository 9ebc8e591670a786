"""The functions of this process that peers may call, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from geartrain.errors import GeartrainError
from geartrain.rpc.batch import Batcher

F = TypeVar("F", bound=Callable[..., Any])

#: What a name stands for; the name of a registered function; those that need not keep order.
functions: dict[str, Callable[..., Any]] = {}
names: dict[Callable[..., Any], str] = {}
concurrent_functions: set[Callable[..., Any]] = set()


@overload
def function(given: F) -> F: ...
@overload
def function(*, name: str | None = None, concurrent: bool = False) -> Callable[[F], F]: ...
def function(given: F | None = None, *, name: str | None = None, concurrent: bool = False) -> F | Callable[[F], F]:
    """Lets peers call a function (or make objects of a class) by its name; a decorator.

    A `concurrent` one may run while other calls of the same peer run, in any order.
    """

    def decorate(function: F) -> F:
        register(name or function.__name__, function)
        if concurrent:
            concurrent_functions.add(function)
        return function

    return decorate if given is None else decorate(given)


def register(name: str, function: Callable[..., Any], called: Any = None) -> None:
    """Gives a function a name, under which `called` is called, or it itself."""
    other = functions.get(name)
    if other is not None and (other.__module__, other.__qualname__) != (function.__module__, function.__qualname__):
        raise GeartrainError(f"the name {name!r} is taken by {other!r}; give another: @rpc.function(name=...)")
    functions[name] = function if called is None else called
    names[function] = name


def batched(
    *, max_size: int, max_wait_us: float | None = 1000.0, max_queued: int = 4096, stack: bool = False
) -> Callable[[F], F]:
    """Makes a function that gets many calls at once, and answers them one by one; a decorator.

    The function gets one list for each positional argument, with the values of all calls in it, and returns as many
    results. It runs as soon as `max_size` calls are there, or `max_wait_us` after the first of them; None waits for
    ever. With `stack` the lists are stacked into one tensor or array each. More than `max_queued` waiting calls are
    refused with `BusyError`.

    Example:
        >>> @batched(max_size=8, max_wait_us=500)
        ... def tripled(values: list[int]) -> list[int]:
        ...     return [3 * value for value in values]
    """

    def make(function: F) -> F:
        register(function.__name__, function, Batcher(function, max_size, max_wait_us, max_queued, stack))
        return function

    return make
