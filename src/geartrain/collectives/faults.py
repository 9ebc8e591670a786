"""Converts faults of the native layer into geartrain's errors, which name the ranks and reducers concerned."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

from geartrain.errors import (
    CollectiveClosedError,
    CollectiveTimeoutError,
    GeartrainError,
    MessageError,
    RankLostError,
    RanksDisagreeError,
    ReducerLostError,
)

REDUCER_LOST, TIMED_OUT, ABORTED, CLOSED = 2, 3, 6, 7  # aborted by a rank, closed here

# By the native FaultKind (native/collectives/protocol.h).
_CLASSES: dict[int, type[GeartrainError]] = {
    1: RankLostError,
    REDUCER_LOST: ReducerLostError,
    TIMED_OUT: CollectiveTimeoutError,
    4: RanksDisagreeError,
    5: MessageError,
    ABORTED: CollectiveClosedError,
    CLOSED: CollectiveClosedError,
}

#: Kind, text, and the members concerned: ranks, then reducers.
Fault = tuple[int, str, list[int]]

_MARK = "fault of a part: "
#: Limits, in bytes of JSON, of a fault that is sent to other ranks in one frame of 2048 letters
#: (native/collectives/protocol.cc).
_MOST_TEXT, _MOST_MEMBERS = 1400, 64


def error_of(fault: Fault, name: str, world_size: int, reducers: Sequence[str]) -> GeartrainError:
    """The error of a fault; its `ranks` and `reducers` name the members it is about."""
    kind, text, members = fault
    error = _CLASSES[kind](f"group {name!r}: {text}")
    about = [reducers[m - world_size] for m in members if world_size <= m < world_size + len(reducers)]
    found = {
        "ranks": tuple(m for m in members if m < world_size),
        "reducers": tuple(dict.fromkeys(about)),  # one with several threads is several members
    }
    for attribute, value in found.items():
        setattr(error, attribute, value)
    return error


def _cut(text: str) -> str:
    """As much of it as has `_MOST_TEXT` bytes in JSON, which has letters beyond ASCII as six: frames have no other."""
    sizes = accumulate(len(json.dumps(letter)) - 2 for letter in text[:_MOST_TEXT])
    return text[: sum(size <= _MOST_TEXT for size in sizes)]


def as_reason(fault: Fault) -> str:
    """A fault of one part of a hierarchical group as the reason with which the other parts are aborted.

    Args:
        fault: with its members as all ranks are numbered.
    """
    kind, text, members = fault
    return _MARK + json.dumps([kind, members[:_MOST_MEMBERS], _cut(text)])


def from_reason(fault: Fault) -> Fault | None:
    """The fault of another part, as all ranks are numbered, of which this one is the abort; None for any other."""
    kind, text, _ = fault
    if kind == ABORTED and _MARK in text:
        with suppress(ValueError):  # what stands behind it is of those that have passed it on
            found, _ = json.JSONDecoder().raw_decode(text, text.index(_MARK) + len(_MARK))
            told, named, said = found
            return int(told), str(said), [int(member) for member in named]
    return None


_RANKS = re.compile(r"\brank (\d+)|\brank\(s\) (\d+(?:, \d+)*)")


def renumbered_text(text: str, numbers: Sequence[int]) -> str:
    """A text of a group of some ranks, with each "rank N" and "rank(s) N, M" as the whole group numbers it."""

    def number(found: str) -> str:
        return str(numbers[int(found)]) if int(found) < len(numbers) else found

    def replace(match: re.Match[str]) -> str:
        if match[1] is not None:
            return f"rank {number(match[1])}"
        return f"rank(s) {', '.join(map(number, match[2].split(', ')))}"

    return _RANKS.sub(replace, text)


def renumbered(error: BaseException, numbers: Sequence[int]) -> BaseException:
    """The error of a group of some ranks, with the rank numbers of the whole group.

    Returns the error itself if the numbers are the same, or if it is not geartrain's.
    """
    if not isinstance(error, GeartrainError) or list(numbers) == list(range(len(numbers))):
        return error
    found = type(error)(renumbered_text(str(error), numbers))
    ranks = tuple(numbers[rank] for rank in getattr(error, "ranks", ()) if rank < len(numbers))
    vars(found).update(ranks=ranks, reducers=tuple(getattr(error, "reducers", ())))
    return found
