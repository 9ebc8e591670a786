"""Export to a LeRobotDataset folder (v3.0), the inverse of lerobot.py: Parquet tables, and images or videos.

| stored | written |
|---|---|
| obs; obs.x | observation.state; observation.x |
| action, reward, done | action, next.reward, next.done |
| other timed fields | the same names |
| obs.x of uint8 (height, width, 1 or 3) | the dtype `image`: PNG inside the table, without loss |
| the same with `video=True` and 3 channels | the dtype `video`: export_video.py |

`index`, `episode_index` and `frame_index` are counted. If the store has no `timestamp`, it is frame_index / fps. If the
store has no `task_index`, it is 0.

meta/stats.json and the table of episodes have each feature's minimum, maximum, mean, standard deviation and quantiles.
The quantiles of all episodes are approximated, as in lerobot itself, by the mean of the episodes' quantiles, weighted
by frames.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.arguments import check_text, check_texts, check_type, shown
from geartrain.core.extras import require
from geartrain.core.schema import Field
from geartrain.errors import ArgumentError, SourceError
from geartrain.integrations.datasets.arrow import nested_array
from geartrain.integrations.datasets.episode import Array
from geartrain.integrations.datasets.export_video import VideoEncoding, VideoFolder
from geartrain.integrations.datasets.feature_stats import FeatureStats, episode_stats
from geartrain.integrations.datasets.stored_rows import RowGroup
from geartrain.integrations.datasets.writer import DatasetWriter, is_dataset_folder, not_real

_COUNTED = ("index", "episode_index", "frame_index")
_GIVEN = {"timestamp": Field((), "float32"), "task_index": Field((), "int64")}
_FILE_BYTES = 100 << 20
_VIDEO_BYTES = 200 << 20
_FILES_PER_CHUNK = 1000
_PATH = "chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_VIDEO_PATH = "chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
# What a dataset's folder has at its top, and the files in it.
_ENTRIES = {
    "data": (".parquet",),
    "meta": (".parquet", ".json", ".jsonl"),
    "images": (".png",),
    "videos": (".mp4",),
}
_MOST_AXES = 5
_LEAST_EDGE = 8


class LeRobotWriter(DatasetWriter):
    """A LeRobotDataset's folder.

    Args:
        fps: steps a second, which the format requires.
        task: description of the episodes' task.
        tasks: alternative to `task` for rows with a `task_index`: a description for each of its values.
        robot_type: entry of the dataset's description.
        video: encode images of 3 channels as videos.
        video_codec: "h264", "h264-lossless", "hevc" or "av1".
        video_quality: the encoder's CRF, 0 the best.
        video_key_frames: frames from one key frame to the next. Reading one frame decodes at most as many.
    """

    FOLDER = True

    def __init__(
        self,
        path: Path,
        *,
        fields: Mapping[str, Field],
        about: str,
        fps: int | None = None,
        task: str | None = None,
        tasks: Sequence[str] | None = None,
        robot_type: str | None = None,
        video: bool = False,
        video_codec: str | None = None,
        video_quality: int | None = None,
        video_key_frames: int | None = None,
    ) -> None:
        if fps is None or not 1 <= fps <= 1_000_000:
            raise ArgumentError(f"a LeRobot dataset needs the option fps, steps a second, from 1 on; found {fps}")
        if robot_type is not None:
            check_text("robot_type", robot_type)
        self._tasks = _task_names(task, tasks, "task_index" in fields)
        self._arrow = require("pyarrow", "geartrain[lerobot]", "Writing LeRobot datasets")
        self._parquet = require("pyarrow.parquet", "geartrain[lerobot]", "Writing LeRobot datasets")
        self._fields = dict(fields)
        self._keys = _keys_of(self._fields)
        self._images = [name for name, field in self._fields.items() if _is_image(name, field)]
        self._encoding = _encoding_of(video, video_codec, video_quality, video_key_frames)
        filmed = [name for name in self._images if self._encoding and self._fields[name].shape[2] == 3]
        self._images = [name for name in self._images if name not in filmed]
        for name in filmed:
            assert self._encoding is not None
            why = self._encoding.why_not(*self._fields[name].shape[:2])
            if why is not None:
                raise SourceError(f"{name} is {self._fields[name].shape[:2]}: {why}; take another video_codec")
        if self._images:
            self._pillow = require("PIL.Image", "geartrain[lerobot]", "Encoding images")
        self._fps, self._robot_type = fps, robot_type
        self._path = path
        self._frames = self._episodes = 0
        self._stats: dict[str, FeatureStats] = {}
        path.mkdir()
        self._data = _Files(path / "data", self._parquet)
        self._about = _Files(path / "meta" / "episodes", self._parquet)
        self._videos = {
            name: VideoFolder(
                path / "videos" / self._keys[name],
                _VIDEO_PATH,
                self._encoding,
                self._fields[name].shape,
                fps,
                _VIDEO_BYTES,
                _FILES_PER_CHUNK,
            )
            for name in filmed
            if self._encoding is not None
        }

    @classmethod
    def refused(cls, name: str, field: Field) -> str | None:
        """Values that a row has once, more than five axes, names that lerobot refuses or counts itself."""
        if field.per_row:
            return "once a row, and LeRobot datasets have values of steps only"
        if "/" in name:
            return "LeRobot takes no slash in a name; write it as another with fields='other=...'"
        if name in _COUNTED:
            return "counted by the format itself: leave it out, or write it under another name"
        wanted = _GIVEN.get(name)
        if wanted is not None and (wanted.dtype != field.dtype or field.shape not in ((), (1,))):
            return f"{name} is one {wanted.dtype} a step in LeRobot datasets, not {field.dtype} {field.shape}"
        if len(field.shape) > _MOST_AXES:
            return f"{len(field.shape)} axes, and LeRobot features have at most {_MOST_AXES}"
        return not_real(field, "LeRobot")

    @classmethod
    def replaces(cls, path: Path) -> bool:
        """A folder with meta/info.json that has nothing but a dataset's tables, images and videos."""
        return is_dataset_folder(path, _ENTRIES, "meta/info.json", "codebase_version")

    def write(self, group: RowGroup) -> int:
        """Appends the rows to the tables, each an episode."""
        values = {name: group.steps(name) for name in self._fields}
        lengths = group.lengths
        ends = np.cumsum(lengths)
        starts = ends - lengths
        frame = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(starts, lengths)
        episode = self._episodes + np.repeat(np.arange(len(lengths)), lengths)
        index = self._frames + np.arange(len(frame))
        columns: dict[str, Array] = {self._keys[name]: array for name, array in values.items()}
        columns.setdefault("timestamp", (frame / self._fps).astype(np.float32))
        columns |= {"frame_index": frame, "episode_index": episode, "index": index}
        columns.setdefault("task_index", np.zeros(len(frame), np.int64))
        self._check_tasks(columns["task_index"])
        images = {self._keys[name] for name in self._images}
        films = {self._keys[name] for name in self._videos}
        table = {key: self._column(array, key in images) for key, array in columns.items() if key not in films}
        chunk, file = self._data.write(self._arrow.table(table))
        about = {
            "episode_index": self._arrow.array(self._episodes + np.arange(len(lengths))),
            "tasks": self._arrow.array(
                [
                    [self._tasks[each] for each in np.unique(columns["task_index"][start:end]).tolist()]
                    for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
                ],
                self._arrow.list_(self._arrow.string()),
            ),
            "length": self._arrow.array(lengths),
            "data/chunk_index": self._arrow.array(np.full(len(lengths), chunk)),
            "data/file_index": self._arrow.array(np.full(len(lengths), file)),
            "dataset_from_index": self._arrow.array(self._frames + starts),
            "dataset_to_index": self._arrow.array(self._frames + ends),
        }
        about |= self._encode(values, lengths.tolist())
        for key, array in columns.items():
            stats = episode_stats(array, starts, ends, image=key in images or key in films)
            self._stats.setdefault(key, FeatureStats()).add(stats)
            for name, of_episodes in stats.items():
                about[f"stats/{key}/{name}"] = nested_array(self._arrow, of_episodes, fixed=False)
        chunk, file = self._about.place()
        about["meta/episodes/chunk_index"] = self._arrow.array(np.full(len(lengths), chunk))
        about["meta/episodes/file_index"] = self._arrow.array(np.full(len(lengths), file))
        self._about.write(self._arrow.table(about))
        self._frames += len(frame)
        self._episodes += len(lengths)
        return sum(array.nbytes for array in values.values())

    def _encode(self, values: Mapping[str, Array], lengths: list[int]) -> dict[str, Any]:
        """Encodes the videos, with a thread for each camera. Returns the columns with their places."""
        if not self._videos:
            return {}
        about = {}
        with ThreadPoolExecutor(len(self._videos), thread_name_prefix="geartrain-export") as pool:
            written = {name: pool.submit(video.write, values[name], lengths) for name, video in self._videos.items()}
        for name, episodes in written.items():
            column = f"videos/{self._keys[name]}"
            places = episodes.result()
            about[f"{column}/chunk_index"] = self._arrow.array([each.chunk for each in places])
            about[f"{column}/file_index"] = self._arrow.array([each.file for each in places])
            about[f"{column}/from_timestamp"] = self._arrow.array([each.start_s for each in places])
            about[f"{column}/to_timestamp"] = self._arrow.array([each.end_s for each in places])
        return about

    def finish(self) -> None:
        """Writes the metadata of all episodes."""
        for video in self._videos.values():
            video.finish()
        self._data.close()
        self._about.close()
        meta = self._path / "meta"
        self._parquet.write_table(self._task_table(), meta / "tasks.parquet")
        stats = {key: found.as_json() for key, found in self._stats.items()}
        (meta / "stats.json").write_text(json.dumps(stats, indent=4))
        info = {
            "codebase_version": "v3.0",
            "robot_type": self._robot_type,
            "total_episodes": self._episodes,
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": _FILES_PER_CHUNK,
            "data_files_size_in_mb": _FILE_BYTES >> 20,
            "video_files_size_in_mb": _VIDEO_BYTES >> 20,
            "fps": self._fps,
            "splits": {"train": f"0:{self._episodes}"},
            "data_path": f"data/{_PATH}",
            "video_path": f"videos/{{video_key}}/{_VIDEO_PATH}" if self._videos else None,
            "features": self._features(),
        }
        (meta / "info.json").write_text(json.dumps(info, indent=4))

    def close(self) -> None:
        """Closes the tables and videos."""
        with contextlib.ExitStack() as files:
            files.callback(self._data.close)
            files.callback(self._about.close)
            for video in self._videos.values():
                files.callback(video.close)

    def _features(self) -> dict[str, Any]:
        features: dict[str, Any] = {}
        for name, field in self._fields.items():
            if name in self._videos and self._encoding is not None:
                features[self._keys[name]] = self._encoding.feature(field.shape[0], field.shape[1], self._fps)
                continue
            is_image = name in self._images
            features[self._keys[name]] = {
                "dtype": "image" if is_image else field.dtype,
                "shape": list(field.shape) or [1],
                "names": ["height", "width", "channels"] if is_image else None,
            }
        of_places = {**dict.fromkeys(_GIVEN), **dict.fromkeys(_COUNTED)}
        for key in of_places:
            dtype = _GIVEN[key].dtype if key in _GIVEN else "int64"
            features.setdefault(key, {"dtype": dtype, "shape": [1], "names": None})
        return features

    def _column(self, values: Array, is_image: bool) -> Any:
        if is_image:
            encoded = [self._png(each) for each in values]
            kind = self._arrow.struct([("bytes", self._arrow.binary()), ("path", self._arrow.string())])
            return self._arrow.array([{"bytes": each, "path": None} for each in encoded], kind)
        if values.shape[1:] == (1,):  # a feature of shape [1] is a number
            values = values[:, 0]
        return nested_array(self._arrow, values, fixed=values.ndim == 2)

    def _png(self, pixels: Array) -> bytes:
        file = io.BytesIO()
        gray = pixels.shape[-1] == 1
        self._pillow.fromarray(pixels[..., 0] if gray else pixels).save(file, format="PNG", compress_level=1)
        return file.getvalue()

    def _check_tasks(self, found: Array) -> None:
        wrong = found[(found < 0) | (found >= len(self._tasks))].ravel()
        if len(wrong):
            raise SourceError(f"task_index {wrong[0]} has no name: the option tasks has {len(self._tasks)}")

    def _task_table(self) -> Any:
        """The tasks as pandas reads them: the words are the index."""
        table = self._arrow.table(
            {
                "task_index": self._arrow.array(np.arange(len(self._tasks))),
                "task": self._arrow.array(list(self._tasks), self._arrow.string()),
            }
        )

        def column(name: str, kind: str, numpy_kind: str) -> dict[str, Any]:
            return {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy_kind, "metadata": None}

        pandas = {
            "index_columns": ["task"],
            "column_indexes": [],
            "columns": [column("task_index", "int64", "int64"), column("task", "unicode", "object")],
            "creator": {"library": "geartrain", "version": "1"},
            "pandas_version": "2.0.0",
        }
        return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


