"""Bulk insert: checks and converts the source arrays, then copies all fields in one native call.

Arrays that already have the store's dtypes and shapes go straight to `_native.Inserter`, which checks and copies them.
This module handles everything else: tensors, other dtypes, values given for each row, and the errors for wrong
arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from geartrain.core.arguments import check_choice, check_unmasked, default_threads, did_you_mean, shown
from geartrain.core.dtypes import DTYPES, Dtype, as_dtype, as_raw, plain_tensor, torch_dtype
from geartrain.core.keys import Keys
from geartrain.core.schema import Field, of_field
from geartrain.errors import FieldError, SchemaError
from geartrain.store.columns import Columns, as_column
from geartrain.store.recorder import GOES_ON_THERE, repeats_field, shares_rows

#: Conversions that an insert may make, as in NumPy: none, lossless ones, or ones within a kind of number.
Casting = Literal["no", "safe", "same_kind"]
CASTINGS = ("no", "safe", "same_kind")
_CASTINGS = frozenset(CASTINGS)


def insert_rows(
    columns: Columns,
    fields: Mapping[str, Any],
    lengths: ArrayLike | None,
    priorities: ArrayLike | None,
    versions: ArrayLike | None,
    threads: int | None,
    casting: Casting = "no",
) -> Keys:
    """Copies rows in and returns their keys; see `Store.insert`."""
    try:
        if lengths is None and priorities is None and versions is None and casting in _CASTINGS:
            raw = columns.inserter.insert(fields, 0 if threads is None else default_threads(threads))
            if raw is not None:
                return Keys.packed(raw, columns.store_id)
    except TypeError:  # no fields, or a casting that is no text, which are told below
        pass
    threads = default_threads(threads)
    check_choice("casting", casting, CASTINGS)
    if not isinstance(fields, Mapping):
        raise SchemaError(
            f"insert takes a dict of arrays by field, {{{next(iter(columns.fields))!r}: ...}}; found "
            f"{type(fields).__name__}"
        )
    if set(fields) != set(columns.fields):
        missing, unknown = set(columns.fields) - set(fields), set(fields) - set(columns.fields)
        raise FieldError(
            f"insert needs every field of the store: missing {sorted(missing)}, unknown "
            f"{sorted(unknown, key=str)}{did_you_mean(unknown, missing)}"
        )
    sources = []
    n = steps = -1
    for name, data in fields.items():
        array, data_n, data_steps = checked_source(columns, name, data, casting)
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
    worth = n
    if columns.native.limited and columns.native.limited_by_steps:
        arrays = {name: array for (_, array), name in zip(sources, fields, strict=True)}
        worth = _steps_of(columns, n, arrays, as_lengths)
    columns.limiter.admit_inserts(worth)
    try:
        rows, generations = columns.native.insert(n, sources, as_lengths, as_priorities, as_versions, threads)
        return Keys.of_rows(rows, generations, columns.store_id)
    except BaseException:
        columns.limiter.give_back(inserts=worth)
        raise


def _steps_of(columns: Columns, n: int, arrays: Mapping[str, Any], lengths: NDArray[np.uint32] | None) -> int:
    """Steps of rows that can be drawn once these are inserted, as `Store.num_steps` counts them."""
    until = np.full(n, columns.max_length, np.int64) if lengths is None else lengths.astype(np.int64)
    first, ends = np.zeros(n, np.int64), until - 1
    if (found := repeats_field(columns.fields)) is not None:
        numbers = np.asarray(arrays[found[0]])
        first, until = np.minimum(numbers[:, 0], until), until - (numbers[:, 2] & GOES_ON_THERE != 0)
    steps = int(np.maximum(until - first, 0).sum())
    if columns.fields.get("last") != Field((), "bool"):
        return steps
    last = np.asarray(arrays["last"]).view(np.bool_)
    place = np.arange(last.shape[1])[None]
    counted = (first[:, None] <= place) & (place < until[:, None])
    if not shares_rows(columns.fields):  # one may be at a row's end
        counted &= place == ends[:, None]
    return steps - int((last & counted).sum())


def checked_source(columns: Columns, name: str, data: Any, casting: Casting) -> tuple[Any, int, int]:
    """The data as a C-contiguous array of the field's bytes, its rows and its steps."""
    field = columns.fields[name]
    data = as_array(name, field, data, casting)
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
    return as_buffer(name, field, data), shape[0], 1 if field.per_row else shape[1]


