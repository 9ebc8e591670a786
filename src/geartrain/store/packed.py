"""Packed fields: the values of rows that have their own lengths, one row's behind the other's and without padding.

Claims and batches of a store with axes are `PackedFields`. `joined` puts several fields of a sequence behind each
other, as a model reads prompt and answer, and takes results apart again.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.arguments import check_names_of, shown, some_of
from geartrain.core.dtypes import DTYPES, as_tensor, numpy_dtype
from geartrain.core.keys import Keys
from geartrain.core.tasks import RowPlan
from geartrain.errors import ArgumentError, CorruptStoreError, FieldError

if TYPE_CHECKING:
    import torch


class AxisBounds(NamedTuple):
    """How an axis is divided among rows, and into parts.

    Attributes:
        lengths: (n,) items of each row.
        bounds: (n + 1,) where each row's items begin, and where the last one's end.
        parts: (p + 1,) the same of the sequences that a field divides the axis into; None if there is no such field.
    """

    lengths: NDArray[np.int32]
    bounds: NDArray[np.int32]
    parts: NDArray[np.int32] | None


class PackedValues(Protocol):
    """Values of rows as a reader has read them; `geartrain._native.PackedArrays` is one."""

    @property
    def nbytes(self) -> int:
        """Bytes of the fields."""
        ...

    def field(self, place: int, /) -> NDArray[Any]:
        """The raw values of a field, by its place among those that were read."""
        ...

    def strings(self, place: int, /) -> list[Any]:
        """The same of one that has strings."""
        ...

    def axis(self, number: int, /) -> tuple[Any, Any, Any]:
        """The bounds of an axis, by its number in the plan; see `AxisBounds`."""
        ...


class ReadValues(PackedValues, Protocol):
    """The same with what was not there."""

    def torn(self) -> NDArray[np.uint8]:
        """(n,) not 0 for rows that are gone or have not all fields; they have no values."""
        ...

    def unready(self) -> NDArray[np.uint8]:
        """(n,) of rows that have not all fields, the number of a task that has not written one, plus 1."""
        ...

    def versions(self) -> NDArray[np.int64]:
        """(n,) the rows' versions."""
        ...


class RowReader(Protocol):
    """Reads fields of rows: a `PackedReader`, or one of a peer's store."""

    names: tuple[str, ...]
    plan: RowPlan

    def read(self, keys: Keys) -> ReadValues:
        """The fields of rows."""
        ...


def strings_of(found: PackedValues, place: int, name: str) -> list[Any]:
    """The strings of a field that was read. Raises `CorruptStoreError` for text that is none."""
    try:
        return found.strings(place)
    except UnicodeDecodeError as error:
        raise CorruptStoreError(
            f"the field {name!r} has text that is not UTF-8, so its store or checkpoint was damaged: {error}"
        ) from None


class PackedReader:
    """Reads fields of rows, for higher layers. Any thread.

    Args:
        native: the store.
        plan: its fields and axes.
        names: fields to read.
        axes: names of axes whose lengths are read beside those of the fields.
        threads: threads that copy; 0: the default.
    """

    def __init__(
        self, native: _native.Store, plan: RowPlan, names: Sequence[str], axes: Sequence[str] = (), threads: int = 0
    ) -> None:
        plan.check_fields(names)
        places = plan.field_numbers
        self.names = tuple(names)
        self.plan = plan
        self.native = _native.PackedReader(
            native, [places[name] for name in names], [plan.axis(axis) for axis in axes], threads
        )

    def read(self, keys: Keys) -> _native.PackedArrays:
        """The fields of rows. `torn` of the result tells rows that are gone, `unready` why a row has not all fields."""
        return self.native.read(keys.row, keys.generation)


def check_ready(reader: RowReader, keys: Keys, found: ReadValues) -> None:
    """Raises `FieldError` where a task has not written what was to be read."""
    unready = found.unready()
    rows = np.flatnonzero(unready)
    if not len(rows):
        return
    task = list(reader.plan.tasks)[int(unready[rows[0]]) - 2]
    fields = [name for name in reader.names if reader.plan.writer[name] == int(unready[rows[0]]) - 1]
    raise FieldError(
        f"the task {task!r} is not done for {len(rows)} of {len(keys)} rows (first: row {keys.row[rows[0]]}), so "
        f"that they have no {some_of(map(repr, fields))} yet: read other fields, or wait until it is done"
    )


