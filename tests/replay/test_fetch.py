"""Batches: exactly the steps asked for, none from the future, and buffers that are never overwritten."""

from __future__ import annotations

import gc
import itertools
import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import geartrain as gt
from geartrain import _native
from geartrain.core.dtypes import DTYPES
from geartrain.errors import ArgumentError, FieldError, StaleKeyError

_numbers = itertools.count()
NUMPY_DTYPES = sorted(name for name, dtype in DTYPES.items() if dtype.numpy_name is not None)


def unique() -> str:
    return f"test-{os.getpid()}-fetch-{next(_numbers)}"


def reference(rows: list[np.ndarray], window: int | None, ends: list[int] | None, pad: str, longest: int):
    """What a batch of these rows must be, one step at a time: (steps, mask, starts)."""
    width = window or longest
    out = np.zeros((len(rows), width, *rows[0].shape[1:]), rows[0].dtype)
    mask = np.zeros((len(rows), width), bool)
    starts = []
    for i, row in enumerate(rows):
        if window is None:
            steps = list(range(len(row)))
        else:
            end = len(row) - 1 if ends is None else ends[i]
            steps = [t for t in range(end - window + 1, end + 1) if t >= 0]
        first = width - len(steps) if window is not None and pad == "left" else 0
        for place, step in enumerate(steps):
            out[i, first + place] = row[step]
            mask[i, first + place] = True
        starts.append(steps[0])
    return out, mask, starts


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_window_of_any_field_is_what_a_slow_loop_gives(data):
    longest = data.draw(st.integers(1, 40), "longest")
    dtypes = data.draw(st.lists(st.sampled_from(NUMPY_DTYPES), min_size=1, max_size=3), "dtypes")
    fields = {
        f"f{i}": gt.Field(data.draw(st.lists(st.integers(1, 5), max_size=2)), dtype) for i, dtype in enumerate(dtypes)
    }
    fields["whole"] = gt.Field((3,), "int16", per_row=True)
    lengths = data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=6), "lengths")
    random = np.random.default_rng(len(lengths))
    inserted = {}
    for name, field in fields.items():
        raw = random.integers(
            0, 2 if field.dtype == "bool" else 256, (len(lengths), field.block_nbytes(longest)), np.uint8
        )
        inserted[name] = raw.view(field.numpy_dtype).reshape(len(lengths), *field.block_shape(longest))
    with gt.Store.create(unique(), fields, max_length=longest, capacity=len(lengths)) as store:
        keys = store.insert(inserted, lengths=lengths, versions=np.arange(len(lengths)))
        chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=9), "chosen")
        window = data.draw(st.one_of(st.none(), st.integers(1, longest + 6)), "window")
        ends = None
        if window is not None and data.draw(st.booleans(), "with ends"):
            ends = [data.draw(st.integers(0, lengths[i] - 1)) for i in chosen]
        pad = data.draw(st.sampled_from(["left", "right"]), "pad")
        wanted = data.draw(st.lists(st.sampled_from(list(fields)), min_size=1, unique=True), "wanted")
        threads = data.draw(st.integers(1, 3), "threads")
        batch = gt.fetch(
            store, keys[chosen], fields=wanted, window=window, ends=ends, pad=pad, output="numpy", threads=threads
        )
        assert list(batch) == wanted
        for name in wanted:
            if name == "whole":
                assert batch[name].tobytes() == inserted[name][chosen].tobytes()
                continue
            rows = [inserted[name][i, : lengths[i]] for i in chosen]
            steps, mask, starts = reference(rows, window, ends, pad, longest)
            assert batch[name].dtype == steps.dtype
            assert batch[name].shape == steps.shape
            assert batch[name].tobytes() == steps.tobytes()
            assert np.array_equal(batch.mask, mask)
            assert batch.start.tolist() == starts
        assert batch.length.tolist() == [lengths[i] for i in chosen]
        assert batch.version.tolist() == chosen
        # The same into buffers of one's own, dirty ones.
        out = {name: np.full_like(batch[name], 1) for name in wanted}
        filled = gt.fetch(
            store, keys[chosen], fields=wanted, window=window, ends=ends, pad=pad, output="numpy", out=out
        )
        for name in wanted:
            assert filled[name] is out[name]
            assert out[name].tobytes() == batch[name].tobytes()


