"""`Reader` and `Snapshot`: the actors' side of the distribution of weights."""

from __future__ import annotations

import importlib
import mmap
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import geartrain._native as _native
from geartrain.core.arguments import check_text, check_whole, timeout
from geartrain.core.lifetime import Lifetime, on_error
from geartrain.core.process_report import register
from geartrain.core.shared_files import Trust, check_trust
from geartrain.errors import ArgumentError, CorruptStoreError, GeartrainError, WaitTimeoutError
from geartrain.weights.format import Head, directory_of
from geartrain.weights.layout import Schema, nested
from geartrain.weights.relay import Follower
from geartrain.weights.segment import WeightsSegment
from geartrain.weights.server import check_node

if TYPE_CHECKING:
    from geartrain.rpc import Node


#: Period of a sleeping reader's check whether its file still has the name.
_CHECK_EVERY_S = 5.0


class Snapshot(Mapping[str, Any]):
    """One version of the weights: a mapping like the published one, whose values are views of shared memory.

    While the snapshot or a tensor of it is alive, the version does not change, and its buffer is not reused. Release it
    (`del`) after the next `latest`.

    Args:
        version: number of the version.
        published_ns: wall clock of its publication, in ns.
        weights: the views by name; set by `Reader.latest`, which makes the object.
    """

    def __init__(self, version: int, published_ns: int, weights: dict[str, Any]) -> None:
        self.version = version
        self.published_ns = published_ns  # wall clock, of the host's publisher or relay
        self._weights = weights

    def __getitem__(self, name: str) -> Any:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def copy(self) -> dict[str, Any]:
        """A plain dict of the same views."""
        return dict(self._weights)

    def __repr__(self) -> str:
        return f"<Snapshot of version {self.version}, {len(self)} names>"


