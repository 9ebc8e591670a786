"""Index of a replay buffer's store: finds each transition's row and step, and where episodes begin and end.

Its memory grows with the number of rows and episodes, not of steps. The index is built from the store, so it includes
transitions of all processes. It reads a complete row once, and rows in progress again when they have grown.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from geartrain.core.keys import Keys
from geartrain.errors import StaleKeyError
from geartrain.integrations.transitions.layout import DONE, FLAGS, NUMBER, TIMEOUT, TRANSITION, count_of
from geartrain.replay.fetch import fetch
from geartrain.store.row import ROW_STATES
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


class Episodes:
    """Completed episodes, or what is left of them.

    Their transitions are numbered by when they were added, those of one call by environment, as Stable-Baselines3
    numbers them in a buffer that is not full yet.

    Args:
        runs: of a whole store.
    """

    def __init__(self, runs: Runs) -> None:
        count = len(runs.number)
        begins = np.ones(count, np.bool_)
        begins[1:] = runs.ended[:-1] | (runs.number[1:] != runs.number[:-1] + runs.length[:-1])
        episode = np.cumsum(begins) - 1
        last = np.append(np.flatnonzero(begins)[1:], count) - 1
        whole = np.flatnonzero(runs.ended[last][episode]) if count else np.empty(0, np.int64)
        self.runs = Runs(*(column[whole] for column in runs))  # type: ignore[arg-type]
        lengths = np.bincount(episode, weights=runs.length).astype(np.int64) if count else whole
        #: Number of the first transition, and length, of each run's episode.
        self.first = runs.number[begins][episode[whole]]
        self.length = lengths[episode[whole]]
        at = count_of(self.runs.number)
        self._streams = np.unique(self.runs.number - at)
        # Between two instants the same episodes are in progress.
        instants = np.concatenate([at, at + self.runs.length])
        order = np.argsort(instants, kind="stable")
        self._instants = instants[order]
        self._in_progress = np.cumsum(np.where(order < len(at), 1, -1))[:-1]
        self._sums = np.cumsum(self._in_progress * np.diff(self._instants))

    def __len__(self) -> int:
        """Transitions of completed episodes."""
        return int(self._sums[-1]) if len(self._sums) else 0

    def at(self, place: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Transitions by place, from 0 to len - 1: their numbers, and the first number and length of their episodes."""
        span = np.searchsorted(self._sums, place, "right")
        active = self._in_progress[span]
        within = place - (self._sums[span] - active * (self._instants[span + 1] - self._instants[span]))
        time, which = self._instants[span] + within // active, within % active
        numbers = self._streams + time[:, None]
        run = np.searchsorted(self.runs.number, numbers, "right") - 1
        there = (run >= 0) & (numbers < self.runs.number[run] + self.runs.length[run])
        chosen = (there & (np.cumsum(there, 1) == which[:, None] + 1)).argmax(1)
        every = np.arange(len(place))
        run = run[every, chosen]
        return numbers[every, chosen], self.first[run], self.length[run]


class TransitionIndex:
    """Runs and episodes of a store; `refresh` brings them up to date.

    Rows that are being written are read again when they have grown; the others once.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._complete: dict[tuple[int, int], Runs] = {}
        self._complete_runs = self._growing_runs = Runs.joined([])
        self._rows = b""  # the rows that are there, and which of them are being written
        self._lengths = b""
        self._whole: Runs | None = None
        self._sums: NDArray[np.int64] | None = None  # of the lengths of all runs
        self._episodes: Episodes | None = None
        self._ended = b""

    def refresh(self) -> None:
        """Updates the index, if rows were added, removed or extended."""
        store = self._store
        keys = store.keys()
        status = store.status(keys)
        is_open = status["state"] == ROW_STATES.index("open")
        rows, lengths = keys.row.tobytes() + keys.generation.tobytes() + is_open.tobytes(), status["length"].tobytes()
        if rows == self._rows and lengths == self._lengths:
            return
        if rows != self._rows:
            self._take_complete(keys[np.flatnonzero(~is_open)])
            self._episodes = None
        self._growing_runs = Runs.joined(list(self._read(keys[np.flatnonzero(is_open)]).values()))
        self._rows, self._lengths, self._whole, self._sums = rows, lengths, None, None

    def _take_complete(self, keys: Keys) -> None:
        known, complete, unread = self._complete, {}, []
        for place, name in enumerate(zip(keys.row.tolist(), keys.generation.tolist(), strict=True)):
            if name in known:
                complete[name] = known[name]
            else:
                unread.append(place)
        for begin in range(0, len(unread), _ROWS_AT_ONCE):
            complete.update(self._read(keys[np.array(unread[begin : begin + _ROWS_AT_ONCE])]))
        if unread or len(complete) != len(known):
            self._complete_runs = Runs.joined(list(complete.values()))
        self._complete = complete

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

    def runs(self) -> Runs:
        """All runs."""
        if self._whole is None:
            self._whole = Runs.joined([self._complete_runs, self._growing_runs])
        return self._whole

    def count(self) -> int:
        """Transitions, as of the last `refresh`."""
        return int(self._totals()[-1]) if len(self.runs().number) else 0

    def at(self, place: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of transitions by place, from 0 to `count()` - 1."""
        runs, totals = self.runs(), self._totals()
        run = np.searchsorted(totals, place, "right")
        numbers: NDArray[np.int64] = runs.number[run] + place - (totals[run] - runs.length[run])
        return numbers

    def _totals(self) -> NDArray[np.int64]:
        if self._sums is None:
            self._sums = np.cumsum(self.runs().length)
        return self._sums

    def find(self, number: NDArray[np.int64]) -> tuple[Keys, NDArray[np.int64]]:
        """Row and step of transitions. If several rows hold one, the row with the most following steps is chosen.

        Raises:
            StaleKeyError: one is not there, or not any more.
        """
        row, generation = np.empty(len(number), np.uint32), np.empty(len(number), np.uint32)
        step, missing = np.empty(len(number), np.int64), np.ones(len(number), np.bool_)
        for runs in (self._complete_runs, self._growing_runs):
            if len(runs.number):
                place = np.searchsorted(runs.number, number, "right") - 1
                beyond = number - runs.number[place]
                there = np.flatnonzero((place >= 0) & (beyond < runs.length[place]))
                place = place[there]
                row[there], generation[there] = runs.row[place], runs.generation[place]
                step[there] = runs.step[place] + beyond[there]
                missing[there] = False
        if missing.any():
            raise StaleKeyError("transitions were asked for that the buffer does not hold, or no longer")
        return Keys.of_rows(row, generation, self._store.id), step

    def episodes(self) -> Episodes:
        """The completed episodes, as of the last `refresh`."""
        ended = self._growing_runs.number[self._growing_runs.ended].tobytes()
        if self._episodes is None or ended != self._ended:
            self._episodes, self._ended = Episodes(self.runs()), ended
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


__all__ = ["Episodes", "Runs", "TransitionIndex"]
