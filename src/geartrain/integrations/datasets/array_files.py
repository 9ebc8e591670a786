"""Arrays of `.npz` archives and `.npy` files that may be larger than memory.

`.npy` files are mapped. An archive cannot be mapped, so its arrays are read a slice at a time.
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from geartrain.errors import SourceError
from geartrain.integrations.datasets.episode import Array, reading

#: Arrays of an archive up to this size are read at once, among them those about the episodes.
_SMALL_BYTES = 1 << 20
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def load_arrays(path: Path) -> dict[str, Any]:
    """The arrays of an `.npz` archive, or of a folder of `.npy` files, by their names.

    Large arrays are `ArchivedArray`s, or mapped.

    Raises:
        SourceError: a file of another kind, a damaged one, or one of objects.
    """
    if path.is_dir():
        arrays: dict[str, Any] = {}
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
                arrays[name] = _archived(path, archive.zip, name) or np.asarray(archive[name])
        return arrays


class ArchivedArray:
    """An array of an `.npz` archive, whose values are read from the file in rising order.

    A slice that lies before the last one is read from the array's beginning again. The archive's checksum is verified
    once the array's end has been read.

    Attributes:
        shape: of the array.
        dtype: of the array.
    """

    def __init__(self, path: Path, member: str, name: str, shape: tuple[int, ...], dtype: Any, begin: int) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self._place = f"{path}: array {name!r}"
        self._path, self._member, self._begin = path, member, begin
        self._entry_nbytes = self.dtype.itemsize * math.prod(shape[1:])
        self._file: IO[bytes] | None = None
        self._next = 0  # entry of the first axis

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, where: int | slice) -> Array:
        """An entry of the first axis, or a slice of entries, as an array of its own."""
        if isinstance(where, slice):
            begin, end, _ = where.indices(len(self))
            return self._read(begin, max(begin, end))
        entry: Array = self._read(where, where + 1)[0]
        return entry

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("the array is in a file, so that it cannot be had without a copy")
        made = self[:]
        return made if dtype is None else made.astype(dtype, copy=False)

    def close(self) -> None:
        """Closes the file, which is opened again for the next values."""
        if self._file is not None:
            self._file.close()
        self._file, self._next = None, 0

    def _read(self, begin: int, end: int) -> Array:
        with reading(f"{self._place}: entries {begin} to {end - 1}", "an array without objects"):
            values: Array = np.empty((end - begin, *self.shape[1:]), self.dtype)
            if self._file is None or begin < self._next:
                self.close()
                with zipfile.ZipFile(self._path) as archive:  # what it opened keeps the file
                    self._file = archive.open(self._member)
                _skip(self._file, self._begin)
            _skip(self._file, (begin - self._next) * self._entry_nbytes)
            into, done = values.reshape(-1).view(np.uint8).data, 0
            while done < len(into):
                got = self._file.readinto(into[done : done + (1 << 20)])  # type: ignore[attr-defined]
                if not got:
                    raise ValueError(f"the file ends {len(into) - done:,} bytes too early")
                done += got
            self._next = end
            if end == len(self) and self._file.read(1):  # reads on to where the checksum is verified
                raise ValueError("there are bytes behind the array")
        return values


def _archived(path: Path, archive: zipfile.ZipFile, name: str) -> ArchivedArray | None:
    """A large array as one that is read in slices; None for what NumPy reads at once, small or of an unusual form."""
    member = name if name in archive.namelist() else f"{name}.npy"
    if archive.getinfo(member).file_size <= _SMALL_BYTES:
        return None
    with archive.open(member) as file:
        try:
            shape, fortran, dtype = _HEADERS[np.lib.format.read_magic(file)](file)
        except KeyError:  # a later version of the format, which only names of records need
            return None
        begin = file.tell()
    ordered = not fortran or len(shape) < 2
    if not ordered or dtype.hasobject or dtype.itemsize == 0 or not shape or 0 in shape:
        return None
    promised, held = begin + math.prod(shape) * dtype.itemsize, archive.getinfo(member).file_size
    if promised != held:
        raise ValueError(f"its shape {shape} and dtype {dtype} need {promised:,} bytes, it has {held:,}")
    return ArchivedArray(path, member, name, shape, dtype, begin)


def _skip(file: IO[bytes], nbytes: int) -> None:
    while nbytes > 0:
        got = len(file.read(min(nbytes, 1 << 20)))
        if not got:
            raise ValueError(f"the file ends {nbytes:,} bytes too early")
        nbytes -= got


def _check_beginning(path: Path, *known: bytes) -> None:
    """Raises `SourceError` for a file that NumPy would take for a pickle, as it does with all that it does not know."""
    with path.open("rb") as file:
        found = file.read(max(map(len, known)))
    if not found.startswith(known):
        begins = f"begins with {found!r}" if found else "is empty"
        raise SourceError(f"{path}: is damaged, or no {path.suffix} file: it {begins}")


__all__ = ["ArchivedArray", "load_arrays"]
