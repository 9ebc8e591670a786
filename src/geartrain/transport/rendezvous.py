"""Rendezvous: processes exchange names and addresses through a c10d store (TCPStore, FileStore)."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from geartrain.core.arguments import check_text, shown
from geartrain.core.threads import DaemonThread
from geartrain.errors import (
    ArgumentError,
    ConnectionClosedError,
    NameTakenError,
    PeerLostError,
    TransportError,
    UnknownPeerError,
    WaitTimeoutError,
)

#: Longest single wait for a name: the store's own threads print a line about each that times out.
_SLICE_S = 10.0
#: Period of attempts to reach a rendezvous that no process serves yet.
_TRY_EVERY_S = 0.1
#: Longest pause between two checks of the main thread for a name. Signal handlers (Ctrl-C) run in between.
_LOOK_S = 0.25
_FORMS = "tcp://host:port, env:// (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE) or file:///path"


class Directory:
    """Looks up addresses by name, in the given addresses and in those that peers have written to the store."""

    def __init__(self, store: Any, known: dict[str, str], prefix: str = "geartrain/rpc") -> None:
        self.store = store
        self.known = known
        self._waiters: list[Any] = []  # copies of the store that are not waiting now
        self.prefix = prefix
        self._closed = False

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def put(self, name: str, value: str) -> None:
        """Publishes an address under a name."""
        if self.store is not None:
            with _store_errors():
                self.store.set(self._key(name), value)

    def claim(self, name: str, value: str, why_not_gone: Callable[[str], str | None]) -> None:
        """Publishes an address under a name that no living node has.

        If the store has no `compare_set` and two nodes claim a name at the same instant, the later one gets it.

        Args:
            name, value: as of `put`.
            why_not_gone: why it is not proven that nobody is at an address any more; None where it is.

        Raises:
            NameTakenError: the name is another's.
        """
        if self.store is None:
            return
        swap = getattr(self.store, "compare_set", None)
        with _store_errors():
            before = self._get(name) if self.store.check([self._key(name)]) else ""
            while before != value:
                why = why_not_gone(before) if before else None
                if why is not None:
                    raise NameTakenError(
                        f"another node has the name {name!r}, at {before}, and may be alive: {why}. Give this one "
                        "another name, or end that one first"
                    )
                if swap is None:
                    self.store.set(self._key(name), value)
                    return
                found = swap(self._key(name), before, value)
                found = found.decode() if isinstance(found, bytes) else found
                before = "" if found == before else found  # it answers so when the name was deleted meanwhile

    def find(self, name: str, until_s: float) -> str:
        """The address of a name, waited for until `until_s`. Raises `UnknownPeerError`."""
        if name in self.known:
            return self.known[name]
        if self.store is None:
            raise UnknownPeerError(f"no peer {name!r}: give its address (peers=), or a store to find it in")
        with _store_errors():
            while not self.store.check([self._key(name)]):
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise UnknownPeerError(f"no peer {name!r} joined before the deadline")
                if self._closed:
                    raise ConnectionClosedError(f"the node was closed while it waited for a peer {name!r}")
                self._wait(name, min(max(left_s, 0.01), _SLICE_S))  # 0 would be for ever
            return self._get(name)

    def _wait(self, name: str, timeout_s: float) -> None:
        """Until the name is there, or for so long: with a copy of the store, since a waiting one serves no one else."""
        if threading.current_thread() is threading.main_thread():
            self._look(name, timeout_s)
            return
        try:
            waiter = self._waiters.pop() if self._waiters else self.store.clone()
        except (AttributeError, NotImplementedError, RuntimeError):  # not torch's own, or one that cannot
            waiter = self.store
        try:
            waiter.wait([self._key(name)], timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if not _is_timeout(error):
                raise
        else:
            if waiter is not self.store:
                self._waiters.append(waiter)  # one whose wait failed is not used again

    def _look(self, name: str, timeout_s: float) -> None:
        """As `_wait`, for the main thread: it polls, because a wait of the store would delay signal handlers until its
        end.
        """
        until_s, pause_s = time.monotonic() + timeout_s, 0.001
        while not self._closed and not self.store.check([self._key(name)]):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(pause_s, left_s))
            pause_s = min(1.5 * pause_s, _LOOK_S)

    def _get(self, name: str) -> str:
        value: bytes | str = self.store.get(self._key(name))
        return value.decode() if isinstance(value, bytes) else value

    def has(self, name: str) -> bool:
        """Whether a name is known, or in the store."""
        return name in self.known or bool(self.store.check([self._key(name)]))

    def close(self) -> None:
        """Ends every `find` that waits, with `ConnectionClosedError`: once its wait on the store returns."""
        self._closed = True

    def remove(self, name: str, value: str) -> None:
        """Deletes a name if it still has this address, from a store that can delete and still runs."""
        self._waiters.clear()
        if self.store is None or not hasattr(self.store, "delete_key") or _is_gone(self.store):
            return
        with contextlib.suppress(RuntimeError):  # the store has just ended
            if self.store.check([self._key(name)]) and self._get(name) == value:
                self.store.delete_key(self._key(name))

    def join(
        self,
        name: str,
        rank: int | None,
        world_size: int | None,
        timeout_s: float,
        why_not_gone: Callable[[str], str | None],
    ) -> None:
        """Publishes this rank, and waits for all others.

        Raises:
            WaitTimeoutError: not all joined in time; names the missing ranks.
            NameTakenError: a living node of another name has this rank.
        """
        if rank is not None:

            def why_name_not_gone(other: str) -> str | None:
                with contextlib.suppress(UnknownPeerError):
                    return why_not_gone(self.find(other, 0.0))
                return None  # it has left

            try:
                self.claim(f"rank/{rank}", name, why_name_not_gone)
            except NameTakenError as error:
                raise NameTakenError(f"rank {rank} is taken: {error}") from None
        if self.store is None or world_size is None:
            return
        until_s = time.monotonic() + timeout_s
        try:
            for other in range(world_size):
                self.find(f"rank/{other}", until_s)
        except UnknownPeerError:
            missing = [other for other in range(world_size) if not self.store.check([self._key(f"rank/{other}")])]
            raise WaitTimeoutError(
                f"{len(missing)} of {world_size} did not join within {timeout_s} s: ranks {missing}"
            ) from None


def store_of(
    init_method: str, rank: int | None, world_size: int | None, timeout_s: float
) -> tuple[Any, int | None, int | None]:
    """The store of an init_method, with rank and world size.

    Raises:
        WaitTimeoutError: nobody serves it in time. TransportError: rank 0 cannot.
        ArgumentError: no init_method.
    """
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    try:
        url = urlparse(check_text("init_method", init_method))
        host, port = url.hostname, url.port
    except ValueError as error:  # a port, or an IPv6 address, that is none
        raise ArgumentError(f"init_method is {_FORMS}, found {shown(init_method)}: {error}") from None
    if url.scheme == "file":
        if not Path(url.path).parent.is_dir():
            raise ArgumentError(f"init_method names a file in a folder that is there, found {shown(init_method)}")
        store = FileStore(url.path, world_size or -1)
        store.set_timeout(timedelta(seconds=timeout_s))
        return store, rank, world_size
    if url.scheme == "env":
        host, port = os.environ.get("MASTER_ADDR", ""), _number_of("MASTER_PORT")
        rank = _number_of("RANK") if rank is None else rank
        world_size = _number_of("WORLD_SIZE") if world_size is None else world_size
    if url.scheme not in ("tcp", "env") or not host or port is None:
        raise ArgumentError(f"init_method is {_FORMS}, found {shown(init_method)}")
    if rank == 0:
        try:
            serving = _tcp_store(host, port, timeout_s, serves=True)
        except RuntimeError as error:
            raise TransportError(f"rank 0 cannot serve the rendezvous at {host}:{port}: {_line(error)}") from None
        return serving, rank, world_size
    return _reached_store(host, port, timeout_s), rank, world_size


def _tcp_store(host: str, port: int, timeout_s: float, serves: bool) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=max(timeout_s, 0.001))
    return TCPStore(host, port, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True)


def _reached_store(host: str, port: int, timeout_s: float) -> Any:
    """A client of a tcp store. Raises `WaitTimeoutError`."""
    until_s = time.monotonic() + timeout_s
    _wait_for_listener(host, port, timeout_s)
    made: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def make() -> None:
        try:
            store = _tcp_store(host, port, until_s - time.monotonic(), serves=False)
            store.set_timeout(timedelta(seconds=timeout_s))
        except BaseException as error:
            made.put(error)
        else:
            made.put(store)

    # In a thread, because the handshake has no deadline. If the listener is not a store, the thread is abandoned.
    DaemonThread(make, "geartrain-rendezvous").start()
    try:
        found = made.get(timeout=max(until_s - time.monotonic(), _TRY_EVERY_S))
    except queue.Empty:
        found = RuntimeError("something that is not a store listens there")
    if isinstance(found, RuntimeError):
        raise WaitTimeoutError(f"no rendezvous at {host}:{port} within {timeout_s} s: {_line(found)}") from None
    if isinstance(found, BaseException):
        raise found
    return found


def _wait_for_listener(host: str, port: int, timeout_s: float) -> None:
    """Until somebody listens there: TCPStore's own tries take up to three times as long as they are told to."""
    until_s = time.monotonic() + timeout_s
    while True:
        left_s = until_s - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=min(max(left_s, 0.01), 10.0)).close()
            return
        except OSError as error:
            if time.monotonic() + _TRY_EVERY_S >= until_s:
                raise WaitTimeoutError(f"no rendezvous at {host}:{port} within {timeout_s} s: {error}") from None
        time.sleep(_TRY_EVERY_S)


def _number_of(variable: str) -> int:
    text = os.environ.get(variable, "")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ArgumentError(f"init_method env:// reads whole numbers, and {variable} is {shown(text)}")
    return int(text)


def address_towards(host: str) -> str:
    """The address of this host's interface that leads to another one. Raises `OSError` where none does."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)  # sends nothing
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    """Raises a store's RuntimeError as `PeerLostError`."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"the rendezvous store does not answer: {_line(error)}") from None


def _line(error: RuntimeError) -> str:
    """The message of torch's error, without the stack that follows."""
    return str(error).partition("\n")[0]


def _is_timeout(error: RuntimeError) -> bool:
    return "timeout" in str(error).lower() or "timed out" in str(error).lower()


def _is_gone(store: Any) -> bool:
    """Whether a tcp store's process has ended. A request to the store itself would log a stack trace."""
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if not isinstance(host, str) or not isinstance(port, int):
        return False
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return True
    return False
