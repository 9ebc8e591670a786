"""Importer of RLDS datasets as TFDS writes them, without TensorFlow.

    dataset_info.json                           splits, and how many records each shard holds
    features.json                               dtype, shape and encoding of every feature
    <name>-<split>.tfrecord-00000-of-00008      or .array_record-...: one record per episode

A record is a `tf.train.Example` with flattened steps: all values of `steps/observation/state` are in one list. Names
change as follows, with dots for slashes:

| stored | found |
|---|---|
| obs.x, action, reward | steps/observation/x, steps/action, steps/reward |
| discount, is_first, is_last, is_terminal | steps/... of the same name |
| episode_metadata.x (one per row) | episode_metadata/x |

`is_terminal` is not renamed to `terminated`, because its meaning differs: RLDS marks the step whose *observation* is
terminal. In a dataset that follows RLDS to the letter, that last step's action and reward mean nothing. Every step is
kept, including that one.

TFDS itself has stored float64 as float32, and images as PNG or JPEG. Text cannot be stored; see `skip_unsupported`.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.json_values import read_json
from geartrain.errors import SourceError
from geartrain.integrations.datasets.episode import (
    Array,
    Episode,
    FieldChoice,
    FormatSource,
    Metadata,
    choose,
    plain,
    reading,
)
from geartrain.integrations.datasets.images import decode_image
from geartrain.integrations.datasets.tfrecord import array_records, parse_example, tfrecords

LOOKS_FOR = "a folder with features.json, dataset_info.json and .tfrecord or .array_record shards"

_SHARD = re.compile(r"-(?P<split>[^-]+)\.(?P<kind>\w+)-(?P<index>\d{5})-of-(?P<count>\d{5})$")
_READERS: dict[str, Callable[[Path], Iterator[bytes]]] = {
    "tfrecord": tfrecords,
    "array_record": array_records,
}


def recognise(path: Path) -> bool:
    """Whether the folder, or the one version folder in it, was written by TFDS."""
    return _version_folder(path) is not None


@dataclass(frozen=True)
class _Leaf:
    """One feature of features.json."""

    key: str  # of the record: "steps/observation/state"
    timed: bool
    kind: str  # "tensor", "image", or why it cannot be stored
    shape: tuple[int | None, ...] = ()
    dtype: str = ""
    encoding: str = "none"
    ragged: bool = False  # a nested sequence: TFDS keeps its values and row lengths apart

    @property
    def reason(self) -> str | None:
        return None if self.kind in ("tensor", "image") else self.kind


class RldsSource(FormatSource):
    """Episodes of a TFDS folder, one record in memory at a time.

    TFDS metadata does not tell the length of the longest episode. Finding it takes a pass over the records, which
    parses but does not decode them. Give `max_length` to `import_dataset` to read them only once.

    Args:
        path: the folder of one version, or the one above it if it holds one version.
        split: "train", "val", ..., or "all"; needed where there are several.

    Raises:
        SourceError: no such split, a shard is missing, or metadata that cannot be read.
        MissingDependencyError: protobuf, crc32c or array_record is not installed.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        fields: FieldChoice = None,
        skip_unsupported: bool = False,
        split: str | None = None,
    ) -> None:
        self.name = str(path)
        folder = _version_folder(Path(path))
        if folder is None:
            raise SourceError(f"{path}: no TFDS dataset; looked for {LOOKS_FOR}")
        with reading(f"{path}: features.json", "features as TFDS writes them"):
            self._leaves = self._features(folder)
        with reading(f"{path}: dataset_info.json", "splits with shardLengths"):
            self._shards = self._find_shards(folder, split)
        known = [count for _, count in self._shards]
        self.episodes = None if None in known else sum(count or 0 for count in known)
        available = {name: leaf.reason for name, leaf in self._leaves.items()}
        self._chosen = choose(self.name, fields, available, list(available), skip_unsupported)

    def read(self, numbers: Sequence[int] | None = None) -> Iterator[Episode]:
        """The records as episodes. Others are not decoded, and shards without one of the numbers are not read."""
        for _, where, features in self._records(numbers):
            timed: dict[str, Array] = {}
            once: dict[str, Array] = {}
            steps = self._steps(features)
            for stored, name in self._chosen.items():
                leaf = self._leaves[name]
                with reading(f"{self.name}: {where}: field {name!r}", f"{leaf.kind} of {leaf.dtype or 'TFDS'}"):
                    values = _decode(features, leaf, steps if leaf.timed else 1)
                if leaf.timed:
                    timed[stored] = values
                else:
                    once[stored] = values[0]
            yield Episode(where, timed, once)

    def metadata(self) -> Iterator[Mapping[str, Any]]:
        """`length`, `return`, numbers and texts of the episode's metadata, and texts of the first step. Every record is
        read and parsed, nothing of it decoded."""
        for index, where, features in self._records(None):
            known: dict[str, Any] = {"length": self._steps(features)}
            for name, leaf in self._leaves.items():
                told = leaf.kind == "text" or (leaf.kind == "tensor" and (not leaf.timed or name == "reward"))
                if leaf.key not in features or not told:
                    continue
                values = _values_of(features[leaf.key])
                with reading(f"{self.name}: {where}: {leaf.key}", "numbers, or text"):
                    if leaf.timed and name == "reward":
                        known["return"] = float(np.sum(np.asarray(values, np.float64)))
                    elif len(values) and (leaf.timed or len(values) == 1) and leaf.encoding == "none":
                        known[name.removeprefix("episode_metadata.")] = plain(
                            bool(values[0]) if leaf.dtype == "bool" else values[0]
                        )
            yield Metadata(index, known)

    def _records(self, numbers: Sequence[int] | None) -> Iterator[tuple[int, str, Any]]:
        """Records with their numbers; those of `numbers` alone, where they are given."""
        wanted = None if numbers is None else set(numbers)
        index = 0  # of the record, in all shards
        for path, count in self._shards:
            if numbers is not None and index > numbers[-1]:
                return
            if wanted is not None and count is not None and wanted.isdisjoint(range(index, index + count)):
                index += count
                continue
            number = 0
            records = _READERS[_kind(path)](path)
            while True:
                with reading(f"{self.name}: {path.name} record {number}", _kind(path)):
                    data = next(records, None)
                if data is None:
                    break
                number += 1
                index += 1
                if wanted is not None and index - 1 not in wanted:
                    continue
                where = f"{path.name} record {number - 1}"
                with reading(f"{self.name}: {where}", "a tf.train.Example"):
                    features = parse_example(data)
                yield index - 1, where, features
            if count is not None and number != count:
                raise SourceError(
                    f"{self.name}: {path.name} holds {number} records, dataset_info.json promises {count}"
                )

    def _steps(self, features: Any) -> int:
        """Steps of an episode: as many values as any feature with one value per step has."""
        for leaf in self._leaves.values():
            if not leaf.timed or leaf.ragged or leaf.kind not in ("tensor", "image", "text"):
                continue
            if leaf.key not in features:
                continue
            values = _values_of(features[leaf.key])
            size = 1 if leaf.encoding != "none" or leaf.kind != "tensor" else _size(leaf.shape)
            if size:
                return len(values) // size
        return 0

    def _features(self, folder: Path) -> dict[str, _Leaf]:
        document = read_json(folder / "features.json")
        found: dict[str, _Leaf] = {}
        for leaf in _walk(document, (), timed=False):
            parts = leaf.key.split("/")
            if leaf.timed:
                parts = parts[1:]
            if parts and parts[0] == "observation":
                parts[0] = "obs"
            found[".".join(parts)] = leaf
        if not any(leaf.timed for leaf in found.values()):
            raise SourceError(
                f"{self.name}: features.json has no 'steps', so this is no RLDS dataset of episodes; "
                f"it has {', '.join(found) or 'nothing'}"
            )
        return found

    def _find_shards(self, folder: Path, split: str | None) -> list[tuple[Path, int | None]]:
        """The shards to read, in order, each with the number of records it should hold."""
        shards: dict[str, dict[int, Path]] = {}
        counts: dict[str, int] = {}
        for file in sorted(folder.iterdir()):
            match = _SHARD.search(file.name)
            if match is None:
                continue
            if match["kind"] not in _READERS:
                raise SourceError(
                    f"{self.name}: {file.name}: {match['kind']} files are not read, only {' and '.join(_READERS)}"
                )
            shards.setdefault(match["split"], {})[int(match["index"])] = file
            counts[match["split"]] = int(match["count"])
        if not shards:
            raise SourceError(f"{self.name}: no shards such as <name>-train.tfrecord-00000-of-00001")
        if split is None and len(shards) == 1:
            split = next(iter(shards))
        if split is None or (split != "all" and split not in shards):
            problem = "has several splits" if split is None else f"has no split {split!r}"
            raise SourceError(f"{self.name}: {problem}: choose split= from {', '.join(sorted(shards))}, or 'all'")
        promised = _shard_lengths(read_json(folder / "dataset_info.json"))
        found: list[tuple[Path, int | None]] = []
        for name in sorted(shards) if split == "all" else [split]:
            missing = sorted(set(range(counts[name])) - shards[name].keys())
            if missing:
                raise SourceError(
                    f"{self.name}: split {name!r}: {len(missing)} of {counts[name]} shards are "
                    f"missing, the first is number {missing[0]:05d}"
                )
            lengths = promised.get(name, [])
            for index, file in sorted(shards[name].items()):
                found.append((file, lengths[index] if len(lengths) == counts[name] else None))
        return found


