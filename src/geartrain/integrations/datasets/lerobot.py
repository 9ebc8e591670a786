"""Importer of LeRobotDataset folders (v3.0, v2.1, v2.0): the parquet columns.

    meta/info.json                              features, version, path templates
    meta/episodes/chunk-000/file-000.parquet    length of each episode (v2: meta/episodes.jsonl)
    data/chunk-000/file-000.parquet             one row per frame, many episodes in a file (v2: one)
    videos/...                                  not read

| stored | found |
|---|---|
| obs.state, obs.images.front | observation.state, observation.images.front |
| action, reward, done | action, next.reward, next.done |
| timestamp, task_index, next.success, ... | the same names |
| index, episode_index, frame_index | only when `fields` names them: a row's place says as much |

Camera frames kept in videos are refused, with the list of fields that can be imported instead; images
kept inside the parquet files are decoded. A feature of shape [1] is stored as one number per step, as
it is in the files. Other formats' older versions (v1) must be converted with lerobot first.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.errors import SourceError
from geartrain.integrations.datasets.arrow import column_values
from geartrain.integrations.datasets.episode import (
    Array,
    Episode,
    Extent,
    FieldChoice,
    Source,
    choose,
    count_of,
    reading,
    require,
)
from geartrain.integrations.datasets.images import decode_image

LOOKS_FOR = "a folder with meta/info.json that names a codebase_version"

# Arrow decodes batches of about 1 MB three times as fast as batches of 16 MB, which leave the cache.
_BATCH_BYTES = 1 << 20
_PLACES = ("index", "episode_index", "frame_index")
_READ_VERSIONS = ("v2.0", "v2.1", "v3.")


def recognise(path: Path) -> bool:
    """Whether the folder has LeRobot's meta/info.json."""
    return (path / "meta" / "info.json").is_file()


