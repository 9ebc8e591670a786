"""Conversions between LeRobot datasets and transitions, in both directions."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import geartrain.integrations.transitions.frames as frames
from geartrain.core.arguments import check_whole
from geartrain.core.keys import Keys
from geartrain.errors import MissingDependencyError, StaleKeyError
from geartrain.integrations.lerobot.entries import TransitionEntries, TransitionEntry
from geartrain.integrations.transitions.draws import DrawnWindows
from geartrain.integrations.transitions.index import Runs, TransitionIndex
from geartrain.integrations.transitions.layout import DONE, FLAGS, REWARD, TIMEOUT
from geartrain.store.store import Store

_INFO_PREFIX = "complementary_info."
#: Steps that are read at once.
_STEPS_AT_ONCE = 64
_IMAGE_CHANNELS = (1, 3)


def transitions_of(dataset: Any, state_keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The transitions of a dataset, as arguments of `add`; each frame is read once.

    Raises:
        SchemaError: a frame lacks an entry.
    """
    for frame, following in frames.frames_of(dataset, [*state_keys, frames.ACTION, frames.REWARD]):
        done = bool(frame[frames.DONE]) if frames.DONE in frame else following is None
        led_to = frame if following is None or done else following
        infos = {key.removeprefix(_INFO_PREFIX): _of_one(frame[key]) for key in frame if key.startswith(_INFO_PREFIX)}
        yield {
            "state": {key: _of_one(frame[key]) for key in state_keys},
            "action": _of_one(frame[frames.ACTION]),
            "reward": float(frame[frames.REWARD]),
            "next_state": {key: _of_one(led_to[key]) for key in state_keys},
            "done": done,
            "truncated": following is None and not done,
            "complementary_info": infos or None,
        }


def capacity_for(dataset: Any, capacity: int | None) -> int:
    """The capacity of a buffer for a dataset: its length where none is given.

    Raises:
        ArgumentError: it is smaller, or no whole number; or the dataset has no length.
    """
    count = frames.frame_count(dataset)
    return count if capacity is None else check_whole("capacity", capacity, count)


def _of_one(value: Any) -> Any:
    """With an axis in front, which `add` takes away: an entry of one number is a vector of one."""
    return value[None] if hasattr(value, "ndim") else value


class StoredRuns(NamedTuple):
    """Runs of transitions in a store, by process and in the order in which each has added them."""

    runs: Runs

    @staticmethod
    def newest(store: Store, index: TransitionIndex, most: int) -> StoredRuns:
        """Runs of all rows; the oldest transitions are left out if there are more than `most`."""
        runs = index.runs()
        excess = index.count() - most
        if excess <= 0:
            return StoredRuns(runs)
        keys = store.keys()  # oldest first
        age = {name: at for at, name in enumerate(zip(keys.row.tolist(), keys.generation.tolist(), strict=True))}
        rows = zip(runs.row.tolist(), runs.generation.tolist(), strict=True)
        order = np.lexsort((runs.step, np.array([age.get(name, -1) for name in rows])))
        before = np.cumsum(runs.length[order]) - runs.length[order]
        left_out = np.empty(len(order), np.int64)
        left_out[order] = np.clip(excess - before, 0, runs.length[order])
        cut = runs._replace(number=runs.number + left_out, step=runs.step + left_out, length=runs.length - left_out)
        kept = np.flatnonzero(cut.length)
        return StoredRuns(Runs(*(column[kept] for column in cut)))  # type: ignore[arg-type]

    def read(self, store: Store, fields: Sequence[str]) -> Iterator[tuple[int, dict[str, NDArray[Any]] | None, int]]:
        """Parts of the runs: the number of the first transition, their windows (n, 2, ...), and n; None for the windows
        of rows that are gone."""
        runs = self.runs
        for at in range(len(runs.number)):
            for begin in range(0, int(runs.length[at]), _STEPS_AT_ONCE):
                count = min(_STEPS_AT_ONCE, int(runs.length[at]) - begin)
                every = np.zeros(count, np.int64) + at
                keys = Keys.of_rows(runs.row[every], runs.generation[every], store.id)
                step = runs.step[at] + begin + np.arange(count)
                try:
                    found = DrawnWindows.at(store, keys, step, fields, 1).fields
                except StaleKeyError:
                    found = None
                yield int(runs.number[at]) + begin, found, count


def written(
    stored: StoredRuns, store: Store, entries: TransitionEntries, *, repo_id: str, fps: int, root: Any, task_name: str
) -> Any:
    """A `LeRobotDataset` of these transitions, in bounded memory.

    Raises:
        MissingDependencyError: LeRobot is not installed.
    """
    try:
        from lerobot.datasets import LeRobotDataset
    except ImportError as error:
        raise MissingDependencyError(f"writing a LeRobotDataset needs LeRobot 0.6 or newer ({error})") from None

    columns = {
        **{key: (entry, 0) for key, entry in entries.states.items()},
        frames.ACTION: (entries.action, 1),
        **{_INFO_PREFIX + key: (entry, 1) for key, entry in (entries.infos or {}).items()},
    }
    features: dict[str, Any] = {name: _feature(entry) for name, (entry, _) in columns.items()}
    features |= {frames.REWARD: {"dtype": "float32", "shape": (1,)}, frames.DONE: {"dtype": "bool", "shape": (1,)}}
    dataset = LeRobotDataset.create(repo_id=repo_id, fps=fps, root=root, features=features, use_videos=True)
    dataset.writer.start_image_writer(num_processes=0, num_threads=3)
    try:
        gone, expected = 0, None
        for number, windows, count in stored.read(store, [*entries.drawn(), REWARD, FLAGS]):
            if expected not in (None, number) and dataset.has_pending_frames():
                dataset.save_episode()  # of another process, or after transitions that are gone
            if windows is None:
                gone += count
                continue
            expected = number + count
            for at in range(count):
                flags = int(windows[FLAGS][at, 1])
                frame: dict[str, Any] = {
                    name: _written(entry, windows[entry.field][at, step]) for name, (entry, step) in columns.items()
                }
                frame[frames.REWARD] = windows[REWARD][at, 1:2].astype(np.float32)
                frame[frames.DONE] = np.array([bool(flags & DONE)])
                dataset.add_frame({**frame, "task": task_name})
                if flags & (DONE | TIMEOUT):
                    dataset.save_episode()
        if dataset.has_pending_frames():
            dataset.save_episode()
    finally:
        dataset.writer.stop_image_writer()
        dataset.finalize()
    if gone:
        warnings.warn(f"{gone} transitions were evicted before they were written; the dataset lacks them", stacklevel=3)
    return dataset


def _feature(entry: TransitionEntry) -> dict[str, Any]:
    """LeRobot's description of an entry. An entry with one or three channels in front is an image."""
    shape = entry.shape or (1,)
    is_image = len(shape) == 3 and shape[0] in _IMAGE_CHANNELS
    return {"dtype": "image" if is_image else "float32", "shape": shape}


def _written(entry: TransitionEntry, value: NDArray[Any]) -> NDArray[Any]:
    """A value as LeRobot writes it: uint8 images with three channels are bytes, everything else is float32."""
    if value.dtype == np.uint8 and len(entry.shape) == 3 and entry.shape[0] == 3:
        return value
    return value.astype(np.float32).reshape(entry.shape or (1,))


__all__ = ["StoredRuns", "capacity_for", "transitions_of", "written"]