class PackedFields(ABC):
    """Fields of n rows: `rows["ids"]` is (total, ...), the values of all rows one behind the other.

    Fields without an axis are (n, ...). `Text` fields are lists of `str`, `Bytes` fields lists of `bytes`, with an axis
    those of all rows in one list. Arrays are tensors, or with `output="numpy"` NumPy arrays, over memory that no one
    overwrites.

    A sequence is a row's part of an axis. If a field divides the axis (`divides="tokens"`), each of its lengths is one
    sequence: an answer.
    """

    __slots__ = ()

    _plan: RowPlan
    _output: str
    _shown: dict[str, Any]  # values by field, as users have them
    _bounds: dict[str, AxisBounds]
    _device: Any  # of tensors; None for host memory

    @abstractmethod
    def _read(self, names: Sequence[str]) -> None:
        """Puts the values of fields into `_shown`, and the bounds of their axes into `_bounds`; raises `FieldError`."""

    @abstractmethod
    def _read_axis(self, axis: str) -> None:
        """The same of an axis."""

    @abstractmethod
    def _known_axes(self) -> list[str]:
        """The axes that these rows have lengths of."""

    @abstractmethod
    def _rows(self) -> int:
        """How many rows these are."""

    def show(self, names: Sequence[str], found: PackedValues, taken: Sequence[str]) -> None:
        """Internal: takes values of `taken`, and bounds of their axes, out of what was read of the fields `names`."""
        for name in taken:
            place, field = names.index(name), self._plan.fields[name]
            if field.kind != "array":
                self._shown[name] = strings_of(found, place, name)
            else:
                self._shown[name] = self.as_field(found.field(place), field.dtype)
            if field.axis is not None:
                self.show_axis(field.axis, found)

    def show_axis(self, axis: str, found: PackedValues) -> None:
        """Internal: takes the bounds of an axis out of what was read."""
        if axis not in self._bounds:
            self._bounds[axis] = AxisBounds(*found.axis(self._plan.axis(axis)))

    def as_field(self, array: NDArray[Any], dtype: str) -> Any:
        """Internal: an array of raw values as users get it."""
        if self._output == "torch":
            return as_tensor(array, DTYPES[dtype])
        shown_as = numpy_dtype(DTYPES[dtype])
        return array if array.dtype == shown_as else array.view(shown_as)

    def _as_output(self, array: NDArray[Any]) -> Any:
        if self._output != "torch":
            return array
        import torch

        tensor = torch.from_numpy(array)
        return tensor if self._device is None else tensor.to(self._device)

    # --- values -------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        found = self._shown.get(name) if isinstance(name, str) else None
        if found is None:
            self._read((name,))
            found = self._shown[name]
        return found

    def lengths(self, axis: str) -> Any:
        """Items of each row: (n,) int32.

        Args:
            axis: name of an axis.

        Raises:
            SchemaError: the store has no such axis.
            FieldError: the task that sets the lengths of the axis is not done, or the batch has none of its fields.
        """
        return self._as_output(self.bounds_of(axis).lengths)

    def bounds_of(self, axis: str) -> AxisBounds:
        """Internal: the bounds of an axis; errors as of `lengths`."""
        if not isinstance(axis, str) or axis not in self._bounds:
            self._plan.axis(axis)  # which refuses what is none
            self._read_axis(axis)
        return self._bounds[axis]

    def unit_of(self, axis: str) -> str | None:
        """Internal: the axis whose items are the sequences of an axis; None if rows are its sequences."""
        divides = any(self._plan.divided_into(other.name) == axis for other in self._plan.axes)
        return axis if divides else self._plan.divided_into(axis)

    def _field_bounds(self, name: str) -> NDArray[np.int32]:
        """Where the sequences of a field begin, and where the last one ends."""
        if not isinstance(name, str) or name not in self._plan.fields:
            self[name]  # which refuses it
        axis = self._plan.fields[name].axis
        if axis is None:
            return np.arange(self._rows() + 1, dtype=np.int32)
        found = self.bounds_of(axis)
        return found.bounds if found.parts is None else found.parts

    def cu_seqlens_of(self, name: str) -> Any:
        """Where the sequences of a field begin, and where the last one ends: (sequences + 1,) int32.

        Args:
            name: a field. With a divided axis each part is a sequence, else each row. Without an axis each row has one
                value.
        """
        return self._as_output(self._field_bounds(name))

    @property
    def cu_seqlens(self) -> Any:
        """`cu_seqlens_of` the fields of the one axis that is divided; else of the only axis there is.

        Raises:
            ArgumentError: there is no axis, or several.
        """
        found = self._usual_axes()
        if len(found) != 1:
            raise ArgumentError(
                f"cu_seqlens is of one axis, and there are {len(found)}: {some_of(found)}. Name a field: "
                f"cu_seqlens_of('...')"
            )
        bounds = self.bounds_of(found[0])
        return self._as_output(bounds.bounds if bounds.parts is None else bounds.parts)

    def _usual_axes(self) -> list[str]:
        """The axes that are divided; else all."""
        axes = self._known_axes()
        return [axis for axis in axes if self._plan.divided_into(axis) is not None] or axes

    def position_ids(self, name: str) -> Any:
        """Place of each item of a field in its sequence: (total,) int64, 0, 1, 2, ... from each sequence's begin on.

        Args:
            name: a field.
        """
        return self._as_output(_positions(self._field_bounds(name)))

    def jagged(self, name: str) -> torch.Tensor:
        """A field as a nested tensor (sequences, j, ...) of layout `torch.jagged`, over the same memory.

        Args:
            name: a field with an axis.

        Raises:
            FieldError: the field has strings, or no axis.
            ArgumentError: the values are NumPy arrays.
        """
        values, field = self[name], self._plan.fields[name]
        if field.kind != "array" or field.axis is None:
            what = "strings" if field.kind != "array" else "no axis"
            raise FieldError(f"a nested tensor has arrays of different lengths, and the field {name!r} has {what}")
        if self._output != "torch":
            raise ArgumentError("a nested tensor is one of torch, and these are NumPy arrays: ask for output='torch'")
        import torch

        nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, self.cu_seqlens_of(name))
        return nested

    def expand(self, values: Any, to: str | None = None) -> Any:
        """One value for each sequence, or for each row, repeated for each of its items: (items, ...).

        Gradients flow through it.

        Args:
            values: name of a field that has one value for each sequence or row, such as the advantages of answers; or a
                tensor or array with one entry for each sequence.
            to: a field that tells how often values are repeated, or the name of an axis. By default the axis that
                is divided; without one the only axis.

        Raises:
            FieldError: there is no such field; it has strings; or it has values of something else than the sequences or
                rows of `to`.
            ArgumentError: `to` has no axis; it is left out, and there are several; or there is not one entry for each
                sequence.
        """
        axis = self._expanded_axis(to)
        into, bounds = self._plan.divided_into(axis), self.bounds_of(axis)
        parts = bounds.lengths if bounds.parts is None else np.diff(bounds.parts)
        if isinstance(values, str):
            name, values = values, self[values]
            field = self._plan.fields[name]
            if field.kind != "array":
                raise FieldError(f"the field {name!r} has strings, which are not repeated")
            if field.axis == axis:
                return values
            if field.axis is not None and field.axis != into:
                raise FieldError(
                    f"the field {name!r} has one value for each item of {field.axis!r}, which is neither one for each "
                    f"row nor one for each {'row' if into is None else f'item of {into!r}'}: it cannot be expanded to "
                    f"{axis!r}"
                )
            repeats = bounds.lengths if field.axis is None else parts
        else:
            shape = tuple(getattr(values, "shape", ()))
            if not shape or shape[0] != len(parts):
                raise ArgumentError(
                    f"expand takes the name of a field, or one entry for each of {len(parts)} sequences; found "
                    f"{f'shape {shape}' if shape else shown(values)}"
                )
            repeats = parts
        if not hasattr(values, "repeat_interleave"):
            return np.repeat(values, repeats, axis=0)
        import torch

        times = torch.from_numpy(repeats.astype(np.int64)).to(values.device)
        return values.repeat_interleave(times, dim=0, output_size=int(repeats.sum()))

    def _expanded_axis(self, to: Any) -> str:
        if to is None:
            found = self._usual_axes()
            if len(found) != 1:
                raise ArgumentError(f"values are expanded to one axis, and there are {len(found)}: pass to=")
            return found[0]
        if not isinstance(to, str) or to not in self._plan.fields:
            self.bounds_of(to)  # which refuses what is no axis
            return to  # type: ignore[no-any-return]
        axis = self._plan.fields[to].axis
        if axis is None:
            raise ArgumentError(f"the field {to!r} has no axis, so that its rows have one value each: leave out expand")
        return axis

    # --- several fields of a sequence ---------------------------------------------------------------------------

    def joined(self, *names: str) -> Joined:
        """The values of several fields behind each other, sequence after sequence: prompt and answer, for example.

        If the axis of one of them is divided, there is one sequence for each part. A field that a row has once, such as
        the prompt of a group of answers, then stands in front of each part of its row.

        Args:
            names: fields in their order within a sequence; of one dtype and one shape of an item.

        Raises:
            ArgumentError: no field was named, or one twice; dtypes or shapes differ; or two axes are divided by fields
                of different axes.
            FieldError: the store has no such field, or it has strings.
        """
        check_names_of("joined", names)
        missing = [name for name in names if name not in self._shown]
        if missing:
            self._read(missing)
        fields = [self._plan.fields[name] for name in names]
        for name, field in zip(names, fields, strict=True):
            if field.kind != "array":
                raise FieldError(f"the field {name!r} has strings, which cannot be joined with numbers")
            if (field.dtype, field.shape) != (fields[0].dtype, fields[0].shape):
                raise ArgumentError(
                    f"fields are joined that have one dtype and shape: {names[0]!r} has {fields[0].dtype} "
                    f"{fields[0].shape} an item, {name!r} has {field.dtype} {field.shape}"
                )
        runs = self._runs_of(names)
        return _join(names, [self._shown[name] for name in names], runs, self._as_output)

    def _runs_of(self, names: Sequence[str]) -> list[_Runs]:
        """Where each field has the values of each sequence."""
        divided = {}
        for name in names:
            axis = self._plan.fields[name].axis
            into = None if axis is None else self._plan.divided_into(axis)
            if into is not None:
                divided[name] = into
        if len(set(divided.values())) > 1:
            raise ArgumentError(
                f"{some_of(f'{name!r} is divided into {axis}' for name, axis in divided.items())}: fields are joined "
                f"that are divided alike"
            )
        by = next(iter(divided.values()), None)
        row_of = None
        if by is not None:
            counts = self.bounds_of(by).lengths
            row_of = np.repeat(np.arange(len(counts)), counts)
        runs = []
        for name in names:
            axis = self._plan.fields[name].axis
            bounds = self._field_bounds(name).astype(np.int64)
            if axis is not None and axis == by:  # one item for each part
                bounds = np.arange(bounds[-1] + 1)
            starts, lengths = bounds[:-1], np.diff(bounds)
            once = row_of is not None and axis != by and name not in divided
            runs.append(_Runs(starts[row_of], lengths[row_of], False) if once else _Runs(starts, lengths, True))
        return runs