class LeRobotSource(Source):
    """Episodes of a LeRobotDataset folder, a batch of frames in memory at a time.

    Raises:
        SourceError: a version that is not read, a video column, or a file that is missing.
        MissingDependencyError: pyarrow is not installed.
    """

    def __init__(self, path: str | Path, *, fields: FieldChoice = None, skip_unsupported: bool = False) -> None:
        self.name = str(path)
        self._root = Path(path)
        self._parquet = require("pyarrow.parquet", "lerobot", "Reading LeRobot datasets")
        about = f"{path}: meta/info.json"
        with reading(about, "a JSON object"):
            self._info = dict(json.loads((self._root / "meta" / "info.json").read_text()))
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
            self._data_path = str(self._info["data_path"])
            self._chunks_size = int(self._info.get("chunks_size", 1000))
        self._paths = {_stored_name(key): key for key in self._features}
        available = {name: _why_not(self._features[key]) for name, key in self._paths.items()}
        default = [name for name, key in self._paths.items() if key not in _PLACES]
        self._chosen = choose(self.name, fields, available, default, skip_unsupported)
        self._lengths, self._files = self._v3() if version.startswith("v3.") else self._v2()
        self.episodes = len(self._lengths)

    def __iter__(self) -> Iterator[Episode]:
        """Every episode, joined from the batches and files that it spans."""
        parts: list[dict[str, Array]] = []
        current, where = -1, ""
        seen = 0
        for file, index, columns in self._runs():
            if index != current:
                if parts:
                    yield self._episode(current, where, parts)
                    seen += 1
                parts, current = [], index
                where = str(file.relative_to(self._root))
            parts.append(columns)
        if parts:
            yield self._episode(current, where, parts)
            seen += 1
        if seen != len(self._lengths):
            raise SourceError(f"{self.name}: the data files hold {seen} episodes, meta promises {len(self._lengths)}")

    def extent(self) -> Extent:
        """From meta/episodes; no data is read."""
        return Extent(len(self._lengths), max(self._lengths.values(), default=0))

    def _episode(self, index: int, where: str, parts: list[dict[str, Array]]) -> Episode:
        timed = {
            stored: parts[0][stored] if len(parts) == 1 else np.concatenate([part[stored] for part in parts])
            for stored in self._chosen
        }
        episode = Episode(f"episode {index} ({where})", timed)
        if episode.length != self._lengths.get(index):
            raise SourceError(
                f"{self.name}: {episode.name}: has {episode.length} frames in a row in the data "
                f"files, meta promises {self._lengths.get(index, 'no such episode')}"
            )
        return episode

    def _runs(self) -> Iterator[tuple[Path, int, dict[str, Array]]]:
        """Runs of frames of one episode: the file, the episode and the columns."""
        keys = [self._paths[name] for name in self._chosen.values()]
        rows = max(1, _BATCH_BYTES // max(1, sum(_nbytes(self._features[key]) for key in keys)))
        for file in self._files:
            with reading(f"{self.name}: {file}", "Parquet"):
                # Without pre_buffer=False a whole row group is read ahead, which can be a whole file.
                table = self._parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
            wanted = [*dict.fromkeys([*keys, "episode_index"])]
            missing = [key for key in wanted if key not in table.schema_arrow.names]
            if missing:
                raise SourceError(f"{self.name}: {file}: has no column {', '.join(missing)}")
            for batch in self._batches(table, file, rows, wanted):
                with reading(f"{self.name}: {file}: episode_index", "whole numbers"):
                    episodes = column_values(batch.column("episode_index"), ())
                    if episodes.dtype.kind not in "iu":
                        raise TypeError(f"found {episodes.dtype}")
                edges = [0, *(np.flatnonzero(np.diff(episodes)) + 1).tolist(), len(episodes)]
                for begin, end in itertools.pairwise(edges):
                    if begin == end:
                        continue
                    piece = batch.slice(begin, end - begin)
                    yield file, int(episodes[begin]), self._columns(file, episodes[begin], piece)

    def _batches(self, table: Any, file: Path, rows: int, wanted: list[str]) -> Iterator[Any]:
        frames = 0
        batches = None
        while True:
            with reading(f"{self.name}: {file}: frame {frames} or later", "Parquet"):
                batches = batches or table.iter_batches(batch_size=rows, columns=wanted)
                batch = next(batches, None)
                if batch is None:
                    return
                batch.validate(full=True)
            yield batch
            frames += len(batch)

    def _columns(self, file: Path, episode: int, batch: Any) -> dict[str, Array]:
        columns = {}
        for stored, name in self._chosen.items():
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
            frames.append(decode_image(data, _channels(feature), "uint8", "lerobot"))
        return np.stack(frames)

    def _v3(self) -> tuple[dict[int, int], list[Path]]:
        """Length of each episode, and the data files in order."""
        tables = sorted((self._root / "meta" / "episodes").glob("*/*.parquet"))
        if not tables:
            raise SourceError(f"{self.name}: no meta/episodes/chunk-000/file-000.parquet")
        wanted = ["episode_index", "length", "data/chunk_index", "data/file_index"]
        lengths: dict[int, int] = {}
        files: dict[tuple[int, int], None] = {}
        for table in tables:
            with reading(f"{self.name}: {table}", f"Parquet with {', '.join(wanted)}"):
                for row in self._parquet.read_table(table, columns=wanted, partitioning=None).to_pylist():
                    self._add_length(lengths, row)
                    files[int(row["data/chunk_index"]), int(row["data/file_index"])] = None
        return lengths, [self._file(chunk_index=chunk, file_index=file) for chunk, file in sorted(files)]

    def _add_length(self, lengths: dict[int, int], row: dict[str, Any]) -> None:
        index = count_of("episode_index", row["episode_index"])
        if index in lengths:
            raise SourceError(f"{self.name}: meta/ speaks twice of episode {index}")
        lengths[index] = count_of("length", row["length"])

    def _v2(self) -> tuple[dict[int, int], list[Path]]:
        """The same for one file per episode."""
        path = self._root / "meta" / "episodes.jsonl"
        lengths: dict[int, int] = {}
        with reading(f"{self.name}: {path}", "lines of JSON with episode_index and length"):
            for line in path.read_text().splitlines():
                if line.strip():
                    self._add_length(lengths, json.loads(line))
        return lengths, [
            self._file(episode_chunk=index // self._chunks_size, episode_index=index) for index in sorted(lengths)
        ]

    def _file(self, **numbers: int) -> Path:
        with reading(f"{self.name}: meta/info.json: data_path", f"a template of {' and '.join(numbers)}"):
            relative = self._data_path.format(**numbers)
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
        return "video: frames in mp4 files are not imported"
    if dtype in ("image", "bool") or dtype.startswith(("float", "int", "uint")):
        return None
    return f"dtype {dtype}"


def _channels(feature: dict[str, Any]) -> int:
    """Channels of an image feature, whose axes may stand in either order."""
    shape = [int(n) for n in feature["shape"]]
    names = [str(name) for name in feature.get("names") or ()]
    first = "channel" in names[0] if names else shape[0] in (1, 3, 4) and shape[-1] not in (1, 3, 4)
    return shape[0] if first else shape[-1]


def _nbytes(feature: dict[str, Any]) -> int:
    """Bytes of one frame's value, about."""
    dtype = str(feature["dtype"])
    size = 1 if dtype in ("image", "bool") else np.dtype(dtype).itemsize
    for axis in feature.get("shape") or ():
        size *= int(axis)
    return size
