"""Schema of a store: its fields, the layout of their blocks, and the checks of both.

A store is a table of rows. Each field is one column, which is a contiguous array of blocks of equal size. Each row has
one block of each field. The first axis of a block is time, with room for `max_length` steps.

A field that is `per_row` has no time axis and stores one value for each row. Examples are a task id, or an embedding of
the prompt.

A field whose first extent is a name has a named axis in place of time: its own length in each row. `Text` and `Bytes`
are strings. A store with such fields, or with tasks (core/tasks.py), has no time axis at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from geartrain.core.arguments import check_flag, check_text, check_whole, leave_out, optional, shown
from geartrain.core.dtypes import DTYPES, Dtype, as_dtype, numpy_dtype
from geartrain.errors import ArgumentError, SchemaError

MAX_FIELDS = 64
MAX_DIMS = 8
MAX_AXIS = 2**31 - 1
MAX_NAME_BYTES = 63
#: Named axes of a store.
MAX_AXES = 8
#: What an item of a field is: elements of its dtype, a string of bytes, or one of UTF-8.
Kind = Literal["array", "bytes", "text"]
KINDS: tuple[Kind, ...] = ("array", "bytes", "text")
#: Alignment of blocks, columns and buffers in bytes: a cache line, and a vector load.
ALIGNMENT = 64


def round_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of the alignment: where the next block, column or buffer begins."""
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True, init=False)
class Field:
    """One column of a store: the dtype and the shape of one step.

    A name as the first extent is an axis whose length differs from row to row: `Field(("tokens", 48), "uint8")` has 48
    bytes for each token of a row. Fields with the same axis have the same length in a row (docs/tasks.md).

    Args:
        shape: shape of one step; `()` for a scalar. A row holds up to `max_length` steps of it. At most 7 axes, or 8
            with `per_row=True`. The first one may be a name of 1 to 63 bytes; the attribute `shape` is then the shape
            of one item, without the name.
        dtype: a name ("float32", "bfloat16", ...), a NumPy dtype or its code ("f4", "<i8"), or a torch dtype. Write
            "float64" instead of "float" and "int64" instead of "int": NumPy and torch disagree on the short names.
        per_row: a row has one value of this shape instead of one for each step. In a store with axes or tasks every
            field without an axis is so.
        divides: name of an axis that this field cuts into sequences: `Field(("answers",), "int32", divides="tokens")`
            has the number of tokens of each answer. They add up to the row's tokens.

    Attributes:
        axis: the name that the shape begins with; None if there is none.
        kind: "array", or "text" and "bytes" for the fields that `Text` and `Bytes` make.

    Raises:
        SchemaError: an axis is empty, there are too many axes, the dtype is unknown, or `divides` does not fit.

    Examples:
        >>> Field((11,), "float32").nbytes
        44
        >>> Field(("tokens", 48), "uint8").axis
        'tokens'
    """

    shape: tuple[int, ...]
    dtype: str
    per_row: bool
    axis: str | None
    divides: str | None
    kind: Kind

    def __init__(
        self,
        shape: tuple[int | str, ...] | list[int | str] | tuple[int, ...] | list[int] | int,
        dtype: object,
        *,
        per_row: bool = False,
        divides: str | None = None,
    ) -> None:
        axis, per_row = None, check_flag("per_row", per_row)
        if isinstance(shape, tuple | list) and shape and isinstance(shape[0], str):
            axis, shape = check_label("an axis", shape[0]), tuple(shape[1:])
        dims = _dims(shape, axis)
        most = MAX_DIMS if per_row else MAX_DIMS - 1
        if len(dims) > most:
            first = "" if per_row else f", one of them {'time' if axis is None else repr(axis)}"
            raise SchemaError(f"a field has at most {MAX_DIMS} axes{first}, shape {dims} has {len(dims)}")
        if any(n <= 0 for n in dims):
            raise SchemaError(f"every axis must have at least one element; the shape is {dims}")
        if any(n > MAX_AXIS for n in dims):
            raise SchemaError(f"an axis has at most {MAX_AXIS} elements; the shape is {dims}")
        if axis is not None and per_row:
            raise SchemaError(f"a field with the axis {axis!r} has its own length in each row: leave out per_row=True")
        _set(self, dims, as_dtype(dtype).name, per_row, axis, divides, "array")
        if divides is None:
            return
        check_label("an axis", divides)
        if axis is None or axis == divides or dims or self.dtype != "int32":
            raise SchemaError(
                f"a field that divides an axis has one length for each item of another axis, such as "
                f"Field(('answers',), 'int32', divides={divides!r}); found {self}"
            )

    def __repr__(self) -> str:
        shape = self.shape if self.axis is None else (self.axis, *self.shape)
        divides = "" if self.divides is None else f", divides={self.divides!r}"
        return f"Field({shape}, {self.dtype!r}{', per_row=True' if self.per_row else ''}{divides})"

    def once_a_row(self) -> Field:
        """Internal: the field as a store with axes or tasks has it: `per_row`, unless it has an axis or is a string."""
        if self.per_row or self.axis is not None or self.kind != "array":
            return self
        return Field(self.shape, self.dtype, per_row=True)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of one step or item, or of the row's one value with `per_row=True`."""
        return math.prod(self.shape) * self.itemsize

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """NumPy dtype of the elements. Raises `FieldError` for a dtype that NumPy lacks, such as bfloat16."""
        return numpy_dtype(DTYPES[self.dtype])

    def block_shape(self, max_length: int) -> tuple[int, ...]:
        """Shape of this field in one row: `(max_length, *shape)`, or `shape` with `per_row=True`.

        Args:
            max_length: the store's longest row, in steps.
        """
        return self.shape if self.per_row else (max_length, *self.shape)

    def block_nbytes(self, max_length: int) -> int:
        """Bytes of this field in one row, without the padding to 64 bytes.

        Args:
            max_length: the store's longest row, in steps.
        """
        return self.nbytes if self.per_row else max_length * self.nbytes


