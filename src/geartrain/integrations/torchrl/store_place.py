"""Store of a torchrl storage: its name or file, the process that creates it, and the process that removes it."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import geartrain._native as _native
from geartrain.core.arguments import check_flag
from geartrain.core.schema import Field
from geartrain.core.shared_files import leftovers
from geartrain.errors import ArgumentError, GeartrainError, StoreExistsError, StoreMissingError
from geartrain.store.store import Store

_PREFIX, _OWNER = "torchrl-", "-owner"
# The store's file in a folder.
_FILE = "items.store"


class StorePlace:
    """Name of a storage's store, and the settings that are fixed before the store exists.

    If a storage is pickled before its first item, another process may make the store, but this storage owns it. The
    store then stays after its maker has ended, until the owner closes the storage or ends. The owner holds a small
    store next to it, which shows other processes whether the owner is alive. After a killed owner, the next owner on
    the host removes both.

    Args:
        store: name of the store, or None.
        scratch_dir: a folder for its file, or None.
        existsok: whether the file may exist already.
        auto_cleanup: whether the last process that uses the store removes it; None: unless it is a file.

    Attributes:
        name: of the store, or None. folder: `scratch_dir`.

    Raises:
        ArgumentError: both a name and a folder; flags that are none.
    """

    def __init__(
        self, store: str | None, scratch_dir: str | os.PathLike[str] | None, existsok: bool, auto_cleanup: bool | None
    ) -> None:
        if store is not None and scratch_dir is not None:
            raise ArgumentError("give a store's name or a scratch_dir for its file, not both")
        self.folder = None if scratch_dir is None else Path(scratch_dir)
        self.name = store if self.folder is None else str(self.folder.absolute() / _FILE)
        self._fresh = self.folder is not None and not check_flag("existsok", existsok)
        self._persist = None if auto_cleanup is None else not check_flag("auto_cleanup", auto_cleanup)
        if self._persist and self.name is None:
            self.name = new_name()
        self._owner: str | None = None
        self._release: weakref.finalize[Any, Any] | None = None

    @property
    def auto_cleanup(self) -> bool:
        """Whether the store is removed with the last process that uses it."""
        if self._persist is None:
            return self.name is None or "/" not in self.name
        return not self._persist

    def find(self) -> Store | None:
        """The store, where it is there and may be used by this storage."""
        if self.name is None or self._fresh:
            return None
        try:
            return Store.open(self.name, adopt=self._release is not None)  # of killed processes: it is the owner's
        except StoreMissingError:
            return None

    def make(self, fields: Mapping[str, Field], **options: Any) -> Store:
        """Makes the store, or joins the one that another process makes at the same time.

        Raises:
            RuntimeError: its file is there already, and may not be. Others as `Store.create` and `Store.open`.
        """
        if self.name is None:
            return Store.create(fields, **options)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        persist = self._persist
        if self._owner is not None and self._release is None and _is_used(self._owner):
            persist = True
        if not self._fresh:
            return Store.open(self.name, fields, create="missing", persist=persist, **options)
        try:
            store = Store.create(self.name, fields, persist=persist, **options)
        except StoreExistsError as error:
            raise self._taken() from error
        self._fresh = False
        return store

    def own(self) -> None:
        """Before a storage without a store is pickled: it and its copies have the same one, whichever makes it."""
        if self._fresh:
            assert self.name is not None
            if Path(self.name).exists():
                raise self._taken()
            self._fresh = False
        elif self.name is None:
            self.name = new_name()
            mine = Store.create(self.name + _OWNER, {"owner": Field((), "uint8", per_row=True)}, capacity=1)
            self._owner = mine.name
            self._release = weakref.finalize(self, _leave, self.name, mine, os.getpid())

    def leave(self) -> None:
        """Removes the store that others have made for this one, if there is one."""
        if self._release is not None:
            self._release()

    def tidy(self) -> None:
        """Removes the folder, unless there is something else in it."""
        if self.folder is not None:
            with suppress(OSError):
                self.folder.rmdir()

    def __getstate__(self) -> dict[str, Any]:
        """State without the owner's finalizer."""
        return self.__dict__ | {"_release": None}

    def _taken(self) -> RuntimeError:
        return RuntimeError(
            f"{self.folder} holds a store already: with existsok=True this storage goes on with its items; remove it, "
            "or take another scratch_dir"
        )


def new_name() -> str:
    """A random name for an unnamed storage. Also removes stores of killed owners."""
    first = Path(_native.segment_path(_PREFIX))
    for path in leftovers(f"{first.name}*{_OWNER}", first.parent):
        with suppress(GeartrainError, OSError):  # another user's, another build's, or removed meanwhile
            if path.stat().st_uid == os.getuid() and not _is_used(str(path)):
                store = path.with_name(path.name.removesuffix(_OWNER))
                if not _is_used(str(store)):
                    _remove(str(store))
                    _remove(str(path))
    return f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"


def _is_used(name: str) -> bool:
    """Whether a living process uses a store; False if it does not exist."""
    try:
        with Store.open(name, mode="r", adopt=True) as store:
            return bool(store.native.live_clients())
    except StoreMissingError:
        return False


def _remove(name: str) -> None:
    """Removes a store's name, if there is one."""
    with suppress(StoreMissingError), Store.open(name, mode="r", adopt=True) as store:
        store.unlink()


def _leave(name: str, owner: Store, pid: int) -> None:
    """Removes the store that another process made for an owner, and the owner's own small store."""
    if os.getpid() != pid:  # a forked child's copy
        return
    with suppress(GeartrainError, OSError), Store.open(name, mode="r", adopt=True) as store:
        if store.options["persist"]:  # made by another process; else the last one that uses it removes it
            store.unlink()
    owner.close()


__all__ = ["StorePlace", "new_name"]
