"""`FetchPlan`: the fields and windows of a store that a batch contains, and the native call that copies them.

Native threads gather all fields and windows at once, with the GIL released (native/fetch/fetch.h; GEAR, section 3.4).
They copy from shared memory into warm, recycled buffers, or into the caller's arrays. Rows that were overwritten during
the copy are detected and never returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.arguments import (
    PAD,
    check_names_of,
    check_output,
    check_type,
    default_threads,
    is_masked,
    leave_out,
)
from geartrain.core.dtypes import (
    DTYPES,
    as_raw,
    as_tensor,
    from_dlpack,
    has_memory,
    is_exchanged,
    numpy_dtype,
    torch_dtype,
)
from geartrain.core.keys import Keys
from geartrain.core.torch_operators import find_operators
from geartrain.errors import ArgumentError
from geartrain.replay.batch import Batch
from geartrain.replay.windows import FieldSteps, NativeWindows, Windows, as_windows, native_windows, steps_taken
from geartrain.store.store import Store

Pad = Literal["left", "right"]
As = Literal["torch", "numpy"]


class BatchFields:
    """Names and dtypes of a batch's fields, and the kind of its arrays; holds no store.

    Attributes:
        names: of the fields.
        places: of each in the native batch.
        output: "torch" or "numpy".
        per_step: whether keys name steps.
    """

    per_step = False

    def __init__(self, names: Sequence[str], dtypes: Mapping[str, str], output: As) -> None:
        self.names = list(names)
        self.places = {name: place for place, name in enumerate(names)}
        self.output = output
        self._dtypes = {name: DTYPES[dtypes[name]] for name in names}

    @functools.cached_property
    def from_dlpack(self) -> Callable[[Any], Any] | None:
        """The function that makes a tensor of a DLPack capsule; None for arrays."""
        return from_dlpack() if self.output == "torch" else None

    @functools.cached_property
    def exchanged(self) -> Mapping[str, int]:
        """Places of the fields that are exchanged as what they are."""
        return {name: place for name, place in self.places.items() if is_exchanged(self._dtypes[name])}

    def as_output(self, array: NDArray[Any]) -> Any:
        """An array as users get it: a tensor, or itself."""
        if self.output == "torch":
            import torch

            return torch.from_numpy(array)
        return array

    def as_field(self, name: str, array: NDArray[Any]) -> Any:
        """A field's array as users get it: of its own dtype, a tensor or an array."""
        dtype = self._dtypes[name]
        if self.output == "torch":
            return as_tensor(array, dtype)
        shown = numpy_dtype(dtype)
        return array if array.dtype == shown else array.view(shown)


