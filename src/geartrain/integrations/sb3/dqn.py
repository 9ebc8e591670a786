"""Stable-Baselines3's DQN with prioritized experience replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from stable_baselines3 import DQN
from torch.nn import functional

from geartrain.errors import ArgumentError
from geartrain.integrations.sb3.prioritized import PrioritizedReplayBuffer


class PrioritizedDQN(DQN):
    """`stable_baselines3.DQN` with a `PrioritizedReplayBuffer`: weights its loss and updates priorities by TD errors.

    Args:
        policy, env, learning_rate, gamma, options: as of `DQN`.
        n_steps: steps of returns. Both `n_steps` and `gamma` are passed to the buffer.
        replay_buffer_class: `PrioritizedReplayBuffer` or a class derived from it.
        replay_buffer_kwargs: `alpha`, `beta`, `final_beta`, `min_priority`, and those of `ReplayBuffer`.

    Raises:
        ArgumentError: another kind of buffer.

    Example:
        >>> from geartrain.integrations.sb3 import PrioritizedDQN
        >>> model = PrioritizedDQN("MlpPolicy", "CartPole-v1", buffer_size=10_000, replay_buffer_kwargs={"alpha": 0.5})
        >>> model.replay_buffer.alpha
        0.5
        >>> model.replay_buffer.close()
    """

    def __init__(
        self,
        policy: Any,
        env: Any,
        learning_rate: Any = 1e-4,
        *,
        gamma: float = 0.99,
        n_steps: int = 1,
        replay_buffer_class: type[Any] | None = None,
        replay_buffer_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        chosen = PrioritizedReplayBuffer if replay_buffer_class is None else replay_buffer_class
        if not (isinstance(chosen, type) and issubclass(chosen, PrioritizedReplayBuffer)):
            raise ArgumentError(f"PrioritizedDQN needs a PrioritizedReplayBuffer, found replay_buffer_class={chosen!r}")
        super().__init__(
            policy,
            env,
            learning_rate,
            gamma=gamma,
            replay_buffer_class=chosen,
            replay_buffer_kwargs={"n_steps": n_steps, "gamma": gamma, **(replay_buffer_kwargs or {})},
            **options,
        )

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Gradient steps, each on a batch drawn by priority, whose TD errors become its priorities."""
        buffer: Any = self.replay_buffer
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        losses = []
        for _ in range(gradient_steps):
            batch = buffer.sample(batch_size, env=self._vec_normalize_env)
            discounts = self.gamma if batch.discounts is None else batch.discounts
            with torch.no_grad():
                future = self.q_net_target(batch.next_observations).max(dim=1, keepdim=True).values
                target = batch.rewards + (1 - batch.dones) * discounts * future
            value = self.q_net(batch.observations).gather(1, batch.actions.long())
            loss = (batch.weights * functional.smooth_l1_loss(value, target, reduction="none")).mean()
            self.policy.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
            buffer.update_priorities(batch.keys, target - value, self._current_progress_remaining)
            losses.append(loss.item())
        self._n_updates += gradient_steps
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/loss", np.mean(losses))
        self.logger.record("train/beta", buffer.beta)


__all__ = ["PrioritizedDQN"]
