"""Importer of Parquet files with one trajectory in each record, such as those that `export_store` writes.

A column of lists is timed: its lists run over the steps. Lists of fixed size are the axes of a value. Other columns
have one value for each episode. Lists of variable size below the time axis are accepted if all of them are equally
long. The files of a folder are read in the order of their names.
"""

from __future__ import annotations

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
    reading,
    require,
)

LOOKS_FOR = "a Parquet file, or a folder of .parquet files"

_BATCH_BYTES = 4 << 20


def recognise(path: Path) -> bool:
    """Whether the path is a Parquet file, or a folder with `.parquet` files in it."""
    if path.is_dir():
        return next(path.glob("*.parquet"), None) is not None
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


class ParquetSource(Source):
    """Episodes of Parquet files, a few records in memory at a time.

    Raises:
        SourceError: a column that cannot be stored, or files of different columns.
        MissingDependencyError: pyarrow is not installed.
    """

    def __init__(self, path: str | Path, *, fields: FieldChoice = None, skip_unsupported: bool = False) -> None:
        self.name = str(path)
        self._parquet = require("pyarrow.parquet", "parquet", "Reading Parquet")
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
        self._timed = {name for name in self._chosen.values() if _is_timed(self._schema.field(name).type)}

    def __iter__(self) -> Iterator[Episode]:
        """Every record."""
        number = 0
        for file, batch in self._batches([*dict.fromkeys(self._chosen.values())]):
            place = f"{self.name}: {file.name}: episodes {number} to {number + len(batch) - 1}"
            columns: dict[str, tuple[Array, Array | None]] = {}
            for name in self._chosen.values():
                with reading(f"{place}: field {name!r}", "numbers, or lists of them"):
                    columns[name] = self._values(name, batch.column(name))
            for index in range(len(batch)):
                timed, once = {}, {}
                for stored, name in self._chosen.items():
                    values, edges = columns[name]
                    if edges is None:
                        once[stored] = values[index]
                    else:
                        timed[stored] = values[edges[index] : edges[index + 1]]
                yield Episode(f"episode {number} ({file.name})", timed, once)
                number += 1

    def extent(self) -> Extent:
        """From the lists of one timed column."""
        longest = 1
        if self._timed:
            longest = 0
            for file, batch in self._batches([min(self._timed)]):
                with reading(f"{self.name}: {file.name}", "lists"):
                    _, edges = self._values(min(self._timed), batch.column(0))
                assert edges is not None
                longest = max(longest, int(np.diff(edges).max(initial=0)))
        assert self.episodes is not None
        return Extent(self.episodes, longest)

    def _values(self, name: str, column: Any) -> tuple[Array, Array | None]:
        """The values of some records behind each other; and where each record's begin and end, in a timed column."""
        edges = None
        if column.null_count:
            raise ValueError(f"{column.null_count} of {len(column)} values are missing (null)")
        if name in self._timed:
            edges = np.zeros(len(column) + 1, np.int64)
            np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False), out=edges[1:])
            column = column.flatten()
        return column_values(column, _step_shape(column.type)), edges

    def _batches(self, columns: list[str]) -> Iterator[tuple[Path, Any]]:
        for file in self._files:
            done = 0
            opened: Any = None
            batches: Any = None
            while True:
                with reading(f"{self.name}: {file.name}: record {done} or later", "Parquet"):
                    if opened is None:
                        opened = self._parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
                        about = opened.metadata
                        nbytes = sum(about.row_group(each).total_byte_size for each in range(about.num_row_groups))
                        size = max(1, _BATCH_BYTES * max(1, about.num_rows) // max(1, nbytes))
                        batches = opened.iter_batches(batch_size=size, columns=columns)
                    batch = next(batches, None)
                    if batch is None:
                        break
                    batch.validate(full=True)
                yield file, batch.select(columns)
                done += len(batch)


def _is_timed(kind: Any) -> bool:
    return str(kind).startswith(("list<", "large_list<"))


def _step_shape(kind: Any) -> tuple[int, ...] | None:
    """Shape of a value from lists of fixed size; None where the schema does not say it."""
    shape: list[int] = []
    while str(kind).startswith("fixed_size_list<"):
        shape.append(kind.list_size)
        kind = kind.value_type
    return None if _is_timed(kind) else tuple(shape)


def _why_not(kind: Any) -> str | None:
    found = kind
    while _is_timed(found) or str(found).startswith("fixed_size_list<"):
        found = found.value_type
    numbers = ("bool", "int", "uint", "halffloat", "float", "double")
    return None if str(found).startswith(numbers) else f"type {kind}"
