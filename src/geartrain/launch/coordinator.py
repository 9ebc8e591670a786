"""Coordination of a job's launchers: a name service for RPC nodes, joining, and ending the job on all hosts.

The launcher of host 0 has an RPC node with a known address. It keeps the addresses of the job's other nodes. The
launchers of the other hosts join it. When the job ends on one host, it ends on all:

    host i -> host 0   join(host, fingerprint)      done(host)      over(outcome, text)
    host 0 -> host i   over(outcome, text)

A launcher counts as lost when its connection ends, or when its heartbeats are missing.
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
from geartrain.core.lifetime import on_error
from geartrain.errors import ArgumentError, GeartrainError, PeerLostError, RanksDisagreeError, WaitTimeoutError
from geartrain.launch.context import LAUNCHER, REDUCER_KEY
from geartrain.launch.host_snapshot import take_snapshot
from geartrain.launch.hosts import HostPosition

#: Longest time for the launchers of the other hosts to join.
JOIN_S = 300.0
_REPLY_S = 30.0
#: Function of every launcher: a snapshot of its host, for `geartrain top --all-hosts`.
SNAPSHOT = "geartrain.launch.snapshot"
_SNAPSHOT_S = 5.0

#: Message of another launcher: kind (done, over, lost), host, outcome, text.
Event = tuple[str, int, str, str]


def job_secret(position: HostPosition) -> str:
    """`GEARTRAIN_SECRET`; without it on a single host a new one, which only this job's processes know.

    Raises:
        ArgumentError: several hosts without it.
    """
    secret = os.environ.get("GEARTRAIN_SECRET", "")
    if position.hosts > 1 and not secret:
        raise ArgumentError("a job on several hosts needs a secret: the same GEARTRAIN_SECRET on all of them")
    return secret or secrets.token_hex(16)


class Coordinator:
    """A launcher's RPC node. It puts events of other hosts into `events`, and calls `wake` after each.

    Raises:
        ArgumentError: several hosts without a secret.
        WaitTimeoutError: host 0 could not be reached. RanksDisagreeError: it runs another job.
    """

    def __init__(self, position: HostPosition, fingerprint: str, wake: Callable[[], object]) -> None:
        self.position, self.fingerprint = position, fingerprint
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.joined = {position.host}
        self.names: dict[str, str] = {}
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._wake = wake
        self._closed = False
        self.secret = job_secret(position)
        options: dict[str, Any] = {"secret": self.secret.encode(), "options": rpc.NodeOptions(max_threads=1024)}
        if position.hosts > 1:
            options |= {"host": "0.0.0.0", "port": position.coordinator_port if position.host == 0 else 0}
        self.master = f"id=any;tcp={position.master_addr}:{position.coordinator_port}"
        peers = {} if position.host == 0 else {LAUNCHER: self.master}
        self.node = rpc.Node(LAUNCHER if position.host == 0 else f"{LAUNCHER}.{position.host}", peers=peers, **options)
        _coordinators[self.node] = self
        self.node.on_peer_lost(self._lost)
        #: Of the name service, for this host's processes.
        self.address = self.node.address if position.host == 0 else self.master
        if position.host > 0:
            with on_error(self.close):
                self._join()

    def _join(self) -> None:
        until_s = time.monotonic() + JOIN_S
        while True:
            try:
                complaint = self.node.call(
                    LAUNCHER,
                    "geartrain.launch.join",
                    self.position.host,
                    self.position.hosts,
                    self.fingerprint,
                    self.node.address,
                    timeout_s=_REPLY_S,
                )
                break
            except (GeartrainError, OSError) as error:  # it has not started yet
                if time.monotonic() > until_s:
                    raise WaitTimeoutError(
                        "no answer from the launcher of host 0 at "
                        f"{self.position.master_addr}:{self.position.coordinator_port} within {JOIN_S:g} s: {error}"
                    ) from None
                time.sleep(0.2)
        if complaint:
            raise RanksDisagreeError(complaint)

    def broadcast(self, kind: str, outcome: str = "", text: str = "") -> None:
        """Sends an event to host 0, and from host 0 to all others. Launchers that do not reply are ending, or lost."""
        others = range(1, self.position.hosts) if self.position.host == 0 else [0]
        for host in others:
            peer = LAUNCHER if host == 0 else f"{LAUNCHER}.{host}"
            if host == 0 or host in self.joined:
                with contextlib.suppress(GeartrainError, OSError):
                    self.node.call(
                        peer, "geartrain.launch.event", kind, self.position.host, outcome, text, timeout_s=5.0
                    )

    def unregister(self, name: str) -> None:
        """Removes the addresses of a process that has ended: lookups wait until it is started again."""
        for key in (f"geartrain/rpc/{name}", REDUCER_KEY + name):
            if self.position.host == 0:
                with self.lock:
                    self.names.pop(key, None)
            else:
                with contextlib.suppress(GeartrainError, OSError):
                    self.node.call(LAUNCHER, "geartrain.launch.drop", key, timeout_s=5.0)

    def tell(self, key: str, value: str) -> None:
        """Puts a name of this launcher's into the job's name service. Raises `PeerLostError` when host 0 is gone."""
        if self.position.host == 0:
            with self.lock:
                self.names[key] = value
                self.changed.notify_all()
        else:
            self.node.call(LAUNCHER, "geartrain.launch.put", key, value, timeout_s=_REPLY_S)

    def known(self, key: str) -> str | None:
        """The present value of a key in the job's name service. Raises `PeerLostError` if host 0 is gone."""
        if self.position.host == 0:
            with self.lock:
                return self.names.get(key)
        found = self.node.call(LAUNCHER, "geartrain.launch.get", key, 0.0, timeout_s=_REPLY_S)
        return None if found is None else str(found)

    def close(self) -> None:
        """Closes the node."""
        self._closed = True
        _coordinators.pop(self.node, None)
        self.node.close()

    def put_event(self, *event: Any) -> None:
        """Queues an event; from any thread."""
        if not self._closed:
            self.events.put(event)  # type: ignore[arg-type]
            self._wake()

    def _lost(self, name: str, reason: str) -> None:
        host = 0 if name == LAUNCHER else int(name[len(LAUNCHER) + 1 :]) if name.startswith(f"{LAUNCHER}.") else -1
        if host >= 0 and host != self.position.host:
            self.put_event("lost", host, "", reason)


