"""What the journal of a store with tasks holds after a power cut: recorded writes, cut at every byte and operation."""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import patience
from journal_disk import RecordingDisk, put
from saved_rows import Pieces, pieces_in, pieces_of

import geartrain as gt
from geartrain.errors import NoSpaceError, WaitTimeoutError
from geartrain.store.journal import fill
from geartrain.store.journal_directory import JournalDirectory, make_journal
from geartrain.store.journal_writer import PartsWriter

CAPACITY, PAGE, SPAN_BYTES = 12, 512, 8192
FIELDS = {"id": gt.Field((), "int64"), "prompt": gt.Field(("prompt",), "int32"), "note": gt.Text()}
TASKS = {
    "answer": gt.Task({"ids": gt.Field(("tokens",), "int32")}, keep_partial=True),
    "reward": gt.Task({"reward": gt.Field(("tokens",), "float32")}, after="answer", rewritable=True),
    "train": gt.Task(after="reward"),
}


def new_store() -> gt.Store:
    return gt.Store.create(FIELDS, tasks=TASKS, capacity=CAPACITY, span_bytes=SPAN_BYTES, reserve=False)


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


class Journaled:
    """A store with tasks, its journal on a recording disk, and what the store held after each pass."""

    def __init__(self, path: Path, segment_bytes: int = 3_000) -> None:
        self.disk = RecordingDisk()
        self.store = new_store()
        store = self.store
        self.native = Racing(store.native)
        self.directory = make_journal(path, store.native, store.options, self.disk)
        assert self.directory.lock()
        store.native.set_journal(bytes(path), False, int(1e18))
        contents = self.directory.contents()
        native: Any = self.native
        self.writer = PartsWriter(
            native, store.fields, 1, self.directory, contents, segment_bytes=segment_bytes, frame_bytes=1_000
        )
        self.next_id, self.step = 1000, 0
        self.held: list[Pieces] = [{}]
        self.ever: dict[tuple[int, int], set[Any]] = {}

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

    def finished(self) -> gt.Keys:
        return self.store.keys()

    def take(self, keys: gt.Keys) -> None:
        """What a batch that keeps its rows does."""
        places = np.arange(len(keys), dtype=np.uint32)
        self.store.native.count_samples(keys.row, keys.generation, self.step, places)
        self.step += 1
        self.note()

    def note(self) -> None:
        for piece, value in pieces_of(self.store)[0].items():
            self.ever.setdefault(piece, set()).add(value)

    def run_pass(self, priorities: bool = False) -> None:
        assert self.writer.run_pass(0, priorities=priorities)
        self.held.append(pieces_of(self.store)[0])

    def close(self) -> None:
        self.writer.close()
        assert self.store.audit() == []
        self.store.close()


def check(path: Path, journaled: Journaled, before: Pieces, now: tuple[Pieces, dict[int, int]]) -> Pieces:
    """A cut between two passes: what both have is there, what neither has is not, and nothing is what it never was."""
    found, contents = pieces_in(path)
    after, sequences = now
    for piece, value in found.items():
        assert piece in before or piece in after, f"{piece} was removed long ago"
        assert value in journaled.ever[piece]
    for piece in before.keys() & after.keys():
        if before[piece] == after[piece]:
            assert found[piece] == after[piece]
    for row, sequence in sequences.items():  # no row is missing that is older than one that is there
        if sequence < contents.next_sequence:
            assert found[row, 0] == after[row, 0]
    known = contents.records["sequence"][contents.records["generation"] != 0]
    assert int(known.max(initial=0)) < contents.next_sequence
    return found


def check_restored(path: Path, found: Pieces, options: dict[str, Any] | None = None) -> None:
    """A store that is restored from the journal has what is in it, and its lists and counters add up."""
    with new_store() if options is None else gt.Store.create(FIELDS, **options) as store:
        contents = fill(store.native, JournalDirectory(path), repair=False)
        assert store.audit() == []
        assert pieces_of(store)[0] == found
        assert store.stats()["inserted"] == contents.next_sequence - 1
        after = store.native.changed_parts(0)
        assert after[0] > int(contents.parts["change"].max(initial=0))  # type: ignore[index]


