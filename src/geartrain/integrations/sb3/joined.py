"""Joins the short rows of a saved replay buffer: each environment's transitions are packed into full rows.

Each load of a buffer begins new rows, and a save leaves the rows in progress short. Without joining, a buffer that is
saved and loaded repeatedly would end up with short rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.integrations.sb3.contents import Contents
from geartrain.integrations.transitions.layout import (
    DONE,
    FLAGS,
    MOST_ENVIRONMENTS,
    NUMBER,
    TIMEOUT,
    TRANSITION,
    count_of,
    environment_of,
    writer_of,
)
from geartrain.store.recorder import GOES_ON_HERE, REPEATS

_LAST = "last"


def joined(rows: Contents, overlap: int, observations: Sequence[str], priority: float) -> list[Contents]:
    """The rows, oldest first, without short ones but the last of each environment.

    Nothing is copied where no environment has more than one. From its first short row on, an environment's steps are
    cut into rows anew, which repeat `overlap` steps as those of a recorder do. A writer's rows, of all
    environments, are in the order of their newest transitions: the first ones are evicted first.

    Args:
        rows: of a replay buffer's store.
        overlap: steps that a row repeats of the one before.
        observations: the fields that are.
        priority: of new transitions, where the store keeps priorities of steps: the last ones of a short row, which had
            too few steps behind them to be drawn.
    """
    if not len(rows.lengths):
        return [rows]
    flags, numbers = rows.fields[FLAGS], rows.fields[NUMBER]
    longest = flags.shape[1]
    # Steps up to the last transition; what follows is an observation that led nowhere, or the end of a full row.
    real = ((flags & TRANSITION) != 0) & (np.arange(longest) < rows.lengths[:, None])
    length = np.where(real.any(1), longest - real[:, ::-1].argmax(1), 0)
    newest = numbers[np.arange(len(length)), np.maximum(length, 1) - 1]
    stream = writer_of(newest) * MOST_ENVIRONMENTS + environment_of(newest)
    kept = np.ones(len(length), np.bool_)
    made: list[tuple[int, Contents]] = []  # the place of a row that its newest step is of
    for each in np.unique(stream[length > 0]):
        mine = np.flatnonzero((length > 0) & (stream == each))
        mine = mine[np.argsort(newest[mine], kind="stable")]
        short = np.flatnonzero(length[mine] < longest - 1)
        if len(short) < 2:
            continue
        chain = mine[short[0] :]
        kept[chain] = False
        row, step, alone = _chained(rows.fields, chain, length, real, observations)
        behind = np.zeros(len(row), np.bool_)  # an end of a row that was there
        for joint in np.flatnonzero(np.diff(row)) + 1:
            behind[joint : joint + overlap - 1] = True
        first = rows.fields[REPEATS][chain[0]]
        for begin in range(0, max(1, len(row) - overlap), longest - 1 - overlap):
            part = slice(begin, begin + longest - 1)
            one = _row(rows, row[part], step[part], alone[part])
            # No step follows the last transition, so that the row after has none of its windows.
            one.fields[REPEATS][0] = (overlap, 0, GOES_ON_HERE) if begin else (first[0], 0, first[2] & GOES_ON_HERE)
            if one.priorities is not None:
                steps = one.priorities[0, : len(row[part])]
                steps[behind[part] & (steps == 0)] = priority
                steps[: overlap if begin else 0] = 0  # they are drawn from the row before
            made.append((int(row[: part.stop].max()), one))
    if not made:
        return [rows]
    parts = [(place, rows.part(place, place + 1)) for place in np.flatnonzero(kept).tolist()] + made
    return _by_age(parts)


def _by_age(parts: list[tuple[int, Contents]]) -> list[Contents]:
    """Rows one by one, those of each writer by their newest transitions, at the places that its rows had."""
    places = np.array([place for place, _ in parts])
    newest = np.array([_newest(row) for _, row in parts])
    writers, counts = writer_of(newest), count_of(newest)
    order = np.empty(len(parts), np.int64)
    for writer in np.unique(writers):  # counts of one are not comparable with those of another
        mine = np.flatnonzero(writers == writer)
        slots = mine[np.argsort(places[mine], kind="stable")]
        order[slots] = mine[np.lexsort((environment_of(newest[mine]), counts[mine]))]
    return [parts[place][1] for place in order[np.argsort(places, kind="stable")].tolist()]


def _newest(row: Contents) -> Any:
    """The number of a row's last transition, or of its first step where it has none."""
    flags = row.fields[FLAGS][0, : int(row.lengths[0])]
    transitions = np.flatnonzero(flags & TRANSITION)
    return row.fields[NUMBER][0, transitions[-1] if len(transitions) else 0]


def _row(rows: Contents, row: NDArray[np.int64], step: NDArray[np.int64], alone: NDArray[np.bool_]) -> Contents:
    """One row of these steps."""
    longest = rows.fields[FLAGS].shape[1]
    fields = {}
    for name, values in rows.fields.items():
        if name == REPEATS:
            fields[name] = np.zeros((1, *values.shape[1:]), values.dtype)
            continue
        fields[name] = np.zeros((1, longest, *values.shape[2:]), values.dtype)
        fields[name][0, : len(row)] = values[row, step]
    fields[FLAGS][0, : len(row)][alone] = 0
    if _LAST in fields:
        fields[_LAST][:] = False
    priorities = None
    if rows.priorities is not None:
        priorities = np.zeros((1, longest))
        priorities[0, : len(row)] = rows.priorities[row, step]
    return Contents(fields, np.array([len(row)], np.uint32), priorities)


def _chained(
    fields: dict[str, NDArray[Any]],
    chain: NDArray[np.int64],
    length: NDArray[np.int64],
    real: NDArray[np.bool_],
    observations: Sequence[str],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Row and step of all in these rows of one environment, each transition once; and which lose their transition."""
    number, flags = fields[NUMBER], fields[FLAGS]
    rows, steps = [np.full(length[chain[0]], chain[0])], [np.arange(length[chain[0]])]
    alone = [np.zeros(length[chain[0]], np.bool_)]
    for row in chain[1:].tolist():
        before = int(rows[-1][-1]), int(steps[-1][-1])
        new = np.flatnonzero(real[row] & (number[row] > number[before]))
        if not len(new):
            continue
        first = int(new[0])
        if first and not real[row, first - 1]:
            first -= 1  # the observation that the first one acted on
            goes_on = number[row, new[0]] == number[before] + 1 and not flags[before] & (DONE | TIMEOUT)
            if goes_on and all(np.array_equal(fields[name][before], fields[name][row, first]) for name in observations):
                first += 1  # is the one that the last transition led to
        rows.append(np.full(length[row] - first, row))
        steps.append(np.arange(first, length[row]))
        # That of a transition at step 0 is in a row that is gone.
        alone.append((steps[-1] == 0) & real[row, 0])
    return np.concatenate(rows), np.concatenate(steps), np.concatenate(alone)


__all__ = ["joined"]
