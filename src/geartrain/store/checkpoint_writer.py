"""Writes a checkpoint of a store, and puts it in the place of the previous one.

checkpoint_format.py describes the format, checkpoint_chunks.py writes the files.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import geartrain._native as _native
from geartrain.core.arguments import check_path
from geartrain.core.json_values import parse_json
from geartrain.core.schema import Field
from geartrain.core.shared_files import naming_errors
from geartrain.errors import ArgumentError, CheckpointError
from geartrain.store.checkpoint_chunks import Base, NewCheckpoint, Saved, identity_of
from geartrain.store.checkpoint_directory import (
    HeldDirectory,
    put_in_place,
    resolved,
    sibling,
)
from geartrain.store.checkpoint_format import FORMAT, make_directory, sync_directory
from geartrain.store.checkpoint_parts import PartsSaving
from geartrain.store.checkpoint_reader import Checkpoint
from geartrain.store.checkpoint_rows import save_rows


def save(
    store: _native.Store,
    fields: dict[str, Field],
    max_length: int,
    options: dict[str, Any],
    directory: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    incremental: bool = True,
    origin: str | None = None,
    progress: bool = False,
    locks: bool = True,
) -> Saved:
    """Writes the store's committed rows to `directory`, complete or not at all. See `Store.save`.

    `origin` is the id of the checkpoint that the store was made from, if it was; `locks`: the handle may lock it.
    """
    of_parts = "axes" in store.describe()
    if of_parts and not locks:
        raise ArgumentError(
            "a store with axes, strings or tasks was opened for reading and cannot be saved: open it for writing"
        )
    began_s = time.monotonic()
    if base is not None:
        base = check_path("base", base)
        Checkpoint(base).close()  # a base that was named must be whole; one that was found may be damaged
    directory = check_path("directory", directory).absolute()
    found, not_linked = None, None  # what to link to, or why not
    with _naming_errors(directory):
        directory = resolved(directory)
        if directory.exists():
            _check_replaceable(directory)
        make_directory(directory.parent)
        if incremental:
            found, not_linked = _find_base(store, base, directory, origin)
    with ExitStack() as opened:
        if found is not None:
            opened.callback(found.checkpoint.close)
        with _naming_errors(directory), sibling(directory) as fresh:
            with NewCheckpoint(store, options, fresh, found) as new:
                new.not_linked = not_linked
                if of_parts:
                    saved = PartsSaving(store, new, progress).run(directory)
                else:
                    saved = save_rows(store, fields, max_length, new, directory, locks=locks, progress=progress)
            opened.close()  # it may be what is replaced
            put_in_place(fresh, directory)
            sync_directory(directory.parent)
    return Saved(**{**vars(saved), "seconds": time.monotonic() - began_s})


def _find_base(
    store: _native.Store, base: Path | None, directory: Path, origin: str | None
) -> tuple[Base | None, str | None]:
    """The checkpoint to link to, or the reason why the existing one cannot be used."""
    place = directory if base is None else base.absolute()
    if base is None and not (place / "manifest.json").exists():
        return None, None
    with ExitStack() as unless_found:
        try:
            found = unless_found.enter_context(Checkpoint(place))
            if found.manifest["store"] != identity_of(store) and found.id != origin:
                return None, f"{place} is not of this store"
            if found.options["capacity"] != store.describe()["capacity"]:
                return None, f"{place} is of a store of another capacity"
            if (found.plan is None) != ("axes" not in store.describe()):
                return None, f"{place} is of another kind of store"
            table = found.records() if found.plan is None else found.parts()
        except CheckpointError as error:
            return None, str(error)  # damage there must not keep a whole checkpoint from being made
        unless_found.pop_all()
        return Base(found, table), None


def _naming_errors(directory: Path) -> AbstractContextManager[None]:
    kept = "What was saved before stays as it is: make room and save again"
    return naming_errors("cannot save the checkpoint", directory, CheckpointError, if_full=kept)


def _check_replaceable(directory: Path) -> None:
    """Refuses a directory that holds anything that no checkpoint put there."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} exists and is not a directory: choose another one")
    with HeldDirectory(directory) as held:
        found, ours = held.names(), set()
        if "manifest.json" in found:
            content = held.read("manifest.json")
            with suppress(ValueError, KeyError, TypeError):
                manifest = parse_json(content)
                ours = {"manifest.json", *manifest["files"]} if manifest["format"] == FORMAT else set()
    if not found <= ours:
        raise CheckpointError(
            f"{directory} has files that are not of a checkpoint ({', '.join(sorted(found - ours)[:3])}), so it is "
            "not replaced: choose another directory"
        )


__all__ = ["Saved", "save"]