@pytest.mark.parametrize("pad", ["left", "right"])
def test_a_window_holds_nothing_later_than_its_end(name, pad):
    with gt.Store.create(name, {"t": gt.Field((), "int32")}, max_length=30, capacity=5) as store:
        keys = store.insert({"t": np.broadcast_to(np.arange(1, 31, dtype=np.int32), (5, 30))})
        for window, end in itertools.product((1, 2, 7, 29, 30, 31, 50), range(30)):
            batch = gt.fetch(store, keys[:2], window=window, ends=[end, 29 - end], pad=pad, output="numpy")
            for row, last in enumerate((end, 29 - end)):
                real = batch["t"][row][batch.mask[row]]
                assert real[-1] == last + 1
                assert len(real) == min(window, last + 1)
                assert (np.diff(real) == 1).all()
                assert not batch["t"][row][~batch.mask[row]].any()


def test_a_batch_large_enough_to_be_streamed_on_many_threads_is_exact(name):
    steps, width = 64, 97  # 97 floats a step: nothing is aligned
    with gt.Store.create(name, {"x": gt.Field((width,), "float32")}, max_length=steps, capacity=300) as store:
        data = np.random.default_rng(0).random((300, steps, width), np.float32)
        keys = store.insert({"x": data}, threads=3)
        chosen = np.random.default_rng(1).integers(0, 300, 2000)
        ends = np.random.default_rng(2).integers(0, steps, 2000)
        for threads in (1, 4):
            batch = gt.fetch(store, keys[chosen], window=20, ends=ends, output="numpy", threads=threads)
            assert batch.nbytes > 8 << 20
            for i in range(2000):
                first = max(0, ends[i] - 19)
                assert np.array_equal(batch["x"][i][batch.mask[i]], data[chosen[i], first : ends[i] + 1])
                assert not batch["x"][i][~batch.mask[i]].any()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_windows_of_every_dtype_come_as_tensors(name, dtype):
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    bits = np.random.default_rng(0).integers(
        0, 2 if dtype == "bool" else 256, (3, 6 * 2 * DTYPES[dtype].itemsize), np.uint8
    )
    tensor = torch.from_numpy(bits).view(getattr(torch, dtype)).reshape(3, 6, 2)
    with gt.Store.create(name, {"x": gt.Field((2,), dtype)}, max_length=6, capacity=3) as store:
        keys = store.insert({"x": tensor}, lengths=[6, 3, 1])
        batch = gt.fetch(store, keys, window=4)
        raw = batch["x"].contiguous().view(torch.uint8).reshape(3, 4, -1)
        whole = tensor.view(torch.uint8).reshape(3, 6, -1)
        assert batch["x"].dtype == tensor.dtype
        assert raw[0].equal(whole[0, 2:6])
        assert raw[1, 1:].equal(whole[1, :3])
        assert raw[2, 3:].equal(whole[2, :1])
        assert not raw[1, 0].any()
        assert not raw[2, :3].any()
        assert batch.mask.dtype == torch.bool
        assert batch.mask.sum(1).tolist() == [4, 3, 1]
        out = {"x": torch.empty(3, 4, 2, dtype=getattr(torch, dtype))}
        assert gt.fetch(store, keys, window=4, out=out)["x"] is out["x"]
        assert out["x"].view(torch.uint8).reshape(3, 4, -1).equal(raw)


# --- stale keys -----------------------------------------------------------------------------------------------------


def test_stale_keys_raise_or_are_dropped_as_asked(name):
    with gt.Store.create(name, {"x": gt.Field((), "int64")}, max_length=9, capacity=4) as store:
        keys = store.insert({"x": np.arange(36).reshape(4, 9)})
        store.delete(keys[[1, 3]])
        with pytest.raises(StaleKeyError, match="2 of 4 keys are stale"):
            gt.fetch(store, keys)
        batch = gt.fetch(store, keys, on_stale="drop", output="numpy")
        assert batch["x"][:, 0].tolist() == [0, 18]
        assert batch.keys == keys[[0, 2]]
        assert len(gt.fetch(store, keys[[1, 3]], on_stale="drop").keys) == 0
        with pytest.raises(StaleKeyError, match="own arrays"):
            gt.fetch(store, keys, out={"x": np.zeros((4, 9), np.int64)}, output="numpy", on_stale="drop")


