"""Rewriting in place: checks new contents for rows that are already in the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

import geartrain._native as _native
from geartrain.core.arguments import check_choice, shown
from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError, FieldError, SchemaError
from geartrain.store.columns import Columns, as_column
from geartrain.store.insert import CASTINGS, Casting, checked_source


def rewrite_rows(
    columns: Columns,
    keys: Keys,
    fields: Mapping[str, Any],
    starts: ArrayLike | None,
    lengths: ArrayLike | None,
    casting: Casting,
) -> int:
    """Writes fields of rows and returns how many keys were skipped; see `Store.write`."""
    _native.sleep_at_finalization()
    check_choice("casting", casting, CASTINGS)
    if not isinstance(fields, Mapping) or not fields:
        raise FieldError(f"give the fields to write: a mapping of names to arrays, found {shown(fields)}")
    n, sources, steps = len(keys), [], -1
    for name, data in fields.items():
        number = columns.number(name)
        array, data_n, data_steps = checked_source(columns, name, data, casting)
        if data_n != n:
            raise SchemaError(f"field {name!r} has {data_n} rows, {n} keys were given")
        if not columns.fields[name].per_row:
            if steps not in (-1, data_steps):
                raise SchemaError(f"field {name!r} has {data_steps} steps, the fields before it have {steps}")
            steps = data_steps
        sources.append((number, array))
    where = {}
    for what, given in (("starts", starts), ("lengths", lengths)):
        if given is not None and steps == -1:
            raise ArgumentError(f"`{what}` are of steps, and every field that was given is per_row")
        where[what] = as_column(given, n, np.uint32, what)
    if n == 0:
        return 0
    return int(columns.native.rewrite(keys.row, keys.generation, sources, where["starts"], where["lengths"]))


__all__ = ["rewrite_rows"]
