"""Stores with a journal on a recording disk: what they do, what is on the disk, and what a power cut may leave of it.

There is a kind for stores of rows of fixed size and one for stores with axes, strings and tasks. Content is a value by
place: of the first a row's tag by its key, of the second a part's bytes and so on by row and task.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from journal_disk import RecordingDisk
from saved_rows import pieces_in, pieces_of

import geartrain as gt
from geartrain.errors import NoSpaceError, WaitTimeoutError
from geartrain.store.journal import fill
from geartrain.store.journal_directory import JournalContents, JournalDirectory, make_journal
from geartrain.store.journal_format import Frame
from geartrain.store.journal_writer import JournalWriter, PartsWriter

CAPACITY, PAGE = 12, 512
Content = dict[tuple[int, int], Any]
#: What is in a store, and of stores with tasks the sequences of its rows.
Now = tuple[Content, dict[int, int]]


class Journaled(ABC):
    """A store, its journal, and what the store held after each pass and at any time."""

    segment_bytes: int
    #: More than the files of a journal that is compacted ever have.
    most_bytes: int

    def __init__(self, path: Path, segment_bytes: int | None = None, **options: Any) -> None:
        self.disk = RecordingDisk()
        self.options = options
        self.store = self.new_store()
        self.native: Any = self.store.native
        self.directory = make_journal(path, self.store.native, self.store.options, self.disk)
        assert self.directory.lock()
        self.store.native.set_journal(bytes(path), False, int(1e18))
        self.writer = self.new_writer(segment_bytes or self.segment_bytes)
        self.held: list[Content] = [{}]
        self.ever: dict[tuple[int, int], set[Any]] = {}

    @abstractmethod
    def new_store(self) -> gt.Store: ...

    @abstractmethod
    def new_writer(self, segment_bytes: int) -> JournalWriter: ...

    @abstractmethod
    def content(self, store: gt.Store) -> Content: ...

    def now(self) -> Now:
        return self.content(self.store), {}

    def note(self) -> None:
        for place, value in self.now()[0].items():
            self.ever.setdefault(place, set()).add(value)

    def run_pass(self, priorities: bool = False) -> None:
        assert self.writer.run_pass(0, priorities=priorities)
        self.held.append(self.now()[0])

    def close(self) -> None:
        self.writer.close()
        assert self.store.audit() == []
        self.store.close()

    @abstractmethod
    def insert(self, n: int) -> gt.Keys: ...

    @abstractmethod
    def begin(self) -> None:
        """What is before a pass that is cut at every byte."""

    @abstractmethod
    def go_on(self) -> None:
        """What is in that pass: frames of several kinds."""

    @abstractmethod
    def act(self, chosen: random.Random, seed: int) -> None:
        """Anything that may happen to rows."""

    @abstractmethod
    def turn(self) -> None:
        """Some rows come, and most of them go, so that segments are compacted."""

    def story(self, seed: int, passes: int) -> None:
        """What happens by a seed, with a pass after each few."""
        chosen = random.Random(seed)
        for _ in range(passes):
            for _ in range(chosen.randrange(1, 6)):
                self.act(chosen, seed)
            self.run_pass(chosen.random() < 0.3)

    @abstractmethod
    def read(self, path: Path) -> tuple[Content, JournalContents]:
        """What is restored from a directory."""

    def check(self, path: Path, before: Content, now: Now) -> Content:
        """A cut between two passes: what both have is there, what neither has is not; nothing is what it never was."""
        found, contents = self.read(path)
        after, sequences = now
        for place, value in found.items():
            assert place in before or place in after, f"{place} was removed long ago"
            assert value in self.ever[place]
        for place in before.keys() & after.keys():
            if before[place] == after[place]:
                assert found[place] == after[place]
        for row, sequence in sequences.items():  # no row is missing that is older than one that is there
            if sequence < contents.next_sequence:
                assert found[row, 0] == after[row, 0]
        known = contents.records["sequence"][contents.records["generation"] != 0]
        assert int(known.max(initial=0)) < contents.next_sequence
        assert len(np.unique(known)) == len(known)
        return found

    def check_restored(self, path: Path, found: Content) -> None:
        """A store that is restored from the journal has what is in it, and its lists and counters add up."""
        with self.new_store() as store:
            contents = fill(store.native, JournalDirectory(path), repair=False)
            assert store.audit() == []
            assert self.content(store) == found
            self.check_counters(store, contents)

    @abstractmethod
    def check_counters(self, store: gt.Store, contents: JournalContents) -> None: ...

    def check_living(self) -> None:
        """The writer counts as living what is."""
        living = self.writer._segment_of[self.writer._held()]
        segments = self.writer._segments
        assert self.writer._living == {each.number: int(np.sum(living == each.number)) for each in segments}


# --- rows of fixed size -------------------------------------------------------------------------------------------

STEPS = 4
FIELDS = {"x": gt.Field((4,), "float32"), "tag": gt.Field((), "int64", per_row=True)}


def rows_of(tags: list[int]) -> dict[str, Any]:
    values = np.asarray(tags, np.float32)[:, None, None] + np.arange(STEPS * 4, dtype=np.float32).reshape(STEPS, 4)
    return {"x": values, "tag": np.asarray(tags, np.int64)}


def length_of(tag: int) -> int:
    return 1 + tag % STEPS


class Plain(Journaled):
    """Rows whose values follow from their tags. `priority_per="step"`: all steps of a row have one priority."""

    segment_bytes, most_bytes = 2_000, 2 * CAPACITY * 140 + 6 * 2_600

    def __init__(self, path: Path, segment_bytes: int | None = None, **options: Any) -> None:
        self.next_tag = 1000
        self.given: dict[tuple[int, int], set[int]] = {}  # priorities of all steps of a row, by key
        super().__init__(path, segment_bytes, **options)

    def new_store(self) -> gt.Store:
        return gt.Store.create(FIELDS, max_length=STEPS, capacity=CAPACITY, **self.options)

    def new_writer(self, segment_bytes: int) -> JournalWriter:
        contents = self.directory.contents()
        return JournalWriter(
            self.native, FIELDS, STEPS, self.directory, contents, segment_bytes=segment_bytes, frame_bytes=500
        )

    def content(self, store: gt.Store) -> Content:
        keys = store.keys()
        tags = store.column("tag")[keys.row].tolist()
        return dict(zip(zip(keys.row.tolist(), keys.generation.tolist(), strict=True), tags, strict=True))

    def check(self, path: Path, before: Content, now: Now) -> Content:
        found = super().check(path, before, now)
        assert not (before.keys() & now[0].keys()) - found.keys()
        return found

    def insert(self, n: int) -> gt.Keys:
        tags = list(range(self.next_tag, self.next_tag + n))
        self.next_tag += n
        keys = self.store.insert(rows_of(tags), lengths=[length_of(tag) for tag in tags], threads=1)
        self.note()
        return keys

    def rewrite(self, keys: gt.Keys) -> None:
        tags = list(range(self.next_tag * STEPS, (self.next_tag + len(keys)) * STEPS, STEPS))
        old = self.store.status(keys)["length"]
        tags = [tag + int(length) - 1 for tag, length in zip(tags, old, strict=True)]
        self.next_tag += len(keys)
        assert self.store.write(keys, rows_of(tags)) == 0
        self.note()

    def give_priorities(self, keys: gt.Keys, priority: int) -> None:
        """The same one to all steps of some rows, or to the rows."""
        if not self.store.per_step:
            self.store.update_priorities(keys, priority)
            return
        for at, length in enumerate(self.store.status(keys)["length"]):
            self.store.update_priorities(keys[np.full(length, at)].of_steps(np.arange(length)), priority)
            self.given.setdefault((int(keys.row[at]), int(keys.generation[at])), set()).add(priority)

    def begin(self) -> None:
        self.insert(7)

    def go_on(self) -> None:
        self.store.delete(self.store.keys()[:2])
        self.insert(3)

    def act(self, chosen: random.Random, seed: int) -> None:
        keys = self.store.keys()
        some = keys[sorted(chosen.sample(range(len(keys)), min(len(keys), chosen.randrange(1, 4))))]
        action = chosen.randrange(4)
        if action == 0 and len(keys):
            self.store.delete(some)
        elif action == 1 and len(keys):
            self.rewrite(some)
        elif action == 2 and len(keys):
            self.give_priorities(some, chosen.randrange(100))
        else:
            self.insert(chosen.randrange(1, 5))

    def turn(self) -> None:
        keys = self.insert(5)
        self.rewrite(keys[1:3])
        self.store.delete(keys[:1])

    def check_counters(self, store: gt.Store, contents: JournalContents) -> None:
        assert store.stats()["inserted"] == len(store)

    def read(self, path: Path) -> tuple[Content, JournalContents]:
        """Every value of a row must follow from its tag, and priorities of steps be 1 or what was given."""
        blocks: dict[int, tuple[Any, Any]] = {}
        of_steps: dict[int, Any] = {}
        directory = JournalDirectory(path)

        def on_rows(records: Any, frame: Frame) -> None:
            assert frame.blocks is not None
            n = len(records)
            x = np.frombuffer(frame.blocks[: n * frame.steps * 16], np.float32).reshape(n, frame.steps, 4)
            at = n * frame.steps * 16
            tags = np.frombuffer(frame.blocks[at : at + n * 8], np.int64)
            steps = np.frombuffer(frame.blocks[at + n * 8 :], np.uint32).reshape(n, -1)
            assert steps.shape[1] == (frame.steps if directory.per_step else 0)
            for record, values, tag, priorities in zip(records, x, tags, steps, strict=True):
                blocks[int(record["row"])] = (values[: record["length"]], int(tag))
                of_steps[int(record["row"])] = priorities[: record["length"]]

        def on_steps(rows: Any, lengths: Any, values: Any) -> None:
            for row, end, length in zip(rows.tolist(), np.cumsum(lengths), lengths, strict=True):
                of_steps[row] = values[end - length : end]

        contents = directory.contents(on_rows=on_rows, on_steps=on_steps)
        found = {}
        for record in contents.records[contents.records["generation"] != 0]:
            values, tag = blocks[int(record["row"])]
            assert len(values) == length_of(tag)
            assert np.array_equal(values, rows_of([tag])["x"][0, : len(values)])
            key = int(record["row"]), int(record["generation"])
            found[key] = tag
            if directory.per_step:
                (priority,) = set(of_steps[key[0]].tolist())
                assert len(of_steps[key[0]]) == length_of(tag)
                assert priority / 65536 in {1, *self.given.get(key, ())}
        return found, contents


# --- axes, strings and tasks --------------------------------------------------------------------------------------

TASK_FIELDS = {"id": gt.Field((), "int64"), "prompt": gt.Field(("prompt",), "int32"), "note": gt.Text()}
TASKS = {
    "answer": gt.Task({"ids": gt.Field(("tokens",), "int32")}, keep_partial=True),
    "reward": gt.Task({"reward": gt.Field(("tokens",), "float32")}, after="answer", rewritable=True),
    "train": gt.Task(after="reward"),
}


class Racing:
    """A native store; `before_copy` is called before parts are copied."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.before_copy: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def copy_parts(self, parts: Any) -> Any:
        self.before_copy()
        return self._native.copy_parts(parts)


