"""Watcher: takes snapshots of this host and of a job's other hosts, and adds rates and causes."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from geartrain.core.shared_files import Trust
from geartrain.core.threads import DaemonThread, ReentrantEvent
from geartrain.errors import GeartrainError
from geartrain.launch.context import LAUNCHER
from geartrain.launch.coordinator import SNAPSHOT
from geartrain.launch.host_snapshot import FORMAT, take_snapshot
from geartrain.rpc import Node
from geartrain.tools.watch.causes import Diagnosis, find_causes
from geartrain.tools.watch.rates import add_rates

#: Longer than host 0 waits for the others.
_ANSWER_S = 8.0


class Watcher:
    """Takes snapshots. Any thread may use it, one at a time.

    Args:
        trust: the users whose segments are read.
        all_hosts: asks the launchers of the jobs that this host is part of for the snapshots of their other hosts, with
            the secret in GEARTRAIN_SECRET.
    """

    def __init__(self, trust: Trust = "user", all_hosts: bool = False) -> None:
        self._trust, self._all_hosts = trust, all_hosts
        self._before: dict[str, Mapping[str, Any]] = {}
        self._nodes: dict[str, Node] = {}  # by the coordinator's address

    def look(self) -> tuple[list[dict[str, Any]], list[Diagnosis], list[str]]:
        """Snapshots with rates since the last look, findings, and hosts that do not answer."""
        found, missing = self._take()
        snapshots = [add_rates(self._before.get(each["id"]), each) for each in found]
        self._before = {each["id"]: each for each in snapshots}
        names = Counter(each["host"] for each in snapshots)
        for each in snapshots:  # hosts may have one name, in containers for example
            if names[each["host"]] > 1:
                each["host"] = f"{each['host']} ({each.get('number', 'here')})"
        return snapshots, find_causes(snapshots), missing

    def _take(self) -> tuple[list[dict[str, Any]], list[str]]:
        here = take_snapshot(self._trust)
        found, missing = {here["id"]: here}, []
        jobs = [job for job in here["jobs"] if job.get("hosts", 1) > 1] if self._all_hosts else []
        for job in jobs:
            try:
                answer = self._node(job["coordinator"]).call(LAUNCHER, SNAPSHOT, True, timeout_s=_ANSWER_S)
            except (GeartrainError, OSError) as error:
                missing.append(f"launchers of {job['name']}: {error}")
                continue
            missing += [f"{job['name']}, {each}" for each in answer["missing"]]
            for each in answer["snapshots"]:
                if each.get("format") == FORMAT:
                    found.setdefault(each["id"], each)
                    found[each["id"]].setdefault("number", each["number"])
        if self._all_hosts and not jobs:
            missing.append("no job on this host is one of several hosts")
        return list(found.values()), missing

    def _node(self, address: str) -> Node:
        if address not in self._nodes:
            secret = os.environ.get("GEARTRAIN_SECRET", "").encode()
            name = f"geartrain.top.{secrets.token_hex(6)}"
            self._nodes[address] = Node(name, peers={LAUNCHER: address}, secret=secret, pickle=False)
        return self._nodes[address]

    def close(self) -> None:
        """Closes the connections with launchers."""
        for node in self._nodes.values():
            node.close()


class BackgroundWatcher:
    """A thread that takes a snapshot every `every_s` seconds and calls `seen` with the result of `Watcher.look`, or
    its error.
    """

    def __init__(self, watcher: Watcher, every_s: float, seen: Callable[[Any], None]) -> None:
        self._watcher, self._every_s, self._seen = watcher, every_s, seen
        self._stop = ReentrantEvent()
        self._thread = DaemonThread(self._run, "geartrain-top")
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                self._seen(self._watcher.look())
            except Exception as error:  # for the thread that draws
                self._seen(error)
                return
            if self._stop.wait(self._every_s):
                return

    def close(self) -> None:
        """Ends it; a look under way is waited for, for 5 s."""
        self._stop.set()
        self._thread.join(5.0)


__all__ = ["BackgroundWatcher", "Watcher"]
