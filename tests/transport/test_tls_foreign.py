"""TLS beside what peers of another make do, and at the ends that a connection may have: keys that they change are
followed, and a stream that ends is a lost peer, whatever ended it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import certificates
import numpy as np
import preloaded
import pytest
from deadlines import patience
from foreign_tls import ENDS, ForeignTls

import geartrain.transport.connection as transport
from geartrain import rpc
from geartrain.errors import PeerLostError
from geartrain.transport.connection import Connection, Listener
from geartrain.transport.tls import TLS

pytestmark = pytest.mark.usefixtures("without_tls_variables")


def through(relay: ForeignTls, listener: Listener, tls: TLS) -> tuple[Connection, Connection]:
    mine = transport.connect(relay.address, transport="tcp", tls=tls, timeout_s=patience(30))
    return mine, listener.accept(timeout_s=patience(30))


@pytest.mark.parametrize(
    ("threads", "rekey_bytes"),
    [(1, 100_000), (4, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(1, 1), (4, 100_000)])],
)
def test_keys_that_a_foreign_peer_changes_are_followed_in_both_directions(
    loopback: TLS, threads: int, rekey_bytes: int
) -> None:
    tls = replace(loopback, threads=threads)
    arrays = [np.arange(n, dtype=np.uint32) for n in (3, 700_000, 30_000, 1_500_000)]

    def send(end: Connection) -> None:
        for tag, array in enumerate(arrays):
            end.send(b"x", [array], tag=tag, timeout_s=patience(60))

    with transport.listen(tls=tls) as listener, ForeignTls(tls, listener.address, rekey_bytes) as relay:
        mine, theirs = through(relay, listener, tls)
        senders = [threading.Thread(target=send, args=[end]) for end in (mine, theirs)]
        for sender in senders:
            sender.start()
        for end in (mine, theirs):
            for tag, array in enumerate(arrays):
                message = end.receive(timeout_s=patience(60))
                assert message.tag == tag
                assert (message.buffers[0].view(np.uint32) == array).all()
        for sender in senders:
            sender.join()
        assert relay.rekeys > 100
        with theirs.expose(arrays[3]) as region:  # the sideband
            into = np.empty_like(arrays[3])
            mine.read(region.handle, into)
            assert (into == arrays[3]).all()


@pytest.mark.parametrize("end", ENDS)
def test_a_stream_that_ends_in_the_middle_of_a_message_is_a_lost_peer(four: TLS, end: str) -> None:
    array = np.ones(12_000_000, np.uint8)
    with (
        transport.listen(tls=four) as listener,
        ForeignTls(four, listener.address, end=end, after_bytes=3_000_000) as relay,
    ):
        mine, theirs = through(relay, listener, four)
        raised: list[BaseException] = []

        def send() -> None:
            try:
                while True:
                    mine.send(b"big", [array], timeout_s=patience(30))
            except BaseException as error:
                raised.append(error)

        sender = threading.Thread(target=send)
        sender.start()
        for _ in range(2):  # and for good
            with pytest.raises(PeerLostError):
                theirs.receive(timeout_s=patience(30))
        sender.join(patience(60))
        assert relay.ended
        assert [type(error) for error in raised] == [PeerLostError]


@pytest.mark.parametrize("end", ENDS)
def test_a_stream_that_ends_between_messages_is_a_lost_peer_to_who_waits(loopback: TLS, end: str) -> None:
    with transport.listen(tls=loopback) as listener, ForeignTls(loopback, listener.address, end=end) as relay:
        mine, theirs = through(relay, listener, loopback)
        mine.send(b"small", tag=7)
        assert theirs.receive(timeout_s=patience(30)).tag == 7
        threading.Timer(0.1, relay.end_now.set).start()
        began_s = time.monotonic()
        with pytest.raises(PeerLostError):
            theirs.receive(timeout_s=patience(60))
        with pytest.raises(PeerLostError):
            mine.receive(timeout_s=patience(60))
        assert time.monotonic() - began_s < patience(20)


@pytest.mark.parametrize("end", ENDS)
def test_a_read_of_memory_whose_stream_ends_is_a_lost_peer(loopback: TLS, end: str) -> None:
    memory = np.ones(12_000_000, np.uint8)
    with (
        transport.listen(tls=loopback) as listener,
        ForeignTls(loopback, listener.address, end=end, after_bytes=3_000_000) as relay,
    ):
        mine, theirs = through(relay, listener, loopback)
        with mine.expose(memory) as region, pytest.raises(PeerLostError):
            theirs.read(region.handle, np.empty_like(memory), timeout_s=patience(30))
        assert relay.ended


@rpc.function
def echo_to_foreign(value: Any) -> Any:
    return value


@rpc.function
def zeros_for_foreign(n: int) -> Any:
    return np.zeros(n, np.uint8)


@pytest.mark.parametrize("end", ENDS)
def test_a_call_whose_stream_ends_is_an_error_and_the_server_serves_others(four: TLS, end: str) -> None:
    with rpc.Node("server", secret=b"s", tls=four) as server:
        with ForeignTls(four, server.address, end=end, after_bytes=3_000_000) as relay:
            with rpc.Node("client", peers={"server": relay.address}, secret=b"s", transport="tcp", tls=four) as client:
                assert client.call("server", "echo_to_foreign", 1) == 1
                with pytest.raises(PeerLostError):
                    client.call("server", "echo_to_foreign", np.ones(12_000_000, np.uint8), timeout_s=patience(60))
        with rpc.Node("other", peers={"server": server.address}, secret=b"s", transport="tcp", tls=four) as other:
            assert other.call("server", "echo_to_foreign", 2, timeout_s=patience(30)) == 2


SLOW = """
from dataclasses import replace
from geartrain.transport.tls import TLS
four = replace(TLS.of_environment(), threads=4)
import sys
from geartrain import rpc
with rpc.Node("slow", peers={"server": sys.argv[1]}, secret=b"s", transport="tcp", tls=four) as slow:
    slow.call("server", "echo_to_foreign", 1)
    calls = [slow.call_async("server", "zeros_for_foreign", 50_000_000, timeout_s=600) for _ in range(4)]
    print("asked", flush=True)
    for call in calls:
        call.result()