class Tasked(Journaled):
    """Rows that are inserted, answered, finished, rewritten, taken and dropped."""

    segment_bytes, most_bytes = 3_000, 2 * CAPACITY * 700 + 6 * 4_500

    def __init__(self, path: Path, segment_bytes: int | None = None, **options: Any) -> None:
        self.next_id, self.step = 1000, 0
        super().__init__(path, segment_bytes, **options)

    def new_store(self) -> gt.Store:
        given = {"capacity": CAPACITY, "span_bytes": 8192, "reserve": False, **self.options}
        return gt.Store.create(TASK_FIELDS, tasks=TASKS, **given)

    def new_writer(self, segment_bytes: int) -> JournalWriter:
        contents, self.native = self.directory.contents(), Racing(self.store.native)
        return PartsWriter(
            self.native, TASK_FIELDS, 1, self.directory, contents, segment_bytes=segment_bytes, frame_bytes=1_000
        )

    def content(self, store: gt.Store) -> Content:
        return pieces_of(store)[0]

    def now(self) -> Now:
        return pieces_of(self.store)

    def read(self, path: Path) -> tuple[Content, JournalContents]:
        return pieces_in(path)

    def insert(self, n: int) -> gt.Keys:
        ids = list(range(self.next_id, self.next_id + n))
        self.next_id += n
        prompts = [np.full(each % 4, each, np.int32) for each in ids]
        notes = ["n" * (each % 3) for each in ids]
        keys = self.store.insert({"id": ids, "prompt": prompts, "note": notes}, timeout_s=0.0)
        self.note()
        return keys

    def work(self, task: str, n: int) -> int:
        """Puts some rows, and says of how many."""
        claim = self.store.claim(task, n, output="numpy")
        with claim:
            for row in claim:
                number = int(row["id"])
                if task == "answer":
                    values: Any = {"ids": np.arange(number % 40, dtype=np.int32) + number}
                else:
                    values = {"reward": np.asarray(row["ids"], np.float32) / 2}
                row.put(**values, timeout_s=0.0)
                self.note()
        return len(claim)

    def take(self, keys: gt.Keys) -> None:
        """What a batch that keeps its rows does."""
        places = np.arange(len(keys), dtype=np.uint32)
        self.store.native.count_samples(keys.row, keys.generation, self.step, places)
        self.step += 1
        self.note()

    def begin(self) -> None:
        self.insert(6)
        self.work("answer", 4)

    def go_on(self) -> None:
        self.work("reward", 2)
        self.take(self.store.keys()[:1])
        self.insert(3)
        with self.store.claim("reward", 1) as claim:
            claim.drop()

    def act(self, chosen: random.Random, seed: int) -> None:
        store, action, finished = self.store, chosen.randrange(9), self.store.keys()
        some = finished[sorted(chosen.sample(range(len(finished)), min(len(finished), chosen.randrange(1, 4))))]
        try:
            if action < 3:
                self.insert(chosen.randrange(1, 5))
            elif action < 5:
                self.work(("answer", "reward")[action - 3], chosen.randrange(1, 5))
            elif action == 5 and len(some) and chosen.random() < 0.5:
                store.delete(some)
            elif action == 5 and len(some):
                its = [
                    np.full(n, seed, np.float32)
                    for n in store.native.lengths_of_rows(some.row, some.generation)[0][:, 1]
                ]
                store.put(some, "reward", {"reward": its}, timeout_s=0.0)
            elif action == 6 and len(some):
                self.take(some)
            elif action == 7 and self.step:
                done = self.step - 1
                (store.native.free_taken if chosen.random() < 0.7 else store.native.untake)(done)
            elif action == 8:
                with store.claim(chosen.choice(("answer", "reward")), 2) as claim:
                    if chosen.random() < 0.3:
                        claim.drop()
        except (WaitTimeoutError, NoSpaceError):
            pass
        if chosen.random() < 0.2:
            store.advance(store.clock + 1)
        self.note()

    def turn(self) -> None:
        self.insert(2)
        self.work("answer", 2)
        self.work("reward", 2)
        finished = self.store.keys()
        if len(finished) > 4:
            self.store.delete(finished[1:4])  # the oldest one stays
        self.store.advance(self.store.clock + 1)

    def check_counters(self, store: gt.Store, contents: JournalContents) -> None:
        assert store.stats()["inserted"] == contents.next_sequence - 1
        assert contents.parts is not None
        assert store.native.changed_parts(0)[0] > int(contents.parts["change"].max(initial=0))
