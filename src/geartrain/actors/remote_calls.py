"""Client side of a remote store's connection: calls that are sent again, and writes that take effect once.

A call that loses its connection is sent again once the peer serves the store again, within the store's `timeout_s`.
The log has one warning for each outage.
`served_writes.py` is the server's side, and says how a write takes effect once however often it is sent.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from geartrain.errors import (
    ArgumentError,
    GeartrainError,
    PeerLostError,
    PeerUnreachableError,
    RemoteError,
    WaitTimeoutError,
)
from geartrain.rpc.node import Node
from geartrain.rpc.remote_objects import Remote

_log = logging.getLogger(__name__)

#: Longest pause between two attempts to reach a peer again.
_MOST_PAUSE_S = 1.0
#: Errors of a peer that has not run the call: it serves the store no more, does not know the handle, or has ended it.
_REFUSED = ("LookupError", "ObjectGoneError", "PeerLostError")
#: Of a write whose outcome nobody knows.
_UNKNOWN = "It is unknown whether the {} took effect: look at the store's rows before you repeat it"
_WORDS = {"insert_packed": "insert", "update_priorities": "update", "write": "put or append"}


class RemoteCalls:
    """The calls of one client to a peer's store. Any thread.

    Args:
        node, peer, name, timeout_s: of the `RemoteStore`.
        about: the peer's description of the store. After a reconnection it must serve one with the same fields.

    Attributes:
        store_id, journaled: id of the store that the peer serves, and whether it has a journal, as of the last
            connection.
        remote: the peer's handle of this connection; None: there is none.
        lock: of what is known here.
    """

    def __init__(self, node: Node, peer: str, name: str, timeout_s: float, about: dict[str, Any]) -> None:
        self.node, self.peer, self.name, self.timeout_s = node, peer, name, timeout_s
        self.store_id: int = about["id"]
        self._about = about
        self._client = int.from_bytes(os.urandom(7), "little")
        self._numbers = itertools.count(1)
        self._slots, self._free = itertools.count(), list[int]()  # of writes: all of them, and those not in use
        self.lock = threading.RLock()
        self._opening = threading.RLock()
        self.remote: Remote | None = None
        self._outcomes = 0  # id of those that the peer remembers
        self.journaled = False
        self._told = False  # of the outage, in the log

    def opened(self, within_s: float) -> tuple[Remote, int]:
        """The peer's handle of this connection, and the id of the outcomes of writes that the peer remembers."""
        until_s = time.monotonic() + within_s
        if not self._opening.acquire(timeout=within_s):
            raise WaitTimeoutError(f"{self.peer!r} did not answer another call within {within_s:.3g} s")
        try:
            if self.remote is None:
                left_s = max(0.0, until_s - time.monotonic())
                number, self._outcomes, store_id, self.journaled = self.node.call(
                    self.peer, "geartrain.store.open", self.name, self._client, timeout_s=left_s
                )
                remote = Remote(self.node, self.peer, number)
                if store_id != self.store_id:
                    self.move(remote, store_id, within_s)
                self.remote, self._told = remote, False
            return self.remote, self._outcomes
        finally:
            self._opening.release()

    def move(self, remote: Remote, store_id: int, within_s: float) -> None:
        """The peer serves another store than before."""
        about = self.node.call(self.peer, "geartrain.store.describe", self.name, timeout_s=within_s)
        if any(about[what] != self._about[what] for what in ("fields", "max_length", "per_step", "plan")):
            raise ArgumentError(
                f"{self.peer!r} serves a store with other fields or tasks as {self.name!r} than before: make another "
                f"RemoteStore"
            )
        self.store_id = store_id

    def lost(self, remote: Remote | None, error: Exception, left_s: float) -> None:
        """A call has lost the peer and is sent again. The first one of an outage logs a warning.

        Args:
            remote: the handle that it was sent to; None: it was not sent.
            error: of the call.
            left_s: how long the call still tries, in seconds.
        """
        with self.lock:
            if self.remote is remote:
                self.remote = None
            tells, self._told = not (self._told or isinstance(error, RemoteError)), True
        if tells:
            _log.warning("%s. Calls of its store %r are sent again for up to %.3g s", error, self.name, left_s)

    def is_stale(self, error: Exception, remote: Remote | None) -> bool:
        """Whether a call failed because its handle's store is not served any more.

        Drops the handle, so that the peer releases its claims. The next call opens another one.

        Args:
            error: of the call.
            remote: the handle that it was sent to; None: it was not sent.
        """
        if remote is None or not isinstance(error, RemoteError) or error.remote_type != "LookupError":
            return False
        with self.lock:
            if self.remote is remote:
                self.remote = None
        with suppress(GeartrainError):
            remote.close()
        return True

    def ask(self, what: str, given: Callable[[], tuple[Any, ...]], *, wait_s: float = 0.0) -> Any:
        """The peer's answer to a call that changes nothing, or the same however often it is made.

        Args:
            what: a call of the handle.
            given: its arguments, each time that it is sent.
            wait_s: how long the peer may wait, in seconds.
        """
        return self._send(what, lambda again: given(), wait_s, None, False)

    def write(
        self, what: str, given: Callable[[bool], tuple[Any, ...]], *, wait_s: float = 0.0, elsewhere: bool = False
    ) -> Any:
        """The peer's answer to a write, which takes effect once though it is sent again.

        Args:
            what, wait_s: as for `ask`.
            given: its arguments behind its number; is told whether an earlier sending may have taken effect.
            elsewhere: the rows tell what became of an earlier sending, also a server that does not know of it.

        Raises:
            PeerLostError, WaitTimeoutError: if it is unknown whether the write took effect, the text says so.
        """
        try:
            slot = self._free.pop()
        except IndexError:
            slot = next(self._slots)
        call = slot, next(self._numbers)
        try:
            return self._send(what, lambda again: (call, *given(again)), wait_s, what, elsewhere)
        finally:
            self._free.append(slot)

    def _send(
        self, what: str, given: Callable[[bool], tuple[Any, ...]], wait_s: float, write: str | None, elsewhere: bool
    ) -> Any:
        sendings = Sendings(self, wait_s)
        ran: int | None = None  # the outcomes that it is in, if it has run
        while True:
            remote, outcomes = None, 0
            try:
                remote, outcomes = self.opened(sendings.connect_s)
                if write is None or elsewhere or ran in (None, outcomes):
                    return remote.call(what, *given(ran is not None), timeout_s=min(wait_s + self.timeout_s, 1e9))
            except (PeerLostError, LookupError, WaitTimeoutError) as error:
                if isinstance(error, RemoteError) and error.remote_type not in _REFUSED:
                    raise  # of the call itself
                if not sendings.reopened and self.is_stale(error, remote):
                    sendings.reopened = True
                    continue
                if remote is not None and not isinstance(error, PeerUnreachableError | RemoteError):
                    ran = outcomes if ran is None else ran
                pause_s = sendings.again_in(error, remote)
                if pause_s is None:
                    if write is None or ran is None:
                        raise
                    late = remote is not None and isinstance(error, WaitTimeoutError)
                    kind = WaitTimeoutError if late else PeerLostError
                    raise kind(f"{error}. {_UNKNOWN.format(_WORDS.get(write, write))}") from None
            else:
                why = f"{self.peer!r} was lost, and another server has taken its place"
                raise PeerLostError(f"{why}. {_UNKNOWN.format(_WORDS.get(write, write))}")
            time.sleep(pause_s)


