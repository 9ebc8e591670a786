"""Recorders in the storm: steps whose every value follows from their episode's tag, in rows that episodes share.

An episode of tag e has the observations (e, 0), (e, 1), ... and ends after `length_of(e)` actions. What a recorder has
published belongs to the store whatever becomes of its process; what it has not is lost with it, and no more.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import GeartrainError
from geartrain.store.recorder import EPISODES, recorded_fields
from storm.journal import COMMITTED, DELIVERED, OPEN, Entry, Journal, read
from storm.roles import EXPECTED, Ending, Part
from storm.rows import STEPS, length_of

FIELDS = recorded_fields(
    {"obs": gt.Field((2,), "uint64"), "action": gt.Field((), "uint64")},
    share_rows=True,
    truncated=gt.Field((), "bool"),
)
ENVIRONMENTS = 3
#: Steps between publications, of a recorder's environments.
EVERY = (1, 3, 7)


def _actions(tags: NDArray[np.uint64], steps: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        return (tags * np.uint64(0x9E3779B97F4A7C15)) ^ steps


class Recorder:
    """A recorder and its environments, which begin their next episode with the step after the last one's end."""

    def __init__(self, part: Part, store: gt.Store, journal: Journal, choose: random.Random) -> None:
        self.store, self.journal, self.choose = store, journal, choose
        self.every = choose.choice(EVERY)
        self.recorder = store.recorder(ENVIRONMENTS, share_rows=True, publish_every=self.every)
        self._row_steps = np.zeros(ENVIRONMENTS, np.int64)  # where the next action goes in its row
        self._pending = np.zeros(ENVIRONMENTS, np.int64)  # actions since the last publication
        self.entries, self.tags, self.at = self._new(np.ones(ENVIRONMENTS, bool))
        self.ended = np.zeros(ENVIRONMENTS, bool)
        self.recorder.reset(self._obs())

    def _new(self, which: NDArray[np.bool_]) -> tuple[list[slice], NDArray[np.uint64], NDArray[np.uint64]]:
        made = [self.journal.intend(1, OPEN) if each else (slice(0, 0), np.zeros(1, np.uint64)) for each in which]
        return [entry for entry, _ in made], np.array([tag[0] for _, tag in made]), np.zeros(len(which), np.uint64)

    def _obs(self) -> NDArray[np.uint64]:
        return np.stack([self.tags, self.at], axis=1)

    def step(self) -> None:
        """One step of all environments. What it could not record is given again by the next call."""
        entries, tags, at = self._new(self.ended)
        acted = _actions(self.tags, self.at)
        before, began = (self.entries, self.tags, self.at, self.ended), self.ended
        self.tags = np.where(self.ended, tags, self.tags)
        self.at = np.where(self.ended, at, self.at + np.uint64(1))
        self.entries = [new if over else old for new, old, over in zip(entries, self.entries, self.ended, strict=True)]
        self.ended = ~self.ended & (self.at == length_of(self.tags).astype(np.uint64))
        cut_off = (self.tags & np.uint64(1)) == 1
        try:
            self.recorder.step(
                self._obs(),
                action=acted,
                terminated=self.ended & ~cut_off,
                truncated=self.ended & cut_off,
            )
        except BaseException:
            self.entries, self.tags, self.at, self.ended = before
            raise
        for one in np.flatnonzero(~began):
            self._note(int(one))

    def _note(self, one: int) -> None:
        """Notes what this step has published of an environment's episode.

        A recorder publishes where `every` actions wait for it, where an episode ends, and where its row is full.
        """
        ended, steps = bool(self.ended[one]), int(self._row_steps[one]) + 1
        full = not ended and steps + 1 == STEPS
        self._pending[one] += 1
        if ended and steps + 3 <= STEPS:  # the next episode goes on in the row
            self._row_steps[one] = steps + 1
        else:
            self._row_steps[one] = 0 if ended or full else steps
        if ended or full or self._pending[one] >= self.every:
            self._pending[one] = 0
            self.journal.published(self.entries[one], int(self.at[one]))
        if ended:
            self.journal.set(self.entries[one], COMMITTED)

    def close(self) -> None:
        """Ends the episodes where they are, and publishes all."""
        self.recorder.close()
        for entries, at in zip(self.entries, self.at, strict=True):
            self.journal.published(entries, int(at))


