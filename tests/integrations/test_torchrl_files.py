"""A torchrl storage's store as a file, whose it is when others make it, and checkpoints with hooks of torchrl's."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.checkpointers import TensorStorageCheckpointer
from torchrl_buffers import in_child, items, make

from geartrain.errors import ArgumentError
from geartrain.integrations.torchrl import PrioritizedSampler, RoundRobinWriter, SharedStorage, UniformSampler
from geartrain.store.store import Store


@pytest.fixture
def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of segments of the test's own, so that no other test's storages remove what it leaves."""
    directory = tmp_path / "segments"
    directory.mkdir()
    monkeypatch.setenv("GEARTRAIN_DIR", str(directory))
    return directory


# --- a folder for the store's file --------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_stock_torchrl_code")
def test_items_in_a_folder_stay_and_are_taken_up_again_where_that_is_asked_for(tmp_path):
    folder = tmp_path / "scratch"
    first = make(100, scratch_dir=folder)
    assert not first.storage.auto_cleanup
    first.extend(items(0, 120))
    first.storage.close()
    assert len(list(folder.iterdir())) == 1
    other = make(100, scratch_dir=folder)
    assert len(other) == 0
    with pytest.raises(RuntimeError, match="existsok"):
        other.extend(items(0, 1))
    with pytest.raises(RuntimeError, match="existsok"):
        pickle.dumps(other.storage)
    again = make(100, scratch_dir=folder, existsok=True)
    assert len(again) == 100
    assert again[:]["next", "reward"].tolist() == [*range(100, 120), *range(20, 100)]
    assert again.extend(items(120, 2)).tolist() == [20, 21]
    twin = pickle.loads(pickle.dumps(again.storage))
    assert len(twin) == 100
    twin.close()
    again.storage.close()


@pytest.mark.usefixtures("no_stock_torchrl_code")
def test_cleanup_removes_the_file_and_the_folder_unless_there_is_more_in_it(tmp_path):
    for more in (False, True):
        folder = tmp_path / f"scratch-{more}"
        buffer = make(100, scratch_dir=folder)
        buffer.extend(items(0, 5))
        if more:
            (folder / "notes.txt").write_text("mine")
        assert buffer.storage.cleanup()
        assert folder.exists() == more
        assert not buffer.storage.cleanup()
        assert buffer.storage.closed
    assert [each.name for each in folder.iterdir()] == ["notes.txt"]
    never_used = SharedStorage(100, scratch_dir=folder)
    assert not never_used.cleanup()
    nameless = make(100)
    nameless.extend(items(0, 5))
    assert not nameless.storage.cleanup()


@pytest.mark.usefixtures("no_stock_torchrl_code")
def test_auto_cleanup_says_whether_the_store_goes_with_its_last_process(tmp_path, segments):
    going = make(100, scratch_dir=tmp_path / "scratch", auto_cleanup=True)
    staying = make(100, auto_cleanup=False)
    for buffer in (going, staying):
        buffer.extend(items(0, 5))
        buffer.storage.close()
    assert not list((tmp_path / "scratch").iterdir())
    assert [each.name for each in segments.iterdir()] == [f"geartrain.{staying.storage.name}"]
    same = make(100, store=staying.storage.name)
    assert same[:]["next", "reward"].tolist() == list(range(5))
    assert same.storage.cleanup()
    assert not list(segments.iterdir())


def test_a_folder_and_a_name_contradict_each_other(tmp_path):
    with pytest.raises(ArgumentError, match="scratch_dir"):
        SharedStorage(10, store="run-7", scratch_dir=tmp_path)
    for option in ("existsok", "auto_cleanup"):
        with pytest.raises(ArgumentError, match=option):
            SharedStorage(10, scratch_dir=tmp_path, **{option: "yes"})


# --- a storage that was pickled before its first item -------------------------------------------------------------


@pytest.mark.usefixtures("no_stock_torchrl_code")
@pytest.mark.parametrize("orderly", [True, False])
def test_what_a_process_that_has_ended_has_made_is_its_owners(segments, orderly):
    buffer = make(100)
    pickled = pickle.dumps(buffer.storage)

    def child() -> None:
        storage = pickle.loads(pickled)
        mine = ReplayBuffer(storage=storage, sampler=UniformSampler(), writer=RoundRobinWriter())
        mine.extend(items(10 * len(storage), 10))
        if orderly:
            storage.close()

    assert in_child(child) == 0
    assert in_child(lambda: pickle.loads(pickled).close()) == 0  # the last one to leave, and not the owner
    assert buffer[:]["next", "reward"].tolist() == list(range(10))
    buffer.extend(items(10, 5))
    assert len(pickle.loads(pickled)) == 15
    buffer.storage.close()
    assert not list(segments.iterdir())


