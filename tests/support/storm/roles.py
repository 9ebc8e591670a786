"""Roles of the storm's processes. Each makes calls at random until SIGTERM, and proves what it reads.

An error that a user could not expect, and a row that is not what its tag says, ends the process with a traceback.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import deadlines
import numpy as np
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import (
    EmptyStoreError,
    NoSpaceError,
    StaleKeyError,
    StoreClosedError,
    StoreFullError,
    TurnoverError,
    WaitTimeoutError,
)
from storm.journal import COMMITTED, DELETED, DELETING, DELIVERED, OPEN, Journal
from storm.rows import FIELDS, STEPS, length_of, rows_of, torn, versions_of

#: What a call may raise where rows come and go, and processes die with blocks in their hands.
EXPECTED = (StoreFullError, EmptyStoreError, TurnoverError, StaleKeyError)
#: How long a learner waits for rows: less than a process that makes no calls may take (rounds.py).
ROWS_S = 10.0


@dataclass
class Part:
    """What a process of the storm is given.

    Attributes:
        name: of the store.
        number: of the process, unique in its round.
        seed: of its choices.
        folder: for journals and checkpoints of the round.
        disk: a folder on a small file system; None where there is none.
        handle: the arena's, to be used after the fork; None to open one by name.
        kind: of the store, see `rounds.KINDS`.
    """

    name: str
    number: int
    seed: int
    folder: Path
    disk: Path | None
    handle: gt.Store | None
    kind: str

    def journal(self) -> Journal:
        """This process's journal."""
        return Journal(self.folder / f"journal-{self.number}", self.number)

    def open(self) -> gt.Store:
        """A handle of this process's own."""
        return gt.Store.open(self.name, adopt=True, timeout_s=30)


class Ending:
    """Whether SIGTERM has come."""

    def __init__(self) -> None:
        self.come = False
        signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, *_: object) -> None:
        self.come = True


def write(part: Part) -> None:
    """A writer: inserts, commits in place, publishes and extends, abandons, deletes its own, forks."""
    choose, ending = random.Random(part.seed), Ending()
    writer = Writer(part, choose)
    while not ending.come and not writer.journal.full:
        try:
            writer.one()
        except EXPECTED:
            time.sleep(1e-3)
        writer.journal.beat()
    while not ending.come:  # its journal is full
        writer.journal.beat()
        time.sleep(0.01)
    writer.store.close()


class Writer:
    """A writer's calls."""

    def __init__(self, part: Part, choose: random.Random, forked: bool = False) -> None:
        self.part, self.choose, self.forked = part, choose, forked
        self.journal = part.journal()
        self.store = part.handle or part.open()
        self._children = 0
        self._mine = gt.Keys.empty()
        self._tags = np.empty(0, np.uint64)

    def one(self) -> None:
        """One call at random."""
        calls: list[tuple[Callable[[], None], int]] = [
            (self.insert, 8),
            (self.commit, 8),
            (self.grow, 3),
            (self.abandon, 2),
            (self.delete, 2),
            (self.reopen, 1),
        ]
        if not self.forked:
            calls.append((self.fork, 1))
        self.choose.choices([call for call, _ in calls], [weight for _, weight in calls])[0]()

    def insert(self) -> None:
        """Some rows at once, all or none."""
        entries, tags = self.journal.intend(self.choose.randint(1, 6))
        keys = self.store.insert(
            rows_of(tags),
            lengths=length_of(tags),
            priorities=1 + (tags % np.uint64(7)).astype(np.float64),
            versions=versions_of(tags),
            threads=1,
        )
        self.journal.set(entries, COMMITTED)
        self._keep(keys, tags)

    def commit(self) -> None:
        """Rows that are written in place."""
        n = self.choose.randint(1, 3)
        entries, tags = self.journal.intend(n)
        made = rows_of(tags)
        if n == 1:
            row = self.store.row(version=int(versions_of(tags)[0]))
            for field in FIELDS:
                row[field] = made[field][0]
            row.length = int(length_of(tags)[0])
            keys = row.commit()
        else:
            rows = self.store.rows(n)
            for number, row in enumerate(rows):
                for field in FIELDS:
                    row[field] = made[field][number]
            rows.lengths, rows.versions = length_of(tags), versions_of(tags)
            keys = rows.commit()
        self.journal.set(entries, COMMITTED)
        self._keep(keys, tags)

    def grow(self) -> None:
        """A row that is published and extended before its end."""
        if self.part.kind in ("sampled once",):
            return
        entries, tags = self.journal.intend(1, OPEN)
        made, length = rows_of(tags), int(length_of(tags)[0])
        row = self.store.row(version=int(versions_of(tags)[0]))
        for field in ("tag", "late"):
            row[field] = made[field][0]
        for step in range(length):
            for field in ("steps", "bytes"):
                row[field][step] = made[field][0, step]
            if step == 0:
                row.publish(length=1)
            elif self.choose.random() < 0.3:
                row.extend(step + 1)
        row.extend(length)
        row.commit()
        self.journal.set(entries, COMMITTED)

    def abandon(self) -> None:
        """Rows that are begun and given back."""
        rows = self.store.rows(self.choose.randint(1, 4))
        for row in rows:
            row["steps"] = 1
        rows.abandon()

    def delete(self) -> None:
        """Some of its own rows."""
        if not len(self._mine):
            return
        keys, tags = self._mine[:3], self._tags[:3]
        self._mine, self._tags = self._mine[3:], self._tags[3:]
        entries = self.journal.of(tags)
        self.journal.set(entries, DELETING)
        self.store.delete(keys)
        self.journal.set(entries, DELETED)

    def reopen(self) -> None:
        """Closes its handle, and opens another one."""
        self.store.close()
        self.store = self.part.open()

    def fork(self) -> None:
        """A child that goes on with this handle for a while, and then ends in one way or another."""
        self._children += 1
        number = self.part.number * 100 + self._children
        seed = self.choose.getrandbits(32)
        if self._children > 20 or (child := os.fork()) != 0:
            if self._children <= 20 and self.choose.random() < 0.5:
                time.sleep(self.choose.random() * 5e-3)
                os.kill(child, signal.SIGKILL)
            return
        choose = random.Random(seed)
        part = Part(**{**vars(self.part), "number": number, "seed": seed, "handle": self.store})
        heir = Writer(part, choose, forked=True)
        for _ in range(choose.randint(1, 60)):
            try:
                heir.one()
            except EXPECTED:
                time.sleep(1e-3)
            heir.journal.beat()
        if choose.random() < 0.3:
            heir.store.close()
        if choose.random() < 0.5:
            os._exit(0)  # as multiprocessing does
        os.kill(os.getpid(), signal.SIGKILL)

    def _keep(self, keys: gt.Keys, tags: np.ndarray) -> None:
        if self.part.kind == "sampled once":
            return  # the rows are gone when they are delivered, and their proof is who got them
        self._mine = (self._mine + keys)[-12:]
        self._tags = np.concatenate([self._tags, tags])[-12:]


