"""Series of checkpoints: a directory with the last few checkpoints of a store, the newest under the name `latest`.

    PATH/20261123T064500-120Z    a checkpoint (checkpoint_format.py), named by the UTC time of its save
    PATH/latest                  a symbolic link to the newest
    PATH/.lock                   locked by the process that saves here

A save first adds a complete checkpoint, then replaces the link `latest`, and then removes the oldest checkpoints. So a
process killed at any instant leaves only complete checkpoints and a valid `latest`. A checkpoint that is still being
read is removed by a later save.
"""

from __future__ import annotations

import calendar
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import geartrain.core.locks as locks
from geartrain.core.shared_files import listed, naming_errors
from geartrain.errors import CheckpointError
from geartrain.store.checkpoint_directory import remove_replaced, remove_unheld
from geartrain.store.checkpoint_format import make_directory, sync_directory
from geartrain.store.checkpoint_reader import Checkpoint
from geartrain.store.checkpoint_writer import Saved
from geartrain.store.store import Store

LATEST = "latest"
_LOCK = ".lock"


def saved_in(directory: Path) -> list[Path]:
    """The checkpoints of a series, oldest first. Raises `CheckpointError` if the directory cannot be read."""
    with naming_errors("cannot read the checkpoints in", directory, CheckpointError):
        return [
            path
            for path in listed(directory, "*Z")
            if not path.is_symlink() and _is_time(path.name) and (path / "manifest.json").is_file()
        ]


@contextmanager
def holding(directory: Path) -> Iterator[None]:
    """Makes the directory of a series if it is missing, and locks out other savers.

    Raises:
        CheckpointError: another process saves there, the directory holds something else, or it cannot be made, read or
            locked.
    """
    with _naming_errors(directory):
        make_directory(directory)
        foreign = {path.name for path in directory.iterdir() if not _is_ours(path)}
        if foreign:
            raise CheckpointError(
                f"{directory} has files that are not of a checkpoint ({', '.join(sorted(foreign)[:3])}): choose "
                "another directory"
            )
        fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not locks.take(fd, locks.EXCLUSIVE, 0):
            raise CheckpointError(f"another process is saving checkpoints to {directory}: choose another directory")
        yield
    finally:
        os.close(fd)


def save_next(store: Store, directory: Path, keep: int) -> Saved:
    """Saves a store as the next of a series, whose lock is held, and removes all but the newest `keep`.

    Files of the one before are linked, where it is whole and of this store; `not_linked` says why not.

    Raises:
        CheckpointError, NoSpaceError: as `Store.save`; the series is as it was.
    """
    older = saved_in(directory)
    base, why = _base(older)
    saved = store.save(directory / _time_name(older), base=base)
    with _naming_errors(directory):
        _lead_to(directory, saved.path.name)
        for path in [*older, saved.path][:-keep]:
            # The name of what a save has replaced: no half checkpoint.
            gone = path.with_name(f".{path.name}.{secrets.token_hex(6)}.saving")
            path.rename(gone)
            remove_unheld(gone)
        for path in listed(directory, ".*.saving"):  # of a save that was killed, or of readers that have ended
            remove_replaced(directory / path.name.split(".")[1])
    return saved if why is None else Saved(**{**vars(saved), "not_linked": why})


def _base(older: list[Path]) -> tuple[Path | None, str | None]:
    """The newest checkpoint of a series if it is readable; otherwise the reason."""
    if not older:
        return None, None
    try:
        Checkpoint(older[-1]).close()
    except CheckpointError as error:
        return None, str(error)
    return older[-1], None


def _naming_errors(directory: Path) -> AbstractContextManager[None]:
    return naming_errors("cannot save checkpoints to", directory, CheckpointError)


def _lead_to(directory: Path, name: str) -> None:
    fresh = directory / f".{LATEST}"
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(name)
        fresh.rename(directory / LATEST)
    except BaseException:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    sync_directory(directory)


def _time_name(older: list[Path]) -> str:
    """The current time, or a time later than all other checkpoints', because clocks can be set back."""
    now_ms = time.time_ns() // 1_000_000
    while True:
        name = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now_ms // 1000)) + f"-{now_ms % 1000:03d}Z"
        if not older or name > older[-1].name:
            return name
        now_ms = max(now_ms, _milliseconds(older[-1].name)) + 1


def _milliseconds(name: str) -> int:
    seconds, rest = name.removesuffix("Z").split("-")
    return calendar.timegm(time.strptime(seconds, "%Y%m%dT%H%M%S")) * 1000 + int(rest)


def _is_time(name: str) -> bool:
    try:
        _milliseconds(name)
    except ValueError:
        return False
    return len(name) == len("20261123T064500-120Z") and name.endswith("Z")


def _is_ours(path: Path) -> bool:
    return path.name in (LATEST, f".{LATEST}", _LOCK) or _is_time(path.name) or path.name.startswith(".2")


__all__ = ["LATEST", "holding", "save_next", "saved_in"]