def story(journaled: Journaled, seed: int, passes: int) -> None:
    """Inserts, work, rows set back, rewritten, dropped and taken, with a pass after each few."""
    chosen, store = random.Random(seed), journaled.store
    for _ in range(passes):
        for _ in range(chosen.randrange(1, 6)):
            action = chosen.randrange(9)
            finished = journaled.finished()
            some = finished[sorted(chosen.sample(range(len(finished)), min(len(finished), chosen.randrange(1, 4))))]
            try:
                if action < 3:
                    journaled.insert(chosen.randrange(1, 5))
                elif action < 5:
                    journaled.work(("answer", "reward")[action - 3], chosen.randrange(1, 5))
                elif action == 5 and len(some) and chosen.random() < 0.5:
                    store.delete(some)
                elif action == 5 and len(some):
                    its = [
                        np.full(n, seed, np.float32)
                        for n in store.native.lengths_of_rows(some.row, some.generation)[0][:, 1]
                    ]
                    store.put(some, "reward", {"reward": its}, timeout_s=0.0)
                elif action == 6 and len(some):
                    journaled.take(some)
                elif action == 7 and journaled.step:
                    done = journaled.step - 1
                    (store.native.free_taken if chosen.random() < 0.7 else store.native.untake)(done)
                elif action == 8:
                    with store.claim(chosen.choice(("answer", "reward")), 2) as claim:
                        if chosen.random() < 0.3:
                            claim.drop()
            except (WaitTimeoutError, NoSpaceError):
                pass
            if chosen.random() < 0.2:
                store.advance(store.clock + 1)
            journaled.note()
        journaled.run_pass(chosen.random() < 0.3)


@pytest.fixture
def journaled(tmp_path: Path) -> Iterator[Journaled]:
    one = Journaled(tmp_path / "journal")
    yield one
    one.close()


def test_every_prefix_of_the_bytes_of_a_pass_restores_what_was_whole_before(tmp_path: Path) -> None:
    journaled = Journaled(tmp_path / "journal", segment_bytes=1 << 20)
    journaled.insert(6)
    journaled.work("answer", 4)
    journaled.run_pass()
    path = journaled.directory.segment_path(1)
    synced = path.stat().st_size
    journaled.work("reward", 2)
    journaled.take(journaled.finished()[:1])
    journaled.insert(3)
    with journaled.store.claim("reward", 1) as claim:
        claim.drop()
    journaled.run_pass(priorities=True)
    now = pieces_of(journaled.store)
    journaled.close()
    seen: list[Pieces] = []
    for size in range(path.stat().st_size, synced - 1, -1):
        with path.open("r+b") as file:
            file.truncate(size)
        found = check(path.parent, journaled, journaled.held[1], now)
        if not seen or found != seen[-1]:
            seen.append(found)
            check_restored(path.parent, found)
    assert seen[0] == journaled.held[2]
    assert seen[-1] == journaled.held[1]
    assert len(seen) > 2, "no frame lies between the two passes"


def _cut_everywhere(tmp_path: Path, seed: int, passes: int, most: int) -> tuple[int, int]:
    """Cuts the power before every operation of a story; how many images were restored and segments compacted."""
    journaled = Journaled(tmp_path / "journal")
    image_path = tmp_path / "image"
    image_path.mkdir()
    shutil.copy(tmp_path / "journal" / "journal.json", image_path)
    images = 0

    def look(operation: str) -> None:
        nonlocal images
        now = pieces_of(journaled.store)
        for image in journaled.disk.cuts(PAGE, most, seed + images):
            images += 1
            put(image, image_path)
            found = check(image_path, journaled, journaled.held[-1], now)
            if images % 20 == 0:
                check_restored(image_path, found)

    journaled.disk.before = look
    story(journaled, seed, passes)
    look("end")
    journaled.run_pass(priorities=True)
    assert pieces_in(tmp_path / "journal")[0] == journaled.held[-1]
    compacted = journaled.writer.segments_removed
    journaled.close()
    return images, compacted


