"""Export to NumPy files: an `.npz` archive, or a folder of `.npy` files that can be memory-mapped.

The layout is the flat one of arrays.py. A timed field is (N, ...): the steps of all rows, concatenated. `ends` has the
position one past each row's last step. A field with one value for each row is (rows, ...) and is named in `untimed`.
"""

from __future__ import annotations

import contextlib
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.schema import Field
from geartrain.errors import NoSpaceError, SourceError
from geartrain.integrations.datasets.episode import Array
from geartrain.integrations.datasets.stored_rows import RowGroup
from geartrain.integrations.datasets.writer import DatasetWriter, is_empty_folder, is_regular, not_of_numpy, raw_bytes

_RESERVED = ("ends", "lengths", "untimed")


class NpyWriter(DatasetWriter):
    """A folder with an `.npy` file for each field."""

    FOLDER = True
    TAKES_METADATA = True

    def __init__(self, path: Path, *, fields: Mapping[str, Field], about: str) -> None:
        path.mkdir()
        self._path = path
        self._fields = dict(fields)
        self._steps = 0
        self._files = {name: _GrowingArray(path / f"{name}.npy", f.shape, f.numpy_dtype) for name, f in fields.items()}
        self._timed = any(not field.per_row for field in fields.values())
        self._untimed = [name for name, field in fields.items() if field.per_row]
        if self._timed:
            self._files["ends"] = _GrowingArray(path / "ends.npy", (), np.dtype(np.int64))

    @classmethod
    def refused(cls, name: str, field: Field) -> str | None:
        """A name that the layout has for itself, or that is no name of a file; a type that NumPy lacks."""
        if name in _RESERVED:
            return f"the layout has an array {name!r} of its own: write it as another with fields='other={name}'"
        if "/" in name or name in (".", ".."):
            return "no name of a file: write it as another with fields='other=...'"
        return not_of_numpy(field, "NumPy")

    @classmethod
    def needed_bytes(cls, fields: Mapping[str, Field], rows: int, steps: int) -> int:
        """The values and the ends."""
        return sum(raw_bytes(fields, rows, steps).values()) + 8 * rows

    @classmethod
    def replaces(cls, path: Path) -> bool:
        """A folder of regular .npy files and nothing else, `ends.npy` or `untimed.npy` among them."""
        if is_empty_folder(path):
            return True
        if not path.is_dir():
            return False
        files = list(path.iterdir())
        return any(each.name in ("ends.npy", "untimed.npy") for each in files) and all(
            each.suffix == ".npy" and is_regular(each) for each in files
        )

    def write(self, group: RowGroup) -> int:
        """Appends to every file."""
        nbytes = 0
        for name, field in self._fields.items():
            nbytes += self._files[name].append(group.values[name] if field.per_row else group.steps(name))
        if self._timed:
            ends = self._steps + np.cumsum(group.lengths)
            self._steps = int(ends[-1]) if len(ends) else self._steps
            self._files["ends"].append(ends)
        return nbytes

    def finish(self) -> None:
        """Completes the headers."""
        for file in self._files.values():
            file.finish()
        if self._untimed:
            np.save(self._path / "untimed.npy", np.array(self._untimed))

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()


class NpzWriter(DatasetWriter):
    """An `.npz` archive.

    An archive holds one array after the other, so each array is collected in a file of its own first. While it writes,
    the export needs additional disk space for the largest field.

    Args:
        compress: deflate the arrays: slow.
    """

    FOLDER = False
    TAKES_METADATA = True

    def __init__(self, path: Path, *, fields: Mapping[str, Field], about: str, compress: bool = False) -> None:
        self._path = path
        self._compress = compress
        self._parts = path.with_name("parts")
        self._arrays = NpyWriter(self._parts, fields=fields, about=about)

    @classmethod
    def refused(cls, name: str, field: Field) -> str | None:
        """As in a folder."""
        return NpyWriter.refused(name, field)

    @classmethod
    def needed_bytes(cls, fields: Mapping[str, Field], rows: int, steps: int) -> int:
        """The collected arrays, which are removed one after the other while the archive grows."""
        sizes = raw_bytes(fields, rows, steps)
        return sum(sizes.values()) + 8 * rows

    @classmethod
    def replaces(cls, path: Path) -> bool:
        """A regular file that is an archive of .npy files and nothing else."""
        if not is_regular(path):
            return False
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        except zipfile.BadZipFile:
            return False
        return bool(names) and all(name.endswith(".npy") for name in names)

    def write(self, group: RowGroup) -> int:
        """Appends to every collected array."""
        return self._arrays.write(group)

    def finish(self) -> None:
        """Archives them."""
        self._arrays.finish()
        self._arrays.close()
        kind = zipfile.ZIP_DEFLATED if self._compress else zipfile.ZIP_STORED
        parts = sorted(self._parts.iterdir(), key=lambda each: each.stat().st_size)
        if not self._compress:  # the last one is there twice for a while
            largest = parts[-1].stat().st_size
            free = shutil.disk_usage(self._parts).free
            if free < largest:
                raise NoSpaceError(
                    f"an archive needs as much room again as its largest array has, {largest:,} bytes, and "
                    f"{free:,} are left; format 'npy' needs none. Nothing is left of the attempt"
                )
        with zipfile.ZipFile(self._path, "w", kind, allowZip64=True) as archive:
            for part in parts:
                with part.open("rb") as source, archive.open(part.name, "w", force_zip64=True) as member:
                    shutil.copyfileobj(source, member, 1 << 20)
                part.unlink()

    def close(self) -> None:
        """Removes what was collected."""
        self._arrays.close()
        shutil.rmtree(self._parts, ignore_errors=True)


class _GrowingArray:
    """An `.npy` file whose first axis grows: its header has room for any number."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._file = path.open("xb")
        self._shape, self._dtype = shape, dtype
        self._rows = 0
        self._header()
        self._begin = self._file.tell()

    def append(self, values: Array) -> int:
        """Writes rows (n, *shape); returns their bytes."""
        if values.dtype != self._dtype or values.shape[1:] != self._shape:
            raise SourceError(
                f"{self._file.name}: holds {self._dtype} {self._shape}, found {values.dtype} {values.shape}"
            )
        contiguous = np.ascontiguousarray(values)
        self._file.write(contiguous.reshape(-1).view(np.uint8).data)
        self._rows += len(values)
        return contiguous.nbytes

    def finish(self) -> None:
        self._file.seek(0)
        self._header()
        assert self._file.tell() == self._begin  # NumPy leaves room for 21 digits
        self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a full disk, which `append` or `finish` has told of
            self._file.close()

    def _header(self) -> None:
        about = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._rows, *self._shape),
        }
        np.lib.format.write_array_header_1_0(self._file, about)


__all__ = ["NpyWriter", "NpzWriter"]