def _set(
    field: Field,
    shape: tuple[int, ...],
    dtype: str,
    per_row: bool,
    axis: str | None,
    divides: str | None,
    kind: Kind,
) -> None:
    values = {"shape": shape, "dtype": dtype, "per_row": per_row, "axis": axis, "divides": divides, "kind": kind}
    for name, value in values.items():
        object.__setattr__(field, name, value)


class Text(Field):
    """A field of strings of any length: one a row, or one for each item of an axis.

    A store with such a field takes lists of `str`, and batches and claims have them.

    Args:
        axis: name of an axis; by default a row has one string.

    Raises:
        SchemaError: the axis has no such name.

    Examples:
        >>> Text("answers").axis
        'answers'
    """

    def __init__(self, axis: str | None = None) -> None:
        _set(self, (), "uint8", False, None if axis is None else check_label("an axis", axis), None, "text")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.axis is None else repr(self.axis)})"


class Bytes(Text):
    """A field of byte strings of any length: one a row, or one for each item of an axis. Takes lists of `bytes`.

    Args:
        axis: name of an axis; by default a row has one string.

    Raises:
        SchemaError: the axis has no such name.

    Examples:
        >>> Bytes().kind
        'bytes'
    """

    def __init__(self, axis: str | None = None) -> None:
        _set(self, (), "uint8", False, None if axis is None else check_label("an axis", axis), None, "bytes")


