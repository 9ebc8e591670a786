"""Insert: the one native call stores what the checked path stores, and refuses nothing silently."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import geartrain as gt
from geartrain.core.dtypes import DTYPES
from geartrain.errors import (
    ArgumentError,
    FieldError,
    SchemaError,
    StoreClosedError,
    StoreMissingError,
    WaitTimeoutError,
)

NUMPY = [name for name, dtype in DTYPES.items() if dtype.numpy_name is not None]


class Unhurried(dict):
    """A dict that the native call does not take for one, so that the checked path is taken."""


def random_rows(rng, fields, n, steps):
    made = {}
    for name, field in fields.items():
        shape = (n, *field.shape) if field.per_row else (n, steps, *field.shape)
        raw = rng.integers(0, 2 if field.dtype == "bool" else 256, (*shape, field.itemsize), dtype=np.uint8)
        made[name] = raw.view(field.numpy_dtype).reshape(shape) if raw.size else np.empty(shape, field.numpy_dtype)
    return made


@pytest.mark.parametrize("seed", range(12))
def test_one_call_stores_what_the_checked_path_stores(seed):
    rng = np.random.default_rng(seed)
    fields = {}
    for number in range(rng.integers(1, 7)):
        shape = tuple(rng.integers(1, 4, rng.integers(0, 4)))
        fields[f"f{number}"] = gt.Field(shape, rng.choice(NUMPY), per_row=bool(rng.integers(0, 2)))
    timed = any(not field.per_row for field in fields.values())
    longest = int(rng.integers(1, 6)) if timed else 1
    with (
        gt.Store.create(fields, max_length=longest, capacity=2500) as one,
        gt.Store.create(fields, max_length=longest, capacity=2500) as other,
    ):
        for n in (1, 2, 63, 64, 65, 700, 2100):  # pieces are of at most half the store, and of 1024
            rows = random_rows(rng, fields, n, int(rng.integers(1, longest + 1)))
            got, wanted = one.insert(rows), other.insert(Unhurried(rows))
            assert got == wanted
            assert got.row.dtype == got.generation.dtype == np.uint32
            assert got.row.flags.writeable
            status, expected = one.status(got[-3:]), other.status(wanted[-3:])
            for name in ("length", "priority", "version", "generation", "sequence"):
                assert np.array_equal(status[name], expected[name])
            last = got[-50:]
            mine = gt.fetch(one, last, output="numpy")
            theirs = gt.fetch(other, wanted[-50:], output="numpy")
            for name, field in fields.items():
                assert mine[name].tobytes() == theirs[name].tobytes()
                block = rows[name][-50:]
                if not field.per_row:
                    assert mine[name][:, : block.shape[1]].tobytes() == block.tobytes()
        assert one.audit() == other.audit() == []


FIELDS = {"x": gt.Field((2,), "float32"), "a": gt.Field((), "int64"), "id": gt.Field((), "uint8", per_row=True)}


def rows_of(n=3, steps=4):
    return {"x": np.ones((n, steps, 2), np.float32), "a": np.ones((n, steps), np.int64), "id": np.ones(n, np.uint8)}


@pytest.fixture
def store():
    with gt.Store.create(FIELDS, max_length=4, capacity=10) as made:
        yield made


@pytest.mark.parametrize(
    ("field", "array"),
    [
        ("x", np.ones((3, 4, 2), np.float32, order="F")),
        ("x", np.ones((3, 4, 4), np.float32)[:, :, ::2]),
        ("a", np.ones((3, 4), np.longlong)),
        ("a", [[1] * 4] * 3),
        ("id", memoryview(b"\1\1\1")),
    ],
    ids=["fortran", "strided", "longlong", "list", "bytes"],
)
def test_arrays_of_other_kinds_and_orders_are_taken(store, field, array):
    store.insert({**rows_of(), field: array})
    batch = gt.fetch(store, store.keys(), output="numpy")
    assert all((batch[name] == 1).all() for name in FIELDS)


def test_tensors_are_taken(store):
    torch = pytest.importorskip("torch")
    keys = store.insert({name: torch.from_numpy(array) for name, array in rows_of().items()})
    assert keys == store.keys()
    assert (gt.fetch(store, keys, output="numpy")["a"] == 1).all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": np.ones((3, 4, 2))}, SchemaError, "field 'x' holds float32, found float64; casting=\"same_kind\""),
        ({"x": np.ones((3, 4, 2), ">f4")}, SchemaError, "field 'x': dtype .* byte order"),
        ({"x": None}, SchemaError, "field 'x' takes an array of all rows, found None"),
        ({"x": "text"}, SchemaError, "'x' holds float32, found 'text', which is no number.*Text"),
        ({"x": [[[None]]]}, SchemaError, "'x' holds float32, found None, which is no number"),
        ({"x": [[[1, 2**64]]]}, SchemaError, f"'x' holds float32, found {2**64}, which is beyond 64 bits"),
        ({"x": np.ones((1, 4, 2), object)}, SchemaError, r"array of objects: .*astype\('float32'\)"),
        ({"a": np.ones((3, 4), np.uint64)}, SchemaError, "holds int64, found uint64"),
        ({"x": np.ones((3, 4, 3), np.float32)}, SchemaError, r"field 'x' takes \(n, t <= 4, 2\)"),
        ({"x": np.ones((3, 5, 2), np.float32)}, SchemaError, r"found shape \(3, 5, 2\)"),
        ({"x": np.ones((3, 0, 2), np.float32)}, SchemaError, r"found shape \(3, 0, 2\)"),
        ({"a": np.ones((3, 3), np.int64)}, SchemaError, "has 3 steps"),
        ({"id": np.ones(2, np.uint8)}, SchemaError, "has 2 rows"),
        ({"id": np.ones((3, 1), np.uint8)}, SchemaError, "takes"),
        ({"y": np.ones(3)}, FieldError, r"unknown \['y'\]"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_inserted(store, change, error, words):
    with pytest.raises(error, match=words):
        store.insert({**rows_of(), **change})
    with pytest.raises(FieldError, match=r"missing \['x'\]"):
        store.insert({name: array for name, array in rows_of().items() if name != "x"})
    assert len(store) == store.stats()["writing"] == 0


def test_casting_converts_within_a_kind_where_it_is_asked_to(store):
    wide = {"x": np.full((3, 4, 2), 1.5), "a": np.full((3, 4), 7, np.int32), "id": np.array([1, 2, 255], np.uint16)}
    keys = store.insert(wide, casting="same_kind")
    batch = gt.fetch(store, keys, output="numpy")
    assert (batch["x"] == 1.5).all()
    assert (batch["a"] == 7).all()
    assert batch["id"].tolist() == [1, 2, 255]
    with pytest.raises(SchemaError, match="float64, which casting='safe' does not convert"):
        store.insert(wide, casting="safe")
    store.insert({**rows_of(), "a": wide["a"]}, casting="safe")
    with pytest.raises(SchemaError, match="holds int64, found float64, which casting='same_kind' does not"):
        store.insert({**rows_of(), "a": np.ones((3, 4))}, casting="same_kind")
    for casting in ("unsafe", True):
        with pytest.raises(ArgumentError, match="casting is one of 'no', 'safe', 'same_kind'"):
            store.insert(rows_of(), casting=casting)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_casting_knows_the_floats_that_numpy_lacks():
    torch = pytest.importorskip("torch")
    fields = {"x": gt.Field((), "bfloat16"), "z": gt.Field((), "complex64")}
    with gt.Store.create(fields, max_length=1, capacity=4) as store:
        rows = {"x": torch.tensor([[1.5]]), "z": torch.tensor([[1 + 2j]], dtype=torch.complex32)}
        with pytest.raises(SchemaError, match="holds complex64, found complex32"):
            store.insert(rows, casting="same_kind")
        keys = store.insert({**rows, "z": rows["x"]}, casting="same_kind")
        assert gt.fetch(store, keys)["x"].item() == 1.5
        with pytest.raises(SchemaError, match="holds bfloat16, found float32"):
            store.insert({"x": torch.ones(1, 1), "z": torch.ones(1, 1, dtype=torch.complex64)}, casting="safe")


def test_the_rate_limiter_holds_back_every_kind_of_insert(store):
    store.limiter.set(samples_per_insert=1, min_size_to_sample=1, error_buffer=6)
    store.insert(rows_of())
    store.limiter.stopping = lambda: True
    with pytest.raises((WaitTimeoutError, gt.errors.CallCancelledError)):
        for _ in range(3):
            store.insert(rows_of())
    assert store.stats()["writing"] == 0
    assert len(store) == store.limiter.state().inserts


def test_a_closed_store_takes_nothing(store):
    store.close()
    with pytest.raises(StoreClosedError):
        store.insert(rows_of())


def test_keys_of_an_insert_are_keys(store):
    keys = store.insert(rows_of())
    assert pickle.loads(pickle.dumps(keys)) == keys
    untouched = store.insert(rows_of())
    assert pickle.loads(pickle.dumps(untouched)) == untouched == store.keys()[3:]
    assert len(untouched) == 3
    assert untouched.shard is None
    with pytest.raises(AttributeError, match="no attribute 'weights'"):
        _ = untouched.weights
    with store.row(zeros=store.fields) as row:
        row.length = 2
    assert row.key == store.keys()[6:]
    assert store.update_priorities(keys + row.key, 2.0) == 0


def test_what_makes_no_array_is_told_with_what_to_do():
    torch = pytest.importorskip("torch")
    with gt.Store.create({"x": gt.Field((2,), "float32")}, max_length=3, capacity=4) as store:
        for given, told in (
            ([[[1.0, 2.0]], [[1.0, 2.0], [3.0, 4.0]]], "pass lengths="),
            (torch.zeros(2, 3, 2).to_sparse(), r"to_dense\(\)"),
            (torch.zeros(2, 3, 2, device="meta"), "host memory"),
            (torch.zeros(2, 3, 2, dtype=torch.complex64), "convert it first"),
        ):
            with pytest.raises(SchemaError, match=told):
                store.insert({"x": given})
        assert len(store) == 0
        keys = store.insert({"x": np.zeros((2, 3, 2), np.float32)})
        with pytest.raises(SchemaError, match="`priorities` must be one number or an array"):
            store.update_priorities(keys, torch.zeros(2, device="meta"))
        with pytest.raises(ArgumentError, match=r"a strategy such as Uniform\(seed=0\)"):
            gt.Replay(store, gt.selection.Uniform, 2)
        with pytest.raises(StoreMissingError, match=r"Store\.create makes one"):
            gt.Store.open("no-such-store")
