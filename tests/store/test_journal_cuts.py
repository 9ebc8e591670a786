"""What a journal holds after a power cut: recorded writes, cut at every byte and with all subsets of unsynced pages."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from journal_disk import RecordingDisk, put

import geartrain as gt
import geartrain._native as _native
import geartrain.store.journal_writer as journal_writer_module
from geartrain.errors import JournalError
from geartrain.store.journal_directory import JournalContents, JournalDirectory, make_journal
from geartrain.store.journal_format import Frame
from geartrain.store.journal_writer import JournalWriter

STEPS, CAPACITY, PAGE = 4, 12, 512
FIELDS = {"x": gt.Field((4,), "float32"), "tag": gt.Field((), "int64", per_row=True)}


def rows_of(tags: list[int]) -> dict[str, Any]:
    values = np.asarray(tags, np.float32)[:, None, None] + np.arange(STEPS * 4, dtype=np.float32).reshape(STEPS, 4)
    return {"x": values, "tag": np.asarray(tags, np.int64)}


def length_of(tag: int) -> int:
    return 1 + tag % STEPS


class Journaled:
    """A store, its journal on a recording disk, and what the store held after each pass: tags by key."""

    def __init__(self, path: Path, segment_bytes: int = 2_000, priority_per: Any = "row") -> None:
        self.disk = RecordingDisk()
        self.store = gt.Store.create(FIELDS, max_length=STEPS, capacity=CAPACITY, priority_per=priority_per)
        self.given: dict[tuple[int, int], set[int]] = {}  # priorities of all steps of a row, by key
        options = self.store.options
        self.directory = make_journal(path, self.store.native, options, self.disk)
        assert self.directory.lock()
        self.store.native.set_journal(bytes(path), False, int(1e18))
        self.writer = JournalWriter(
            self.store.native,
            self.store.fields,
            STEPS,
            self.directory,
            self.directory.contents(),
            segment_bytes=segment_bytes,
            frame_bytes=500,
        )
        self.next_tag = 1000
        self.held: list[dict[tuple[int, int], int]] = [{}]
        self.ever: dict[tuple[int, int], set[int]] = {}

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

    def now(self) -> dict[tuple[int, int], int]:
        keys = self.store.keys()
        tags = self.store.column("tag")[keys.row]
        return {
            (int(row), int(generation)): int(tag)
            for row, generation, tag in zip(keys.row, keys.generation, tags, strict=True)
        }

    def note(self) -> None:
        for key, tag in self.now().items():
            self.ever.setdefault(key, set()).add(tag)

    def run_pass(self, priorities: bool = False) -> None:
        self.writer.run_pass(0, priorities=priorities)
        self.held.append(self.now())

    def close(self) -> None:
        self.writer.close()
        self.store.close()


def read(path: Path, journaled: Journaled | None = None) -> tuple[JournalContents, dict[tuple[int, int], int]]:
    """What is restored from a directory: tags by key. Every value of a row must follow from its tag.

    With priorities of steps all of a row's are 1, or what `journaled` has given it at some time.
    """
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
        if directory.per_step and journaled is not None:
            (priority,) = set(of_steps[key[0]].tolist())
            assert len(of_steps[key[0]]) == length_of(tag)
            assert priority / 65536 in {1, *journaled.given.get(key, ())}
    sequences = contents.records["sequence"][contents.records["generation"] != 0]
    assert len(np.unique(sequences)) == len(sequences)
    return contents, found


def check(
    found: dict[tuple[int, int], int], journaled: Journaled, before: dict[Any, int], after: dict[Any, int]
) -> None:
    """A cut between two passes: what both have is there, what neither has is not, and no row is what it never was."""
    for key, tag in found.items():
        assert key in before or key in after, f"row {key} was removed long ago"
        assert tag in journaled.ever[key]
    missing = (before.keys() & after.keys()) - found.keys()
    assert not missing
    assert len({row for row, _ in found}) == len(found)


def story(journaled: Journaled, seed: int, passes: int) -> None:
    """Inserts, deletions, rewrites and new priorities, with a pass after each few."""
    chosen = random.Random(seed)
    for _ in range(passes):
        for _ in range(chosen.randrange(4)):
            keys = journaled.store.keys()
            some = keys[sorted(chosen.sample(range(len(keys)), min(len(keys), chosen.randrange(1, 4))))]
            action = chosen.randrange(4)
            if action == 0 and len(keys):
                journaled.store.delete(some)
            elif action == 1 and len(keys):
                journaled.rewrite(some)
            elif action == 2 and len(keys):
                journaled.give_priorities(some, chosen.randrange(100))
            else:
                journaled.insert(chosen.randrange(1, 5))
        journaled.run_pass(chosen.random() < 0.3)


@pytest.fixture
def journaled(tmp_path: Path) -> Any:
    one = Journaled(tmp_path / "journal")
    yield one
    one.close()


def test_every_prefix_of_the_bytes_of_a_pass_restores_what_was_whole_before(tmp_path: Path) -> None:
    journaled = Journaled(tmp_path / "journal", segment_bytes=1 << 20)
    keys = journaled.insert(7)
    journaled.run_pass()
    path = journaled.directory.segment_path(1)
    synced = path.stat().st_size
    journaled.store.delete(keys[:2])
    journaled.insert(3)
    journaled.run_pass(priorities=True)
    journaled.close()
    seen = []
    for size in range(path.stat().st_size, synced - 1, -1):
        with path.open("r+b") as file:
            file.truncate(size)
        _, found = read(path.parent)
        check(found, journaled, *journaled.held[1:3])
        if not seen or found != seen[-1]:
            seen.append(found)
    assert seen[0] == journaled.held[2] and seen[-1] == journaled.held[1]
    assert len(seen) > 2, "no frame lies between the two passes"


def _cut_everywhere(tmp_path: Path, seed: int, passes: int, most: int, priority_per: str = "row") -> int:
    """Cuts the power before every operation of a story; how many images were restored."""
    journaled = Journaled(tmp_path / "journal", priority_per=priority_per)
    image_path = tmp_path / "image"
    image_path.mkdir()
    shutil.copy(tmp_path / "journal" / "journal.json", image_path)
    images = 0

    def look(operation: str) -> None:
        nonlocal images
        now = journaled.now()
        for image in journaled.disk.cuts(PAGE, most, seed + images):
            images += 1
            put(image, image_path)
            _, found = read(image_path, journaled)
            check(found, journaled, journaled.held[-1], now)

    journaled.disk.before = look
    story(journaled, seed, passes)
    look("end")
    journaled.run_pass(priorities=True)
    assert read(tmp_path / "journal", journaled)[1] == journaled.held[-1]
    assert journaled.writer.segments_removed > 0, "nothing was compacted"
    journaled.close()
    return images


@pytest.mark.parametrize("seed", [1, 2])
def test_a_power_cut_at_any_operation_leaves_no_row_torn_twice_or_lost(tmp_path: Path, seed: int) -> None:
    assert _cut_everywhere(tmp_path, seed, passes=12, most=3) > 100


def test_a_power_cut_at_any_operation_leaves_no_row_with_priorities_of_steps_that_it_never_had(tmp_path: Path) -> None:
    assert _cut_everywhere(tmp_path, 3, passes=12, most=3, priority_per="step") > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 7))
def test_all_subsets_of_up_to_12_unsynced_pages(tmp_path: Path, seed: int) -> None:
    journaled = Journaled(tmp_path / "journal", segment_bytes=1 << 20)
    journaled.insert(5 + seed)
    journaled.run_pass()
    counts = []

    def look(operation: str) -> None:
        if operation != "sync":
            return
        pages = journaled.disk.unsynced_pages(PAGE)
        assert len(pages) <= 12
        counts.append(len(pages))
        now = journaled.now()
        image_path = tmp_path / "image"
        image_path.mkdir(exist_ok=True)
        shutil.copy(tmp_path / "journal" / "journal.json", image_path)
        for image in journaled.disk.cuts(PAGE, 12, seed):
            put(image, image_path)
            check(read(image_path)[1], journaled, journaled.held[-1], now)

    journaled.insert(CAPACITY)
    journaled.insert(CAPACITY)
    journaled.store.delete(journaled.store.keys()[:seed])
    journaled.insert(seed // 2)
    journaled.disk.before = look
    journaled.run_pass()
    assert max(counts) >= 4
    journaled.close()


@pytest.mark.long
def test_ten_thousand_seeded_cuts(tmp_path: Path) -> None:
    images = 0
    for seed in range(100, 10_000):
        (tmp_path / str(seed)).mkdir()
        priority_per = "step" if seed % 2 else "row"
        images += _cut_everywhere(tmp_path / str(seed), seed, 30, most=5, priority_per=priority_per)
        if images >= 10_000:
            return


def test_a_frame_that_was_on_the_disk_and_is_damaged_is_an_error(journaled: Journaled) -> None:
    for _ in range(3):
        journaled.insert(1)
        journaled.run_pass()
    path = journaled.directory.segment_path(1)
    data = path.read_bytes()
    place = data.index(np.float32(1001).tobytes())  # of the second row
    path.write_bytes(data[:place] + b"\xff" + data[place + 1 :])
    with pytest.raises(JournalError, match=r"segment-00000001\.bin is damaged at byte \d+"):
        read(path.parent)
    # The last frame may be what a power cut leaves.
    path.write_bytes(data[:-100] + b"\xff" + data[-99:])
    contents, found = read(path.parent)
    assert contents.cut_bytes > 0 and len(found) == 2


def test_a_missing_segment_is_an_error(tmp_path: Path) -> None:
    journaled = Journaled(tmp_path / "journal", segment_bytes=300)
    for _ in range(8):
        journaled.insert(1)
        journaled.run_pass()
    journaled.close()
    numbers = journaled.directory.numbers()
    assert len(numbers) > 2
    journaled.directory.segment_path(numbers[1]).unlink()
    with pytest.raises(JournalError, match="is missing"):
        read(journaled.directory.path)


@pytest.mark.parametrize("operation", ["write", "sync", "create", "sync_directory", "remove", "truncate"])
def test_an_operation_that_fails_takes_its_pass_back_and_the_next_pass_makes_up_for_it(
    journaled: Journaled, operation: str
) -> None:
    journaled.disk.before = lambda now: None
    fails = iter([False, True, True, False, True] * 200)
    failed = 0

    def before(now: str) -> None:
        nonlocal failed
        if (now == operation or (operation == "truncate" and now == "sync")) and next(fails):
            failed += 1
            raise OSError(28, "No space left on device")

    chosen = random.Random(5)
    for _ in range(40):
        keys = journaled.store.keys()
        if len(keys) > 3 and chosen.random() < 0.5:
            journaled.store.delete(keys[: chosen.randrange(3)])
            journaled.rewrite(journaled.store.keys()[:2])
        journaled.insert(chosen.randrange(1, 6))
        journaled.disk.before = before
        done = False
        try:
            journaled.writer.run_pass(0, priorities=True)
            done = True
        except OSError:
            pass
        journaled.disk.before = lambda now: None
        if not done:
            _, found = read(journaled.directory.path)
            check(found, journaled, journaled.held[-1], journaled.now())
            journaled.run_pass(priorities=True)
        else:
            journaled.held.append(journaled.now())
        contents, found = read(journaled.directory.path)
        assert found == journaled.held[-1]
        infos = journaled.store.native.infos(np.array([row for row, _ in found], np.uint32))
        assert np.array_equal(infos["priority"], contents.records["priority"][[row for row, _ in found]])
    assert failed > 3


# --- rows that cannot be copied ---------------------------------------------------------------------------------


class TornRows:
    """The native module, whose `fetch` finds rows torn. `before` is called before each."""

    def __init__(self) -> None:
        self.torn: set[int] = set()
        self.times = 0  # as often; -1: always
        self.before: Callable[[], None] = lambda: None
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(_native, name)

    def fetch(self, store: Any, rows: Any, *rest: Any) -> Any:
        self.calls += 1
        self.before()
        arrays, torn, *others = _native.fetch(store, rows, *rest)
        if self.times:
            self.times -= 1
            torn = torn | np.isin(rows, list(self.torn)).astype(torn.dtype)
        return arrays, torn, *others


@pytest.fixture
def torn(monkeypatch: pytest.MonkeyPatch) -> TornRows:
    module = TornRows()
    monkeypatch.setattr(journal_writer_module, "_native", module)
    return module


def holds(path: Path) -> int:
    return JournalDirectory(path).contents().rows


def test_a_commit_does_not_return_before_a_row_that_was_torn_is_on_the_disk(tmp_path: Path, torn: TornRows) -> None:
    path = tmp_path / "journal"
    with gt.Store.create(FIELDS, max_length=STEPS, capacity=CAPACITY, journal=path, journal_sync_s=0) as store:
        for times in (1, 3, 3 * journal_writer_module._LOOKS):  # within a pass, and over several
            torn.torn, torn.times = set(range(CAPACITY)), times
            n = len(store)
            store.insert(rows_of([n]), threads=1)
            assert torn.times == 0
            assert holds(path) == n + 1


def test_a_pass_that_cannot_copy_a_row_says_nothing_and_the_next_one_makes_up_for_it(
    journaled: Journaled, torn: TornRows
) -> None:
    native, path = journaled.store.native, journaled.directory.path
    keys = journaled.insert(4)
    torn.torn, torn.times = {int(keys.row[1])}, -1
    assert not journaled.writer.run_pass(1)
    assert native.journal_state()["synced_ns"] == 0
    assert holds(path) == 3
    journaled.writer._begin_segment()
    journaled.rewrite(keys[3:])  # it is new for two reasons by the next pass
    torn.times = 0
    assert journaled.writer.run_pass(1)
    assert native.journal_state()["synced_ns"] > 0
    assert read(path)[1] == journaled.now()
    writer = journaled.writer
    living = writer._segment_of[writer._generations != 0]
    assert writer._living == {segment.number: int(np.sum(living == segment.number)) for segment in writer._segments}


def test_a_row_is_gone_when_the_one_that_took_its_place_went_before_it_was_copied(
    journaled: Journaled, torn: TornRows
) -> None:
    store, path = journaled.store, journaled.directory.path
    old = journaled.insert(CAPACITY)
    journaled.run_pass()
    store.delete(old[:1])
    new = journaled.insert(1)
    assert new.row.tolist() == old[:1].row.tolist()

    def evict() -> None:
        torn.before = lambda: None
        store.delete(new)

    torn.before = evict
    assert journaled.writer.run_pass(1), "what was asked for is on the disk: the old row is gone"
    assert torn.calls
    assert read(path)[1] == journaled.now()
    later = journaled.insert(1)
    torn.torn, torn.times = {int(later.row[0])}, -1
    assert not journaled.writer.run_pass(2)
    torn.times = 0
    journaled.run_pass()
    assert read(path)[1] == journaled.now()


def test_a_row_that_is_torn_in_the_place_of_another_leaves_none_of_it(journaled: Journaled, torn: TornRows) -> None:
    old = journaled.insert(CAPACITY)
    journaled.run_pass()
    journaled.store.delete(old[:1])
    new = journaled.insert(1)
    torn.torn, torn.times = {int(new.row[0])}, -1
    assert not journaled.writer.run_pass(1)
    found = read(journaled.directory.path)[1]
    assert len(found) == CAPACITY - 1
    torn.times = 0
    journaled.run_pass()
    assert read(journaled.directory.path)[1] == journaled.now()


def test_the_files_take_at_most_a_few_times_the_living_rows(journaled: Journaled) -> None:
    for _ in range(120):
        keys = journaled.insert(2)
        if len(journaled.store) > 6:
            journaled.store.delete(keys[:1])
        journaled.run_pass()
        nbytes = sum(path.stat().st_size for path in journaled.directory.path.glob("segment-*.bin"))
        assert nbytes < 2 * CAPACITY * 140 + 6 * 2_600
    assert read(journaled.directory.path)[1] == journaled.held[-1]