def read(part: Part) -> None:
    """A reader: fetches by key, samples; one thread reads while another closes the handle and opens it again."""
    choose, ending = random.Random(part.seed), Ending()
    journal = part.journal()
    store = part.handle or part.open()
    while not ending.come:
        closed = threading.Event()
        failed: list[BaseException] = []

        def sample(store: gt.Store = store, closed: threading.Event = closed, failed: list = failed) -> None:
            try:
                replay = replay_of(store, gt.selection.Uniform(seed=part.seed), 4, window=5, output="numpy", threads=1)
                while not closed.is_set() and not ending.come:
                    try:
                        check(replay.sample())
                    except EXPECTED:
                        time.sleep(1e-3)
                replay.close()
            except StoreClosedError as error:
                if not closed.is_set():
                    failed.append(error)
            except BaseException as error:
                failed.append(error)

        beside = threading.Thread(target=sample, daemon=True) if part.kind != "sampled once" else None
        if beside is not None:
            beside.start()
        for _ in range(choose.randint(5, 60)):
            try:
                read_once(store, choose)
            except EXPECTED:
                time.sleep(1e-3)
            journal.beat()
            if failed or ending.come:
                break
        closed.set()
        store.close()  # beside the call that the thread is in
        if beside is not None:
            beside.join(60)
            assert not beside.is_alive(), "a thread hangs in a call of a store that was closed"
        if failed:
            raise failed[0]
        if not ending.come:
            store = part.open()


def read_once(store: gt.Store, choose: random.Random) -> None:
    """One call of a reader."""
    keys = store.keys()
    if len(keys):
        at = choose.randrange(len(keys))
        check(gt.fetch(store, keys[at : at + 8], output="numpy", threads=1, on_stale="drop"))
    match choose.randrange(6):
        case 0:
            store.stats()
        case 1:
            store.status()
        case 2:
            store.reap()
        case 3:
            store.expire()


def learn(part: Part) -> None:
    """A learner: draws by priority, updates priorities; notes which rows it was given."""
    choose, ending = random.Random(part.seed), Ending()
    journal = part.journal()
    store = part.handle or part.open()
    once = part.kind == "sampled once"
    replay: gt.Replay | None = None
    while not ending.come and not journal.full:
        journal.beat()
        if replay is None:
            selection = gt.selection.Uniform(seed=part.seed) if once else gt.selection.Prioritized(seed=part.seed)
            ahead = 0 if once else choose.choice([0, 1, 3])
            rows = 2 if once else 6
            replay = replay_of(
                store, selection, rows, prefetch=ahead, output="numpy", threads=1, timeout_s=deadlines.patience(ROWS_S)
            )
        try:
            batch = replay.sample()
        except EXPECTED:
            time.sleep(2e-3)
            continue
        except WaitTimeoutError:
            if not ending.come:
                raise
            continue  # the writers heard it first, and only other learners have the store open
        check(batch)
        if once:
            journal.note(batch["tag"], DELIVERED)
        else:
            replay.update_priorities(batch.keys, np.array([choose.choice([0.5, 1, 3, 9]) for _ in batch.keys.row]))
        if choose.random() < 0.02:
            replay.close()
            replay = None
            if choose.random() < 0.5:
                store.close()
                store = part.open()
    while not ending.come:
        journal.beat()
        time.sleep(0.01)
    if replay is not None:
        replay.close()
    store.close()


def save(part: Part) -> None:
    """Saves checkpoints where there is little room: complete or refused, and never damaged."""
    choose, ending = random.Random(part.seed), Ending()
    journal = part.journal()
    store = part.handle or part.open()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    folders = [part.folder / "saved", *([part.disk / "saved"] if part.disk is not None else [])]
    while not ending.come:
        folder = choose.choice(folders)
        most = choose.choice([resource.RLIM_INFINITY, 4096, 100_000, 2_000_000])
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        try:
            store.save(folder, incremental=choose.random() < 0.5)
        except NoSpaceError:
            journal.note(np.zeros(1, np.uint64), DELIVERED)  # counted in the figures
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        journal.beat()
        time.sleep(choose.random() * 0.05)
    store.close()


def check(batch: gt.Batch) -> None:
    """A batch must hold whole rows only."""
    wrong = torn(batch)
    assert not wrong, f"rows {wrong} were returned torn"


ROLES = {"writer": write, "reader": read, "learner": learn, "saver": save}
assert STEPS > 1
