"""Where the processes of a job find each other, and how the launchers of several hosts tell each other how it goes.

The launcher of host 0 has a node that all know the address of. It keeps the names of the job's peers. The launchers of
the other hosts join it; when the job is over anywhere, it is over everywhere:

    host i -> host 0   join(host, what it starts)      done(host)      over(outcome, text)
    host 0 -> host i   over(outcome, text)

A launcher that is lost is known by the end of its connection, or by its silence.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import geartrain.rpc as rpc
from geartrain.errors import ArgumentError, GeartrainError, PeerLostError, RanksDisagreeError, WaitTimeoutError
from geartrain.launch.context import LAUNCHER
from geartrain.launch.process import Place

#: How long the launchers of the other hosts have to appear.
JOIN_S = 300.0
_ANSWER_S = 30.0

#: What others told: what, which host, outcome, text.
Event = tuple[str, int, str, str]


class Link:
    """A launcher's node. Events of other hosts come from `events`, and `wake` is called with each.

    Raises:
        ArgumentError: several hosts without a secret.
        WaitTimeoutError: host 0 was not to be reached. RanksDisagreeError: it starts another job.
    """

    def __init__(self, place: Place, fingerprint: str, wake: Callable[[], object]) -> None:
        self.place, self.fingerprint = place, fingerprint
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.joined = {place.host}
        self.names: dict[str, str] = {}
        self.changed = threading.Condition()
        self._wake = wake
        self._closed = False
        self.secret = os.environ.get("GEARTRAIN_SECRET", "")
        if place.hosts > 1 and not self.secret:
            raise ArgumentError("a job on several hosts needs a secret: the same GEARTRAIN_SECRET on all of them")
        self.secret = self.secret or secrets.token_hex(16)  # only this job's processes know it
        options: dict[str, Any] = {"secret": self.secret.encode(), "max_threads": 1024}
        if place.hosts > 1:
            options |= {"host": "0.0.0.0", "port": place.link_port if place.host == 0 else 0}
        self.master = f"id=any;tcp={place.master_addr}:{place.link_port}"
        peers = {} if place.host == 0 else {LAUNCHER: self.master}
        self.node = rpc.Node(LAUNCHER if place.host == 0 else f"{LAUNCHER}.{place.host}", peers=peers, **options)
        _links[self.node] = self
        self.node.on_peer_lost(self._lost)
        #: Where this host's processes find the names.
        self.address = self.node.address if place.host == 0 else self.master
        if place.host > 0:
            try:
                self._join()
            except BaseException:
                self.close()
                raise

    def _join(self) -> None:
        until_s = time.monotonic() + JOIN_S
        while True:
            try:
                complaint = self.node.call(
                    LAUNCHER,
                    "geartrain.launch.join",
                    self.place.host,
                    self.place.hosts,
                    self.fingerprint,
                    self.node.address,
                    timeout_s=_ANSWER_S,
                )
                break
            except (GeartrainError, OSError) as error:  # it is not there yet
                if time.monotonic() > until_s:
                    raise WaitTimeoutError(
                        f"the launcher of host 0 was not reached at {self.place.master_addr}:{self.place.link_port} "
                        f"within {JOIN_S:g} s: {error}"
                    ) from None
                time.sleep(0.2)
        if complaint:
            raise RanksDisagreeError(complaint)

    def tell(self, what: str, outcome: str = "", text: str = "") -> None:
        """Tells host 0; from host 0 all others. Those that do not answer are on their way out, or will be noticed."""
        others = range(1, self.place.hosts) if self.place.host == 0 else [0]
        for host in others:
            peer = LAUNCHER if host == 0 else f"{LAUNCHER}.{host}"
            if host == 0 or host in self.joined:
                with contextlib.suppress(GeartrainError, OSError):
                    self.node.call(peer, "geartrain.launch.tell", what, self.place.host, outcome, text, timeout_s=5.0)

    def forget(self, name: str) -> None:
        """A process has ended: who looks for it waits for the next one of its name."""
        key = f"geartrain/rpc/{name}"
        if self.place.host == 0:
            with self.changed:
                self.names.pop(key, None)
        else:
            with contextlib.suppress(GeartrainError, OSError):
                self.node.call(LAUNCHER, "geartrain.launch.drop", key, timeout_s=5.0)

    def close(self) -> None:
        """Leaves."""
        self._closed = True
        _links.pop(self.node, None)
        self.node.close()

    def put_event(self, *event: Any) -> None:
        """From any thread."""
        if not self._closed:
            self.events.put(event)  # type: ignore[arg-type]
            self._wake()

    def _lost(self, name: str, reason: str) -> None:
        host = 0 if name == LAUNCHER else int(name[len(LAUNCHER) + 1 :]) if name.startswith(f"{LAUNCHER}.") else -1
        if host >= 0 and host != self.place.host:
            self.put_event("lost", host, "", reason)


_links: weakref.WeakKeyDictionary[Any, Link] = weakref.WeakKeyDictionary()


def _link(caller: rpc.Caller) -> Link:
    link = _links.get(caller.node)
    if link is None:
        raise PeerLostError("this launcher is not there any more")
    return link


@rpc.function(name="geartrain.launch.put", concurrent=True, with_caller=True)
def _put(caller: rpc.Caller, key: str, value: str) -> None:
    link = _link(caller)
    with link.changed:
        link.names[key] = value
        link.changed.notify_all()


@rpc.function(name="geartrain.launch.get", concurrent=True, with_caller=True)
def _get(caller: rpc.Caller, key: str, wait_s: float) -> str | None:
    link = _link(caller)
    with link.changed:
        link.changed.wait_for(lambda: key in link.names or link._closed, wait_s)
        return link.names.get(key)


@rpc.function(name="geartrain.launch.drop", concurrent=True, with_caller=True)
def _drop(caller: rpc.Caller, key: str) -> None:
    link = _link(caller)
    with link.changed:
        link.names.pop(key, None)


@rpc.function(name="geartrain.launch.join", with_caller=True)
def _joined(caller: rpc.Caller, host: int, hosts: int, fingerprint: str, address: str) -> str:
    link = _link(caller)
    if hosts != link.place.hosts or not 0 < host < hosts:
        return f"host 0 starts a job on {link.place.hosts} hosts, and this is host {host} of {hosts}"
    if fingerprint != link.fingerprint:
        return f"the descriptions of hosts 0 and {host} differ: {link.fingerprint} there, {fingerprint} here"
    if host in link.joined:
        return f"there is a host {host} already"
    link.joined.add(host)
    with link.changed:
        link.names[f"geartrain/rpc/{LAUNCHER}.{host}"] = address
    link.node.directory.known[f"{LAUNCHER}.{host}"] = address
    return ""


@rpc.function(name="geartrain.launch.tell", with_caller=True)
def _told(caller: rpc.Caller, what: str, host: int, outcome: str, text: str) -> None:
    _link(caller).put_event(what, host, outcome, text)


__all__ = ["JOIN_S", "Event", "Link"]
