"""The priority of new rows and steps, with new_priority="max": the largest that was given, whoever writes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import patience
from replay_calls import replay_of
from scipy import stats

import geartrain as gt
from geartrain.errors import ArgumentError, CheckpointError, JournalError, SchemaError
from geartrain.store.checkpoint_format import json_checksum, write_json

FIELDS = gt.recorded_fields({"obs": gt.Field((), "float32"), "action": gt.Field((), "int32")})
LENGTH = 8
# Of header and control, native/segment/segment.h.
REQUIRED_FEATURES, LARGEST = 24, 6400

Per = pytest.mark.parametrize("per", ["row", "step"])
Write = Callable[[gt.Store], gt.Keys]


def make_store(*name: Any, per: Any = "row", new_priority: Any = "max", capacity: int = 64, **options: Any) -> gt.Store:
    sizes: dict[str, Any] = {"max_length": LENGTH, "capacity": capacity, **options}
    return gt.Store.create(*name, FIELDS, priority_per=per, new_priority=new_priority, **sizes)


def blocks(n: int) -> dict[str, Any]:
    return {name: np.zeros((n, *field.block_shape(LENGTH)), field.numpy_dtype) for name, field in FIELDS.items()}


def steps_of(store: gt.Store, keys: gt.Keys) -> gt.Keys:
    """What of these rows has priorities: they themselves, or all of their steps but the one that none begins at."""
    if not store.per_step:
        return keys
    lengths = store.status(keys)["length"]
    row = np.repeat(np.arange(len(keys)), lengths)
    return keys[row].of_steps(np.concatenate([np.arange(length) for length in lengths]))


def priorities(store: gt.Store, keys: gt.Keys) -> set[float]:
    return set(store.status(steps_of(store, keys))["priority"].tolist())


def learn(store: gt.Store, largest: float) -> None:
    """What a learner does: every row's priority is its TD error, `largest` at most."""
    keys = steps_of(store, store.keys())
    errors = largest * np.linspace(1.0, 0.1, len(keys))
    assert store.update_priorities(keys, errors) == 0


def fixed(priority: float) -> float:
    return float(np.rint(priority * 2**16) / 2**16)


def _one_row(store: gt.Store, **options: Any) -> gt.Keys:
    row = store.row(zeros=tuple(FIELDS), **options)
    row.length = 3
    return row.commit()


def _rows(store: gt.Store) -> gt.Keys:
    rows = store.rows(2, zeros=tuple(FIELDS))
    rows.lengths = 3
    return rows.commit()


def _open_row(store: gt.Store) -> gt.Keys:
    row = store.row(zeros=tuple(FIELDS))
    row.publish(length=2)
    row.extend(4)
    return row.commit()


def _recorder(store: gt.Store, **options: Any) -> gt.Keys:
    with store.recorder(1, autoreset="disabled", **options) as recorder:
        recorder.reset(np.zeros(1, np.float32))
        for step in range(1, 4):
            ends = np.array([step == 3])
            recorder.step(np.zeros(1, np.float32), action=[0], terminated=ends, truncated=~ends & False)
    return store.keys()[-1:]


WRITERS: dict[str, Write] = {
    "insert": lambda store: store.insert(blocks(2)),
    "insert with lengths": lambda store: store.insert(blocks(2), lengths=[3, 4], versions=[1, 2]),
    "row": _one_row,
    "rows": _rows,
    "open row": _open_row,
    "recorder": _recorder,
    "recorder that publishes": lambda store: _recorder(store, publish_every=1),
}


# --- what new rows get --------------------------------------------------------------------------------------------


@Per
@pytest.mark.parametrize("writer", WRITERS)
def test_what_any_writer_stores_has_the_largest_priority_that_was_given(per: Any, writer: str) -> None:
    with make_store(per=per) as store:
        first = WRITERS[writer](store)
        assert priorities(store, first) == {1.0} and store.new_priority == 1.0
        learn(store, 0.002)
        assert store.new_priority == fixed(0.002)
        assert priorities(store, WRITERS[writer](store)) == {fixed(0.002)}
        learn(store, 0.0005)  # the largest stays, as in the literature
        assert priorities(store, WRITERS[writer](store)) == {fixed(0.002)}
        assert store.audit() == []


