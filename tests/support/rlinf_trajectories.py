"""Trajectories as RLinf has them, whose samples are numbered, and the check that a batch has them whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

#: Samples of one environment of one trajectory are numbered from a multiple of this on.
STRIDE = 1000


def trajectory(
    number: int, steps: int = 8, environments: int = 3, length: int = 5, epochs: int = 1, kind: Any = SimpleNamespace
) -> Any:
    """Sample t of environment b is number * 10 * STRIDE + b * STRIDE + t; after `length` steps an episode ends.

    Its next observation is one further, also where an episode ends and the next current observation is another one.
    """
    t = torch.arange(steps)[:, None]
    label = (number * 10 * STRIDE + torch.arange(environments) * STRIDE + t).float()  # (T, B)
    over = (t % length == length - 1).expand(steps, environments)

    def observations(step: int) -> dict[str, torch.Tensor]:
        # An episode's observations are numbered on from 0.5, so that none continues the one before.
        where = label + 0.5 * (t // length) + step
        return {
            "states": torch.stack([where, -where], 2),
            "images": (where.long() % 251).to(torch.uint8)[..., None, None, None].expand(-1, -1, 4, 4, 3).contiguous(),
        }

    def with_ends(flags: torch.Tensor) -> torch.Tensor:
        if not epochs:
            return flags[..., None].clone()
        parts = flags[..., None].reshape(epochs, steps // epochs, environments, 1)
        return torch.cat([torch.zeros_like(parts[:, :1]), parts], 1).flatten(0, 1)

    return kind(
        max_episode_length=length,
        model_weights_id=f"weights-{number}",
        actions=torch.stack([label, label + 0.25], 2),
        rewards=(label / 2)[..., None],
        dones=with_ends(over),
        terminations=with_ends(over & (t % 2 == 0)),
        truncations=with_ends(over & (t % 2 == 1)),
        prev_logprobs=None,
        versions=label[..., None].to(torch.bfloat16),
        forward_inputs={"action": label[..., None], "text": "not kept"},
        curr_obs=observations(0),
        next_obs=observations(1),
    )


def check(batch: Any, length: int = 5) -> torch.Tensor:
    """Every part of a sample is of the same one. Returns their numbers."""
    label = batch["actions"][:, 0]
    t = label.long() % STRIDE
    where = label + 0.5 * (t // length)
    assert torch.equal(batch["actions"][:, 1], label + 0.25)
    assert torch.equal(batch["rewards"][:, 0], label / 2)
    assert torch.equal(batch["versions"][:, 0], label.to(torch.bfloat16))
    assert torch.equal(batch["forward_inputs"]["action"][:, 0], label)
    for group, seen in (("curr_obs", where), ("next_obs", where + 1)):
        assert torch.equal(batch[group]["states"], torch.stack([seen, -seen], 1))
        assert torch.equal(batch[group]["images"][:, 0, 0, 0], (seen.long() % 251).to(torch.uint8))
        assert batch[group]["images"].shape == (len(label), 4, 4, 3)
    over = t % length == length - 1
    assert torch.equal(batch["dones"][:, 0], over)
    assert torch.equal(batch["terminations"][:, 0], over & (t % 2 == 0))
    assert torch.equal(batch["truncations"][:, 0], over & (t % 2 == 1))
    return label


def labels(numbers: Any, steps: int = 8, environments: int = 3) -> set[float]:
    """Numbers of all samples of some trajectories."""
    return {float(n * 10 * STRIDE + b * STRIDE + t) for n in numbers for b in range(environments) for t in range(steps)}


def drawn(buffer: Any, rounds: int = 12, size: int = 24) -> set[float]:
    """Numbers of the samples in some batches."""
    return {float(each) for _ in range(rounds) for each in check(buffer.sample(size))}


__all__ = ["STRIDE", "check", "drawn", "labels", "trajectory"]