def test_the_window_of_a_stale_key_is_stale_and_not_an_error_of_the_caller(name):
    with gt.Store.create(name, {"x": gt.Field((), "int64")}, max_length=9, capacity=1) as store:
        old = store.insert({"x": np.zeros((1, 9), np.int64)})
        store.insert({"x": np.zeros((1, 2), np.int64)})  # the same block, shorter
        with pytest.raises(StaleKeyError):
            gt.fetch(store, old, window=3, ends=[8])
        assert len(gt.fetch(store, old, window=3, ends=[8], on_stale="drop").keys) == 0


def test_no_keys_make_an_empty_batch(name):
    with gt.Store.create(name, {"x": gt.Field((2,), "float32")}, max_length=9, capacity=1) as store:
        batch = gt.fetch(store, gt.Keys.empty(), window=3)
        assert batch["x"].shape == (0, 3, 2)
        assert batch.mask.shape == (0, 3)


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 0}, ArgumentError, "window must be at least 1, found 0"),
        ({"window": -1}, ArgumentError, "window must be at least 1, found -1"),
        ({"window": 2**31}, ArgumentError, "window must be from 1 to 2147483647, found 2147483648"),
        ({"pad": "center"}, ArgumentError, "'center'"),
        ({"output": "jax"}, ArgumentError, "'jax'"),
        ({"fields": "x"}, ArgumentError, "fields is a list of names, found 'x'"),
        ({"fields": []}, ArgumentError, "at least one"),
        ({"fields": ["x", "x"]}, ArgumentError, "each field once"),
        ({"fields": ["z"]}, FieldError, "no field 'z'; it has x, half"),
        ({"ends": [0, 0]}, ArgumentError, "leave out ends"),
        ({"window": 2, "ends": [0]}, ArgumentError, r"2 whole numbers, found int64 \(1,\)"),
        ({"window": 2, "ends": [0.0, 1.0]}, ArgumentError, "whole numbers, found float64"),
        ({"window": 2, "ends": [0, 4]}, ArgumentError, "window 1 ends at step 4, its row has steps 0 to 3"),
        ({"window": 2, "ends": [-1, 0]}, ArgumentError, "window 0 ends at step -1"),
        ({"window": 2, "ends": [9, 0]}, ArgumentError, "window 0 ends at step 9, rows have steps 0 to 8"),
        ({"threads": 0}, ArgumentError, "threads must be from 1 to 4096, found 0"),
        ({"output": "numpy"}, FieldError, "NumPy has no bfloat16"),
        ({"fields": ["x"], "out": {"y": np.zeros((2, 9))}}, ArgumentError, r"exactly the fields \['x'\]"),
        ({"fields": ["x"], "out": {"x": np.zeros((2, 9))}}, ArgumentError, r"int64 \(2, 9\), found float64"),
        ({"fields": ["x"], "out": {"x": np.zeros((2, 8), np.int64)}}, ArgumentError, r"found int64 \(2, 8\)"),
        ({"fields": ["x"], "out": {"x": np.zeros((9, 2), np.int64).T}}, ArgumentError, "C-contiguous"),
    ],
)
def test_a_fetch_that_makes_no_sense_is_refused(name, monkeypatch, options, error, message):
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    fields = {"x": gt.Field((), "int64"), "half": gt.Field((), "bfloat16")}
    with gt.Store.create(name, fields, max_length=9, capacity=4) as store:
        data = {"x": np.zeros((2, 4), np.int64), "half": torch.zeros(2, 4, dtype=torch.bfloat16)}
        with pytest.raises(error, match=message):
            gt.fetch(store, store.insert(data), **options)


def test_an_output_that_may_not_be_written_stays_as_it_was(name):
    with gt.Store.create(name, {"x": gt.Field((), "int64", per_row=True)}, capacity=4) as store:
        keys = store.insert({"x": np.ones(4, np.int64)})
        out = np.zeros(4, np.int64)
        out.setflags(write=False)
        with pytest.raises(ArgumentError, match="read-only"):
            gt.fetch(store, keys, out={"x": out}, output="numpy")
        assert not out.any()


