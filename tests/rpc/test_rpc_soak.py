"""Nodes call, publish and share weights while peers are killed, stopped and come back: nothing is wrong or leaks."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
from deadlines import patience

from geartrain import rpc, weights
from geartrain.errors import GeartrainError
from geartrain.rpc.registry import functions

WORKER = Path(__file__).parents[1] / "support" / "soak_worker.py"
NAMES = ("anne", "bob", "cleo")


class Hub:
    """The node that stays, what it heard, and the processes around it."""

    def __init__(self, name: str) -> None:
        self.wrong: list[str] = []
        self.last: dict[str, int] = {}
        self.answered = self.kills = self.stops = 0
        self.weights_name = name
        self.random = random.Random(11)
        self.running: dict[str, subprocess.Popen[str]] = {}
        self._lock = threading.Lock()
        rpc.function(name="soak.wrong")(self.wrong.append)
        rpc.function(name="soak.note")(self.note)
        rpc.function(name="soak.triple")(lambda array: 3 * array)
        rpc.batched(max_size=3, max_wait_us=500)(soak_batched)
        self.node = rpc.Node("hub", timeout_s=patience(8))
        self.lost: list[str] = []
        self.node.on_peer_lost(lambda peer, why: self.lost.append(peer))
        self.topic = self.node.topic("news", history=3, timeout_s=2.0)
        self.publisher = weights.Publisher(name, node=self.node)

    def note(self, who: str, number: int) -> int:
        with self._lock:
            if number <= self.last.get(who, -1):
                self.wrong.append(f"{who}: {number} after {self.last[who]}")
            self.last[who] = number
        return number

    def start(self, name: str) -> None:
        process = preloaded.Popen(
            [sys.executable, str(WORKER), name, self.node.address, self.weights_name], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        self.node.directory.known[name] = process.stdout.readline().strip()
        self.running[name] = process

    def end(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.communicate()

    def step(self, number: int) -> None:
        """A bit of everything; one time in six a peer suffers."""
        body = np.full(self.random.choice((10, 2_000, 100_000)), number % 251, np.uint8)
        self.topic.publish({"number": number, "body": body})
        with contextlib.suppress(GeartrainError):
            self.publisher.publish(
                number, {f"w{i}": np.full(20_000 + i, number, np.int64) for i in range(3)}, timeout_s=1.0
            )
        value = np.full(self.random.choice((5, 300_000)), number, np.int64)
        asked = [self.node.call_async(name, "soak.triple", value, timeout_s=patience(4)) for name in self.running]
        fate = self.random.random()
        victim = self.random.choice(NAMES)
        if fate < 0.08:
            self.kills += 1
            self.end(victim)
            self.start(victim)
        elif fate < 0.16:
            self.stops += 1
            self.running[victim].send_signal(signal.SIGSTOP)
            time.sleep(self.random.uniform(0.05, 0.6))
            self.running[victim].send_signal(signal.SIGCONT)
        for one in asked:
            try:
                if not (one.result() == 3 * value).all():
                    self.wrong.append("the hub got a wrong answer")
                self.answered += 1
            except GeartrainError:
                pass  # named, and in time
        time.sleep(0.01)

    def close(self) -> None:
        for name in list(self.running):
            self.end(name)
        self.publisher.close()
        self.node.close()
        for name in ("soak.wrong", "soak.note", "soak.triple", "soak_batched"):
            functions.pop(name, None)


def soak_batched(values: list[int]) -> list[int]:
    return [value + 1 for value in values]


@pytest.fixture
def hub(names: Any) -> Iterator[Hub]:
    name = names(may_stay=True)
    made = Hub(name)
    try:
        for one in NAMES:
            made.start(one)
        yield made
    finally:
        made.close()
        weights.unlink(name)


def usage() -> dict[str, float]:
    """What this process holds."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return {
        "rss_mb": int(status.split("VmRSS:")[1].split()[0]) / 1024,
        "threads": int(status.split("Threads:")[1].split()[0]),
        "fds": len(links),
        "memfds": sum("memfd:" in link for link in links),
        "shm": len(list(Path("/dev/shm").glob(f"geartrain*test-{os.getpid()}-*"))),
    }


def soak(hub: Hub, seconds: float) -> None:
    began_s = time.monotonic()
    number = 0
    early: dict[str, float] = {}
    while (passed_s := time.monotonic() - began_s) < seconds:
        hub.step(number)
        number += 1
        if not early and passed_s > seconds * 0.4:
            early = usage()
    for name in NAMES:  # all take part in the last moment, too
        assert (hub.node.call(name, "soak.triple", np.ones(3), timeout_s=patience(20)) == 3).all()
    late = usage()
    assert not hub.wrong, hub.wrong[:5]
    assert hub.answered > number  # of three a step
    assert hub.kills > 0 and hub.stops > 0
    assert set(hub.lost) <= set(NAMES) and len(hub.lost) > 0
    assert all(hub.last[who] > 5 for who in list(hub.last)[:3])
    assert late["fds"] <= early["fds"] + 12, (early, late)
    assert late["memfds"] <= early["memfds"] + 6, (early, late)
    assert late["threads"] <= early["threads"] + 12, (early, late)
    assert late["shm"] <= 1
    assert late["rss_mb"] <= early["rss_mb"] * 1.25 + 60, (early, late)


def test_peers_may_die_stop_and_come_back_and_nothing_is_wrong_or_leaks(hub: Hub) -> None:
    soak(hub, 4.0)


@pytest.mark.long
def test_the_same_for_minutes(hub: Hub) -> None:
    soak(hub, float(os.environ.get("GEARTRAIN_TEST_SOAK_S", "180")))
