"""Values of wrong types and ranges, for every parameter of the public calls that reach sockets, files and segments.

`doors` says how to make each call with arguments that it takes. `sweep` replaces each of them, and each parameter that
is left out, by each value of `VALUES`: the call may take the value or refuse it by an error of geartrain's. Anything
else is a defect: a TypeError of the native layer with its signatures, an OverflowError, a crash, a wait without an end.
"""

from __future__ import annotations

import contextlib
import inspect
import math
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
#: Built-in errors that a call documents beside geartrain's.
DOCUMENTED = {"rpc.batch_stats": LookupError}


def door(name: str) -> Callable[[Callable[[Tools], Door]], Callable[[Tools], Door]]:
    """Registers how to make a call: what to call, and arguments by name that it takes."""

    def register(make: Callable[[Tools], Door]) -> Callable[[Tools], Door]:
        assert name not in DOORS, name
        DOORS[name] = make
        return make

    return register


def parameters(call: Callable[..., Any], given: dict[str, Any]) -> Iterator[str]:
    """Names of the parameters that can be given by name."""
    found = inspect.signature(call).parameters.values()
    yield from (each.name for each in found if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))
    yield from (name for name in given if name not in {each.name for each in found})


def sweep(tools: Tools, name: str) -> list[str]:
    """Every parameter of a call with every value; returns what was found wrong."""
    call, given = DOORS[name](tools)
    found = []
    for parameter in parameters(call, given):
        for value in VALUES:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wrong = attempt(
                    call, {**given, parameter: value}, (GeartrainError, DOCUMENTED.get(name, GeartrainError))
                )
            if wrong is not None:
                found.append(f"{name}({parameter}={_shown(value)}): {wrong}")
    return found


def attempt(call: Callable[..., Any], arguments: dict[str, Any], refusals: tuple[type[Exception], ...]) -> str | None:
    """Makes the call and ends what it returns; says what is wrong with an error that is raised."""
    try:
        made = call(**arguments)
        for end in ("close", "stop"):
            if callable(getattr(made, end, None)):
                with contextlib.suppress(GeartrainError):
                    getattr(made, end)()
                break
    except refusals as refused:
        return f"a message of {len(str(refused))} characters" if len(str(refused)) > LONGEST else None
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:160]!r}"
    return None


def _shown(value: Any) -> str:
    text = f"a number of {value.bit_length()} bits" if isinstance(value, int) and value > 2**70 else repr(value)
    return text if len(text) < 40 else f"{text[:30]}..."
