"""Importer of LeRobotDataset folders (v3.0, v2.1, v2.0): the Parquet columns, images and videos.

    meta/info.json                              features, version, path templates
    meta/episodes/chunk-000/file-000.parquet    length of each episode (v2: meta/episodes.jsonl)
    data/chunk-000/file-000.parquet             one row per frame, many episodes in a file (v2: one)
    videos/...                                  lerobot_video.py

| stored | found |
|---|---|
| obs.state, obs.images.front | observation.state, observation.images.front |
| action, reward, done | action, next.reward, next.done |
| timestamp, task_index, next.success, ... | the same names |
| index, episode_index, frame_index | only when `fields` names them: a row's place says as much |

Several threads decode video frames into the rows. Images inside the Parquet files are decoded as they are read. Both
become bytes (height, width, channels) unless options ask for another form. A feature of shape [1] is stored as one
number for each step, as in the files. Convert older versions of the format (v1) with lerobot first.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import os
import re
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.arguments import check_real, check_whole, shown
from geartrain.core.extras import require
from geartrain.core.json_values import parse_json, read_object
from geartrain.errors import SourceError
from geartrain.integrations.datasets.arrow import column_values, record_batches
from geartrain.integrations.datasets.episode import (
    Array,
    DeferredSteps,
    Episode,
    FieldChoice,
    FormatSource,
    Metadata,
    choose,
    count_of,
    ever,
    plain,
    reading,
    total,
)
from geartrain.integrations.datasets.images import ImageForm, decode_image
from geartrain.integrations.datasets.lerobot_video import (
    VideoPlace,
    columns_of_places,
    is_depth,
    picture_of,
    why_no_times,
    why_no_video,
)
from geartrain.integrations.datasets.video_files import VideoClip, VideoReaders

LOOKS_FOR = "a folder with meta/info.json that names a codebase_version"

# Arrow decodes batches of about 1 MB three times as fast as batches of 16 MB, which leave the cache.
_BATCH_BYTES = 1 << 20
_PLACES = ("index", "episode_index", "frame_index")
_READ_VERSIONS = ("v2.0", "v2.1", "v3.")
_MOST_THREADS = 16
# Of a number in a file's name, or of a part of a name; one of a thousand million digits would be as many bytes.
_WIDTH = re.compile(r"(0?[0-9]{1,2}d?|\.[0-9]{1,2})?", re.ASCII)
# Where the columns have the steps' times for the videos; no field has this name.
_TIMES = "/timestamp"


def recognise(path: Path) -> bool:
    """Whether the folder has LeRobot's meta/info.json."""
    return (path / "meta" / "info.json").is_file()


