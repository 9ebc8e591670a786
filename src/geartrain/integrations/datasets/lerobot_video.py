"""Finds the video file and the times of each frame of a LeRobot dataset's video features.

    videos/observation.images.top/chunk-000/file-000.mp4              v3: many episodes behind each other
    videos/chunk-000/observation.images.top/episode_000000.mp4        v2: one

For each camera of an episode, meta/episodes of v3 has the file and the times where the episode begins and ends in it. A
step's frame is the episode's frame nearest to its `timestamp`, counted from that beginning. It may be no further away
than the tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.errors import SourceError
from geartrain.integrations.datasets.episode import Array


@dataclass(frozen=True)
class VideoPlace:
    """Part of a video file that is one episode of one camera.

    Attributes:
        path: the file.
        start_s: time in the file where it begins, in seconds.
        end_s: time where it ends; None for the file's end.
    """

    path: Path
    start_s: float = 0.0
    end_s: float | None = None

    def part_of(self, fps: float) -> tuple[float, float]:
        """Times between which its frames are shown: from half a frame before its beginning to half a frame before its
        end, since either may be rounded."""
        half = 0.5 / fps
        return self.start_s - half, np.inf if self.end_s is None else self.end_s - half

    def frame_times(self, timestamps: Array, fps: float, tolerance_s: float, place: str) -> Array:
        """Times of an episode's frames in the file, (T,) in seconds.

        Args:
            timestamps: (T,) of the steps, in seconds from the episode's beginning.
            fps: frames a second, of the dataset.
            tolerance_s: of frames.
            place: for messages.

        Raises:
            SourceError: they are no real numbers, not in order, or not all in this part.
        """
        if timestamps.dtype.kind not in "iuf" or timestamps.ndim != 1:
            raise SourceError(
                f"{place}: timestamp is a real number for each step, the data files have {timestamps.dtype}"
            )
        times: Array = self.start_s + timestamps.astype(np.float64)
        ordered = np.isfinite(times)
        ordered[1:] &= np.diff(times) >= 0
        if not ordered.all():
            step = int(np.argmin(ordered))
            raise SourceError(
                f"{place}: step {step} has the timestamp {timestamps[step]!s}, expected none before that of the step "
                f"in front of it"
            )
        end_s = np.inf if self.end_s is None else self.end_s
        inside = (times > self.start_s - tolerance_s) & (times + 0.5 / fps < end_s + tolerance_s)
        if not inside.all():
            raise SourceError(
                f"{place}: step {int(np.argmin(inside))} of {len(times)} is at {times[np.argmin(inside)]:.6f} s of "
                f"{self.path.name}, where meta/episodes has {self.start_s:.6f} to {end_s:.6f} s for the episode"
            )
        return times


def columns_of_places(keys: list[str]) -> list[str]:
    """Columns of v3's meta/episodes that tell where the videos of an episode are."""
    told = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
    return [f"videos/{key}/{what}" for key in keys for what in told]


def picture_of(feature: Mapping[str, Any]) -> tuple[int, int, int]:
    """Height, width and channels of an image or video feature, whose axes may stand in either order.

    Raises:
        ValueError: it has other axes.
    """
    shape = tuple(int(n) for n in feature["shape"])
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"images are of height, width and channels, found the shape {shape}")
    names = [str(name) for name in feature.get("names") or ()]
    first = "channel" in names[0] if names else shape[0] in (1, 3, 4) and shape[-1] not in (1, 3, 4)
    channels, height, width = shape if first else (shape[2], shape[0], shape[1])
    return height, width, channels


def is_depth(feature: Mapping[str, Any]) -> bool:
    """Whether an image or video feature says that it is a depth map."""
    about = {**(feature.get("video_info") or {}), **(feature.get("info") or {})}
    return bool(about.get("video.is_depth_map") or about.get("is_depth_map"))


def why_no_video(feature: Mapping[str, Any]) -> str | None:
    """Why a video feature is not imported, or None."""
    if is_depth(feature):
        return "video of a depth map, whose values of 12 bits are not imported"
    try:
        channels = picture_of(feature)[2]
    except (KeyError, TypeError, ValueError) as error:
        return f"video: {error}"
    return None if channels in (1, 3) else f"video of {channels} channels"


def why_no_times(feature: Mapping[str, Any]) -> str | None:
    """Why a feature cannot have the steps' times, which are one real number for each, or None."""
    dtype, shape = str(feature.get("dtype")), list(feature.get("shape") or ())
    if not dtype.startswith(("float", "int", "uint")) or shape not in ([], [1]):
        return f"it is a real number for each step, found {dtype} of the shape {shape}"
    return None


__all__ = ["VideoPlace", "columns_of_places", "is_depth", "picture_of", "why_no_times", "why_no_video"]
