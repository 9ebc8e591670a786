"""Tasks in the storm: rows that pass from a loader through workers to a learner, while any of them, or all, are killed.

All processes adopt the store. Each notes what was acknowledged: an insert, an append, a put, a batch. What was
acknowledged must be there whatever was killed since, and nothing that was done is done again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, NamedTuple

import deadlines
import grpo
import numpy as np

import geartrain as gt
import storm.proof as proof
from geartrain import rpc
from geartrain.actors import RemoteStore, StoreServer
from geartrain.actors.served_tasks import PeerCalls
from geartrain.errors import GeartrainError, PeerLostError, StaleClaimError
from geartrain.selection import Fifo, Uniform
from storm.roles import Ending, Part
from storm.rounds import Round, Worker

CREW = ("loader", "answer", "answers", "reward", "ref", "advantage", "learner")
BATCH, SAVE_EVERY, IN_FLIGHT = 4, 2, 24
#: Every so many rows the advantage drops one, as a group without a signal.
DROPPED = 11
CAPACITY = 64
#: Bytes of spans: room for all rows; so few that results are given up to make room.
KINDS = {
    "tasks": 1 << 20,
    "tasks in little room": 24 << 10,
    "tasks of other hosts": 1 << 20,
    "tasks of preempted jobs": 1 << 20,
}
#: Of this kind all processes die together, always: no row is given up for it.
PREEMPTED = "tasks of preempted jobs"
#: Roles of the kind with other hosts that reach the store through a server of it.
REMOTE = ("loader", "answer", "answers", "reward")
#: A file: the server has written and not replied, and is to be killed.
WROTE = "wrote"


class Event(NamedTuple):
    """A line of a process's notes. The clock is that of all processes of the host."""

    at_ns: int
    what: str
    values: list[Any]
    process: str = ""


