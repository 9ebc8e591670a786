"""Values whose bytes are not what they mean: masked arrays, lazy conjugates and negatives, nested tensors."""

from __future__ import annotations

import numpy as np
import pytest

import geartrain as gt
from geartrain.actors import EpisodeRecorder, recorded_fields
from geartrain.errors import ArgumentError, SchemaError

X = {"x": gt.Field((2,), "float32")}
MASKED = "masked array, and its mask would be lost: pass its .filled"


def masked(*shape: int) -> np.ma.MaskedArray:
    array = np.ma.array(np.ones(shape, np.float32), mask=np.zeros(shape, bool))
    array[0] = np.ma.masked
    return array


@pytest.fixture
def store(name):
    with gt.Store.create(name, X, max_length=3, capacity=4) as made:
        yield made


@pytest.mark.parametrize("casting", ["no", "same_kind"])
@pytest.mark.parametrize("several", [False, True], ids=["array", "list"])
def test_an_insert_refuses_masked_arrays(store, casting, several):
    given = [masked(3, 2), masked(3, 2)] if several else masked(2, 3, 2)
    with pytest.raises(SchemaError, match=f"field 'x' is a {MASKED}"):
        store.insert({"x": given}, casting=casting)
    assert len(store) == 0
    store.insert({"x": masked(2, 3, 2).filled(0)})


def test_a_block_and_a_rewrite_refuse_masked_arrays(store):
    keys = store.insert({"x": np.zeros((1, 3, 2), np.float32)})
    with pytest.raises(SchemaError, match=f"field 'x' is a {MASKED}"):
        store.write(keys, {"x": masked(1, 3, 2)})
    row, rows = store.row(), store.rows(1)
    for one in (row, rows[0]):
        with pytest.raises(SchemaError, match=f"(?s)field 'x' takes float32 .*: it is a {MASKED}"):
            one["x"] = masked(3, 2)
    row.abandon()
    rows.abandon()
    assert not gt.fetch(store, keys, output="numpy")["x"].any()


def test_numbers_of_rows_are_no_masked_arrays(store):
    x = {"x": np.zeros((2, 3, 2), np.float32)}
    keys = store.insert(x)
    numbers = np.ma.array([1, 2], mask=[True, False])
    with pytest.raises(SchemaError, match=f"`priorities` is a {MASKED}"):
        store.update_priorities(keys, numbers)
    for what in ("lengths", "priorities", "versions"):
        with pytest.raises(SchemaError, match=f"`{what}` is a {MASKED}"):
            store.insert(x, **{what: numbers})
    assert len(store) == 2


@pytest.mark.parametrize("what", ["obs", "action", "terminated"])
def test_recorders_refuse_masked_arrays(name, what):
    fields = gt.recorded_fields({"obs": gt.Field((2,), "float32"), "action": gt.Field((), "float32")})
    given = {
        "obs": np.zeros((2, 2), np.float32), "action": np.zeros(2, np.float32), "terminated": np.zeros(2, bool)
    }  # fmt: skip
    with gt.Store.create(name, fields, max_length=4, capacity=8) as store:
        recorder = store.recorder(2)
        recorder.reset(given["obs"])
        hidden = np.ma.array(given[what], mask=np.ones_like(given[what], bool))
        step = {**given, what: hidden}
        with pytest.raises(SchemaError, match=f"{what}.? is a {MASKED}"):
            recorder.step(
                step["obs"], terminated=step["terminated"], truncated=np.zeros(2, bool), action=step["action"]
            )
        recorder.step(given["obs"], terminated=given["terminated"], truncated=np.zeros(2, bool), action=given["action"])


def test_an_episode_recorder_refuses_masked_arrays(name):
    fields = recorded_fields({"obs": gt.Field((2,), "float32"), "reward": gt.Field((), "float32")})
    with gt.Store.create(name, fields, max_length=4, capacity=8) as store:
        recorder = EpisodeRecorder(store)
        with pytest.raises(SchemaError, match=MASKED):
            recorder.begin({"obs": masked(2)})


def test_weights_and_sums_refuse_masked_arrays(name):
    from geartrain.collectives.buffers import buffer_of

    with gt.weights.Publisher(name) as publisher, pytest.raises(ArgumentError, match=r"x is a masked array"):
        publisher.publish(1, {"x": masked(2)})
    with pytest.raises(ArgumentError, match="a masked array cannot be reduced"):
        buffer_of(masked(2))


def test_lazy_conjugates_and_negatives_are_stored_as_what_they_mean(name):
    torch = pytest.importorskip("torch")
    numbers = torch.tensor([[[1 + 2j, 3 - 4j]]])
    with gt.Store.create(name, {"c": gt.Field((2,), "complex64")}, max_length=1, capacity=4) as store:
        keys = store.insert({"c": numbers.conj()})
        assert gt.fetch(store, keys)["c"].tolist() == numbers.conj().resolve_conj().tolist()
        store.write(keys, {"c": numbers})
        store.write(keys, {"c": numbers.conj()})
        assert gt.fetch(store, keys)["c"].tolist() == numbers.conj().resolve_conj().tolist()
    fields = {"x": gt.Field((), "float32"), "b": gt.Field((), "bfloat16")}
    with gt.Store.create(f"{name}-neg", fields, max_length=2, capacity=4) as store:
        negative = torch.conj(torch.full((1, 2), 5j)).imag  # a negative as users meet one
        assert negative.is_neg()
        keys = store.insert({"x": negative, "b": negative.to(torch.bfloat16)})
        found = gt.fetch(store, keys)
        assert found["x"].tolist() == found["b"].tolist() == [[-5.0, -5.0]]
        assert store.update_priorities(keys, -torch.conj(torch.full((1,), -3j)).imag.neg()) == 0
        assert store.status(keys)["priority"].tolist() == [3.0]


def test_a_step_of_lazy_negatives_is_recorded_as_what_it_means(name):
    torch = pytest.importorskip("torch")
    fields = gt.recorded_fields({"obs": gt.Field((), "float32"), "action": gt.Field((), "bfloat16")})
    negative = torch.conj(torch.full((2,), 5j)).imag
    with gt.Store.create(name, fields, max_length=4, capacity=8) as store:
        recorder = store.recorder(2)
        recorder.reset(negative)
        ends = np.ones(2, bool)
        action = torch._neg_view(torch.full((2,), 5.0, dtype=torch.bfloat16))
        recorder.step(negative, terminated=ends, truncated=~ends, action=action)
        found = gt.fetch(store, store.keys())
        assert found["action"][:, 0].tolist() == found["obs"][:, 0].tolist() == [-5.0, -5.0]


def test_a_lazy_negative_is_not_reduced_as_what_it_is_not():
    torch = pytest.importorskip("torch")
    from geartrain.collectives.buffers import buffer_of

    with pytest.raises(ArgumentError, match="resolve_neg"):
        buffer_of(torch._neg_view(torch.ones(2)))


@pytest.mark.parametrize("layout", ["strided", "jagged"])
def test_an_insert_refuses_nested_tensors(store, layout):
    torch = pytest.importorskip("torch")
    nested = torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(1, 2)], layout=getattr(torch, layout))
    with pytest.raises(SchemaError, match="field 'x' is a nested tensor"):
        store.insert({"x": nested})
