"""TLS on several threads: their number is asked for or follows from the cores, and a peer that is killed, forked beside
or closed in the middle of a message is what it is on one."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import certificates
import numpy as np
import preloaded
import pytest
from deadlines import patience

import geartrain.transport.connection as transport
from geartrain import rpc
from geartrain.errors import ArgumentError, ConnectionClosedError, MessageError, PeerLostError, WaitTimeoutError
from geartrain.transport.connection import Connection, Listener
from geartrain.transport.tls import TLS

THREADS = re.compile(
    r"encrypted by (\d+) threads? \(at once so far (\d+)\) and decrypted by (\d+) threads? .* of (\d+)$"
)


pytestmark = pytest.mark.usefixtures("without_tls_variables")


def pair(listener: Listener, tls: TLS, **options: Any) -> tuple[Connection, Connection]:
    mine = transport.connect(listener.address, transport="tcp", tls=tls, timeout_s=patience(30), **options)
    return mine, listener.accept(timeout_s=patience(30))


def test_the_number_of_threads_is_what_was_asked_for_and_a_connection_says_so(loopback: TLS, four: TLS) -> None:
    with transport.listen(tls=four) as listener:
        mine, theirs = pair(listener, four)
        for end in (mine, theirs):
            found = THREADS.search(end.describe())
            assert found is not None, end.describe()
            assert (found[1], found[3], found[4]) == ("4", "4", "4")
            assert "with 4 lanes" in end.describe()
        one, _ = pair(listener, replace(loopback, threads=1))
        assert "with 2 lanes" in one.describe()
        assert THREADS.search(one.describe()) is None
        five, _ = pair(listener, four, lanes=5)
        assert "with 5 lanes" in five.describe()
        none, _ = pair(listener, four, lanes=0)
        assert "lanes" not in none.describe()


def test_without_a_number_there_are_as_many_lanes_as_cores_and_half_as_many_threads(loopback: TLS) -> None:
    with transport.listen(tls=loopback) as listener:
        mine, _ = pair(listener, loopback)
        cores = len(os.sched_getaffinity(0))
        assert f"with {min(max(cores, 2), 8)} lanes" in mine.describe()
        found = THREADS.search(mine.describe())
        assert (1 if found is None else int(found[4])) == min(max(cores // 2, 1), 8)


ONE_CORE = """
import os, sys
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import geartrain.transport.connection as transport
with transport.listen() as listener, transport.connect(listener.address, transport="tcp") as mine:
    print(mine.describe())
"""


def test_a_process_that_may_use_one_core_has_one_thread(loopback: TLS) -> None:
    environment = {**os.environ, **certificates.environment(loopback)}
    done = subprocess.run(
        [sys.executable, "-c", ONE_CORE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=True,
    )
    assert "with 2 lanes, TLSv1.3" in done.stdout
    assert "encrypted by" not in done.stdout


@pytest.mark.parametrize("threads", [0, -1, 17, 1.5, "4", True])
def test_a_number_of_threads_that_is_none_is_refused(loopback: TLS, threads: Any) -> None:
    with pytest.raises(ArgumentError, match="threads of TLS"):
        transport.listen(tls=replace(loopback, threads=threads))


def test_the_option_names_the_number_of_threads(loopback: TLS) -> None:
    three = replace(loopback, threads=3)
    with transport.listen(tls=three) as listener, transport.connect(listener.address, transport="tcp", tls=three) as it:
        assert it.describe().endswith(" of 3")


def test_messages_of_all_sizes_and_many_senders_stay_whole(four: TLS) -> None:
    with transport.listen(tls=four) as listener:
        mine, theirs = pair(listener, four)
        arrays = [np.arange(n, dtype=np.uint32) for n in (3, 600_000, 5_000_001, 1_000, 2_500_000)]

        def send(tag: int) -> None:
            mine.send(b"x", [arrays[tag], arrays[-1 - tag]], tag=tag, timeout_s=patience(60))

        senders = [threading.Thread(target=send, args=[tag]) for tag in range(len(arrays))]
        for sender in senders:
            sender.start()
        for _ in senders:
            message = theirs.receive(timeout_s=patience(60))
            first, second = message.buffers
            assert (first.view(np.uint32) == arrays[message.tag]).all()
            assert (second.view(np.uint32) == arrays[-1 - message.tag]).all()
        for sender in senders:
            sender.join()


def send_until_lost(connection: Connection, array: Any) -> None:
    with pytest.raises(PeerLostError):
        while True:
            connection.send(b"", [array], timeout_s=patience(30))


def test_a_message_beyond_the_limit_is_refused_before_it_takes_memory(four: TLS) -> None:
    limits = transport.MessageLimits(max_message_bytes=4 << 20)
    with transport.listen(tls=four, limits=limits) as listener:
        mine, theirs = pair(listener, four)
        mine.send(b"", [np.zeros(1 << 22, np.uint8)])
        assert theirs.receive().buffers[0].nbytes == 1 << 22
        sender = threading.Thread(target=send_until_lost, args=[mine, np.zeros(16 << 20, np.uint8)])
        sender.start()
        with pytest.raises(MessageError, match="the limit is 4194304"):
            theirs.receive(timeout_s=patience(30))
        sender.join()


PEER = """
from dataclasses import replace
from geartrain.transport.tls import TLS
four = replace(TLS.of_environment(), threads=4)
import sys
import numpy as np
import geartrain.transport.connection as transport
what, address = sys.argv[1:]
with transport.connect(address, transport="tcp", timeout_s=60, tls=four) as mine:
    print("ready", flush=True)
    array = np.ones(60_000_000, np.uint8)
    while True:
        if what == "sends":
            mine.send(b"big", [array], timeout_s=600)
        else:
            mine.receive(timeout_s=600)
