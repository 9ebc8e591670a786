"""Importer of local Minari datasets, in their HDF5, Arrow and Parquet layouts.

Minari keeps one more observation than actions. Action t was chosen at `observations[t]`, and `observations[T]` follows
the last action. A row has T steps:

| stored | found |
|---|---|
| obs, action, reward, terminated, truncated | observations[:T], actions, rewards, terminations, truncations |
| final_obs (one per row) | observations[T] |
| next_obs | observations[1:], only when `fields` names it |
| infos.x | infos/x[:T], only when `fields` names it |

Dict and Tuple spaces are flattened with dots: `obs.camera`, `action.0`. JPEG-encoded images are decoded.

The minari package opens the dataset, because it checks the version and knows the spaces. The requested columns are then
read with h5py or pyarrow. `MinariDataset.iterate_episodes` of Minari 0.5.4 is not used, for three reasons:

- It reads every column.
- It raises ValueError for an Arrow episode whose infos hold NumPy numbers.
- It silently stops after the first piece, 32,768 rows, of a longer Arrow or Parquet episode.

Minari's writer also loses the order of those pieces, because it does not ask pyarrow to keep it. In one episode of
300,000 steps, steps 98,304 to 131,071 came after step 262,143. Nothing in the file tells the order, so the importer
refuses such an episode by name. HDF5 is not affected.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.extras import require
from geartrain.core.json_values import read_object
from geartrain.errors import SourceError
from geartrain.integrations.datasets.arrow import column_values
from geartrain.integrations.datasets.episode import (
    Array,
    Episode,
    FieldChoice,
    FormatSource,
    Metadata,
    choose,
    count_of,
    flags,
    plain,
    reading,
    total,
)
from geartrain.integrations.datasets.images import decode_image

LOOKS_FOR = "a folder with data/metadata.json that names a data_format (hdf5, arrow, parquet)"

_TERMS = {
    "obs": "observations",
    "next_obs": "observations",
    "final_obs": "observations",
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminations",
    "truncated": "truncations",
    "infos": "infos",
}
_USUAL = ("obs", "action", "reward", "terminated", "truncated", "final_obs")

# Leaf of a dataset, such as ("observations", "camera"), to its array; from one episode.
_Reader = Callable[[tuple[str, ...]], Array]


def recognise(path: Path) -> bool:
    """Whether the path is a Minari dataset's folder, or the data folder in it."""
    return _data_folder(path) is not None