class _Files:
    """Numbered Parquet files of about 100 MB, a thousand in a folder."""

    def __init__(self, folder: Path, parquet: Any) -> None:
        self._folder, self._parquet = folder, parquet
        self._number = 0
        self._path: Path | None = None
        self._writer: Any = None

    def place(self) -> tuple[int, int]:
        """Chunk and file that the next table goes to."""
        if self._path is not None and self._path.stat().st_size >= _FILE_BYTES:
            self.close()
            self._number += 1
        return divmod(self._number, _FILES_PER_CHUNK)

    def write(self, table: Any) -> tuple[int, int]:
        chunk, file = self.place()
        if self._writer is None:
            self._path = self._folder / _PATH.format(chunk_index=chunk, file_index=file)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = self._parquet.ParquetWriter(self._path, table.schema, compression="snappy")
        self._writer.write_table(table)
        return chunk, file

    def close(self) -> None:
        writer, self._writer, self._path = self._writer, None, None
        if writer is not None:
            writer.close()


def _task_names(task: str | None, tasks: Sequence[str] | None, indexed: bool) -> tuple[str, ...]:
    check_type("tasks are texts, each another one", tasks, str | Sequence | None)
    if tasks is not None and task is not None:
        raise ArgumentError("task is for rows without a task_index, tasks for those with one: give one of them")
    if indexed and tasks is None:
        raise ArgumentError("the rows have a task_index: the option tasks gives the words for each of its values")
    if not indexed and tasks is not None and not isinstance(tasks, str) and len(tasks) > 1:
        raise ArgumentError(
            f"{len(tasks)} tasks are given, and the rows have no task_index that tells which is whose: give one"
        )
    names = (task or "unknown",) if tasks is None else (tasks,) if isinstance(tasks, str) else tuple(tasks)
    if not names or not all(isinstance(each, str) for each in names) or len(set(names)) != len(names):
        raise ArgumentError(f"tasks are texts, each another one, found {shown(tasks)}")
    check_texts("tasks", names)
    return names


