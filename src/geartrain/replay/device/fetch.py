"""`geartrain.fetch(out=)` into device memory: copies rows by key into the caller's tensors, on the caller's stream.

A fetch builds a batch of the given keys in an arena (transfer.py), and copies its fields from there to the tensors.

    gather   the host waits for the flags that mark torn rows
    copy     the host waits for the copies, and then checks for torn rows
    staged   torn rows are known before anything is sent; the host does not wait

Each kind of batch needs a `DeviceTarget` of the store. The store's handle keeps these targets until it is closed,
because pinning a segment takes longer than most fetches. One fetch at a time uses a target, so several threads may
fetch at once.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.keys import Keys
from geartrain.device.device import Device
from geartrain.device.pinned_memory import Pin
from geartrain.errors import ArgumentError, StoreClosedError
from geartrain.replay.device.copied_rows import CopyTransfer
from geartrain.replay.device.options import DeviceOptions, Path
from geartrain.replay.device.staging import StagedTransfer
from geartrain.replay.device.target import DeviceTarget
from geartrain.replay.device.transfer import GatherTransfer, Transfer
from geartrain.replay.fetch_plan import FetchedRows, FetchPlan
from geartrain.store.store import Store

if TYPE_CHECKING:
    import torch

# Targets that a store keeps while no fetch uses them: kinds of batches times threads that fetch at once.
MOST_KEPT = 8


def fetch_to_device(
    device: Device,
    plans: Sequence[FetchPlan],
    place: NDArray[Any] | None,
    keys: Keys,
    ends: NDArray[np.int32] | None,
    out: Sequence[torch.Tensor],
    path: Path,
    check: Callable[[FetchedRows], None],
) -> list[torch.Tensor]:
    """Fills `out` on the device's current stream; returns mask, starts, lengths and versions, on the device too.

    Args:
        device: that all of `out` is on.
        plans: of each store, with the same fields in the same order.
        place: (n,) the number of each key's plan; None where there is one plan.
        keys, ends: which rows, and the steps that their windows are told by.
        out: contiguous tensors of the batch's shapes and dtypes, in the plans' order.
        path: as `DeviceOptions` has it.
        check: called with what is known of the rows, before they are sent or after; raises what is to be raised.

    Raises:
        PinError: path="gather" or "copy", and a segment cannot be pinned.
        ArgumentError: path="gather" or "copy", and windows that the CPU places; a row beyond its store's capacity.
    """
    taken: list[tuple[FetchTargets, DeviceTarget]] = []
    complete = False
    try:
        for plan in plans:
            kept = _kept_with(plan.store)
            taken.append((kept, kept.take(plan, device, path)))
        targets = [target for _, target in taken]
        transfer = _transfer(targets, len(keys))
        check(_copied(transfer, place, keys, ends))
        about = transfer.hand_over(out)
        complete = True
        return about
    finally:
        for kept, target in taken:
            kept.give(target, complete)


def _transfer(targets: Sequence[DeviceTarget], n: int) -> Transfer:
    """A batch of n rows; where one store's are staged, all are."""
    paths = {target.path for target in targets} if n else {"staged"}
    if "staged" in paths:
        return StagedTransfer(targets, n)
    return CopyTransfer(targets, n) if "copy" in paths else GatherTransfer(targets, n)


def _copied(transfer: Transfer, place: NDArray[Any] | None, keys: Keys, ends: NDArray[np.int32] | None) -> FetchedRows:
    """Metadata of the rows behind keys, without their fields, once the rows are in the transfer's memory."""
    n, launched = len(keys), []
    for number, target in enumerate(transfer.targets):
        mine = np.arange(n) if place is None else np.flatnonzero(place == number)
        if not mine.size and place is not None:
            continue
        rows, generations = keys.row[mine], keys.generation[mine]
        _check_rows(rows, target.plan.store.capacity)
        told = None if ends is None else np.ascontiguousarray(ends[mine])
        places = None if place is None else mine.astype(np.uint32)
        launched.append((mine, transfer.launch(number, rows, generations, told, places)))
    torn, versions = np.zeros(n, np.uint8), np.zeros(n, np.int64)
    starts, lengths = np.zeros(n, np.int32), np.zeros(n, np.int32)
    for mine, launch in launched:
        torn[mine], lengths[mine], starts[mine], _, versions[mine] = transfer.resolve(launch)
    return FetchedRows([], torn, transfer.known_mask(), starts, lengths, versions, int(np.count_nonzero(torn)))


