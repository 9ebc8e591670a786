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

import certificates
import numpy as np
import preloaded
import pytest
from deadlines import patience, stop

import geartrain.transport.connection as transport
from geartrain.errors import (
    ArgumentError,
    ConnectionClosedError,
    MessageError,
    PeerLostError,
    RegionError,
    TransportError,
    UntrustedPeerError,
    WaitTimeoutError,
)
from geartrain.transport.codec import decode, encode
from geartrain.transport.connection import Connection, Listener, MessageLimits

PEER = """
import sys
import geartrain.transport.connection as transport
from geartrain.errors import PeerLostError
connection = transport.connect(sys.argv[1], transport=sys.argv[2] or None)
try:
    while True:
        message = connection.receive(timeout_s=60)
        connection.send(message.header, message.buffers, tag=message.tag, kind=message.kind)
except PeerLostError:
    pass
"""

Start = Callable[..., tuple[Connection, subprocess.Popen[str]]]


WAYS = ["shm", "tcp", "tcp+tls"]  # between processes


@pytest.fixture(autouse=True)
def tls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests over "tcp+tls" run in an environment with certificates, and so do the processes that they start."""
    found = getattr(request.node, "callspec", None)
    if found is not None and "tcp+tls" in found.params.values():
        for variable, value in certificates.environment(request.getfixturevalue("loopback")).items():
            monkeypatch.setenv(variable, value)


def provider(way: str) -> str:
    """The transport of one of `WAYS`."""
    return way.removesuffix("+tls")


@pytest.fixture
def listener() -> Iterator[Listener]:
    with transport.listen() as one:
        yield one


@pytest.fixture
def echo(listener: Listener) -> Iterator[Start]:
    """A process that sends back what it gets; returns the connection to it, and the process."""
    running: list[subprocess.Popen[str]] = []

    def start(name: str) -> tuple[Connection, subprocess.Popen[str]]:
        running.append(preloaded.Popen([sys.executable, "-c", PEER, listener.address, provider(name)]))
        return listener.accept(), running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", WAYS)
def test_what_is_sent_to_another_process_comes_back(echo: Start, name: str) -> None:
    connection, _ = echo(name)
    assert connection.transport == provider(name)
    assert provider(name) in repr(connection)
    assert connection.tls.startswith("TLSv1.3") == (name == "tcp+tls")
    random = np.random.default_rng(0)
    for size in (0, 1, 1000, 100_000, 3_000_000, 20_000_000):
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
    assert ("lanes" in counts["bytes_received"]) == (provider(name) == "tcp")


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
    with pytest.raises(ArgumentError, match="not an address"):
        transport.connect("localhost:80")
    port = listener.address.rpartition(":")[2]
    with transport.connect(f"id=any;tcp=127.0.0.1:{port}") as unnamed:  # whoever listens there
        assert unnamed.transport == "tcp"


@pytest.mark.parametrize("name", WAYS)
def test_a_killed_peer_is_lost_and_what_it_sent_stays(echo: Start, name: str) -> None:
    connection, process = echo(name)
    array = np.arange(2_000_000)
    connection.send(b"", [array])
    kept = connection.receive()
    process.kill()
    began_s = time.monotonic()
    with pytest.raises(PeerLostError):
        while True:
            connection.send(b"", [array], timeout_s=patience(5))
            connection.receive(timeout_s=patience(5))
    assert time.monotonic() - began_s < patience(3)
    assert (kept.buffers[0].view(np.int64) == array).all()


def test_a_deadline_that_passes_while_the_interpreter_is_busy_is_a_deadline(listener: Listener) -> None:
    connection = transport.connect(listener.address, timeout_s=patience(20))
    other = listener.accept(timeout_s=patience(20))
    found: list[object] = []

    def receive(wait: Callable[..., object]) -> None:
        try:
            found.append(wait(timeout_s=0.4))
        except WaitTimeoutError as error:
            found.append(error)

    before_s = sys.getswitchinterval()
    for wait in (connection.receive, listener.accept):
        waiting = threading.Thread(target=receive, args=(wait,))
        sys.setswitchinterval(60)  # whoever has the interpreter keeps it
        try:
            waiting.start()
            time.sleep(0.05)  # it waits, without the interpreter
            until_s = time.monotonic() + 0.6
            while time.monotonic() < until_s:
                pass
        finally:
            sys.setswitchinterval(before_s)
        waiting.join()
    assert [type(each) for each in found] == [WaitTimeoutError, WaitTimeoutError]
    for each in (connection, other):
        each.close()


@pytest.mark.parametrize("name", WAYS)
def test_a_stopped_peer_is_a_deadline_and_bounds_what_is_queued(echo: Start, name: str) -> None:
    connection, process = echo(name)
    stop(process.pid)
    with pytest.raises(WaitTimeoutError):
        connection.receive(timeout_s=0.1)
    began_s = time.monotonic()
    with pytest.raises(WaitTimeoutError):
        for _ in range(10_000):
            connection.send(b"x" * 20_000, timeout_s=0.3)
    assert time.monotonic() - began_s < patience(10)


EXPOSER = """
import signal, sys
import numpy as np
import geartrain.transport.connection as transport
connection = transport.connect(sys.argv[1], transport=sys.argv[2], cross_memory=sys.argv[3] == "cma")
array = np.arange(int(sys.argv[4]), dtype=np.uint8)
with connection.expose(array, writable=True) as region:
    connection.send(region.handle)
    connection.receive(timeout_s=120)  # and that it does not do before all is over
    connection.send(b"", [array])