def spanned_field(shape: tuple[int, ...], dtype: str, axis: str | None, divides: str | None, kind: Kind) -> Field:
    """A field of a store with axes or tasks, as its segment describes it."""
    if kind != "array":
        return (Text if kind == "text" else Bytes)(axis)
    return Field(shape if axis is None else (axis, *shape), dtype, per_row=axis is None, divides=divides)


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by dotted names as nested dicts: "obs.x" is `tree["obs"]["x"]`.

    Raises:
        ArgumentError: a field's name is the beginning of another's.
    """
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        at = tree
        *parents, last = name.split(".")
        for depth, part in enumerate(parents, 1):
            at = at.setdefault(part, {})
            if type(at) is not dict:
                above = ".".join(parents[:depth])
                raise ArgumentError(f"the field {name!r} would be nested in the field {above!r}: rename one of them")
        if last in at:
            raise ArgumentError(f"other fields would be nested in the field {name!r}: rename one of them")
        at[last] = leaf
    return tree


def of_field(name: str, error: SchemaError) -> SchemaError:
    """The error of a field's shape, dtype or values with the field's name in front."""
    return type(error)(f"field {name!r}: {error}")


def _dims(shape: Any, axis: str | None) -> tuple[int, ...]:
    """The numbers of a shape, behind its named axis: one number, or several in an order (tuple, array, iterator)."""
    unordered = isinstance(shape, str | bytes | bytearray | Mapping | set | frozenset)
    one = unordered or getattr(shape, "ndim", 1) == 0 or not hasattr(shape, "__iter__")
    try:
        return tuple(check_whole("an axis", n) for n in ((shape,) if one else shape))
    except (ArgumentError, TypeError):
        if axis is not None or (isinstance(shape, tuple | list) and any(isinstance(n, str) for n in shape)):
            whole = tuple(shape) if axis is None else (axis, *shape)
            raise SchemaError(
                f"a shape may begin with the name of one axis, and whole numbers follow, such as "
                f"('images', 3, 224, 224); found {shown(whole)}"
            ) from None
        raise SchemaError(
            f"a shape is a whole number or several, such as (84, 84, 4), or () for a scalar; found {shown(shape)}"
        ) from None


def check_fields(fields: Mapping[str, Field]) -> dict[str, Field]:
    """The fields as a plain dict, once they make a schema a store can hold.

    Raises:
        SchemaError: no field, too many, or a bad name.
    """
    if not isinstance(fields, Mapping):
        raise SchemaError(f"the fields of a store must be a dict of geartrain.Field by name, found {shown(fields)}")
    if not fields:
        raise SchemaError("a store needs at least one field")
    if len(fields) > MAX_FIELDS:
        raise SchemaError(f"a store has at most {MAX_FIELDS} fields, {len(fields)} were given")
    for name, field in fields.items():
        if not isinstance(field, Field):
            raise SchemaError(
                f"field {shown(name)} must be a geartrain.Field, found {type(field).__name__}: write "
                f"Field((3,), 'float32') for three numbers a step"
            )
        check_label("a field", name)
    return dict(fields)


def check_label(what: str, name: object) -> str:
    """A name that segments store: of a field, an axis or a task. Raises `SchemaError`."""
    try:
        text = check_text("a name", name)
    except ArgumentError:
        text = ""
    if not 1 <= len(text.encode()) <= MAX_NAME_BYTES:
        raise SchemaError(f"{what} has a name of 1 to {MAX_NAME_BYTES} bytes of UTF-8, found {shown(name)}")
    return text


def check_max_length(fields: Mapping[str, Field], max_length: int | None) -> int:
    """The longest row in steps: the given number, or 1 if no field has time.

    Raises:
        ArgumentError: absent though a field has time; shows the call to write. Or given though none has.
    """
    timed = [name for name, field in fields.items() if not field.per_row]
    if not timed:
        if optional(check_whole, "max_length", max_length) not in (None, 1):
            leave_out("every field is per_row, so that a row has one step", max_length=max_length)
        return 1
    if max_length is None:
        first = fields[timed[0]]
        raise ArgumentError(
            "max_length= is missing: the steps of the longest row. A field's shape is that of one step. For "
            f"example Store.create(..., {{{timed[0]!r}: Field({first.shape}, {first.dtype!r})}}, max_length=1000, "
            "...). A value that a row has once is Field(shape, dtype, per_row=True)"
        )
    return check_whole("max_length, in steps,", max_length, 1, MAX_AXIS)


def plain(field: Field) -> Field:
    """A field of a store with axes or tasks as a plain one: what one item of it is."""
    return Field(field.shape, field.dtype, per_row=True)


def stored_schema(fields: Mapping[str, Field], max_length: int) -> list[tuple[str, Dtype, bool, list[int]]]:
    """Fields as segments and manifests keep them: name, dtype, whether it has time, shape of a row's block."""
    return [
        (name, DTYPES[field.dtype], not field.per_row, list(field.block_shape(max_length)))
        for name, field in fields.items()
    ]


def fields_of_stored(stored: Iterable[tuple[str, object, bool, Sequence[int]]]) -> tuple[dict[str, Field], int]:
    """Inverse of `stored_schema`: the fields, and the longest row in steps."""
    fields: dict[str, Field] = {}
    max_length = 1
    for name, dtype, timed, shape in stored:
        fields[name] = Field(tuple(shape)[1:] if timed else tuple(shape), dtype, per_row=not timed)
        if timed:
            max_length = shape[0]
    return fields, max_length


def schema_difference(wanted: dict[str, Field], found: dict[str, Field]) -> str:
    """The first difference between two different schemas, in words."""
    for field, spec in wanted.items():
        if field not in found:
            return f"it has no field {field!r}"
        if spec != found[field]:
            return f"field {field!r} is {found[field]}, asked for {spec}"
    unasked = next(field for field in found if field not in wanted)
    return f"it has a field {unasked!r} that was not asked for"