_coordinators: weakref.WeakKeyDictionary[Any, Coordinator] = weakref.WeakKeyDictionary()


def _coordinator(caller: rpc.Caller) -> Coordinator:
    coordinator = _coordinators.get(caller.node)
    if coordinator is None:
        raise PeerLostError("this launcher has ended")
    return coordinator


@rpc.function(name="geartrain.launch.put", concurrent=True, with_caller=True)
def _put(caller: rpc.Caller, key: str, value: str) -> None:
    coordinator = _coordinator(caller)
    with coordinator.lock:
        coordinator.names[key] = value
        coordinator.changed.notify_all()


@rpc.function(name="geartrain.launch.get", concurrent=True, with_caller=True)
def _get(caller: rpc.Caller, key: str, wait_s: float) -> str | None:
    coordinator = _coordinator(caller)
    with coordinator.lock:
        coordinator.changed.wait_for(lambda: key in coordinator.names or coordinator._closed, wait_s)
        return coordinator.names.get(key)


@rpc.function(name="geartrain.launch.drop", concurrent=True, with_caller=True)
def _drop(caller: rpc.Caller, key: str) -> None:
    coordinator = _coordinator(caller)
    with coordinator.lock:
        coordinator.names.pop(key, None)


@rpc.function(name="geartrain.launch.join", with_caller=True)
def _joined(caller: rpc.Caller, host: int, hosts: int, fingerprint: str, address: str) -> str:
    coordinator = _coordinator(caller)
    if hosts != coordinator.position.hosts or not 0 < host < hosts:
        return f"host 0 runs a job on {coordinator.position.hosts} hosts, and this is host {host} of {hosts}"
    if fingerprint != coordinator.fingerprint:
        return f"the descriptions of hosts 0 and {host} differ: {coordinator.fingerprint} there, {fingerprint} here"
    if host in coordinator.joined:
        return f"host {host} has joined already"
    coordinator.joined.add(host)
    with coordinator.lock:
        coordinator.names[f"geartrain/rpc/{LAUNCHER}.{host}"] = address
    coordinator.node.directory.known[f"{LAUNCHER}.{host}"] = address
    return ""


@rpc.function(name="geartrain.launch.snapshot", concurrent=True, with_caller=True)
def _snapshot(caller: rpc.Caller, others: bool) -> dict[str, Any]:
    """Snapshot of this launcher's host. With `others`, asked of host 0: snapshots of all hosts that have joined it.

    Hosts that do not answer within 5 s are in `missing`, with the reason.
    """
    coordinator = _coordinator(caller)
    asked = []
    if others and coordinator.position.host == 0:
        for host in sorted(coordinator.joined - {0}):
            peer = f"{LAUNCHER}.{host}"
            with contextlib.suppress(GeartrainError, OSError):
                asked.append((host, coordinator.node.call_async(peer, SNAPSHOT, False, timeout_s=_SNAPSHOT_S)))
    snapshots, missing = [{**take_snapshot(), "number": coordinator.position.host}], []
    for host, answer in asked:
        try:
            snapshots += answer.result()["snapshots"]
        except (GeartrainError, OSError) as error:
            missing.append(f"host {host}: {error}")
    silent = set(range(coordinator.position.hosts)) - {each for each, _ in asked} - {0}
    if others and coordinator.position.host == 0:
        missing += [f"host {host}: it has not joined, or is lost" for host in sorted(silent)]
    return {"snapshots": snapshots, "missing": missing}


@rpc.function(name="geartrain.launch.event", with_caller=True)
def _receive(caller: rpc.Caller, kind: str, host: int, outcome: str, text: str) -> None:
    _coordinator(caller).put_event(kind, host, outcome, text)


__all__ = ["JOIN_S", "SNAPSHOT", "Coordinator", "Event"]