"""


def sockets() -> int:
    """That this process has."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            found += os.readlink(descriptor).startswith("socket:")
    return found


@pytest.mark.parametrize("what", ["sends", "receives"])
def test_a_peer_that_is_killed_in_the_middle_of_a_message_is_lost(four: TLS, what: str) -> None:
    environment = {**os.environ, **certificates.environment(four)}
    array = np.ones(60_000_000, np.uint8)
    before = sockets()
    with transport.listen(tls=four) as listener:
        for round_ in range(2):
            command = [sys.executable, "-c", PEER, what, listener.address]
            process = preloaded.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            theirs = listener.accept(timeout_s=patience(60))
            assert process.stdout.readline() == "ready\n"
            killer = threading.Timer(0.02 + 0.2 * round_, process.kill)
            killer.start()
            with pytest.raises(PeerLostError):
                while True:
                    if what == "sends":
                        message = theirs.receive(timeout_s=patience(60))
                        assert message.buffers[0].nbytes == array.nbytes
                        assert message.buffers[0][-1] == 1
                    else:
                        theirs.send(b"big", [array], timeout_s=patience(60))
            process.communicate()
            assert process.returncode == -signal.SIGKILL
            theirs.close()
            del theirs
    ends_s = time.monotonic() + patience(10)
    while sockets() > before and time.monotonic() < ends_s:  # the sideband's thread drops the last reference
        time.sleep(0.01)
    assert sockets() <= before


def test_a_peer_that_stops_in_the_middle_of_a_message_is_a_deadline(four: TLS) -> None:
    environment = {**os.environ, **certificates.environment(four)}
    with transport.listen(tls=four) as listener:
        command = [sys.executable, "-c", PEER, "receives", listener.address]
        process = preloaded.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            theirs = listener.accept(timeout_s=patience(60))
            array = np.ones(100_000_000, np.uint8)
            theirs.send(b"", [array], timeout_s=patience(60))
            process.send_signal(signal.SIGSTOP)
            began_s = time.monotonic()
            with pytest.raises(WaitTimeoutError):
                while True:
                    theirs.send(b"", [array], timeout_s=0.5)
            with pytest.raises(PeerLostError):  # half a message cannot be undone
                theirs.send(b"small")
            assert time.monotonic() - began_s < patience(10)
        finally:
            process.kill()
            process.communicate()


def until_the_end(call: Any, raised: list[BaseException]) -> None:
    try:
        while True:
            call()
    except BaseException as error:
        raised.append(error)


def test_either_end_may_be_closed_twice_by_two_threads_in_the_middle_of_messages(four: TLS) -> None:
    array = np.ones(12_000_000, np.uint8)
    with transport.listen(tls=four) as listener:
        for round_ in range(4):
            mine, theirs = pair(listener, four)
            raised: list[BaseException] = []
            calls = [lambda end=end: end.send(b"", [array], timeout_s=patience(60)) for end in (mine, theirs)] + [
                lambda end=end: end.receive(timeout_s=patience(60)) for end in (mine, theirs)
            ]
            threads = [threading.Thread(target=until_the_end, args=[call, raised]) for call in calls]
            for thread in threads:
                thread.start()
            time.sleep(random.Random(round_).random() * 0.1)
            closed = (mine, theirs)[round_ % 2]
            closers = [threading.Thread(target=closed.close) for _ in range(2)]
            for thread in closers:
                thread.start()
            for thread in threads + closers:
                thread.join(patience(60))
                assert not thread.is_alive()
            assert len(raised) == 4
            assert all(isinstance(error, (ConnectionClosedError, PeerLostError)) for error in raised), raised
            closed.close()


FORKS = """
from dataclasses import replace
from geartrain.transport.tls import TLS
four = replace(TLS.of_environment(), threads=4)
import os, sys, threading
import numpy as np
import geartrain.transport.connection as transport
from geartrain.errors import ConnectionClosedError, PeerLostError
array = np.ones(20_000_000, np.uint8)
listener = transport.listen(tls=four)
mine = transport.connect(listener.address, transport="tcp", tls=four)
theirs = listener.accept()
stop = threading.Event()
def send():
    while not stop.is_set():
        mine.send(b"", [array], timeout_s=60)
def receive():
    while True:
        try:
            theirs.receive(timeout_s=60)
        except PeerLostError:
            return
threads = [threading.Thread(target=send), threading.Thread(target=receive)]
for thread in threads: thread.start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                theirs.receive()
            except ConnectionClosedError:
                with transport.listen(tls=four) as own:
                    one = transport.connect(own.address, transport="tcp", tls=four)
                    other = own.accept()
                    sender = threading.Thread(target=one.send, args=(b"", [array]))
                    sender.start()
                    code = 0 if (other.receive().buffers[0] == 1).all() else 2
                    sender.join()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
threads[0].join()
mine.close()
threads[1].join()
print("done", flush=True)
os._exit(0)
"""


def test_children_forked_beside_the_threads_make_connections_of_their_own(four: TLS) -> None:
    environment = {**os.environ, **certificates.environment(four)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )
    assert (done.stdout, done.stderr) == ("done\n", "")


@rpc.function
def sum_of_tls(values: Any) -> int:
    return int(values.sum())


def test_nodes_call_each_other_with_big_arrays(four: TLS) -> None:
    array = np.arange(3_000_000)
    with rpc.Node("server", secret=b"s", tls=four) as server:
        peers = {"server": server.address}
        with rpc.Node("client", peers=peers, secret=b"s", transport="tcp", tls=four) as client:
            for _ in range(5):
                assert client.call("server", "sum_of_tls", array) == int(array.sum())
            assert THREADS.search(client.connections()["server"]) is not None
