"""NIXL between real processes: what is written and read is there; what dies, stops, forks or lies is a named error.

Needs the optional packages; see geartrain/transport/one_sided/nixl. Runs over shared memory, and once more over TCP.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from deadlines import patience, stop

import geartrain.transport.connection as transport
from geartrain.errors import ConnectionClosedError, MessageError, PeerLostError, TransportError, WaitTimeoutError
from geartrain.transport.connection import Connection, Listener
from geartrain.transport.one_sided import nixl

here = pytest.mark.skipif(not nixl.installed(), reason=f"nixl is not installed: {nixl.INSTALL}")
BIG = 64 << 20

PEER = """
import sys, hashlib
import numpy as np
from geartrain.transport.one_sided import nixl
import geartrain.transport.connection as transport
connection = transport.connect(sys.argv[1])
link = nixl.attach(connection, timeout_s=90)
memory = np.zeros(int(sys.argv[2]), np.uint8)
region = nixl.expose(memory)
connection.send(region.descriptor)
while True:
    message = connection.receive(timeout_s=3600)
    what = message.header.decode()
    if what == "digest":
        connection.send(hashlib.sha256(memory[: message.tag]).digest())
    elif what == "write":  # into the other side's
        link.write(np.full(message.tag, 7, np.uint8), message.buffers[0].tobytes())
        connection.send(b"written")
    elif what == "reopen":
        region.close()
        region = nixl.expose(memory)
        connection.send(region.descriptor)
    else:
        break