def as_array(name: str, field: Field, data: Any, casting: Casting) -> Any:
    """The data as an array or tensor of the field's dtype, of any shape; raises `SchemaError`."""
    check_unmasked(f"field {name!r}", data)
    if getattr(data, "is_nested", False):
        raise SchemaError(
            f"field {name!r} is a nested tensor: pass its to_padded_tensor(0) with lengths=, or insert the parts of "
            "unbind() one by one"
        )
    if data is None:
        raise SchemaError(f"field {name!r} takes an array of all rows, found None")
    if not hasattr(data, "dtype"):
        try:
            data = np.asarray(data)
        except (TypeError, ValueError, OverflowError) as error:  # lists of several lengths
            advice = (
                "Pad rows of different lengths and pass lengths=, or insert them one by one"
                if field.axis is None
                else "Pass a list with one array for each row"
            )
            why = str(error).rstrip(".")
            raise SchemaError(f"field {name!r} cannot be turned into an array of all rows: {why}. {advice}") from None
    if getattr(data.dtype, "kind", "") in ("S", "U", "O") and data.size:
        raise _no_number(name, field, data)
    try:
        found = as_dtype(data.dtype)
    except SchemaError as error:
        raise of_field(name, error) from None
    if found.name == field.dtype:
        return data
    if not _castable(found, DTYPES[field.dtype], casting):
        allowed = "" if casting == "no" else f", which casting={casting!r} does not convert"
        castable = _castable(found, DTYPES[field.dtype], "same_kind")
        hint = '; casting="same_kind" converts it' if castable else ", of another kind: convert it first"
        raise SchemaError(f"field {name!r} holds {field.dtype}, found {found.name}{allowed or hint}")
    if hasattr(data, "detach"):
        return plain_tensor(data).to(torch_dtype(DTYPES[field.dtype]))
    return data.astype(field.numpy_dtype)


def _no_number(name: str, field: Field, data: NDArray[Any]) -> SchemaError:
    """The error about texts and objects, such as None, where the field holds numbers."""
    for first in data.flat:
        if not isinstance(first, Number):
            what = "which is no number"
            break
        if isinstance(first, int) and not -(2**63) <= first < 2**64:
            what = "which is beyond 64 bits"
            break
    else:
        return SchemaError(
            f"field {name!r} holds {field.dtype}, found an array of objects: convert it with astype({field.dtype!r})"
        )
    if isinstance(first, np.generic):
        first = first.item()  # whose repr is the value's
    kind = "Text" if isinstance(first, str) else "Bytes" if isinstance(first, bytes) else ""
    advice = (
        f". For {kind.lower()} make it a field of geartrain.{kind}(); rows with steps cannot have one" if kind else ""
    )
    return SchemaError(f"field {name!r} holds {field.dtype}, found {shown(first)}, {what}{advice}")


def as_buffer(name: str, field: Field, data: Any) -> Any:
    """An array or tensor of the field's dtype as C-contiguous host memory; types that NumPy lacks as integers."""
    if hasattr(data, "detach"):  # a torch tensor
        if data.device.type != "cpu":
            raise SchemaError(f"field {name!r} is on {data.device}, but the store takes host memory: pass tensor.cpu()")
        if "strided" not in str(data.layout):
            raise SchemaError(f"field {name!r} has the layout {data.layout}: pass its to_dense()")
        data = plain_tensor(data).contiguous()
    else:
        data = np.ascontiguousarray(data)
    return data if DTYPES[field.dtype].numpy_name is not None else as_raw(data, DTYPES[field.dtype])


def _castable(given: Dtype, wanted: Dtype, casting: Casting) -> bool:
    """Whether values of one dtype may be converted to another. The floats that NumPy lacks are taken for small ones."""
    if given is wanted:
        return True
    names = (given.numpy_name, wanted.numpy_name)
    if casting == "no" or "complex32" in (given.name, wanted.name) or (casting == "safe" and None in names):
        return False
    one, other = (np.dtype(name or "float16") for name in names)
    return np.can_cast(one, other, casting)