class SelectedFields(PackedFields):
    """Some rows of packed fields, or some sequences of them, in their order there.

    Values are gathered when they are asked for. A row is there if one of its sequences is. Its fields that have no
    values for single sequences are then there whole, such as the prompt of several answers.

    Args:
        source: fields of more rows.
        numbers: rows, ascending; with `by` items of that axis over all rows.
        by: an axis that divides others: the sequences are its items.
    """

    def __init__(self, source: PackedFields, numbers: NDArray[np.int64], by: str | None = None) -> None:
        self._source = source
        self._plan = source._plan
        self._output = source._output
        self._device = source._device
        self._shown: dict[str, Any] = {}
        self._bounds: dict[str, AxisBounds] = {}
        self._by = by
        self._numbers = numbers
        self._row_of = numbers  # of each sequence its row
        if by is not None:
            self._row_of = np.searchsorted(source.bounds_of(by).bounds, numbers, side="right") - 1
        firsts = np.flatnonzero(np.diff(self._row_of, prepend=-1))
        self._row_numbers = self._row_of[firsts]
        self._counts = np.diff(firsts, append=len(numbers))  # sequences of each row
        self._at: dict[str | None, NDArray[Any]] = {}  # by axis: where the items are in the source
        self._moved: dict[str | None, Any] = {}  # the same as tensors

    @property
    def rows(self) -> Any:
        """The row of the batch that each sequence is of, (sequences,) int64: `batch.version[micro.rows]`."""
        return self._as_output(self._row_of)

    def _rows(self) -> int:
        return len(self._row_numbers)

    def _known_axes(self) -> list[str]:
        return self._source._known_axes()

    def _read(self, names: Sequence[str]) -> None:
        for name in names:
            values = self._source[name]
            axis = self._plan.fields[name].axis
            at = self._at.get(axis)
            if at is None:
                at = self._at[axis] = self._places(axis)
            if isinstance(values, list):
                found: Any = [values[place] for place in at.tolist()]
            elif isinstance(values, np.ndarray):
                found = values.take(at, axis=0)
            else:
                if axis not in self._moved:
                    self._moved[axis] = self._as_output(at)
                found = values.index_select(0, self._moved[axis])
            self._shown[name] = found

    def _places(self, axis: str | None) -> NDArray[Any]:
        """Where the items of an axis are in the source; None: of fields that have one value for each row."""
        dtype = np.int32 if self._output == "torch" else np.intp  # what each gathers fastest by
        if axis is None or axis == self._by:
            return (self._row_numbers if axis is None else self._numbers).astype(dtype)
        bounds = self._source.bounds_of(axis)
        if self._by is not None and self._plan.divided_into(axis) == self._by:
            assert bounds.parts is not None
            return spread(*_runs(bounds.parts, self._numbers), dtype)
        return spread(*_runs(bounds.bounds, self._row_numbers), dtype)

    def _read_axis(self, axis: str) -> None:
        source, into = self._source.bounds_of(axis), self._plan.divided_into(axis)
        parts = None
        lengths: NDArray[Any]
        if axis == self._by:
            lengths = self._counts
        elif into is None:
            lengths = source.lengths[self._row_numbers]
        else:
            assert source.parts is not None
            of_rows = self.bounds_of(into).bounds
            chosen = self._numbers
            if into != self._by:
                chosen = spread(*_runs(self._source.bounds_of(into).bounds, self._row_numbers))
            parts = as_bounds(_runs(source.parts, chosen)[1])
            lengths = np.diff(parts[of_rows])
        self._bounds[axis] = AxisBounds(lengths.astype(np.int32), as_bounds(lengths), parts)


