"""Fixtures for the tests of RPC."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import preloaded
import pytest
from rpc_functions import TRANSPORTS

from geartrain import rpc


@pytest.fixture(params=[*TRANSPORTS, "tcp+tls"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[rpc.Node, rpc.Node]]:
    """Two nodes in this process that know each other, over one transport."""
    tls = request.getfixturevalue("loopback") if request.param == "tcp+tls" else None
    way: Any = {"timeout_s": 10, "transport": request.param.removesuffix("+tls"), "tls": tls}
    with rpc.Node("server", **way) as server:
        with rpc.Node("client", peers={"server": server.address}, **way) as client:
            yield server, client


PEER = """
import sys, time
from geartrain import rpc
import numpy as np

@rpc.function
def add(a, b):
    return a + b

@rpc.function
def big(n):
    return np.ones(n, np.uint8)

@rpc.function
def forever():
    time.sleep(1000)

@rpc.function
def call_back(address):
    node.directory.known["me"] = address
    node.tell("me", "add", 1, 2)

node = rpc.Node(sys.argv[1], timeout_s=20, transport=None if sys.argv[2] == "auto" else sys.argv[2])
print(node.address, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def spawn() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Starts a node in a process of its own; returns the process and the node's address."""
    running: list[subprocess.Popen[str]] = []

    def start(name: str, transport: str = "auto", prefix: tuple[str, ...] = ()) -> tuple[subprocess.Popen[str], str]:
        command = [*prefix, sys.executable, "-c", PEER, name, transport]
        popen = subprocess.Popen if prefix else preloaded.Popen
        process = popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield start
    for process in running:
        with_streams = process.poll()
        if with_streams is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.communicate()
