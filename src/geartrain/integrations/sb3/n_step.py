"""n-step returns over a store: `NStepReplayBuffer` of Stable-Baselines3."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common import buffers as stock
from stable_baselines3.common.type_aliases import ReplayBufferSamples

from geartrain.core.arguments import check_real, check_whole
from geartrain.integrations.sb3.replay_buffer import ReplayBuffer
from geartrain.integrations.transitions.draws import DrawnWindows
from geartrain.integrations.transitions.layout import DONE, FLAGS, REWARD, TIMEOUT, TRANSITION


class NStepReplayBuffer(ReplayBuffer, stock.NStepReplayBuffer):
    """`stable_baselines3.common.buffers.NStepReplayBuffer` over a store; see `ReplayBuffer`.

    Rewards are summed at most to the end of the episode. A sum never crosses transitions that were not added as one
    episode. The newest n_steps - 1 transitions of an environment are drawn once n_steps have been added after them.

    Args:
        n_steps: number of rewards to sum.
        gamma: discount of a step, from 0 to 1.
    """

    def __init__(self, *args: Any, n_steps: int = 3, gamma: float = 0.99, **kwargs: Any) -> None:
        check_whole("n_steps", n_steps, 1)
        check_real("gamma", gamma, 0, 1)
        self.n_steps = n_steps
        self.gamma = gamma
        self.reach = n_steps
        super().__init__(*args, **kwargs)

    def samples_of(self, windows: DrawnWindows, env: Any) -> ReplayBufferSamples:
        """With the discount of each next observation."""
        flags = windows.fields[FLAGS][:, 1:]
        count = summed_steps(flags)
        every = np.arange(len(count))
        last = flags[every, count - 1]
        rewards = self._normalize_reward(windows.fields[REWARD][:, 1:], env)
        powers = float(self.gamma) ** np.arange(self.n_steps + 1, dtype=np.float32)
        summed = np.where(np.arange(self.n_steps) < count[:, None], rewards, 0) * powers[:-1]
        return self.as_samples(
            windows,
            self.observed(windows, 0, env),
            self.observed(windows, count, env),
            last,
            summed.sum(1, keepdims=True, dtype=np.float32),
            powers[count].astype(np.float32).reshape(-1, 1),
        )


def summed_steps(flags: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Transitions of each window up to the first that ends its episode or that nothing continues; flags are (B, n)."""
    stops = (flags & (DONE | TIMEOUT)) != 0
    stops[:, :-1] |= (flags[:, 1:] & TRANSITION) == 0
    stops[:, -1] = True
    count: NDArray[np.int64] = stops.argmax(1) + 1
    return count


__all__ = ["NStepReplayBuffer"]
