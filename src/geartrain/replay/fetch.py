"""Fetch: rows of a store copied into one batch, by key.

Rows are gathered by native threads with the GIL released, all fields and windows at once, straight from shared
memory into warm, recycled buffers or into the caller's own (native/fetch/fetch.h; GEAR, section 3.4). A row that was
overwritten during its copy is noticed and never returned.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

import geartrain._native as _native
from geartrain.core.arguments import default_threads
from geartrain.core.dtypes import DTYPES, as_raw, as_tensor, from_dlpack, is_exchanged, numpy_dtype, torch_dtype
from geartrain.core.extras import require_torch
from geartrain.core.keys import Keys, check_keys
from geartrain.errors import ArgumentError, StaleKeyError, StoreClosedError
from geartrain.replay.batch import Batch
from geartrain.replay.windows import Windows, as_windows
from geartrain.store.store import Store

Pad = Literal["left", "right"]
As = Literal["torch", "numpy"]


class ServedRows(ABC):
    """Rows that `fetch` has from elsewhere by their keys: stores of other processes and hosts."""

    @abstractmethod
    def fetch(
        self,
        keys: Keys,
        *,
        fields: Sequence[str] | None = None,
        window: int | None = None,
        ends: ArrayLike | None = None,
        pad: Pad = "left",
        output: As = "torch",
        on_stale: Literal["raise", "drop"] = "raise",
    ) -> Batch:
        """As `geartrain.fetch`."""


def fetch(
    store: Store | Sequence[Store] | ServedRows,
    keys: Keys,
    *,
    fields: Sequence[str] | None = None,
    window: int | Windows | None = None,
    ends: ArrayLike | None = None,
    starts: ArrayLike | None = None,
    pad: Pad = "left",
    output: As = "torch",
    out: Mapping[str, Any] | None = None,
    threads: int | None = None,
    on_stale: Literal["raise", "drop"] = "raise",
) -> Batch:
    """The rows behind the keys, as one batch.

    Args:
        store: where the rows are; for keys of several stores, such as those of a mixture, all of these stores
            (`replay.stores`), whose fields must be alike. Also a store of another host (`actors.RemoteStore`), or
            stores of this and others (`actors.JobStores`): then without `starts`, `out`, `threads` and `Windows`.
        keys: which rows; duplicates are fine.
        fields: names of the fields wanted; all by default.
        window: steps per row, or `geartrain.Windows`; whole rows by default.
        ends: (n,) last step of each window; by default the step that its key names, or else the row's last one.
            A window holds the `window` steps up to and including that step, fewer at the start of the row, and nothing
            later; of a row of several episodes (`recorder(share_rows=True)`) no step of another one than that step's.
        starts: (n,) first step of each window, instead: it holds the `window` steps from there on, fewer at the end of
            the row. `Windows(anchor="first")` begins where keys say, or else at the row's first step;
            `Windows(at="episode")` where the episode of that step does.
        pad: where missing steps go: "left" (before the real ones) or "right". They are zero, and False in
            the batch's mask.
        output: "torch" tensors or "numpy" arrays. Both support DLPack.
        out: arrays or tensors to fill instead of recycled memory, one per field, C-contiguous, of the
            batch's shape and dtype.
        threads: threads that copy; up to 4 of the process's cores by default.
        on_stale: "raise" when a key is stale, or "drop" its row from the batch.

    Raises:
        StaleKeyError: rows were overwritten or removed since the keys were made, or while they were copied.
        FieldError, ArgumentError: what was asked for is not there, or does not fit; keys of another store.

    Cost: one copy of the bytes wanted; nothing is allocated once the recycled buffers are warm.
    """
    check_keys(keys)
    if not isinstance(on_stale, str) or on_stale not in ("raise", "drop"):
        raise ArgumentError(f"on_stale is 'raise' or 'drop', found {on_stale!r}")
    if isinstance(store, ServedRows):
        if out is not None or threads is not None or starts is not None or isinstance(window, Windows):
            raise ArgumentError(f"{store!r} serves rows of fields, window (a number), ends, pad, output and on_stale")
        return store.fetch(keys, fields=fields, window=window, ends=ends, pad=pad, output=output, on_stale=on_stale)
    stores = [store] if isinstance(store, Store) else list(store) if isinstance(store, Sequence) else []
    if not stores or not all(isinstance(each, Store) for each in stores):
        raise ArgumentError(f"rows are fetched from a Store, or from several, found {store!r}")
    for each in stores:
        if each.closed:
            raise StoreClosedError(f"the store {each.name!r} was closed")
    windows = _told_windows(window, ends, starts)
    plans = [FetchPlan.make(each, fields, windows, pad, output, threads) for each in stores]
    plan = plans[0]
    told = ends if starts is None else starts
    if told is None and windows is not None and windows.at in ("any", "episode"):
        told = keys.step
    steps = None if told is None else _checked_ends(len(keys), told, "ends" if starts is None else "starts")
    outputs = None if out is None else plan.check_out(out, len(keys))
    if len(stores) == 1:
        keys.check_store(plan.store.id, plan.store.name)
        _check_longest(steps, plan.store.max_length, windows)
        raw = plan.fetch(keys.row, keys.generation, steps, outputs)
    else:
        raw = _fetch_from_several(plans, keys, steps, outputs)
    if steps is not None:
        _check_reach(raw, steps, windows)
    if windows is not None and windows.whole:
        _check_whole(raw, windows)
    if raw.torn_count:
        if on_stale == "raise":
            raise StaleKeyError(
                f"{raw.torn_count} of {len(keys)} keys are stale: their rows were overwritten or removed "
                f"(first: row {keys.row[np.flatnonzero(raw.torn)[0]]})"
            )
        if out is not None:
            raise StaleKeyError("rows cannot be dropped from the caller's own arrays; use on_stale='raise'")
        kept = np.flatnonzero(raw.torn == 0)
        raw = raw.take(kept)
        keys = keys[kept]
    if out is not None:
        raw = raw._replace(arrays=[])
        batch = plan.batch(raw, keys)
        return Batch(dict(out), batch.keys, batch.mask, batch.start, batch.length, batch.version)
    return plan.batch(raw, keys)


def _fetch_from_several(
    plans: Sequence[FetchPlan], keys: Keys, ends: NDArray[np.int32] | None, out: list[Any] | None
) -> FetchedRows:
    """Each row from its own store, to its place in one batch."""
    check_same_schema(plans)
    plans = [plan.of_fields(plans[0].names) for plan in plans]  # stores may have them in another order
    place = keys.places_among(np.array([plan.store.id for plan in plans], np.uint64))
    _check_longest(ends, np.array([plan.store.max_length for plan in plans])[place], plans[0].windows)
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


def check_names_of(what: str, names: object) -> None:
    """Raises `ArgumentError` unless these are names of fields, several of them."""
    if isinstance(names, str):
        raise ArgumentError(f"`{what}` is a list of names, found the single string {names!r}")
    if not isinstance(names, Sequence) or isinstance(names, bytes):
        raise ArgumentError(f"`{what}` is a list of names, found {names!r}")
    for name in names:
        if not isinstance(name, str):
            raise ArgumentError(f"`{what}` is a list of names, found {name!r} in it")


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

    @staticmethod
    def of_batch(rows: _native.SampledBatch, arrays: list[NDArray[Any]]) -> FetchedRows:
        """The rows of a batch that was sampled into `arrays`."""
        return FetchedRows(arrays, rows.torn(), rows.mask(), rows.start(), rows.length(), rows.version(), 0)


class FetchPlan:
    """What to fetch, checked once and used for every batch."""

    def __init__(
        self,
        store: Store,
        names: list[str],
        windows: Windows | None,
        pad_left: bool,
        output: As,
        threads: int,
    ) -> None:
        window = 0 if windows is None else windows.length
        self.store = store
        self.names = names
        self.places = {name: place for place, name in enumerate(names)}
        self.numbers = [store.field_number(name) for name in names]
        self.per_step = store.per_step and window != 0  # whole rows were placed by no step
        self.windows = windows
        self.window = window  # its length; 0 for whole rows
        self.pad_left = pad_left
        self.output = output
        self.threads = threads

    @functools.cached_property
    def from_dlpack(self) -> Callable[[Any], Any] | None:
        """What makes a tensor of a DLPack capsule; None where arrays are wanted."""
        return from_dlpack() if self.output == "torch" else None

    @functools.cached_property
    def exchanged(self) -> Mapping[str, int]:
        """Places of the fields that are exchanged as what they are."""
        fields = self.store.fields
        return {name: place for name, place in self.places.items() if is_exchanged(DTYPES[fields[name].dtype])}

    @staticmethod
    def make(
        store: Store,
        fields: Sequence[str] | None,
        window: int | Windows | None,
        pad: Pad,
        output: As,
        threads: int | None,
    ) -> FetchPlan:
        """A plan, once everything asked for makes sense; raises `FieldError` or `ArgumentError` otherwise."""
        schema = store.fields
        if fields is not None:
            check_names_of("fields", fields)
        names = list(schema) if fields is None else list(fields)
        if not names or len(set(names)) != len(names):
            raise ArgumentError(f"name each field once, and at least one; found {names}")
        for name in names:
            store.field_number(name)
        windows = as_windows(window)
        if not isinstance(pad, str) or pad not in ("left", "right"):
            raise ArgumentError(f"pad is 'left' or 'right', found {pad!r}")
        if not isinstance(output, str) or output not in ("torch", "numpy"):
            raise ArgumentError(f"output is 'torch' or 'numpy', found {output!r}")
        if output == "torch":
            require_torch("a batch of tensors", "; output='numpy' makes arrays")
        for name in names:
            (torch_dtype if output == "torch" else numpy_dtype)(DTYPES[schema[name].dtype])
        return FetchPlan(store, names, windows, pad == "left", output, default_threads(threads))

    def schema(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each field of a batch of one row."""
        return {name: (self.shape(name, 1), self.store.fields[name].dtype) for name in self.names}

    def of_fields(self, names: Sequence[str]) -> FetchPlan:
        """The same plan for some of its fields, or none."""
        return FetchPlan(self.store, list(names), self.windows, self.pad_left, self.output, self.threads)

    def raw_dtype(self, name: str) -> np.dtype[Any]:
        """The NumPy dtype that a field's bytes are shown as."""
        return self.store.column(name).dtype

    def row_bytes(self, name: str) -> int:
        """Bytes of a field in a batch of one row."""
        return int(np.prod(self.shape(name, 1))) * self.raw_dtype(name).itemsize

    def mask(self, starts: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.bool_]:
        """The mask of a batch whose windows hold `counts` real steps."""
        steps = self.window or self.store.max_length
        first = (steps - counts if self.window and self.pad_left else np.zeros_like(counts))[:, None]
        at = np.arange(steps)
        mask: NDArray[np.bool_] = (at >= first) & (at < first + counts[:, None])
        return mask

    def anchors(self, starts: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.uint32]:
        """The steps that windows from `starts` on are told by, which hold `counts` real ones."""
        from_first = self.windows is not None and self.windows.from_first
        return (starts if from_first else starts + np.maximum(counts - 1, 0)).astype(np.uint32)

    def as_output(self, array: NDArray[Any]) -> Any:
        """An array as users get it: a tensor, or itself."""
        if self.output == "torch":
            import torch

            return torch.from_numpy(array)
        return array

    def as_field(self, name: str, array: NDArray[Any]) -> Any:
        """A field's array as users get it: of its own dtype, a tensor or an array."""
        dtype = DTYPES[self.store.fields[name].dtype]
        if self.output == "torch":
            return as_tensor(array, dtype)
        shown = numpy_dtype(dtype)
        return array if array.dtype == shown else array.view(shown)

    def empty(self, n: int) -> list[NDArray[Any]]:
        """Recycled memory for the fields of a batch of n rows, of raw dtypes."""
        return list(_native.empty_batch(self.store.native, n, self.numbers, self.window))

    def shape(self, name: str, n: int) -> tuple[int, ...]:
        """The shape of a field's array in a batch of n rows."""
        spec = self.store.fields[name]
        return (n, *spec.block_shape(self.window or self.store.max_length))

    def fetch(
        self,
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        ends: NDArray[np.int32] | None,
        out: list[Any] | None = None,
        places: NDArray[np.uint32] | None = None,
    ) -> FetchedRows:
        """Copies, and reports torn rows; the GIL is released meanwhile.

        `ends` are the steps that windows are told by: their last ones, or their first. With `places` row i goes to
        place `places[i]` of the arrays in `out`.
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
                self.windows is not None and self.windows.from_first,
                True,
                self.windows is not None and self.windows.at == "episode",
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
        if not isinstance(out, Mapping):
            raise ArgumentError(f"`out` has an array for each field by name, found {type(out).__name__}")
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
            if isinstance(array, np.ndarray) and not array.flags.writeable:
                raise ArgumentError(f"out[{name!r}] is read-only")
            if hasattr(array, "is_cpu") and not array.is_cpu:
                raise ArgumentError(f"out[{name!r}] is on {array.device}; rows are gathered into host memory")
            if dtype.numpy_name is None:
                array = as_raw(array, dtype)
            outputs.append(array)
        return outputs


def _told_windows(window: int | Windows | None, ends: ArrayLike | None, starts: ArrayLike | None) -> Windows | None:
    """The windows of a fetch, once `ends` or `starts` go with them."""
    given = "`ends`" if ends is not None else "`starts`"
    if ends is not None and starts is not None:
        raise ArgumentError("a window is told by its last step or by its first: give `ends` or `starts`")
    if window is None:
        if ends is not None or starts is not None:
            raise ArgumentError(f"{given} only means something with a window")
        return None
    if not isinstance(window, Windows):
        windows = as_windows(window)
        return windows if starts is None or windows is None else Windows(windows.length, anchor="first")
    if window.function is not None or window.stride != 1:
        raise ArgumentError("no windows are drawn by a fetch: leave out stride, and a function as at=")
    if ends is None and starts is None:
        return window
    if window.at != "any" or window.from_first != (starts is not None):
        raise ArgumentError(f"{given} does not go with {window}")
    return window


def _checked_ends(n: int, ends: ArrayLike, what: str) -> NDArray[np.int32]:
    array = np.asarray(ends)
    if array.shape != (n,) or array.dtype.kind not in "iu":
        raise ArgumentError(f"`{what}` must be {n} whole numbers, found {array.dtype} {array.shape}")
    return np.clip(array.astype(np.float64), -1, 2**31 - 1).astype(np.int32)  # what is cut here no row has


def _verb(windows: Windows | None) -> str:
    return "begins" if windows is not None and windows.from_first else "ends"


def _check_longest(
    ends: NDArray[np.int32] | None, max_length: int | NDArray[np.int64], windows: Windows | None
) -> None:
    """Raises `ArgumentError` unless the windows are told by steps that rows of their stores can have."""
    if ends is None:
        return
    bad = np.flatnonzero((ends < 0) | (ends >= max_length))
    if bad.size:
        last = int(np.broadcast_to(max_length, ends.shape)[bad[0]]) - 1
        raise ArgumentError(f"window {bad[0]} {_verb(windows)} at step {ends[bad[0]]}, rows have steps 0 to {last}")


def _check_reach(raw: FetchedRows, ends: NDArray[np.int32], windows: Windows | None) -> None:
    # Only now is it known how long the rows behind the keys were: a stale key's row has another length.
    bad = np.flatnonzero((ends >= raw.lengths) & (raw.torn == 0))
    if bad.size:
        raise ArgumentError(
            f"window {bad[0]} {_verb(windows)} at step {ends[bad[0]]}, its row has steps 0 to {raw.lengths[bad[0]] - 1}"
        )


def _check_whole(raw: FetchedRows, windows: Windows) -> None:
    bad = np.flatnonzero((raw.mask.sum(1) < windows.length) & (raw.torn == 0))
    if bad.size:
        raise ArgumentError(
            f"window {bad[0]} has {int(raw.mask[bad[0]].sum())} of the {windows.length} steps of a whole one; its row "
            f"has {raw.lengths[bad[0]]}"
        )
