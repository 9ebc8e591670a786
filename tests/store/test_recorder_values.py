"""Recorders: what a step brings is converted by value, final observations too, or refused."""

from __future__ import annotations

import numpy as np
import pytest
from recorded_steps import flags, rows_of, store_of

import geartrain as gt
from geartrain.errors import FieldError, SchemaError
from geartrain.store.recorder import recorded_fields


def test_one_environment_takes_plain_numbers():
    with store_of(5) as store, store.recorder(autoreset="disabled") as recorder:
        recorder.reset(np.zeros(3))
        assert recorder.step(np.ones(3), action=7, reward=0.25, terminated=False, truncated=False) is None
        key = recorder.step(np.ones(3), action=True, reward=1, terminated=np.bool_(False), truncated=True)
        assert key == store.keys()
        row = rows_of(store)[0]
        assert row["action"].tolist() == [7, 1, 0]
        assert row["reward"].tolist() == [0.25, 1, 0]
        assert row["truncated"].tolist() == [False, True, False]
        recorder.reset(np.zeros(3))
        recorder.step(np.ones(3), action=np.int64(1000), reward=np.float32(2), terminated=True, truncated=False)
        with pytest.raises(SchemaError, match="in which 5000000000 has no place"):
            recorder.reset(np.zeros(3))
            recorder.step(np.ones(3), action=5_000_000_000, reward=1.0, terminated=True, truncated=False)


def test_dicts_of_observations_are_fields_by_dotted_names():
    fields = recorded_fields(
        {
            "obs.pixels": gt.Field((2, 2), "uint8"),
            "obs.pose.arm": gt.Field((2,), "float16"),
            "reward": gt.Field((), "float64"),
        }
    )
    with gt.Store.create(fields, max_length=4, capacity=8) as store:
        recorder = store.recorder(2, autoreset="same_step")

        def seen(number):
            return {"pixels": np.full((2, 2, 2), number, np.uint8), "pose": {"arm": np.full((2, 2), number / 2)}}

        recorder.reset(seen(0))
        recorder.step(seen(1), reward=np.ones(2), **flags(2))
        final = np.full(2, None, object)
        final[1] = {"pixels": np.full((2, 2), 9, np.uint8), "pose": {"arm": np.full(2, 4.5)}}
        key = recorder.step(seen(2), reward=np.ones(2), final_obs=final, **flags(2, [1]))
        batch = gt.fetch(store, key, output="numpy")
        assert batch["obs.pixels"][0, :, 0, 0].tolist() == [0, 1, 9, 0]
        assert batch["obs.pose.arm"][0, :, 0].tolist() == [0, 0.5, 4.5, 0]
        whole = {"obs.pixels": np.full((2, 2, 2), 8, np.uint8), "obs.pose.arm": np.full((2, 2), 4, np.float16)}
        key = recorder.step(seen(3), reward=np.ones(2), final_obs=whole, **flags(2, [0]))
        batch = gt.fetch(store, key, output="numpy")
        assert batch["obs.pixels"][0, :, 0, 0].tolist() == [0, 1, 2, 8]
        with pytest.raises(FieldError, match=r"has no 'obs\.pose\.arm'"):
            recorder.step({"pixels": seen(0)["pixels"]}, reward=np.ones(2), **flags(2))
        with pytest.raises(FieldError, match="give a dict"):
            recorder.step(np.zeros(2), reward=np.ones(2), **flags(2))


def test_tensors_are_taken():
    torch = pytest.importorskip("torch")
    with store_of(4, logits=gt.Field((2,), "bfloat16")) as store:
        recorder = store.recorder(2, autoreset="disabled")
        recorder.reset(torch.zeros(2, 3))
        recorder.step(
            torch.ones(2, 3),
            action=torch.tensor([1, 2]),
            reward=torch.ones(2, requires_grad=True),
            logits=torch.full((2, 2), 1.5, dtype=torch.bfloat16),
            terminated=torch.tensor([True, True]),
            truncated=torch.tensor([False, False]),
        )
        batch = gt.fetch(store, store.keys())
        assert batch["logits"][:, 0].eq(1.5).all()
        assert batch["action"][:, 0].tolist() == [1, 2]