class LeRobotSource(FormatSource):
    """Episodes of a LeRobotDataset folder, a batch of frames in memory at a time.

    Args:
        path: the folder.
        fields, skip_unsupported: as of `import_dataset`.
        image_size: (height, width) that images and frames of videos are resized to, as numbers or as "240x320"; one
            number for both.
        image_layout: "hwc" or "chw", the order of their axes.
        tolerance_s: how far a frame of a video may be from its step's time, as in LeRobot.
        threads: that decode videos; by default as many as processors, 16 at most.

    Raises:
        ArgumentError: an option of another value.
        SourceError: a version that is not read, or a file that is missing.
        MissingDependencyError: pyarrow, or for videos PyAV, is not installed.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        fields: FieldChoice = None,
        skip_unsupported: bool = False,
        image_size: int | str | Sequence[int] | None = None,
        image_layout: str = "hwc",
        tolerance_s: float | int = 1e-4,
        threads: int | None = None,
    ) -> None:
        self._form = ImageForm.of(image_size, image_layout)
        tolerance_s = check_real("the option tolerance_s", tolerance_s, None, 1e6, above=0)
        if threads is None:
            threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
        check_whole("the option threads", threads, 1, 1024)
        self.threads, self._tolerance_s = threads, tolerance_s
        self.name = str(path)
        self._root = Path(path)
        self._parquet = require("pyarrow.parquet", "geartrain[lerobot]", "Reading LeRobot datasets")
        about = f"{path}: meta/info.json"
        with reading(about, "a JSON object"):
            self._info = read_object(self._root / "meta" / "info.json")
        version = str(self._info.get("codebase_version"))
        if not version.startswith(_READ_VERSIONS):
            raise SourceError(
                f"{path}: is a LeRobotDataset {version}; v3.0, v2.1 and v2.0 are read. Convert it "
                f"with lerobot's own scripts first"
            )
        with reading(about, "features with a dtype and a shape, and a data_path"):
            self._features = {str(key): dict(value) for key, value in self._info["features"].items()}
            for feature in self._features.values():
                if _why_not(feature) is None:
                    _nbytes(feature)
            if not isinstance(self._info["data_path"], str):
                raise TypeError(f"data_path is {self._info['data_path']!r}")
            self._chunks_size = int(self._info.get("chunks_size", 1000))
            self._fps = float(self._info.get("fps") or 0)
        self._paths = {_stored_name(key): key for key in self._features}
        available = {name: _why_not(self._features[key]) for name, key in self._paths.items()}
        default = [name for name, key in self._paths.items() if key not in _PLACES]
        self._chosen = choose(self.name, fields, available, default, skip_unsupported)
        self._videos = {
            name: key
            for name, found in self._chosen.items()
            if self._features[key := self._paths[found]]["dtype"] == "video"
        }
        if self._videos:
            require("av", "geartrain[lerobot]", "Importing videos")
            if self._fps <= 0 or "timestamp" not in self._features or not self._info.get("video_path"):
                raise SourceError(f"{about}: has videos, and lacks the feature timestamp, fps or video_path")
            why = why_no_times(self._features["timestamp"])
            if why is not None:
                raise SourceError(f"{about}: has videos, whose frames are found by timestamp: {why}")
        self._readers = VideoReaders(self.threads)
        self._places: dict[tuple[int, str], VideoPlace] = {}  # by episode and feature
        self._about: dict[int, dict[str, Any]] = {}  # by episode_index, what meta/ has beside the length
        self._lengths, self._files = self._v3() if version.startswith("v3.") else self._v2()
        self._indices = sorted(self._lengths)
        self.episodes = len(self._lengths)

    def read(self, numbers: Sequence[int] | None = None) -> Iterator[Episode]:
        """The episodes. Files and row groups of others are not read, their images and videos not decoded."""
        for _, episode in self._indexed(numbers):
            yield episode
            del episode

    def numbered(self) -> Iterator[tuple[int, Episode]]:
        """All episodes with their numbers, which files need not have in their order."""
        number = {index: number for number, index in enumerate(self._indices)}
        for index, episode in self._indexed(None):
            yield number[index], episode
            del episode

    def _indexed(self, numbers: Sequence[int] | None) -> Iterator[tuple[int, Episode]]:
        """The episodes with their `episode_index`."""
        wanted = None if numbers is None else {self._indices[number] for number in numbers}
        parts: list[dict[str, Array]] = []
        current, where = -1, ""
        seen = 0
        for file, index, columns in self._runs(wanted):
            if index != current:
                if parts:
                    episode, parts = self._episode(current, where, parts), []
                    yield current, episode
                    del episode
                    seen += 1
                current = index
                where = str(file.relative_to(self._root))
            parts.append(columns)
        if parts:
            yield current, self._episode(current, where, parts)
            seen += 1
        promised = len(self._lengths) if wanted is None else len(wanted)
        if seen != promised:
            of_them = "" if wanted is None else " of those that were chosen"
            raise SourceError(f"{self.name}: the data files hold {seen} episodes{of_them}, meta promises {promised}")

    def metadata(self) -> Iterator[Mapping[str, Any]]:
        """What meta/ has of each episode; no data is read, but one column where `return` or `success` is asked for."""
        figures = {"return": ("reward", total), "success": ("next.success", ever)}
        there = {name: figure for name, figure in figures.items() if figure[0] in self._paths}
        for number, index in enumerate(self._indices):
            later = {name: functools.partial(self.figure, *figure, number) for name, figure in there.items()}
            yield Metadata(number, {"length": self._lengths[index], **self._about.get(index, {})}, later)

    def release(self) -> None:
        """Closes the videos."""
        self._readers.close()

    def _episode(self, index: int, where: str, parts: list[dict[str, Array]]) -> Episode:
        name = f"episode {index} ({where})"
        with reading(f"{self.name}: {name}", "its frames"):
            columns = {
                column: parts[0][column] if len(parts) == 1 else np.concatenate([part[column] for part in parts])
                for column in parts[0]
            }
        length = len(next(iter(columns.values())))
        if length != self._lengths.get(index):
            raise SourceError(
                f"{self.name}: {name}: has {length} frames in a row in the data "
                f"files, meta promises {self._lengths.get(index, 'no such episode')}"
            )
        timed: dict[str, Array | DeferredSteps] = {}
        for stored, found in self._chosen.items():
            timed[stored] = (
                self._clip(index, name, found, columns[_TIMES]) if stored in self._videos else columns[stored]
            )
        return Episode(name, timed)

    def _clip(self, index: int, episode: str, found: str, timestamps: Array) -> VideoClip:
        """The frames of one camera."""
        key = self._paths[found]
        video = self._places[index, key]
        place = f"{self.name}: {episode}: field {found!r}: {video.path.relative_to(self._root)}"
        times = video.frame_times(timestamps, self._fps, self._tolerance_s, place)
        picture, part = picture_of(self._features[key]), video.part_of(self._fps)
        return VideoClip(self._readers, video.path, times, self._tolerance_s, part, picture, self._form, place)

    def _runs(self, chosen: Collection[int] | None) -> Iterator[tuple[Path, int, dict[str, Array]]]:
        """Runs of frames of one episode: the file, the episode and the columns."""
        keys = [self._paths[name] for stored, name in self._chosen.items() if stored not in self._videos]
        keys += ["timestamp"] if self._videos else []
        for file, held in self._files.items():
            if chosen is not None and held is not None and held.isdisjoint(chosen):
                continue
            for episodes, batch in self._batches(file, keys, chosen):
                edges = [0, *(np.flatnonzero(np.diff(episodes)) + 1).tolist(), len(episodes)]
                for begin, end in itertools.pairwise(edges):
                    if begin == end or (chosen is not None and int(episodes[begin]) not in chosen):
                        continue
                    piece = batch.slice(begin, end - begin)
                    yield file, int(episodes[begin]), self._columns(file, episodes[begin], piece)

    def _batches(self, file: Path, keys: list[str], chosen: Collection[int] | None) -> Iterator[tuple[Array, Any]]:
        """Batches of a file's columns, each with the episode of every frame."""
        with reading(f"{self.name}: {file}", "Parquet"):
            table = self._parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
            names = table.schema_arrow.names
        columns = [*dict.fromkeys([*keys, "episode_index"])]
        missing = [key for key in columns if key not in names]
        if missing:
            raise SourceError(f"{self.name}: {file}: has no column {', '.join(missing)}")
        rows = max(1, _BATCH_BYTES // max(1, sum(_nbytes(self._features[key]) for key in keys)))

        ordered = sorted(chosen or ())

        def wanted(first: int, about: Any) -> bool:
            """Whether a row group holds a frame of a chosen episode, by the least and greatest of its numbers."""
            found = [about.column(place) for place in range(about.num_columns)]
            known = next((each.statistics for each in found if each.path_in_schema == "episode_index"), None)
            if chosen is None or known is None or not known.has_min_max:
                return True
            return bisect.bisect_left(ordered, known.min) < bisect.bisect_right(ordered, known.max)

        place = f"{self.name}: {file}"
        for _, batch in record_batches(table, place, "frame", columns=columns, rows=rows, wanted=wanted):
            with reading(f"{self.name}: {file}: episode_index", "whole numbers"):
                episodes = column_values(batch.column("episode_index"), ())
                if episodes.dtype.kind not in "iu":
                    raise TypeError(f"found {episodes.dtype}")
            yield episodes, batch

    def _columns(self, file: Path, episode: int, batch: Any) -> dict[str, Array]:
        columns = {}
        wanted = {stored: name for stored, name in self._chosen.items() if stored not in self._videos}
        if self._videos:
            wanted[_TIMES] = _stored_name("timestamp")
        for stored, name in wanted.items():
            key = self._paths[name]
            feature = self._features[key]
            where = file.relative_to(self._root)
            with reading(
                f"{self.name}: episode {episode} ({where}): field {name!r}", f"{feature['dtype']} of each frame"
            ):
                if feature["dtype"] == "image":
                    columns[stored] = self._images(batch.column(key), feature)
                else:
                    shape = tuple(int(n) for n in feature.get("shape") or ())
                    columns[stored] = column_values(batch.column(key), () if shape == (1,) else shape)
        return columns

    def _images(self, column: Any, feature: dict[str, Any]) -> Array:
        frames = []
        for value in column:
            image = value.as_py() or {}
            data = image.get("bytes")
            if data is None:  # not embedded: a file beside the tables
                data = (self._root / str(image.get("path"))).read_bytes()
            pixels = decode_image(data, picture_of(feature)[2], "uint8", "lerobot", self._form.size)
            frames.append(pixels.transpose(2, 0, 1) if self._form.channels_first else pixels)
        return np.stack(frames)

    def _v3(self) -> tuple[dict[int, int], dict[Path, set[int] | None]]:
        """Length of each episode, and the data files in order with the episodes in them; None where an episode may
        reach into the next file."""
        tables = sorted((self._root / "meta" / "episodes").glob("*/*.parquet"))
        if not tables:
            raise SourceError(f"{self.name}: no meta/episodes/chunk-000/file-000.parquet")
        videos = sorted(set(self._videos.values()))
        wanted = ["episode_index", "length", "data/chunk_index", "data/file_index", *columns_of_places(videos)]
        lengths: dict[int, int] = {}
        files: dict[tuple[int, int], None] = {}
        for table in tables:
            with reading(f"{self.name}: {table}", f"Parquet with {', '.join(wanted)}"):
                schema = self._parquet.read_schema(table)
                more = [name for name in schema.names if "/" not in name and name not in wanted]
                for row in self._parquet.read_table(table, columns=[*wanted, *more], partitioning=None).to_pylist():
                    self._add_length(lengths, row)
                    files[int(row["data/chunk_index"]), int(row["data/file_index"])] = None
                    for key in videos:
                        path = self._file(
                            "video_path",
                            video_key=key,
                            chunk_index=count_of("chunk_index", row[f"videos/{key}/chunk_index"]),
                            file_index=count_of("file_index", row[f"videos/{key}/file_index"]),
                        )
                        begin, end = (float(row[f"videos/{key}/{edge}_timestamp"]) for edge in ("from", "to"))
                        self._places[row["episode_index"], key] = VideoPlace(path, begin, end)
        return lengths, {
            self._file("data_path", chunk_index=chunk, file_index=file): None for chunk, file in sorted(files)
        }

    def _add_length(self, lengths: dict[int, int], row: dict[str, Any]) -> None:
        index = count_of("episode_index", row["episode_index"])
        if index in lengths:
            raise SourceError(f"{self.name}: meta/ speaks twice of episode {index}")
        lengths[index] = count_of("length", row["length"])
        about = {
            name: value
            for name, found in row.items()
            if "/" not in name and name != "length" and (value := plain(found)) is not None
        }
        tasks = about.get("tasks")
        if isinstance(tasks, list) and tasks:
            about["task"] = tasks[0]
        self._about[index] = about

    def _v2(self) -> tuple[dict[int, int], dict[Path, set[int] | None]]:
        """The same for one file per episode."""
        path = self._root / "meta" / "episodes.jsonl"
        lengths: dict[int, int] = {}
        with reading(f"{self.name}: {path}", "lines of JSON with episode_index and length"):
            for line in path.read_text().splitlines():
                if line.strip():
                    self._add_length(lengths, parse_json(line))
        files: dict[Path, set[int] | None] = {}
        for index in sorted(lengths):
            place: dict[str, Any] = {"episode_chunk": index // self._chunks_size, "episode_index": index}
            files[self._file("data_path", **place)] = {index}
            for key in self._videos.values():
                self._places[index, key] = VideoPlace(self._file("video_path", video_key=key, **place))
        return lengths, files

    def _file(self, template: str, **parts: int | str) -> Path:
        with reading(f"{self.name}: meta/info.json: {template}", f"a template of {' and '.join(parts)}"):
            pattern = str(self._info[template])
            for _, part, width, conversion in string.Formatter().parse(pattern):
                if part is not None and (part not in parts or conversion or not _WIDTH.fullmatch(width or "")):
                    raise ValueError(f"{shown(pattern)} has a part that none of LeRobot's has")
            relative = pattern.format(**parts)
            for part, value in parts.items():
                other = f"{value}x" if isinstance(value, str) else value + 1
                if part != "episode_chunk" and pattern.format(**{**parts, part: other}) == relative:
                    raise ValueError(f"{pattern!r} names the same file for every {part}")
        path = self._root / relative
        if not path.is_file():
            raise SourceError(f"{self.name}: {relative} is missing, meta/ speaks of it")
        return path


def _stored_name(key: str) -> str:
    if key in ("next.reward", "next.done"):
        return key.removeprefix("next.")
    return "obs" + key.removeprefix("observation") if key.startswith("observation") else key


def _why_not(feature: dict[str, Any]) -> str | None:
    dtype = str(feature.get("dtype"))
    if dtype == "video":
        return why_no_video(feature)
    if dtype == "image" and is_depth(feature):
        return "image of a depth map, whose values of 16 bits are not imported"
    if dtype in ("image", "bool") or dtype.startswith(("float", "int", "uint")):
        return None
    return f"dtype {dtype}"


def _nbytes(feature: dict[str, Any]) -> int:
    """Bytes of one frame's value, about."""
    dtype = str(feature["dtype"])
    size = 1 if dtype in ("image", "video", "bool") else np.dtype(dtype).itemsize
    for axis in feature.get("shape") or ():
        size *= int(axis)
    return size
