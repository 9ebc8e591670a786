"""Registry of this process's functions that peers may call by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from geartrain.core.arguments import check_flag, check_function, check_text, shown
from geartrain.errors import GeartrainError
from geartrain.rpc.batching import Batcher
from geartrain.rpc.stats import BatchDone, BatchStats

F = TypeVar("F", bound=Callable[..., Any])

#: Functions by name; names by function; functions that run out of order; functions that get an `rpc.Caller` first.
functions: dict[str, Callable[..., Any]] = {}
names: dict[Callable[..., Any], str] = {}
concurrent_functions: set[Callable[..., Any]] = set()
with_caller_functions: set[Callable[..., Any]] = set()


@overload
def function(given: F) -> F: ...
@overload
def function(*, name: str | None = None, concurrent: bool = False, with_caller: bool = False) -> Callable[[F], F]: ...
def function(
    given: F | None = None, *, name: str | None = None, concurrent: bool = False, with_caller: bool = False
) -> F | Callable[[F], F]:
    """Decorator that registers a function, or a class, so that peers can call it by name.

    A function may return a `concurrent.futures.Future`. The reply is then the future's result, and the calls that
    follow run meanwhile.

    Args:
        given: the function, if the decorator is used without arguments.
        name: name to register; the function's own by default. Names that begin with "geartrain." are reserved.
        concurrent: its calls may run while other calls of the same client run, in any order.
        with_caller: pass a `Caller` before the arguments of the call.

    Examples:
        >>> @function(concurrent=True)
        ... def slow(seconds: float) -> float:
        ...     return seconds
    """

    if name is not None:
        check_text("the name of a function", name)
    check_flag("concurrent", concurrent)
    check_flag("with_caller", with_caller)

    def decorate(function: F) -> F:
        check_function("what is registered", function)
        register(name or function.__name__, function)
        if concurrent:
            concurrent_functions.add(function)
        if with_caller:
            with_caller_functions.add(function)
        return function

    return decorate if given is None else decorate(given)


def register(name: str, function: Callable[..., Any], called: Any = None) -> None:
    """Registers a function under a name; calls of that name go to `called`, if given."""
    other = functions.get(name)
    if other is not None and (other.__module__, other.__qualname__) != (function.__module__, function.__qualname__):
        raise GeartrainError(f"the name {name!r} is taken by {other!r}; give another: @rpc.function(name=...)")
    functions[name] = function if called is None else called
    names[function] = name


def batched(
    *,
    max_size: int,
    max_wait_us: float | None = 1000.0,
    max_queued: int = 4096,
    stack: bool = False,
    on_batch: Callable[[BatchDone], object] | None = None,
) -> Callable[[F], F]:
    """Decorator for server-side batching: concurrent calls are collected, and the function runs once for all of them.

    The function gets a list for each positional argument, with the values of all calls, and returns as many results.
    Calls whose arguments have other shapes, dtypes or numbers run as a batch of their own.

    Args:
        max_size: calls of a batch; the function runs as soon as there are so many.
        max_wait_us: longest wait after the first call of a batch, in microseconds. None waits until the batch is full.
        max_queued: calls that may wait; further ones are refused with `BusyError`.
        stack: stack each list into one tensor or array. The function may also return arrays or tensors by name, (n,
            ...); each call then gets a dict of its rows.
        on_batch: called with a `BatchDone` after the replies of each batch were sent, by the thread that ran it.

    Examples:
        >>> @batched(max_size=8, max_wait_us=500)
        ... def tripled(values: list[int]) -> list[int]:
        ...     return [3 * value for value in values]
    """

    def make(function: F) -> F:
        check_function("what is batched", function)
        register(function.__name__, function, Batcher(function, max_size, max_wait_us, max_queued, stack, on_batch))
        return function

    return make


def batch_stats(function: str | Callable[..., Any]) -> BatchStats:
    """Counters and latencies of a batched function of this process, over all nodes: a copy.

    Args:
        function: the function, or its name.

    Raises:
        LookupError: no batched function of that name is registered.

    Examples:
        >>> @batched(max_size=2)
        ... def negated(values: list[int]) -> list[int]:
        ...     return [-value for value in values]
        >>> batch_stats(negated).calls  # of BatchStats
        0
    """
    if not isinstance(function, str):
        check_function("a function, or the name of one,", function)
    name = function if isinstance(function, str) else names.get(function, shown(function))
    found = functions.get(name)
    if not isinstance(found, Batcher):
        raise LookupError(f"no batched function {name!r} is registered in this process")
    return found.stats()


def name_of(function: Any) -> str:
    """A function's name for people: as it is registered, or as Python has it."""
    name = function if isinstance(function, str) else names.get(function)
    if name is None:
        name = getattr(function, "__qualname__", type(function).__name__).rpartition(".")[2]
    return str(name)