def _keys_of(fields: Mapping[str, Field]) -> dict[str, str]:
    keys: dict[str, str] = {}
    renamed = {"obs": "observation.state", "reward": "next.reward", "done": "next.done"}
    for name in fields:
        key = renamed.get(name, "observation" + name.removeprefix("obs") if name.startswith("obs.") else name)
        if key in keys.values():
            raise SourceError(f"two fields would be written as {key!r}; fields='other={name}' writes one as another")
        keys[name] = key
    return keys


def _encoding_of(video: bool, codec: str | None, quality: int | None, key_frames: int | None) -> VideoEncoding | None:
    given = {
        name: value
        for name, value in (("codec", codec), ("quality", quality), ("key_frames", key_frames))
        if value is not None
    }
    if video:
        return VideoEncoding(**given)  # type: ignore[arg-type]
    if given:
        raise ArgumentError(f"the option video_{next(iter(given))} is of videos: give video=True too")
    return None


def _is_image(name: str, field: Field) -> bool:
    height, width, channels = field.shape if len(field.shape) == 3 else (0, 0, 0)
    return (
        name.partition(".")[0] in ("obs", "observation")
        and field.dtype == "uint8"
        and min(height, width) >= _LEAST_EDGE
        and channels in (1, 3)
    )


__all__ = ["LeRobotWriter"]
