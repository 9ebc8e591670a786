"""Values of rows whose fields have different lengths: checked and turned into the buffers that the native layer copies.

A field's values come in one of two forms: one value for each row, in a list, or the values of all rows one behind the
other. The second form needs lengths that are known: those of the row, or `lengths=` of an insert.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from geartrain.core.arguments import did_you_mean, shown, some_of
from geartrain.core.schema import Field
from geartrain.core.tasks import RowPlan
from geartrain.errors import FieldError, SchemaError
from geartrain.store.columns import as_column
from geartrain.store.insert import Casting, as_array, as_buffer

#: Of a field: its number, one buffer or a buffer for each row, and of strings the bytes of each.
Source: TypeAlias = tuple[int, "NDArray[Any] | bytes | list[NDArray[Any]]", "NDArray[np.uint32] | None"]
_MOST_ITEMS = 2**31 - 1


@dataclass
class _Values:
    """A field's values: items of each row, None where they lie one behind the other, and of all rows."""

    buffers: NDArray[Any] | bytes | list[NDArray[Any]]
    sizes: NDArray[np.uint32] | None
    rows: list[int] | None
    total: int


def check_names(what: str, given: Any, wanted: Iterable[str]) -> Mapping[str, Any]:
    """The values by field, once they are those of the wanted fields. Raises `SchemaError`, `FieldError`."""
    wanted = list(wanted)
    if not isinstance(given, Mapping):
        raise SchemaError(f"{what} takes a dict of values by field, found {type(given).__name__}")
    if set(given) != set(wanted):
        missing, unknown = set(wanted) - set(given), set(given) - set(wanted)
        raise FieldError(
            f"{what} takes {some_of(wanted) if wanted else 'no fields'}: missing {sorted(missing)}, unknown "
            f"{sorted(unknown, key=str)}{did_you_mean(unknown, missing)}"
        )
    return given


def lengths_given(plan: RowPlan, lengths: Any) -> dict[str, NDArray[np.uint32]]:
    """The `lengths=` of an insert: (n,) for its one axis, or a dict of such by axis."""
    axes = [axis.name for axis in plan.axes if axis.owner == 0]
    if lengths is None:
        return {}
    if not isinstance(lengths, Mapping):
        if len(axes) != 1:
            raise SchemaError(
                f"lengths= is a dict by axis where the insert has {len(axes)} axes ({some_of(axes)}), found "
                f"{shown(lengths)}"
            )
        lengths = {axes[0]: lengths}
    found = {}
    for axis, values in lengths.items():
        if axis not in axes:
            raise SchemaError(
                f"lengths= has the axis {shown(axis)}, the insert sets {some_of(axes)}{did_you_mean(axis, axes)}"
            )
        if np.ndim(values) != 1:
            raise SchemaError(f"lengths of {axis!r} are (n,) whole numbers, found {shown(values)}")
        column = as_column(values, len(values), np.uint32, f"lengths of {axis}")
        assert column is not None
        found[axis] = column
    return found


