"""Cleanup after killed exports: finds and removes their unfinished datasets.

A running export holds a file lock next to its dataset, which the kernel releases when the process dies. So a later
export can tell dead exports from running ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

_LOCK = ".lock"


def unfinished(target: Path) -> Path:
    """A new name beside the target. It has a length of its own: a name that is long already would become too long."""
    return target.with_name(f"{_prefix(target)}{secrets.token_hex(6)}.exporting")


@contextlib.contextmanager
def at_work(fresh: Path) -> Iterator[None]:
    """Protects the unfinished dataset `fresh` from `remove_dead` while this process lives."""
    lock = fresh.with_name(fresh.name + _LOCK)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: a later export cannot take it either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        with contextlib.suppress(OSError):  # what could not be removed keeps its lock's file: for `remove_dead`
            if not any(os.path.lexists(each) for each in _of(fresh)):
                lock.unlink(missing_ok=True)
        os.close(descriptor)


def remove_dead(target: Path) -> None:
    """Removes unfinished datasets that killed exports left next to this target, if this user may."""
    name = re.compile(re.escape(_prefix(target)) + r"[0-9a-f]{12}\.exporting" + re.escape(_LOCK))
    try:
        locks = [each for each in target.parent.iterdir() if name.fullmatch(each.name)]
    except OSError:  # a folder that may be written to and not listed
        return
    for lock in locks:
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(lock.with_name(lock.name.removesuffix(_LOCK)))
                lock.unlink(missing_ok=True)
            finally:
                os.close(descriptor)


def remove(fresh: Path) -> None:
    """Removes an unfinished dataset, a file or a folder, and its parts, if they are there. Raises `OSError`."""
    for path in _of(fresh):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def parts_of(fresh: Path) -> Path:
    """A folder beside an unfinished dataset, for what its writer collects first."""
    return fresh.with_name(fresh.name + ".parts")


def _of(fresh: Path) -> tuple[Path, Path]:
    return fresh, parts_of(fresh)


def _prefix(target: Path) -> str:
    return f".{target.name[:64]}."


__all__ = ["at_work", "parts_of", "remove", "remove_dead", "unfinished"]
