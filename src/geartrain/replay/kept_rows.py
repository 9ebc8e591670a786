"""Rows that a replay's batches keep in the store until they are told to be saved: `ReplayOptions(keep="saved")`.

A drawn row is not freed. It is marked with the step of its batch and its place there. The mark is in the segment, so it
survives every process. A replay that comes to a step whose rows are marked draws these rows again, in their places.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

import geartrain.core.locks as locks
from geartrain.core.arguments import check_whole, leave_out
from geartrain.core.keys import Keys
from geartrain.core.lifetime import living
from geartrain.errors import ArgumentError, ReplayError, StoreClosedError
from geartrain.selection.mixture import Selection, strategies_of
from geartrain.selection.strategy import traits_of
from geartrain.store.store import Store

#: Rows of a batch, as a mark has room for their places (native/segment/segment.h, TakenWord).
MAX_PLACES = 2**22
#: The lock on the segment of who keeps rows, and how long one that ends may still have it.
_KEEPER = 0
_ENDS_S = 5.0


class KeptRows:
    """The marked rows of one store.

    Args:
        store: a store with tasks.

    Attributes:
        of_ranks: whether ranks agree before rows are freed: then `saved` is only noted.
        told: the last step that `saved` was told; -1 for none.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._warned = False
        self._freed = -1
        self.of_ranks = False
        self.told = -1
        self._lock: Callable[[], object] | None = None

    def hold(self) -> None:
        """No other replay, of whichever process, keeps rows of the store until this one is closed or dropped.

        Raises:
            ReplayError: another one does. Both would draw the same steps, and train on the same rows.
        """
        fd = os.open(self._store.path, os.O_RDWR | os.O_CLOEXEC)
        if not locks.take(fd, locks.EXCLUSIVE, _KEEPER, _ENDS_S):
            os.close(fd)
            raise ReplayError(
                f"another replay keeps rows of the store {self._store.name!r}, and this one would train on the same "
                f"rows: close that one first, or pass group= where they are ranks of one job"
            )
        self._lock = weakref.finalize(self, os.close, fd)
        _keepers.add(self)

    def close(self) -> None:
        """Another replay may keep rows from here on."""
        if self._lock is not None:
            self._lock()

    def marked(self, step: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
        """Rows, generations and places, in the order of places, of what the batch of a step has drawn here."""
        return self._store.native.taken(step)

    def of_step(self, step: int, n: int) -> tuple[Keys | None, int]:
        """Keys (n,) of the rows that the batch of a step has drawn, in their places; None if it is to be drawn.

        A batch without all of its rows is given up: a process died while it was drawn, or a row was deleted. Its rows
        can be drawn again. The second value is the number of these rows.
        """
        rows, generations, places = self.marked(step)
        if len(rows) == n and np.array_equal(places, np.arange(n)):
            return Keys.of_rows(rows, generations, self._store.id), 0
        if len(rows) == 0:
            self.warn_of_gone(step)
        return None, self.give_up(step) if len(rows) else 0

    def give_up(self, step: int) -> int:
        """Has the rows of a step drawn anew. Returns how many they were."""
        with contextlib.suppress(StoreClosedError):
            return self._store.native.untake(step)
        return 0

    def saved(self, step: int) -> None:
        """Takes note that a step is saved on this rank; frees its rows and those before, unless ranks agree first."""
        self.told = max(self.told, step)
        if not self.of_ranks:
            self.free(step)

    def free(self, step: int) -> None:
        """Frees the rows of all steps up to this one."""
        if step > self._freed or not self.of_ranks:
            self._store.native.free_taken(step)
            self._freed = step

    def alone_stop(self, rows: int = 2**63) -> bool:
        """Whether so many rows, or any more than there are, can be drawn only after kept ones are freed."""
        return self._store.native.kept_alone_stop(rows)

    def describe(self) -> str:
        """Which steps keep how many rows, and what frees them, for error messages; nothing if none are kept."""
        steps = self._store.native.taken_steps()
        if not steps:
            return ""
        before = self._store.native.saved_before()
        told = f"saved was last told step {before - 1}" if before else "saved was not called yet"
        rows, spans = (sum(each[i] for each in steps) for i in (1, 2))
        which = f"{len(steps)} step{'s hold' if len(steps) > 1 else ' holds'}"
        of = f"{rows:,} of {self._store.capacity:,} rows and {spans:,} of {self._store.stats()['span_bytes']:,} bytes"
        return (
            f"{told}; {which} {of} of spans: call replay.saved(step) after each checkpoint, save more often, or "
            "create the store with a larger capacity= or span_bytes="
        )

    def warn_of_lost(self, step: int, lost: int, n: int) -> None:
        """Logs that a batch is drawn anew which not all shards have rows of."""
        import logging

        logging.getLogger(__name__).warning(
            "the replay of %r draws step %d anew: %d of its %d rows are missing, because a process died while it was "
            "drawn, a row was deleted, or the shard of a host is lost",
            self._store.name,
            step,
            lost,
            n,
        )

    def warn_of_another_store(self, step: int) -> None:
        """Logs that a state was loaded without the store that it is of: no replay ever kept a row here."""
        if step == 0 or self._store.native.saved_before() or self._store.native.taken_steps():
            return
        import logging

        logging.getLogger(__name__).warning(
            "the state of step %d was loaded, and no replay has kept a row of the store %r yet: it is a new one, so "
            "that rows which were drawn before may be inserted and drawn again. Load the store from the same "
            "checkpoint with load_checkpoint, or join the one that is left with Store.open(..., adopt=True)",
            step,
            self._store.name,
        )

    def warn_of_gone(self, step: int) -> None:
        """Logs once that a step is drawn anew whose rows were freed."""
        saved = self._store.native.saved_before() - 1
        if step > saved or self._warned:
            return
        self._warned = True
        import logging

        logging.getLogger(__name__).warning(
            "the replay of %r draws step %d anew: step %d was told to be saved, so that the rows of the steps before "
            "it are gone. Load the state of the last checkpoint",
            self._store.name,
            step,
            saved,
        )


_keepers = living(after_fork=KeptRows.close)  # the lock is the parent's, and ends with it


def check_keep(keep: str | None, stores: Sequence[Store], selection: Selection, batch_size: int) -> None:
    """Raises `ArgumentError` where batches of these stores cannot keep their rows, or be drawn in a strict order."""
    for store, strategy in zip(stores, strategies_of(selection), strict=True):
        has_tasks = store.plan is not None and bool(store.plan.tasks)
        if not has_tasks:
            leave_out(f"no row of {store.name!r} is waited for, as it has no tasks", strict=traits_of(strategy).strict)
        if keep is None:
            continue
        if not has_tasks:
            raise ArgumentError(f"keep='saved' is for stores with tasks, and {store.name!r} has none")
        samples = store.options["max_times_sampled"]
        if samples != 1:
            raise ArgumentError(
                f"keep='saved' needs rows that are drawn once, and {store.name!r} has max_times_sampled={samples}: "
                "create it with max_times_sampled=1, the default with tasks"
            )
        check_whole("batch_size with keep='saved'", batch_size, 1, MAX_PLACES)
        _check_repeatable(strategy)


def _check_repeatable(strategy: object) -> None:
    """Raises `ArgumentError` for strategies whose batches are more than rows in their places."""
    traits = traits_of(strategy)  # type: ignore[arg-type]
    why = None
    if traits.importance:
        why = "has importance weights"
    elif traits.form == "custom" and not traits.stateless:
        why = "may have a state; declare Traits(stateless=True) if it has none"
    if why is not None:
        raise ArgumentError(f"keep='saved' repeats the rows of a batch and nothing else, and {strategy!r} {why}")


__all__ = ["KeptRows", "check_keep"]
