"""Checks of arguments: whole numbers, timeouts, capacities, thread counts."""

from __future__ import annotations

import inspect
import operator
import os
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

import geartrain._native as _native
from geartrain.errors import ArgumentError, SchemaError

# More threads than any machine has use for: a mistake.
MAX_THREADS = 4096
#: Rows of a store: places have 32 bits, and the last few of them stand for none.
MAX_CAPACITY = 2**32 - 16


def default_threads(threads: int | None) -> int:
    """Number of copy threads: the requested number, or up to four of the cores that this process may use."""
    if threads is None:
        return min(4, int(_native.available_cores()))
    if not 1 <= check_whole("threads", threads) <= MAX_THREADS:
        raise ArgumentError(f"threads must be from 1 to {MAX_THREADS}, found threads={threads}")
    return int(threads)


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
            f"give exactly one size of the store: capacity (rows), capacity_steps or capacity_bytes; found {found}"
        )
    if capacity_steps is not None:
        capacity = whole_number("capacity_steps", capacity_steps, 2**63 - 1, least=1) // max_length
        if capacity == 0:
            raise ArgumentError(
                f"capacity_steps is {capacity_steps}, but one row takes max_length={max_length} steps: raise "
                "capacity_steps"
            )
    elif capacity_bytes is not None:
        nbytes = check_whole("capacity_bytes", capacity_bytes)  # of 0 it is told how many one row takes
        capacity = rows_within(whole_number("capacity_bytes", nbytes, 2**63 - 1, least=1) if nbytes else 0)
    rows = check_whole("capacity", capacity)
    if rows < 1:
        raise ArgumentError(f"a store needs room for at least one row, capacity is {shown(capacity)}")
    if rows > MAX_CAPACITY:
        raise ArgumentError(f"a shard has at most {MAX_CAPACITY} rows, capacity is {shown(rows)}")
    return rows


def whole_number(what: str, value: Any, most: int, *, least: int = 0) -> int:
    """The value as an int from `least` to `most`; fractions and infinities are refused, not cut."""
    number = check_whole(what, value)
    if not least <= number <= most:
        raise ArgumentError(f"{what} must be from {least} to {most}, found {shown(number)}")
    return number


def check_whole(what: str, value: Any) -> int:
    """The value as an int of any sign; fractions, text and booleans are refused."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        return int(operator.index(value))
    except TypeError:
        raise ArgumentError(f"{what} must be a whole number, found {shown(value)}") from None


def real_number(value: Any) -> float:
    """A real number as a float: Python's, a scalar or an array () of NumPy's or torch's. NaN for all that is none."""
    if value.__class__ is float:
        return value  # type: ignore[no-any-return]
    if isinstance(value, (bool, str, bytes, bytearray)) or getattr(value, "ndim", 0) != 0:  # float(b"1") is a number
        return float("nan")
    dtype = getattr(value, "dtype", None)
    if dtype is not None and (getattr(dtype, "kind", "f") not in "iufV" or str(dtype) == "torch.bool"):
        return float("nan")  # V: of ml_dtypes
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else -float("inf")
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: complex tensors, and those without data
        return float("nan")


def check_real(what: str, value: Any, wanted: str = "a finite number") -> float:
    """The value as a finite float; text, booleans and arrays of several are refused."""
    number = real_number(value)
    if not -float("inf") < number < float("inf"):
        raise ArgumentError(f"{what} is {wanted}, found {shown(value)}")
    return number


def is_masked(value: Any) -> bool:
    """Whether it is a NumPy masked array. Imports their module only if the program already uses it."""
    masked = sys.modules.get("numpy.ma")
    # Absent while another thread, or a thread of a forked child's parent, is in the midst of the import.
    kind = getattr(masked, "MaskedArray", None)
    return kind is not None and isinstance(value, kind)


def check_unmasked(what: str, values: Any) -> None:
    """Raises `SchemaError` for masked arrays, also in a list: their hidden values would be stored as if they were
    there.
    """
    if any(map(is_masked, values)) if isinstance(values, list | tuple) else is_masked(values):
        raise SchemaError(
            f"{what} is a masked array, and its mask would be lost: pass its .filled(value), or its .data with the "
            "mask as a field"
        )