@Per
def test_a_priority_that_is_given_wins_and_counts(per: Any) -> None:
    with make_store(per=per) as store:
        keys = store.insert(blocks(2), priorities=[0.25, 0.5])
        assert priorities(store, keys) == {0.25, 0.5} and store.new_priority == 0.5
        assert priorities(store, _one_row(store, priority=3.0)) == {3.0}
        assert priorities(store, _recorder(store, priority=0.125)) == {0.125}
        assert priorities(store, _one_row(store)) == {3.0}
        assert priorities(store, _one_row(store, priority=0.0)) == {0.0}
        assert store.new_priority == 3.0


@Per
def test_without_it_new_rows_have_priority_1(per: Any) -> None:
    with make_store(per=per, new_priority="one") as store:
        _one_row(store, priority=5.0)
        assert priorities(store, _one_row(store)) == {1.0} and store.new_priority == 1.0
        with pytest.raises(SchemaError, match="create it with new_priority='max'"):
            store.reset_max_priority()
    with pytest.raises(ArgumentError, match="new_priority"):
        make_store(new_priority=2.0)


@Per
def test_the_priority_of_a_stale_key_does_not_count(per: Any) -> None:
    with make_store(per=per) as store:
        gone, kept = _one_row(store), _one_row(store)
        gone, kept = steps_of(store, gone), steps_of(store, kept)
        store.delete(gone[:1])
        assert store.update_priorities(gone, np.full(len(gone), 9.0)) == len(gone)
        assert store.new_priority == 1.0
        store.update_priorities(kept, np.full(len(kept), 0.5))
        assert store.new_priority == 0.5


@Per
@pytest.mark.parametrize("options", [{}, {"max_times_sampled": 9}, {"remover": "lowest_priority"}])
def test_raised_and_reset_it_follows_the_rows(per: Any, options: dict[str, Any]) -> None:
    if per == "step" and "remover" in options:
        pytest.skip("rows have no priorities there")
    with make_store(per=per, **options) as store:
        keys = store.insert(blocks(3))
        every = steps_of(store, keys)
        store.update_priorities(every, np.full(len(every), 0.25))
        store.update_priorities(every[:1], [4.0])
        store.raise_priorities(0.5)
        assert store.new_priority == 2.0 and priorities(store, keys) == {2.0, 0.5}
        store.raise_priorities(2.0)
        assert store.new_priority == 4.0
        store.update_priorities(every[:1], [0.5])
        assert store.new_priority == 4.0
        store.reset_max_priority()
        assert store.new_priority == 0.5
        store.delete(keys)
        store.reset_max_priority()  # of a store without rows: as of a new one
        assert store.new_priority == 1.0
        assert store.audit() == []


def test_a_reset_never_raises_it() -> None:
    with make_store() as store:
        keys = store.insert(blocks(2))  # priority 1, which nobody gave
        store.update_priorities(keys[:1], [0.125])
        store.reset_max_priority()
        assert store.new_priority == 0.125


def test_every_process_and_handle_writes_with_the_segments_own(name: str) -> None:
    with make_store(name) as store, gt.Store.open(name) as other:
        learn_from = other.insert(blocks(2))
        store.update_priorities(learn_from, [0.5, 2.5])
        assert priorities(store, _one_row(other)) == {2.5}
        assert other.options["new_priority"] == "max"


# --- draws ----------------------------------------------------------------------------------------------------------


@Per
@pytest.mark.parametrize("new_priority", ["one", "max"])
def test_after_small_errors_one_new_row_is_drawn_as_often_as_the_worst_known_one(per: Any, new_priority: Any) -> None:
    """TD errors of about 1e-3, and one row that is new: by "one" it would be nearly all of a batch."""
    capacity = 40
    with make_store(per=per, new_priority=new_priority, capacity=capacity) as store:
        store.insert(blocks(capacity - 1), lengths=np.full(capacity - 1, 2))
        learn(store, 0.002)
        new = store.insert(blocks(1), lengths=[2])
        stored = store.status(steps_of(store, store.keys()))["priority"]
        window = {"window": 1} if per == "step" else {"fields": ["obs"]}
        counts = np.zeros(capacity)
        with replay_of(store, gt.selection.Prioritized(seed=3), 256, prefetch=0, output="numpy", **window) as replay:
            for _ in range(80):
                counts += np.bincount(replay.sample().keys.row, minlength=capacity)
        share = counts[new.row[0]] / counts.sum()
        if new_priority == "one":
            assert share > 0.9
            return
        each = stored if per == "row" else stored.reshape(capacity, 2).sum(1)
        expected = each / each.sum()
        assert share < 3 / capacity
        assert stats.chisquare(counts[store.keys().row], expected * counts.sum()).pvalue > 1e-4