class _Runs(NamedTuple):
    """Where a field has the values of each sequence; `whole`: sequence after sequence, all of them."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    whole: bool


class Joined:
    """Several fields of sequences behind each other. Made by `PackedFields.joined`.

    Attributes:
        values: (total, ...), sequence after sequence.
        cu_seqlens: (sequences + 1,) int32, where each sequence begins, and where the last one ends.
        mask: (total,) bool, True for what belongs to the field that was named last.
        position_ids: (total,) int64, place in the sequence.
        max_seqlen: length of the longest sequence, which attention over packed sequences asks for.
    """

    __slots__ = ("_at", "_indices", "cu_seqlens", "mask", "max_seqlen", "position_ids", "values")

    def __init__(self, values: Any, cu_seqlens: Any, mask: Any, position_ids: Any, max_seqlen: int, at: Any) -> None:
        self.values = values
        self.cu_seqlens = cu_seqlens
        self.mask = mask
        self.position_ids = position_ids
        self.max_seqlen = max_seqlen
        self._at: dict[str, NDArray[np.int64]] = at
        self._indices: dict[tuple[str, str], Any] = {}

    def __len__(self) -> int:
        """Sequences."""
        return len(self.cu_seqlens) - 1

    def __repr__(self) -> str:
        return f"Joined({' + '.join(self._at)}, {len(self)} sequences, {len(self.values)} items)"

    def part(self, name: str, values: Any) -> Any:
        """The entries that belong to one of the fields, of values that a model computed for all.

        Gradients flow through it.

        Args:
            name: one of the joined fields.
            values: (total, ...) tensor or array.

        Returns:
            (items, ...), in the order that the field itself has; of a field that stands in several sequences, all of
            its places.

        Raises:
            ArgumentError: the field was not joined, or there is not one entry for each joined value.
        """
        if not isinstance(name, str) or name not in self._at:
            raise ArgumentError(f"{some_of(map(repr, self._at))} were joined, not {shown(name)}")
        shape = tuple(getattr(values, "shape", ()))
        if not shape or shape[0] != len(self.values):
            raise ArgumentError(
                f"part takes one entry for each joined value, ({len(self.values)}, ...); found shape {shape}. "
                f"A model's batch axis of 1 goes with values[0]"
            )
        at = self._at[name]
        if not hasattr(values, "detach"):
            return values[at]
        import torch

        where = str(values.device)
        index = self._indices.get((name, where))
        if index is None:
            index = self._indices[name, where] = torch.from_numpy(at).to(values.device)
        return values.index_select(0, index)


def _positions(bounds: NDArray[Any]) -> NDArray[np.int64]:
    return np.arange(bounds[-1], dtype=np.int64) - np.repeat(bounds[:-1].astype(np.int64), np.diff(bounds))


def as_bounds(lengths: NDArray[Any]) -> NDArray[np.int32]:
    """Where runs of these lengths begin, and where the last one ends."""
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def _runs(bounds: NDArray[Any], numbers: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Starts and lengths of some runs."""
    starts = bounds[numbers]
    return starts, bounds[numbers + 1] - starts