def collect(
    plan: RowPlan,
    names: Iterable[str],
    given: Mapping[str, Any],
    *,
    n: int | None = None,
    known: Mapping[str, NDArray[np.uint32]],
    how: str = "pass a list with one array for each row",
    casting: Casting = "no",
) -> tuple[int, list[Source], NDArray[np.uint32]]:
    """The number of rows, the sources of all fields, and the lengths (n, axes) of the rows; 0 where no field tells.

    Args:
        n: number of rows; by default that of the first field that tells it.
        known: lengths of axes that are known already; of others the values tell them.
        how: what to do about values that lie one behind the other where no lengths are known.

    Raises:
        SchemaError: values do not fit their field, or each other.
    """
    parsed = {name: _parse(name, plan.fields[name], given[name], n, casting) for name in names}
    for name, values in parsed.items():
        rows = _rows_of(plan.fields[name], values)
        if rows is not None and n is None:
            n = rows
        elif rows is not None and rows != n:
            raise SchemaError(f"field {name!r} has {rows} rows, expected {n}")
    for axis, column in known.items():
        if n is None:
            n = len(column)
        elif len(column) != n:
            raise SchemaError(f"lengths of {axis!r} are of {len(column)} rows, the fields have {n}")
    if n is None:
        name = next(iter(parsed))
        raise SchemaError(f"field {name!r} has the values of all rows in one array: {how}")
    columns = {axis: column.tolist() for axis, column in known.items()}
    told = dict.fromkeys(known, "")
    for name, values in parsed.items():
        of = plan.fields[name].axis
        if of is None or values.rows is None:
            continue
        if of not in columns:
            columns[of], told[of] = values.rows, name
        elif columns[of] != values.rows:
            wanted = columns[of]
            first = next(i for i in range(n) if values.rows[i] != wanted[i])
            raise SchemaError(
                f"field {name!r} has {values.rows[first]} {of} in row {first} of {n}, "
                f"{f'field {told[of]!r}' if told[of] else 'the row'} has {wanted[first]}"
            )
    for name, values in parsed.items():
        of = plan.fields[name].axis
        if of is None or values.rows is not None:
            continue
        if of not in columns:
            raise SchemaError(
                f"field {name!r} has the values of all rows in one array, and sets the lengths of {of!r}: {how}"
            )
        if (total := sum(columns[of])) != values.total:
            raise SchemaError(f"field {name!r} has {values.total} items, the {n} rows have {total} {of}")
    lengths = np.zeros((n, len(plan.axes)), np.uint32)
    for axis, rows_of_axis in columns.items():
        lengths[:, plan.axis(axis) - 1] = rows_of_axis
    numbers = plan.field_numbers
    return n, [(numbers[name], values.buffers, values.sizes) for name, values in parsed.items()], lengths


def part_of(field: Field, data: Any, rows: slice, ends: NDArray[np.int64] | None) -> Any:
    """The values of some rows out of those of all rows. `ends`: items before each row of the field's axis, if known."""
    if getattr(data, "is_nested", False):
        data = list(data.detach().unbind())
    if ends is None or not _is_flat(field, data):
        return data[rows]
    return data[ends[rows.start] : ends[rows.stop]]


def _is_flat(field: Field, data: Any) -> bool:
    """Whether values of a field with an axis lie one behind the other."""
    if hasattr(data, "ndim"):
        return bool(data.ndim == 1 + len(field.shape))
    return isinstance(data[0], str | bytes) if field.kind != "array" else not _is_of_rows(data)


def _rows_of(field: Field, values: _Values) -> int | None:
    """The number of rows that a field's values tell."""
    if field.axis is None:
        return values.total
    return None if values.rows is None else len(values.rows)


def _parse(name: str, field: Field, data: Any, n: int | None, casting: Casting) -> _Values:
    if field.kind != "array":
        return _strings(name, field, data)
    if field.axis is not None and isinstance(data, list | tuple) and _is_of_rows(data):
        return _rows(name, field, data, casting)
    if field.axis is None:
        array = _whole(name, field, data, casting)
        if array.shape[1:] != field.shape or not array.ndim:
            wanted = ", ".join(map(str, ("n", *field.shape)))
            raise SchemaError(f"field {name!r} takes ({wanted}), found shape {tuple(array.shape)}")
        return _Values(_memory(name, field, array), None, None, len(array))
    if getattr(data, "is_nested", False):
        return _rows(name, field, _unnested(name, data), casting)
    array = _whole(name, field, data, casting)
    items = ", ".join(map(str, ("m", *field.shape)))
    if array.ndim == 2 + len(field.shape) and array.shape[2:] == field.shape:  # rows of one length
        rows = [array.shape[1]] * array.shape[0]
        return _Values(_memory(name, field, array), None, rows, array.shape[0] * array.shape[1])
    if array.ndim != 1 + len(field.shape) or array.shape[1:] != field.shape:
        raise SchemaError(
            f"field {name!r} takes a list with an array ({items}) for each row, or those of all rows one behind the "
            f"other; found shape {tuple(array.shape)}"
        )
    return _Values(_memory(name, field, array), None, None, len(array))


def _is_of_rows(data: Sequence[Any]) -> bool:
    """Whether a list has a value for each row, and not numbers."""
    return not data or data[0] is None or isinstance(data[0], list | tuple) or getattr(data[0], "ndim", 0) > 0


