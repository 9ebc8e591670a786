"""A segment of weights: the shared-memory file that a publisher writes and readers map.

format.py documents its bytes.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import geartrain.core.futex as futex
import geartrain.core.locks as locks
from geartrain.core.arguments import did_you_mean, some_of
from geartrain.core.lifetime import on_error
from geartrain.core.shared_files import (
    Trust,
    cannot_make,
    check_trust,
    leftovers,
    naming_errors,
    open_shared,
    share_with,
    shared_files,
)
from geartrain.errors import (
    CorruptStoreError,
    GeartrainError,
    IncompatibleStoreError,
    LockTimeoutError,
    NoSpaceError,
    StoreMissingError,
)
from geartrain.weights.format import (
    BUFFER,
    FORMAT_VERSION,
    GATE,
    HEAD,
    HEADER,
    HEADS_AT,
    LAYOUT,
    LAYOUT_AT,
    MAGIC,
    MAX_BUFFERS,
    MEMBERS,
    PREFIX,
    PUBLISHER,
    SCHEMA_AT,
    SIGNALS,
    SIGNALS_AT,
    SLOT,
    SLOTS_AT,
    Head,
    directory_of,
    path_of,
    seal,
    unseal,
)

_MAP_NORESERVE = 0x4000


class WeightsSegment:
    """An open file of weights that this process is attached to. Its locks belong to this object's open file."""

    fd = -1  # of one that was never made

    def __init__(self, fd: int, path: Path, trust: Trust = "user") -> None:
        self.fd, self.path, self.trust = -1, path, trust
        self._control = _map(fd, path, SCHEMA_AT)
        self._bytes = np.frombuffer(self._control, np.uint8)
        self.signals = np.frombuffer(self._control, SIGNALS, 1, SIGNALS_AT)[0]
        self._words = np.frombuffer(self._control, "<u4", 3, SIGNALS_AT)
        self._memory: mmap.mmap | None = None
        header = self._record(HEADER, 0)
        size = os.fstat(fd).st_size
        if header is None or header["magic"] != MAGIC:
            raise IncompatibleStoreError(f"{path} ({size} bytes) is no segment of weights, or its header is damaged")
        if header["format_version"] != FORMAT_VERSION or header["header_bytes"] != SCHEMA_AT:
            raise IncompatibleStoreError(
                f"{path} has format {header['format_version']}; this build of geartrain reads {FORMAT_VERSION}"
            )
        self.id = header["segment_id"].tobytes()
        self.fd = fd  # this object closes it from here on

    @classmethod
    def open(cls, name: str, directory: Path, *, create: bool = True, trust: Trust = "user") -> WeightsSegment:
        """Attaches to the file of that name; creates it if there is none, or raises `FileNotFoundError`.

        Raises:
            UntrustedStoreError: others than `trust` says may write to it. IncompatibleStoreError: it is something else.
        """
        path = path_of(name, directory)
        while True:
            try:
                fd = open_shared(path, trust=trust)
            except FileNotFoundError:
                if not create:
                    raise
                made = cls.make(path, trust)
                with contextlib.suppress(FileExistsError), on_error(made.close):  # another process was faster
                    made.link()
                    return made
                continue
            if os.fstat(fd).st_size < SCHEMA_AT:
                os.close(fd)
                raise IncompatibleStoreError(f"{path} is too small to be a segment of weights")
            if not locks.take(fd, locks.SHARED, MEMBERS) or not _is_at(fd, path):
                os.close(fd)  # the last attached process is removing it
                continue
            with on_error(os.close, fd):
                segment = cls(fd, path, trust)
            if segment.signals["replaced"] and segment.has_its_name():  # or every process would look for another one
                raise CorruptStoreError(f"{path} is damaged: it says that it was replaced, and has its name")
            return segment

    @classmethod
    def viewing(cls, fd: int, path: Path) -> WeightsSegment:
        """A view of an open file, for `head` and `layout` only: does not attach, and closes nothing."""
        segment = cls(fd, path)
        segment.fd = -1
        return segment

    @classmethod
    def make(cls, path: Path, trust: Trust = "user") -> WeightsSegment:
        """A new file without a name."""
        try:
            fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except (FileNotFoundError, NotADirectoryError):
            raise StoreMissingError(f"weights live in a directory that is there: {path.parent} is none") from None
        except OSError as error:
            raise _no_space(path, SCHEMA_AT, error) from error
        with on_error(os.close, fd):
            share_with(fd, trust)
            _allocate(fd, path, 0, SCHEMA_AT)
            header = np.zeros((), HEADER)
            header["magic"], header["format_version"], header["header_bytes"] = MAGIC, FORMAT_VERSION, SCHEMA_AT
            header["segment_id"], header["created_ns"] = np.void(secrets.token_bytes(16)), time.time_ns()
            with _naming_errors(path):
                os.pwrite(fd, seal(header), 0)
            locks.take(fd, locks.SHARED, MEMBERS)
            return cls(fd, path, trust)

    def link(self) -> None:
        """Gives a new file its name.

        Raises:
            FileExistsError: the name is taken. StoreIOError, NoSpaceError: the directory takes no file.
        """
        try:
            os.link(f"/proc/self/fd/{self.fd}", self.path, src_dir_fd=self.fd)
        except FileExistsError:
            raise
        except OSError as error:
            raise cannot_make(self.path, error, SCHEMA_AT) from error

    def replace(self, old: WeightsSegment) -> None:
        """Takes the name of another file, whose publisher is this process."""
        with old.gate(), _naming_errors(self.path):
            temporary = self.path.with_name(f"{self.path.name}.{secrets.token_hex(8)}.new")
            try:
                os.link(f"/proc/self/fd/{self.fd}", temporary, src_dir_fd=self.fd)
                temporary.rename(self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise
        old.signals["replaced"] = 1
        old.wake_readers()

    # --- locks ------------------------------------------------------------------------------------------------------

    def become_publisher(self) -> bool:
        """Takes the publisher's lock; False when another open file has it."""
        return locks.take(self.fd, locks.EXCLUSIVE, PUBLISHER)

    def has_publisher(self) -> bool:
        """Whether another open file has the publisher's lock, and so its process is alive."""
        return locks.is_taken(self.fd, PUBLISHER)

    def claim(self, buffer: int) -> bool:
        """Locks a buffer to write to, and invalidates its contents; False when a reader holds it."""
        if not locks.take(self.fd, locks.EXCLUSIVE, BUFFER + buffer):
            return False
        self._put(np.zeros((), SLOT), SLOTS_AT + buffer * SLOT.itemsize)
        return True

    def unclaim(self, buffer: int) -> None:
        """Unlocks a buffer for readers, or for the next claim."""
        locks.drop(self.fd, BUFFER + buffer)

    def hold(self, head: Head) -> int | None:
        """An open file that holds the buffer until its last descriptor is closed; None for an overwritten version."""
        with _naming_errors(self.path):
            fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        if locks.take(fd, locks.SHARED, BUFFER + head.buffer):
            slot = self._record(SLOT, SLOTS_AT + head.buffer * SLOT.itemsize)
            if slot is not None and slot["sequence"] == head.sequence:
                return fd
        os.close(fd)
        return None

    def map(self, head: Head) -> mmap.mmap | None:
        """Maps a version for reading, and holds it for as long as it is mapped; None when it was overwritten.

        The mapping is private: a write changes a copy of a page, for this snapshot alone.
        """
        fd = self.hold(head)
        if fd is None:
            return None
        try:
            layout = self.layout()
            if layout is None or head.buffer >= layout["buffers"]:
                raise CorruptStoreError(f"{self.path} is damaged: its newest version is in buffer {head.buffer}")
            with _naming_errors(self.path):
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
        """A block in which no process detaches. Raises `LockTimeoutError` if a stopped process holds the lock."""
        if not locks.take(self.fd, locks.EXCLUSIVE, GATE, timeout_s):
            raise LockTimeoutError(f"{self.path}: another process has held the lock for detaching for {timeout_s} s")
        try:
            yield
        finally:
            locks.drop(self.fd, GATE)

    def after_fork(self) -> None:
        """In a forked child: attaches it, without the parent's other locks."""
        try:
            mine = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return  # another thread of the parent was closing it
        os.dup2(mine, self.fd, inheritable=False)
        os.close(mine)
        locks.take(self.fd, locks.SHARED, MEMBERS)

    def abandon(self) -> None:
        """In a forked child: closes the inherited descriptor; the parent keeps its locks."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def has_its_name(self) -> bool:
        """Whether the path still leads to this file."""
        return _is_at(self.fd, self.path)

    def close(self) -> None:
        """Detaches; the last process removes the name. Mapped memory stays until it is unmapped."""
        fd, self.fd = self.fd, -1  # first: a signal's handler may close it, too
        if fd < 0:
            return
        try:
            locked = locks.take(fd, locks.EXCLUSIVE, GATE, timeout_s=1.0)  # False where a stopped process has it
            if locked and locks.take(fd, locks.EXCLUSIVE, MEMBERS) and _is_at(fd, self.path):
                with contextlib.suppress(OSError):  # another user's: it stays, without a process, until `reap`
                    self.path.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, GeartrainError):
            self.close()

    # --- contents ---------------------------------------------------------------------------------------------------

    def head(self) -> Head | None:
        """The newest version; None before the first. Raises `CorruptStoreError`."""
        newest = None
        for i in range(2):
            record = self._record(HEAD, HEADS_AT + i * HEAD.itemsize)
            if record is not None and (newest is None or record["sequence"] > newest["sequence"]):
                newest = record
        if newest is None:
            return None
        if newest["buffer"] >= MAX_BUFFERS:
            raise CorruptStoreError(f"{self.path} is damaged: its newest version is in buffer {newest['buffer']}")
        return Head(int(newest["sequence"]), int(newest["version"]), int(newest["published_ns"]), int(newest["buffer"]))

    def layout(self) -> Any:
        """The LAYOUT record; None before the first version.

        Raises:
            CorruptStoreError: the file is not as long as its schema and versions need; whoever maps it would crash.
        """
        layout = self._record(LAYOUT, LAYOUT_AT)
        if layout is None:
            return None
        buffers, schema_bytes, version_bytes = (
            int(layout[key]) for key in ("buffers", "schema_bytes", "version_bytes")
        )
        data_offset, stride = _pages(SCHEMA_AT + schema_bytes), max(mmap.PAGESIZE, _pages(version_bytes))
        size = self._control.size()  # of the file
        if (
            not 2 <= buffers <= MAX_BUFFERS
            or (int(layout["data_offset"]), int(layout["stride"])) != (data_offset, stride)
            or size < data_offset + buffers * stride
        ):
            raise CorruptStoreError(f"{self.path} is damaged: {size} bytes do not hold what its layout promises")
        return layout

    def schema(self) -> bytes:
        """The schema's JSON. Raises `IncompatibleStoreError` when its checksum is wrong."""
        layout = self.layout()
        if layout is None:
            raise CorruptStoreError(f"{self.path} is damaged: it has a version, and no layout")
        with _naming_errors(self.path):
            schema = os.pread(self.fd, int(layout["schema_bytes"]), SCHEMA_AT)
        if zlib.crc32(schema) != layout["schema_checksum"]:
            raise IncompatibleStoreError(f"the schema in {self.path} is damaged")
        return schema

    def lay_out(self, schema: bytes, version_bytes: int, buffers: int) -> None:
        """Writes schema and LAYOUT before the first version. Memory for a buffer is allocated when it is first used."""
        layout = np.zeros((), LAYOUT)
        layout["buffers"], layout["version_bytes"] = buffers, version_bytes
        layout["schema_bytes"], layout["schema_checksum"] = len(schema), zlib.crc32(schema)
        layout["data_offset"] = data_offset = _pages(SCHEMA_AT + len(schema))
        layout["stride"] = stride = max(mmap.PAGESIZE, _pages(version_bytes))
        with _naming_errors(self.path):
            os.ftruncate(self.fd, data_offset + buffers * stride)
            _allocate(self.fd, self.path, SCHEMA_AT, data_offset - SCHEMA_AT)
            os.pwrite(self.fd, schema, SCHEMA_AT)
        self._put(layout, LAYOUT_AT)

    def allocate(self, buffer: int) -> None:
        """Allocates a buffer's memory now: a full file system is an error here, and not a SIGBUS later."""
        layout = self.layout()
        _allocate(self.fd, self.path, int(layout["data_offset"] + buffer * layout["stride"]), int(layout["stride"]))

    def memory(self, buffer: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A buffer's bytes, for the publisher. The whole file is mapped once."""
        layout = self.layout()
        if self._memory is None:
            size = int(layout["data_offset"] + layout["buffers"] * layout["stride"])
            self._memory = _map(self.fd, self.path, size)
        start = int(layout["data_offset"] + buffer * layout["stride"])
        return np.frombuffer(self._memory, np.uint8, int(layout["version_bytes"]), start)

    @property
    def mapped(self) -> mmap.mmap | None:
        """The mapping that `memory` returns views of."""
        return self._memory

    def commit(self, buffer: int, version: int) -> Head:
        """Publishes a claimed buffer as the newest version, and wakes readers that wait for it."""
        before = self.head()
        head = Head(before.sequence + 1 if before else 1, version, time.time_ns(), buffer)
        slot = np.zeros((), SLOT)
        slot["sequence"], slot["version"] = head.sequence, version
        self._put(slot, SLOTS_AT + buffer * SLOT.itemsize)
        self.unclaim(buffer)
        record = np.zeros((), HEAD)
        record["sequence"], record["version"], record["published_ns"], record["buffer"] = head
        self._put(record, HEADS_AT + head.sequence % 2 * HEAD.itemsize)
        self.wake_readers()
        return head

    # --- signals ----------------------------------------------------------------------------------------------------

    def wake_readers(self) -> None:
        """Wakes readers: a version was published, or the file was replaced."""
        self._words[0] += 1
        futex.wake(self._words[0:])

    def wake_publisher(self) -> None:
        """Wakes the publisher: a buffer was released. The word only has to change."""
        self._words[1] = time.monotonic_ns() & 0xFFFFFFFF
        futex.wake(self._words[1:])

    def published(self) -> int:
        """The futex word to wait on."""
        return int(self._words[0])

    def wait_published(self, seen: int, timeout_s: float) -> None:
        """Sleeps until the word is no longer `seen`, or for that long."""
        futex.wait(self._words[0:], seen, timeout_s)

    def released(self) -> int:
        """The futex word to wait on."""
        return int(self._words[1])

    def wait_released(self, seen: int, timeout_s: float) -> None:
        """Sleeps until the word is no longer `seen`, or for that long."""
        futex.wait(self._words[1:], seen, timeout_s)

    # --- records ----------------------------------------------------------------------------------------------------

    def _record(self, dtype: np.dtype[Any], at: int) -> Any:
        return unseal(self._bytes[at : at + dtype.itemsize].tobytes(), dtype)

    def _put(self, record: Any, at: int) -> None:
        raw = seal(record)
        self._bytes[at : at + len(raw)] = np.frombuffer(raw, np.uint8)


class WeightsInfo(NamedTuple):
    """State of weights, read without attaching to them. `describe` returns it.

    Attributes:
        name: name of the weights.
        version: newest version; None before the first.
        published_ns: wall clock of its publication, in ns.
        version_bytes: bytes of one version.
        buffers: versions that fit.
        file_bytes: memory that is allocated.
        published: versions since the file was made.
        has_publisher: whether a publisher is alive.
        in_use: whether a living process is attached.
    """

    name: str
    version: int | None  # the newest; None before the first
    published_ns: int  # wall clock
    version_bytes: int
    buffers: int
    file_bytes: int  # memory allocated
    published: int  # versions since the file was made
    has_publisher: bool  # and it is alive
    in_use: bool  # a living process is attached


def describe(name: str, directory: str | Path | None = None, *, trust: Trust = "user") -> WeightsInfo:
    """State of weights, without attaching to them.

    Args:
        name: name of the weights.
        directory, trust: as for `Publisher`.

    Raises:
        StoreMissingError: this host has no weights of that name.
        IncompatibleStoreError: the file of that name is not one of weights.
        UntrustedStoreError: more users may write to the file than `trust` says.

    Examples:
        >>> import numpy as np
        >>> from geartrain import weights
        >>> with weights.Publisher("doc-describe") as publisher:
        ...     publisher.publish(7, {"w": np.ones(3, np.float32)})
        ...     state = weights.describe("doc-describe")  # WeightsInfo
        ...     "doc-describe" in weights.names()
        True
        >>> state.version, state.has_publisher
        (7, True)
    """
    path = path_of(name, directory_of(directory))
    try:
        fd = open_shared(path, trust=check_trust(trust))
    except FileNotFoundError:
        there = _named(leftovers(f"{PREFIX}*", directory_of(directory)))
        raise StoreMissingError(
            f"there are no weights {name!r} on this host: {path} is missing; there are {some_of(there)}"
            f"{did_you_mean(name, there)}"
        ) from None
    try:
        status = os.fstat(fd)
        if status.st_size < SCHEMA_AT:
            raise IncompatibleStoreError(f"{path} is too small to be a segment of weights")
        segment = WeightsSegment.viewing(fd, path)
        head, layout = segment.head(), segment.layout()
        return WeightsInfo(
            name=name,
            version=None if head is None else head.version,
            published_ns=0 if head is None else head.published_ns,
            version_bytes=0 if layout is None else int(layout["version_bytes"]),
            buffers=0 if layout is None else int(layout["buffers"]),
            file_bytes=status.st_blocks * 512,
            published=0 if head is None else head.sequence,
            has_publisher=locks.is_taken(fd, PUBLISHER),
            in_use=locks.is_taken(fd, MEMBERS),
        )
    finally:
        os.close(fd)


def names(directory: str | Path | None = None) -> list[str]:
    """Names of all weights on this host.

    Args:
        directory: as for `Publisher`.
    """
    return _named(shared_files(f"{PREFIX}*", directory_of(directory)))


def _named(paths: list[Path]) -> list[str]:
    found = (path.name.removeprefix(PREFIX) for path in paths)
    return sorted(name for name in found if not name.endswith(".new"))


def unlink(name: str, directory: str | Path | None = None) -> None:
    """Removes the name of weights, if it exists. Attached processes keep them; a new publisher makes a new segment.

    Args:
        name: name of the weights.
        directory: as for `Publisher`.

    Examples:
        >>> import numpy as np
        >>> from geartrain import weights
        >>> with weights.Publisher("doc-unlink") as publisher:
        ...     publisher.publish(1, {"w": np.ones(3, np.float32)})
        ...     weights.unlink("doc-unlink")
        >>> "doc-unlink" in weights.names()
        False
    """
    path_of(name, directory_of(directory)).unlink(missing_ok=True)


def reap(directory: str | Path | None = None) -> list[str]:
    """Removes weights whose processes were all killed; returns their names.

    Args:
        directory: as for `Publisher`.

    Examples:
        >>> from geartrain import weights
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     weights.reap(folder)  # nothing was left behind
        []
    """
    removed = []
    for path in shared_files(f"{PREFIX}*", directory_of(directory)):
        with contextlib.suppress(GeartrainError, OSError):  # another user's, or removed meanwhile
            fd = open_shared(path)
            try:
                if locks.take(fd, locks.EXCLUSIVE, MEMBERS) and _is_at(fd, path):
                    path.unlink()
                    removed.append(path.name.removeprefix(PREFIX))
            finally:
                os.close(fd)
    return sorted(removed)


def _naming_errors(path: Path) -> contextlib.AbstractContextManager[None]:
    return naming_errors("cannot use the weights", path)


def _map(fd: int, path: Path, size: int) -> mmap.mmap:
    """The file in memory. A mapping keeps a descriptor: it must not be one of the open file that has our locks."""
    with _naming_errors(path):
        other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(other, size)
        finally:
            os.close(other)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
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
    free = os.statvfs(path.parent)
    if error.errno != errno.ENOSPC or (free.f_files and not free.f_favail):
        return cannot_make(path, error, size)
    return NoSpaceError(
        f"a buffer of {path.name} needs {size / 2**20:.1f} MiB, but {path.parent} has "
        f"{free.f_bavail * free.f_frsize / 2**20:.1f} MiB free. Release snapshots, remove what killed processes "
        "have left (geartrain.weights.reap()), enlarge it (mount -o remount,size=...; docker run --shm-size=...), or "
        "set GEARTRAIN_DIR to a directory of a larger file system for all processes"
    )
