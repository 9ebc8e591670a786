"""Names of stores: taken once, joined, kept for the next run, adopted after a kill, peeked at, pickled."""

from __future__ import annotations

import os
import pickle
import re
import signal
import threading

import numpy as np
import pytest
from value_rows import TIMED, X, put, xs

import geartrain as gt
from geartrain.errors import (
    ArgumentError,
    IncompatibleStoreError,
    ReadOnlyStoreError,
    StaleKeyError,
    StaleStoreError,
    StoreClosedError,
    StoreExistsError,
    StoreMissingError,
)


def test_a_name_is_taken_once_and_the_error_says_by_whom(name):
    with gt.Store.create(name, X, capacity=3) as store:
        put(store, 1, 2)
        with pytest.raises(StoreExistsError, match=r"exists already .*2 rows.*create='replace'"):
            gt.Store.create(name, X, capacity=3)
        with pytest.raises(StoreExistsError, match="in use by 1 process;"):
            gt.Store.open(name, X, create="replace", capacity=3)
        assert xs(store) == [1, 2]


def test_the_last_to_close_removes_the_segment_and_nobody_before(name, names):
    first = gt.Store.create(name, X, capacity=3)
    second = gt.Store.open(name)
    assert second.native.live_clients() == 2
    put(first, 1)
    held = second.row()
    first.close()
    first.close()  # harmless
    assert names.path(name).exists()
    assert xs(second) == [1]
    second.close()
    assert not names.path(name).exists()
    held.abandon()  # harmless
    with pytest.raises(StoreMissingError, match=name):
        gt.Store.open(name)


def test_two_handles_of_one_process_see_each_other_and_hold_rows_of_their_own(name):
    with gt.Store.create(name, X, capacity=3) as one, gt.Store.open(name) as two:
        key = put(one, 1)
        assert xs(two) == [1]
        two.update_priorities(key, 5)
        assert one.status(key)["priority"].tolist() == [5]
        row = one.native.allocate_one()
        with pytest.raises(StaleKeyError, match="not being written by this process"):
            two.native.commit_one(row, 1, 1.0, 0)
        one.native.abandon_one(row)


def test_a_persistent_store_waits_for_the_next_run_in_good_order(tmp_path):
    path = tmp_path / "store"
    with gt.Store.create(path, X, capacity=3) as store:
        put(store, 4, 5)
        store.row()  # and forgotten: the close gives it back
    with gt.Store.open(path) as store:
        assert xs(store) == [4, 5]
        assert store.audit() == []
        assert store.stats()["free"] == 1
    with pytest.raises(IncompatibleStoreError, match="no field 'y'"):
        gt.Store.open(path, {"y": gt.Field((), "int64", per_row=True)})
    with gt.Store.open(path, X) as store:
        assert store.unlink()
        assert not store.unlink()
    assert not path.exists()


def test_a_closed_store_refuses_everything_and_views_of_it_stay_readable(name):
    store = gt.Store.create(name, X, capacity=3)
    keys = put(store, 7)
    column = store.column("x")
    batch = gt.fetch(store, keys, output="numpy")
    replay = gt.Replay(store, gt.selection.Uniform(), 1, prefetch=0, output="numpy")
    store.close()
    for refused in (
        store.row,
        store.keys,
        store.reap,
        store.audit,
        lambda: put(store, 1),
        lambda: store.rows(1),
        lambda: store.update_priorities(keys, 1),
        lambda: store.delete(keys),
        lambda: gt.fetch(store, keys, output="numpy"),
        replay.sample,
    ):
        with pytest.raises(StoreClosedError):
            refused()
    assert column[keys.row[0]] == 7
    assert batch["x"].tolist() == [7]
    assert "closed" in repr(store)


def test_a_peek_reads_everything_and_changes_nothing(name):
    with gt.Store.create(name, X, capacity=3) as store:
        put(store, 1, 2)
        before = store.path.read_bytes()
        look = gt.Store.open(name, mode="r", adopt=True)
        assert (len(look), xs(look), look.native.live_clients()) == (2, [1, 2], 1)
        assert look.status()["sequence"].tolist() == [1, 2]
        for refused in (
            look.row,
            look.audit,
            look.reap,
            lambda: put(look, 1),
            lambda: look.update_priorities(look.keys(), 1),
            lambda: look.delete(look.keys()),
        ):
            with pytest.raises(ReadOnlyStoreError, match="mode='r', which changes nothing"):
                refused()
        with pytest.raises(ValueError, match="read-only"):
            look.column("x")[0] = 5
        look.close()
        assert store.path.read_bytes() == before


def test_a_peek_shows_no_row_that_cannot_be_selected(name):
    with gt.Store.create(name, X, capacity=4, max_times_sampled=1) as store:
        keys = put(store, 1, 2, 3)
        store.native.count_samples(keys[:1].row, keys[:1].generation)  # exhausted, and still being read
        store.row()
        assert xs(gt.Store.open(name, mode="r", adopt=True)) == [2, 3]
        assert xs(store) == [2, 3]


