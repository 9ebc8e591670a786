"""Importer of Parquet files with one trajectory in each record, such as those that `export_store` writes.

A column of lists is timed: its lists run over the steps. Lists of fixed size are the axes of a value. Other columns
have one value for each episode. Lists of variable size below the time axis are accepted if all of them are equally
long. The files of a folder are read in the order of their names.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.extras import require
from geartrain.errors import SourceError
from geartrain.integrations.datasets.arrow import column_values, is_list, record_batches
from geartrain.integrations.datasets.episode import (
    Array,
    Episode,
    FieldChoice,
    FormatSource,
    Metadata,
    choose,
    reading,
    total,
)

LOOKS_FOR = "a Parquet file, or a folder of .parquet files"

_BATCH_BYTES = 1 << 20
#: Bytes of a value in memory, and of its places in lists, by its type in the file.
_SIZES = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "FIXED_LEN_BYTE_ARRAY": 2}
#: Types of columns that are metadata of an episode.
_PLAIN = ("bool", "int", "uint", "halffloat", "float", "double", "string", "large_string")


def recognise(path: Path) -> bool:
    """Whether the path is a Parquet file, or a folder with `.parquet` files in it."""
    if path.is_dir():
        return next(path.glob("*.parquet"), None) is not None
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


class ParquetSource(FormatSource):
    """Episodes of Parquet files, a few records in memory at a time.

    Raises:
        SourceError: a column that cannot be stored, or files of different columns.
        MissingDependencyError: pyarrow is not installed.
    """

    def __init__(self, path: str | Path, *, fields: FieldChoice = None, skip_unsupported: bool = False) -> None:
        self.name = str(path)
        self._parquet = require("pyarrow.parquet", "geartrain[parquet]", "Reading Parquet")
        folder = Path(path)
        self._files = sorted(folder.glob("*.parquet")) if folder.is_dir() else [folder]
        if not self._files:
            raise SourceError(f"{path}: holds no .parquet file")
        self._schema, self.episodes = None, 0
        for file in self._files:
            with reading(str(file), "Parquet"):
                opened = self._parquet.ParquetFile(file)
            if self._schema is not None and not opened.schema_arrow.equals(self._schema):
                raise SourceError(f"{file}: has other columns than {self._files[0]}")
            self._schema = opened.schema_arrow
            self.episodes += opened.metadata.num_rows
        assert self._schema is not None
        available = {str(column.name): _why_not(column.type) for column in self._schema}
        if len(available) != len(self._schema.names):
            raise SourceError(f"{path}: has two columns of one name")
        self._chosen = choose(self.name, fields, available, list(available), skip_unsupported)
        self._timed = {str(column.name) for column in self._schema if is_list(column.type)}

    def read(self, numbers: Sequence[int] | None = None) -> Iterator[Episode]:
        """The records of these numbers; row groups without one of them are not read."""
        wanted = None if numbers is None else np.asarray(numbers, np.int64)
        for first, file, batch in self._batches([*dict.fromkeys(self._chosen.values())], wanted):
            place = f"{self.name}: {file.name}: episodes {first} to {first + len(batch) - 1}"
            columns: dict[str, tuple[Array, Array | None]] = {}
            for name in self._chosen.values():
                with reading(f"{place}: field {name!r}", "numbers, or lists of them"):
                    columns[name] = self._values(name, batch.column(name))
            for index in range(len(batch)) if wanted is None else _between(wanted, first, len(batch)) - first:
                timed, once = {}, {}
                for stored, name in self._chosen.items():
                    values, edges = columns[name]
                    if edges is None:
                        once[stored] = values[index]
                    else:
                        timed[stored] = values[edges[index] : edges[index + 1]]
                yield Episode(f"episode {first + index} ({file.name})", timed, once)

    def metadata(self) -> Iterator[Mapping[str, Any]]:
        """`length` from the smallest timed column, values of columns without lists, and `return` when asked for."""
        assert self._schema is not None
        once = [str(each.name) for each in self._schema if str(each.type).startswith(_PLAIN)]
        timed = min(self._timed.intersection(self._chosen.values()), key=self._size_of, default=None)
        for first, file, batch in self._batches([*([] if timed is None else [timed]), *once]):
            with reading(f"{self.name}: {file.name}: episodes from {first}", "lists, and values of each record"):
                edges = None if timed is None else self._edges(batch.column(timed))
                values = {name: batch.column(name).to_pylist() for name in once}
            for index in range(len(batch)):
                known = {name: column[index] for name, column in values.items()}
                known["length"] = 1 if edges is None else int(edges[index + 1] - edges[index])
                number = first + index
                later = {"return": functools.partial(self.figure, "reward", total, number)}
                yield Metadata(number, known, later if "reward" in self._timed else {})

    def _edges(self, column: Any) -> Array:
        """Where each record's steps begin and end in a timed column."""
        if column.null_count:
            raise ValueError(f"{column.null_count} of {len(column)} values are missing (null)")
        edges = np.zeros(len(column) + 1, np.int64)
        np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False), out=edges[1:])
        return edges

    def _size_of(self, name: str) -> int:
        with reading(str(self._files[0]), "Parquet"):
            return _decoded_nbytes(self._parquet.ParquetFile(self._files[0]).metadata, [name])

    def _values(self, name: str, column: Any) -> tuple[Array, Array | None]:
        """The values of some records behind each other; and where each record's begin and end, in a timed column."""
        edges = None
        if name in self._timed:
            edges = self._edges(column)
            column = column.flatten()
        return column_values(column, _step_shape(column.type)), edges

    def _batches(self, columns: list[str], wanted: Array | None = None) -> Iterator[tuple[int, Path, Any]]:
        """Batches of records with the number of the first of each; those without a wanted one are left out."""
        behind = 0  # records of the files before
        for file in self._files:
            place = f"{self.name}: {file.name}"
            with reading(place, "Parquet"):
                opened = self._parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
                records = opened.metadata.num_rows
                nbytes = _decoded_nbytes(opened.metadata, columns)
                rows = max(1, _BATCH_BYTES * max(1, records) // max(1, nbytes))

            def is_wanted(first: int, about: Any, behind: int = behind) -> bool:
                return wanted is None or len(_between(wanted, behind + first, about.num_rows)) > 0

            found = record_batches(opened, place, "record", columns=columns, rows=rows, wanted=is_wanted)
            for first, batch in found:
                if wanted is None or len(_between(wanted, behind + first, len(batch))):
                    yield behind + first, file, batch
            behind += records


def _between(numbers: Array, first: int, count: int) -> Array:
    """Those of some rising numbers that are among `count` from `first` on."""
    begin, end = np.searchsorted(numbers, [first, first + count])
    return numbers[begin:end]


def _decoded_nbytes(about: Any, columns: list[str]) -> int:
    """Bytes of the columns of a file in memory, which can be a thousand times those of the file."""
    nbytes = 0
    for group in map(about.row_group, range(about.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            path = column.path_in_schema
            if any(path == name or path.startswith(f"{name}.") for name in columns):
                size = _SIZES.get(column.physical_type, 0)
                nbytes += column.num_values * size if size else column.total_uncompressed_size
    return nbytes


def _step_shape(kind: Any) -> tuple[int, ...] | None:
    """Shape of a value from lists of fixed size; None where the schema does not say it."""
    shape: list[int] = []
    while is_list(kind, fixed=True) and not is_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    return None if is_list(kind) else tuple(shape)


def _why_not(kind: Any) -> str | None:
    found = kind
    while is_list(found, fixed=True):
        found = found.value_type
    numbers = ("bool", "int", "uint", "halffloat", "float", "double")
    return None if str(found).startswith(numbers) else f"type {kind}"
