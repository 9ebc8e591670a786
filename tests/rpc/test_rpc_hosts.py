"""Nodes on hosts of their own: one that vanishes is a named error in bounded time, and is found again afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from deadlines import patience

from geartrain.tools.testing.cluster import Hosts

reason = Hosts.viable()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

SERVER = """
import sys
import time
from geartrain import rpc

@rpc.function
def add(a, b):
    return a + b

@rpc.function
def wait(seconds):
    time.sleep(seconds)
    return "awake"

with rpc.Node("server", host=sys.argv[1], secret=b"of the cluster", options=rpc.NodeOptions(peer_timeout_s=2)) as node:
    print(node.address, flush=True)
    sys.stdin.read()
"""

CLIENT = """
import os
import sys
import time
import numpy as np
from geartrain import rpc
from geartrain.errors import GeartrainError, PeerLostError

slow = float(os.environ.get("GEARTRAIN_TEST_PATIENCE", "1"))  # how many times as long as on an idle machine
peers = {"near": sys.argv[2], "far": sys.argv[3]}
lost = []
rare = rpc.NodeOptions(peer_timeout_s=2)
with rpc.Node("client", host=sys.argv[1], secret=b"of the cluster", peers=peers, options=rare) as node:
    node.on_peer_lost(lambda name, why: lost.append(name))
    assert node.call("near", "add", 1, 2) == node.call("far", "add", 1, 2) == 3
    waiting = node.call_async("far", "wait", 60, timeout_s=60)
    big = node.call_async("far", "add", np.zeros(20_000_000, np.uint8), 1, timeout_s=60)
    print("unplug", flush=True)
    sys.stdin.readline()
    began_s = time.monotonic()
    for call in (waiting, big):
        try:
            print(call.result(timeout_s=30))
        except PeerLostError as error:
            assert "far" in str(error), error
            print("lost", flush=True)
    took_s = time.monotonic() - began_s
    assert took_s < 6 * slow, took_s
    while not lost and time.monotonic() - began_s < 8 * slow:
        time.sleep(0.01)
    assert lost == ["far"], lost
    assert node.call("near", "add", 3, 4) == 7
    try:
        node.call("far", "add", 1, 2, timeout_s=3 * slow)
        print("answered")
    except GeartrainError as error:
        print(type(error).__name__, flush=True)
    print("plug", flush=True)
    sys.stdin.readline()
    until_s = time.monotonic() + 30 * slow
    while True:
        try:
            print(node.call("far", "add", 5, 6, timeout_s=5 * slow), flush=True)
            break
        except GeartrainError:
            assert time.monotonic() < until_s
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3, rate_mbit=200) as made:
        yield made


def start(hosts: Hosts, i: int, program: str, *arguments: str) -> subprocess.Popen[str]:
    return hosts.popen(
        i,
        [sys.executable, "-c", program, hosts.address(i), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_host_that_vanishes_fails_its_calls_in_time_and_is_reached_again_when_it_is_back(hosts: Hosts) -> None:
    def line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def go_on(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    near, far = start(hosts, 1, SERVER), start(hosts, 2, SERVER)
    client = start(hosts, 0, CLIENT, line(near), line(far))
    assert line(client) == "unplug"
    hosts.unplug(2)
    go_on(client)
    assert [line(client), line(client)] == ["lost", "lost"]
    errors = ("PeerLostError", "PeerUnreachableError", "WaitTimeoutError", "HandshakeError", "TransportError")
    assert line(client) in errors
    assert line(client) == "plug"
    hosts.plug(2)
    go_on(client)
    assert line(client) == "11"
    assert client.wait(patience(20)) == 0
