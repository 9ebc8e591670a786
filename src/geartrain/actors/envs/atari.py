"""Atari 2600 games by the Arcade Learning Environment, whose wheels include the ROMs: pong, breakout and 106 more.

An observation is one small grey frame, so a store keeps each frame once. Frame stacks are built from consecutive steps
when batches are drawn.

The preprocessing is the usual one:

- Each action lasts four frames of the console.
- Each pixel is the maximum over the last two frames, because sprites flicker.
- Rewards are clipped to their sign.
- Episodes begin with up to 30 no-op actions, and with the fire button if the game has one.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.actors.envs import need
from geartrain.actors.envs.adapters import Arrays, StepResult
from geartrain.core.schema import Field
from geartrain.errors import ArgumentError

#: Frames of the console for each action, and the longest episode in actions: half an hour.
FRAME_SKIP, MAX_ACTIONS, MAX_IDLE = 4, 27_000, 30
#: What the console shows.
HEIGHT, WIDTH = 210, 160


def make(
    task: str, n: int = 1, *, shrink: tuple[int, int] = (5, 4), sign_rewards: bool = True, sticky: float = 0.0
) -> AtariEnvironments:
    """n games, stepped one after the other.

    Args:
        task: a ROM's name, as in "space_invaders".
        shrink: so many lines and columns become one pixel, their mean: (5, 4) makes 42 x 40, (2, 2) makes 105 x 80.
        sign_rewards: rewards are -1, 0 or 1; False for the game's own, as to evaluate.
        sticky: how likely the console takes the last action once more instead of the new one.

    Raises:
        ArgumentError: there is no such ROM, or the picture cannot be divided so.
        MissingDependencyError: ale_py is not installed.
    """
    need("atari")
    from ale_py import roms

    if task not in roms.get_all_rom_ids():
        raise ArgumentError(f"there is no ROM named {task!r}; names are in lower case, as in ms_pacman")
    if min(shrink) < 1 or HEIGHT % shrink[0] or WIDTH % shrink[1]:
        raise ArgumentError(f"shrink must divide {HEIGHT} lines and {WIDTH} columns, found {shrink}")
    return AtariEnvironments(task, n, shrink, sign_rewards, sticky)


class AtariEnvironments:
    """Observes `frame`, (n, height, width) uint8, and `age`, (n,) int32: actions since the episode began.

    Attributes:
        actions: number of discrete actions: the joystick's actions that have an effect in the game.
    """

    def __init__(self, task: str, n: int, shrink: tuple[int, int], sign_rewards: bool, sticky: float) -> None:
        self.n = n
        self._games = [_Game(task, shrink, sticky) for _ in range(n)]
        self.actions = len(self._games[0].actions)
        self.frame_shape = (HEIGHT // shrink[0], WIDTH // shrink[1])
        self._sign = sign_rewards

    def reset(self, seed: int) -> Arrays:
        """As `VectorEnv.reset`."""
        for number, game in enumerate(self._games):
            game.rng = np.random.default_rng(seed + number)
            game.reset()
        return self._obs()

    def step(self, actions: Arrays) -> StepResult:
        """As `VectorEnv.step`."""
        reward = np.array([game.step(int(a)) for game, a in zip(self._games, actions, strict=True)], np.float32)
        terminated = np.array([game.is_over for game in self._games])
        truncated = np.array([game.age >= MAX_ACTIONS for game in self._games]) & ~terminated
        obs = following = self._obs()
        if (terminated | truncated).any():
            for number in np.flatnonzero(terminated | truncated):
                self._games[number].reset()
            following = self._obs()
        if self._sign:
            reward = np.sign(reward)
        return StepResult(obs, reward, terminated, truncated, following, np.ones(self.n, bool))

    def fields(self) -> dict[str, Field]:
        """As `VectorEnv.fields`."""
        return {
            "obs.frame": Field(self.frame_shape, "uint8"),
            "obs.age": Field((), "int32"),
            "action": Field((), "int64"),
            "reward": Field((), "float32"),
        }

    def close(self) -> None:
        """As `VectorEnv.close`."""
        self._games = []

    def _obs(self) -> dict[str, NDArray[Any]]:
        frames = np.stack([game.frame for game in self._games])
        return {"frame": frames, "age": np.array([game.age for game in self._games], np.int32)}


class _Game:
    """One console."""

    def __init__(self, task: str, shrink: tuple[int, int], sticky: float) -> None:
        import ale_py
        from ale_py import roms

        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self._console = ale_py.ALEInterface()
        self._console.setInt("random_seed", 0)
        self._console.setFloat("repeat_action_probability", sticky)
        rom = roms.get_rom_path(task)
        assert rom is not None  # make() has looked
        self._console.loadROM(rom)
        self.actions = list(self._console.getMinimalActionSet())
        self._fire = [action for action in self.actions if action == ale_py.Action.FIRE]
        self._shrink = shrink
        self._screens = np.zeros((2, HEIGHT, WIDTH), np.uint8)
        self.rng = np.random.default_rng(0)
        self.is_over, self.age = False, 0
        self.frame = np.zeros((HEIGHT // shrink[0], WIDTH // shrink[1]), np.uint8)

    def reset(self) -> None:
        self._console.reset_game()
        for action in [self.actions[0]] * int(self.rng.integers(1, MAX_IDLE + 1)) + self._fire:
            self._act(action)
            if self._console.game_over():
                self._console.reset_game()
        self.is_over, self.age = False, 0

    def step(self, action: int) -> float:
        reward = self._act(self.actions[action])
        self.age += 1
        self.is_over = bool(self._console.game_over())
        return reward

    def _act(self, action: Any) -> float:
        reward = 0.0
        for frame in range(FRAME_SKIP):
            reward += self._console.act(action)
            if frame >= FRAME_SKIP - 2:
                self._console.getScreenGrayscale(self._screens[frame - FRAME_SKIP + 2])
        lines, columns = self._shrink
        seen = np.maximum(*self._screens)
        # Slices that are added take a sixth of the time of a mean over two short axes.
        rows = functools.reduce(np.add, [seen[line::lines].astype(np.uint32) for line in range(lines)])
        sums = functools.reduce(np.add, [rows[:, column::columns] for column in range(columns)])
        self.frame = (sums // (lines * columns)).astype(np.uint8)
        return reward


__all__ = ["AtariEnvironments", "make"]
