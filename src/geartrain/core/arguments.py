"""Checks of arguments: each kind of value has one check, which returns the value and has one text for its error.

A function checks its parameters by calls: `batch_size = check_whole("batch_size", batch_size, 1, MAX_DRAWS)`. An option
class derives from `Options` and declares the check where it defines the option:
`threads: int | None = field(default=None, metadata=checked(check_whole, 1, MAX_THREADS))`.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.extras import require_torch
from geartrain.errors import ArgumentError, SchemaError

P = ParamSpec("P")
T = TypeVar("T")
Array = TypeVar("Array", bound=NDArray[Any])

# More threads than any machine has use for: a mistake.
MAX_THREADS = 4096
#: Rows of a store: places have 32 bits, and the last few of them stand for none.
MAX_CAPACITY = 2**32 - 16


def default_threads(threads: int | None) -> int:
    """Number of copy threads: the requested number, or up to four of the cores that this process may use."""
    if threads is None:
        return min(4, int(_native.available_cores()))
    return int(THREADS("threads", threads))


class Options:
    """Base of the frozen dataclasses of options. Checks each option by the `checked` metadata of its field.

    An option whose default is None may be None. A subclass with rules between options adds them in its own
    `__post_init__`, after this one.
    """

    #: What errors say before an option's name, as a format of the object.
    ABOUT: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, check, may_be_none in _checks_of(type(self)):  # type: ignore[arg-type]
            value = getattr(self, name)
            if value is not None or not may_be_none:
                object.__setattr__(self, name, check(self.ABOUT.format(self) + name, value))


@functools.cache
def _checks_of(kind: type) -> list[tuple[str, Callable[[str, Any], Any], bool]]:
    declared = [each for each in fields(kind) if "check" in each.metadata]
    return [(each.name, each.metadata["check"], each.default is None) for each in declared]


class checked(dict[str, Any]):  # noqa: N801 - a field's metadata, which reads as a call
    """A declared option: the metadata of its field in a class of `Options`, and a check of a function's parameter.

    `SEED = checked(check_whole, 0, 2**64 - 1)` is used as `field(default=0, metadata=SEED)` and `SEED("seed", seed)`.
    """

    def __init__(self, check: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(check=lambda what, value: check(what, value, *args, **kwargs))

    def __call__(self, what: str, value: Any) -> Any:
        """The value, once checked."""
        return self["check"](what, value)


def optional(
    check: Callable[Concatenate[str, Any, P], T], what: str, value: Any, *args: P.args, **kwargs: P.kwargs
) -> T | None:
    """None, or the value as `check(what, value, ...)` returns it."""
    return None if value is None else check(what, value, *args, **kwargs)


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
        capacity = check_whole("capacity_steps", capacity_steps, 1, 2**63 - 1) // max_length
        if capacity == 0:
            raise ArgumentError(
                f"capacity_steps is {capacity_steps}, but one row takes max_length={max_length} steps: raise "
                "capacity_steps"
            )
    elif capacity_bytes is not None:
        capacity = rows_within(check_whole("capacity_bytes", capacity_bytes, 0, 2**63 - 1))
    return check_whole("capacity", capacity, 1, MAX_CAPACITY)


def check_whole(what: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """The value as an int from `least` to `most`, each None for no limit; fractions, text and booleans are refused."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = int(operator.index(value))
    except TypeError:
        raise ArgumentError(f"{what} must be a whole number, found {shown(value)}") from None
    if least is not None and number < least:
        near = most is not None and most < 2**30  # others are limits of a format, which no program comes near to
        raise ArgumentError(f"{what} must be{_range(least, most if near else None)}, found {shown(number)}")
    if most is not None and number > most:
        raise ArgumentError(f"{what} must be{_range(least, most)}, found {shown(number)}")
    return number


def _range(least: float | None, most: float | None, above: float | None = None) -> str:
    """Limits for an error: " from 1 to 8", " at least 1", " above 0 and at most 1"; "" without any."""
    if least is not None and most is not None:
        return f" from {_number(least)} to {_number(most)}"
    said = (("at least", least), ("above", above), ("at most", most))
    told = " and ".join(f"{how} {_number(limit)}" for how, limit in said if limit is not None)
    return told and f" {told}"


def _number(limit: float) -> str:
    return f"{limit}" if isinstance(limit, int) else f"{limit:g}"


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


def check_real(
    what: str, value: Any, least: float | None = None, most: float | None = None, *, above: float | None = None
) -> float:
    """The value as a finite float within the limits, each None for no limit; text, booleans and arrays of several are
    refused.
    """
    number = real_number(value)
    if (
        not -float("inf") < number < float("inf")
        or (least is not None and number < least)
        or (most is not None and number > most)
        or (above is not None and number <= above)
    ):
        limits = _range(least, most, above)
        of = " of" if limits.startswith(" at") else ""
        raise ArgumentError(f"{what} must be a finite number{of}{limits}, found {shown(value)}")
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


def check_choice(what: str, value: Any, choices: Collection[str]) -> str:
    """The value, once it is one of the choices."""
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
            near |= dict.fromkeys(difflib.get_close_matches(word[:100].lower(), by_lower, 1, 0.65))
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


def check_pair(what: str, value: str, form: str = "NAME=VALUE", *, empty: bool = False) -> tuple[str, str]:
    """Both sides of a text of this form; the second may be empty only with `empty`."""
    name, sign, told = value.partition("=")
    if not (name.strip() and sign and (told or empty)):
        raise ArgumentError(f"{what} takes {form}, found {shown(value)}")
    return name, told


