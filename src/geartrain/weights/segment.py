"""The bytes of a segment of weights, and who may touch which: this file is the format's manual.

    offset 0       HEADER         what the segment is; written once, before the segment has a name
           64      LAYOUT         how big a version is, where the buffers are; zeros until the first version
           128     HEAD [2]       the newest version and the one before it, in turns
           256     SIGNALS        words to sleep on
           320     SLOT [64]      what is in each buffer
           4096    schema         JSON: names, dtypes, shapes and offsets (schema.py)
    data_offset    buffer 0, buffer 1, ...   one version each, `stride` bytes apart, on pages of their own

A version becomes true with the one HEAD that names it. The HEADs are written in turns and carry a checksum, so a
publisher that is killed while it writes one leaves the other, and a reader that sees half of one sees that it is half.
The buffer of the newest version is never written to; nor is one that a reader holds.

Who holds what is known to the kernel: locks on bytes far beyond the file's end, which belong to an open file and go
with its last descriptor, however the process ends (native/base/file_lock.h has the same manners):

    PUBLISHER  exclusive   who publishes, from then on
    GATE       exclusive   for the moment of leaving, or of replacing the file
    MEMBERS    shared      everyone attached; who gets it exclusively was the last, and removes the name
    BUFFER + i shared      a snapshot of buffer i, on an open file of its own; exclusive: the publisher writes to it

A reader takes the lock of the buffer that the newest HEAD names and then looks into its SLOT: the sequence number must
be the same. A publisher that was faster holds the lock or has changed the SLOT, and the reader takes the next HEAD.
The locks also order the memory: the publisher drops the buffer's lock after the last byte and before the HEAD.

Sleepers wait on SIGNALS (a futex): `published` changes with every version, `released` with every snapshot let go.

A publisher whose weights have other names or shapes than those in the file makes a new file, and gives it the name
with its first version in it; `replaced` in the old one tells its readers to look again.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import geartrain.core.futex as futex
import geartrain.core.locks as locks
from geartrain.errors import (
    ArgumentError,
    GeartrainError,
    IncompatibleStoreError,
    LockTimeoutError,
    NoSpaceError,
    StoreMissingError,
)

MAGIC = b"GEARWGT\n"
FORMAT_VERSION = 1
MAX_BUFFERS = 64

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("format_version", "<u4"),
        ("header_bytes", "<u4"),
        ("segment_id", "V16"),  # random, to tell this file from others of the same name, and hosts from each other
        ("created_ns", "<u8"),  # wall clock
        ("reserved", "V20"),
        ("checksum", "<u4"),  # CRC-32 of the record up to here; the same in all of them
    ]
)
LAYOUT = np.dtype(
    [
        ("buffers", "<u4"),
        ("schema_checksum", "<u4"),
        ("schema_bytes", "<u8"),
        ("version_bytes", "<u8"),
        ("data_offset", "<u8"),
        ("stride", "<u8"),
        ("reserved", "V20"),
        ("checksum", "<u4"),
    ]
)
HEAD = np.dtype(
    [
        ("sequence", "<u8"),  # 1, 2, 3, ... in this file
        ("version", "<i8"),
        ("published_ns", "<u8"),  # wall clock
        ("buffer", "<u4"),
        ("reserved", "V32"),
        ("checksum", "<u4"),
    ]
)
SIGNALS = np.dtype([("published", "<u4"), ("released", "<u4"), ("replaced", "<u4"), ("reserved", "V52")])
SLOT = np.dtype([("sequence", "<u8"), ("version", "<i8"), ("reserved", "V12"), ("checksum", "<u4")])

_LAYOUT_AT, _HEADS_AT, _SIGNALS_AT, _SLOTS_AT, _SCHEMA_AT = 64, 128, 256, 320, 4096
assert HEADER.itemsize == LAYOUT.itemsize == HEAD.itemsize == SIGNALS.itemsize == 64
assert SLOT.itemsize == 32
assert _SLOTS_AT + MAX_BUFFERS * SLOT.itemsize <= _SCHEMA_AT

_PUBLISHER, _GATE, _MEMBERS, _BUFFER = 0, 1, 2, 16
#: Shared memory, where everybody on the host looks.
DIRECTORY = Path("/dev/shm")
_PREFIX = "geartrain-weights."
_MAP_NORESERVE = 0x4000


class Head(NamedTuple):
    """A version, and where it is."""

    sequence: int
    version: int
    published_ns: int
    buffer: int


def path_of(name: str, directory: Path) -> Path:
    """Where the weights of that name live. Raises `ArgumentError` for what is no name."""
    if not 0 < len(name) <= 200 or "/" in name or "\0" in name:
        raise ArgumentError(f"the name of weights has 1 to 200 characters and no slash, found {name[:210]!r}")
    return directory / f"{_PREFIX}{name}"


class Segment:
    """An open file of weights, of which this process is a member. The locks are those of this object's open file."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd, self.path = -1, path
        self._control = _map(fd, _SCHEMA_AT)
        self._bytes = np.frombuffer(self._control, np.uint8)
        self.signals = np.frombuffer(self._control, SIGNALS, 1, _SIGNALS_AT)[0]
        self._words = np.frombuffer(self._control, "<u4", 3, _SIGNALS_AT)
        self._memory: mmap.mmap | None = None
        header = self._record(HEADER, 0)
        size = os.fstat(fd).st_size
        if header is None or header["magic"] != MAGIC:
            raise IncompatibleStoreError(
                f"{path} ({size} bytes) holds no weights of geartrain's, or its header is damaged"
            )
        if header["format_version"] != FORMAT_VERSION or header["header_bytes"] != _SCHEMA_AT:
            raise IncompatibleStoreError(
                f"{path} has format {header['format_version']}; this build of geartrain reads {FORMAT_VERSION}"
            )
        self.id = header["segment_id"].tobytes()
        self.fd = fd  # closed by us from here on

    @classmethod
    def open(cls, name: str, directory: Path, *, create: bool = True) -> Segment:
        """The file of that name, made if there is none. Raises `FileNotFoundError` without `create`."""
        path = path_of(name, directory)
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                if not create:
                    raise
                made = cls.make(path)
                with contextlib.suppress(FileExistsError):  # somebody was faster
                    made.link()
                    return made
                made.close()
                continue
            if os.fstat(fd).st_size < _SCHEMA_AT:
                os.close(fd)
                raise IncompatibleStoreError(f"{path} is too small to hold weights of geartrain's")
            if not locks.take(fd, locks.SHARED, _MEMBERS) or not _is_at(fd, path):
                os.close(fd)  # its last member is removing it at this moment
                continue
            try:
                return cls(fd, path)
            except BaseException:
                os.close(fd)
                raise

    @classmethod
    def looking_at(cls, fd: int, path: Path) -> Segment:
        """Somebody else's open file, for `head` and `layout` only: not a member, and closes nothing."""
        segment = cls(fd, path)
        segment.fd = -1
        return segment

    @classmethod
    def make(cls, path: Path) -> Segment:
        """A new file without a name."""
        try:
            fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _no_space(path, _SCHEMA_AT, error) from error
        try:
            _allocate(fd, path, 0, _SCHEMA_AT)
            header = np.zeros((), HEADER)
            header["magic"], header["format_version"], header["header_bytes"] = MAGIC, FORMAT_VERSION, _SCHEMA_AT
            header["segment_id"], header["created_ns"] = np.void(secrets.token_bytes(16)), time.time_ns()
            os.pwrite(fd, _sealed(header), 0)
            locks.take(fd, locks.SHARED, _MEMBERS)
            return cls(fd, path)
        except BaseException:
            os.close(fd)
            raise

    def link(self) -> None:
        """Gives a new file its name. Raises `FileExistsError` when that is taken."""
        os.link(f"/proc/self/fd/{self.fd}", self.path, src_dir_fd=self.fd)

    def replace(self, old: Segment) -> None:
        """Takes the name of another file over, whose publisher this process is."""
        with old.gate():
            temporary = self.path.with_name(f"{self.path.name}.{secrets.token_hex(8)}.new")
            os.link(f"/proc/self/fd/{self.fd}", temporary, src_dir_fd=self.fd)
            temporary.rename(self.path)
        old.signals["replaced"] = 1
        old.wake_readers()

    # --- locks ------------------------------------------------------------------------------------------------------

    def become_publisher(self) -> bool:
        """Whether nobody else is."""
        return locks.take(self.fd, locks.EXCLUSIVE, _PUBLISHER)

    def stop_publishing(self) -> None:
        """Lets another one become the publisher."""
        locks.drop(self.fd, _PUBLISHER)

    def has_publisher(self) -> bool:
        """Whether some other open file has that lock: a process that lives."""
        return locks.is_taken(self.fd, _PUBLISHER)

    def claim(self, buffer: int) -> bool:
        """Takes a buffer to write to; False when a reader holds it. Nothing in it is true from here on."""
        if not locks.take(self.fd, locks.EXCLUSIVE, _BUFFER + buffer):
            return False
        self._put(np.zeros((), SLOT), _SLOTS_AT + buffer * SLOT.itemsize)
        return True

    def unclaim(self, buffer: int) -> None:
        """Leaves a buffer to readers, or to the next claim."""
        locks.drop(self.fd, _BUFFER + buffer)

    def hold(self, head: Head) -> int | None:
        """An open file that holds the buffer until its last descriptor is closed; None when the version is gone."""
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        if locks.take(fd, locks.SHARED, _BUFFER + head.buffer):
            slot = self._record(SLOT, _SLOTS_AT + head.buffer * SLOT.itemsize)
            if slot is not None and slot["sequence"] == head.sequence:
                return fd
        os.close(fd)
        return None

    def map(self, head: Head) -> mmap.mmap | None:
        """A version as a reader sees it, held for as long as it is mapped; None when the version is gone.

        The mapping is private: whoever writes to it all the same changes a copy of a page, of this snapshot alone.
        """
        fd = self.hold(head)
        if fd is None:
            return None
        try:
            layout = self.layout()
            return mmap.mmap(  # has a descriptor of its own, of the same open file
                fd,
                int(layout["stride"]),
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                offset=int(layout["data_offset"] + head.buffer * layout["stride"]),
            )
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def gate(self, timeout_s: float = 5.0) -> Iterator[None]:
        """Nobody leaves meanwhile. Raises `LockTimeoutError` when somebody is stopped inside."""
        if not locks.take(self.fd, locks.EXCLUSIVE, _GATE, timeout_s):
            raise LockTimeoutError(f"{self.path}: a process is leaving, and has been for {timeout_s} s")
        try:
            yield
        finally:
            locks.drop(self.fd, _GATE)

    def after_fork(self) -> None:
        """In a forked child: a membership of its own, and none of the parent's other locks."""
        try:
            mine = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return  # closed by another thread of the parent's at that moment
        os.dup2(mine, self.fd, inheritable=False)
        os.close(mine)
        locks.take(self.fd, locks.SHARED, _MEMBERS)

    def abandon(self) -> None:
        """In a forked child: drops the parent's locks from this process, which leave the parent's as they are."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def has_its_name(self) -> bool:
        """Whether others find this file, and not another or none."""
        return _is_at(self.fd, self.path)

    def close(self) -> None:
        """Leaves; the last one removes the name. Memory that is mapped stays until it is let go."""
        if self.fd < 0:
            return
        fd, self.fd = self.fd, -1
        try:
            inside = locks.take(fd, locks.EXCLUSIVE, _GATE, timeout_s=1.0)  # then somebody inside is stopped
            if inside and locks.take(fd, locks.EXCLUSIVE, _MEMBERS) and _is_at(fd, self.path):
                self.path.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, GeartrainError):
            self.close()

    # --- contents ---------------------------------------------------------------------------------------------------

    def head(self) -> Head | None:
        """The newest version; None before the first."""
        newest = None
        for i in range(2):
            record = self._record(HEAD, _HEADS_AT + i * HEAD.itemsize)
            if record is not None and (newest is None or record["sequence"] > newest["sequence"]):
                newest = record
        if newest is None:
            return None
        return Head(int(newest["sequence"]), int(newest["version"]), int(newest["published_ns"]), int(newest["buffer"]))

    def layout(self) -> Any:
        """The LAYOUT; None before the first version is begun."""
        return self._record(LAYOUT, _LAYOUT_AT)

    def schema(self) -> bytes:
        """The schema's JSON. Raises `IncompatibleStoreError` when it is not what was written."""
        layout = self.layout()
        schema = os.pread(self.fd, int(layout["schema_bytes"]), _SCHEMA_AT)
        if zlib.crc32(schema) != layout["schema_checksum"]:
            raise IncompatibleStoreError(f"the schema in {self.path} is damaged")
        return schema

    def lay_out(self, schema: bytes, version_bytes: int, buffers: int) -> None:
        """Says what a version is, before the first. Memory for a buffer is taken when it is first used."""
        layout = np.zeros((), LAYOUT)
        layout["buffers"], layout["version_bytes"] = buffers, version_bytes
        layout["schema_bytes"], layout["schema_checksum"] = len(schema), zlib.crc32(schema)
        layout["data_offset"] = data_offset = _pages(_SCHEMA_AT + len(schema))
        layout["stride"] = stride = max(mmap.PAGESIZE, _pages(version_bytes))
        os.ftruncate(self.fd, data_offset + buffers * stride)
        _allocate(self.fd, self.path, _SCHEMA_AT, data_offset - _SCHEMA_AT)
        os.pwrite(self.fd, schema, _SCHEMA_AT)
        self._put(layout, _LAYOUT_AT)

    def allocate(self, buffer: int) -> None:
        """Memory for a buffer, now: a full file system is an error here, and not a SIGBUS later."""
        layout = self.layout()
        _allocate(self.fd, self.path, int(layout["data_offset"] + buffer * layout["stride"]), int(layout["stride"]))

    def memory(self, buffer: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A buffer's bytes, for the publisher. The whole file is mapped once."""
        layout = self.layout()
        if self._memory is None:
            size = int(layout["data_offset"] + layout["buffers"] * layout["stride"])
            self._memory = _map(self.fd, size)
        start = int(layout["data_offset"] + buffer * layout["stride"])
        return np.frombuffer(self._memory, np.uint8, int(layout["version_bytes"]), start)

    @property
    def mapped(self) -> mmap.mmap | None:
        """What `memory` is a part of."""
        return self._memory

    def commit(self, buffer: int, version: int) -> Head:
        """Makes what was written into a claimed buffer the newest version, and wakes who waits for it."""
        before = self.head()
        head = Head(before.sequence + 1 if before else 1, version, time.time_ns(), buffer)
        slot = np.zeros((), SLOT)
        slot["sequence"], slot["version"] = head.sequence, version
        self._put(slot, _SLOTS_AT + buffer * SLOT.itemsize)
        self.unclaim(buffer)
        record = np.zeros((), HEAD)
        record["sequence"], record["version"], record["published_ns"], record["buffer"] = head
        self._put(record, _HEADS_AT + head.sequence % 2 * HEAD.itemsize)
        self.wake_readers()
        return head

    # --- signals ----------------------------------------------------------------------------------------------------

    def wake_readers(self) -> None:
        """A version is there, or the file was replaced."""
        self._words[0] += 1
        futex.wake(self._words[0:])

    def wake_publisher(self) -> None:
        """A buffer was let go. The word need not count, only change."""
        self._words[1] = time.monotonic_ns() & 0xFFFFFFFF
        futex.wake(self._words[1:])

    def published(self) -> int:
        """The word to wait on."""
        return int(self._words[0])

    def wait_published(self, seen: int, timeout_s: float) -> None:
        """Sleeps until the word is no longer `seen`, or for that long."""
        futex.wait(self._words[0:], seen, timeout_s)

    def released(self) -> int:
        """The word to wait on."""
        return int(self._words[1])

    def wait_released(self, seen: int, timeout_s: float) -> None:
        """Sleeps until the word is no longer `seen`, or for that long."""
        futex.wait(self._words[1:], seen, timeout_s)

    # --- records ----------------------------------------------------------------------------------------------------

    def _record(self, dtype: np.dtype[Any], at: int) -> Any:
        raw = self._bytes[at : at + dtype.itemsize].tobytes()
        (checksum,) = struct.unpack_from("<I", raw, len(raw) - 4)
        if zlib.crc32(raw[:-4]) != checksum or not any(raw):
            return None
        return np.frombuffer(raw, dtype)[0]

    def _put(self, record: Any, at: int) -> None:
        raw = _sealed(record)
        self._bytes[at : at + len(raw)] = np.frombuffer(raw, np.uint8)


class Described(NamedTuple):
    """What can be seen of weights from outside, without becoming one of their processes."""

    name: str
    version: int | None  # the newest; None before the first
    published_ns: int  # its time, by the wall clock
    version_bytes: int
    buffers: int
    file_bytes: int  # memory taken
    published: int  # versions since the file was made
    has_publisher: bool  # a process that lives
    in_use: bool  # by any process that lives


def describe(name: str, directory: str | Path = DIRECTORY) -> Described:
    """Weights as they are now; leaves no trace.

    Raises:
        StoreMissingError: there are none of that name on this host.
        IncompatibleStoreError: the file is something else.
    """
    path = path_of(name, Path(directory))
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise StoreMissingError(f"there are no weights {name!r} on this host: {path} is missing") from None
    try:
        status = os.fstat(fd)
        if status.st_size < _SCHEMA_AT:
            raise IncompatibleStoreError(f"{path} is too small to hold weights of geartrain's")
        segment = Segment.looking_at(fd, path)
        head, layout = segment.head(), segment.layout()
        return Described(
            name=name,
            version=None if head is None else head.version,
            published_ns=0 if head is None else head.published_ns,
            version_bytes=0 if layout is None else int(layout["version_bytes"]),
            buffers=0 if layout is None else int(layout["buffers"]),
            file_bytes=status.st_blocks * 512,
            published=0 if head is None else head.sequence,
            has_publisher=locks.is_taken(fd, _PUBLISHER),
            in_use=locks.is_taken(fd, _MEMBERS),
        )
    finally:
        os.close(fd)


def names(directory: str | Path = DIRECTORY) -> list[str]:
    """Of all weights on this host."""
    found = (path.name.removeprefix(_PREFIX) for path in Path(directory).glob(f"{_PREFIX}*"))
    return sorted(name for name in found if not name.endswith(".new"))


def unlink(name: str, directory: str | Path = DIRECTORY) -> None:
    """Takes the name away. Processes that use the weights keep them; a publisher that starts makes new ones."""
    path_of(name, Path(directory)).unlink(missing_ok=True)


def reap(directory: str | Path = DIRECTORY) -> list[str]:
    """Removes the weights that nobody is attached to any more: their processes were killed. Returns their names."""
    removed = []
    for path in Path(directory).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if locks.take(fd, locks.EXCLUSIVE, _MEMBERS) and _is_at(fd, path):
                    path.unlink()
                    removed.append(path.name.removeprefix(_PREFIX))
            finally:
                os.close(fd)
    return sorted(removed)


def _sealed(record: Any) -> bytes:
    raw: bytes = record.tobytes()[:-4]
    return raw + struct.pack("<I", zlib.crc32(raw))


def _map(fd: int, size: int) -> mmap.mmap:
    """The file in memory. A mapping keeps a descriptor: it must not be one of the open file that has our locks."""
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(other, size)
    finally:
        os.close(other)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _allocate(fd: int, path: Path, offset: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, offset, size)
    except OSError as error:
        raise _no_space(path, size, error) from error


def _no_space(path: Path, size: int, error: OSError) -> Exception:
    if error.errno != errno.ENOSPC:
        return error
    free = os.statvfs(path.parent)
    return NoSpaceError(
        f"a buffer of {path.name} needs {size / 2**20:.1f} MiB, but {path.parent} has "
        f"{free.f_bavail * free.f_frsize / 2**20:.1f} MiB free. Let snapshots go, remove what dead runs left "
        "(geartrain.weights.reap()), or enlarge it (mount -o remount,size=...; docker run --shm-size=...)"
    )
