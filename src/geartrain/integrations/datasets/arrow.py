"""Converts Arrow columns to NumPy arrays of steps and back, for Minari, LeRobot and Parquet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from geartrain.integrations.datasets.episode import Array, reading


def column_values(column: Any, step_shape: tuple[int, ...] | None) -> Array:
    """One column as an array of shape (rows, *step_shape); without a copy where Arrow allows it.

    Args:
        column: an Arrow array of numbers, booleans, or lists of them, nested to any depth.
        step_shape: shape of one row's value; None takes a vector as it is and a number as a number.

    Raises:
        ValueError: missing values, rows of unequal size, or values that are not numbers.
    """
    rows = len(column)
    values = column
    nested = False
    while True:
        if values.null_count:
            raise ValueError(f"{values.null_count} of {len(values)} values are missing (null)")
        values = getattr(values, "storage", values)  # an extension type over plain lists
        if not is_list(values.type, fixed=True):
            break
        nested = True
        values = values.flatten()
    flat: Array = values.to_numpy(zero_copy_only=False)
    if flat.dtype.kind not in "biufc":
        raise ValueError(f"the values are {values.type}, not numbers")
    if step_shape is None:
        step_shape = (len(flat) // rows,) if nested and rows else ()
    try:
        return flat.reshape(rows, *step_shape)
    except ValueError:
        raise ValueError(f"{rows} rows hold {len(flat)} values together, which are not {step_shape} each") from None


def record_batches(
    opened: Any,
    place: str,
    unit: str,
    *,
    columns: list[str],
    rows: int,
    wanted: Callable[[int, Any], bool] = lambda first, about: True,
) -> Iterator[tuple[int, Any]]:
    """Batches of a Parquet file, each with the number of its first record; row groups without a wanted one are skipped.

    Args:
        opened: the `ParquetFile`, made with `pre_buffer=False`; else a whole row group, often the file, is read ahead.
        place: the file, for errors.
        unit: what a record is, for errors.
        columns: to read.
        rows: of a batch, at most.
        wanted: whether a row group, by the number of its first record and its metadata, has a wanted record.
    """
    runs: list[tuple[int, list[int]]] = []
    with reading(place, "Parquet"):
        first = 0
        for group in range(opened.metadata.num_row_groups):
            about = opened.metadata.row_group(group)
            if wanted(first, about):
                if not runs or runs[-1][1][-1] != group - 1:
                    runs.append((first, []))
                runs[-1][1].append(group)
            first += about.num_rows
    for first, groups in runs:
        done, batches = first, None
        while True:
            with reading(f"{place}: {unit} {done} or later", "Parquet"):
                batches = batches or opened.iter_batches(batch_size=rows, row_groups=groups, columns=columns)
                batch = next(batches, None)
                if batch is None:
                    break
                batch.validate(full=True)
            yield done, batch.select(columns)
            done += len(batch)


def is_list(kind: Any, *, fixed: bool = False) -> bool:
    """Whether a type is of lists of any length; with `fixed`, also of lists of one length."""
    return str(kind).startswith(("list<", "large_list<", *(("fixed_size_list<",) if fixed else ())))


def nested_array(arrow: Any, values: Array, fixed: bool = True) -> Any:
    """Values (n, *shape) as an Arrow array of n: numbers, or lists, one for each axis of a value.

    Args:
        arrow: the pyarrow module.
        values: numbers; without a copy where they are contiguous and not booleans.
        fixed: lists whose size stands in their type; else such as take any number.
    """
    array = arrow.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        if fixed:
            array = arrow.FixedSizeListArray.from_arrays(array, size)
        else:
            offsets = np.arange(0, len(array) + 1, size, dtype=np.int32)
            array = arrow.ListArray.from_arrays(arrow.array(offsets), array)
    return array