class Reader(Lifetime, at_exit=True, inherited=True, elsewhere="make another one there, by the name of the weights"):
    """Reads the newest weights of a name on this host.

    Any thread may use a reader. Any thread may also close it, more than once and during `latest`, which then ends with
    `StoreClosedError`. Snapshots stay valid after that. A forked child has a reader of its own, which is never the
    relay. The interpreter closes the reader at exit.

    Examples:
        >>> import numpy as np
        >>> from geartrain.weights import Publisher
        >>> with Publisher("doc-reader") as publisher, Reader("doc-reader") as reader:
        ...     publisher.publish(7, {"w": np.ones(3, np.float32)})
        ...     snapshot = reader.latest(timeout_s=5)  # a Snapshot
        >>> snapshot.version, list(snapshot)
        (7, ['w'])
    """

    def __init__(
        self,
        name: str,
        *,
        node: Node | None = None,
        source: str | None = None,
        timeout_s: float = 30.0,
        directory: str | Path | None = None,
        trust: Trust = "user",
    ) -> None:
        """Attaches to the weights. The publisher may start later.

        Args:
            name: name of the weights.
            node: this process's `geartrain.rpc` node, if the publisher may be on another host.
            source: node name of the publisher, or of a relay. One process of each host then fetches new versions for
                all others; if it dies, another one does.
            timeout_s: default of `latest`, 0 (does not wait) to 1e9 seconds.
            directory: as for the publisher.
            trust: as for the publisher. A file that more users may write to is not opened.

        Raises:
            ArgumentError: only one of `node` and `source` was given, or an argument is out of range.
            IncompatibleStoreError: the file of that name is not one of weights.
            UntrustedStoreError: more users may write to the file than `trust` says, or it is a symbolic link.
        """
        if (node is None) != (source is None):
            raise ArgumentError("to follow a publisher on another host a reader needs both, node= and source=")
        if node is not None:
            check_node(node)
            check_text("source", source)
        super().__init__(f"the reader of {name!r}")
        self.name, self.timeout_s = name, timeout(timeout_s)
        self._directory = directory_of(directory)
        self._trust = check_trust(trust)
        self._segment = WeightsSegment.open(name, self._directory, trust=self._trust)
        self._schema: Schema | None = None
        self._current: weakref.ref[Snapshot] | None = None
        self._current_head: Head | None = None
        self._lock = threading.RLock()  # a signal's handler may come in between, in the same thread, and close
        self._follower: Follower | None = None
        self._begin()
        with on_error(self.close):  # no more threads
            if node is not None and source is not None:
                self._follower = Follower(name, node, source, self._directory, self._trust)
                weakref.finalize(self, self._follower.stop)
            register(self, "reader", _figures)

    def latest(self, *, at_least: int | None = None, timeout_s: float | None = None) -> Snapshot:
        """Snapshot of the newest version. Waits until there is a version, and until it is at least `at_least`.

        While the version stays the same and its snapshot is alive, `latest` returns the same snapshot.

        Args:
            at_least: lowest version to return; any by default.
            timeout_s: longest wait, in seconds; the reader's by default.

        Raises:
            WaitTimeoutError: no such version in time. The message says which version is there, and whether a publisher
                is alive.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout(timeout_s)
        _native.sleep_at_finalization()
        if at_least is not None:
            at_least = check_whole("at_least", at_least)
        until_s = time.monotonic() + limit_s
        while True:
            with self._lock:
                self._check_open()
                segment = self._segment
                seen = segment.published()
                try:
                    snapshot = self._newest(at_least)
                except (GeartrainError, OSError, ValueError):
                    self._check_open()  # a signal's handler has closed it meanwhile
                    raise
                if snapshot is not None:
                    return snapshot
                if self._segment is not segment:
                    continue
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise WaitTimeoutError(self._why_not(at_least, limit_s))
            segment.wait_published(seen, min(left_s, _CHECK_EVERY_S))

    @property
    def version(self) -> int | None:
        """Number of the newest version, without holding it; None before the first."""
        with self._lock:
            self._check_open()
            self._renew()
            head = self._segment.head()
        return None if head is None else head.version

    @property
    def is_relay(self) -> bool:
        """Whether this process fetches the weights for its host."""
        return self._follower is not None and self._follower.is_relay

    def close(self) -> None:
        """Detaches. Snapshots stay valid."""
        if self._follower is not None:
            self._follower.close()
        with self._lock:
            self._end()
            self._segment.wake_readers()  # threads that wait in `latest` find it closed
            self._segment.close()

    # --- snapshots --------------------------------------------------------------------------------------------------

    def _newest(self, at_least: int | None) -> Snapshot | None:
        last: Head | None = None
        tries = 0  # with the same head: the publisher never writes to the buffer that it names
        for _ in range(10_000):
            self._renew()
            head = self._segment.head()
            tries, last = tries + 1 if head == last else 0, head
            if tries == 100:
                break
            if head is None or (at_least is not None and head.version < at_least):
                return None
            if head == self._current_head and self._current is not None:
                snapshot = self._current()
                if snapshot is not None:
                    return snapshot
            mapped = self._segment.map(head)
            if mapped is not None:
                return self._snapshot(head, mapped)
            # The publisher has published twice since the head was read.
        raise CorruptStoreError(f"{self._segment.path}: the buffer that its head names has another version")

    def _renew(self) -> None:
        # A publisher that died between renaming a new file and setting `replaced` has not set it.
        while self._segment.signals["replaced"] or not (self._segment.has_publisher() or self._segment.has_its_name()):
            self._segment.close()
            self._segment = WeightsSegment.open(self.name, self._directory, trust=self._trust)
            self._schema = self._current = self._current_head = None

    def _snapshot(self, head: Head, mapped: mmap.mmap) -> Snapshot:
        hold = _Hold(self._segment, mapped)
        if self._schema is None:
            schema = Schema.from_json(self._segment.schema())
            if schema.nbytes > len(mapped):
                raise CorruptStoreError(f"{self._segment.path} is damaged: its schema does not fit into a version")
            self._schema = schema
        memory = np.asarray(hold)
        values = list(_read_only(self._schema, memory))
        weights = nested([entry.path for entry in self._schema.entries], values)
        snapshot = Snapshot(head.version, head.published_ns, weights)
        snapshot._hold = hold  # type: ignore[attr-defined]  # also where no tensor has any bytes
        self._current, self._current_head = weakref.ref(snapshot), head
        return snapshot

    def _why_not(self, at_least: int | None, limit_s: float) -> str:
        found = self._segment.head()
        there = "no version was published" if found is None else f"the newest version is {found.version}"
        wanted = "" if at_least is None else f", and {at_least} was requested"
        who = "its publisher is alive" if self._segment.has_publisher() else "no publisher of it is alive on this host"
        why = f"; {self._follower.state}" if self._follower is not None else ""
        return f"weights {self.name!r}: {there}{wanted}, within {limit_s} s; {who}{why}"

    def _after_fork(self) -> None:
        # Attaches the child. Snapshots stay, and are held until both processes release them.
        self._lock = threading.RLock()
        self._segment.after_fork()
        if self._follower is not None:
            self._follower.after_fork()


class _Hold:
    """A held buffer as a NumPy array. Views keep the buffer held, and the last view releases it."""

    def __init__(self, segment: WeightsSegment, mapped: mmap.mmap) -> None:
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        self.__array_interface__ = {"data": (address, False), "shape": (len(mapped),), "typestr": "|u1", "version": 3}
        release = weakref.finalize(self, _release, mapped, segment)
        release.atexit = False  # a daemon thread may be reading it then; the kernel releases it with the process


def _release(mapped: mmap.mmap, segment: WeightsSegment) -> None:
    mapped.close()  # and its descriptor; a forked child may have another, and then the buffer stays held
    segment.wake_publisher()


def _read_only(schema: Schema, memory: Any) -> Iterator[Any]:
    if any(entry.is_torch for entry in schema.entries):
        torch = importlib.import_module("torch")
        with torch.inference_mode():  # torch refuses to change such tensors in place
            values = list(schema.views(memory))
    else:
        values = list(schema.views(memory))
    for value in values:
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
        yield value


def _figures(reader: Reader) -> dict[str, Any]:
    """For the process's report: the version of its newest snapshot."""
    reader._check_open()
    head = reader._current_head
    return {"name": reader.name, "version": None if head is None else head.version, "relay": reader.is_relay}
