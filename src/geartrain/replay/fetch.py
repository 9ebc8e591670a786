"""`geartrain.fetch`: copies the rows of given keys from a store into one batch.

The destination is one of three:

- recycled buffers or the caller's arrays (fetch_plan.py),
- the caller's tensors in device memory (device/fetch.py).

A fetch detects rows that were overwritten during the copy, and never returns them.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from geartrain.core.arguments import (
    at_most_one,
    check_array,
    check_choice,
    check_output,
    default_threads,
    leave_out,
)
from geartrain.core.dtypes import count_write
from geartrain.core.keys import Keys, check_keys
from geartrain.errors import ArgumentError, StaleKeyError, StoreClosedError
from geartrain.replay.batch import Batch
from geartrain.replay.device.options import Path
from geartrain.replay.fetch_plan import (
    As,
    FetchedRows,
    Pad,
    check_same_schema,
    fetch_rows,
    plan_given,
)
from geartrain.replay.fetchers import fetcher_of
from geartrain.replay.native_batch import fetched_batch
from geartrain.replay.packed_batch import fetch_packed
from geartrain.replay.windows import Windows, as_windows
from geartrain.store.store import Store

if TYPE_CHECKING:
    from geartrain.device.device import Device


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
    keys: Keys | ArrayLike,
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
    path: Path = "auto",
) -> Batch:
    """Reads rows by key, as one batch.

    Args:
        store: store of the rows. For keys of several stores, such as a mixture's, a list of them (`replay.stores`),
            whose fields must be alike. Also a store of another host (`actors.RemoteStore`) or of a job
            (`actors.JobStores`), without `starts`, `out`, `threads` and `Windows`.
        keys: keys of the rows; duplicates are fine. Also the numbers (n, 6) int64 of `Keys.as_array`.
        fields: names of the fields to read; all by default.
        window: steps of each row, or `geartrain.Windows`; whole rows by default.
        ends: (n,) last step of each window; by default the step that the key names, or the row's last. The window holds
            up to `window` steps, never a later one, and never one of another episode in rows of several. With
            `Windows(offsets=...)` the steps that offsets count from.
        starts: (n,) first step of each window, instead of `ends`. By default `Windows(anchor="first")` begins at the
            step that the key names, or the row's first; `Windows(at="episode")` where its episode begins.
        pad: side of the missing steps: "left" or "right". They are zero, and False in the batch's mask.
        output: "torch" tensors or "numpy" arrays.
        out: arrays or tensors to fill, one a field, C-contiguous, of the batch's shape and dtype; all in host memory,
            or all on one CUDA device. By default recycled memory. On a device the current stream fills them, and the
            batch's metadata is there too.
        threads: threads that copy; by default up to 4 of the cores this process may use.
        on_stale: "raise" if a key is stale, or "drop" its row from the batch.
        path: how rows reach `out` on a device: "gather", "copy", "staged" or "auto", as in `DeviceOptions`. "gather"
            and "copy" pin the segment until the store is closed.

    Returns:
        The batch, (n, ...) in the order of the keys. Rows of a store with axes or tasks are packed, whole, and may be
        under way; there `window`, `ends`, `starts`, `pad`, `out` and `path` are refused.

    Raises:
        StaleKeyError: rows were overwritten or removed since the keys were made, or during the copy.
        FieldError: the store has no such field, or the task that writes it is not done for some of the rows.
        ArgumentError: keys of another store, or an argument does not fit the store.
        StoreClosedError: the store was closed.
        PinError: path="gather" or "copy", and the segment cannot be pinned.

    Cost: one copy of the bytes that you ask for. Once the recycled buffers are warm, nothing is allocated. On a device
    the window crosses the link once and is copied once more within device memory. "gather" and "copy" wait for the
    device, because only then it is known whether a row was overwritten; "staged" does not.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> store = gt.Store.create({"x": gt.Field((), "int64")}, max_length=4, capacity=8)
        >>> keys = store.insert({"x": np.arange(8).reshape(2, 4)})
        >>> gt.fetch(store, keys[1], window=2, output="numpy")["x"].tolist()
        [[6, 7]]
        >>> store.close()
    """
    keys = given = check_keys(keys)
    check_choice("on_stale", on_stale, ("raise", "drop"))
    check_choice("path", path, get_args(Path))
    if isinstance(store, ServedRows):
        here = out is not None or threads is not None or path != "auto"
        if here or starts is not None or isinstance(window, Windows):
            raise ArgumentError(f"{store!r} supports only fields, window (a number), ends, pad, output and on_stale")
        return store.fetch(keys, fields=fields, window=window, ends=ends, pad=pad, output=output, on_stale=on_stale)
    if isinstance(store, Store) and store.plan is not None:
        why = f"the store {store.name!r} has axes, strings or tasks: its rows are read whole into memory of their own"
        placed = {"window": window, "ends": ends, "starts": starts, "pad": pad != "left" and pad}
        leave_out(why, **placed, out=out, path=path != "auto" and path)
        keys.check_store(store.id, store.name)
        reader_of = functools.partial(store.packed_reader, threads=default_threads(threads))
        return fetch_packed(reader_of, store.plan, keys, fields, check_output("output", output), on_stale)
    if isinstance(store, Store) and out is None and ends is None and starts is None and path == "auto":
        found = _fetch_plainly(store, keys, fields, window, pad, output, threads)
        if found is not None:
            return found
    stores = [store] if isinstance(store, Store) else list(store) if isinstance(store, Sequence) else []
    if not stores or not all(isinstance(each, Store) for each in stores):
        raise ArgumentError(f"rows are fetched from a Store, or from several, found {store!r}")
    for each in stores:
        if each.closed:
            raise StoreClosedError(f"the store {each.name!r} was closed")
    windows = _told_windows(window, ends, starts)
    plans = [plan_given(each, fields, windows, pad, output, threads) for each in stores]
    told = ends if starts is None else starts
    if told is None and windows is not None and windows.at in ("any", "episode"):
        told = keys.step
    steps = None if told is None else _checked_ends(len(keys), told, "ends" if starts is None else "starts")
    outputs = None if out is None else plans[0].check_out(out, len(keys))
    device = None if out is None else _device_of(out, output)
    if out is not None:
        count_write(out.values())
    if device is None:
        leave_out("no out= on a device that rows would have a path to", path=path != "auto" and path)
    if len(stores) > 1:
        check_same_schema(plans)
        plans = [plan.of_fields(plans[0].names) for plan in plans]  # stores may have them in another order
        place = keys.places_among(np.array([plan.store.id for plan in plans], np.uint64))
        _check_longest(steps, np.array([plan.store.max_length for plan in plans])[place], windows)
    else:
        place = None
        keys.check_store(stores[0].id, stores[0].name)
        _check_longest(steps, stores[0].max_length, windows)

    def check(raw: FetchedRows) -> None:
        if steps is not None:
            _check_reach(raw, steps, windows)
        if windows is not None and windows.whole:
            _check_whole(raw, windows)
        if raw.torn_count and on_stale == "raise":
            raise StaleKeyError(
                f"{raw.torn_count} of {len(given)} keys are stale: their rows were overwritten or removed "
                f"(first: row {given.row[np.flatnonzero(raw.torn)[0]]})"
            )
        if raw.torn_count and out is not None:
            raise StaleKeyError("rows cannot be dropped from the caller's own arrays; use on_stale='raise'")

    if out is not None and outputs is not None and device is not None:
        from geartrain.replay.device.fetch import fetch_to_device

        mask, start, length, version = fetch_to_device(device, plans, place, keys, steps, outputs, path, check)
        return Batch(dict(out), keys, mask, start, length, version)
    raw = fetch_rows(plans, place, keys, steps, outputs)
    check(raw)
    if raw.torn_count:
        kept = np.flatnonzero(raw.torn == 0)
        raw = raw.take(kept)
        keys = keys[kept]
    if out is not None:
        raw = raw._replace(arrays=[])
        batch = plans[0].batch(raw, keys)
        return Batch(dict(out), batch.keys, batch.mask, batch.start, batch.length, batch.version)
    return plans[0].batch(raw, keys)


def _fetch_plainly(
    store: Store,
    keys: Keys,
    fields: Sequence[str] | None,
    window: int | Windows | None,
    pad: Pad,
    output: As,
    threads: int | None,
) -> Batch | None:
    """Whole rows, or windows up to their last steps, in one native call; None where that is not all there is to it."""
    if store.closed or not len(keys) or isinstance(window, Windows) or (window is not None and keys.step is not None):
        return None
    if fields is not None and not isinstance(fields, (list, tuple)):
        return None
    fetcher = fetcher_of(store, fields, window, pad, output, threads)
    keys.check_store(store.id, store.name)
    rows, torn = fetcher.native.fetch(keys.row, keys.generation)
    return None if torn else fetched_batch(rows, fetcher.fields, keys)


def _device_of(out: Mapping[str, Any], output: As) -> Device | None:
    """The device that all of the caller's tensors are on; None for host memory.

    Raises:
        ArgumentError: they are not all in one memory, or on a device that rows cannot get to.
    """
    found = {str(array.device) if _on_device(array) else "host memory": name for name, array in out.items()}
    if len(found) > 1:
        told = ", ".join(f"out[{name!r}] in {where}" for where, name in found.items())
        raise ArgumentError(f"a batch is in host memory or on one device, found {told}")
    (where,) = found
    if where == "host memory":
        return None
    if output != "torch":
        raise ArgumentError(f"`out` is on {where}, where output={output!r} has no arrays: use output='torch'")
    return _opened(where)


@functools.cache
def _opened(device: str) -> Device:
    # One object a device: targets are kept by it.
    from geartrain.device.device import open_device

    return open_device(device)


def _on_device(array: Any) -> bool:
    return hasattr(array, "is_cpu") and not array.is_cpu


def _told_windows(window: int | Windows | None, ends: ArrayLike | None, starts: ArrayLike | None) -> Windows | None:
    """The windows of a fetch, once `ends` or `starts` go with them."""
    given = "`ends`" if ends is not None else "`starts`"
    at_most_one(ends=ends, starts=starts)
    if window is None:
        leave_out("without window= there is none to place", ends=ends, starts=starts)
        return None
    if not isinstance(window, Windows):
        windows = as_windows(window)
        return windows if starts is None or windows is None else Windows(windows.length, anchor="first")
    leave_out("a fetch draws no windows", at=window.function, stride=window.stride != 1 and window.stride)
    if window.offsets is not None:
        leave_out("offsets count from `ends`, or from the step of a key", at=window.at != "any" and window.at)
    if ends is None and starts is None:
        return window
    if window.at != "any" or window.from_first != (starts is not None):
        raise ArgumentError(f"{given} does not go with {window}")
    return window


def _checked_ends(n: int, ends: ArrayLike, what: str) -> NDArray[np.int32]:
    array = check_array(f"`{what}` must be {n} whole numbers", np.asarray(ends), (n,), "iu")
    return np.clip(array.astype(np.float64), -1, 2**31 - 1).astype(np.int32)  # what is cut here no row has


def _verb(windows: Windows | None) -> str:
    if windows is not None and windows.offsets is not None:
        return "has its offsets"
    return "begins" if windows is not None and windows.from_first else "ends"


def _check_longest(
    ends: NDArray[np.int32] | None, max_length: int | NDArray[np.int64], windows: Windows | None
) -> None:
    """Raises `ArgumentError` if an anchor of the windows is beyond the longest rows of its store."""
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
