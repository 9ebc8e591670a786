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
import os
from pathlib import Path
from typing import Literal, cast, get_args

import geartrain._native as _native
from geartrain.core.arguments import check_choice
from geartrain.errors import GeartrainError, NoSpaceError

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
    """
    found = []
    for path in (directory or segments_directory()).glob(pattern):
        with contextlib.suppress(UnicodeEncodeError):
            path.name.encode()
            found.append(path)
    return sorted(found)


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
    return GeartrainError(
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
