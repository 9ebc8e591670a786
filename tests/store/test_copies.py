"""Handles under copy and pickle: a store joins again, and what is there once says so."""

from __future__ import annotations

import copy
import gc
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.errors import ArgumentError, ReadOnlyStoreError, StoreClosedError, StoreMissingError
from geartrain.store.checkpoint_reader import Checkpoint
from geartrain.store.recorder import recorded_fields


def _saved(store: gt.Store) -> Checkpoint:
    with tempfile.TemporaryDirectory() as folder:
        store.save(f"{folder}/checkpoint")
        return Checkpoint(f"{folder}/checkpoint")


FIELDS = recorded_fields({"obs": gt.Field((), "float32")})
MAKERS: dict[str, Callable[[gt.Store], Any]] = {
    "row": lambda store: store.row(),
    "rows": lambda store: store.rows(2),
    "recorder": lambda store: store.recorder(2),
    "limiter": lambda store: store.limiter,
    "checkpoint": _saved,
    "replay": lambda store: gt.Replay(store, gt.selection.Uniform(), 2, prefetch=0, output="numpy"),
}
COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}
SAME = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda store: pickle.loads(pickle.dumps(store))}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("what", MAKERS)
def test_what_is_there_once_can_be_neither_copied_nor_pickled(what, how, name):
    with gt.Store.create(name, FIELDS, max_length=4, capacity=8) as store:
        one = MAKERS[what](store)
        writing = store.stats()["writing"]
        with pytest.raises(ArgumentError, match=f"{type(one).__name__} cannot be copied or pickled"):
            COPIES[how](one)
        gc.collect()
        assert store.stats()["writing"] == writing  # a copy that is dropped gave the blocks of the original back
        if what in ("row", "rows"):
            one.abandon()


@pytest.mark.parametrize("how", SAME)
def test_a_copy_of_a_store_is_a_handle_of_its_own(how, name):
    with gt.Store.create(name, FIELDS, max_length=4, capacity=8) as store:
        with SAME[how](store) as other:
            assert other.native is not store.native
            assert other.id == store.id
        assert not store.closed
        assert store.native.live_clients() == 1


def test_a_pickle_does_not_lead_to_another_store_of_the_same_name(name):
    store = gt.Store.create(name, FIELDS, max_length=4, capacity=8)
    pickled = pickle.dumps(store)
    store.close()
    with gt.Store.create(name, FIELDS, max_length=4, capacity=4) as other:
        with pytest.raises(StoreMissingError, match="another one has its name"):
            pickle.loads(pickled)
        assert other.native.live_clients() == 1
        assert np.size(other.keys().row) == 0


@pytest.mark.parametrize("how", SAME)
@pytest.mark.parametrize("kind", ["named", "anonymous", "dead"])
def test_a_copy_of_a_read_only_handle_is_read_only(how, kind, name):
    store = gt.Store.create(None if kind == "anonymous" else name, FIELDS, max_length=4, capacity=8)
    if kind == "dead":
        store.close(keep=True)
    with gt.Store.open(store.name, mode="r", adopt=True) as looked, SAME[how](looked) as other:
        with pytest.raises(ReadOnlyStoreError, match="mode='r'"):
            other.row()
        assert not other.column("obs").flags.writeable
        assert other.native.live_clients() == (kind != "dead")  # it joined nothing
    gt.Store.open(store.name, mode="r", adopt=True).unlink()
    store.close()


@pytest.mark.parametrize("how", COPIES)
def test_a_closed_handle_has_no_copies(how, name):
    with gt.Store.create(name, FIELDS, max_length=4, capacity=8):
        closed = gt.Store.open(name)
        closed.close()
        with pytest.raises(StoreClosedError, match="was closed"):
            COPIES[how](closed)