def test_keys_of_another_shape_or_of_rows_that_do_not_exist_are_refused(name):
    with gt.Store.create(name, {"x": gt.Field((), "int64", per_row=True)}, capacity=4) as store:
        with pytest.raises(ArgumentError, match="row 4 is beyond the store's capacity of 4"):
            gt.fetch(store, gt.Keys([4], [1]))
        with pytest.raises(ArgumentError, match="two arrays"):
            gt.Keys([1, 2], [1])
        with pytest.raises(ArgumentError, match="two arrays"):
            gt.Keys([[1]], [[1]])


# --- memory ---------------------------------------------------------------------------------------------------------


def _large_store(name: str) -> tuple[gt.Store, gt.Keys]:
    store = gt.Store.create(name, {"x": gt.Field((), "int64")}, max_length=1 << 15, capacity=16)
    return store, store.insert({"x": np.broadcast_to(np.arange(16)[:, None], (16, 1 << 15)).copy()})


@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_a_batch_that_is_kept_is_never_overwritten_and_a_dropped_ones_memory_is_used_again(name, output):
    store, keys = _large_store(name)
    gc.collect()
    elsewhere = _native.pool_counts()["bytes_in_use"]  # batches that other tests keep
    with store:
        kept = [gt.fetch(store, keys[i : i + 4], output=output) for i in range(8)]
        views = [batch["x"][1:2, :5] for batch in kept[4:]]
        del kept[4:]
        gc.collect()
        for i in range(40):
            gt.fetch(store, keys[[i % 16] * 4], output=output)
        for i, batch in enumerate(kept):
            assert [int(value) for value in batch["x"][:, 77]] == [i, i + 1, i + 2, i + 3]
        for i, view in enumerate(views):
            assert int(view[0, 0]) == i + 5
        del kept, views, batch, view
        gc.collect()
        assert _native.pool_counts()["bytes_in_use"] == elsewhere
        before = _native.pool_counts()
        for _ in range(20):
            gt.fetch(store, keys[:4], output=output)
        after = _native.pool_counts()
        assert after["buffers_made"] == before["buffers_made"]
        assert after["buffers_reused"] == before["buffers_reused"] + 20


def test_every_array_of_a_batch_can_be_exported_by_dlpack_and_keeps_the_batch_alive(name):
    store, keys = _large_store(name)
    with store:
        batch = gt.fetch(store, keys[:4], output="numpy")
        exported = [torch.from_dlpack(array) for array in (batch["x"], batch.mask, batch.start, batch.version)]
        assert exported[0].data_ptr() == batch["x"].ctypes.data
        again = np.from_dlpack(gt.fetch(store, keys[4:8])["x"])
        del batch
        gc.collect()
        for _ in range(10):
            gt.fetch(store, keys[8:12])
        assert exported[0][:, 5].tolist() == [0, 1, 2, 3]
        assert again[:, 5].tolist() == [4, 5, 6, 7]


def test_a_batch_outlives_its_store(name):
    store, keys = _large_store(name)
    batch = gt.fetch(store, keys, output="numpy")
    store.close()
    del store
    gc.collect()
    assert batch["x"][:, 9].tolist() == list(range(16))


def test_a_batch_is_aligned_to_cache_lines(name):
    fields = {
        "a": gt.Field((), "uint8"),
        "b": gt.Field((), "int16", per_row=True),
        "c": gt.Field((5,), "float64", per_row=True),
    }
    with gt.Store.create(name, fields, max_length=3, capacity=7) as store:
        keys = store.insert({"a": np.ones((7, 3), np.uint8), "b": np.ones(7, np.int16), "c": np.ones((7, 5))})
        batch = gt.fetch(store, keys, output="numpy")
        for array in (*batch.fields.values(), batch.mask, batch.start, batch.length, batch.version):
            assert array.ctypes.data % 64 == 0


def test_many_threads_may_fetch_from_one_store(name):
    store, keys = _large_store(name)
    wrong = []

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(30):
            chosen = random.integers(0, 16, 8)
            batch = gt.fetch(store, keys[chosen], output="numpy", threads=2)
            if not (batch["x"] == chosen[:, None]).all():
                wrong.append(seed)

    with store:
        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