def _version_folder(path: Path) -> Path | None:
    if not path.is_dir():
        return None
    if (path / "features.json").is_file():
        return path
    versions = [file.parent for file in path.glob("*/features.json")]
    return versions[0] if len(versions) == 1 else None


def _shard_lengths(info: Mapping[str, Any]) -> dict[str, list[int]]:
    """Split -> records per shard; nothing for a split whose numbers are no numbers."""
    found = {}
    for split in info.get("splits", []):
        texts = [str(text) for text in split.get("shardLengths", [])]
        if all(text.isdecimal() for text in texts):
            found[str(split.get("name"))] = [int(text) for text in texts]
    return found


def _walk(node: Mapping[str, Any], path: tuple[str, ...], timed: bool) -> Iterator[_Leaf]:
    """The leaves of features.json; a `Dataset` or `Sequence` named steps is where time begins."""
    key = "/".join(path)
    if "featuresDict" in node:
        for name, child in node["featuresDict"].get("features", {}).items():
            yield from _walk(child, (*path, name), timed)
    elif "sequence" in node:
        inner = node["sequence"].get("feature", {})
        if not timed and path == ("steps",):
            yield from _walk(inner, path, timed=True)
            return
        length = int(node["sequence"].get("length", -1))
        nested = list(_walk(inner, path, timed))
        for leaf in nested:
            if not timed or length < 1 or leaf.kind != "tensor" or leaf.ragged or len(nested) > 1:
                yield _Leaf(leaf.key, timed, "a sequence of any length within a step")
            else:
                shape = (length, *leaf.shape)
                yield _Leaf(key, timed, "tensor", shape, leaf.dtype, leaf.encoding, ragged=True)
    elif "tensor" in node:
        spec = node["tensor"]
        shape = _shape(spec)
        dtype, encoding = str(spec.get("dtype", "")), str(spec.get("encoding") or "none").lower()
        if dtype in ("string", "object", "str"):
            kind = "text"
        elif None in shape:
            kind = "a tensor of any shape"
        else:
            kind = "tensor"
        yield _Leaf(key, timed, kind, shape, dtype, encoding)
    elif "image" in node:
        spec = node["image"]
        yield _Leaf(key, timed, "image", _shape(spec), str(spec.get("dtype") or "uint8"))
    elif "classLabel" in node:
        yield _Leaf(key, timed, "tensor", (), "int64")
    elif "boundingBox" in node:
        yield _Leaf(key, timed, "tensor", (4,), "float32")
    else:
        kinds = [name for name in ("text", "video", "audio", "translation") if name in node]
        yield _Leaf(key, timed, kinds[0] if kinds else str(node.get("pythonClassName", "unknown")))


