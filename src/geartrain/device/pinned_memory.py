"""Pins shared segments in place for a GPU (cudaHostRegister), within one limit for the whole host.

CUDA registers memory per process. Each process whose GPU reads a segment registers its own mapping of it. Registering
takes time in proportion to the size (page tables), but no memory. The pages belong to the host, and are the same ones
whether pinned once or eight times. So the limit counts each segment once, however many processes have registered it. A
segment counts until the last of these processes is gone.

A ledger records the registrations. It is a private directory of the user, next to the segments (/dev/shm, or
GEARTRAIN_DIR). It has a file for each registration, named after the segment's inode:

    <device>-<inode>.<pid>.<number>    JSON: bytes, limit_bytes, path; locked by the process as long as it lives

The kernel releases the lock when the process dies. The next reader of the ledger removes such files.

The limit in force is the smallest limit of all live registrations. The default is half of the memory that this process
may use. `DeviceOptions(pin_limit_bytes=)` overrides it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import resource
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
import geartrain.core.locks as locks
from geartrain.core.json_values import entry, parse_json, whole_entry
from geartrain.core.lifetime import on_error
from geartrain.core.shared_files import segments_directory
from geartrain.device.device import Device
from geartrain.errors import PinError, WaitTimeoutError

GUARD_S = 10.0  # longest wait for the ledger

_log = logging.getLogger("geartrain.device.pinned_memory")
_numbers = itertools.count()


class MappedSegment(Protocol):
    """A shared segment as this process has mapped it; a `Store` is one."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    @property
    def path(self) -> Path:
        """Its file, which may have been unlinked."""
        ...

    @property
    def nbytes(self) -> int:
        """Its size."""
        ...

    @property
    def native(self) -> _native.Store:
        """The native store that maps it."""
        ...


@dataclass(frozen=True)
class Pinned:
    """The registration of a segment by a live process."""

    segment: str
    nbytes: int
    limit_bytes: int
    path: str
    pid: int


