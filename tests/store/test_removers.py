"""Which row makes room: by samples, by a field's value, or by an order of one's own."""

import numpy as np
import pytest

import geartrain as gt
from geartrain.errors import ArgumentError, FieldError, SchemaError

FIELDS = {"id": gt.Field((), "int64", per_row=True), "score": gt.Field((), "float32", per_row=True)}


def made(name, remover, capacity=8, **options):
    return gt.Store.create(name, FIELDS, capacity=capacity, remover=remover, **options)


def insert(store, ids, scores=None):
    scores = np.zeros(len(ids)) if scores is None else scores
    return store.insert({"id": np.asarray(ids), "score": np.asarray(scores, np.float32)})


def ids_of(store):
    return sorted(store.column("id")[store.keys().row].tolist())


@pytest.mark.parametrize("remover, gone", [("lowest:score", [2, 4]), ("highest:score", [0, 4])])
def test_rows_go_by_the_value_of_a_field_and_nan_first(store_name, remover, gone):
    with made(store_name(), remover) as store:
        keys = insert(store, range(8), [9, 3, 1, 5, np.nan, 6, 7, 8])
        assert store.options["remover"] == remover
        insert(store, [8, 9], [5.5, 5.5])
        assert ids_of(store) == sorted(set(range(10)) - set(gone))
        # The value counts that the row has when room is needed.
        kept = keys[[6]]
        store.write(kept, {"score": np.asarray([-1 if remover == "lowest:score" else 99], np.float32)})
        insert(store, [10], [5.5])
        assert ids_of(store) == sorted(set(range(11)) - {*gone, 6})
        assert store.audit() == []


def sample(store, wanted):
    with gt.Replay(store, gt.selection.Prioritized(seed=0), 4, prefetch=0, output="numpy") as replay:
        store.update_priorities(store.keys(), np.isin(store.column("id")[store.keys().row], wanted).astype(float))
        return replay.sample()["id"]


def test_the_least_recently_sampled_row_goes_first(store_name):
    with made(store_name(), "least_recently_sampled") as store:
        insert(store, range(8))
        for wanted in (3, 0, 5, 1, 2):
            assert set(sample(store, [wanted]).tolist()) == {wanted}
        insert(store, [8, 9, 10])
        assert ids_of(store) == [0, 1, 2, 3, 5, 8, 9, 10]
        insert(store, [11])
        assert 3 not in ids_of(store)
        assert store.audit() == []


def test_the_most_sampled_row_goes_first(store_name):
    with made(store_name(), "most_sampled") as store:
        insert(store, range(8))
        for wanted in (3, 3, 0):
            sample(store, [wanted])
        insert(store, [8])
        insert(store, [9])
        insert(store, [10])
        assert ids_of(store) == [2, 4, 5, 6, 7, 8, 9, 10]


def test_a_large_store_evicts_in_batches_of_a_64th(store_name):
    with made(store_name(), "lowest:score", capacity=1280) as store:
        insert(store, range(1280), np.random.default_rng(0).permutation(1280))
        insert(store, [2000], [5000.0])
        assert len(store) == 1280 - 20 + 1
        assert store.column("score")[store.keys().row].min() == 20
        with made(store_name(), "lowest:score", capacity=1280, max_rows=640) as capped:
            insert(capped, range(1280), np.arange(1280))
            assert capped.column("score")[capped.keys().row].min() >= 620
            assert capped.audit() == []


def test_rows_are_evicted_in_any_order_a_caller_has(store_name):
    with made(store_name(), "fifo", capacity=9) as store:
        insert(store, range(8), [3, 1, 4, 1, 5, 9, 2, 6])
        row = store.row(zeros=store.fields)
        row["id"] = 100
        row.publish(length=1)
        gone = store.evict(3, by=lambda keys: -store.column("score")[keys.row])
        assert len(gone) == 3 and ids_of(store) == [0, 1, 2, 3, 6, 100]
        for n, by, error in (
            (0, lambda keys: np.zeros(len(keys)), ArgumentError),
            (1, lambda keys: np.full(len(keys), np.nan), SchemaError),
            (1, lambda keys: np.zeros(3), SchemaError),
            (1, lambda keys: None, SchemaError),
            (1, "score", ArgumentError),
        ):
            with pytest.raises(error):
                store.evict(n, by=by)
        assert len(store.evict(100, by=lambda keys: np.zeros(len(keys)))) == 5
        row.commit()


@pytest.mark.parametrize("remover", ["newest", "lowest:", "lowest:unknown", "biggest:score", "lowest:steps", None, 3])
def test_removers_that_are_none_are_refused(store_name, remover):
    fields = {**FIELDS, "steps": gt.Field((), "float32")}
    with pytest.raises((ArgumentError, FieldError)):
        gt.Store.create(store_name(), fields, max_length=3, capacity=4, remover=remover)


def test_a_checkpoint_keeps_the_remover(store_name, tmp_path):
    for remover in ("most_sampled", "highest:score", "least_recently_sampled"):
        with made(store_name(), remover) as store:
            insert(store, range(4), [1, 2, 3, 4])
            store.save(tmp_path / remover.replace(":", "-"))
        with gt.Store.load(tmp_path / remover.replace(":", "-"), store_name()) as loaded:
            assert loaded.options["remover"] == remover
            assert loaded.audit() == []
