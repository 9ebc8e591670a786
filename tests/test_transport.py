"""Every transport between real processes: what is sent arrives; what dies, stops, forks or lies is a named error."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from geartrain import transport
from geartrain.codec import decode, encode
from geartrain.errors import (
    ConnectionClosedError,
    MessageError,
    PeerLostError,
    SchemaError,
    TransportError,
    UntrustedPeerError,
    WaitTimeoutError,
)
from geartrain.transport import Connection, Limits, Listener

PEER = """
import sys
from geartrain import transport
from geartrain.errors import PeerLostError
connection = transport.connect(sys.argv[1], transport=sys.argv[2] or None)
try:
    while True:
        message = connection.receive(timeout_s=60)
        connection.send(message.header, message.buffers, tag=message.tag, kind=message.kind)
except PeerLostError:
    pass
"""

Start = Callable[..., tuple[Connection, subprocess.Popen[bytes]]]


@pytest.fixture
def listener() -> Iterator[Listener]:
    with transport.listen() as one:
        yield one


@pytest.fixture
def echo(listener: Listener) -> Iterator[Start]:
    """A process that sends back what it gets; returns the connection to it, and the process."""
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> tuple[Connection, subprocess.Popen[bytes]]:
        running.append(subprocess.Popen([sys.executable, "-c", PEER, listener.address, name]))
        return listener.accept(), running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_what_is_sent_to_another_process_comes_back(echo: Start, name: str) -> None:
    connection, _ = echo(name)
    assert connection.transport == name
    assert name in repr(connection)
    random = np.random.default_rng(0)
    for size in (0, 1, 1000, 100_000, 3_000_000, 50_000_000):
        array = random.integers(0, 256, size, np.uint8)
        connection.send(b"what", [array, b"beside"], tag=2**63, kind=7)
        message = connection.receive()
        assert (message.tag, message.kind, message.header) == (2**63, 7, b"what")
        assert (message.buffers[0] == array).all()
        assert bytes(message.buffers[1]) == b"beside"
    connection.send(encode({"obs": np.arange(5)}))
    assert decode(connection.receive())["obs"].tolist() == [0, 1, 2, 3, 4]
    counts = connection.counts()
    assert counts["messages_sent"] == counts["messages_received"] == 7
    assert sum(counts["bytes_sent"].values()) == sum(counts["bytes_received"].values())
    assert ("view" in counts["bytes_received"]) == (name == "shm")
    assert ("lanes" in counts["bytes_received"]) == (name == "tcp")


def test_the_choice_is_made_by_trying_and_is_explained(echo: Start, listener: Listener) -> None:
    connection, _ = echo("")
    assert connection.transport == "shm"
    with transport.connect(listener.address) as here:
        assert here.transport == "inproc"
        assert here.considered == []
    listener.accept()
    with transport.connect(listener.address, transport="tcp") as forced:
        assert forced.transport == "tcp"
    assert transport.viable() == {"inproc": None, "shm": None, "tcp": None}
    gone = listener.address.replace("shm=geartrain", "shm=elsewhere")
    with pytest.raises(TransportError, match="shm: its socket is not there"):
        transport.connect(gone, transport="shm")
    with pytest.raises(TransportError, match="there is no transport 'pigeon'"):
        transport.connect(gone, transport="pigeon")
    with pytest.raises(SchemaError, match="not an address"):
        transport.connect("localhost:80")


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_killed_peer_is_lost_and_what_it_sent_stays(echo: Start, name: str) -> None:
    connection, process = echo(name)
    array = np.arange(2_000_000)
    connection.send(b"", [array])
    kept = connection.receive()
    process.kill()
    began_s = time.monotonic()
    with pytest.raises(PeerLostError):
        while True:
            connection.send(b"", [array], timeout_s=5)
            connection.receive(timeout_s=5)
    assert time.monotonic() - began_s < 3
    assert (kept.buffers[0].view(np.int64) == array).all()


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_stopped_peer_is_a_deadline_and_bounds_what_is_queued(echo: Start, name: str) -> None:
    connection, process = echo(name)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(WaitTimeoutError):
        connection.receive(timeout_s=0.1)
    began_s = time.monotonic()
    with pytest.raises(WaitTimeoutError):
        for _ in range(10_000):
            connection.send(b"x" * 20_000, timeout_s=0.3)
    assert time.monotonic() - began_s < 10


def test_a_wait_can_be_interrupted() -> None:
    with transport.listen() as listener:
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            listener.accept(timeout_s=30)


@pytest.mark.parametrize("name", transport.TRANSPORTS)
def test_a_forked_child_is_told_and_the_parent_goes_on(
    listener: Listener, fork: Callable[[Callable[[], object]], int], name: str
) -> None:
    mine = transport.connect(listener.address, transport=name)
    theirs = listener.accept()

    def child() -> int:
        for use in (lambda: mine.send(b"x"), lambda: theirs.receive(timeout_s=1), lambda: listener.accept(timeout_s=1)):
            with pytest.raises(ConnectionClosedError, match="forked"):
                use()
        return 0

    assert os.waitstatus_to_exitcode(os.waitpid(fork(child), 0)[1]) == 0
    mine.send(b"still here")
    assert theirs.receive().header == b"still here"


def test_limits_and_secrets_are_kept() -> None:
    with transport.listen(secret=b"s", limits=Limits(max_message_bytes=1000)) as listener:
        for wrong in (b"", b"other"):
            with pytest.raises(UntrustedPeerError):
                transport.connect(listener.address, secret=wrong)
        for name in transport.TRANSPORTS:
            with transport.connect(listener.address, secret=b"s", transport=name) as large:
                theirs = listener.accept()
                assert large.authenticated
                assert theirs.authenticated
                if name != "inproc":
                    large.send(b"", [bytes(2000)])
                    with pytest.raises(MessageError, match="the limit is 1000"):
                        theirs.receive(timeout_s=5)
                else:
                    with pytest.raises(MessageError, match="1000 bytes"):
                        theirs.send(b"", [bytes(2000)])
    with pytest.raises(UntrustedPeerError, match="give a secret"):
        transport.listen("0.0.0.0")
    with pytest.raises(SchemaError, match="16384 buffers"):
        transport.listen(limits=Limits(max_buffers=1 << 20))


def test_a_browser_at_the_door_is_sent_away(listener: Listener) -> None:
    host, port = listener.address.rpartition("tcp=")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=5) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)
        with contextlib.suppress(ConnectionResetError):  # when what it said is not all read
            assert stranger.recv(100) == b""
    assert listener.refused == 1


def test_memory_of_messages_is_used_again() -> None:
    from geartrain import _native

    with transport.listen() as listener:
        mine = transport.connect(listener.address, transport="tcp")
        theirs = listener.accept()
        array = np.ones(5_000_000, np.uint8)

        def turn() -> None:
            sender = threading.Thread(target=mine.send, args=(b"", [array]))
            sender.start()
            theirs.receive()
            sender.join()

        turn()
        made = _native.pool_counts()["buffers_made"]
        for _ in range(10):
            turn()
        assert _native.pool_counts()["buffers_made"] == made
