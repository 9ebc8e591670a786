"""Series of checkpoints, saved by a process that only peeks: whole, the last few, and `latest`, whatever is killed."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tagged
from segments import Fork, wait_for

import geartrain as gt
import geartrain.store.checkpoint_chunks as chunks_module
import geartrain.store.checkpoint_writer as checkpoint_writer_module
from geartrain.errors import CheckpointError
from geartrain.store.checkpoint_reader import Checkpoint
from geartrain.store.checkpoint_series import LATEST, holding, save_next, saved_in
from geartrain.store.checkpoint_writer import Saved


def save(name: str, path: Path, keep: int = 3) -> Saved:
    with gt.Store.open(name, mode="r", adopt=True) as store, holding(path):
        return save_next(store, path, keep)


def tags_in(path: Path, name: str) -> list[int]:
    with gt.Store.load(path, name) as store:
        batch = gt.fetch(store, store.keys(), output="numpy", threads=1)
        assert tagged.mixed(batch) == []
        assert store.audit() == []
        return batch["tag"].tolist()


def test_a_store_is_saved_through_a_look_at_it_as_by_its_owner(tmp_path: Path, names: object) -> None:
    name, other = names(), names()  # type: ignore[operator]
    with tagged.create(name) as store:
        keys = tagged.insert(store, range(20))  # the first four make room
        store.delete(keys[7:9])
        save(name, tmp_path / "series")
        store.save(tmp_path / "owner")
        with Checkpoint(tmp_path / "owner") as one, Checkpoint(tmp_path / "series" / LATEST) as two:
            assert np.array_equal(one.records()[: one.rows], two.records()[: two.rows])
            assert one.next_sequence == two.next_sequence and one.counters == two.counters
    assert tags_in(tmp_path / "series" / LATEST, other) == [*range(4, 7), *range(9, 20)]


def test_the_last_few_stay_and_only_what_is_new_is_written(tmp_path: Path, name: str) -> None:
    with tagged.create(name, capacity=64) as store:
        tagged.insert(store, range(40))
        seen, written = [], []
        for tag in range(40, 46):
            tagged.insert(store, [tag])
            saved = save(name, tmp_path / "series", keep=2)
            seen.append(saved.path)
            written.append(saved.bytes_written)
            assert (tmp_path / "series" / LATEST).resolve() == saved.path.resolve()
            assert saved.not_linked is None
        assert saved_in(tmp_path / "series") == seen[-2:]
        assert max(written[1:]) < written[0] / 4
        assert sorted(os.listdir(tmp_path / "series")) == [".lock", *(path.name for path in seen[-2:]), LATEST]
    for path, last in zip(seen[-2:], (44, 45), strict=True):
        assert tags_in(path, name)[-1] == last


def test_what_is_read_stays_readable_while_it_is_removed(tmp_path: Path, name: str) -> None:
    with tagged.create(name) as store:
        tagged.insert(store, range(5))
        save(name, tmp_path / "series", keep=1)
        with Checkpoint(tmp_path / "series" / LATEST) as oldest:
            tagged.insert(store, [5])
            save(name, tmp_path / "series", keep=1)
            assert len(saved_in(tmp_path / "series")) == 1
            records = oldest.records()
            assert sum(len(blocks) for field, _, blocks in oldest.blocks(records) if field == 0) == 5
        save(name, tmp_path / "series", keep=1)
        assert list((tmp_path / "series").glob(".*.saving")) == []


def test_rows_of_a_store_that_is_written_are_all_that_were_committed_before(tmp_path: Path, name: str) -> None:
    with tagged.create(name, capacity=1024) as store:
        stop = threading.Event()

        def write() -> None:
            for tag in range(1000):
                tagged.insert(store, [tag])
                if stop.is_set():
                    return

        thread = threading.Thread(target=write)
        thread.start()
        for number in range(3):
            before = len(store)
            saved = save(name, tmp_path / "series", keep=10)
            assert saved.rows >= before, number
        stop.set()
        thread.join()
    for path in saved_in(tmp_path / "series"):
        found = tags_in(path, name)
        assert found == list(range(len(found))), "a row is there without one before it"


@pytest.mark.parametrize(
    ("module", "step"),
    [(checkpoint_writer_module, "put_in_place"), (chunks_module, "write_json"), (chunks_module, "_write")],
)
def test_a_save_that_is_killed_leaves_the_series_as_it_was(
    tmp_path: Path, name: str, fork: Fork, module: ModuleType, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tagged.create(name) as store:
        tagged.insert(store, range(5))
        first = save(name, tmp_path / "series").path
        tagged.insert(store, [5])

        def killed() -> None:
            monkeypatch.setattr(module, step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            save(name, tmp_path / "series")

        assert wait_for(fork(killed)) == -signal.SIGKILL
        assert saved_in(tmp_path / "series") == [first]
        assert list((tmp_path / "series").glob(".*.saving"))
        save(name, tmp_path / "series")
        assert list((tmp_path / "series").glob(".*.saving")) == []
    assert tags_in(tmp_path / "series" / LATEST, name) == list(range(6))


def test_one_process_saves_to_a_series_and_nothing_else_is_there(tmp_path: Path, name: str) -> None:
    with tagged.create(name) as store:
        tagged.insert(store, [1])
        with (
            holding(tmp_path / "series"),
            pytest.raises(CheckpointError, match="another process is saving checkpoints"),
        ):
            save(name, tmp_path / "series")
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "model.pt").touch()
        with pytest.raises(CheckpointError, match=r"not of a checkpoint \(model.pt\)"):
            save(name, tmp_path / "mine")
        broken = save(name, tmp_path / "series").path
        (broken / "manifest.json").write_text("{}")
        saved = save(name, tmp_path / "series")
        assert saved.not_linked is not None and saved.path > broken


def test_a_clock_that_is_set_back_makes_no_earlier_checkpoint(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tagged.create(name) as store:
        tagged.insert(store, [1])
        first = save(name, tmp_path / "series").path
        monkeypatch.setattr("time.time_ns", lambda: 10**18)
        assert save(name, tmp_path / "series").path > first