def _rows(name: str, field: Field, data: Sequence[Any], casting: Casting) -> _Values:
    """A list with an array for each row."""
    buffers: list[NDArray[Any]] = []
    rows: list[int] = []
    ndim = 1 + len(field.shape)
    dtype = _dtype_in_numpy(field)
    for i, each in enumerate(data):
        array = each
        if each is None:
            raise SchemaError(f"field {name!r} takes an array for each row, found None for row {i}")
        if type(each) is not np.ndarray or each.dtype != dtype or not each.flags.c_contiguous:
            array = _memory(name, field, _whole(name, field, each, casting))
        if array.ndim != ndim or array.shape[1:] != field.shape:
            wanted = ", ".join(map(str, ("m", *field.shape)))
            raise SchemaError(f"field {name!r} takes ({wanted}) for each row, found {array.shape} for row {i}")
        if len(array) > _MOST_ITEMS:
            raise SchemaError(f"field {name!r} has {len(array)} items in row {i}, at most {_MOST_ITEMS} fit")
        rows.append(len(array))
        buffers.append(array)
    return _Values(buffers, None, rows, sum(rows))


def _dtype_in_numpy(field: Field) -> np.dtype[Any] | None:
    try:
        return field.numpy_dtype
    except FieldError:
        return None


def _whole(name: str, field: Field, data: Any, casting: Casting) -> Any:
    """An array or tensor of the field's dtype. Python's own numbers have none: they are converted if they fit."""
    if (
        not hasattr(data, "dtype")
        and not hasattr(data, "__array__")
        and data is not None
        and _dtype_in_numpy(field) is not None
    ):
        if isinstance(data, list | tuple) and not data:  # which NumPy takes for float64
            data = np.asarray(data, field.numpy_dtype)
        if field.numpy_dtype.kind in "iu" and _is_in_range(name, field, data):
            return np.asarray(data, field.numpy_dtype)
        return as_array(name, field, data, "same_kind")
    return as_array(name, field, data, casting)


def _is_in_range(name: str, field: Field, data: Any) -> bool:
    """Whether these are whole numbers. Raises `SchemaError` if the field does not hold all of them."""
    try:
        wide = np.asarray(data)
    except (TypeError, ValueError, OverflowError):
        return False  # `as_array` says what is wrong with them
    if wide.dtype.kind not in "iu":
        return False
    most = np.iinfo(field.numpy_dtype)
    if wide.size and not most.min <= int(wide.min()) <= int(wide.max()) <= most.max:
        raise SchemaError(
            f"field {name!r} holds {field.dtype}, from {most.min} to {most.max}; found {wide.min()} to {wide.max()}"
        )
    return True


def _memory(name: str, field: Field, array: Any) -> NDArray[Any]:
    """An array or tensor as contiguous host memory that has Python's buffer protocol."""
    buffer = as_buffer(name, field, array)
    return buffer.numpy() if hasattr(buffer, "detach") else buffer  # type: ignore[no-any-return]


def _unnested(name: str, data: Any) -> list[Any]:
    try:
        return list(data.detach().unbind())
    except (RuntimeError, TypeError) as error:
        raise SchemaError(f"field {name!r} is a nested tensor that does not come apart: {error}") from None


def _strings(name: str, field: Field, data: Any) -> _Values:
    kind, wanted = (str, "str") if field.kind == "text" else (bytes, "bytes")
    if hasattr(data, "tolist"):
        data = data.tolist()
    if isinstance(data, str | bytes) or not isinstance(data, Sequence):
        raise SchemaError(f"field {name!r} takes a list of {wanted}, found {shown(data)}")
    rows, flat = None, data
    if field.axis is not None and (not data or not isinstance(data[0], str | bytes)):
        try:
            if any(isinstance(each, str | bytes) for each in data):
                raise TypeError
            rows = list(map(len, data))
            flat = [each for row in data for each in row]
        except TypeError:
            raise SchemaError(f"field {name!r} takes a list of {wanted} for each row, found {shown(data)}") from None
    for each in flat:
        if not isinstance(each, kind):
            raise SchemaError(f"field {name!r} takes {wanted}, found {shown(each)}")
    try:
        encoded = [each.encode() for each in flat] if kind is str else list(flat)
    except UnicodeEncodeError as error:
        raise SchemaError(f"field {name!r} has text without an encoding: {error}") from None
    sizes = np.fromiter(map(len, encoded), np.uint32, len(encoded))
    return _Values(b"".join(encoded), sizes, rows, len(flat))


__all__ = ["Source", "check_names", "collect", "lengths_given", "part_of"]