def _shape(spec: Mapping[str, Any]) -> tuple[int | None, ...]:
    dimensions = [int(n) for n in spec.get("shape", {}).get("dimensions", [])]
    return tuple(None if n < 0 else n for n in dimensions)


def _decode(features: Any, leaf: _Leaf, rows: int) -> Array:
    """The values of one feature, as (rows, *shape)."""
    key = leaf.key
    if leaf.ragged:
        lengths = _values_of(_feature(features, f"{key}/ragged_row_lengths_0"))
        if any(length != leaf.shape[0] for length in lengths):
            raise ValueError(f"its sequences are not all of {leaf.shape[0]} values")
        key = f"{key}/ragged_flat_values"
    values = _values_of(_feature(features, key))
    if leaf.kind == "image":
        _expect(len(values), rows)
        if rows == 0:
            return np.empty((0, *(size or 0 for size in leaf.shape)), leaf.dtype)
        channels = leaf.shape[2] if len(leaf.shape) == 3 else None
        return np.stack([decode_image(data, channels, leaf.dtype, "rlds") for data in values])
    shape = tuple(size or 0 for size in leaf.shape)
    dtype = np.dtype("bool" if leaf.dtype == "bool" else leaf.dtype)
    if leaf.encoding != "none":
        _expect(len(values), rows * (shape[0] if leaf.ragged else 1))
        if leaf.encoding == "zlib":
            values = [zlib.decompress(data) for data in values]
        data = b"".join(values)
        _expect(len(data), rows * _size(leaf.shape) * dtype.itemsize)
        return np.frombuffer(data, dtype.newbyteorder("<")).reshape(rows, *shape)
    _expect(len(values), rows * _size(leaf.shape))
    held = _feature(features, key).WhichOneof("kind")
    if held not in (None, "float_list" if dtype.kind in "fc" else "int64_list"):
        raise ValueError(f"holds a {held}, features.json promises {leaf.dtype}")
    if dtype.kind in "fc":
        return np.array(values, np.float32).astype(dtype, copy=False).reshape(rows, *shape)
    # TFDS keeps every integer, and booleans, as int64; uint64 as the same bits.
    return np.array(values, np.int64).astype(dtype).reshape(rows, *shape)


def _feature(features: Any, key: str) -> Any:
    if key not in features:
        raise ValueError(f"the record has no {key!r}; it has {', '.join(sorted(features))}")
    return features[key]


def _values_of(feature: Any) -> Any:
    kind = feature.WhichOneof("kind")
    return getattr(feature, kind).value if kind is not None else ()


def _expect(found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"holds {found} values, features.json promises {expected}")


def _size(shape: tuple[int | None, ...]) -> int:
    return math.prod(axis or 0 for axis in shape)


def _kind(path: Path) -> str:
    match = _SHARD.search(path.name)
    return match["kind"] if match else ""
