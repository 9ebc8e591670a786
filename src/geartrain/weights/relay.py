"""Relay of weights between hosts: one process of each host fetches a new version and publishes it to the others.

Every reader with a `source` runs a thread that checks whether a publisher or a relay is alive on this host. If none is,
the thread asks the source for the id of its file.

- If this host has a file with that id, the publisher's memory is shared with this process. No relay is needed.
- Otherwise, the process that gets the publisher's lock becomes the relay. When the relay dies, the kernel frees the
  lock. Another process takes its place within about `CHECK_S`.

A relay requests a version newer than its own, and the source replies when it has one (long polling). The source sends
nothing unasked. A slow host therefore skips versions instead of queueing them. The bytes arrive in pieces, two in
flight at a time, and are written straight into a buffer of the segment.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from geartrain.core.shared_files import Trust
from geartrain.core.threads import DaemonThread, ReentrantEvent
from geartrain.errors import ConnectionClosedError, GeartrainError, PeerLostError
from geartrain.weights.layout import Schema
from geartrain.weights.segment import WeightsSegment
from geartrain.weights.server import DONE, NEWER, PIECE, SEGMENT_OF, serve, stop_serving
from geartrain.weights.writer import Writer

if TYPE_CHECKING:
    from geartrain.rpc import Future, Node

CHECK_S = 0.5
PIECE_BYTES = 32 << 20
_WAIT_S = 20.0
_log = logging.getLogger(__name__)


class Follower:
    """Keeps the weights of a source up to date on this host. It fetches them if no other process does."""

    def __init__(self, name: str, node: Node, source: str, directory: Path, trust: Trust = "user") -> None:
        self.name, self.source = name, source
        self.state = f"{source!r} was not contacted yet"  # for error messages
        self._node, self._directory, self._trust = node, directory, trust
        self._writer: Writer | None = None
        self._newest: tuple[bytes, int] = (b"", 0)  # id and sequence at the source
        self._schema = b""
        self._stop = ReentrantEvent()
        self._wake = ReentrantEvent()
        self._thread: threading.Thread = DaemonThread(self._run, f"geartrain follows {name}")
        self._thread.start()

    @property
    def is_relay(self) -> bool:
        """Whether this process fetches."""
        return self._writer is not None

    def stop(self) -> None:
        """Requests the end of the thread, without waiting for it."""
        self._stop.set()
        self._wake.set()
        writer = self._writer
        if writer is not None:
            writer.end_waits()

    def close(self) -> None:
        """Stops; another process of this host becomes the relay."""
        self.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def after_fork(self) -> None:
        """In a forked child, which does not have the thread."""
        self._writer = None
        self._stop, self._wake = ReentrantEvent(), ReentrantEvent()  # the thread may have held their locks
        self._stop.set()
        self._thread = threading.current_thread()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = 0.05
        try:
            while not self._stop.is_set():
                try:
                    if self._writer is None and not self._become_relay():
                        pause_s = 0.05
                        self._stop.wait(CHECK_S)
                        continue
                    self._fetch_next()
                    pause_s = 0.05
                except ConnectionClosedError as error:
                    self.state = str(error)
                    return  # this process's node is closed
                except (GeartrainError, OSError, LookupError) as error:
                    if self._stop.is_set():
                        return
                    if str(error) != self.state:
                        _log.warning("weights %r from %r: %s", self.name, self.source, error)
                    self.state = f"fetching from {self.source!r}: {error}"
                    self._stop.wait(pause_s)
                    pause_s = min(2 * pause_s, 2.0)
        finally:
            self._resign()

    def _become_relay(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            here = WeightsSegment.open(self.name, self._directory, create=False, trust=self._trust)
            try:
                if here.has_publisher():
                    self.state = "another process of this host publishes or relays"
                    return False
                if self._call(SEGMENT_OF, self.name, timeout_s=10.0) == here.id:
                    self.state = f"{self.source!r} is on this host"
                    return False
            finally:
                here.close()
        try:
            self._writer = Writer(self.name, 3, self._directory, self._trust)
        except GeartrainError:
            return False  # another process was faster
        serve(self._node, self.name, self._writer)
        self.state = "this process relays"
        return True

    def _resign(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            stop_serving(self._node, self.name, writer)
            writer.close()

    def _fetch_next(self) -> None:
        assert self._writer is not None
        found = self._call(NEWER, self.name, *self._newest, _WAIT_S, timeout_s=_WAIT_S + 10.0)
        if found is None:
            return
        try:
            with self._writer.turn(30.0), self._laid_out(found["schema"]).writing(found["version"], 30.0):
                self._fetch(found, self._writer.memory())
                if self._call(DONE, self.name, found["sequence"], timeout_s=10.0) is not True:
                    raise PeerLostError(
                        f"{self.source!r} released version {found['version']} before all of it was fetched"
                    )
        except BaseException:
            with contextlib.suppress(GeartrainError):
                self._node.tell(self.source, DONE, self.name, found["sequence"], timeout_s=1.0)
            raise
        self._newest = (found["id"], found["sequence"])
        self.state = "this process relays"

    def _laid_out(self, schema: bytes) -> Writer:
        """The writer, for versions of this schema; within its turn."""
        assert self._writer is not None
        if schema != self._schema:
            self._writer.lay_out(Schema.from_json(schema))
            self._schema = schema
        return self._writer

    def _fetch(self, found: dict[str, Any], memory: np.ndarray[Any, Any]) -> None:
        offsets = list(range(0, found["nbytes"], PIECE_BYTES))
        in_flight: list[tuple[int, Any]] = []
        while offsets or in_flight:
            while offsets and len(in_flight) < 2:
                offset = offsets.pop(0)
                ask = self._node.call_async(
                    self.source, PIECE, self.name, found["sequence"], offset, PIECE_BYTES, timeout_s=60.0
                )
                in_flight.append((offset, ask))
            offset, ask = in_flight.pop(0)
            piece = self._result(ask, 60.0)
            np.copyto(memory[offset : offset + len(piece)], piece)
            if len(piece) != min(PIECE_BYTES, found["nbytes"] - offset):
                raise PeerLostError(f"{self.source!r} sent {len(piece)} bytes for a piece")

    def _call(self, function: str, *args: Any, timeout_s: float) -> Any:
        """As `Node.call`, but `close` cancels it."""
        return self._result(self._node.call_async(self.source, function, *args, timeout_s=timeout_s), timeout_s)

    def _result(self, future: Future, timeout_s: float) -> Any:
        self._wake.clear()
        future.add_done_callback(lambda _: self._wake.set())
        if self._stop.is_set() or not self._wake.wait(timeout_s) or self._stop.is_set():
            future.cancel()
            raise PeerLostError("no reply" if not self._stop.is_set() else "closing")
        return future.result()
