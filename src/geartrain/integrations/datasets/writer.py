"""Writers of datasets: the interface of all formats that a store can be exported to."""

from __future__ import annotations

import abc
import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar

from geartrain.core.dtypes import DTYPES
from geartrain.core.json_values import read_object
from geartrain.core.schema import Field
from geartrain.integrations.datasets.stored_rows import RowGroup


class DatasetWriter(abc.ABC):
    """Writes groups of rows into a file or folder that no other process sees yet.

    The keyword arguments of a writer's constructor, except `path`, `fields` and `about`, are its format's options.

    Args:
        path: destination, which does not exist yet.
        fields: fields to write, by the names in the file. `refused` has accepted each of them.
        about: one line about the source of the rows, for the dataset's description.
    """

    #: Whether the dataset is a folder.
    FOLDER: ClassVar[bool]
    #: Whether rows may have metadata (`StoredRows.METADATA`) as values that a row has once.
    TAKES_METADATA: ClassVar[bool] = False

    @abc.abstractmethod
    def __init__(self, path: Path, *, fields: Mapping[str, Field], about: str) -> None: ...

    @classmethod
    @abc.abstractmethod
    def refused(cls, name: str, field: Field) -> str | None:
        """Why the format cannot hold a field, or None."""

    @classmethod
    def needed_bytes(cls, fields: Mapping[str, Field], rows: int, steps: int) -> int:
        """Bytes of disk that are needed at least, where that is known before writing; else 0."""
        return 0

    @classmethod
    @abc.abstractmethod
    def replaces(cls, path: Path) -> bool:
        """Whether `path` is a dataset of this writer's format and nothing else, so that it may be removed.

        The path is removed as a whole, so a single file of another kind makes this False. An importer is less strict.
        An empty folder gives True if the format's datasets are folders.
        """

    @abc.abstractmethod
    def write(self, group: RowGroup) -> int:
        """Writes some rows; returns their bytes. Raises `SourceError` for a value that the format cannot hold."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Completes the dataset, after the last group."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes its files, complete or not."""


def not_of_numpy(field: Field, format: str) -> str | None:
    """Why a field of a type that NumPy lacks is refused, or None for the others."""
    if DTYPES[field.dtype].numpy_name is not None:
        return None
    return f"{field.dtype}, which {format} has no type for; cast='{field.dtype}=float32' converts it"


def not_real(field: Field, format: str) -> str | None:
    """The same, for formats that have no complex numbers either."""
    if field.dtype.startswith("complex"):
        return f"{field.dtype}, and {format} has no complex numbers"
    return not_of_numpy(field, format)


def raw_bytes(fields: Mapping[str, Field], rows: int, steps: int) -> dict[str, int]:
    """Bytes of each field's values, without padding."""
    return {name: field.nbytes * (rows if field.per_row else steps) for name, field in fields.items()}


def is_dataset_folder(path: Path, kinds: Mapping[str, Collection[str]], about: str, key: str) -> bool:
    """Whether a path is an empty folder, or one with a dataset and nothing else.

    Symbolic links are a no wherever they are.

    Args:
        path: the folder.
        kinds: folders that a dataset has, and the endings of regular files in them, however deep.
        about: path in it of the JSON object that describes the dataset.
        key: an entry of that.
    """
    if is_empty_folder(path):
        return True
    if not path.is_dir():
        return False
    for entry in os.scandir(path):
        if entry.name not in kinds or not entry.is_dir(follow_symlinks=False):
            return False
        for at, folders, files in os.walk(entry.path, onerror=_raised):
            if any(Path(at, each).is_symlink() for each in folders):
                return False
            if not all(each.endswith(tuple(kinds[entry.name])) and is_regular(Path(at, each)) for each in files):
                return False
    try:
        return is_regular(path / about) and key in read_object(path / about)
    except (OSError, ValueError):
        return False


def _raised(error: OSError) -> None:
    raise error


def is_regular(path: Path) -> bool:
    """Whether the path itself is a regular file, and no link to one."""
    return stat.S_ISREG(path.lstat().st_mode)


def is_empty_folder(path: Path) -> bool:
    """Whether the path is a folder with nothing in it."""
    return path.is_dir() and next(path.iterdir(), None) is None


__all__ = [
    "DatasetWriter",
    "is_dataset_folder",
    "is_empty_folder",
    "is_regular",
    "not_of_numpy",
    "not_real",
    "raw_bytes",
]