@pytest.mark.parametrize("field", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("given", ["float16", "bfloat16", "float32"])
def test_floats_of_another_width_are_converted_by_value(field, given):
    torch = pytest.importorskip("torch")
    fields = recorded_fields({"obs": gt.Field((2,), field), "reward": gt.Field((), field)})
    with gt.Store.create(fields, max_length=4, capacity=8) as store:
        recorder = store.recorder(2, autoreset="same_step")
        numbers = torch.tensor([[1.5, -2.0], [0.25, 3.0]], requires_grad=True).to(getattr(torch, given))
        recorder.reset(numbers)
        recorder.step(numbers + 1, reward=numbers[:, 0], **flags(2))
        # One final observation for all environments, or one for each: both are converted.
        final = numbers - 1
        recorder.step(numbers, reward=numbers[:, 1], final_obs=final, **flags(2, [0]))
        recorder.step(numbers, reward=numbers[:, 1], final_obs=list(final), **flags(2, [1]))
        first, second = (gt.fetch(store, store.keys()[[n]]) for n in (0, 1))
        assert first["obs"][0].float().tolist() == [[1.5, -2.0], [2.5, -1.0], [0.5, -3.0], [0, 0]]
        assert second["obs"][0].float().tolist() == [[0.25, 3.0], [1.25, 4.0], [0.25, 3.0], [-0.75, 2.0]]
        assert first["reward"][0].float().tolist()[:2] == [1.5, -2.0]


@pytest.mark.parametrize("given", ["list", "strided", "tensor"])
@pytest.mark.parametrize("name", ["obs", "observation"])
def test_observations_are_converted_whatever_their_field_is_called(name, given):
    fields = recorded_fields({name: gt.Field((3,), "float32"), "reward": gt.Field((), "float32")})
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    observation = values.tolist() if given == "list" else np.repeat(values, 2, 1)[:, ::2]
    if given == "tensor":
        observation = pytest.importorskip("torch").tensor(values)
    with gt.Store.create(fields, max_length=4, capacity=8) as store:
        recorder = store.recorder(2, autoreset="disabled")
        recorder.reset(observation)
        recorder.step(observation, reward=np.ones(2), **flags(2, [0, 1]))
        assert gt.fetch(store, store.keys(), output="numpy")[name][:, :2].tolist() == [
            [one] * 2 for one in values.tolist()
        ]


def test_a_value_that_is_no_observation_may_be_called_so():
    fields = recorded_fields({"obs": gt.Field((), "float32"), "observation": gt.Field((), "float32")})
    with gt.Store.create(fields, max_length=4, capacity=8) as store:
        recorder = store.recorder(2, autoreset="disabled", obs="obs")
        recorder.reset([0, 1])
        recorder.step([2, 3], observation=[4, 5], **flags(2, [0, 1]))
        batch = gt.fetch(store, store.keys(), output="numpy")
        assert (batch["obs"][:, :2].tolist(), batch["observation"][:, 0].tolist()) == ([[0, 2], [1, 3]], [4, 5])


def test_no_final_observation_is_wanted_of_environments_that_took_no_step():
    with store_of(4) as store:
        recorder = store.recorder(2, autoreset="same_step")
        recorder.reset(np.zeros((2, 3)))
        step = {"action": np.zeros(2, np.int32), "reward": np.ones(2), "mask": np.array([True, False])}
        keys = recorder.step(np.ones((2, 3)), final_obs=[np.full(3, 7), None], **step, **flags(2, [0, 1]))
        assert len(keys) == 1 and rows_of(store)[0]["obs"][1].tolist() == [7, 7, 7]


def test_environments_whose_newest_step_has_other_values_are_told():
    with store_of(4, overlap=True) as store:
        recorder = store.recorder(2, autoreset="disabled", overlap=1)
        recorder.reset(np.zeros((2, 3)))
        given = {"action": np.array([1, 2], np.int32), "reward": np.array([0.5, np.nan], np.float32)}
        assert recorder.differing(given).tolist() == [True, True]  # no step yet
        for _ in range(7):  # through the ends of rows
            recorder.step(np.ones((2, 3)), **given, **flags(2))
            assert recorder.differing(given) is None
            assert recorder.differing({"reward": given["reward"]}) is None
            assert recorder.differing({"action": [1, 2]}) is None  # is converted
            assert recorder.differing({"action": np.array([1, 3], np.int32)}).tolist() == [False, True]
        recorder.cut(np.array([True, False]))
        assert recorder.differing(given).tolist() == [True, False]
        for wrong in ({"action": [1, 2, 3]}, {"action": ["a", 2]}, {"obs": np.ones((2, 3))}, {"last": [0, 1]}, [1, 2]):
            with pytest.raises(SchemaError):
                recorder.differing(wrong)
        with pytest.raises(FieldError, match=r"no field 'rewrad'.*did you mean 'reward'"):
            recorder.differing({"rewrad": [1.0, 2.0]})
