"""Transitions equal those of Stable-Baselines3 for the same episodes (tests/support/record_sb3_transitions.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.selection import Uniform
from geartrain.store.recorder import recorded_fields

RECORDED = Path(__file__).with_name("sb3_transitions.npz")
GAMMA, STACK = 0.9, 4


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    with np.load(RECORDED) as found:
        return dict(found)


@pytest.fixture(scope="module", params=[True, False], ids=["truncated stored", "truncated by the row's end"])
def store(request: pytest.FixtureRequest, recorded: dict[str, Any]) -> Iterator[gt.Store]:
    """The same episodes, whose observations are the numbers of their frames."""
    fields = recorded_fields({"obs": gt.Field((1,), "float32"), "reward": gt.Field((), "float32")})
    if request.param:
        fields["truncated"] = gt.Field((), "bool")
    with (
        gt.Store.create(fields, max_length=20, capacity=len(recorded["lengths"]) + 2) as store,
        store.recorder(1, autoreset="disabled") as recorder,
    ):
        frame = at = 0
        for length in recorded["lengths"]:
            frame += 1
            recorder.reset(np.full(1, frame))
            for _ in range(length):
                frame += 1
                recorder.step(
                    np.full(1, frame),
                    reward=recorded["rewards"][at],
                    terminated=recorded["terminated"][at],
                    truncated=recorded["truncated"][at],
                )
                at += 1
        yield store


def sampled(store: gt.Store, view: gt.Transitions) -> Iterator[gt.Batch]:
    with gt.Replay(store, Uniform(seed=0, over="steps"), 2000, view=view, output="numpy", num_batches=20) as replay:
        yield from replay


@pytest.mark.parametrize("n_step", [1, 3, 5])
def test_n_step_transitions_are_those_of_its_buffer(recorded: dict[str, Any], store: gt.Store, n_step: int) -> None:
    theirs = {name: recorded[f"{name}_{n_step}"] for name in ("obs", "next_obs", "reward", "done", "discount")}
    assert np.all(np.diff(theirs["obs"]) > 0)
    seen = set()
    for batch in sampled(store, gt.Transitions(n_step=n_step, gamma=GAMMA)):
        at = np.searchsorted(theirs["obs"], batch["obs"][:, 0])
        seen.update(at.tolist())
        assert np.array_equal(batch["obs"][:, 0], theirs["obs"][at])
        assert np.array_equal(batch["next_obs"][:, 0], theirs["next_obs"][at])
        np.testing.assert_allclose(batch["reward"], theirs["reward"][at], rtol=1e-5, atol=1e-6)
        assert np.array_equal(batch["terminated"], theirs["done"][at] == 1)
        np.testing.assert_allclose(batch["discount"], (theirs["discount"] * (1 - theirs["done"]))[at], rtol=1e-6)
    assert len(seen) == len(theirs["obs"])  # 40,000 draws of 2,653 steps


def test_stacks_are_those_of_its_vector_environments(recorded: dict[str, Any], store: gt.Store) -> None:
    first = recorded["stacked"][:, -1]
    for batch in sampled(store, gt.Transitions(gamma=GAMMA, frame_stack=STACK)):
        at = np.searchsorted(first, batch["obs"][:, -1, 0])
        assert np.array_equal(batch["obs"][..., 0], recorded["stacked"][at])
        assert np.array_equal(batch["next_obs"][..., 0], recorded["next_stacked"][at])
        assert np.array_equal(batch.mask, recorded["stacked"][at] > 0)