def test_an_owner_that_has_never_looked_leaves_nothing(segments):
    for how in ("closed", "dropped"):
        storage = SharedStorage(100)
        pickled = pickle.dumps(storage)

        def child(pickled: bytes = pickled) -> None:
            twin = pickle.loads(pickled)
            twin.set(torch.arange(5), items(0, 5))
            twin.close()

        assert in_child(child) == 0
        assert len(list(segments.iterdir())) == 2
        if how == "closed":
            storage.close()
        del storage
        assert not list(segments.iterdir())


def test_what_a_killed_owner_has_left_the_next_storage_removes(segments):
    def owner() -> None:
        storage = SharedStorage(100)
        twin = pickle.loads(pickle.dumps(storage))
        twin.set(torch.arange(5), items(0, 5))
        twin.close()
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(owner) == -signal.SIGKILL
    left = sorted(each.name for each in segments.iterdir())
    assert [name.endswith("-owner") for name in left] == [False, True]
    with Store.open(left[0].removeprefix("geartrain."), adopt=True) as used:
        pickle.dumps(SharedStorage(100))
        assert sorted(each.name for each in segments.iterdir()) == left  # a process uses it
        assert len(used)
    pickle.dumps(SharedStorage(100))
    assert not list(segments.iterdir())


def test_a_copy_whose_owner_has_gone_is_removed_with_its_last_process(segments):
    storage = SharedStorage(100)
    pickled = pickle.dumps(storage)
    storage.close()
    twin = pickle.loads(pickled)
    twin.set(torch.arange(5), items(0, 5))
    assert len(list(segments.iterdir())) == 1
    twin.close()
    assert not list(segments.iterdir())


# --- places behind the last item ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_stock_torchrl_code")
def test_what_is_set_behind_the_last_item_is_one_when_the_storage_is_that_long():
    buffer = make(20)
    buffer.storage.set(torch.arange(3, 6), items(3, 3), set_cursor=False)
    assert len(buffer) == 0
    buffer.storage.set(0, items(0, 1)[0])
    assert len(buffer) == 1
    for place, data in ((3, items(7, 1)[0]), (torch.tensor([0, 3]), items(7, 2))):
        with pytest.raises(IndexError, match="1 items"):
            buffer[place] = data
    buffer.storage.set(6, items(6, 1)[0])
    assert buffer[3:]["next", "reward"].tolist() == [3, 4, 5, 6]


# --- hooks and checkpointers --------------------------------------------------------------------------------------


class Shifted:
    """A hook that adds to the observations, and is told where the buffer stood."""

    shift = is_full = None

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, data: Any, path: Any = None, out: Any = None) -> Any:
        return data.clone().apply(lambda leaf: leaf + self.by if leaf.dtype == torch.float32 else leaf)


def test_save_and_load_hooks_are_called_and_torchrl_reads_what_they_save(tmp_path):
    buffer = make(10, PrioritizedSampler(alpha=1.0))
    buffer.extend(items(0, 13))
    buffer.dumps(tmp_path / "here")  # without hooks, in the same place
    hook = Shifted(100.0)
    buffer.register_save_hook(hook)
    buffer.dumps(tmp_path / "here")
    assert (hook.shift, hook.is_full) == (3, True)
    stock = LazyTensorStorage(10)
    stock.loads(tmp_path / "here" / "storage")
    assert torch.equal(stock[:]["obs"], buffer[:]["obs"] + 100)
    for filled in (False, True):
        loaded = make(10, PrioritizedSampler(alpha=1.0))
        if filled:
            loaded.extend(items(70, 10))
        loaded.register_load_hook(Shifted(-100.0))
        loaded.loads(tmp_path / "here")
        assert (loaded[:] == buffer[:]).all()
        assert loaded.extend(items(13, 1)).tolist() == [3]
    plain = make(10)
    plain.extend(items(0, 4))
    plain.dumps(tmp_path / "here")
    assert make_loaded(tmp_path / "here")[:]["next", "reward"].tolist() == [0, 1, 2, 3]
    plain.register_load_hook(Shifted(-100.0))
    with pytest.raises(ArgumentError, match="hooks"):
        plain.loads(tmp_path / "here")


def make_loaded(path: Path) -> ReplayBuffer:
    buffer = make(10)
    buffer.loads(path)
    return buffer


def test_a_checkpointer_of_the_buffers_own_saves_and_loads(tmp_path):
    def buffer() -> ReplayBuffer:
        checkpointer = TensorStorageCheckpointer()
        return ReplayBuffer(storage=SharedStorage(10), writer=RoundRobinWriter(), checkpointer=checkpointer)

    saved = buffer()
    saved.extend({"a": torch.arange(7), "b": [torch.arange(7.0)]})
    saved.dumps(tmp_path)
    assert (tmp_path / "storage" / "storage_metadata.json").exists()
    loaded = buffer()
    loaded.extend({"a": torch.zeros(2, dtype=torch.int64), "b": [torch.zeros(2)]})  # trees are read into others
    loaded.loads(tmp_path)
    assert loaded[:]["a"].tolist() == list(range(7))
    assert loaded[:]["b"][0].tolist() == list(range(7))
    with pytest.raises(RuntimeError, match="non-initialized"):
        buffer().loads(tmp_path)
