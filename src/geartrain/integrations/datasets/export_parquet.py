"""Export to Parquet: each trajectory is one record.

A timed field is a list over the steps. A value with axes is nested lists of fixed size, one level for each axis. So the
file's schema holds shapes, dtypes and lengths. parquet.py reads these files, and so does any program that supports
nested Parquet columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.arguments import check_choice
from geartrain.core.extras import require
from geartrain.core.schema import Field
from geartrain.integrations.datasets.arrow import nested_array
from geartrain.integrations.datasets.stored_rows import RowGroup
from geartrain.integrations.datasets.writer import DatasetWriter, is_regular, not_real

_COMPRESSIONS = ("zstd", "snappy", "gzip", "none")


class ParquetWriter(DatasetWriter):
    """One Parquet file, a row group for each group of rows.

    Args:
        compression: "zstd", "snappy", "gzip" or "none".
    """

    FOLDER = False
    TAKES_METADATA = True

    def __init__(self, path: Path, *, fields: Mapping[str, Field], about: str, compression: str = "zstd") -> None:
        check_choice("compression", compression, _COMPRESSIONS)
        self._arrow = require("pyarrow", "geartrain[parquet]", "Writing Parquet")
        parquet = require("pyarrow.parquet", "geartrain[parquet]", "Writing Parquet")
        self._fields = dict(fields)
        # Statistics of columns of arrays say nothing, and dictionaries of floats are as large as the floats.
        self._writer = parquet.ParquetWriter(
            path,
            self._schema(),
            compression=compression,
            use_dictionary=False,
            write_statistics=False,
        )

    @classmethod
    def refused(cls, name: str, field: Field) -> str | None:
        """Types that Parquet lacks."""
        return not_real(field, "Parquet")

    @classmethod
    def replaces(cls, path: Path) -> bool:
        """A regular file that begins as Parquet files do."""
        if not is_regular(path):
            return False
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"

    def write(self, group: RowGroup) -> int:
        """Writes the rows as one row group."""
        columns, nbytes = [], 0
        offsets = np.zeros(len(group.lengths) + 1, np.int64)
        np.cumsum(group.lengths, out=offsets[1:])
        for name, field in self._fields.items():
            values = group.values[name] if field.per_row else group.steps(name)
            column = nested_array(self._arrow, values)
            if not field.per_row:
                column = self._arrow.LargeListArray.from_arrays(self._arrow.array(offsets), column)
            columns.append(column)
            nbytes += values.nbytes
        self._writer.write_table(self._arrow.Table.from_arrays(columns, schema=self._schema()))
        return nbytes

    def finish(self) -> None:
        """Writes the footer."""
        self._writer.close()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _schema(self) -> Any:
        kinds = []
        for name, field in self._fields.items():
            kind = nested_array(self._arrow, np.empty((0, *field.shape), field.numpy_dtype)).type
            kinds.append(self._arrow.field(name, kind if field.per_row else self._arrow.large_list(kind)))
        return self._arrow.schema(kinds)


__all__ = ["ParquetWriter"]
