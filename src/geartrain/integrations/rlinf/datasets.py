"""Reads episodes of LeRobot datasets as trajectories of one environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from geartrain.core.arguments import check_real, check_text
from geartrain.errors import ArgumentError, SchemaError
from geartrain.integrations.transitions.frames import ACTION, DONE, EPISODE, REWARD, frame_count, frames_of


def check_observations(observations: Any) -> dict[str, str]:
    """Names of a trajectory's observations, and of the dataset's entries."""
    if not isinstance(observations, Mapping) or not observations:
        raise ArgumentError(
            "observations are a dict of names in trajectories and entries of the dataset, such as "
            f"{{'states': 'observation.state'}}; found {observations!r}"
        )
    return {
        check_text("a name of an observation", name): check_text("an entry of the dataset", entry)
        for name, entry in observations.items()
    }


def episode_lengths(dataset: Any) -> NDArray[np.int64]:
    """Frames of each episode: by the column of `hf_dataset`, which a `LeRobotDataset` has, or else by all frames."""
    frames = frame_count(dataset)
    columns = getattr(dataset, "hf_dataset", None)
    try:
        episodes = (dataset[at][EPISODE] for at in range(frames)) if columns is None else columns[EPISODE]
        index = np.fromiter((int(each) for each in episodes), np.int64)
    except KeyError:
        raise SchemaError(f"frames of the dataset lack {EPISODE!r}") from None
    begins = np.flatnonzero(np.diff(index, prepend=index[:1] - 1))
    return np.diff(begins, append=len(index))


def trajectories_of(dataset: Any, observations: Mapping[str, str], success_reward: float | None) -> Iterator[Any]:
    """A trajectory (T, 1, ...) of each episode, with `curr_obs`, `next_obs`, `actions`, `rewards` and flags.

    Each frame is read once; the observation that the last one led to is its own.

    Raises:
        SchemaError: a frame lacks an entry.
    """
    wanted = [*observations.values(), ACTION]
    if success_reward is None:
        wanted.append(REWARD)
    else:
        check_real("success_reward", success_reward)
    episode: list[Mapping[str, Any]] = []
    for frame, following in frames_of(dataset, wanted, {REWARD: "; success_reward gives one"}):
        episode.append({name: frame[name] for name in (*wanted, DONE) if name in frame})
        if following is None:
            yield _trajectory(episode, observations, success_reward)
            episode = []


def _trajectory(episode: list[Mapping[str, Any]], observations: Mapping[str, str], success_reward: float | None) -> Any:
    steps = len(episode)

    def stacked(entry: str) -> torch.Tensor:
        return torch.stack([torch.as_tensor(frame[entry]) for frame in episode])[:, None]  # (T, 1, ...)

    current = {name: stacked(entry) for name, entry in observations.items()}
    following = {name: torch.cat([values[1:], values[-1:]]) for name, values in current.items()}
    if success_reward is None:
        rewards = torch.tensor([float(frame[REWARD]) for frame in episode]).view(steps, 1, 1)
    else:
        rewards = torch.zeros(steps, 1, 1)
        rewards[-1] = success_reward
    last = torch.zeros(steps, 1, 1, dtype=torch.bool)
    last[-1] = True
    if success_reward is None and DONE in episode[0]:
        terminations = torch.tensor([bool(frame.get(DONE, False)) for frame in episode]).view(steps, 1, 1)
    else:
        terminations = last.clone()
    return SimpleNamespace(
        max_episode_length=steps,
        model_weights_id="",
        actions=stacked(ACTION),
        rewards=rewards,
        terminations=terminations,
        truncations=last & ~terminations,
        dones=last | terminations,
        curr_obs=current,
        next_obs=following,
    )


__all__ = ["check_observations", "episode_lengths", "trajectories_of"]