connection.receive(timeout_s=120)
"""

SOURCE = """
import sys
import numpy as np
import geartrain.transport.connection as transport
connection = transport.connect(sys.argv[1], transport=sys.argv[2])
array = np.ones(int(sys.argv[3]), np.uint8)
while True:
    connection.send(b"", [array], timeout_s=600)
"""

SINK = """
import sys
import geartrain.transport.connection as transport
connection = transport.connect(sys.argv[1], transport=sys.argv[2])
while True:
    connection.receive(timeout_s=600)
"""

TIGHT = """
import resource, sys
import numpy as np
import geartrain.transport.connection as transport
from geartrain.errors import NoSpaceError
connection = transport.connect(sys.argv[1], transport="shm")
connection.send(b"before", [bytes(2_000_000)])
array = np.zeros(50_000_000 if sys.argv[2] == "files" else 400_000_000, np.uint8)
if sys.argv[2] == "files":  # what a memory file may hold, as on a host whose shared memory is full
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, -1))
else:  # threads that allocate for the first time take an arena of up to 128 MB, now or later
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20), -1))
try:
    connection.send(b"big", [array], timeout_s=20)
except NoSpaceError as error:
    connection.send(str(error).encode(), [bytes(2_000_000)])
connection.send(b"after", [b"small"])
connection.receive()
"""


@pytest.fixture
def run(listener: Listener) -> Iterator[Start]:
    """A process that runs a program with the listener's address; returns the connection to it, and the process."""
    running: list[subprocess.Popen[str]] = []

    def start(program: str, *args: object) -> tuple[Connection, subprocess.Popen[str]]:
        line = [sys.executable, "-c", program, listener.address, *(provider(str(one)) for one in args)]
        running.append(preloaded.Popen(line, stderr=subprocess.DEVNULL))
        return listener.accept(timeout_s=patience(240)), running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()


def _in_use() -> tuple[int, int]:
    """Open files, and MB of resident memory."""
    with open("/proc/self/statm") as statm:
        return len(os.listdir("/proc/self/fd")), int(statm.read().split()[1]) * 4096 // 1_000_000


@pytest.mark.parametrize("path", ["cma", "served", "tcp", "tcp+tls"])
def test_exposed_memory_is_read_and_written_though_its_owner_does_nothing(run: Start, path: str) -> None:
    size = 3_000_001
    connection, _ = run(EXPOSER, path if path.startswith("tcp") else "shm", path, size)
    handle = connection.receive().header
    expected = np.arange(size, dtype=np.uint8)
    into = np.zeros(size - 10, np.uint8)
    connection.read(handle, into, offset=10)
    assert (into == expected[10:]).all()
    connection.write(handle, np.full(1000, 7, np.uint8), offset=5)
    expected[5:1005] = 7
    counts = connection.counts()
    way = "cma" if path == "cma" else "served"
    assert counts["bytes_received"][way] == size - 10
    assert counts["bytes_sent"][way] == 1000
    assert connection.one_sided.startswith(way)
    with pytest.raises(RegionError, match="ends before"):
        connection.read(handle, into, offset=11)
    with pytest.raises(ArgumentError, match="not a region"):
        connection.read(b"what", into)
    with pytest.raises((BufferError, ValueError)):
        connection.read(handle, b"read-only")
    connection.send(b"")
    assert (connection.receive().buffers[0] == expected).all()
    with pytest.raises(RegionError, match="closed"):
        for _ in range(1000):  # it sends first, and closes then
            connection.read(handle, into)