class MinariSource(FormatSource):
    """Episodes of a local Minari dataset; nothing is downloaded.

    Args:
        path: the dataset's folder, or its id if it is in Minari's own folder.

    Raises:
        SourceError: no dataset there, or one that the installed Minari does not support.
        MissingDependencyError: minari, h5py or pyarrow is not installed.
    """

    def __init__(self, path: str | Path, *, fields: FieldChoice = None, skip_unsupported: bool = False) -> None:
        self.name = str(path)
        minari = require("minari", "geartrain[minari]", "Reading Minari datasets")
        self._folder = self._find(path)
        with reading(f"{self.name}: metadata.json", "the metadata of a Minari dataset that the installed Minari reads"):
            storage = minari.MinariDataset(self._folder).storage
        self._format = str(storage.FORMAT)
        self._jpeg = bool(getattr(storage, "jpeg_encoding", True))
        self._spaces = {"observations": storage.observation_space, "actions": storage.action_space}
        with reading(f"{self.name}: episodes' metadata", "total_steps of each episode"):
            self._about = [
                {name: found for name, value in metadata.items() if (found := plain(value)) is not None}
                for metadata in storage.get_episode_metadata(range(storage.total_episodes))
            ]
            self._lengths = [count_of("total_steps", metadata["total_steps"]) for metadata in self._about]
        self.episodes = len(self._lengths)
        if not self._lengths:
            raise SourceError(f"{self.name}: holds no episode")
        self._leaf_of: dict[str, tuple[str, ...]] = {}
        with reading(f"{self.name}: episode_0", "the spaces of its metadata"):
            available = self._available()
            self._check_count()
        default = [name for name in available if name.partition(".")[0] in _USUAL]
        self._chosen = choose(self.name, fields, available, default, skip_unsupported)

    def read(self, numbers: Sequence[int] | None = None) -> Iterator[Episode]:
        """The episodes of these ids; nothing of others is read."""
        with self._opened() as opened:
            for number in range(len(self._lengths)) if numbers is None else numbers:
                with reading(f"{self.name}: episode_{number}", f"an episode in Minari's {self._format} layout"):
                    read = self._reader(opened, number)
                yield self._episode(number, self._lengths[number], read)

    def metadata(self) -> Iterator[Mapping[str, Any]]:
        """What Minari keeps of each episode; no data is read, but the rewards where `return` is asked for."""
        for number, about in enumerate(self._about):
            more = {name: value for name, value in about.items() if name != "total_steps"}
            later = {"return": functools.partial(self.figure, "reward", total, number)}
            yield Metadata(number, {"length": self._lengths[number], **more}, later)

    def _episode(self, number: int, length: int, read: _Reader) -> Episode:
        timed: dict[str, Array] = {}
        once: dict[str, Array] = {}
        follows: dict[str, str] = {}
        leaves: dict[tuple[str, ...], Array] = {}
        stored_as = {name: stored for stored, name in self._chosen.items()}
        for stored, name in self._chosen.items():
            leaf = self._leaf_of[name]
            if leaf not in leaves:
                place = f"{self.name}: episode_{number}: field {name!r}"
                with reading(place, "an array of steps"):
                    values = np.asarray(read(leaf))
                    held = len(values)
                # Arrow and Parquet pad all columns to the observations' T + 1; infos have the reset's or do not.
                padded = leaf[0] == "infos" or self._format != "hdf5"
                steps = {length + 1} if leaf[0] == "observations" else {length, length + 1} if padded else {length}
                if held not in steps:
                    raise SourceError(f"{place} has {held} steps, its metadata promise {min(steps)}")
                if leaf[0] in ("terminations", "truncations"):
                    values = flags(place, values[:length])
                leaves[leaf] = values
            values = leaves[leaf]
            top, dot, below = name.partition(".")
            if top == "final_obs":
                once[stored] = values[length]
                follows[stored] = stored_as.get(f"obs{dot}{below}", "obs")
            else:
                start = 1 if top == "next_obs" else 0
                timed[stored] = values[start : start + length]
        return Episode(f"episode_{number}", timed, once, follows)

    def _find(self, path: str | Path) -> Path:
        folder = _data_folder(Path(path))
        if folder is None and not Path(path).exists():
            root = require("minari.storage.datasets_root_dir", "geartrain[minari]", "Reading Minari datasets")
            folder = _data_folder(root.get_dataset_path(str(path)))
        if folder is None:
            raise SourceError(f"{path}: no Minari dataset; looked for {LOOKS_FOR}")
        return folder

    def _opened(self) -> Any:
        """What stays open while the episodes are read: the HDF5 file, or nothing."""
        if self._format == "hdf5":
            h5py = require("h5py", "geartrain[minari]", "Reading Minari's HDF5 files")
            with reading(f"{self.name}: main_data.hdf5", "HDF5"):
                return h5py.File(self._folder / "main_data.hdf5", "r")
        return contextlib.nullcontext()

    def _check_count(self) -> None:
        """Refuses files that hold more episodes than the metadata speak of."""
        if self._format == "hdf5":
            with self._opened() as opened:
                held = sum(str(name).startswith("episode_") for name in opened)
        else:
            held = sum(each.name.isdecimal() for each in self._folder.iterdir())
        if held != len(self._lengths):
            raise SourceError(f"{self.name}: holds {held} episodes, its metadata promise {len(self._lengths)}")

    def _reader(self, opened: Any, number: int) -> _Reader:
        if self._format == "hdf5":
            group = opened[f"episode_{number}"]
            return lambda leaf: self._from_hdf5(group, leaf)
        batch = self._batch(number)
        return lambda leaf: self._from_arrow(batch, leaf)

    def _batch(self, number: int) -> Any:
        """The Arrow record batch that an episode is, with the columns of the chosen fields.

        Raises:
            ValueError: it is in several pieces, whose order is unknown.
        """
        files = sorted((self._folder / str(number)).glob(f"*.{self._format}"))
        if len(files) != 1:
            raise ValueError(f"{len(files)} .{self._format} files in its folder, expected one")
        if self._format == "arrow":
            arrow = require("pyarrow", "geartrain[minari]", "Reading Minari's Arrow files")
            file = arrow.ipc.open_file(arrow.memory_map(str(files[0])))
            pieces = file.num_record_batches

            def read(index: int) -> Any:
                batch = file.get_batch(index)
                batch.validate(full=True)  # the bytes are used in place: offsets must lie in the file
                return batch

        else:
            parquet = require("pyarrow.parquet", "geartrain[minari]", "Reading Minari's Parquet files")
            file = parquet.ParquetFile(files[0])
            wanted = [*dict.fromkeys(self._leaf_of[name][0] for name in self._chosen.values())]
            pieces = file.num_row_groups

            def read(index: int) -> Any:
                table = file.read_row_group(index, columns=wanted, use_threads=False)
                return table.combine_chunks().to_batches()[0]

        if pieces != 1:
            raise ValueError(
                f"it is stored in {pieces} pieces, whose order Minari's writer does not keep, so its "
                f"steps may be out of order; episodes this long need Minari's HDF5 layout"
            )
        return read(0)

    def _from_hdf5(self, group: Any, leaf: tuple[str, ...]) -> Array:
        top, *below = leaf
        item = group[top]
        for key in below:
            item = item[key] if key in item else item[f"_index_{key}"]
        values: Array = item[()]
        space = self._space(leaf)
        if self._is_jpeg(space):
            return _images([np.asarray(image, np.uint8).tobytes() for image in values], space)
        return values

    def _from_arrow(self, batch: Any, leaf: tuple[str, ...]) -> Array:
        top, *below = leaf
        field, column = batch.schema.field(top), batch.column(top)
        for key in below:
            index = field.type.get_field_index(key)
            field, column = field.type.field(index), column.field(index)
        space = self._space(leaf)
        if self._is_jpeg(space):
            length = len(column) if top == "observations" else len(column) - 1  # the rest is padding
            return _images([column[i].as_py() for i in range(length)], space)
        shape = getattr(space, "shape", None) if space is not None else None
        if (field.metadata or {}).get(b"shape") is not None:  # infos say their shape themselves
            shape = tuple(int(n) for n in field.metadata[b"shape"].split(b",") if n)
        return column_values(column, shape)

    def _space(self, leaf: tuple[str, ...]) -> Any:
        space: Any = self._spaces.get(leaf[0])
        for key in leaf[1:] if space is not None else ():
            space = space.spaces[int(key) if isinstance(space.spaces, tuple | list) else key]
        return space

    def _is_jpeg(self, space: Any) -> bool:
        if space is None or not self._jpeg:
            return False
        storage = require("minari.dataset.minari_storage", "geartrain[minari]", "Reading Minari datasets")
        return bool(storage.is_image_space(space))

    def _available(self) -> dict[str, str | None]:
        """Field -> why it cannot be stored, from the spaces, and from the first episode's infos."""
        found: dict[str, str | None] = {}

        def add(top: str, leaves: Mapping[tuple[str, ...], str | None]) -> None:
            for leaf, reason in leaves.items():
                name = ".".join([top, *leaf])
                found[name] = reason
                self._leaf_of[name] = (_TERMS[top], *leaf)

        for top in ("obs", "final_obs", "next_obs"):
            add(top, _leaves(self._spaces["observations"]))
        add("action", _leaves(self._spaces["actions"]))
        for top in ("reward", "terminated", "truncated"):
            add(top, {(): None})
        with self._opened() as opened:
            add("infos", dict.fromkeys(self._info_leaves(opened)))
        return found

    def _info_leaves(self, opened: Any) -> list[tuple[str, ...]]:
        leaves: list[tuple[str, ...]] = []
        if self._format == "hdf5":
            group = opened["episode_0"].get("infos")
            if group is not None:
                group.visit(
                    lambda path: leaves.append(tuple(path.split("/"))) if hasattr(group[path], "shape") else None
                )
            return leaves

        def walk(kind: Any, prefix: tuple[str, ...]) -> None:
            if not str(kind).startswith("struct<"):
                leaves.append(prefix)
                return
            for field in kind:
                walk(field.type, (*prefix, field.name))

        suffix = f"*.{self._format}"
        file = next((self._folder / "0").glob(suffix), None)
        if file is None:
            return leaves
        if self._format == "arrow":
            arrow = require("pyarrow", "geartrain[minari]", "Reading Minari's Arrow files")
            schema = arrow.ipc.open_file(arrow.memory_map(str(file))).schema
        else:
            schema = require("pyarrow.parquet", "geartrain[minari]", "Reading Minari's Parquet files").read_schema(file)
        if "infos" in schema.names:
            walk(schema.field("infos").type, ())
        return leaves


def _data_folder(path: Path) -> Path | None:
    """The folder with the dataset's metadata.json: the path itself, or `data` in it."""
    for folder in (path, path / "data"):
        metadata = folder / "metadata.json"
        if not metadata.is_file():
            continue
        try:
            if "data_format" in read_object(metadata):
                return folder
        except (OSError, ValueError):
            continue
    return None


def _leaves(space: Any) -> dict[tuple[str, ...], str | None]:
    """Path of each leaf of a space -> why it cannot be stored."""
    children: Any = getattr(space, "spaces", None)
    if children is None:
        storable = getattr(space, "dtype", None) is not None and space.shape is not None
        kind = type(space).__name__
        return {(): None if storable and kind not in ("Text", "Sequence", "Graph") else f"a {kind} space"}
    pairs = children.items() if hasattr(children, "items") else enumerate(children)
    return {(str(key), *leaf): reason for key, child in pairs for leaf, reason in _leaves(child).items()}


def _images(encoded: list[bytes], space: Any) -> Array:
    channels = space.shape[2] if len(space.shape) == 3 else None
    return np.stack([decode_image(data, channels, "uint8", "minari") for data in encoded])
