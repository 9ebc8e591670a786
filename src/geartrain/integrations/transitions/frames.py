"""Frames of a `LeRobotDataset`, or of what is read like one, with the ends of its episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from geartrain.errors import ArgumentError, SchemaError

#: Entries of a frame.
ACTION, REWARD, DONE, EPISODE = "action", "next.reward", "next.done", "episode_index"


def frame_count(dataset: Any) -> int:
    """Frames of a dataset. Raises `ArgumentError` where it has no length."""
    try:
        return len(dataset)
    except TypeError:
        raise ArgumentError(f"a dataset has a length and frames by number, found {type(dataset).__name__}") from None


def frames_of(
    dataset: Any, wanted: Sequence[str], hints: Mapping[str, str] | None = None
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any] | None]]:
    """Each frame with the one that follows it in its episode, or None at the episode's end. Each frame is read once.

    Args:
        dataset: frames by number.
        wanted: entries that frames must have.
        hints: by entry, what to do without it, for the error.

    Raises:
        SchemaError: a frame lacks one of them.
    """
    count = frame_count(dataset)

    def read(at: int) -> Mapping[str, Any] | None:
        if at == count:
            return None
        frame: Mapping[str, Any] = dataset[at]
        for name in (*wanted, EPISODE):
            if name not in frame:
                hint = (hints or {}).get(name, "")
                raise SchemaError(
                    f"frame {at} of the dataset lacks {name!r}{hint}; it has {', '.join(map(str, frame))}"
                )
        return frame

    frame, number = read(0), 0
    while frame is not None:
        number += 1
        following = read(number)
        goes_on = following is not None and int(following[EPISODE]) == int(frame[EPISODE])
        yield frame, following if goes_on else None
        frame = following


__all__ = ["ACTION", "DONE", "EPISODE", "REWARD", "frame_count", "frames_of"]