@pytest.mark.parametrize("seed", [1, 4])
def test_a_power_cut_at_any_operation_leaves_no_row_torn_twice_or_lost_nor_a_task(tmp_path: Path, seed: int) -> None:
    images, compacted = _cut_everywhere(tmp_path, seed, passes=32, most=2)
    assert images > 100 and compacted > 0


def test_every_durable_write_that_was_acknowledged_is_there_after_a_power_cut(
    tmp_path: Path, disk: RecordingDisk
) -> None:
    path, image_path = tmp_path / "journal", tmp_path / "image"
    image_path.mkdir()
    acknowledged: set[tuple[str, int]] = set()  # what was done, and of which prompt
    given = {"tasks": TASKS, "capacity": CAPACITY, "span_bytes": 1 << 15, "reserve": False}
    with gt.Store.create(FIELDS, journal=path, journal_sync_s=1e6, **given) as store:
        shutil.copy(path / "journal.json", image_path)
        images = 0

        def look(operation: str) -> None:
            nonlocal images
            due = set(acknowledged)
            for image in disk.cuts(PAGE, 1, images):
                images += 1
                put(image, image_path)
                found = ids_in(image_path)
                assert due <= found
                if images % 10 == 0:
                    check_restored(image_path, pieces_in(image_path)[0], given)

        def insert() -> None:
            for number in range(0, 2 * CAPACITY // 3):
                store.insert({"id": [number], "prompt": [[number]], "note": [""]}, durable=True)
                acknowledged.add(("insert", number))

        def answer() -> None:
            for claim in store.claims("answer", 2, timeout_s=patience(60), output="numpy"):
                numbers = claim["id"].tolist()
                claim.put(ids=[np.full(number, number, np.int32) for number in numbers], durable=True)
                acknowledged.update(("answer", number) for number in numbers)

        def reward() -> None:
            for claim in store.claims("reward", 1, timeout_s=patience(60), output="numpy"):
                number = int(claim["id"][0])
                for row in claim:
                    row.put(reward=row["ids"].astype(np.float32), durable=True)
                acknowledged.add(("reward", number))

        disk.before = look
        workers = [threading.Thread(target=work) for work in (answer, answer, reward)]
        for worker in workers:
            worker.start()
        insert()
        store.finish()
        for worker in workers:
            worker.join(patience(60))
        assert len(acknowledged) == 3 * (2 * CAPACITY // 3)
        assert images > 20
        disk.before = lambda operation: None


def ids_in(path: Path) -> set[tuple[str, int]]:
    """What is done in a journal, by the rows' numbers; every value follows from its row's, and no row is twice."""
    found, _ = pieces_in(path)
    numbers = {row: int(np.frombuffer(its[4], np.int64, 1)[0]) for (row, task), its in found.items() if task == 0}
    assert len(set(numbers.values())) == len(numbers)
    done = {("insert", number) for number in numbers.values()}
    for (row, task), its in found.items():
        number = numbers[row]
        if task in (1, 2):
            assert np.frombuffer(its[4], np.int32 if task == 1 else np.float32).tolist() == [number] * number
            done.add(((*TASKS,)[task - 1], number))
    return done


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 40))
def test_power_cuts_of_longer_stories(tmp_path: Path, seed: int) -> None:
    images, _ = _cut_everywhere(tmp_path, seed, passes=40, most=4)
    assert images > 300


