"""Faults of the native layer as named errors."""

from __future__ import annotations

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
    found = {
        "ranks": tuple(m for m in members if m < world_size),
        "reducers": tuple(reducers[m - world_size] for m in members if world_size <= m < world_size + len(reducers)),
    }
    for attribute, value in found.items():
        setattr(error, attribute, value)
    return error