def record(part: Part) -> None:
    """Records, closes and begins anew, forks."""
    choose, ending = random.Random(part.seed), Ending()
    journal = part.journal()
    store = part.handle or part.open()
    children, one = 0, None
    while not ending.come and not journal.full:
        journal.beat()
        try:
            one = one or Recorder(part, store, journal, choose)
            one.step()
        except EXPECTED:
            time.sleep(1e-3)
        if choose.random() < 0.004 and one is not None:
            one.close()
            one = None
            if choose.random() < 0.3:
                store.close()
                store = part.open()
        if choose.random() < 0.002 and children < 20 and one is not None:
            children += 1
            number, seed = part.number * 100 + children, choose.getrandbits(32)
            if (child := os.fork()) == 0:
                _as_heir(Part(**{**vars(part), "number": number, "seed": seed, "handle": store}), one)
            if choose.random() < 0.5:
                time.sleep(choose.random() * 5e-3)
                os.kill(child, signal.SIGKILL)
    if one is not None:
        one.close()
    while not ending.come:  # its journal is full
        journal.beat()
        time.sleep(0.01)
    store.close()


def _as_heir(part: Part, parents: Recorder) -> None:
    """A forked child: the parent's recorder is refused to it; it records with one of its own, and dies."""
    choose, journal = random.Random(part.seed), part.journal()
    refused = False
    try:
        parents.recorder.reset(np.zeros((ENVIRONMENTS, 2), np.uint64))
    except GeartrainError:
        refused = True
    assert refused, "a forked child recorded with its parent's recorder"
    assert part.handle is not None
    with contextlib.suppress(*EXPECTED):
        one = Recorder(part, part.handle, journal, choose)
        for _ in range(choose.randint(1, 60)):
            one.step()
            journal.beat()
        if choose.random() < 0.3:
            one.close()
    if choose.random() < 0.5:
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def view(part: Part) -> None:
    """Draws windows of steps, and fetches whole rows, while they grow."""
    choose, ending = random.Random(part.seed), Ending()
    journal = part.journal()
    store = part.handle or part.open()
    replay = None
    while not ending.come:
        journal.beat()
        try:
            keys = store.keys()
            if len(keys):
                at = choose.randrange(len(keys))
                wrong = actions(gt.fetch(store, keys[at : at + 8], output="numpy", threads=1, on_stale="drop"))[1]
                assert not wrong, f"rows were returned torn: {wrong[:3]}"
            if replay is None:
                strategy = gt.selection.Uniform(seed=part.seed, over="steps")
                replay = replay_of(store, strategy, 8, window=4, prefetch=0, output="numpy", threads=1)
            wrong = _wrong_windows(replay.sample())
            assert not wrong, f"windows were returned torn: {wrong[:3]}"
        except EXPECTED:
            time.sleep(1e-3)
        if choose.random() < 0.01:
            if replay is not None:
                replay.close()
            replay = None
            if choose.random() < 0.5:
                store.close()
                store = part.open()
    if replay is not None:
        replay.close()
    store.close()


def _wrong_windows(batch: gt.Batch) -> list[str]:
    found = []
    for row, mask in enumerate(batch.mask):
        steps = batch["obs"][row][mask]
        if (steps[:, 0] != steps[0, 0]).any() or (np.diff(steps[:, 1].astype(np.int64)) != 1).any():
            found.append(f"a window crosses episodes or misses a step: {steps.tolist()}")
    return found