def check_path(what: str, value: Any) -> Path:
    """The value as a path that a file system of Linux can have."""
    check_type(f"{what} is a path", value, (str, os.PathLike))
    try:
        text = os.fsdecode(value)
        longest = max(len(part) for part in os.fsencode(text).split(b"/"))
    except (TypeError, UnicodeError):  # a PathLike that is none; characters without an encoding
        raise ArgumentError(f"{what} is a path, found {shown(value)}") from None
    if not text or "\0" in text:
        raise ArgumentError(f"{what} must be a path that is not empty and has no zero byte, found {shown(value)}")
    if longest > 255:
        raise ArgumentError(
            f"{what} has a name of {longest} bytes, and file systems take at most 255: shorten it, found {shown(text)}"
        )
    return Path(text)


def check_function(what: str, value: Any, wanted: str = "a function") -> Any:
    """The value, once it can be called."""
    if not callable(value):
        raise ArgumentError(f"{what} is {wanted}, found {shown(value)}")
    return value


@overload
def check_type(rule: str, value: Any, kind: type[T]) -> T: ...


@overload
def check_type(rule: str, value: Any, kind: Any) -> Any: ...


def check_type(rule: str, value: Any, kind: Any) -> Any:
    """The value, once it is an instance of a type, of a union of them, or of one of a tuple.

    Args:
        rule: the first half of the error: "options are geartrain.ReplayOptions".
    """
    if not isinstance(value, kind):
        raise ArgumentError(f"{rule}, found {shown(value)}")
    return value


def check_calls(rule: str, value: Any, *names: str) -> Any:
    """The value, once it has methods of these names. The rule is the first half of the error."""
    if not all(callable(getattr(value, name, None)) for name in names):
        raise ArgumentError(f"{rule}, found {shown(value)}")
    return value


def check_names_of(what: str, values: Any, *, empty: bool = False) -> tuple[str, ...]:
    """Names of fields, each once, and at least one unless there may be none (`empty`)."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise ArgumentError(f"{what} is a list of names, found {shown(values)}")
    for name in values:
        check_type(f"{what} is a list of names", name, str)
    if len(set(values)) != len(values) or not (values or empty):
        raise ArgumentError(f"{what} names each field once, and at least one; found {shown(values)}")
    return tuple(values)


def check_array(rule: str, array: Array, shape: tuple[int, ...], kinds: str = "biuf") -> Array:
    """The array, once it has the shape, -1 for any length, and one of the dtype kinds. Empty ones may have any dtype.

    Args:
        rule: the first half of the error: "rows are whole numbers (n,)".
    """
    fits = len(array.shape) == len(shape) and all(map(lambda n, found: n in (-1, found), shape, array.shape))
    if not fits or (array.size and array.dtype.kind not in kinds):
        raise ArgumentError(f"{rule}, found {array.dtype} {array.shape}")
    return array


def leave_out(why: str, **given: object) -> None:
    """Raises `ArgumentError` if any of the options is given, that is not None, False or empty.

    Args:
        why: what they do not go with, for the error: "a view places its own windows".
        given: each option's value, or whether it is given.
    """
    if names := [
        f"{name}={shown(value)}" if isinstance(value, (str, int, float)) and value is not True else name
        for name, value in given.items()
        if value is not None and value is not False and not (isinstance(value, Sequence) and not value)
    ]:
        raise ArgumentError(f"{why}: leave out {' and '.join(names)}")


def at_most_one(**given: object) -> None:
    """Raises `ArgumentError` if more than one of the options is given, that is not None."""
    if len(names := [name for name, value in given.items() if value is not None]) > 1:
        raise ArgumentError(f"{' and '.join(names)} exclude each other: give one of them")


def check_secret(value: Any) -> bytes:
    """A cluster's secret as bytes. Refuses a number, because `bytes(n)` would be n zeros."""
    if isinstance(value, np.ndarray) and value.dtype == np.uint8:
        return value.tobytes()
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise ArgumentError(f"a secret is bytes, found a {type(value).__name__}")
    return bytes(value)


def check_store(store: Any) -> None:
    """Raises unless the value is a rendezvous store, or None."""
    if store is not None:
        check_calls(
            "store must have set, get and check, like a store of torch.distributed", store, "set", "get", "check"
        )


def check_output(what: str, value: Any) -> Literal["torch", "numpy"]:
    """The kind of a batch's arrays, once this process can make them: tensors need torch."""
    if check_choice(what, value, ("torch", "numpy")) == "numpy":
        return "numpy"
    require_torch("a batch of tensors", "; output='numpy' makes arrays")
    return "torch"


def shown(value: object) -> str:
    """A value as text for an error message. Long values are cut, and whole numbers of any size are shown."""
    try:
        text = repr(value)
    except Exception:  # an int of more digits than Python converts, or a repr of the caller's that raises
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:80]}... ({len(text)} characters)"


def timeout(timeout_s: float, name: str = "timeout_s") -> float:
    """The longest wait, in seconds: from 0, which does not wait, to 1e9. There is no wait without an end."""
    number = real_number(timeout_s)
    if not 0 <= number <= 1e9:
        raise ArgumentError(f"{name} must be from 0 to 1e9 seconds, found {shown(timeout_s)}")
    return number


#: Options that many doors have.
FLAG = checked(check_flag)
OUTPUT = checked(check_output)
PAD = checked(check_choice, ("left", "right"))
SECONDS = checked(lambda what, value: timeout(value, what))
SEED = checked(check_whole, 0, 2**64 - 1)
THREADS = checked(check_whole, 1, MAX_THREADS)
