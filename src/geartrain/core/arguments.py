"""Argument checks: whole numbers, timeouts, capacities, thread counts."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

import geartrain._native as _native
from geartrain.core.schema import Field
from geartrain.errors import ArgumentError

# More threads than any machine has use for: a mistake.
MAX_THREADS = 4096


def default_threads(threads: int | None) -> int:
    """Threads that copy: what was asked for, or up to four of the cores this process may use."""
    if threads is None:
        return min(4, int(_native.available_cores()))
    if not 1 <= check_whole("threads", threads) <= MAX_THREADS:
        raise ArgumentError(f"at least one thread must copy, and at most {MAX_THREADS}, found threads={threads}")
    return int(threads)


def refuse_copies(one: object, instead: str) -> NoReturn:
    """Raises `ArgumentError`: for `__reduce_ex__` of what stands for something of this process, and is there once."""
    raise ArgumentError(f"a {type(one).__name__} can be neither copied nor pickled: {instead}")


def capacity_of(
    max_length: int,
    capacity: int | None,
    capacity_steps: int | None,
    capacity_bytes: int | None,
    rows_within: Callable[[int], int],
) -> int:
    """Rows of a store, from exactly one of rows, steps (in rows of `max_length`) and bytes of its segment.

    Args:
        rows_within: the rows of the largest segment of at most so many bytes.
    """
    given = {"capacity": capacity, "capacity_steps": capacity_steps, "capacity_bytes": capacity_bytes}
    if sum(size is not None for size in given.values()) != 1:
        found = ", ".join(f"{what}={size}" for what, size in given.items() if size is not None) or "none of them"
        raise ArgumentError(
            f"give the store's size once: capacity (rows), capacity_steps or capacity_bytes; found {found}"
        )
    if capacity_steps is not None:
        capacity = whole_number("capacity_steps", capacity_steps, 2**63) // max_length
        if capacity == 0:
            raise ArgumentError(f"capacity_steps is {capacity_steps}, and one row alone takes max_length={max_length}")
    elif capacity_bytes is not None:
        capacity = rows_within(whole_number("capacity_bytes", capacity_bytes, 2**63 - 1))
    assert capacity is not None
    if capacity < 1:
        raise ArgumentError(f"a store needs room for at least one row, capacity is {capacity}")
    return whole_number("capacity", capacity, 2**63)


def whole_number(what: str, value: Any, most: int) -> int:
    """The value as an int from 0 to `most`; fractions and infinities are refused, not cut."""
    number = check_whole(what, value)
    if not 0 <= number <= most:
        raise ArgumentError(f"{what} must be from 0 to {most}, found {number}")
    return number


def check_whole(what: str, value: Any) -> int:
    """The value as an int of any sign; fractions, text and booleans are refused."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        return int(operator.index(value))
    except TypeError:
        raise ArgumentError(f"{what} must be a whole number, found {value!r}") from None


def check_real(what: str, value: Any, wanted: str = "a finite number") -> float:
    """The value as a finite float; text, booleans and arrays are refused."""
    number = float("nan")
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, (bool, np.bool_, str, bytes)):
            number = float(value)
    if not -float("inf") < number < float("inf"):
        raise ArgumentError(f"{what} is {wanted}, found {str(value)[:80]}")
    return number


def nanoseconds(what: str, seconds: float) -> int:
    """A limit in seconds, above zero, as at least one nanosecond."""
    if not seconds <= 1e9:  # thirty years; also refuses NaN
        raise ArgumentError(f"{what} must be at most 1e9 seconds, found {seconds} (leave it out for no limit)")
    return max(1, int(seconds * 1e9))


def timeout(timeout_s: float, name: str = "timeout_s") -> float:
    """The longest wait, in seconds: from 0, which does not wait, to 1e9. There is no wait without an end."""
    if not is_timeout(timeout_s):
        raise ArgumentError(f"{name} must be from 0 to 1e9 seconds, found {timeout_s!r}")
    return timeout_s


def is_timeout(timeout_s: object) -> bool:
    """Whether `timeout` takes it."""
    try:
        return getattr(timeout_s, "ndim", 0) == 0 and bool(0 <= timeout_s <= 1e9)  # type: ignore[operator]
    except (TypeError, ValueError, RuntimeError):  # of another type, or an array
        return False


def schema_difference(wanted: dict[str, Field], found: dict[str, Field]) -> str:
    """The first difference between two schemas that are not the same, in words."""
    for field, spec in wanted.items():
        if field not in found:
            return f"it has no field {field!r}"
        if spec != found[field]:
            return f"field {field!r} is {found[field]}, asked for {spec}"
    unasked = next(field for field in found if field not in wanted)
    return f"it has a field {unasked!r} that was not asked for"
