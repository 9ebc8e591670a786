"""The launcher's view of a job's store: detects a store that an earlier run left, reads statistics, removes the store.

The job's processes create and use the store. The launcher attaches to it, and reclaims the rows of processes that die.
At the end it keeps or removes the store, and the weights of the same name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import geartrain.weights as weights
from geartrain.errors import GeartrainError, StoreExistsError, StoreMissingError
from geartrain.launch.job import Job
from geartrain.store.store import Store


def rows_of(store: Store) -> str:
    """How many rows a store has, in words; with tasks also those that cannot be drawn, or were drawn and are kept."""
    if not store.tasks:
        return f"{len(store):,} rows"
    stats = store.stats()
    return f"{len(store):,} rows to draw, {stats['under_way']:,} under way and {stats['kept']:,} kept"


class JobStore:
    """The store of a job on this host. The launcher attaches once a process has made it.

    Attributes:
        handle: the store, or None before there is one and after the job.
    """

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self.handle: Store | None = None
        self._job, self._say = job, say
        self._found = False  # one was there before, and no process of this job may have used it

    def check_old(self, *, fresh: bool) -> None:
        """Finds the store of an earlier run. A fresh start removes it, or raises `StoreExistsError` if it is in use."""
        name = self._job.name
        with contextlib.suppress(StoreMissingError):
            left = Store.open(name, mode="r", adopt=True, trust=self._job.trust)
            users = left.native.live_clients()
            if fresh and users:
                who = f"{users} living process{'es use' if users > 1 else ' uses'}"
                raise StoreExistsError(f"{who} the store {name!r}; --fresh cannot remove it")
            if fresh:
                left.unlink()
            elif not users:
                self._found = True
                self._say(f"the store {name!r} was left with {rows_of(left)}, which are adopted")
        if fresh and name in weights.names() and not weights.describe(name, trust=self._job.trust).in_use:
            weights.unlink(name)

    def attach(self, *, adopt: bool = False) -> None:
        """Attaches to the store once it exists, for its figures; it may have been made without `persist`, too."""
        if self.handle is None:
            with contextlib.suppress(GeartrainError, OSError):
                self.handle = Store.open(self._job.name, adopt=adopt, timeout_s=1.0, trust=self._job.trust)

    def reap(self) -> None:
        """Reclaims the rows of processes that have died; the next insert does it as well."""
        if self.handle is not None:
            with contextlib.suppress(GeartrainError):
                self.handle.reap()

    def leave(self, *, failed: bool) -> dict[str, Any] | None:
        """Keeps or removes the store and the weights, as the job says; returns the store's last figures."""
        name, figures = self._job.name, None
        keep = self._job.keep_store == "always" or (self._job.keep_store == "on_failure" and failed)
        self.attach(adopt=not self._found)  # all its processes may have ended since the last look
        if self.handle is not None:
            self.reap()
            figures, rows = {"selectable": len(self.handle), **self.handle.stats()}, rows_of(self.handle)
            if not keep:
                self.handle.unlink()
            self.handle.close(keep=keep)
            if keep:
                self._say(
                    f"the store {name!r} stays with {rows}: the next start adopts them, "
                    f"`geartrain remove {name}` removes it"
                )
            self.handle = None
        if not keep and name in weights.names():
            with contextlib.suppress(GeartrainError, OSError):
                if not weights.describe(name, trust=self._job.trust).in_use:  # its processes were killed
                    weights.unlink(name)
        return figures
