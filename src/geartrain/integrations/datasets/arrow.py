"""Conversion of Arrow columns to NumPy arrays of steps, for Minari and LeRobot."""

from __future__ import annotations

from typing import Any

from geartrain.integrations.datasets.episode import Array


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
        if not _is_list(values.type):
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


def _is_list(kind: Any) -> bool:
    return str(kind).startswith(("list<", "large_list<", "fixed_size_list<"))