# --- kept -----------------------------------------------------------------------------------------------------------


def test_the_segment_says_so_in_these_bytes(name: str) -> None:
    with make_store(name, persist=True) as store:
        store.update_priorities(store.insert(blocks(2)), [0.5, 3.0])
        head = store.path.read_bytes()[:8192]
        store.unlink()
    assert struct.unpack_from("<Q", head, REQUIRED_FEATURES) == (2 | 4,)
    assert struct.unpack_from("<I", head, LARGEST) == (3 << 16,)
    with make_store(name, new_priority="one", persist=True) as store:
        store.update_priorities(store.insert(blocks(2)), [0.5, 3.0])
        head = store.path.read_bytes()[:8192]
        store.unlink()
    assert struct.unpack_from("<Q", head, REQUIRED_FEATURES) == (2,)
    assert not any(head[LARGEST:6656])


@Per
def test_a_checkpoint_keeps_it(per: Any, tmp_path: Path) -> None:
    with make_store(per=per) as store:
        store.insert(blocks(3))
        learn(store, 0.75)
        learn(store, 0.5)
        store.save(tmp_path / "saved")
    with gt.Store.load(tmp_path / "saved") as again:
        assert again.options["new_priority"] == "max" and again.new_priority == 0.75
        assert priorities(again, _one_row(again)) == {0.75}
        assert again.audit() == []
        again.save(tmp_path / "saved")
    manifest = (tmp_path / "saved" / "manifest.json").read_text()
    assert f'"max_priority": {3 << 14}' in manifest
    with make_store(per=per, new_priority="one") as store:
        store.insert(blocks(1), priorities=[3.0])
        store.save(tmp_path / "one")
    with gt.Store.load(tmp_path / "one") as again:
        assert again.options["new_priority"] == "one" and again.new_priority == 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_priority": 2**32}, "max_priority"),
        ({"options": {"priority_per": "step"}}, "priorities of steps"),
        ({"options": {"new_priority": "two"}}, "new_priority"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    from geartrain.core.json_values import parse_json

    with make_store() as store:
        store.insert(blocks(1))
        store.save(tmp_path / "saved")
    path = tmp_path / "saved" / "manifest.json"
    manifest = parse_json(path.read_bytes())
    manifest.pop("checksum")
    manifest |= {**change, "options": manifest["options"] | change.get("options", {})}
    assert json_checksum(manifest)
    write_json(path, manifest)
    with pytest.raises(CheckpointError, match=words):
        gt.Store.load(tmp_path / "saved")


@Per
def test_a_journal_keeps_it_through_resets_and_new_segments(per: Any, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with make_store(per=per, journal=journal) as store:
        store.insert(blocks(3))
        learn(store, 0.75)
        learn(store, 0.5)
        store.native.request_journal_priorities()
        store.sync_journal(patience(10))
    with make_store(per=per, journal=journal) as store:
        assert store.new_priority == 0.75 and store.audit() == []
        assert priorities(store, _one_row(store, priority=2.0)) == {2.0}
        store.sync_journal(patience(10))
    with make_store(per=per, journal=journal) as store:
        assert store.new_priority == 2.0 and store.audit() == []
        learn(store, 0.125)
        store.reset_max_priority()
    with make_store(per=per, journal=journal) as store:
        assert store.new_priority == 0.125
    with pytest.raises(JournalError, match="new_priority='max', but 'one' was given"):
        make_store(per=per, new_priority="one", journal=journal)


def test_a_journal_that_begins_with_a_checkpoint_has_its(tmp_path: Path, name: str) -> None:
    with make_store() as store:
        store.update_priorities(store.insert(blocks(1)), [0.25])
        store.save(tmp_path / "saved")
    for _ in range(2):
        with gt.Store.load(tmp_path / "saved", name, journal=tmp_path / "journal") as store:
            assert store.new_priority == 0.25
