"""Values of wrong types and ranges, for every parameter of the public calls that reach sockets, files and segments.

`doors` says how to make each call with arguments that it takes. `sweep` replaces each of them, and each parameter that
is left out, by each value of `VALUES`: the call may take the value or refuse it by an error of geartrain's. Anything
else is a defect: a TypeError of the native layer with its signatures, an OverflowError, a crash, a wait without an end.
So is a value that is taken and means nothing, where `door` says what a parameter takes. `refused` finds
values that equal what a call takes, such as NumPy scalars, and are refused.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.errors import GeartrainError
from hostile.subject import Tools

VALUES: list[Any] = [
    None, True, np.True_, -1, 0, 2, 2**31, 2**32, 2**63, 2**64, 2**200, 10**400, -(2**63) - 1,
    2.5, -0.5, 1e300, math.nan, math.inf, -math.inf, np.int64(3), np.float32("nan"), 1j,
    np.array(1.0), np.array([1, 2]),
    "", "x", "1", "nan", "a\0b", "\ud800", "é" * 40, "x" * 5000, b"", b"1", b"\xff\0", bytearray(b"1"),
    [], [1], ["x"], [None], (), ("x", 1), {}, {"x": 1}, {1: 2}, {"x": None}, set(), object(), Exception, print,
    Path("relative"), Path("/proc/no/such/place"), range(3), iter([1]), np.array(["x"], object),
]  # fmt: skip
#: A message of more characters than this is a dump.
LONGEST = 6000

Door = tuple[Callable[..., Any], dict[str, Any]]
DOORS: dict[str, Callable[[Tools], Door]] = {}
Takes = Callable[[Any], bool]
TAKES: dict[str, dict[str, Takes]] = {}
#: Longest that a refusal may take, in seconds on an idle machine.
SOON_S = 5.0
#: Built-in errors that a call documents beside geartrain's.
DOCUMENTED = {"export_store": OSError, "rpc.batch_stats": LookupError, "Rows[]": IndexError, "Keys[]": IndexError}
#: Calls that are refused whatever they are given, and why; all others must take what the sweep begins with.
REFUSED = {
    "transport.TLS": "there are no certificates",
    "Node.unsubscribe": "nothing is subscribed to",
    "Node.remote": "no class is registered",
    "rpc.batch_stats": "no function is batched",
}


def door(name: str, /, **takes: Takes) -> Callable[[Callable[[Tools], Door]], Callable[[Tools], Door]]:
    """Registers how to make a call: what to call, and arguments by name that it takes.

    Args:
        takes: of some parameters, which values of `VALUES` they may take: all others must be refused. They may be
            refused, too, for what else was given.
    """

    def register(make: Callable[[Tools], Door]) -> Callable[[Tools], Door]:
        assert name not in DOORS, name
        DOORS[name], TAKES[name] = make, takes
        return make

    return register


def whole(least: int, most: int, *, none: bool = False) -> Takes:
    """Whole numbers of a range; with `none` None as well."""

    def is_whole(value: Any) -> bool:
        if value is None:
            return none
        return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and least <= value <= most

    return is_whole


def number(least: float, *, above: bool = False, none: bool = False, most: float = 1.8e308) -> Takes:
    """Finite real numbers of a range, arrays () of them too; with `none` None as well."""

    def is_number(value: Any) -> bool:
        if value is None:
            return none
        if isinstance(value, np.ndarray) and value.shape == ():
            value = value[()]
        if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
            return False
        value = value.item() if isinstance(value, np.generic) else value
        if abs(value) > 10**308 or not math.isfinite(value) or value > most:
            return False
        return bool(value > least if above else value >= least)

    return is_number


def flag(value: Any) -> bool:
    """True and False."""
    return isinstance(value, (bool, np.bool_))


def choice(*texts: str | None) -> Takes:
    """One of some texts."""
    return lambda value: value is None or isinstance(value, str) if value in texts else False


def one_or_array(of_one: Takes, n: int) -> Takes:
    """One value for all of n, or an array of so many; None for the default."""

    def fits(value: Any) -> bool:
        if value is None or (isinstance(value, np.ndarray) and value.dtype.kind in "iuf" and value.shape in ((), (n,))):
            return True
        return of_one(value)

    return fits


def path(value: Any) -> bool:
    """What may be the name of a file."""
    return isinstance(value, (str, Path)) and 0 < len(str(value)) < 256 and "\0" not in str(value)


def no_names(value: Any) -> bool:
    """What holds no name."""
    return isinstance(value, list | tuple | dict | set) and not value


def nothing(value: Any) -> bool:
    """No value of `VALUES`."""
    return False


#: What many calls take: seconds to wait, a row's priority and its version; and a wait that ends with nothing.
SECONDS, PRIORITY, VERSION = number(0, most=1e9), number(0, none=True), whole(-(2**63), 2**63 - 1)
SHORT_S = 0.02


def parameters(call: Callable[..., Any], given: dict[str, Any]) -> Iterator[str]:
    """Names of the parameters that can be given by name."""
    found = inspect.signature(call).parameters.values()
    yield from (each.name for each in found if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))
    yield from (name for name in given if name not in {each.name for each in found})


def sweep(tools: Tools, name: str) -> list[str]:
    """Every parameter of a call with every value; returns what was found wrong."""
    call, given = DOORS[name](tools)
    found, takes = [], TAKES[name]
    unknown = set(takes) - set(parameters(call, given))
    assert not unknown, f"{name} has no {unknown}"
    refusals = (GeartrainError, DOCUMENTED.get(name.partition(", ")[0], GeartrainError))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        taken, wrong = attempt(call, given, refusals)  # imports what takes long to import
    if taken == (name in REFUSED):
        found.append(f"{name}: {'takes' if taken else 'refuses'} what the sweep begins with ({wrong})")
    for parameter in parameters(call, given):
        for value in VALUES:
            began_s = time.monotonic()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                taken, wrong = attempt(call, {**given, parameter: value}, refusals)
            if taken and parameter in takes and not takes[parameter](value):
                wrong = "is taken, and means nothing"
            if (took_s := time.monotonic() - began_s) > tools.patience(SOON_S):
                wrong = f"{wrong or 'is told'} after {took_s:.1f} s"
            if wrong is not None:
                found.append(f"{name}({parameter}={_shown(value)}): {wrong}")
    return found


def equals(value: Any) -> list[Any]:
    """The same value in other types that mean it: NumPy's scalars and arrays (), torch's where it is imported."""
    if isinstance(value, bool):
        return [np.bool_(value)]
    if isinstance(value, Path):
        return [str(value)]
    if not isinstance(value, (int, float)) or abs(value) >= 2**31:
        return []
    made = [np.array(value)[()], np.array(value)]
    if "torch" in sys.modules:
        made.append(sys.modules["torch"].tensor(value))
    return made


def refused(tools: Tools, name: str) -> list[str]:
    """What equals the arguments of a call and is refused, though the call takes the arguments themselves."""
    call, given = DOORS[name](tools)
    found = []
    refusals = (GeartrainError, DOCUMENTED.get(name, GeartrainError))
    for parameter, value in given.items():
        for other in equals(value):
            if not attempt(call, {**given, parameter: other}, refusals)[0] and attempt(call, given, refusals)[0]:
                found.append(f"{name}({parameter}={_shown(other)}): is refused, and {_shown(value)} is taken")
    return found


def attempt(
    call: Callable[..., Any], arguments: dict[str, Any], refusals: tuple[type[Exception], ...]
) -> tuple[bool, str | None]:
    """Makes the call and ends what it returns: whether it took its arguments, and what is wrong with an error."""
    try:
        made = call(**arguments)
        for end in ("close", "stop"):
            if callable(getattr(made, end, None)):
                with contextlib.suppress(GeartrainError):
                    getattr(made, end)()
                break
    except refusals as refused:
        return False, f"a message of {len(str(refused))} characters" if len(str(refused)) > LONGEST else None
    except Exception as error:
        return False, f"{type(error).__name__}: {str(error)[:160]!r}"
    return True, None


def _shown(value: Any) -> str:
    text = f"a number of {value.bit_length()} bits" if isinstance(value, int) and value > 2**70 else repr(value)
    return text if len(text) < 40 else f"{text[:30]}..."