"""


def test_a_reader_that_stops_within_its_results_keeps_no_other_client_past_its_deadline(four: TLS) -> None:
    environment = {**os.environ, **certificates.environment(four)}
    with rpc.Node("server", secret=b"s", tls=four) as server:
        command = [sys.executable, "-c", SLOW, server.address]
        slow = preloaded.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert slow.stdout is not None
            assert slow.stdout.readline() == "asked\n"
            slow.send_signal(signal.SIGSTOP)
            time.sleep(0.2)
            peers = {"server": server.address}
            with rpc.Node("quick", peers=peers, secret=b"s", transport="tcp", tls=four) as quick:
                for _ in range(20):
                    assert quick.call("server", "echo_to_foreign", 5, timeout_s=patience(2)) == 5
                    big = quick.call("server", "zeros_for_foreign", 10_000_000, timeout_s=patience(10))
                    assert big.nbytes == 10_000_000
        finally:
            slow.kill()
            slow.communicate()


AT_EXIT = """
from dataclasses import replace
from geartrain.transport.tls import TLS
four = replace(TLS.of_environment(), threads=4)
import sys, threading, time
import numpy as np
import geartrain.transport.connection as transport
listener = transport.listen(tls=four)
pairs = []
for _ in range(2):
    mine = transport.connect(listener.address, transport="tcp", tls=four)
    pairs.append((mine, listener.accept()))
array = np.ones(30_000_000, np.uint8)
def send(end):
    while True:
        end.send(b"", [array], timeout_s=60)
def receive(end):
    while True:
        end.receive(timeout_s=60)
for mine, theirs in pairs:
    for call, end in ((send, mine), (receive, theirs), (send, theirs), (receive, mine)):
        threading.Thread(target=call, args=[end], daemon=True).start()
time.sleep(float(sys.argv[1]))
"""


def test_an_interpreter_ends_while_threads_of_lanes_encrypt_and_decrypt(four: TLS) -> None:
    environment = {**os.environ, **certificates.environment(four)}
    for after_s in (0.05, 0.3):
        done = subprocess.run(
            [sys.executable, "-c", AT_EXIT, str(after_s)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=patience(60),
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
