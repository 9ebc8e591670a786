"""Directory of a checkpoint, held open and locked while a process reads or writes it.

A save replaces the checkpoint's directory by a new one and removes the old one. A series of checkpoints also removes
the oldest. The lock keeps a checkpoint's files readable meanwhile:

- Readers and writers hold a shared `flock` on the directory. The kernel drops it when the process dies.
- A process that wants to remove the directory needs an exclusive lock. If it gets none, it leaves the directory there.
- A replaced directory that is still being read is named .NAME.*.saving. Its last reader or the next save removes it.

File systems without such locks (NFS) remove the files at once. A reader that misses a file then gets `SupersededError`.
It starts again with the checkpoint that has replaced its own.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

import geartrain._native as _native
from geartrain.core.shared_files import listed
from geartrain.errors import CheckpointError, StoreIOError

#: Longest wait for a directory that another process is removing.
_REMOVAL_S = 10.0


class SupersededError(CheckpointError):
    """The checkpoint was replaced or removed while it was read, and its file system has no locks to prevent that."""


class HeldDirectory:
    """An open directory, with a shared lock on it where the file system has locks. One thread at a time."""

    def __init__(self, path: Path) -> None:
        """Opens what the path leads to now. Raises `CheckpointError` when that is no directory."""
        self.path = path
        self._fd = -1
        until_s = time.monotonic() + _REMOVAL_S
        while True:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                why = "it has no manifest.json" if error.errno == errno.ENOTDIR else error.strerror
                raise CheckpointError(f"{path} is not a checkpoint: {why}") from None
            locked = _lock(fd, fcntl.LOCK_SH)
            if locked is not False and _leads_to(path, fd):
                self._fd = fd
                break
            os.close(fd)  # replaced meanwhile, or being removed
            if locked:
                remove_replaced(Path(os.path.realpath(path)))  # who replaced it may have left it to us
            if time.monotonic() > until_s:
                raise CheckpointError(
                    f"{path} is being removed and has been locked for {_REMOVAL_S} s: try again, or remove it by hand"
                )
            time.sleep(0.001)
        self._real = Path(os.path.realpath(path))

    @property
    def superseded(self) -> bool:
        """Whether the path leads to another directory by now, or to none."""
        return not _leads_to(self.path, self._fd)

    def open(self, name: str) -> int:
        """A descriptor of one of its files, for reading.

        Raises:
            CheckpointError: it is not there, or is no file.
            SupersededError: it is not there any more.
        """
        if self._fd < 0:
            raise CheckpointError(f"the checkpoint {self.path} was closed")
        if "/" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{self.path} is damaged: {name!r} is not a file name")
        try:
            # A pipe of that name would have an ordinary open wait for its writer.
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._fd)
        except FileNotFoundError:
            if self.superseded:
                raise SupersededError(f"{self.path} was replaced or removed while it was being read") from None
            raise CheckpointError(f"{self.path / name} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise CheckpointError(f"{self.path / name} is not a file")
        return fd

    @contextmanager
    def reading(self, name: str) -> Iterator[FileIO]:
        """One of its files, unbuffered, to be read. Raises as `open`, also where the disk cannot read it."""
        with FileIO(self.open(name)) as file:
            try:
                yield file
            except OSError as error:
                raise CheckpointError(f"{self.path / name} cannot be read: {error.strerror}") from None

    def read(self, name: str) -> bytes:
        """The bytes of one of its files. Raises as `open`."""
        with self.reading(name) as file:
            return file.read()

    def status(self, name: str) -> os.stat_result:
        """Size, links and so on of one of its files. Raises as `open`."""
        fd = self.open(name)
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def names(self) -> set[str]:
        """The names in it. Raises `CheckpointError` where the disk cannot read them."""
        try:
            return set(os.listdir(self._fd))  # noqa: PTH208  # a path may lead to another by now
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None

    def link(self, name: str, target: Path) -> None:
        """Hard-links one of its files to a new path. Raises `OSError`."""
        os.link(name, target, src_dir_fd=self._fd)

    def close(self) -> None:
        """Lets it be removed: a replaced one, now, if nobody else reads it."""
        if self._fd < 0:
            return
        superseded = self.superseded
        fd, self._fd = self._fd, -1
        if fd < 0:  # a signal's handler has closed it meanwhile
            return
        os.close(fd)
        if superseded:
            remove_replaced(self._real)

    def __enter__(self) -> HeldDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):  # its `__init__` raised
            self.close()


def remove_unheld(path: Path, *, unlocked: bool = True) -> bool:
    """Removes a checkpoint's directory, if nobody reads or writes it; whether it is gone.

    Args:
        path: of the directory.
        unlocked: remove it where the file system has no locks to tell.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return not path.exists()
    try:
        locked = _lock(fd, fcntl.LOCK_EX)
        if locked is False or (locked is None and not unlocked) or not _leads_to(path, fd):
            return False
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    finally:
        os.close(fd)


def remove_replaced(directory: Path) -> None:
    """Removes replaced directories of a checkpoint's path that readers or killed savers left next to it."""
    with suppress(OSError):  # a directory that cannot be listed: the next save removes them
        for left in listed(directory.parent, f"{glob.escape(_beside(directory))}*.saving"):
            remove_unheld(left, unlocked=False)  # without locks it may be somebody's unfinished one


@contextmanager
def sibling(path: Path) -> Iterator[Path]:
    """A new directory beside a path, for what is to get its name; gone afterwards, with what is in it.

    Takes away what nobody reads or writes any more there. A lock on it, which the kernel drops when its holder dies,
    tells. Afterwards it is the old one if the two were exchanged, and the unfinished new one if something failed.
    """
    remove_replaced(path)
    name = f"{_beside(path)}{secrets.token_hex(6)}"
    unlocked, fresh = path.with_name(f"{name}.making"), path.with_name(f"{name}.saving")
    unlocked.mkdir()
    held = -1
    try:
        held = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _lock(held, fcntl.LOCK_SH)
        unlocked.rename(fresh)  # others see it only when it is locked
        yield fresh
    finally:
        if held >= 0:
            os.close(held)
        for left in (unlocked, fresh):
            remove_unheld(left)
        remove_replaced(path)  # by others, who left it to us because we held it


def _beside(path: Path) -> str:
    """How names of siblings begin; a long name is cut, or the sibling's would be too long for the file system."""
    return f".{path.name[:64]}."


def put_in_place(fresh: Path, directory: Path) -> None:
    """Gives the directory `fresh` the name `directory`. An existing directory of that name gets the name `fresh`."""
    while True:  # another saver may make it, or remove it, at any time
        try:
            fresh.rename(directory)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        try:
            _native.exchange_paths(str(fresh), str(directory))
            return
        except StoreIOError as error:
            if directory.exists():
                raise CheckpointError(str(error)) from None


def resolved(directory: Path) -> Path:
    """The directory, or the one that a symbolic link of that name points to: the link stays.

    Raises:
        CheckpointError: the link points to nothing.
    """
    if not directory.is_symlink():
        return directory
    target = Path(os.path.realpath(directory))
    if not target.exists():
        raise CheckpointError(f"{directory} is a symbolic link to {target}, which does not exist")
    return target


def _lock(fd: int, kind: int) -> bool | None:
    """Whether the lock was taken, at once; None where the file system has no locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _leads_to(path: Path, fd: int) -> bool:
    try:
        there, here = path.stat(), os.fstat(fd)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


__all__ = [
    "HeldDirectory",
    "SupersededError",
    "put_in_place",
    "remove_replaced",
    "remove_unheld",
    "resolved",
    "sibling",
]
