"""Shared files: finds the directory of segments, and opens only files that untrusted users cannot write to.

A process that maps a file is at the mercy of everyone who may write to the file. Such a user can change what the
process reads, and can cause a SIGBUS by truncating the file. A file is therefore opened by name only if it is a regular
file, not a symbolic link. Only trusted users may have write access to it. `trust` says which users are trusted:

| trust | users |
|---|---|
| `"user"` | this process's user, and root |
| `"group"` | also the members of a group that this user belongs to |
| `"any"` | everyone |

native/base/shared_file.h has the details.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, cast, get_args

import geartrain._native as _native
from geartrain.core.arguments import check_choice
from geartrain.errors import GeartrainError, NoSpaceError, StoreIOError

#: Numbers of the errors of a full file system, quota or limit of a file's size.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: Who may write to a shared file. New files get the mode 0600, 0660 or 0666 by it.
Trust = Literal["user", "group", "any"]


def check_trust(trust: str) -> Trust:
    """The value, once it is one. Raises `ArgumentError`."""
    return cast(Trust, check_choice("trust", trust, get_args(Trust)))


def segments_directory() -> Path:
    """The directory of segments: GEARTRAIN_DIR, or /dev/shm. All processes of a job need the same.

    Raises:
        SchemaError: GEARTRAIN_DIR is not an absolute path.
    """
    return Path(_native.segments_directory())


def shared_files(pattern: str, directory: Path | None = None) -> list[Path]:
    """The files of a pattern in the directory of segments, or another one, sorted by name.

    Others may make files there too. Names that are no text are left out: no file of ours has one, and nothing that
    shows or sends names could take them.

    Raises:
        StoreIOError: the directory cannot be read.
    """
    directory, found = directory or segments_directory(), []
    with naming_errors("cannot list the files in", directory):
        for path in listed(directory, pattern):
            with contextlib.suppress(UnicodeEncodeError):
                path.name.encode()
                found.append(path)
    return found


def leftovers(pattern: str, directory: Path | None = None) -> list[Path]:
    """`shared_files` for a caller with something else to do: none where the directory cannot be read."""
    try:
        return shared_files(pattern, directory)
    except StoreIOError:
        return []


def listed(directory: Path, pattern: str) -> list[Path]:
    """The entries of a directory whose names match a pattern, sorted by name; none where there is no directory.

    `Path.glob` takes a directory that this process may not read for an empty one.

    Raises:
        OSError: the directory cannot be read.
    """
    try:
        names = os.listdir(directory)  # noqa: PTH208  # names, for the filter
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [directory / name for name in sorted(fnmatch.filter(names, pattern))]


@contextlib.contextmanager
def naming_errors(
    doing: str, path: Path, kind: type[GeartrainError] = StoreIOError, *, if_full: str = ""
) -> Iterator[None]:
    """A block in which the system's bare errors become errors that name a file.

    Args:
        doing: what the block does, such as "cannot save the checkpoint". The path follows it.
        path: the file or directory.
        kind: the error to raise. A full file system is always a `NoSpaceError`.
        if_full: what its message ends with: what is left, and what to do once there is room.
    """
    try:
        yield
    except GeartrainError:  # which may be an `OSError` too, and has its path
        raise
    except OSError as error:
        what = f"{doing} {path}: {error.strerror or error}"
        if error.errno in FULL:
            raise NoSpaceError(f"{what}; {room_in(path)}{if_full and '. '}{if_full}") from error
        raise kind(what + advice(error)) from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """A block that reads a user's file: the system's errors name it."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, f"{path} cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A block that writes a user's file: the system's errors name it, and a new file that is not whole is removed."""
    there = os.path.lexists(path)
    try:
        yield
    except OSError as error:
        if not there:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise type(error)(error.errno, f"{path} cannot be written: {error.strerror or error}") from error


def advice(error: OSError) -> str:
    """What helps against an error of the system, to be put behind its text; empty where nothing is known."""
    if error.errno != errno.EMFILE:
        return ""
    return ". Raise this process's limit of open files (ulimit -n), or close some"


def room_in(path: Path) -> str:
    """The free space of a file system, for the error of a full one: "1,024 bytes are free", or "no inodes are free".

    Args:
        path: on it; the part of it that exists tells.
    """
    about = os.statvfs(next(each for each in (path, *path.parents) if os.path.lexists(each)))
    if about.f_files and not about.f_favail:
        return "no inodes are free"
    return f"{about.f_bavail * about.f_frsize:,} bytes are free"


def cannot_make(path: Path, error: OSError, nbytes: int) -> GeartrainError:
    """The error, with its remedy, for a file of `nbytes` that could not be made in the directory of segments."""
    if error.errno in FULL:
        return NoSpaceError(
            f"{path} cannot be created: it needs {nbytes:,} bytes, and {room_in(path)} in {path.parent}. Remove "
            "what dead runs left (geartrain inspect lists it), enlarge the file system (mount -o remount,size=... "
            "or nr_inodes=...; docker run --shm-size=...), or set GEARTRAIN_DIR to a directory on another one in "
            "all processes"
        )
    if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
        return StoreIOError(f"{path} cannot be created: {error.strerror}{advice(error)}")
    return StoreIOError(
        f"{path} cannot be created: {error.strerror}. Set GEARTRAIN_DIR, in all processes, to a directory that "
        "this process may write to"
    )


def open_shared(path: Path, *, writable: bool = True, trust: Trust = "user") -> int:
    """A descriptor of the file; the caller closes it.

    Raises:
        StoreMissingError: there is none.
        UntrustedStoreError: others than those who are trusted may write to it, or it is a symbolic link.
        IncompatibleStoreError: not a regular file.
    """
    return _native.open_shared_file(str(path), writable, trust)


def share_with(fd: int, trust: Trust) -> None:
    """Lets the trusted users open a new file."""
    _native.share_with(fd, trust)
