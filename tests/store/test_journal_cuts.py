"""What a journal holds after a power cut: recorded writes, cut at every byte and with all subsets of unsynced pages."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import patience
from journal_disk import RecordingDisk, put
from journal_stories import (
    CAPACITY,
    FIELDS,
    PAGE,
    STEPS,
    TASK_FIELDS,
    TASKS,
    Content,
    Journaled,
    Plain,
    Racing,
    Tasked,
    rows_of,
)
from saved_rows import pieces_in

import geartrain as gt
import geartrain._native as _native
import geartrain.store.journal_writer as journal_writer_module
from geartrain.errors import JournalError
from geartrain.store.journal import fill
from geartrain.store.journal_directory import JournalDirectory
from geartrain.store.journal_format import frames
from geartrain.store.saved_parts import PART

Kind = pytest.mark.parametrize("kind", [Plain, Tasked])


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Plain]:
    one = Plain(tmp_path / "journal")
    yield one
    one.close()


@pytest.fixture
def tasked(tmp_path: Path) -> Iterator[Tasked]:
    one = Tasked(tmp_path / "journal")
    yield one
    one.close()


@Kind
def test_every_prefix_of_the_bytes_of_a_pass_restores_what_was_whole_before(
    tmp_path: Path, kind: type[Journaled]
) -> None:
    journaled = kind(tmp_path / "journal", segment_bytes=1 << 20)
    journaled.begin()
    journaled.run_pass()
    path = journaled.directory.segment_path(1)
    synced, manifest = path.stat().st_size, (path.parent / "journal.json").read_bytes()
    journaled.go_on()
    journaled.run_pass(priorities=True)
    now = journaled.now()
    journaled.close()
    (path.parent / "journal.json").write_bytes(manifest)
    seen: list[Content] = []
    for size in range(path.stat().st_size, synced - 1, -1):
        with path.open("r+b") as file:
            file.truncate(size)
        found = journaled.check(path.parent, journaled.held[1], now)
        if not seen or found != seen[-1]:
            seen.append(found)
            journaled.check_restored(path.parent, found)
    assert seen[0] == journaled.held[2]
    assert seen[-1] == journaled.held[1]
    assert len(seen) > 2, "no frame lies between the two passes"


def _cut_everywhere(tmp_path: Path, kind: type[Journaled], seed: int, passes: int, most: int, **options: Any) -> int:
    """Cuts the power before every operation of a story; how many images were restored."""
    journaled = kind(tmp_path / "journal", **options)
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
            found = journaled.check(image_path, journaled.held[-1], now)
            if images % 20 == 0:
                journaled.check_restored(image_path, found)

    journaled.disk.before = look
    journaled.story(seed, passes)
    look("end")
    journaled.run_pass(priorities=True)
    assert journaled.read(tmp_path / "journal")[0] == journaled.held[-1]
    compacted = journaled.writer.segments_removed
    journaled.close()
    assert compacted > 0 or passes > 32, "nothing was compacted"
    return images


@pytest.mark.parametrize(
    ("kind", "options", "seed"),
    [(Plain, {}, 1), (Plain, {"priority_per": "step"}, 3), (Tasked, {}, 1), (Tasked, {}, 4)],
)
def test_a_power_cut_at_any_operation_leaves_no_row_torn_twice_or_lost(
    tmp_path: Path, kind: type[Journaled], options: dict[str, Any], seed: int
) -> None:
    passes, most = (12, 3) if kind is Plain else (32, 2)
    assert _cut_everywhere(tmp_path, kind, seed, passes, most, **options) > 100


@Kind
def test_a_power_cut_after_a_killed_writer_was_followed_by_another(tmp_path: Path, kind: type[Journaled]) -> None:
    """What the killed writer had written is in memory alone until the next one flushes it."""
    journaled = kind(tmp_path / "journal", segment_bytes=1 << 20)
    path, image_path = journaled.directory.path, tmp_path / "image"
    image_path.mkdir()
    shutil.copy(path / "journal.json", image_path)
    journaled.begin()
    journaled.run_pass()
    journaled.go_on()

    def kill(operation: str) -> None:
        if operation == "sync":
            raise KeyboardInterrupt

    journaled.disk.before = kill
    with pytest.raises(KeyboardInterrupt):
        journaled.run_pass()
    journaled.disk.before = lambda operation: None
    journaled.writer.close()
    assert journaled.directory.lock()
    journaled.directory.contents(repair=True)
    journaled.writer = journaled.new_writer(1 << 20)
    journaled.run_pass()
    for image in journaled.disk.cuts(PAGE, 3, 0):
        put(image, image_path)
        assert journaled.read(image_path)[0] == journaled.held[-1]
    journaled.close()


@Kind
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 25))
def test_power_cuts_of_longer_stories(tmp_path: Path, kind: type[Journaled], seed: int) -> None:
    assert _cut_everywhere(tmp_path, kind, seed, passes=40, most=4) > 300


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 7))
def test_all_subsets_of_up_to_12_unsynced_pages(tmp_path: Path, seed: int) -> None:
    journaled = Plain(tmp_path / "journal", segment_bytes=1 << 20)
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
            journaled.check(image_path, journaled.held[-1], now)

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
        images += _cut_everywhere(tmp_path / str(seed), Plain, seed, 40, most=5, priority_per=priority_per)
        if images >= 10_000:
            return


def test_a_frame_that_was_on_the_disk_and_is_damaged_is_an_error(plain: Plain) -> None:
    for _ in range(3):
        plain.insert(1)
        plain.run_pass()
    path = plain.directory.segment_path(1)
    data = path.read_bytes()
    place = data.index(np.float32(1001).tobytes())  # of the second row
    path.write_bytes(data[:place] + b"\xff" + data[place + 1 :])
    with pytest.raises(JournalError, match=r"segment-00000001\.bin is damaged at byte \d+.*load a checkpoint"):
        plain.read(path.parent)
    # The last frame may be what a power cut leaves, as long as nothing says that it was on the disk.
    path.write_bytes(torn := data[:-100] + b"\xff" + data[-99:])
    found, contents = plain.read(path.parent)
    assert contents.cut_bytes > 0 and len(found) == 2
    path.write_bytes(data)
    plain.run_pass(priorities=True)
    path.write_bytes(torn)
    with pytest.raises(JournalError, match=r"segment-00000001\.bin is damaged at byte \d+.*load a checkpoint"):
        plain.read(path.parent)


@pytest.mark.parametrize("which", ["first", "second", "last", "all"])
def test_a_missing_segment_is_an_error(tmp_path: Path, which: str) -> None:
    plain = Plain(tmp_path / "journal", segment_bytes=300)
    for _ in range(40):
        plain.insert(1)
        plain.run_pass()
    plain.close()
    numbers = plain.directory.numbers()
    assert len(numbers) > 4 and plain.writer.segments_removed > 0
    gone = {"first": numbers[:1], "second": numbers[1:2], "last": numbers[-1:], "all": numbers}[which]
    for number in gone:
        plain.directory.segment_path(number).unlink()
    with pytest.raises(JournalError, match=f"segment-{gone[-1]:08d}.bin is missing.*load a checkpoint"):
        plain.read(plain.directory.path)


def test_a_segment_that_was_cut_between_two_frames_is_named(tmp_path: Path) -> None:
    plain = Plain(tmp_path / "journal", segment_bytes=600)
    for _ in range(8):
        plain.insert(1)
        plain.run_pass()
    plain.close()
    path = plain.directory.segment_path(1)
    with path.open("rb") as file:
        ends = [frame.offset for frame in frames(file.fileno(), blocks=False, verify=True, first=None)]
    with path.open("r+b") as file:
        file.truncate(ends[-1])
    with pytest.raises(JournalError, match=rf"00000001\.bin is damaged at byte {ends[-1]}: .* next file begins with"):
        plain.read(path.parent)


@Kind
@pytest.mark.parametrize(
    "operation", ["write", "sync", "create", "sync_directory", "remove", "truncate", "put_manifest"]
)
def test_an_operation_that_fails_takes_its_pass_back_and_the_next_pass_makes_up_for_it(
    tmp_path: Path, kind: type[Journaled], operation: str
) -> None:
    journaled = kind(tmp_path / "journal")
    fails = iter([False, True, True, False, True] * 200)
    failed = 0

    def before(now: str) -> None:
        nonlocal failed
        if (now == operation or (operation == "truncate" and now == "sync")) and next(fails):
            failed += 1
            raise OSError(28, "No space left on device")

    for _ in range(40):
        journaled.turn()
        journaled.disk.before = before
        done = False
        with contextlib.suppress(OSError):
            done = journaled.writer.run_pass(0, priorities=True)
        journaled.disk.before = lambda now: None
        now = journaled.now()
        journaled.check(journaled.directory.path, journaled.held[-1], now)
        if not done:
            journaled.run_pass(priorities=True)
        else:
            journaled.held.append(now[0])
        found, contents = journaled.read(journaled.directory.path)
        assert found == journaled.held[-1]
        keys = journaled.store.keys()
        assert np.array_equal(
            journaled.store.native.infos(keys.row)["priority"], contents.records["priority"][keys.row]
        )
        assert contents.next_sequence == journaled.store.native.next_sequence()
        if contents.state is not None:
            assert contents.state["tasks"]["clock"] == journaled.store.clock
    assert failed > 3
    journaled.check_living()
    journaled.close()


@Kind
def test_the_files_take_at_most_a_few_times_the_living_rows(tmp_path: Path, kind: type[Journaled]) -> None:
    journaled = kind(tmp_path / "journal")
    for _ in range(150):
        journaled.turn()
        journaled.run_pass()
        nbytes = sum(path.stat().st_size for path in journaled.directory.path.glob("segment-*.bin"))
        assert nbytes < journaled.most_bytes
    assert journaled.writer.segments_removed > 3
    assert journaled.read(journaled.directory.path)[0] == journaled.held[-1]
    journaled.check_restored(journaled.directory.path, journaled.held[-1])
    journaled.close()


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
    plain: Plain, torn: TornRows
) -> None:
    native, path = plain.store.native, plain.directory.path
    keys = plain.insert(4)
    torn.torn, torn.times = {int(keys.row[1])}, -1
    assert not plain.writer.run_pass(1)
    assert native.journal_state()["synced_ns"] == 0
    assert holds(path) == 3
    plain.writer._begin_segment()
    plain.rewrite(keys[3:])  # it is new for two reasons by the next pass
    torn.times = 0
    assert plain.writer.run_pass(1)
    assert native.journal_state()["synced_ns"] > 0
    assert plain.read(path)[0] == plain.now()[0]
    plain.check_living()


def test_a_row_is_gone_when_the_one_that_took_its_place_went_before_it_was_copied(plain: Plain, torn: TornRows) -> None:
    store, path = plain.store, plain.directory.path
    old = plain.insert(CAPACITY)
    plain.run_pass()
    store.delete(old[:1])
    new = plain.insert(1)
    assert new.row.tolist() == old[:1].row.tolist()

    def evict() -> None:
        torn.before = lambda: None
        store.delete(new)

    torn.before = evict
    assert plain.writer.run_pass(1), "what was asked for is on the disk: the old row is gone"
    assert torn.calls
    assert plain.read(path)[0] == plain.now()[0]
    later = plain.insert(1)
    torn.torn, torn.times = {int(later.row[0])}, -1
    assert not plain.writer.run_pass(2)
    torn.times = 0
    plain.run_pass()
    assert plain.read(path)[0] == plain.now()[0]


def test_a_row_that_is_torn_in_the_place_of_another_leaves_none_of_it(plain: Plain, torn: TornRows) -> None:
    old = plain.insert(CAPACITY)
    plain.run_pass()
    plain.store.delete(old[:1])
    new = plain.insert(1)
    torn.torn, torn.times = {int(new.row[0])}, -1
    assert not plain.writer.run_pass(1)
    found = plain.read(plain.directory.path)[0]
    assert len(found) == CAPACITY - 1
    torn.times = 0
    plain.run_pass()
    assert plain.read(plain.directory.path)[0] == plain.now()[0]


# --- tasks ------------------------------------------------------------------------------------------------------


def test_every_durable_write_that_was_acknowledged_is_there_after_a_power_cut(
    tmp_path: Path, disk: RecordingDisk
) -> None:
    path, image_path = tmp_path / "journal", tmp_path / "image"
    image_path.mkdir()
    acknowledged: set[tuple[str, int]] = set()  # what was done, and of which prompt
    given = {"tasks": TASKS, "capacity": CAPACITY, "span_bytes": 1 << 15, "reserve": False}
    with gt.Store.create(TASK_FIELDS, journal=path, journal_sync_s=1e6, **given) as store:
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
                    _check_restored(image_path, given)

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


def _check_restored(path: Path, given: dict[str, Any]) -> None:
    with gt.Store.create(TASK_FIELDS, **given) as store:
        fill(store.native, JournalDirectory(path), repair=False)
        assert store.audit() == []


@pytest.mark.parametrize("what", ["rewritten", "dropped", "inserted"])
def test_a_row_that_changes_while_it_is_copied_comes_with_the_next_look(tasked: Tasked, what: str) -> None:
    tasked.insert(6)
    tasked.work("answer", 6)
    tasked.work("reward", 3)
    finished = tasked.store.keys()
    turns = 0

    def act() -> None:
        nonlocal turns
        turns += 1
        if turns > 2:
            return
        if what == "rewritten":
            lengths = tasked.store.native.lengths_of_rows(finished.row, finished.generation)[0][:, 1]
            tasked.store.put(finished, "reward", {"reward": [np.full(n, turns, np.float32) for n in lengths]})
        elif what == "dropped":
            assert tasked.store.claim("reward", 1).drop() == 0
        else:
            tasked.insert(1)
        tasked.note()

    tasked.native.before_copy = act
    tasked.run_pass()
    found, contents = pieces_in(tasked.directory.path)
    if what != "inserted":
        assert turns > 1
        assert found == tasked.held[-1]
    else:  # later than what was asked for, and not before rows that are older
        assert contents.next_sequence == 7
        assert {row for row, _ in found} == set(range(6))
    tasked.native.before_copy = lambda: None
    tasked.run_pass()
    assert pieces_in(tasked.directory.path)[0] == tasked.held[-1]


def test_a_row_that_cannot_be_copied_holds_back_those_that_were_inserted_after_it(tasked: Tasked) -> None:
    tasked.insert(2)
    tasked.run_pass()
    keys = tasked.insert(4)

    class Torn(Racing):
        def copy_parts(self, parts: Any) -> Any:
            data, offsets, ok = super().copy_parts(parts)
            rows = parts.reshape(-1).view(PART)["row"]
            return data, offsets, ok & (rows != keys.row[1])

    native: Any = Torn(tasked.store.native)
    writer, tasked.writer._native = tasked.writer, native
    assert not writer.run_pass(1)
    found, contents = pieces_in(tasked.directory.path)
    assert {row for row, _ in found} == {0, 1, int(keys.row[0])}
    assert contents.next_sequence == 4
    writer._native = tasked.native
    tasked.run_pass()
    assert pieces_in(tasked.directory.path)[0] == tasked.held[-1]