def _killed_run(name: str, fork, fields=X, **options) -> None:
    """Leaves the segment of a process that was killed with two rows committed and one half-written."""
    read, write = os.pipe()

    def run() -> None:
        store = gt.Store.create(name, fields, capacity=4, **options)
        put(store, 10, 20)
        store.native.allocate_one()
        os.write(write, b"x")
        signal.pause()

    child = fork(run)
    assert os.read(read, 1) == b"x"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_killed_runs_segment_is_never_joined_unasked(names, fork):
    name = names(may_stay=True)
    _killed_run(name, fork)
    for joining in (lambda: gt.Store.open(name), lambda: gt.Store.open(name, X, create="missing", capacity=4)):
        with pytest.raises(StaleStoreError, match=r"2 rows of a run.*adopt=True.*create='replace'"):
            joining()
    with pytest.raises(StoreExistsError, match="2 rows"):
        gt.Store.create(name, X, capacity=4)
    look = gt.Store.open(name, mode="r", adopt=True)
    assert (xs(look), look.native.live_clients()) == ([10, 20], 0)
    assert names.path(name).exists()


def test_an_adopted_store_has_the_committed_rows_and_all_its_blocks(names, fork):
    name = names()
    _killed_run(name, fork)
    with gt.Store.open(name, X, adopt=True) as store:
        assert xs(store) == [10, 20]
        assert store.stats()["free"] == 2
        assert store.audit() == []
        with gt.Store.open(name) as second:  # alive again: no adoption needed
            put(second, 30)
        assert xs(store) == [10, 20, 30]
    assert not names.path(name).exists()


def test_adopting_with_the_wrong_fields_is_refused_and_destroys_nothing(names, fork):
    name = names()
    _killed_run(name, fork)
    with pytest.raises(IncompatibleStoreError, match=r"field 'x' is .*int64.* asked for .*float32"):
        gt.Store.open(name, {"x": gt.Field((), "float32", per_row=True)}, adopt=True)
    with gt.Store.open(name, X, adopt=True) as store:
        assert xs(store) == [10, 20]


def test_replacing_a_killed_runs_segment_starts_afresh(names, fork):
    name = names()
    _killed_run(name, fork)
    with gt.Store.open(name, X, create="replace", capacity=2) as store:
        assert len(store) == 0
        assert store.capacity == 2


def test_a_closed_store_that_is_kept_can_be_adopted(name):
    store = gt.Store.create(name, X, capacity=4)
    put(store, 1)
    store.close(keep=True)
    with pytest.raises(StaleStoreError):
        gt.Store.open(name)
    with gt.Store.open(name, adopt=True) as store:
        assert xs(store) == [1]


def test_a_schema_that_differs_is_named_and_the_store_left_as_it_was(name):
    with gt.Store.create(name, TIMED, max_length=6, capacity=1) as store:
        reordered = dict(reversed(TIMED.items()))
        for fields, message in (
            ({**TIMED, "more": gt.Field((), "bool", per_row=True)}, "no field 'more'"),
            ({"obs": TIMED["obs"], "act": TIMED["act"]}, "'task' that was not asked for"),
            ({**TIMED, "task": gt.Field((), "int32", per_row=True)}, "'task' is .*int64"),
        ):
            with pytest.raises(IncompatibleStoreError, match=message):
                gt.Store.open(name, fields)
        assert store.native.live_clients() == 1
        gt.Store.open(name, TIMED).close()
        gt.Store.open(name, reordered).close()  # fields are found by name


def test_options_of_open_only_count_when_it_may_create(name):
    with pytest.raises(ArgumentError, match="leave out capacity=3"):
        gt.Store.open(name, X, capacity=3)
    with pytest.raises(ArgumentError, match="needs the fields"):
        gt.Store.open(name, create="missing", capacity=3)
    with pytest.raises(ArgumentError, match="found 'always'"):
        gt.Store.open(name, X, create="always")


def test_a_pickled_handle_opens_the_same_store(name):
    with gt.Store.create(name, X, capacity=3) as store:
        put(store, 1)
        with pickle.loads(pickle.dumps(store)) as other:
            put(other, 2)
        assert xs(store) == [1, 2]


def test_threads_may_share_a_handle(name):
    with gt.Store.create(name, X, capacity=64) as store:

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            for value in range(300):
                with store.row(priority=random.random()) as row:
                    row["x"], row.length = seed * 1000 + value, 1
                store.update_priorities(row.key, random.random())
                if value % 5 == 0:
                    store.delete(row.key)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.stats()["inserted"] == 1200
        assert len(set(xs(store))) == len(store) == 64 or store.stats()["deleted"] > 0
        assert store.audit() == []


@pytest.mark.parametrize("there", [False, True])
def test_a_name_that_looks_like_a_file_is_told_from_one(there, tmp_path, monkeypatch, caplog, name):
    monkeypatch.chdir(tmp_path)
    if there:
        (tmp_path / name).touch()
    else:  # an ending of files
        name += ".gt"
    told = rf"the file in this directory is '\./{name}'"
    for mode in ("r", "rw"):
        with pytest.raises(StoreMissingError, match=told):
            gt.Store.open(name, mode=mode)
    assert not caplog.records
    with gt.Store.create(name, X, capacity=3):
        assert [re.search(told, record.getMessage()) is not None for record in caplog.records] == [True]
        with pytest.raises(StoreExistsError, match=told):
            gt.Store.create(name, X, capacity=3)
    with pytest.raises(StoreMissingError) as caught:
        gt.Store.open(f"./{name}x")
    assert "this directory" not in str(caught.value)


def test_a_file_in_a_directory_that_is_missing_is_told_from_a_name(tmp_path):
    told = pytest.raises(StoreMissingError, match=r"no directory '.*/runs': make it, or take a name without a slash")
    with told:
        gt.Store.create(tmp_path / "runs" / "a", X, capacity=1)
    with told:
        gt.Store.open(tmp_path / "runs" / "a")


def test_a_name_that_looks_like_none_is_taken_without_a_word(name, caplog):
    with gt.Store.create(name, X, capacity=3):
        assert not caplog.records
