"""One store, one process: rows in and out, limits and keys."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
from deadlines import patience
from value_rows import TIMED, X, put, xs

import geartrain as gt
from geartrain.core.dtypes import DTYPES
from geartrain.errors import SchemaError, StaleKeyError, StoreFullError

# --- rows in and out ------------------------------------------------------------------------------------------------


def test_a_row_written_in_place_comes_out_as_it_went_in(name):
    with gt.Store.create(name, TIMED, max_length=6, capacity=4) as store:
        with store.row(priority=2.5, version=7) as row:
            row["obs"][:3] = np.arange(6).reshape(3, 2)
            row["act"] = 5
            row["task"][...] = 9
            row.length = 3
        assert len(store) == 1
        batch = gt.fetch(store, row.key, output="numpy")
        assert batch["obs"][0, :3].tolist() == [[0, 1], [2, 3], [4, 5]]
        assert not batch["obs"][0, 3:].any()
        assert batch["act"][0].tolist() == [5, 5, 5, 0, 0, 0]  # beyond the length there is nothing
        assert batch["task"].tolist() == [9]
        assert batch.mask.tolist() == [[True] * 3 + [False] * 3]
        assert (batch.length.tolist(), batch.version.tolist(), batch.start.tolist()) == ([3], [7], [0])
        status = store.status(row.key)
        assert (status["priority"].tolist(), status["sequence"].tolist()) == ([2.5], [1])


def test_a_row_that_fails_or_is_forgotten_gives_its_block_back(name):
    with gt.Store.create(name, X, capacity=2) as store:
        with pytest.raises(ZeroDivisionError), store.row() as row:
            row["x"] = 1 / 0
        with pytest.raises(SchemaError, match="length is 2"), store.row() as row:
            row["x"], row.length = 1, 2
        with pytest.raises(SchemaError, match="finite number >= 0, found -1"), store.row() as row:
            row["x"], row.length, row.priority = 1, 1, -1
        forgotten = store.row(), store.rows(1)
        with pytest.raises(StoreFullError, match="2 are being written"):
            store.row()
        del forgotten, row
        gc.collect()
        assert store.stats()["free"] == 2
        assert store.stats()["abandoned"] == 5
        assert len(store) == 0
        assert store.audit() == []


def test_a_row_is_committed_once(name):
    with gt.Store.create(name, X, capacity=2) as store:
        row = store.row(zeros=["x"])
        row.length = 1
        row.commit()
        for again in (row.commit, lambda: row["x"], lambda: row.torch("x")):
            with pytest.raises(SchemaError, match="already committed"):
                again()
        row.abandon()
        assert len(store) == 1
        with store.rows(2) as rows:
            rows[0]["x"], rows[1]["x"], rows.lengths = 5, 6, 1
            rows.priorities = [1, 2]
            rows.versions = 3
        assert store.status(rows.keys)["version"].tolist() == [3, 3]
        assert xs(store) == [5, 6]
        with pytest.raises(SchemaError, match="already committed"):
            rows[0]


def test_an_insert_of_more_rows_than_there_is_room_for_keeps_the_last_ones(name):
    with gt.Store.create(name, X, capacity=10) as store:
        keys = put(store, *range(5000))
        assert len(keys) == 5000
        assert xs(store) == list(range(4990, 5000))
        assert store.stats()["evicted"] == 4990
        assert store.update_priorities(keys, 1) == 4990
        assert store.audit() == []


DTYPE_NAMES = sorted(DTYPES)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("shape", [(), (3,), (3, 2, 5)])
def test_every_dtype_goes_in_as_a_tensor_and_comes_out_with_the_same_bits(name, dtype, shape):
    torch = pytest.importorskip("torch")
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    fields = {"x": gt.Field(shape, getattr(torch, dtype), per_row=True)}
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, 4096, np.uint8))
    count = 6 * int(np.prod(shape, dtype=int))
    tensor = bits[: count * DTYPES[dtype].itemsize].clone().view(getattr(torch, dtype)).reshape(6, *shape)
    with gt.Store.create(name, fields, capacity=6) as store:
        assert store.fields["x"].dtype == dtype
        keys = store.insert({"x": tensor})
        found = gt.fetch(store, keys)["x"]
        assert same_bits(found, tensor)
        with store.row() as row:
            row.torch("x")[...] = tensor[1]
            row.length = 1
        assert same_bits(gt.fetch(store, row.key)["x"], tensor[1:2])
        if DTYPES[dtype].numpy_name is not None:
            array = tensor.numpy()
            keys = store.insert({"x": array})
            out = gt.fetch(store, keys, output="numpy")["x"]
            assert out.dtype == array.dtype
            assert out.tobytes() == array.tobytes()


def same_bits(one, other) -> bool:
    """Whether two tensors are the same to the bit."""

    def bits(tensor):
        return tensor.contiguous().reshape(-1).view(pytest.importorskip("torch").uint8)

    return one.dtype == other.dtype and one.shape == other.shape and bits(one).equal(bits(other))


@pytest.mark.parametrize("kind", ["strided", "read-only", "gradient", "list"])
def test_strided_read_only_and_gradient_carrying_sources_are_copied_as_they_look(name, kind):
    with gt.Store.create(name, {"x": gt.Field((3,), "float32")}, max_length=4, capacity=8) as store:
        array = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4).transpose(0, 2, 1)
        source = array
        if kind == "read-only":
            source = array.copy()
            source.setflags(write=False)
        elif kind == "gradient":
            source = pytest.importorskip("torch").from_numpy(array.copy()).requires_grad_()
        elif kind == "list":
            with pytest.raises(SchemaError, match="holds float32, found float64"):
                store.insert({"x": array.tolist()})
            return
        assert np.array_equal(gt.fetch(store, store.insert({"x": source}), output="numpy")["x"], array)


# --- limits ---------------------------------------------------------------------------------------------------------


def test_rows_expire_by_age_when_rows_are_inserted_or_drawn(name):
    with gt.Store.create(name, X, capacity=8, max_age_s=0.05) as store:
        old = put(store, 1, 2)
        _until(lambda: store.expire() == 2)
        assert len(store) == 0
        put(store, 3)
        assert store.update_priorities(old, 1) == 2
        _until(lambda: store.row().abandon() or store.stats()["expired"] == 3)
        put(store, 4)
        replay = gt.Replay(store, gt.selection.Uniform(), 2, prefetch=0, output="numpy")

        def nothing_to_draw() -> bool:
            try:
                replay.sample()
            except gt.errors.EmptyStoreError:
                return True
            return False

        _until(nothing_to_draw)
        assert store.audit() == []


def _until(happens, timeout_s: float = 20) -> None:
    deadline_s = time.monotonic() + patience(timeout_s)
    while not happens():
        assert time.monotonic() < deadline_s, "it never happened"


def test_a_row_is_sampled_as_often_as_allowed_and_then_gone(name):
    with gt.Store.create(name, X, capacity=20, max_times_sampled=3) as store:
        put(store, *range(20), priorities=np.arange(20) % 3 + 1)
        replay = gt.Replay(store, gt.selection.Prioritized(seed=1), 1, prefetch=0, output="numpy")
        seen = [int(replay.sample()["x"][0]) for _ in range(60)]
        assert sorted(seen) == sorted([*range(20)] * 3)
        assert len(store) == 0
        assert store.stats()["exhausted"] == 20
        assert store.audit() == []
        with pytest.raises(gt.errors.EmptyStoreError):
            replay.sample()


def test_half_a_batch_never_uses_up_the_rows_of_a_store_with_limited_samples(name):
    with gt.Store.create(name, X, capacity=20, max_times_sampled=1) as store:
        put(store, *range(10))
        with pytest.raises(gt.errors.NotEnoughRowsError, match="16 selectable rows"):
            gt.Replay(store, gt.selection.Uniform(), 16, prefetch=0, output="numpy").sample()
        assert len(store) == 10
        batch = gt.Replay(store, gt.selection.Uniform(), 10, prefetch=0, output="numpy").sample()
        assert sorted(batch["x"].tolist()) == list(range(10))
        assert store.stats()["free"] == 20


def test_priorities_are_kept_to_the_stated_resolution_and_what_does_not_fit_is_counted(name):
    with gt.Store.create(name, X, capacity=8) as store:
        keys = put(store, *range(8), priorities=[0, 1.5e-5, 1e-9, 65535.99, 65536, 1e300, 2.5, 1 / 3])
        found = store.status(keys)["priority"]
        assert found[0] == 0
        assert found[2] == 2.0**-16
        assert (found[4], found[5]) == (2.0**16 - 2.0**-16,) * 2
        assert found[6] == 2.5
        assert abs(found - np.clip([0, 1.5e-5, 1e-9, 65535.99, 65536, 65536, 2.5, 1 / 3], 0, None)).max() <= 2.0**-16
        stats = store.stats()
        assert (stats["priorities_saturated"], stats["priorities_rounded_up"]) == (2, 1)


# --- keys -----------------------------------------------------------------------------------------------------------


def test_a_stale_key_changes_nothing_and_is_counted(name):
    with gt.Store.create(name, X, capacity=2) as store:
        old = put(store, 1, 2)
        new = put(store, 3)  # in the place of 1
        assert new.row[0] == old.row[0]
        assert store.update_priorities(old, [9, 9]) == 1
        assert store.delete(old[0]) == 1
        assert store.status(new)["priority"].tolist() == [1]
        assert xs(store) == [2, 3]
        assert store.stats()["stale_keys"] == 2
        with pytest.raises(StaleKeyError, match=f"1 of 2 keys are stale.*row {old.row[0]}"):
            gt.fetch(store, old, output="numpy")
        assert store.delete(old + old) == 3
        odd = gt.Keys(old.row, old.generation + 1)  # the generation of a free row
        assert store.update_priorities(odd, 1) == 2
        assert store.delete(odd) == 2
        assert store.audit() == []


def test_a_key_given_twice_gets_the_last_of_its_priorities(name):
    for remover in ("fifo", "lowest_priority"):
        with gt.Store.create(name, X, capacity=2, remover=remover) as store:
            key = put(store, 1)
            store.update_priorities(key + key + key, [1, 2, 3])
            assert store.status(key)["priority"].tolist() == [3]
            assert store.native.total_priority() == 3 << 16
