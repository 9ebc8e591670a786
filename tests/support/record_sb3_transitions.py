"""Records what Stable-Baselines3 makes of random episodes: n-step transitions of `NStepReplayBuffer`, frame stacks.

    python tests/support/record_sb3_transitions.py tests/replay/sb3_transitions.npz

Runs in an environment with stable-baselines3, without geartrain; 2.9.2 made the file that is checked in. An observation
is the number of its frame, 1, 2, 3, ... over all episodes, so that a transition names its step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

EPISODES, GAMMA, STACK = 400, 0.9, 4
N_STEPS = (1, 3, 5)


def main(path: Path) -> None:
    """Plays the episodes into SB3's buffers and writes what it made of them."""
    from gymnasium import spaces
    from stable_baselines3.common.buffers import NStepReplayBuffer
    from stable_baselines3.common.vec_env.stacked_observations import StackedObservations

    random = np.random.default_rng(20261122)
    lengths = random.integers(1, 13, EPISODES)
    steps = int(lengths.sum())
    rewards = random.standard_normal(steps).astype(np.float32)
    ends = np.cumsum(lengths) - 1
    terminated, truncated = np.zeros(steps, bool), np.zeros(steps, bool)
    by_rules = random.random(EPISODES) < 0.5
    terminated[ends[by_rules]] = truncated[ends[~by_rules]] = True
    space = spaces.Box(0, np.inf, (1,), np.float32)
    buffers = {n: NStepReplayBuffer(steps, space, spaces.Discrete(2), "cpu", n_steps=n, gamma=GAMMA) for n in N_STEPS}
    stacks = StackedObservations(1, STACK, spaces.Box(0, 1e6, (1, 1, 1), np.float32), channels_order="first")
    stacked, next_stacked = np.zeros((steps, STACK), np.float32), np.zeros((steps, STACK), np.float32)
    frame, at = 0, 0
    for length in lengths:
        frame += 1
        now = stacks.reset(np.full((1, 1, 1, 1), frame, np.float32))
        for t in range(length):
            done = t == length - 1
            frame += 1
            following = np.full((1, 1), frame, np.float32)
            for buffer in buffers.values():
                buffer.add(
                    following - 1,
                    following,
                    np.zeros((1, 1)),
                    rewards[at : at + 1],
                    np.array([done]),
                    [{"TimeLimit.truncated": bool(truncated[at])}],
                )
            infos: list[dict[str, Any]] = [{"terminal_observation": following.reshape(1, 1, 1)}] if done else [{}]
            then, infos = stacks.update(following.reshape(1, 1, 1, 1), np.array([done]), infos)
            stacked[at] = now.reshape(STACK)
            next_stacked[at] = (infos[0]["terminal_observation"] if done else then).reshape(STACK)
            now, at = then.copy(), at + 1
    made: dict[str, Any] = {}
    for n, buffer in buffers.items():
        found = buffer._get_samples(np.arange(steps))
        made[f"obs_{n}"] = found.observations.numpy()[:, 0]
        made[f"next_obs_{n}"] = found.next_observations.numpy()[:, 0]
        made[f"reward_{n}"] = found.rewards.numpy()[:, 0]
        made[f"done_{n}"] = found.dones.numpy()[:, 0]
        discounts = getattr(found, "discounts", None)
        made[f"discount_{n}"] = np.full(steps, GAMMA, np.float32) if discounts is None else discounts.numpy()[:, 0]
    np.savez_compressed(
        path,
        lengths=lengths.astype(np.int32),
        rewards=rewards,
        terminated=terminated,
        truncated=truncated,
        stacked=stacked,
        next_stacked=next_stacked,
        **made,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