def actions(batch: gt.Batch) -> tuple[Counter[tuple[int, int]], list[str]]:
    """The (tag, step) of all actions in whole rows, and what is wrong with the rows."""
    acted: Counter[tuple[int, int]] = Counter()
    found = []
    for row, mask in enumerate(batch.mask):
        seen, last = batch["obs"][row][mask], batch["last"][row][mask]
        tags, at = seen[:, 0], seen[:, 1]
        begins = np.r_[True, last[:-1]]
        follows = np.r_[True, (tags[1:] == tags[:-1]) & (at[1:] == at[:-1] + np.uint64(1))]
        if not (begins | follows).all() or (at[1:][begins[1:]] != 0).any():
            found.append(f"steps do not follow each other: {seen.tolist()}")
        if (batch["action"][row][mask] != np.where(last, 0, _actions(tags, at))).any():
            found.append(f"actions that nobody took: {seen.tolist()}")
        ends = ~last & (at + np.uint64(1) == length_of(tags).astype(np.uint64))
        cut_off = (tags & np.uint64(1)) == 1
        if (batch["terminated"][row][mask] != (ends & ~cut_off)).any():
            found.append(f"ends of episodes that are none: {seen.tolist()}")
        if (batch["truncated"][row][mask] != (ends & cut_off)).any():
            found.append(f"episodes that were cut off elsewhere: {seen.tolist()}")
        acted.update((int(tag), int(step)) for tag, step in seen[~last].tolist())
    return acted, found


def rows(store: gt.Store, kind: str, journals: list[Path]) -> tuple[list[str], Counter[str]]:
    """What is wrong with all rows of a store, see `missing`; with their contents, and their counts of episodes."""
    del kind
    keys = store.keys()
    batch = gt.fetch(store, keys, output="numpy", threads=1) if len(keys) else None
    acted, found = actions(batch) if batch is not None else (Counter(), [])
    if batch is not None:
        counted = [len(np.unique(batch["obs"][row][mask][:, 0])) for row, mask in enumerate(batch.mask)]
        if (wrong := np.flatnonzero(batch[EPISODES] != counted)).size:
            one = int(wrong[0])
            found.append(f"a row says {batch[EPISODES][one]} episodes and has {counted[one]}")
    entries = [entry for path in journals for entry in read(path) if entry.state != DELIVERED]
    found += missing(acted, entries)
    published = sum(entry.state == COMMITTED for entry in entries)
    return found[:20], Counter({"episodes proven": published, "steps proven": len(acted)})


def missing(acted: Counter[tuple[int, int]], entries: list[Entry]) -> list[str]:
    """What is wrong with the actions that are there, (episode, number), beside what the recorders have noted.

    Every action was recorded, and is there once. Of an episode that ended there are all, of another one those that its
    recorder has published; what a call may have published in which its process died follows these without a gap.
    """
    found = []
    if twice := [step for step, times in acted.items() if times > 1]:
        found.append(f"steps {twice[:5]} are there more than once")
    there: dict[int, list[int]] = {entry.tag: [] for entry in entries}
    for tag, step in acted:
        there.setdefault(tag, []).append(step)
    if unknown := there.keys() - {entry.tag for entry in entries}:
        found.append(f"episodes {sorted(unknown)[:5]} are there that nobody recorded")
    lengths = length_of(np.array([entry.tag for entry in entries], np.uint64)).tolist()
    for entry, length in zip(entries, lengths, strict=True):
        steps = there[entry.tag]
        promised = length if entry.state == COMMITTED else entry.steps
        if lost := sorted(set(range(max([promised, *(step + 1 for step in steps)]))) - set(steps)):
            found.append(f"{promised} of {length} actions of episode {entry.tag} were published; missing: {lost[:5]}")
    return found


def contents(store: gt.Store) -> tuple[list[int], list[str]]:
    """The tags of the episodes in a store, and what is wrong with its rows."""
    keys = store.keys()
    if not len(keys):
        return [], []
    acted, wrong = actions(gt.fetch(store, keys, output="numpy", threads=1))
    return sorted({tag for tag, _ in acted}), wrong[:5]


ROLES = {"recorder": record, "viewer": view}