def _check_rows(rows: NDArray[np.uint32], capacity: int) -> None:
    """As native/fetch/fetch.cc does: the kernel would read beyond the segment."""
    bad = rows[rows >= capacity]
    if bad.size:
        raise ArgumentError(f"row {bad[0]} is beyond the store's capacity of {capacity}")


# --- what is kept with a store -------------------------------------------------------------------------------------


class FetchTargets:
    """The targets of fetches from one store, kept from one to the next; closed with the store's handle."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may fetch in between
        self._kept: deque[tuple[Hashable, DeviceTarget]] = deque()  # the one that was used last stands last
        self._kinds: dict[int, Hashable] = {}  # of the targets in use
        self._pins: dict[int, Pin] = {}
        self._closed = False
        self.pid = os.getpid()
        # A handle that is dropped without being closed unpins its segment; no fetch is using it.
        weakref.finalize(self, _release, self._pins, self.pid).atexit = False

    def take(self, plan: FetchPlan, device: Device, path: Path) -> DeviceTarget:
        """A target for this kind of batch, on the device's current stream, until it is given back.

        Raises:
            StoreClosedError: the handle was closed meanwhile.
            PinError, ArgumentError: as `DeviceTarget`.
        """
        kind = (device, tuple(plan.names), plan.windows, plan.pad_left, path)
        with self._lock:
            if self._closed:
                raise StoreClosedError(f"the store {plan.store.name!r} was closed")
            target = next((kept for known, kept in reversed(self._kept) if known == kind), None)
            if target is not None:
                self._kept.remove((kind, target))
        stream = device.current_stream()
        if target is None:
            target = DeviceTarget(device, stream, plan, DeviceOptions(device, path=path))
        target.stream = stream
        with self._lock:
            self._kinds[id(target)] = kind
            if target.pin is not None:
                self._pins[id(target)] = target.pin
        return target

    def give(self, target: DeviceTarget, complete: bool) -> None:
        """Back; closed where its fetch is not `complete`, as the device may still be reading the segment."""
        closed: list[DeviceTarget] = []
        with self._lock:
            kind = self._kinds.pop(id(target))
            if complete and not self._closed:
                self._kept.append((kind, target))
                if len(self._kept) > MOST_KEPT:
                    closed.append(self._kept.popleft()[1])
            else:
                closed.append(target)
        self._end(closed)

    def close(self) -> None:
        """Unpins. A fetch that still uses a target closes it itself."""
        with self._lock:
            self._closed = True
            kept = [target for _, target in self._kept]
            self._kept.clear()
        if os.getpid() == self.pid:  # a forked child has neither the device nor the registrations
            self._end(kept)

    def _end(self, targets: Sequence[DeviceTarget]) -> None:
        for target in targets:
            target.close()
            self._pins.pop(id(target), None)


def _kept_with(store: Store) -> FetchTargets:
    kept = store.kept.get(FetchTargets)
    if kept is not None and kept.pid != os.getpid():  # forked: they are the parent's
        del store.kept[FetchTargets]
        kept = None
    found: FetchTargets = store.kept.setdefault(FetchTargets, FetchTargets()) if kept is None else kept
    return found


def _release(pins: dict[int, Pin], pid: int) -> None:
    if os.getpid() == pid:
        for pin in pins.values():
            pin.release()


__all__ = ["FetchTargets", "fetch_to_device"]
