"""Faults of the native layer as named errors."""

from __future__ import annotations

import re
from collections.abc import Sequence

from geartrain.errors import (
    CollectiveClosedError,
    CollectiveTimeoutError,
    GeartrainError,
    MessageError,
    RankLostError,
    RanksDisagreeError,
    ReducerLostError,
)

REDUCER_LOST, TIMED_OUT = 2, 3

# By the native FaultKind (native/collectives/protocol.h).
_CLASSES: dict[int, type[GeartrainError]] = {
    1: RankLostError,
    REDUCER_LOST: ReducerLostError,
    TIMED_OUT: CollectiveTimeoutError,
    4: RanksDisagreeError,
    5: MessageError,
    6: CollectiveClosedError,
    7: CollectiveClosedError,
}

#: Kind, text, and the members it is about: ranks, then reducers.
Fault = tuple[int, str, list[int]]


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
    """An error of a group of some ranks as one of the whole group; itself where that is the same, or it is no error of
    geartrain's."""
    if not isinstance(error, GeartrainError) or list(numbers) == list(range(len(numbers))):
        return error
    found = type(error)(renumbered_text(str(error), numbers))
    ranks = tuple(numbers[rank] for rank in getattr(error, "ranks", ()) if rank < len(numbers))
    vars(found).update(ranks=ranks, reducers=tuple(getattr(error, "reducers", ())))
    return found
