"""Importer of NumPy arrays: a dict, an `.npz` file or a folder of `.npy` files.

There are two layouts:

- *Padded*: arrays are (n, t, ...) with one entry for each episode. `lengths` gives the number of real steps of each. An
  array of shape (n,) has one value for each episode.
- *Flat*: arrays are (N, ...) with one entry for each step. `ends` marks where episodes end: positions one past each
  last step, or N booleans that are True on each last step.

Names are kept. Nested dicts are flattened with dots.

A folder of `.npy` files is memory-mapped and read a slice at a time. An `.npz` archive cannot be mapped, so its arrays
are read whole. `lengths` or `ends` may be one of the files. So may `untimed`: the names of the arrays with one value
for each episode, which are (n, ...) in either layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.arguments import did_you_mean
from geartrain.errors import ArgumentError, SourceError
from geartrain.integrations.datasets.episode import (
    Array,
    Episode,
    Extent,
    FieldChoice,
    Source,
    choose,
    flatten,
    reading,
)

LOOKS_FOR = "a .npz file, or a folder of .npy files"


def recognise(path: Path) -> bool:
    """Whether the path is an `.npz` file or a folder with `.npy` files in it."""
    if path.is_dir():
        return next(path.glob("*.npy"), None) is not None
    return path.is_file() and path.suffix == ".npz"


class ArraySource(Source):
    """Episodes of a dict of arrays; views, no copies.

    Args:
        arrays: name -> array, possibly nested, or the path of an `.npz` file or a folder of `.npy`.
        lengths: steps of each episode, for padded arrays, or the name of the array with them. By default every episode
            fills the whole second axis.
        ends: ends of the episodes, for flat arrays, or the name of the array with them, such as "terminals".
        untimed: fields without a time axis. Padded layout: name those with more than one axis. Flat layout: name all
            fields with one value for each episode.

    Raises:
        SourceError: arrays that disagree about the number of episodes or steps.
    """

    def __init__(
        self,
        arrays: Mapping[str, Any] | str | Path,
        *,
        fields: FieldChoice = None,
        skip_unsupported: bool = False,
        lengths: Array | str | None = None,
        ends: Array | str | None = None,
        untimed: Collection[str] = (),
    ) -> None:
        if isinstance(untimed, str):
            untimed = (untimed,)
        if not isinstance(untimed, Collection) or not all(isinstance(name, str) for name in untimed):
            raise ArgumentError(f"untimed is names of fields, found {untimed!r}")
        if isinstance(arrays, Mapping):
            self.name = "dict of arrays"
            found = {key: np.asarray(value) for key, value in flatten(arrays).items()}
        else:
            self.name = str(arrays)
            found = _load(Path(arrays))
        # The keys that describe the others come from the files only where they are not given.
        if lengths is None and ends is None:
            lengths, ends = found.pop("lengths", None), found.pop("ends", None)
        if lengths is not None and ends is not None:
            raise SourceError(f"{self.name}: lengths are for padded arrays, ends for flat ones")
        lengths, ends = self._named("lengths", lengths, found), self._named("ends", ends, found)
        named = found.pop("untimed").tolist() if "untimed" in found and found["untimed"].dtype.kind == "U" else []
        if not found:
            raise SourceError(f"{self.name}: holds no array")
        available = {name: _why_not(array) for name, array in found.items()}
        chosen = choose(self.name, fields, available, list(available), skip_unsupported)
        self._arrays = {stored: found[name] for stored, name in chosen.items()}
        unknown = sorted(set(untimed) - self._arrays.keys())
        if unknown:
            raise SourceError(
                f"{self.name}: untimed names no field: {', '.join(unknown)}; there are {', '.join(self._arrays)}"
                f"{did_you_mean(unknown, self._arrays)}"
            )
        self._untimed = frozenset([*untimed, *(stored for stored, name in chosen.items() if name in named)])
        self._starts: Array | None = None
        timed = {name: len(array) for name, array in self._arrays.items() if name not in self._untimed}
        if ends is not None and timed:
            size = self._one_size(timed)
            self._starts, self._lengths = self._flat(np.asarray(ends), size)
            once = {name: len(self._arrays[name]) for name in self._untimed}
            if set(once.values()) - {len(self._lengths)}:
                raise SourceError(f"{self.name}: there are {len(self._lengths)} episodes, and values for {once}")
        else:
            size = self._one_size({name: len(array) for name, array in self._arrays.items()})
            self._untimed |= {name for name, array in self._arrays.items() if array.ndim == 1}
            self._lengths = self._padded(lengths, size)
        self.episodes = len(self._lengths)

    def __iter__(self) -> Iterator[Episode]:
        """Every episode, as views of the arrays."""
        for index, length in enumerate(self._lengths.tolist()):
            if self._starts is not None:
                start = int(self._starts[index])
                where = slice(start, start + length)
                name = f"episode {index} (steps {where.start} to {where.stop - 1})"
                timed = {key: array[where] for key, array in self._arrays.items() if key not in self._untimed}
                once = {key: np.asarray(array[index]) for key, array in self._arrays.items() if key in self._untimed}
                yield Episode(name, timed, once)
                continue
            timed = {key: array[index, :length] for key, array in self._arrays.items() if key not in self._untimed}
            once = {key: np.asarray(array[index]) for key, array in self._arrays.items() if key in self._untimed}
            yield Episode(f"episode {index}", timed, once)

    def extent(self) -> Extent:
        """From the lengths; reads no data."""
        return Extent(len(self._lengths), int(self._lengths.max(initial=0)))

    def _named(self, what: str, given: Array | str | None, found: Mapping[str, Array]) -> Array | None:
        """The array of a name; it stays a field as well."""
        if isinstance(given, str):
            if given not in found:
                raise SourceError(
                    f"{self.name}: {what} names no array: {given}; there are {', '.join(found)}"
                    f"{did_you_mean(given, found)}"
                )
            return found[given]
        return given

    def _one_size(self, sizes: Mapping[str, int]) -> int:
        if len(set(sizes.values())) != 1:
            raise SourceError(f"{self.name}: the arrays disagree on their first axis: {sizes}")
        return next(iter(sizes.values()))

    def _flat(self, ends: Array, steps: int) -> tuple[Array, Array]:
        ends = ends if ends.dtype == bool else self._whole("ends", ends)
        if ends.dtype == bool:
            if ends.shape != (steps,):
                raise SourceError(f"{self.name}: {steps} steps need as many ends, not {ends.shape}")
            ends = np.flatnonzero(ends) + 1
        if ends.ndim != 1:
            raise SourceError(f"{self.name}: ends are one number an episode, or one flag a step; found {ends.shape}")
        edges = np.concatenate([[0], ends])
        if np.any(np.diff(edges) <= 0) or edges[-1] > steps:
            raise SourceError(f"{self.name}: ends must rise from above 0 to at most {steps}, one past each last step")
        if edges[-1] < steps:  # the last episode was not finished when the data was taken
            edges = np.append(edges, steps)
        return edges[:-1], np.diff(edges)

    def _whole(self, what: str, values: Array) -> Array:
        """Whole numbers of any dtype, as int64."""
        if values.dtype.kind not in "iuf":
            raise SourceError(f"{self.name}: {what} are whole numbers, found {values.dtype}")
        wrong = values[~(np.abs(values.astype(np.float64)) < 2**53) | (values != np.floor(values))].ravel()
        if len(wrong):
            raise SourceError(f"{self.name}: {what} are whole numbers, found {wrong[0]}")
        return values.astype(np.int64)

    def _padded(self, lengths: Array | None, episodes: int) -> Array:
        sizes = {name: array.shape[1] for name, array in self._arrays.items() if name not in self._untimed}
        if len(set(sizes.values())) > 1:
            raise SourceError(
                f"{self.name}: the arrays disagree on their second axis, time: {sizes}. Name those "
                f"without a time axis in untimed=, or give ends= if the first axis is time"
            )
        longest = next(iter(sizes.values()), 1)
        if lengths is None:
            return np.full(episodes, longest, np.int64)
        lengths = self._whole("lengths", np.asarray(lengths))
        if lengths.shape != (episodes,):
            raise SourceError(f"{self.name}: {episodes} episodes need as many lengths, found shape {lengths.shape}")
        wrong = np.flatnonzero((lengths < 0) | (lengths > longest))
        if len(wrong):
            raise SourceError(
                f"{self.name}: episode {wrong[0]}: length {lengths[wrong[0]]}, but the arrays hold 0 to {longest} steps"
            )
        return lengths


def _load(path: Path) -> dict[str, Array]:
    if path.is_dir():
        arrays = {}
        for file in sorted(path.glob("*.npy")):
            with reading(str(file), "an .npy file without objects"):
                _check_beginning(file, b"\x93NUMPY")
                arrays[file.stem] = np.load(file, mmap_mode="r", allow_pickle=False)
        return arrays
    with reading(str(path), "an .npz file without objects"):
        _check_beginning(path, b"PK\x03\x04", b"PK\x05\x06")  # the second: of an archive without a file
        archive = np.load(path, allow_pickle=False)
    with reading(str(path), "an .npz file without objects"), archive:
        names = list(archive.files)
        if len(set(names)) != len(names):
            raise SourceError(f"{path}: holds two arrays of one name: {', '.join(sorted(names))}")
        arrays = {}
        for name in names:
            with reading(f"{path}: array {name!r}", "an array without objects"):
                arrays[name] = np.asarray(archive[name])
        return arrays


def _check_beginning(path: Path, *known: bytes) -> None:
    """Raises `SourceError` for a file that NumPy would take for a pickle, as it does with all that it does not know."""
    with path.open("rb") as file:
        found = file.read(max(map(len, known)))
    if not found.startswith(known):
        begins = f"begins with {found!r}" if found else "is empty"
        raise SourceError(f"{path}: is damaged, or no {path.suffix} file: it {begins}")


def _why_not(array: Array) -> str | None:
    if array.ndim == 0:
        return "a single value, not one per episode"
    return f"dtype {array.dtype}" if array.dtype.kind in "OSUVMm" else None
