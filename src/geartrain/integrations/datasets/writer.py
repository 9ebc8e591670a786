"""Writers of datasets: the interface of the formats that a store's rows are exported to."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from geartrain.core.dtypes import DTYPES
from geartrain.core.schema import Field
from geartrain.integrations.datasets.stored_rows import RowGroup


class DatasetWriter(abc.ABC):
    """Writes groups of rows into a file or folder that nobody else sees yet.

    A format's options are the keyword arguments of its constructor but `path`, `fields` and `about`.

    Args:
        path: where to write; nothing is there.
        fields: what is written, by the names it is written under. `refused` has refused none of them.
        about: one line on where the rows come from, for the dataset's own description.
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


__all__ = ["DatasetWriter", "not_of_numpy", "not_real", "raw_bytes"]
