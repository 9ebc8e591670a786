"""Index of a replay buffer's store: in which row and at which step a transition is, and where episodes begin and end.

What is kept grows with rows and episodes, not with steps. It is made from the store, whoever wrote to it: rows that
are complete are read once, those that are being written again when they have grown.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from geartrain.core.keys import Keys
from geartrain.errors import StaleKeyError
from geartrain.integrations.sb3.layout import DONE, FLAGS, NUMBER, TIMEOUT, TRANSITION
from geartrain.replay.fetch import fetch
from geartrain.store.handle import ROW_STATES
from geartrain.store.store import Store

#: Rows that are read at once.
_ROWS_AT_ONCE = 64


class Runs(NamedTuple):
    """Runs of transitions that follow each other in one row and one episode, by number."""

    number: NDArray[np.int64]  # of the first transition
    length: NDArray[np.int64]
    row: NDArray[np.uint32]
    generation: NDArray[np.uint32]
    step: NDArray[np.int64]  # of the first transition; its observation is at the step before
    ended: NDArray[np.bool_]  # the last transition ended its episode

    @staticmethod
    def joined(parts: list[Runs]) -> Runs:
        """Runs of several rows, by number."""
        if not parts:
            empty = np.empty(0, np.int64)
            unsigned = np.empty(0, np.uint32)
            return Runs(empty, empty, unsigned, unsigned, empty, np.empty(0, np.bool_))
        whole = Runs(*map(np.concatenate, zip(*parts, strict=True)))  # type: ignore[arg-type]
        order = np.argsort(whole.number, kind="stable")
        return Runs(*(column[order] for column in whole))  # type: ignore[arg-type]


class Episodes(NamedTuple):
    """Completed episodes, or what is left of them."""

    runs: NDArray[np.int64]  # runs that belong to completed episodes
    ends: NDArray[np.int64]  # sums of their transitions, up to and including each
    first: NDArray[np.int64]  # number of the first transition of each run's episode
    length: NDArray[np.int64]  # of each run's episode


class TransitionIndex:
    """Runs and episodes of a store; `refresh` brings them up to date."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._complete: dict[tuple[int, int], Runs] = {}
        self._complete_runs = Runs.joined([])
        self._seen: tuple[bytes, bytes, bytes] | None = None
        self._runs = self._complete_runs
        self._episodes: Episodes | None = None

    def refresh(self) -> Runs:
        """The runs of all rows that are there now."""
        store = self._store
        keys = store.keys()
        status = store.status(keys)
        now = (keys.row.tobytes(), keys.generation.tobytes(), status["length"].tobytes())
        if now == self._seen:
            return self._runs
        is_open = status["state"] == ROW_STATES.index("open")
        known, complete = self._complete, {}
        unread = []
        for place in np.flatnonzero(~is_open).tolist():
            name = (int(keys.row[place]), int(keys.generation[place]))
            if name in known:
                complete[name] = known[name]
            else:
                unread.append(place)
        for begin in range(0, len(unread), _ROWS_AT_ONCE):
            complete.update(self._read(keys[np.array(unread[begin : begin + _ROWS_AT_ONCE])]))
        if unread or len(complete) != len(known):
            self._complete_runs = Runs.joined(list(complete.values()))
        self._complete = complete
        growing = self._read(keys[np.flatnonzero(is_open)])
        self._runs = Runs.joined([self._complete_runs, *growing.values()]) if growing else self._complete_runs
        self._episodes = None
        self._seen = now
        return self._runs

    def _read(self, keys: Keys) -> dict[tuple[int, int], Runs]:
        """The runs of some rows; those that were removed meanwhile are left out."""
        if not len(keys):
            return {}
        batch: Any = fetch(self._store, keys, fields=[FLAGS, NUMBER], output="numpy", pad="right", on_stale="drop")
        flags, number, length = batch[FLAGS], batch[NUMBER], batch.length
        found = {}
        for place in range(len(batch.keys)):
            row, generation = batch.keys.row[place], batch.keys.generation[place]
            found[int(row), int(generation)] = _runs_of(
                flags[place, : length[place]], number[place, : length[place]], row, generation
            )
        return found

    def find(self, number: NDArray[np.int64]) -> tuple[Keys, NDArray[np.int64], NDArray[np.int64]]:
        """Row and step of transitions, and how many follow without a gap in the same row and episode.

        Raises:
            StaleKeyError: one is not there, or not any more.
        """
        runs = self._runs
        place = np.searchsorted(runs.number, number, "right") - 1
        beyond = number - runs.number[place] if len(runs.number) else np.full(len(number), 1)
        if not len(runs.number) or (place < 0).any() or (beyond >= runs.length[place]).any():
            raise StaleKeyError("transitions were asked for that the buffer does not hold, or no longer")
        keys = Keys.of_rows(runs.row[place], runs.generation[place], self._store.id)
        return keys, runs.step[place] + beyond, runs.length[place] - beyond - 1

    def episodes(self) -> Episodes:
        """The completed episodes among the runs."""
        if self._episodes is None:
            self._episodes = _episodes_of(self._runs)
        return self._episodes


def _runs_of(flags: NDArray[np.uint8], number: NDArray[np.int64], row: np.uint32, generation: np.uint32) -> Runs:
    """The runs of one row."""
    steps = np.flatnonzero(flags[1:] & TRANSITION) + 1  # that of step 0 has its observation in another row
    if not steps.size:
        return Runs.joined([])
    numbers = number[steps]
    over = (flags[steps] & (DONE | TIMEOUT)) != 0
    begins = np.ones(len(steps), np.bool_)
    begins[1:] = over[:-1] | (np.diff(steps) != 1) | (np.diff(numbers) != 1)
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(steps)) - 1
    return Runs(
        numbers[first],
        (last - first + 1).astype(np.int64),
        np.full(len(first), row, np.uint32),
        np.full(len(first), generation, np.uint32),
        steps[first].astype(np.int64),
        over[last],
    )


def _episodes_of(runs: Runs) -> Episodes:
    count = len(runs.number)
    if not count:
        empty = np.empty(0, np.int64)
        return Episodes(empty, empty, empty, empty)
    begins = np.ones(count, np.bool_)
    begins[1:] = runs.ended[:-1] | (runs.number[1:] != runs.number[:-1] + runs.length[:-1])
    episode = np.cumsum(begins) - 1
    first = runs.number[begins]
    length = np.bincount(episode, weights=runs.length).astype(np.int64)
    last = np.append(np.flatnonzero(begins)[1:], count) - 1
    whole = np.flatnonzero(runs.ended[last][episode])
    return Episodes(whole, np.cumsum(runs.length[whole]), first[episode[whole]], length[episode[whole]])


__all__ = ["Episodes", "Runs", "TransitionIndex"]
