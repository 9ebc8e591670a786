"""Transitions equal what torchrl's `MultiStep` and `CatFrames` make of the same episodes.

flashbax has neither n-step returns nor stacks of its own; what it has, its own tests judge
(`make upstream PROJECT=flashbax`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_transitions_sb3 import GAMMA, STACK, recorded, sampled, store

import geartrain as gt

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")
pytest.importorskip("torchrl")

__all__ = ["recorded", "store"]  # fixtures


def episodes_of(recorded: dict[str, Any]) -> Any:
    """(1, steps) of all episodes one after the other, as a collector of one environment gives them."""
    lengths = recorded["lengths"]
    first = np.repeat(np.cumsum(np.concatenate([[1], lengths[:-1] + 1])), lengths)  # an episode's first frame
    within = np.concatenate([np.arange(length) for length in lengths])
    frame = torch.from_numpy((first + within).astype(np.float32))[None, :, None]
    done = torch.from_numpy(recorded["terminated"] | recorded["truncated"])[None, :, None]
    following = {"obs": frame + 1, "reward": torch.from_numpy(recorded["rewards"])[None, :, None], "done": done}
    following["terminated"] = torch.from_numpy(recorded["terminated"])[None, :, None]
    shape = [1, len(within)]
    made = tensordict.TensorDict({"obs": frame, "next": tensordict.TensorDict(following, shape)}, shape)
    made.names = [None, "time"]
    return made


@pytest.mark.parametrize("n_step", [1, 3, 5])
def test_n_step_transitions_are_those_of_its_transform(recorded: dict[str, Any], store: gt.Store, n_step: int) -> None:
    from torchrl.data.postprocs import MultiStep

    given = episodes_of(recorded)
    terminated = given["next", "terminated"][0, :, 0].numpy()
    theirs = MultiStep(gamma=GAMMA, n_steps=n_step)(given)[0]
    first = theirs["obs"][:, 0].numpy()
    steps = theirs["steps_to_next_obs"].reshape(-1).numpy()
    assert np.all(np.diff(first) > 0) and steps.max() == n_step
    ended = terminated[np.arange(len(first)) + steps - 1]
    for batch in sampled(store, gt.Transitions(n_step=n_step, gamma=GAMMA)):
        at = np.searchsorted(first, batch["obs"][:, 0])
        assert np.array_equal(batch["obs"][:, 0], first[at])
        assert np.array_equal(batch["next_obs"][:, 0], theirs["next", "obs"][:, 0].numpy()[at])
        np.testing.assert_allclose(
            batch["reward"], theirs["next", "reward"][:, 0].numpy()[at], rtol=1e-5, atol=1e-6, strict=True
        )
        assert np.array_equal(batch["terminated"], ended[at])
        discount = theirs["gamma"].reshape(-1).numpy()[at] * ~ended[at]
        np.testing.assert_allclose(batch["discount"], discount, rtol=1e-6)


def test_stacks_are_those_of_its_transform(recorded: dict[str, Any], store: gt.Store) -> None:
    from torchrl.envs.transforms import CatFrames

    frames = CatFrames(STACK, dim=-1, in_keys=["obs", ("next", "obs")], padding="constant", padding_value=0)
    theirs = frames(episodes_of(recorded))[0]
    stacks, following = theirs["obs"].numpy(), theirs["next", "obs"].numpy()
    assert stacks.shape[-1] == following.shape[-1] == STACK
    for batch in sampled(store, gt.Transitions(gamma=GAMMA, frame_stack=STACK)):
        at = np.searchsorted(stacks[:, -1], batch["obs"][:, -1, 0])
        assert np.array_equal(batch["obs"][..., 0], stacks[at])
        assert np.array_equal(batch["next_obs"][..., 0], following[at])
