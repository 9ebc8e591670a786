"""Hindsight experience replay over a store: `HerReplayBuffer` of Stable-Baselines3."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.type_aliases import DictReplayBufferSamples
from stable_baselines3.her import her_replay_buffer as stock
from stable_baselines3.her.goal_selection_strategy import KEY_TO_GOAL_STRATEGY, GoalSelectionStrategy

from geartrain.core.arguments import check_choice, check_type, check_whole
from geartrain.core.global_generators import drawing
from geartrain.errors import ArgumentError
from geartrain.integrations.sb3.replay_buffer import DictReplayBuffer
from geartrain.integrations.transitions.draws import DrawnWindows
from geartrain.integrations.transitions.layout import INFO, REWARD, count_of, environment_of, writer_of
from geartrain.integrations.transitions.writer import unpacked_infos
from geartrain.replay.fetch import fetch

_ACHIEVED, _DESIRED = "achieved_goal", "desired_goal"


class HerReplayBuffer(DictReplayBuffer, stock.HerReplayBuffer):
    """`stable_baselines3.HerReplayBuffer` over a store; see `ReplayBuffer`.

    Transitions of completed episodes of all processes are drawn, each with the same probability. Goals are drawn from
    NumPy's global generator.

    Args:
        env: the training environment, whose `compute_reward` gives the rewards of other goals.
        n_sampled_goal: number of relabelled transitions for each one with its original goal.
        goal_selection_strategy: "future", "final" or "episode".
        copy_info_dict: keep infos, without "terminal_observation", and pass them to `compute_reward`. Each takes
            `info_bytes`, by default 1024.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        env: Any,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: GoalSelectionStrategy | str = "future",
        copy_info_dict: bool = False,
        **options: Any,
    ) -> None:
        check_whole("n_sampled_goal", n_sampled_goal, 0)
        if copy_info_dict:
            options.setdefault("info_bytes", 1024)
        strategy = goal_selection_strategy
        if isinstance(strategy, str):
            strategy = KEY_TO_GOAL_STRATEGY[
                check_choice("goal_selection_strategy", strategy.lower(), KEY_TO_GOAL_STRATEGY)
            ]
        check_type(f"goal_selection_strategy is one of {list(GoalSelectionStrategy)}", strategy, GoalSelectionStrategy)
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
            **options,
        )
        self.env = env
        self.copy_info_dict = copy_info_dict
        self.goal_selection_strategy = strategy
        self.n_sampled_goal = n_sampled_goal
        self.her_ratio = 1 - (1.0 / (n_sampled_goal + 1))
        self._current_ep_start = np.zeros(self.n_envs, np.int64)

    def __getstate__(self) -> dict[str, Any]:
        """As of `ReplayBuffer`, without the environment, which `set_env` gives anew."""
        state = super().__getstate__()
        del state["env"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.env = None

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        super().add(obs, next_obs, action, reward, done, infos)
        ended = np.asarray(done).reshape(self.n_envs)
        if ended.any():
            self._current_ep_start[ended != 0] = self.pos

    def reset(self) -> None:
        super().reset()
        self._current_ep_start[:] = 0

    def sample(self, batch_size: int, env: Any = None) -> DictReplayBufferSamples:
        """A batch of transitions of completed episodes, most of them with other goals; see `ReplayBuffer.sample`.

        Raises:
            RuntimeError: no episode was completed yet.
        """
        check_whole("batch_size", batch_size, 1)
        self.index.refresh()
        episodes = self.index.episodes()
        if not len(episodes):
            raise RuntimeError(
                "Unable to sample before the end of the first episode. We recommend choosing a value for "
                "learning_starts that is greater than the maximum number of timesteps in the environment."
            )
        # In the order in which Stable-Baselines3 draws and hands out, so that seeds mean the same.
        relabelled = int(self.her_ratio * batch_size)
        with drawing:
            drawn = np.random.randint(0, len(episodes), size=batch_size)
        drawn = np.roll(drawn, -relabelled)
        number, first, length = episodes.at(drawn)
        windows = self.windows_of(number)
        if relabelled:
            self._relabel(windows, slice(batch_size - relabelled, batch_size), number, first, length)
        return self.samples_of(windows, env)

    def _relabel(
        self,
        windows: DrawnWindows,
        which: slice,
        number: NDArray[np.int64],
        first: NDArray[np.int64],
        length: NDArray[np.int64],
    ) -> None:
        """Gives windows the goals that their episodes achieved, and the rewards that they then bring."""
        number, first, length = number[which], first[which], length[which]
        if self.goal_selection_strategy is GoalSelectionStrategy.FINAL:
            chosen = length - 1
        else:
            future = self.goal_selection_strategy is GoalSelectionStrategy.FUTURE
            with drawing:
                chosen = np.random.randint(number - first if future else 0, length)
        keys, step = self.index.find(first + chosen)
        field = self.observation_fields[_ACHIEVED][0]
        goals = fetch(self.store, keys, fields=[field], window=1, ends=step, output="numpy")[field][:, 0]
        fields = windows.fields
        fields[self.observation_fields[_DESIRED][0]][which, :2] = goals[:, None]
        if self.env is None:
            raise ArgumentError("HerReplayBuffer needs an environment for the rewards of other goals: set_env(env)")
        if self.copy_info_dict:
            keys, step = self.index.find(number)
            packed: Any = fetch(self.store, keys, fields=[INFO], window=1, ends=step, output="numpy")[INFO]
            infos = unpacked_infos(packed[:, 0])
        else:
            infos = [{} for _ in range(len(number))]
        rewards = self.env.env_method("compute_reward", fields[field][which, 1], goals, infos, indices=[0])[0]
        fields[REWARD][which, 1] = rewards

    def truncate_last_trajectory(self) -> None:
        """Ends the episodes that are in progress, so that they can be drawn; their last steps count as truncated."""
        unfinished = np.flatnonzero(self._current_ep_start != self.pos)
        if not len(unfinished):
            return
        warnings.warn(
            "The last trajectory in the replay buffer will be truncated.\n"
            "If you are in the same episode as when the replay buffer was saved,\n"
            "you should use `truncate_last_trajectory=False` to avoid that issue.",
            stacklevel=2,
        )
        self.dones[self.pos - 1, unfinished] = True
        if self.handle_timeout_termination:
            self.timeouts[self.pos - 1, unfinished] = True
        self._current_ep_start[unfinished] = self.pos

    # --- by position, for inspection --------------------------------------------------------------------------

    @property
    def ep_start(self) -> NDArray[np.int64]:
        """Position of the first transition of each one's episode, (buffer_size, n_envs); 0 where it goes on."""
        return self._of_episodes(lambda first, length: first % self.buffer_size)

    @property
    def ep_length(self) -> NDArray[np.int64]:
        """Length of each one's episode, (buffer_size, n_envs); 0 where it goes on."""
        return self._of_episodes(lambda first, length: length)

    def _of_episodes(self, value: Any) -> NDArray[np.int64]:
        found = np.zeros((self.buffer_size, self.n_envs), np.int64)
        self.index.refresh()
        episodes = self.index.episodes()
        runs = episodes.runs
        for run, (first, length) in enumerate(zip(count_of(episodes.first), episodes.length, strict=True)):
            if writer_of(runs.number[run]) == self.writer.writer:
                counts = count_of(runs.number[run]) + np.arange(runs.length[run])
                kept = counts >= self.writer.count - self.buffer_size
                found[counts[kept] % self.buffer_size, environment_of(runs.number[run])] = value(first, length)
        return found

    @property
    def infos(self) -> NDArray[Any]:
        """Infos by position and environment, (buffer_size, n_envs) of dicts: empty ones without `copy_info_dict`."""
        if not self.copy_info_dict:
            return np.array([[{} for _ in range(self.n_envs)] for _ in range(self.buffer_size)])
        packed = self.positions.read(INFO)
        return np.array([unpacked_infos(row) for row in packed])


__all__ = ["HerReplayBuffer"]