class FetchPlan(BatchFields):
    """What to fetch, checked once and used for every batch.

    Attributes:
        windows, window: the windows, and their length; None and 0 for whole rows.
        taken: by the field's name, which steps of the windows it takes; fields that are not in it take all.
    """

    def __init__(
        self,
        store: Store,
        names: list[str],
        windows: Windows | None,
        pad_left: bool,
        output: As,
        threads: int,
        taken: Mapping[str, FieldSteps] | None = None,
    ) -> None:
        window = 0 if windows is None else windows.length
        super().__init__(names, {name: field.dtype for name, field in store.fields.items()}, output)
        self.store = store
        self.numbers = [store.field_number(name) for name in names]
        self.per_step = store.per_step and window != 0  # whole rows were placed by no step
        self.windows = windows
        self.window = window  # its length; 0 for whole rows
        self.pad_left = pad_left
        self.threads = threads
        self.taken = {name: steps for name, steps in (taken or {}).items() if name in self.places}

    @staticmethod
    def make(
        store: Store,
        fields: Sequence[str] | None,
        window: int | Windows | None,
        pad: Pad,
        output: As,
        threads: int | None,
        first_only: Sequence[str] = (),
    ) -> FetchPlan:
        """A plan, once the store has what is asked for. `pad` and `output` have been checked.

        Raises:
            ArgumentError, FieldError: fields or windows that do not fit the store.
        """
        schema = store.fields
        names = list(schema if fields is None else check_names_of("fields", fields))
        for name in names:
            store.field_number(name)
        windows = as_windows(window)
        if windows is not None and windows.offsets is not None:
            leave_out("steps with offsets are padded where they are missing", pad=pad != "left" and pad)
        taken = steps_taken(store, names, windows, first_only)
        if output == "torch":
            find_operators()
        for name in names:
            (torch_dtype if output == "torch" else numpy_dtype)(DTYPES[schema[name].dtype])
        return FetchPlan(store, names, windows, pad == "left", output, default_threads(threads), taken)

    def schema(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each field of a batch of one row."""
        return {name: (self.shape(name, 1), self.store.fields[name].dtype) for name in self.names}

    def of_fields(self, names: Sequence[str]) -> FetchPlan:
        """The same plan for some of its fields, or none."""
        return FetchPlan(self.store, list(names), self.windows, self.pad_left, self.output, self.threads, self.taken)

    @property
    def plain(self) -> bool:
        """Whether these are whole rows, or windows of a number of steps alone, of which every field takes all."""
        return not self.taken and (self.windows is None or self.windows.plain)

    @functools.cached_property
    def native_windows(self) -> NativeWindows | None:
        """The windows as the native layer takes them beside their length."""
        return native_windows(self.windows, [self.taken.get(name) for name in self.names])

    @property
    def native_steps(self) -> NativeWindows | None:
        """The same for the shapes of a batch; None where its fields take all steps."""
        return self.native_windows if self.taken else None

    def raw_dtype(self, name: str) -> np.dtype[Any]:
        """The NumPy dtype that a field's bytes are shown as."""
        return self.store.column(name).dtype

    def row_bytes(self, name: str) -> int:
        """Bytes of a field in a batch of one row."""
        return int(np.prod(self.shape(name, 1))) * self.raw_dtype(name).itemsize

    def mask(
        self, anchors: NDArray[np.int32], starts: NDArray[np.int32], counts: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """The mask of a batch whose windows begin at `starts` and hold `counts` real steps."""
        steps = self.window or self.store.max_length
        first = np.zeros_like(counts)
        if self.windows is not None and self.windows.offsets is not None:
            first = self.windows.before - (anchors - starts)
        elif self.window and self.pad_left:
            first = steps - counts
        at = np.arange(steps)
        mask: NDArray[np.bool_] = (at >= first[:, None]) & (at < (first + counts)[:, None])
        return mask

    def empty(self, n: int) -> list[NDArray[Any]]:
        """Recycled memory for the fields of a batch of n rows, of raw dtypes."""
        return list(_native.empty_batch(self.store.native, n, self.numbers, self.window, self.native_steps))

    def shape(self, name: str, n: int) -> tuple[int, ...]:
        """The shape of a field's array in a batch of n rows."""
        spec, taken = self.store.fields[name], self.taken.get(name)
        if taken is None:
            return (n, *spec.block_shape(self.window or self.store.max_length))
        places, axis = taken
        return (n, len(places), *spec.shape) if axis else (n, *spec.shape)

    def fetch(
        self,
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        ends: NDArray[np.int32] | None,
        out: list[Any] | None = None,
        places: NDArray[np.uint32] | None = None,
    ) -> FetchedRows:
        """Copies rows with the GIL released, and reports torn ones.

        `ends` are the anchors of windows: their last steps, their first, or those that offsets count from. With
        `places` row i goes to place `places[i]` of the arrays in `out`.
        """
        return FetchedRows(
            *_native.fetch(
                self.store.native,
                rows,
                generations,
                self.numbers,
                self.window,
                self.pad_left,
                ends,
                self.threads,
                out,
                places,
                True,
                self.native_windows,
            )
        )

    def batch(
        self,
        raw: FetchedRows,
        keys: Keys,
        probability: NDArray[np.float64] | None = None,
        importance_weights: NDArray[np.float64] | None = None,
        step: int | None = None,
    ) -> Batch:
        """The batch that users see, over the same memory."""
        fields = {name: self.as_field(name, array) for name, array in zip(self.names, raw.arrays, strict=False)}
        metadata: list[Any] = [raw.mask, raw.starts, raw.lengths, raw.versions, probability, importance_weights]
        metadata = [None if array is None else self.as_output(array) for array in metadata]
        mask, start, length, version, probability, importance_weights = metadata
        return Batch(fields, keys, mask, start, length, version, probability, importance_weights, step)

    def check_out(self, out: Mapping[str, Any], n: int) -> list[Any]:
        """The caller's own arrays in field order, raw, once they have the batch's shapes and dtypes."""
        check_type("`out` has an array for each field by name", out, Mapping)
        if set(out) != set(self.names):
            raise ArgumentError(f"`out` needs exactly the fields {self.names}, found {list(out)}")
        outputs = []
        for name in self.names:
            array, shape = out[name], self.shape(name, n)
            dtype = DTYPES[self.store.fields[name].dtype]
            if not hasattr(array, "dtype") or not hasattr(array, "shape"):
                raise ArgumentError(f"out[{name!r}] is an array or a tensor, found {type(array).__name__}")
            found = str(array.dtype).removeprefix("torch.")
            if tuple(array.shape) != shape or found != dtype.name:
                raise ArgumentError(f"out[{name!r}] must be {dtype.name} {shape}, found {found} {tuple(array.shape)}")
            contiguous = array.is_contiguous() if hasattr(array, "is_contiguous") else array.flags.c_contiguous
            if not contiguous:
                raise ArgumentError(f"out[{name!r}] must be C-contiguous")
            if is_masked(array):
                raise ArgumentError(f"out[{name!r}] is a masked array, whose mask would hide rows: give its .data")
            if hasattr(array, "untyped_storage"):
                if array.is_conj() or array.is_neg():
                    raise ArgumentError(f"out[{name!r}] is no lazy conjugate or negative: give its resolve_neg()")
                if not has_memory(array):
                    raise ArgumentError(f"out[{name!r}] has no memory: its storage was freed or made smaller")
            if isinstance(array, np.ndarray) and not array.flags.writeable:
                raise ArgumentError(f"out[{name!r}] is read-only")
            if dtype.numpy_name is None:
                array = as_raw(array, dtype)
            outputs.append(array)
        return outputs


def plan_given(
    store: Store,
    fields: Sequence[str] | None,
    window: int | Windows | None,
    pad: Pad,
    output: As,
    threads: int | None,
) -> FetchPlan:
    """The plan of a fetch, whose arguments are checked here; a replay's are in the classes of its options."""
    return FetchPlan.make(store, fields, window, PAD("pad", pad), check_output("output", output), threads)


class FetchedRows(NamedTuple):
    """A fetched batch as the native layer hands it over: NumPy arrays of raw dtypes."""

    arrays: list[NDArray[Any]]
    torn: NDArray[np.uint8]
    mask: NDArray[np.bool_]
    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    versions: NDArray[np.int64]
    torn_count: int

    def take(self, index: NDArray[Any]) -> FetchedRows:
        """A copy of some rows."""
        return FetchedRows(
            [array[index] for array in self.arrays],
            self.torn[index],
            self.mask[index],
            self.starts[index],
            self.lengths[index],
            self.versions[index],
            int(np.count_nonzero(self.torn[index])),
        )

    def put_metadata(self, index: NDArray[Any], other: FetchedRows) -> None:
        """Overwrites the metadata of some rows, whose fields are in place already."""
        self.torn[index] = other.torn
        self.mask[index] = other.mask
        self.starts[index] = other.starts
        self.lengths[index] = other.lengths
        self.versions[index] = other.versions


def fetch_rows(
    plans: Sequence[FetchPlan],
    place: NDArray[Any] | None,
    keys: Keys,
    ends: NDArray[np.int32] | None,
    out: list[Any] | None,
) -> FetchedRows:
    """Rows of one store, or with `place` (n,) each from the store of that number, all to their places in one batch."""
    if place is None:
        return plans[0].fetch(keys.row, keys.generation, ends, out)
    n, arrays = len(keys), plans[0].empty(len(keys)) if out is None else out
    steps = plans[0].window or plans[0].store.max_length
    whole = FetchedRows(
        arrays,
        np.zeros(n, np.uint8),
        np.zeros((n, steps), np.bool_),
        np.zeros(n, np.int32),
        np.zeros(n, np.int32),
        np.zeros(n, np.int64),
        0,
    )
    for number, plan in enumerate(plans):
        mine = np.flatnonzero(place == number)
        if mine.size:
            part = plan.fetch(
                keys.row[mine],
                keys.generation[mine],
                None if ends is None else np.ascontiguousarray(ends[mine]),
                arrays,
                mine.astype(np.uint32),
            )
            whole.put_metadata(mine, part)
    return whole._replace(torn_count=int(np.count_nonzero(whole.torn)))


def check_same_schema(plans: Sequence[FetchPlan]) -> None:
    """Raises `ArgumentError` unless rows of all plans have the same fields, and so can stand in one batch."""
    first = plans[0]
    for plan in plans[1:]:
        if plan.schema() != first.schema():
            raise ArgumentError(
                f"the fields of a batch must be the same in all stores: {plan.schema()} in "
                f"{plan.store.name!r}, {first.schema()} in {first.store.name!r}"
            )
        if not plan.window and plan.store.max_length != first.store.max_length:
            raise ArgumentError(
                f"whole rows of one batch have one max_length: {plan.store.max_length} in {plan.store.name!r}, "
                f"{first.store.max_length} in {first.store.name!r}; use a window"
            )


__all__ = ["As", "BatchFields", "FetchPlan", "FetchedRows", "Pad", "check_same_schema", "fetch_rows", "plan_given"]
