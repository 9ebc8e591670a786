"""Stores without a name: shared by pickling and forking, and gone with their last process."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import types
from collections.abc import Iterator

import numpy as np
import pytest

import geartrain as gt
import geartrain.store.anonymous as anonymous
from geartrain.errors import ArgumentError, StoreMissingError

FIELDS = {"x": gt.Field((2,), "float32"), "id": gt.Field((), "int64", per_row=True)}


@pytest.fixture
def store() -> Iterator[gt.Store]:
    with gt.Store.create(FIELDS, max_length=4, capacity_steps=32) as made:
        yield made
    assert not made.path.exists()


def put(store: gt.Store, number: int) -> None:
    with store.row() as row:
        row["x"] = number
        row["id"], row.length = number, store.max_length


def ids(store: gt.Store) -> list[int]:
    return sorted(store.column("id")[store.keys().row].tolist())


def put_by_pickle(store: gt.Store, number: int) -> None:
    put(store, number)
    store.close()


def test_stores_without_a_name_get_names_of_their_own(store):
    with gt.Store.create(FIELDS, max_length=4, capacity=1) as other:
        assert other.name != store.name
        assert store.path.exists() and store.capacity == 8
    assert not other.path.exists() and store.path.exists()


def test_a_store_without_a_name_is_joined_by_its_pickle_and_by_its_name(store):
    put(store, 1)
    with pickle.loads(pickle.dumps(store)) as joined, gt.Store.open(store.name) as opened:
        put(joined, 2)
        assert ids(store) == ids(opened) == [1, 2]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_write_into_a_store_without_a_name(store, method):
    child = multiprocessing.get_context(method).Process(target=put_by_pickle, args=(store, 7))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert ids(store) == [7]


def test_a_pickle_that_outlives_its_store_says_why_it_is_gone():
    with gt.Store.create(FIELDS, max_length=4, capacity=1) as made:
        late = pickle.dumps(made)
    with pytest.raises(StoreMissingError, match="created without a name, it was removed with its last process"):
        pickle.loads(late)


def test_what_killed_processes_left_without_a_name_goes_with_the_next_such_store(tmp_path, monkeypatch):
    monkeypatch.setenv("GEARTRAIN_DIR", str(tmp_path))  # where no other test's store without a name is the next one
    store = gt.Store.create(FIELDS, max_length=4, capacity=10)
    put(store, 1)
    code = (
        "import os, signal, geartrain as gt\n"
        "store = gt.Store.create({'x': gt.Field((), 'uint8', per_row=True)}, capacity=1)\n"
        "print(store.path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    left = done.stdout.strip()
    assert os.path.exists(left)  # nobody was there to remove it
    with gt.Store.create(FIELDS, max_length=4, capacity=1):
        assert not os.path.exists(left)
    assert store.path.exists() and ids(store) == [1], "that of a living process stays"
    store.close()


def test_named_stores_of_killed_processes_are_not_taken_for_nameless_ones(store_name):
    name = store_name()
    code = (
        "import os, signal, geartrain as gt\n"
        f"store = gt.Store.create({name!r}, {{'x': gt.Field((), 'uint8', per_row=True)}}, capacity=1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    anonymous.remove_dead()
    with gt.Store.open(name, adopt=True) as adopted:
        assert adopted.capacity == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gt.Store.create(FIELDS, max_length=4, capacity=1, persist=True), "leave out persist"),
        (lambda: gt.Store.create(FIELDS, FIELDS, max_length=4, capacity=1), "leave out fields"),  # type: ignore[call-overload]
        (lambda: gt.Store.create("name", max_length=4, capacity=1), "give the fields"),  # type: ignore[call-overload]
        (lambda: gt.Store.create("anonymous-1", FIELDS, max_length=4, capacity=1), "'anonymous-' are those of stores"),
        (lambda: gt.Store.open(FIELDS), "needs the name"),  # type: ignore[arg-type]
    ],
)
def test_what_needs_a_name_is_refused_without_one(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


def test_nobody_could_adopt_a_kept_store_without_a_name(store):
    with pytest.raises(ArgumentError, match="keep=True needs a name"):
        store.close(keep=True)
    assert not store.closed


def test_ray_wants_a_name(store, monkeypatch):
    ray = types.ModuleType("ray")
    ray.is_initialized = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(ArgumentError, match=r"Ray's workers.*Create it with a name"):
        pickle.dumps(store)


def test_a_replay_of_a_store_without_a_name(store):
    store.insert({"x": np.ones((6, 4, 2), np.float32), "id": np.arange(6)})
    with gt.Replay(store, gt.selection.Uniform(seed=0), 3, num_batches=2, output="numpy") as replay:
        assert [batch["x"].shape for batch in replay] == [(3, 4, 2), (3, 4, 2)]