@pytest.mark.parametrize("operation", ["write", "sync", "create", "remove", "truncate"])
def test_an_operation_that_fails_takes_its_pass_back_and_the_next_pass_makes_up_for_it(
    journaled: Journaled, operation: str
) -> None:
    fails = iter([False, True, True, False, True] * 200)
    failed = 0

    def before(now: str) -> None:
        nonlocal failed
        if (now == operation or (operation == "truncate" and now == "sync")) and next(fails):
            failed += 1
            raise OSError(28, "No space left on device")

    for _ in range(40):
        journaled.insert(2)
        journaled.work("answer", 2)
        journaled.work("reward", 2)
        finished = journaled.finished()
        journaled.store.delete(finished[:2])
        journaled.store.advance(journaled.store.clock + 1)
        journaled.disk.before = before
        done = False
        with contextlib.suppress(OSError):
            done = journaled.writer.run_pass(0, priorities=True)
        journaled.disk.before = lambda now: None
        now = pieces_of(journaled.store)
        check(journaled.directory.path, journaled, journaled.held[-1], now)
        if not done:
            journaled.run_pass(priorities=True)
        else:
            journaled.held.append(now[0])
        found, contents = pieces_in(journaled.directory.path)
        assert found == journaled.held[-1]
        assert contents.state is not None
        assert contents.state["tasks"]["clock"] == journaled.store.clock
        assert contents.next_sequence == journaled.store.native.next_sequence()
    assert failed > 3
    writer = journaled.writer
    living = writer._segment_of[writer._changes != 0]
    assert writer._living == {segment.number: int(np.sum(living == segment.number)) for segment in writer._segments}


@pytest.mark.parametrize("what", ["rewritten", "dropped", "inserted"])
def test_a_row_that_changes_while_it_is_copied_comes_with_the_next_look(journaled: Journaled, what: str) -> None:
    journaled.insert(6)
    journaled.work("answer", 6)
    journaled.work("reward", 3)
    finished = journaled.finished()
    turns = 0

    def act() -> None:
        nonlocal turns
        turns += 1
        if turns > 2:
            return
        if what == "rewritten":
            lengths = journaled.store.native.lengths_of_rows(finished.row, finished.generation)[0][:, 1]
            journaled.store.put(finished, "reward", {"reward": [np.full(n, turns, np.float32) for n in lengths]})
        elif what == "dropped":
            assert journaled.store.claim("reward", 1).drop() == 0
        else:
            journaled.insert(1)
        journaled.note()

    journaled.native.before_copy = act
    journaled.run_pass()
    found, contents = pieces_in(journaled.directory.path)
    if what != "inserted":
        assert turns > 1
        assert found == journaled.held[-1]
    else:  # later than what was asked for, and not before rows that are older
        assert contents.next_sequence == 7
        assert {row for row, _ in found} == set(range(6))
    journaled.native.before_copy = lambda: None
    journaled.run_pass()
    assert pieces_in(journaled.directory.path)[0] == journaled.held[-1]


def test_a_row_that_cannot_be_copied_holds_back_those_that_were_inserted_after_it(journaled: Journaled) -> None:
    journaled.insert(2)
    journaled.run_pass()
    keys = journaled.insert(4)

    class Torn(Racing):
        def copy_parts(self, parts: Any) -> Any:
            data, offsets, ok = super().copy_parts(parts)
            rows = parts.reshape(-1).view(PART)["row"]
            return data, offsets, ok & (rows != keys.row[1])

    from geartrain.store.saved_parts import PART

    native: Any = Torn(journaled.store.native)
    writer, journaled.writer._native = journaled.writer, native
    assert not writer.run_pass(1)
    found, contents = pieces_in(journaled.directory.path)
    assert {row for row, _ in found} == {0, 1, int(keys.row[0])}
    assert contents.next_sequence == 4
    writer._native = journaled.native  # type: ignore[assignment]
    journaled.run_pass()
    assert pieces_in(journaled.directory.path)[0] == journaled.held[-1]


def test_the_files_take_at_most_a_few_times_the_living_rows(journaled: Journaled) -> None:
    for _ in range(150):
        journaled.insert(2)
        journaled.work("answer", 2)
        journaled.work("reward", 2)
        finished = journaled.finished()
        if len(finished) > 4:
            journaled.store.delete(finished[1:4])  # the oldest one stays
        journaled.run_pass()
        nbytes = sum(path.stat().st_size for path in journaled.directory.path.glob("segment-*.bin"))
        assert nbytes < 2 * CAPACITY * 700 + 6 * 4_500
    assert journaled.writer.segments_removed > 3
    assert pieces_in(journaled.directory.path)[0] == journaled.held[-1]
    check_restored(journaled.directory.path, journaled.held[-1])