def default_limit() -> int:
    """The default limit of pinned bytes on this host."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total // 2


class Ledger:
    """Registrations of pinned memory by all processes of this host.

    Args:
        directory: directory of the ledger's files; by default one per host and user, next to the segments.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or segments_directory() / f"geartrain-pinned-{os.geteuid()}"

    def entries(self) -> list[Pinned]:
        """All registrations of live processes."""
        with self._guarded():
            return self._living()

    def total(self) -> int:
        """Bytes pinned on this host, each segment once."""
        return _total(self.entries())

    def enter(self, store: MappedSegment, limit_bytes: int) -> int:
        """Adds an entry before this process registers a store's segment; the descriptor that keeps the entry.

        Raises:
            PinError: the limit would be exceeded.
        """
        about = store.path.stat() if store.path.exists() else None
        segment = f"{about.st_dev}-{about.st_ino}" if about else f"unlinked-{store.native.describe()['store_id']:x}"
        with self._guarded():
            living = self._living()
            limit = min([limit_bytes, *(one.limit_bytes for one in living)])
            others = [one for one in living if one.segment != segment]
            if _total(others) + store.nbytes > limit:
                holders = ", ".join(f"{one.path} {one.nbytes / 1e9:.2f} GB by process {one.pid}" for one in others)
                raise PinError(
                    f"pinning {store.name!r} ({store.nbytes / 1e9:.2f} GB) would bring this host to "
                    f"{(_total(others) + store.nbytes) / 1e9:.2f} GB of pinned memory, the limit is "
                    f"{limit / 1e9:.2f} GB (pinned now: {holders or 'nothing'}). Raise it with "
                    "pin_limit_bytes, in all processes of the host, or use path='staged'"
                )
            path = self.directory / f"{segment}.{os.getpid()}.{next(_numbers)}"
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            locks.take(descriptor, locks.EXCLUSIVE, 0)
            note = {"nbytes": store.nbytes, "limit_bytes": limit_bytes, "path": str(store.path)}
            os.write(descriptor, json.dumps(note).encode())
            return descriptor

    def leave(self, descriptor: int) -> None:
        """Removes an entry."""
        with self._guarded(), contextlib.suppress(FileNotFoundError):
            Path(f"/proc/self/fd/{descriptor}").readlink().unlink()
        os.close(descriptor)

    def _living(self) -> list[Pinned]:
        found = []
        for path in self.directory.glob("*-*.*.*"):
            try:
                with path.open("rb") as file:
                    if locks.is_taken(file.fileno(), 0):
                        note = parse_json(file.read())
                        segment, pid, _ = path.name.split(".")
                        nbytes = whole_entry(note, "nbytes", 0, 2**63)
                        limit = whole_entry(note, "limit_bytes", 0, 2**63)
                        found.append(Pinned(segment, nbytes, limit, entry(note, "path", str), int(pid)))
                    else:
                        path.unlink()  # its process has died
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
        return found

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        with contextlib.suppress(FileExistsError):
            self.directory.mkdir(mode=0o700)
        found = self.directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PinError(f"{self.directory} is not a directory of this user alone; remove it")
        guard = os.open(self.directory / "guard", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if not locks.take(guard, locks.EXCLUSIVE, 0, GUARD_S):
                raise WaitTimeoutError(f"{self.directory} was held by another process for {GUARD_S} s")
            yield
        finally:
            os.close(guard)


def _total(entries: list[Pinned]) -> int:
    return sum({one.segment: one.nbytes for one in entries}.values())


# --- registrations of this process -------------------------------------------------------------------------------


class Pins:
    """The segments that this process has registered: each once, as long as it has users.

    Args:
        ledger: of the host.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = ledger or Ledger()
        self._lock = threading.RLock()
        self._busy = False  # within the lock
        self._released: list[int] = []  # meanwhile, by finalisers that a collection of garbage within the lock has run
        self._held: dict[int, _Held] = {}
        self._pid = os.getpid()

    def hold(self, store: MappedSegment, device: Device, limit_bytes: int | None = None) -> Pin:
        """The store's segment, readable by the device until the pin is released.

        Raises:
            PinError: the host's limit, RLIMIT_MEMLOCK or the driver forbids it; names which, and the remedy.
        """
        memory = store.native.segment()
        address = memory.ctypes.data
        with self._at_work():
            if self._pid != os.getpid():  # forked: registrations are the parent's
                self._held, self._pid = {}, os.getpid()
            held = self._held.get(address)
            if held is None:
                note = self.ledger.enter(store, default_limit() if limit_bytes is None else limit_bytes)
                began_s = time.perf_counter()
                with on_error(self.ledger.leave, note):
                    try:
                        device.register(memory)
                    except PinError as error:
                        raise PinError(_explained(store, error)) from None
                took_s = time.perf_counter() - began_s
                _log.info("pinned %s, %.2f GB in %.2f s", store.path, store.nbytes / 1e9, took_s)
                held = self._held[address] = _Held(memory, device, note)
            held.users += 1
        return Pin(self, address, memory)

    def release(self, address: int) -> None:
        """Removes one user; the last one unregisters the segment."""
        with self._lock:
            if self._busy:
                self._released.append(address)
                return
            with self._at_work():
                self._remove_user(address)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        with self._lock:
            self._busy = True
            try:
                yield
            finally:
                try:
                    while self._released:
                        self._remove_user(self._released.pop())
                finally:
                    self._busy = False

    def _remove_user(self, address: int) -> None:
        held = self._held.get(address)
        if held is None or self._pid != os.getpid():
            return
        held.users -= 1
        if held.users == 0:
            del self._held[address]
            try:
                held.device.unregister(held.memory)
            finally:
                self.ledger.leave(held.note)


@dataclass
class _Held:
    memory: NDArray[np.uint8]
    device: Device
    note: int
    users: int = 0


class Pin:
    """One use of a registered segment."""

    def __init__(self, pins: Pins, address: int, memory: NDArray[np.uint8]) -> None:
        self._pins: Pins | None = pins
        self._address = address
        self.memory = memory

    def release(self) -> None:
        """Ends this use. The device's work on the memory must be complete."""
        pins, self._pins = self._pins, None
        if pins is not None:
            pins.release(self._address)


def _explained(store: MappedSegment, error: PinError) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = f"the segment of {store.name!r} ({store.nbytes / 1e9:.2f} GB, {store.path}) cannot be pinned: {error}."
    if soft != resource.RLIM_INFINITY and soft < store.nbytes:
        may = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard / 1e6:.0f} MB"
        text += (
            f" RLIMIT_MEMLOCK is {soft / 1e6:.0f} MB (at most {may}), less than that, and some drivers keep to it: "
            f"`ulimit -l unlimited`, or `--ulimit memlock=-1` for a container."
        )
    if not str(store.path).startswith("/dev/shm/"):
        text += (
            " Linux pins no pages of files on disks for long; only segments in memory (/dev/shm, or a GEARTRAIN_DIR "
            "that is a tmpfs) can be read in place."
        )
    return text + " path='staged' works without"


_pins: Pins | None = None


def pins() -> Pins:
    """The registrations of this process."""
    global _pins
    if _pins is None:
        _pins = Pins()
    return _pins


def about() -> dict[str, Any]:
    """Pinned bytes and segments of this host, and the limit."""
    entries = Ledger().entries()
    limit = min([default_limit(), *(one.limit_bytes for one in entries)])
    return {"pinned_bytes": _total(entries), "limit_bytes": limit, "segments": len({one.segment for one in entries})}


__all__ = ["Ledger", "Pin", "Pinned", "Pins", "about", "default_limit", "pins"]