def test_a_region_is_closed_with_its_last_reference_and_lets_go_of_its_memory(listener: Listener) -> None:
    mine = transport.connect(listener.address)
    theirs = listener.accept()
    array = np.zeros(100)
    references = sys.getrefcount(array)
    region = theirs.expose(array)
    handle, into = region.handle, np.empty(100)
    assert (region.nbytes, len(handle), region.closed) == (800, 56, False)
    mine.read(handle, into)
    with pytest.raises(RegionError, match="reading only"):
        mine.write(handle, into)
    del region
    assert sys.getrefcount(array) == references
    with pytest.raises(RegionError, match="closed"):
        mine.read(handle, into)
    with pytest.raises((BufferError, ValueError)):
        theirs.expose(np.zeros((10, 10)).T)
    array.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        theirs.expose(array, writable=True)


def test_a_peer_that_says_nothing_is_kept_by_its_heartbeats(listener: Listener) -> None:
    with transport.connect(listener.address, transport="tcp", peer_timeout_s=2.0) as mine, listener.accept() as theirs:
        time.sleep(3.5)
        theirs.send(b"still there")
        assert mine.receive(timeout_s=patience(5)).header == b"still there"


@pytest.mark.parametrize("name", WAYS)
def test_a_stopped_peer_is_lost_though_nobody_waits_for_it(name: str) -> None:
    with transport.listen(peer_timeout_s=2.0) as listener:
        process = preloaded.Popen([sys.executable, "-c", PEER, listener.address, provider(name)])
        try:
            connection = listener.accept()
            stop(process.pid)
            until_s = time.monotonic() + patience(8)
            while not connection.native.lost and time.monotonic() < until_s:
                time.sleep(0.05)
            with pytest.raises(PeerLostError, match="no heartbeat"):
                connection.receive(timeout_s=patience(1))
        finally:
            process.kill()
            process.wait()
    with pytest.raises(ArgumentError, match="peer_timeout_s is 0"):
        transport.listen(peer_timeout_s=1.0)


@pytest.mark.parametrize("what", ["files", "memory"])
def test_no_memory_for_a_big_message_is_a_named_error_and_the_connection_goes_on(run: Start, what: str) -> None:
    connection, _ = run(TIGHT, what)
    assert connection.receive(timeout_s=patience(60)).header == b"before"
    assert b"cannot" in connection.receive(timeout_s=patience(60)).header
    assert connection.receive(timeout_s=patience(60)).buffers[0].tobytes() == b"small"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", [SOURCE, SINK])
@pytest.mark.parametrize("name", WAYS)
def test_a_peer_killed_in_the_middle_of_a_gigabyte_leaves_nothing_behind(run: Start, name: str, program: str) -> None:
    array = np.ones(1 << 30, np.uint8)
    warm, _ = run(PEER, name)
    warm.send(b"x")
    warm.receive()
    before = _in_use()

    def transfer(connection: Connection, after_s: float, process: subprocess.Popen[str]) -> None:
        threading.Timer(after_s, process.kill).start()
        with pytest.raises(PeerLostError):
            while True:
                if program is SOURCE:
                    connection.receive(timeout_s=patience(30))
                else:
                    connection.send(b"", [array], timeout_s=patience(30))

    for after_s in (0.1, 0.6):
        connection, process = run(program, name, 1 << 30)
        if program is SOURCE:
            connection.receive(timeout_s=patience(240))
        began_s = time.monotonic()
        transfer(connection, after_s, process)
        assert time.monotonic() - began_s < after_s + 30
        connection.close()
        del connection
        warm.send(b"y")
        assert warm.receive().header == b"y"
    after = _in_use()
    assert after[0] == before[0]
    # A message's memory is kept warm, and so is no more than one message's.
    assert after[1] < before[1] + 1100


def test_a_wait_can_be_interrupted() -> None:
    with transport.listen() as listener:
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            listener.accept(timeout_s=patience(30))


@pytest.mark.parametrize("name", ["inproc", *WAYS])
def test_a_forked_child_is_told_and_the_parent_goes_on(
    listener: Listener, fork: Callable[[Callable[[], object]], int], name: str
) -> None:
    mine = transport.connect(listener.address, transport=provider(name))
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
    with transport.listen(secret=b"s", limits=MessageLimits(max_message_bytes=1000)) as listener:
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
                        theirs.receive(timeout_s=patience(5))
                else:
                    with pytest.raises(MessageError, match="1000 bytes"):
                        theirs.send(b"", [bytes(2000)])
    with pytest.raises(UntrustedPeerError, match="give a secret"):
        transport.listen("0.0.0.0")
    with pytest.raises(ArgumentError, match="16384 buffers"):
        transport.listen(limits=MessageLimits(max_buffers=1 << 20))


def test_a_browser_at_the_door_is_sent_away(listener: Listener) -> None:
    host, port = listener.address.rpartition("tcp=")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=patience(5)) as stranger:
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