def spread(starts: NDArray[Any], lengths: NDArray[Any], dtype: Any = np.int64) -> NDArray[Any]:
    """All places of runs that begin at `starts`: starts[0], starts[0] + 1, ..., starts[1], ..."""
    ends = np.cumsum(lengths)
    before = (starts - (ends - lengths)).astype(dtype, copy=False)
    places: NDArray[Any] = np.arange(ends[-1] if len(ends) else 0, dtype=dtype)
    places += np.repeat(before, lengths)
    return places


def _join(names: Sequence[str], values: Sequence[Any], runs: Sequence[_Runs], as_output: Any) -> Joined:
    lengths = functools.reduce(np.add, [run.lengths for run in runs])
    cu = np.concatenate([[0], np.cumsum(lengths)])
    total = int(cu[-1])
    if total > 2**31 - 1:
        raise ArgumentError(f"joined sequences have {total} values together, and cu_seqlens counts with 32 bits")
    shape = (total, *values[0].shape[1:])
    first = values[0]
    if hasattr(first, "new_empty"):
        import torch

        out = first.new_empty(shape)

        def index(places: NDArray[np.int64]) -> Any:
            return torch.from_numpy(places).to(first.device)
    else:
        out = np.empty(shape, first.dtype)

        def index(places: NDArray[np.int64]) -> Any:
            return places

    at, before = {}, cu[:-1].copy()
    for name, each, run in zip(names, values, runs, strict=True):
        at[name] = spread(before, run.lengths)
        before += run.lengths
        out[index(at[name])] = each if run.whole else each[index(spread(run.starts, run.lengths))]
    mask = np.zeros(total, np.bool_)
    mask[at[names[-1]]] = True
    bounds = cu.astype(np.int32)
    return Joined(
        out,
        as_output(bounds),
        as_output(mask),
        as_output(_positions(bounds)),
        int(lengths.max()) if len(lengths) else 0,
        at,
    )


__all__ = [
    "AxisBounds",
    "Joined",
    "PackedFields",
    "PackedReader",
    "PackedValues",
    "ReadValues",
    "RowReader",
    "SelectedFields",
    "as_bounds",
    "check_ready",
    "spread",
]
