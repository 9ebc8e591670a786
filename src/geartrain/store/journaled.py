"""Stores with a journal on disk: starts the journal when a handle opens, and ends it when the handle closes."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from geartrain.core.arguments import check_choice, timeout
from geartrain.errors import ArgumentError, JournalError, WaitTimeoutError
from geartrain.store.segment import JournalFull
from geartrain.store.tasked import TaskedStore

if TYPE_CHECKING:
    from geartrain.store.checkpoint_reader import Checkpoint
    from geartrain.store.journal import Journal, JournalOptions, JournalStatus


class JournaledStore(TaskedStore):
    """A handle whose store may have a journal. Users have its subclass `Store`."""

    _journal: Journal | None = None

    @property
    def journal(self) -> JournalStatus | None:
        """Figures of the store's journal; None if it has none. Raises `StoreClosedError` once the store is closed."""
        return None if self._journal is None else self._journal.status()

    def sync_journal(self, timeout_s: float = 10.0) -> None:
        """Waits until all earlier commits and removals, of all processes, are on the journal's disk.

        Args:
            timeout_s: longest wait, in seconds.

        Raises:
            ArgumentError: the store has no journal.
            WaitTimeoutError: the journal is not on its disk within `timeout_s`, or the disk is full. The message says
                which.
        """
        if self._journal is None:
            raise ArgumentError(f"the store {self.name!r} has no journal: pass journal= to Store.create")
        if not self._journal.sync(timeout(timeout_s)):
            why = self._journal.status().error or "the disk is slow, or the process that writes it is stopped"
            raise WaitTimeoutError(f"the journal {self._journal.path} is not on its disk after {timeout_s} s: {why}")

    def close(self, *, keep: bool = False) -> None:
        """Closes the handle, after the journal has written all commits.

        Rows that are being written through this handle are abandoned. `close` waits for calls of other threads. Calls
        that wait for the rate limiter or for another process end with `StoreClosedError`. The last process to close a
        store in a file writes it to the disk.

        The last process to close a segment removes it, unless it persists. With `keep=True` the segment stays, and a
        later process joins it with `Store.open(name, adopt=True)`. Views taken before remain readable.

        Args:
            keep: leave the segment in place, even if this is the last process that uses it.

        Raises:
            ArgumentError: `keep=True` for a store without a name, which no process could adopt.
            LockTimeoutError: another process holds the store's lock and is stopped. The handle is closed, and other
                processes treat this one as dead.
            JournalError: the journal's disk did not take everything within the handle's `timeout_s`. The handle is
                closed.
        """
        self.check_may_keep(keep)
        journal = self._journal
        done = journal is None or self.native.closed or journal.finish()
        super().close(keep=keep)
        if not done and journal is not None:
            raise JournalError(
                f"the store {self.name!r} was closed, but its journal {journal.path} may lack the last commits"
            )


def journal_asked_for(path: str | os.PathLike[str] | None, sync_s: float, full: JournalFull) -> JournalOptions | None:
    """The arguments of `Store.create`, checked; None where no journal was asked for."""
    timeout(sync_s, "journal_sync_s")
    check_choice("journal_full", full, ("wait", "error"))
    if path is None:
        return None
    from geartrain.store.journal import JournalOptions

    return JournalOptions(path, sync_s, full)


def begin_journal(
    store: JournaledStore, asked_for: JournalOptions, checkpoint: Checkpoint | None = None, progress: bool = False
) -> None:
    """Restores the journal's contents into a new store and journals it from there on; see `JournalOptions.attach`."""
    starts = asked_for.attach(store.native, store.fields, store.max_length, store.options, checkpoint, progress)
    store._journal = starts()
    _end_with(store, store._journal)


def join_journal(store: JournaledStore) -> None:
    """Joins the journal of an opened store, if it has one."""
    if store.native.journal_state() is None:
        return
    from geartrain.store.journal import join

    store._journal = join(store.native, store.fields, store.max_length)
    if store._journal is not None:
        _end_with(store, store._journal)


def _end_with(store: JournaledStore, journal: Journal) -> None:
    """A store that is dropped without being closed ends its journal's thread, which holds the native store."""
    weakref.finalize(store.columns, journal.stop).atexit = False


__all__ = ["JournaledStore", "begin_journal", "join_journal", "journal_asked_for"]
