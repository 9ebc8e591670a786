"""Fetches of one kind have a native fetcher that is made once: the same rows, errors and lifetimes as before."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
from crossed import crossed

import geartrain as gt
from geartrain.errors import ArgumentError, StaleKeyError, StoreClosedError
from geartrain.replay.fetchers import MAX_KEPT, _Fetchers

FIELDS = {
    "obs": gt.Field((3,), "float32"),
    "half": gt.Field((2,), "bfloat16"),
    "wide": gt.Field((), "uint16"),
    "goal": gt.Field((2,), "int64", per_row=True),
}


@pytest.fixture
def store() -> Any:
    with gt.Store.create(FIELDS, max_length=5, capacity=20) as store:
        for n in range(20):
            with store.row(version=n) as row:
                row.length = length = 1 + n % 5
                row["obs"][:length] = n + np.arange(length)[:, None]
                row["half"][:length] = n
                row["wide"][:length] = 60_000 + n
                row["goal"][...] = n, -n
        yield store


def same(a: gt.Batch, b: gt.Batch) -> None:
    assert list(a) == list(b) and len(a) == len(b) and a.nbytes == b.nbytes
    for name in a:
        assert type(a[name]) is type(b[name]) and a[name].dtype == b[name].dtype and a[name].shape == b[name].shape
        assert a[name].tolist() == b[name].tolist(), name
    for name in ("mask", "start", "length", "version"):
        one, other = getattr(a, name), getattr(b, name)
        assert type(one) is type(other) and one.dtype == other.dtype and one.tolist() == other.tolist(), name
    assert a.keys == b.keys
    for each in (a, b):
        assert each.probability is each.importance_weights is each.step is each.draw is each.cu_seqlens is None


@pytest.mark.parametrize(("window", "pad", "output"), crossed([None, 1, 3, 7], ["left", "right"], ["numpy", "torch"]))
def test_rows_are_those_of_the_way_with_arguments_that_no_fetcher_takes(
    store: gt.Store, output: Any, window: int | None, pad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if output == "torch":
        pytest.importorskip("torch")
    keys = store.keys()[np.array([3, 0, 19, 3, 7])]
    options: dict[str, Any] = {"output": output, "window": window, "pad": pad}
    found = gt.fetch(store, keys, **options)
    assert type(found).__name__ == "FetchedBatch"
    with monkeypatch.context() as patched:
        patched.setattr("geartrain.replay.fetch._fetch_plainly", lambda *_: None)
        slow = gt.fetch(store, keys, **options)
    assert type(slow).__name__ == "Batch"
    same(found, slow)
    same(found, gt.fetch(store, keys, **options))  # by the fetcher of before
    some = gt.fetch(store, keys, fields=["goal", "obs"], **options)
    same(some, pickle.loads(pickle.dumps(some)))  # torch 2.13 pickles no tensors of uint16
    assert list(some) == ["goal", "obs"] and some["obs"].tolist() == found["obs"].tolist()


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": True},
        {"window": 1.0},
        {"threads": True},
        {"threads": 1.0},
        {"fields": [["obs"]]},
        {"fields": ["obs", "obs"]},
        {"fields": []},
        {"pad": ["left"]},
        {"output": np.array(["numpy"])},
    ],
    ids=str,
)
def test_what_only_equals_arguments_of_before_is_refused(store: gt.Store, wrong: dict[str, Any]) -> None:
    keys = store.keys()[:2]
    right: dict[str, Any] = {"window": 1, "threads": 1, "fields": ["obs"], "pad": "left", "output": "numpy"}
    for _ in range(2):
        assert len(gt.fetch(store, keys, **right)) == 2
        with pytest.raises(ArgumentError):
            gt.fetch(store, keys, **{**right, **wrong})


def test_fetchers_are_few_and_end_with_the_handle(store: gt.Store) -> None:
    keys = store.keys()[:2]
    for window in range(1, 3 * MAX_KEPT):
        gt.fetch(store, keys, window=window, output="numpy")
    assert 0 < len(store.kept[_Fetchers]) <= MAX_KEPT
    kept = store.kept[_Fetchers]
    store.close()
    assert not kept
    with pytest.raises(StoreClosedError):
        gt.fetch(store, keys, output="numpy")


def test_a_store_that_is_dropped_goes_without_a_collection_and_its_batches_stay() -> None:
    store = gt.Store.create(FIELDS, max_length=2, capacity=4)
    for _ in range(4):
        with store.row(zeros=FIELDS) as row:
            row.length, row["goal"][...] = 1, 1
    path, dropped = store.path, weakref.ref(store)
    batch = gt.fetch(store, store.keys(), output="numpy")
    gc.disable()
    try:
        del store, row
        assert dropped() is None and not path.exists()
    finally:
        gc.enable()
    assert batch["goal"].tolist() == [[1, 1]] * 4 and len(batch.keys) == 4


def test_stale_keys_are_told_and_dropped(store: gt.Store) -> None:
    keys = store.keys()
    store.delete(keys[3:5])
    with pytest.raises(StaleKeyError, match="2 of 20 keys"):
        gt.fetch(store, keys, output="numpy")
    assert len(gt.fetch(store, keys, output="numpy", on_stale="drop")) == 18
    assert len(gt.fetch(store, keys[:0], output="numpy")) == 0