"""


class Peer:
    def __init__(self, listener: Listener) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", PEER, listener.address, str(BIG)])
        self.connection: Connection = listener.accept(timeout_s=patience(90))
        self.link = nixl.attach(self.connection, timeout_s=patience(90))
        self.descriptor = self.connection.receive(timeout_s=patience(30)).header

    def ask(self, what: str, tag: int = 0, buffers: tuple[np.ndarray, ...] = ()) -> bytes:
        self.connection.send(what.encode(), buffers, tag=tag)
        return self.connection.receive(timeout_s=patience(30)).header

    def end(self) -> None:
        self.link.close()
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def peers() -> Iterator[Callable[[], Peer]]:
    started: list[Peer] = []
    with transport.listen() as listener:

        def start() -> Peer:
            started.append(Peer(listener))
            return started[-1]

        yield start
        for peer in started:
            peer.end()


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    """One that all tests share that do not hurt it."""
    with transport.listen() as listener:
        one = Peer(listener)
        yield one
        one.end()


def digest(memory: np.ndarray) -> bytes:
    import hashlib

    return hashlib.sha256(memory).digest()


@here
def test_what_is_written_is_there_and_reads_back(peer: Peer) -> None:
    rng = np.random.default_rng(0)
    for size in (1, 7, 4096, 1_000_003, BIG):
        mine = rng.integers(0, 256, size, np.uint8)
        peer.link.write(mine, peer.descriptor)
        assert peer.ask("digest", size) == digest(mine), size
        back = np.empty_like(mine)
        peer.link.read(back, peer.descriptor)
        assert (back == mine).all()
    peer.link.write(np.empty(0, np.uint8), peer.descriptor)  # nothing is fine


@here
def test_writes_land_in_order_and_where_they_should(peer: Peer) -> None:
    expected = np.zeros(3000, np.uint8)
    peer.link.write(expected, peer.descriptor)
    rng = np.random.default_rng(1)
    for i in range(300):  # they overlap: the later one wins
        at, size = int(rng.integers(0, 2900)), int(rng.integers(1, 100))
        piece = np.full(size, i % 251, np.uint8)
        expected[at : at + size] = piece
        peer.link.write(piece, peer.descriptor, offset=at)
    assert peer.ask("digest", 3000) == digest(expected)


@here
def test_the_peer_writes_into_this_side_as_well_and_into_tensors(peer: Peer) -> None:
    torch = pytest.importorskip("torch")
    mine = torch.zeros(500_000, dtype=torch.int32)
    with nixl.expose(mine) as region:
        told = np.frombuffer(region.descriptor, np.uint8)
        assert peer.ask("write", mine.nbytes, (told,)) == b"written"
    assert (mine == 0x07070707).all()
    peer.link.write(mine, peer.descriptor)
    assert peer.ask("digest", mine.nbytes) == digest(mine.numpy().view(np.uint8))


@here
def test_memory_that_is_taken_back_and_exposed_again_works(peer: Peer) -> None:
    for i in range(3):
        peer.descriptor = peer.ask("reopen")
        mine = np.full(100_000, i, np.uint8)
        peer.link.write(mine, peer.descriptor)
        assert peer.ask("digest", mine.nbytes) == digest(mine)


@here
def test_mistakes_are_refused_at_the_door(peer: Peer) -> None:
    with pytest.raises(MessageError, match="not C-contiguous"):
        nixl.expose(np.zeros((4, 4))[:, ::2])
    with pytest.raises(MessageError, match="found a bytes"):
        nixl.expose(b"abc")
    with pytest.raises(MessageError, match="do not fit"):
        peer.link.write(np.zeros(2, np.uint8), peer.descriptor, offset=BIG - 1)
    with pytest.raises(MessageError, match="do not fit"):
        peer.link.write(np.zeros(2, np.uint8), peer.descriptor, offset=-1)
    with pytest.raises(MessageError, match="no descriptor"):
        peer.link.write(np.zeros(2, np.uint8), b"???")
    with nixl.expose(np.zeros(10, np.uint8)) as mine:
        with pytest.raises(MessageError):  # not the peer's
            peer.link.write(np.zeros(2, np.uint8), mine.descriptor)
    peer.link.write(np.zeros(2, np.uint8), peer.descriptor)  # and the link is still good


@here
def test_a_killed_peer_is_lost_within_the_deadline(peers: Callable[[], Peer]) -> None:
    peer = peers()
    mine = np.ones(BIG, np.uint8)
    peer.link.write(mine, peer.descriptor)
    peer.process.kill()
    peer.process.wait()
    began_s = time.monotonic()
    with pytest.raises(PeerLostError):
        for _ in range(1000):
            peer.link.write(mine, peer.descriptor, timeout_s=patience(5))
    assert time.monotonic() - began_s < patience(6)
    with pytest.raises(ConnectionClosedError, match="has ended"):
        peer.link.write(mine, peer.descriptor)
    mine[:] = 0  # nobody holds it
    again = peers()  # and the agent is as good as before
    again.link.write(mine, again.descriptor)
    assert again.ask("digest", BIG) == digest(mine)


@here
def test_a_stopped_peer_is_a_deadline_at_most(peers: Callable[[], Peer]) -> None:
    peer = peers()
    stop(peer.process.pid)
    began_s = time.monotonic()
    try:
        for _ in range(20):
            peer.link.write(np.ones(BIG, np.uint8), peer.descriptor, timeout_s=0.5)
    except WaitTimeoutError:  # over TCP; through shared memory it takes part without knowing
        assert peer.link.ended
    assert time.monotonic() - began_s < patience(20)


@here
def test_a_side_that_cannot_says_why_to_the_other() -> None:
    with transport.listen() as listener, transport.connect(listener.address) as mine, listener.accept() as theirs:
        theirs.send(b"!nixl is not viable: no luck")
        with pytest.raises(TransportError, match="for the peer: nixl is not viable: no luck"):
            nixl.attach(mine, timeout_s=patience(5))


@here
def test_a_peer_that_cannot_reach_the_memory_is_found_out() -> None:
    """It says that it has proved the way, and has written nothing."""
    with transport.listen() as listener, transport.connect(listener.address) as mine, listener.accept() as theirs:
        its = nixl.NixlHandshake()
        theirs.send(b"." + its.hello)
        theirs.send(b".proved")
        with pytest.raises(TransportError, match="not this side's nonce"):
            nixl.attach(mine, timeout_s=patience(5))


@here
def test_a_forked_child_is_refused_and_the_parent_goes_on(peer: Peer, fork: Callable[..., int]) -> None:
    region = nixl.expose(np.zeros(10, np.uint8))

    def child() -> int:
        for use in (
            lambda: nixl.expose(np.zeros(1, np.uint8)),
            lambda: peer.link.write(np.zeros(1, np.uint8), peer.descriptor),
        ):
            with pytest.raises(ConnectionClosedError, match="fork"):
                use()
        assert "fork" in (nixl.why_not() or "")
        region.close()  # nothing happens
        peer.link.close()
        return 0

    assert os.waitstatus_to_exitcode(os.waitpid(fork(child), 0)[1]) == 0
    peer.link.write(np.zeros(10, np.uint8), peer.descriptor)
    region.close()


@pytest.mark.skipif(nixl.installed(), reason="nixl is installed")
def test_without_the_package_the_reason_says_how_to_get_it() -> None:
    assert nixl.INSTALL in (nixl.why_not() or "")
    with pytest.raises(TransportError, match="not viable"):
        nixl.expose(np.zeros(1))


@here
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif("UCX_TLS" in os.environ, reason="UCX_TLS is set: it goes over that")
def test_all_of_this_holds_over_tcp() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"UCX_TLS": "tcp"},
        capture_output=True,
        text=True,
        timeout=patience(380),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