def check_flag(what: str, value: Any) -> bool:
    """The value as a bool; only True and False are taken, NumPy's too."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(f"{what} is True or False, found {shown(value)}")
    return bool(value)


def check_text(what: str, value: Any, *, empty: bool = False) -> str:
    """The value as text that has an encoding and no zero byte, which would end it elsewhere."""
    if not isinstance(value, str) or not (value or empty) or "\0" in value:
        raise ArgumentError(f"{what} must be text{('' if empty else ' that is not empty')}, found {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{what} is text, found characters without an encoding: {ascii(value)[:80]}") from None
    return value


def check_choice(what: str, value: Any, choices: Iterable[str]) -> str:
    """The value, once it is one of the choices."""
    choices = list(choices)
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(
            f"{what} is one of {', '.join(map(repr, choices))}, found {shown(value)}{did_you_mean(value, choices)}"
        )
    return value


def check_keywords(what: str, given: Iterable[str], takes: Callable[..., Any] | Iterable[str]) -> None:
    """Raises `ArgumentError` for keywords that a function does not take.

    Args:
        what: the function's name, for the error.
        given: the keywords.
        takes: the function that they are handed on to, or the keywords that there are.
    """
    if callable(takes):
        takes = [
            name for name, each in inspect.signature(takes).parameters.items() if each.kind is not each.VAR_KEYWORD
        ]
    known = list(takes)
    if unknown := sorted(set(given) - set(known)):
        raise ArgumentError(
            f"{what} takes no {', '.join(unknown)}; it takes {', '.join(known)}{did_you_mean(unknown, known)}"
        )


def did_you_mean(given: object, known: Iterable[object]) -> str:
    """The end of an error about a word that is unknown: "; did you mean 'fifo'?" where a known one is close to it.

    Args:
        given: the word, or several.
        known: the words that there are.
    """
    import difflib  # here: only errors need it

    words = [given] if isinstance(given, str) else given if isinstance(given, list | tuple | set) else []
    by_lower = {each.lower(): each for each in known if isinstance(each, str)}
    near: dict[str, None] = {}
    for word in words:
        if isinstance(word, str):
            near |= dict.fromkeys(difflib.get_close_matches(word[:100].lower(), by_lower, 1, 0.7))
    return f"; did you mean {' and '.join(repr(by_lower[each]) for each in near)}?" if near else ""


def some_of(names: Iterable[str], most: int = 20) -> str:
    """Names for an error: "a, b", "none", or the first and how many more there are."""
    found = list(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return (", ".join(found[:most]) or "none") + more


def check_texts(what: str, values: Any) -> list[str]:
    """Several texts as a list. One text is refused, which would be taken for its characters; an iterator too."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Collection):
        raise ArgumentError(f"{what} is a list of texts, found {shown(values)}")
    try:
        return [check_text(f"each of {what}", value) for value in values]
    except TypeError:
        raise ArgumentError(f"{what} is a list of texts, found {shown(values)}") from None


def check_path(what: str, value: Any) -> Path:
    """The value as a path."""
    if not isinstance(value, (str, os.PathLike)):
        raise ArgumentError(f"{what} is a path, found {shown(value)}")
    try:
        text = os.fsdecode(value)
        longest = max(len(part) for part in os.fsencode(text).split(b"/"))
    except (TypeError, UnicodeError):  # a PathLike that is none; characters without an encoding
        text, longest = "", 0
    if not text or "\0" in text or longest > 255:  # what no file system on Linux has
        raise ArgumentError(f"{what} is a path, found {shown(value)}")
    return Path(text)


def check_function(what: str, value: Any) -> None:
    """Raises unless the value can be called."""
    if not callable(value):
        raise ArgumentError(f"{what} is a function, found {shown(value)}")


def check_secret(value: Any) -> bytes:
    """A cluster's secret as bytes. Refuses a number, because `bytes(n)` would be n zeros."""
    if isinstance(value, np.ndarray) and value.dtype == np.uint8:
        return value.tobytes()
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise ArgumentError(f"a secret is bytes, found a {type(value).__name__}")
    return bytes(value)


def check_store(store: Any) -> None:
    """Raises unless the value is a rendezvous store, or None."""
    if store is not None and not all(callable(getattr(store, call, None)) for call in ("set", "get", "check")):
        raise ArgumentError(
            f"store must have set, get and check, like a store of torch.distributed; found {shown(store)}"
        )


def shown(value: object) -> str:
    """A value as text for an error message. Long values are cut, and whole numbers of any size are shown."""
    try:
        text = repr(value)
    except Exception:  # an int of more digits than Python converts, or a repr of the caller's that raises
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:80]}... ({len(text)} characters)"


def nanoseconds(what: str, seconds: float) -> int:
    """A limit in seconds, above zero, as at least one nanosecond."""
    if not seconds <= 1e9:  # thirty years; also refuses NaN
        raise ArgumentError(f"{what} must be at most 1e9 seconds, found {seconds} (leave it out for no limit)")
    return max(1, int(seconds * 1e9))


def timeout(timeout_s: float, name: str = "timeout_s") -> float:
    """The longest wait, in seconds: from 0, which does not wait, to 1e9. There is no wait without an end."""
    number = real_number(timeout_s)
    if not 0 <= number <= 1e9:
        raise ArgumentError(f"{name} must be from 0 to 1e9 seconds, found {shown(timeout_s)}")
    return number