class Notes:
    """What a process was told; a line each, which outlives its death."""

    def __init__(self, part: Part) -> None:
        self._file = os.open(part.folder / f"notes-{part.number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._journal = part.journal()

    def add(self, what: str, *values: Any) -> None:
        """Adds a line, and counts as a call of the process."""
        os.write(self._file, f"{json.dumps([time.monotonic_ns(), what, *values])}\n".encode())
        self._journal.beat()


def events(folder: Path) -> list[Event]:
    """What all processes noted, in the order of time."""
    found = []
    for path in folder.glob("notes-*"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # else it was killed within it
                at_ns, what, *values = json.loads(line)
                found.append(Event(at_ns, what, values, path.name))
    return sorted(found, key=lambda event: event.at_ns)


def effective(noted: list[Event]) -> list[Event]:
    """The events without the beginnings of work in which nothing was written.

    Whoever reads a row may have lost its claim with the server before it notes that it begins: another has done the
    task meanwhile, and it writes nothing.
    """
    found: list[Event] = []
    then: dict[str, Event] = {}  # what a process notes next
    for event in reversed(noted):
        after, then[event.process] = then.get(event.process), event
        if event.what != "begins" or (after is not None and _written(after) == event.values[:2]):
            found.append(event)
    return found[::-1]


def _written(event: Event) -> list[Any] | None:
    """Task and number of the row that an event tells a write of."""
    if event.what == "appended":
        return ["answer", event.values[0]]
    return event.values if event.what == "did" else None


def open_store(part: Part) -> gt.Store:
    """Makes the store, or joins or adopts it."""
    options: dict[str, Any] = {"capacity": CAPACITY, "span_bytes": KINDS[part.kind], "persist": True}
    store = part.handle or grpo.new_store(part.name, timeout_s=deadlines.patience(30), **options)
    if store.limiter.state().most_in_flight is None:
        store.limiter.set(in_flight=IN_FLIGHT)
    return store


class Names:
    """Addresses of nodes by name, in files: as a c10d store."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, key: str) -> Path:
        return self._folder / f"name-{key.replace('/', '-')}"

    def set(self, key: str, value: str | bytes) -> None:
        """As torch's."""
        beside = self._path(f"{key}.{os.getpid()}")
        beside.write_bytes(value.encode() if isinstance(value, str) else value)
        beside.replace(self._path(key))

    def get(self, key: str) -> bytes:
        """As torch's."""
        return self._path(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        """As torch's."""
        return all(self._path(key).exists() for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """As torch's."""
        until_s = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > until_s:
                raise RuntimeError(f"timeout: {keys} are not there")
            time.sleep(0.01)

    def delete_key(self, key: str) -> None:
        """As torch's."""
        self._path(key).unlink(missing_ok=True)


def store_of_task(part: Part, task: str) -> Any:
    """The store, or what a server of it serves, for those who do a task."""
    if part.kind != "tasks of other hosts" or task not in REMOTE:
        return open_store(part)
    node = rpc.Node(f"worker-{part.number}", store=Names(part.folder))
    until_s = time.monotonic() + deadlines.patience(30)
    while True:
        try:
            return RemoteStore(node, "server", part.name, timeout_s=deadlines.patience(60))
        except (GeartrainError, LookupError):  # it is not there yet
            assert time.monotonic() < until_s
            time.sleep(0.02)


def serve(part: Part) -> None:
    """Serves the store to other hosts until it is asked to end, and loses writes and replies on the way."""
    store, notes, ending = open_store(part), Notes(part), Ending()
    with rpc.Node("server", store=Names(part.folder)) as node, StoreServer(node, store, part.name):
        _lose_replies(part, node, notes)
        notes.add("begins to serve")
        while not ending.come:
            notes.add("serves")
            time.sleep(0.05)


def _lose_replies(part: Part, node: rpc.Node, notes: Notes) -> None:
    """From now on some writes lose their connection while they run or before their reply, or the server with it."""
    choose = random.Random(part.seed)

    def losing(write: Callable[..., Any], calls: PeerCalls, *args: Any) -> Any:
        strike = choose.random()
        if strike < 0.04:
            notes.add("cuts")
            _hang_up(node)
            time.sleep(choose.random() * 0.02)  # it is sent again meanwhile
        wrote = write(calls, *args)
        if 0.04 < strike < 0.08:
            notes.add("cuts")
            _hang_up(node)
        elif 0.08 < strike < 0.1 and not (part.folder / "enough").exists():
            (part.folder / WROTE).touch()
            time.sleep(1)  # until it is killed
        return wrote

    for name in ("write", "insert_packed"):
        setattr(PeerCalls, name, partialmethod(partial(losing, getattr(PeerCalls, name))))


def _hang_up(node: rpc.Node) -> None:
    for name in {session.name for session in node.server.sessions} - {""}:  # of one that has not said it yet
        node.hang_up(name)


def load(part: Part) -> None:
    """Inserts numbered rows behind those that were inserted, and says at the end that there are no more."""
    store, notes, choose = store_of_task(part, "loader"), Notes(part), random.Random(part.seed)
    while not (part.folder / "enough").exists():
        try:
            first = store.stats()["inserted"]
        except (PeerLostError, LookupError):  # the server is lost
            time.sleep(0.01)
            continue
        numbers = list(range(first, first + choose.randint(1, 3)))
        try:
            grpo.insert(store, numbers)
        except PeerLostError:  # the store's count tells whether they are there
            notes.add("insert unknown", numbers)
            continue
        notes.add("inserted", numbers)
    store.finish()


def work(part: Part, task: str) -> None:
    """Does a task until no row can become due any more."""
    store, notes, choose = store_of_task(part, task), Notes(part), random.Random(part.seed)
    for claim in store.claims(task, choose.randint(1, 4), output="numpy"):
        for row in claim:
            with contextlib.suppress(StaleClaimError):  # of a row that was taken back to make room
                if task == "advantage" and choose.random() < 0.25:
                    store.put(row.key, "reward", {"reward": [row["reward"]]})  # again
                _do(row, task, notes)


def answer_many(part: Part) -> None:
    """Answers several rows at a time in one event loop, until no row can become due any more."""
    store, notes = store_of_task(part, "answers"), Notes(part)

    async def answer() -> None:
        while claim := await store.claim_async("answer", 2, output="numpy"):
            with claim:
                for row in claim:
                    await asyncio.sleep(0)
                    with contextlib.suppress(StaleClaimError):
                        _do(row, "answer", notes)

    async def run() -> None:
        await asyncio.gather(*(answer() for _ in range(3)))

    asyncio.run(run())


def _do(row: gt.ClaimedRow, task: str, notes: Notes) -> None:
    number = int(row["id"])
    begun = row.partial.lengths if task == "answer" else {}
    notes.add("begins", task, number, list(begun.items()))
    if task == "answer":
        _answer(row, number, begun, notes)
    elif task == "reward":
        ends = np.cumsum(row["length"])[:-1]
        row.put(reward=np.float32([each.sum() for each in np.split(row["ids"], ends)]))
    elif task == "ref":
        row.put(ref=row["ids"].astype(np.float32) / 2)
    elif number % DROPPED == 0:
        row.drop()
    else:
        row.put(advantage=row["reward"] * 2)
    notes.add("did", task, number)


def _answer(row: gt.ClaimedRow, number: int, begun: dict[int, int], notes: Notes) -> None:
    for at in range(0, 8, 2):
        for item in range(grpo.ANSWERS):
            turn = grpo.answer_of(number, item)[at : at + 2]
            if begun.get(item, 0) <= at and len(turn):
                row.append(item=item, ids=turn, log_prob=-turn.astype(np.float32))
                notes.add("appended", number, item, at + len(turn))
    row.put()


def learn(part: Part) -> None:
    """Draws batches, checks them, advances the clock, saves, until there are no more rows."""
    store, notes = open_store(part), Notes(part)
    state = part.folder / "state.json"
    options: dict[str, Any] = {"prefetch": part.seed % 2, "output": "numpy"}
    options["options"] = gt.ReplayOptions(keep="saved", timeout_s=deadlines.patience(60))
    with store.expect_writers(), gt.Replay(store, _selection(part.folder), BATCH, **options) as replay:
        notes.add("finds", store.clock)
        if state.exists():
            notes.add("clock", 0)  # from here on it may be that of the state
            replay.load_state_dict(json.loads(state.read_text()))
        notes.add("clock", store.clock)
        for batch in replay:
            digest = hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest()
            notes.add("trained", batch.step, grpo.check(batch), digest)
            notes.add("clock", store.advance(batch.step + 1))
            if batch.step % SAVE_EVERY == SAVE_EVERY - 1:
                state.with_suffix(".new").write_text(json.dumps(replay.state_dict()))
                os.replace(state.with_suffix(".new"), state)
                replay.saved(batch.step)
                notes.add("saved", batch.step)


def _selection(folder: Path) -> Any:
    """The round's way of drawing, the same for all learners of it."""
    number = int(folder.name.rpartition("-")[2])
    return (Uniform(seed=1, replacement=False), Fifo(), Fifo(strict=True))[number % 3]


ROLES = {
    "loader": load,
    "learner": learn,
    "answers": answer_many,
    "server": serve,
    **{task: (lambda part, task=task: work(part, task)) for task in ("answer", "reward", "ref", "advantage")},
}


@dataclass
class TaskRound(Round):
    """A round of tasks: crashes of one process or of all, after which the job goes on, and in the end is done."""

    roles = ROLES

    def run(self) -> None:
        """Runs the round. Every defect is noted, none is raised."""
        with self.ends():
            for role in self.crew():
                self._begin(role, None)
            self._strike(None)
            (self.folder / "enough").touch()
            self._drain()
            with gt.Store.open(self.name, adopt=True, timeout_s=30) as store:
                self.defects += proof.audit(store)
                self.defects += prove(store, events(self.folder), self.figures)
                if self.kind == PREEMPTED and (lost := store.stats()["given_up"]):
                    self.defects.append(f"{lost} rows were given up, and no process ever died alone")
                self.figures["repairs (store)"] += store.stats()["repairs"]

    def crew(self) -> tuple[str, ...]:
        """The roles, one process each."""
        return (*CREW, "server") if self.kind == "tasks of other hosts" else CREW

    def pause_s(self) -> float:
        """Time to the next fault: processes are to come to their work in between."""
        return self.choose.random() * (0.5 if self.kind == PREEMPTED else 0.1)

    def fault(self, victim: Worker, store: gt.Store | None) -> None:
        """Kills a process or all of them, which are begun again, or stops one.

        A loader elsewhere is not killed alone: its last insert may still be made when the next loader counts the rows.
        """
        if self.kind == "tasks of other hosts" and victim.role == "loader":
            victim = next(worker for worker in self.workers if worker.role == "server")
        if self.kind == PREEMPTED or self.choose.random() < 0.15:
            for worker in self.workers:  # none lives to find another dead
                os.kill(worker.pid, signal.SIGSTOP)
            for worker in self.workers:
                os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            for worker in self.workers:
                os.kill(worker.pid, signal.SIGKILL)
                worker.killed = True
            for worker in list(self.workers):
                self._reap(worker)
            self.figures["kills of all"] += 1
            for role in self.crew():
                self._begin(role, None)
        elif (self.folder / WROTE).exists():
            (self.folder / WROTE).unlink()
            self.kill(next(worker for worker in self.workers if worker.role == "server"), None)
        else:
            super().fault(victim, store)

    def _drain(self) -> None:
        """All processes do what is left, and end by themselves; a server is asked to when the others have ended."""
        until_s = time.monotonic() + deadlines.patience(60)
        while self.workers and time.monotonic() < until_s:
            self._look()
            if not any(worker.asked for worker in self.workers) and {each.role for each in self.workers} == {"server"}:
                self.workers[0].asked = True
                os.kill(self.workers[0].pid, signal.SIGTERM)
            time.sleep(0.01)
        for worker in list(self.workers):
            self._hangs(worker, "does not come to its end")


def prove(store: gt.Store, noted: list[Event], figures: Counter[str]) -> list[str]:
    """What is wrong with a job that has come to its end, by its processes' notes and what is left in the store."""
    found: list[str] = []
    stats = store.stats()
    not_known = sum(event.what == "insert unknown" for event in noted)
    if not_known and not_known >= sum(event.what == "begins to serve" for event in noted):
        found.append(f"{not_known} inserts had an end that is unknown, more than servers were lost")
    roomy = stats["set_back"] + stats["revoked"] == 0
    inserted = Counter(number for event in noted if event.what == "inserted" for number in event.values[0])
    if max(inserted.values(), default=0) > 1 or max(inserted, default=-1) >= stats["inserted"]:
        found.append(f"{stats['inserted']} rows were inserted, and inserts of {inserted.most_common(3)} acknowledged")
    trained: dict[int, set[str]] = defaultdict(set)
    did: Counter[tuple[str, int]] = Counter()
    appended: dict[int, dict[int, int]] = defaultdict(dict)
    clock, again, lost = 0, [], []
    for event in effective(noted):
        values = event.values
        if event.what == "trained":
            trained[values[0]].add(json.dumps(values[1:]))
        elif event.what == "begins":
            task, number, begun = values
            again += [(task, number)] if did[task, number] else []
            before = appended[number] if task == "answer" else {}
            lost += [number] if any(dict(begun).get(item, 0) < length for item, length in before.items()) else []
        elif event.what == "did":
            did[values[0], values[1]] += 1
        elif event.what == "appended":
            appended[values[0]][values[1]] = values[2]
        elif event.what == "clock":
            clock = values[0]
        elif event.what == "finds" and values[0] < clock:
            found.append(f"the clock was {clock}, and is {values[0]}")
    if roomy and again:
        found.append(f"tasks were done again that were done: {again[:5]}, {len(again)} in all")
    if len(again) > (stats["set_back"] + stats["revoked"]) * len(ROLES):
        found.append(f"{len(again)} tasks were done again, and {stats['set_back']} results given up")
    if roomy and lost:
        found.append(f"of the rows {lost[:5]} appends were lost")
    if different := [step for step, texts in trained.items() if len(texts) > 1]:
        found.append(f"the steps {different[:5]} were drawn again with other rows or values")
    if sorted(trained) != list(range(len(trained))):
        found.append(f"steps were left out: {sorted(trained)[:20]}")
    rows = Counter(number for texts in trained.values() for text in texts for number in set(json.loads(text)[0]))
    if twice := [number for number, times in rows.items() if times > 1]:
        found.append(f"rows {twice[:5]} were trained in two steps")
    left = gt.fetch(store, store.keys(), fields=["id"], output="numpy")["id"].tolist() if len(store) else []
    if len(left) >= BATCH or stats["under_way"]:
        found.append(f"{len(left)} rows are left, and {stats['under_way']} under way")
    if both := set(left) & set(rows):
        found.append(f"rows {sorted(both)[:5]} were trained, and are there to be drawn again")
    expected = {number for number in range(stats["inserted"]) if number % DROPPED}
    gone = expected - set(rows) - set(left)
    if not len(gone) <= stats["given_up"] <= len(gone) + stats["inserted"] // DROPPED + 1:
        found.append(f"rows {sorted(gone)[:5]} are lost, {len(gone)} in all; {stats['given_up']} were given up")
    if unknown := (set(rows) | set(left)) - expected:
        found.append(f"rows {sorted(unknown)[:5]} were trained, and were not inserted or were dropped")
    figures += Counter(
        {
            "tasks done": sum(did.values()),
            "tasks done again": len(again),
            "rows inserted": stats["inserted"],
            "inserts acknowledged": sum(event.what == "inserted" for event in noted),
            "inserts unknown": not_known,
            "connections cut": sum(event.what == "cuts" for event in noted),
            "batches": len(trained),
            "rows proven": len(rows) + len(left),
            "rows given up": stats["given_up"],
            "results set back": stats["set_back"],
        }
    )
    return found
