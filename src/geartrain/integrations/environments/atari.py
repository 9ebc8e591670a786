"""Atari 2600 games by the Arcade Learning Environment, whose wheels hold the ROMs: pong, breakout, boxing and 105 more.

One frame is observed at a time, grey and small, so that a store keeps it once; whoever wants a stack of the last few
makes it of the frames behind one another. Four frames of the console pass with each action, and rewards are cut to
their sign, as is usual.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.actors.environments import Arrays, Stepped
from geartrain.errors import SchemaError
from geartrain.integrations.environments import need
from geartrain.schema import Field


def make(
    task: str, n: int = 1, *, size: int = 84, sign_rewards: bool = True, threads: int = 1, **options: Any
) -> AtariEnvironments:
    """n games, stepped together.

    Args:
        task: a ROM's name, as in "space_invaders".
        size: frames are size x size.
        sign_rewards: rewards are -1, 0 or 1; False for the game's own, as to evaluate.
        threads: that step the games.
        options: of `ale_py.AtariVectorEnv`, such as episodic_life=True.

    Raises:
        SchemaError: there is no such ROM.
        MissingDependencyError: ale_py is not installed.
    """
    need("atari")
    from ale_py import roms

    if task not in roms.get_all_rom_ids():
        raise SchemaError(f"there is no ROM named {task!r}; names are in lower case, as in ms_pacman")
    return AtariEnvironments(task, n, size, sign_rewards, threads, options)


class AtariEnvironments:
    """Observes `frame`, (n, size, size) uint8, and `age`, (n,) int32: steps since the episode began."""

    def __init__(self, task: str, n: int, size: int, sign_rewards: bool, threads: int, options: dict[str, Any]) -> None:
        from ale_py.vector_env import AtariVectorEnv

        self.n = n
        self._size = size
        self._made = AtariVectorEnv(
            task,
            n,
            num_threads=threads,
            img_height=size,
            img_width=size,
            stack_num=1,
            reward_clipping=sign_rewards,
            autoreset_mode="SameStep",
            **options,
        )
        self.action_space = self._made.single_action_space
        self._age = np.zeros(n, np.int32)

    def reset(self, seed: int) -> Arrays:
        """As `Environments.reset`. Episodes begin with up to 30 steps of doing nothing, by the seed."""
        self._age[:] = 0
        frames, _ = self._made.reset(seed=np.arange(seed, seed + self.n) % 2**31)
        return self._observation(frames)

    def step(self, actions: Arrays) -> Stepped:
        """As `Environments.step`."""
        frames, reward, terminated, truncated, info = self._made.step(np.asarray(actions, np.int64))
        over = np.asarray(terminated | truncated, bool)
        self._age += 1
        last = frames
        if over.any():  # only those that are over have something in final_obs
            last = np.where(over.reshape(-1, 1, 1, 1), info["final_obs"], frames)
        observation = self._observation(last)
        self._age[over] = 0
        following = self._observation(frames)
        return Stepped(
            observation,
            np.asarray(reward, np.float32).copy(),
            np.array(terminated, bool),
            np.array(truncated, bool),
            following,
            np.ones(self.n, bool),
        )

    def fields(self, max_steps: int) -> dict[str, Field]:
        """As `Environments.fields`."""
        return {
            "observation.frame": Field((max_steps, self._size, self._size), "uint8"),
            "observation.age": Field((max_steps,), "int32"),
            "action": Field((max_steps,), "int64"),
            "reward": Field((max_steps,), "float32"),
        }

    def close(self) -> None:
        """As `Environments.close`."""
        self._made.close()

    def _observation(self, frames: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        return {"frame": frames.reshape(self.n, self._size, self._size).copy(), "age": self._age.copy()}


__all__ = ["AtariEnvironments", "make"]
