"""Bulk insert: checks of the source arrays, and one native copy of all fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from geartrain.core.dtypes import DTYPES, as_dtype, as_raw
from geartrain.core.keys import Keys
from geartrain.errors import FieldError, SchemaError
from geartrain.store.columns import Columns, as_column


def insert_rows(
    columns: Columns,
    fields: Mapping[str, Any],
    lengths: ArrayLike | None,
    priorities: ArrayLike | None,
    versions: ArrayLike | None,
    threads: int,
) -> Keys:
    """Copies rows in and returns their keys; see `Store.insert`."""
    if set(fields) != set(columns.fields):
        missing, unknown = set(columns.fields) - set(fields), set(fields) - set(columns.fields)
        raise FieldError(f"insert needs every field once: missing {sorted(missing)}, unknown {sorted(unknown)}")
    sources = []
    n = steps = -1
    for name, data in fields.items():
        array, data_n, data_steps = _checked_source(columns, name, data)
        if n not in (-1, data_n):
            raise SchemaError(f"field {name!r} has {data_n} rows, the fields before it have {n}")
        n = data_n
        if not columns.fields[name].per_row:
            if steps not in (-1, data_steps):
                raise SchemaError(f"field {name!r} has {data_steps} steps, the fields before it have {steps}")
            steps = data_steps
        sources.append((columns.number(name), array))
    if n == 0:
        return Keys.empty()
    as_lengths = as_column(lengths, n, np.uint32, "lengths")
    if steps != -1 and as_lengths is None and steps != columns.max_length:
        as_lengths = np.full(n, steps, np.uint32)
    elif steps != -1 and as_lengths is not None and as_lengths.max(initial=0) > steps:
        raise SchemaError(f"the longest of `lengths` is {as_lengths.max()}, the arrays have {steps} steps")
    as_priorities = as_column(priorities, n, np.float64, "priorities")
    as_versions = as_column(versions, n, np.int64, "versions")
    columns.limiter.admit_inserts(n)
    try:
        rows, generations = columns.native.insert(n, sources, as_lengths, as_priorities, as_versions, threads)
        return Keys.of_rows(rows, generations, columns.store_id)
    except BaseException:
        columns.limiter.give_back(inserts=n)
        raise


def _checked_source(columns: Columns, name: str, data: Any) -> tuple[Any, int, int]:
    """The data as a C-contiguous array of the field's bytes, its rows and its steps."""
    field = columns.fields[name]
    if not hasattr(data, "dtype"):
        data = np.asarray(data)
    if as_dtype(data.dtype).name != field.dtype:
        raise SchemaError(f"field {name!r} holds {field.dtype}, found {as_dtype(data.dtype).name}")
    shape = tuple(data.shape)
    block = field.block_shape(columns.max_length)
    fits = len(shape) == len(block) + 1
    if fits and not field.per_row:
        fits = shape[2:] == field.shape and 1 <= shape[1] <= columns.max_length
    elif fits:
        fits = shape[1:] == field.shape
    if not fits:
        wanted = ("n", *field.shape) if field.per_row else ("n", f"t <= {columns.max_length}", *field.shape)
        raise SchemaError(f"field {name!r} takes ({', '.join(map(str, wanted))}), found shape {shape}")
    if hasattr(data, "detach"):  # a torch tensor
        if data.device.type != "cpu":
            raise SchemaError(f"field {name!r} is on {data.device}; the store takes host memory")
        data = data.detach().contiguous()
    else:
        data = np.ascontiguousarray(data)
    if DTYPES[field.dtype].numpy_name is None:
        data = as_raw(data, DTYPES[field.dtype])
    return data, shape[0], 1 if field.per_row else shape[1]
