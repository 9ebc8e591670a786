"""Transitions for LeRobot's replay buffer: numbered ones, and the check that a batch has them whole."""

from __future__ import annotations

from typing import Any

import torch

from geartrain.integrations.lerobot import ReplayBuffer

STATE, IMAGE = "observation.state", "observation.image"


def state(t: float) -> dict[str, torch.Tensor]:
    return {STATE: torch.tensor([[t, -t]]), IMAGE: torch.full((1, 3, 4, 4), t % 200 / 255)}


def fill(buffer: Any, steps: int, length: int = 7, first: int = 0, cut: bool = False, **infos: Any) -> None:
    """Adds steps whose numbers follow each other; after an episode's end they go on 50 further."""
    t = float(first)
    for step in range(steps):
        over = step % length == length - 1
        buffer.add(
            state(t), torch.tensor([[t, 1.0]]), t / 2, state(t + 1), over and not cut, over and cut, infos or None
        )
        t += 50 if over else 1


def check(batch: Any) -> torch.Tensor:
    """Every part of a transition is of the same one. Returns their numbers."""
    t = batch["state"][STATE][:, 0]
    assert torch.equal(batch["state"][STATE][:, 1], -t)
    assert torch.equal(batch["next_state"][STATE], batch["state"][STATE] + torch.tensor([1.0, -1.0]))
    assert torch.equal(batch["action"], torch.stack([t, torch.ones_like(t)], 1))
    assert torch.equal(batch["reward"], t / 2)
    return t


def make(capacity: int = 300, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(capacity, "cpu", [STATE, IMAGE], **{"use_drq": False, **options})
