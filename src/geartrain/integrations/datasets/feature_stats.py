"""Statistics of features for LeRobot datasets: of each episode, and of the whole dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from geartrain.integrations.datasets.episode import Array

_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


def episode_stats(values: Array, starts: Array, ends: Array, *, image: bool) -> dict[str, Array]:
    """min, max, mean, std, count and quantiles of each episode, (episodes, ...).

    Args:
        values: (steps, *shape) of all episodes behind each other.
        starts: (episodes,) first step of each.
        ends: (episodes,) one past the last.
        image: values are pixels (height, width, channels): the figures are those of a channel, (channels, 1, 1), of
            pixels from 0 to 1.
    """
    found: dict[str, list[Array]] = {name: [] for name in ("min", "max", "mean", "std", "count", *_QUANTILES)}
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        for name, figure in (_of_pixels if image else _of_steps)(values[start:end]).items():
            found[name].append(figure)
    return {name: np.stack(figures) for name, figures in found.items()}


class FeatureStats:
    """Statistics of all episodes, accumulated. Quantiles are means of the episodes' quantiles, weighted by steps."""

    def __init__(self) -> None:
        self._count = 0
        self._least: Array | None = None
        self._most: Array | None = None
        self._mean: Any = 0.0
        self._squares: Any = 0.0
        self._quantiles: dict[str, Any] = dict.fromkeys(_QUANTILES, 0.0)

    def add(self, stats: Mapping[str, Array]) -> None:
        """Adds episodes, as `episode_stats` gives them."""
        for at in range(len(stats["count"])):
            count = int(stats["count"][at, 0])
            total = self._count + count
            least, most, mean = stats["min"][at], stats["max"][at], stats["mean"][at]
            self._least = least if self._least is None else np.minimum(self._least, least)
            self._most = most if self._most is None else np.maximum(self._most, most)
            apart = mean - self._mean
            self._squares = self._squares + stats["std"][at] ** 2 * count + apart**2 * (self._count * count / total)
            self._mean = self._mean + apart * (count / total)
            for name in _QUANTILES:
                self._quantiles[name] = self._quantiles[name] + (stats[name][at] - self._quantiles[name]) * (
                    count / total
                )
            self._count = total

    def as_json(self) -> dict[str, Any]:
        """Lists, by the names that LeRobot has."""
        assert self._least is not None
        assert self._most is not None
        figures = {
            "min": self._least,
            "max": self._most,
            "mean": self._mean,
            "std": np.sqrt(self._squares / self._count),
            "count": np.array([self._count]),
            **self._quantiles,
        }
        return {name: np.asarray(figure).tolist() for name, figure in figures.items()}


def _of_steps(values: Array) -> dict[str, Array]:
    """Figures of each element of a step, in double precision; of a number a step: (1,)."""
    steps = values.astype(np.float64)
    if steps.ndim == 1:
        steps = steps[:, None]
    ordered = dict(zip(_QUANTILES, np.quantile(steps, list(_QUANTILES.values()), axis=0), strict=True))
    return {
        "min": steps.min(0),
        "max": steps.max(0),
        "mean": steps.mean(0),
        "std": steps.std(0),
        "count": np.array([len(steps)]),
        **ordered,
    }


def _of_pixels(frames: Array) -> dict[str, Array]:
    """Figures of each channel, exactly, from how often each of the 256 values is there."""
    found: dict[str, list[float]] = {name: [] for name in ("min", "max", "mean", "std", *_QUANTILES)}
    grades = np.arange(256) / 255.0
    for channel in range(frames.shape[-1]):
        counts = np.bincount(frames[..., channel].ravel(), minlength=256)
        share = counts / counts.sum()
        there = np.flatnonzero(counts)
        mean = float(share @ grades)
        found["min"].append(float(grades[there[0]]))
        found["max"].append(float(grades[there[-1]]))
        found["mean"].append(mean)
        found["std"].append(float(np.sqrt(share @ (grades - mean) ** 2)))
        below = np.cumsum(share)
        for name, quantile in _QUANTILES.items():
            found[name].append(float(grades[min(255, int(np.searchsorted(below, quantile)))]))
    figures = {name: np.array(values).reshape(-1, 1, 1) for name, values in found.items()}
    return {**figures, "count": np.array([len(frames)])}


__all__ = ["FeatureStats", "episode_stats"]