class Sendings:
    """The sendings of one call: again whenever the peer is lost, for up to the store's `timeout_s` each time.

    Args:
        calls: of the store.
        wait_s: how long the peer may wait before it replies, in seconds.

    Attributes:
        reopened: whether it was sent to a handle that was stale; the next one is not.
    """

    def __init__(self, calls: RemoteCalls, wait_s: float) -> None:
        self.reopened = False
        self._calls = calls
        self._late_s = time.monotonic() + wait_s + calls.timeout_s  # a loss after that gives no more time
        self._lost_s: float | None = None
        self._pause_s = 0.01

    @property
    def connect_s(self) -> float:
        """How long the next sending may take to connect, in seconds."""
        most_s = self._calls.timeout_s
        return most_s if self._lost_s is None else max(_MOST_PAUSE_S, self._lost_s + most_s - time.monotonic())

    def again_in(self, error: Exception, remote: Remote | None) -> float | None:
        """Seconds until the call is to be sent again; None: its error is final.

        Args:
            error: of the last sending.
            remote: that it was sent to; None: it was not sent.
        """
        # The peer does not serve the store yet.
        restarting = remote is None and self._lost_s is not None and isinstance(error, LookupError)
        if not (isinstance(error, PeerLostError) or restarting):
            return None
        now_s = time.monotonic()
        if self._lost_s is None or (remote is not None and now_s < self._late_s):
            self._lost_s = now_s
        left_s = self._lost_s + self._calls.timeout_s - now_s
        if left_s <= 0:
            return None
        self._calls.lost(remote, error, left_s)
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _MOST_PAUSE_S)
        return pause_s


__all__ = ["RemoteCalls", "Sendings"]
