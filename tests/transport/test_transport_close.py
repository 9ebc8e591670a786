"""Listeners, connections and regions end at any moment: twice, from two threads, beside waiting calls, and by their
last reference; every call ends by that, and a closed one refuses everything."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from deadlines import patience

import geartrain.transport.connection as transport
from geartrain.errors import ConnectionClosedError, PeerLostError, RegionError, TransportError
from geartrain.transport.connection import Connection, Listener, MemoryRegion

ROUNDS = [pytest.param(12, id="12"), pytest.param(1000, id="1000", marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
NAMES = ["inproc", "shm", "tcp"]
Calls = list[Callable[[], object]]


def race(calls: Calls, closers: Calls, delay_s: float) -> list[BaseException]:
    """What the calls raise, each repeated until it raises, while the closers run after a delay."""
    raised: list[BaseException] = []

    def repeat(call: Callable[[], object]) -> None:
        try:
            while True:
                call()
        except BaseException as error:
            raised.append(error)

    def late(close: Callable[[], object]) -> None:
        time.sleep(random.random() * delay_s)
        close()
        close()

    threads = [threading.Thread(target=repeat, args=[call]) for call in calls]
    threads += [threading.Thread(target=late, args=[close]) for close in closers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(60))
    assert not any(thread.is_alive() for thread in threads)
    return raised


def pair(listener: Listener, name: str) -> tuple[Connection, Connection]:
    mine = transport.connect(listener.address, transport=name, timeout_s=patience(30))
    return mine, listener.accept(timeout_s=patience(30))


def refuses_everything(connection: Connection, handle: bytes) -> None:
    array = np.zeros(4)
    calls: Calls = [
        lambda: connection.send(b""),
        connection.receive,
        lambda: connection.expose(array),
        lambda: connection.read(handle, array),
        lambda: connection.write(handle, array),
    ]
    for call in calls:
        with pytest.raises(ConnectionClosedError):
            call()
    assert "closed" in repr(connection)
    assert connection.counts()["messages_sent"] >= 0
    assert isinstance(connection.describe() + connection.one_sided + connection.tls, str)
    connection.close()


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_connection_is_closed_beside_every_call(name: str, rounds: int) -> None:
    wait_s = patience(60)
    with transport.listen() as listener:
        for _ in range(rounds):
            mine, theirs = pair(listener, name)
            array, into = np.zeros(20_000), np.zeros(20_000)
            region = theirs.expose(array, writable=True)
            handle = region.handle

            calls: Calls = [
                lambda mine=mine: mine.receive(timeout_s=wait_s),
                lambda mine=mine, array=array: mine.send(b"x", [array], timeout_s=wait_s),
                lambda mine=mine, h=handle, into=into: mine.read(h, into, timeout_s=wait_s),
                lambda mine=mine, h=handle, into=into: mine.write(h, into, timeout_s=wait_s),
                lambda theirs=theirs: theirs.receive(timeout_s=wait_s),
            ]
            closers: Calls = [mine.close, mine.close] + ([theirs.close] if random.random() < 0.5 else [])
            raised = race(random.sample(calls, 3), closers, 0.004)
            assert all(isinstance(e, ConnectionClosedError | PeerLostError | RegionError) for e in raised), raised
            refuses_everything(mine, handle)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_connection_that_is_dropped_ends_its_peers_calls_and_its_regions(name: str, rounds: int) -> None:
    with transport.listen() as listener:
        for _ in range(rounds):
            mine, theirs = pair(listener, name)
            array = np.zeros(1000)
            region = theirs.expose(array)
            handle = region.handle
            held = [theirs]
            del theirs
            raised = race([lambda mine=mine: mine.receive(timeout_s=patience(60))], [held.clear], 0.002)
            assert [type(error) for error in raised] == [PeerLostError]
            with pytest.raises((PeerLostError, RegionError)):
                mine.read(handle, np.zeros(10))
            assert region.closed


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_listener_is_closed_beside_accept_and_connect(rounds: int) -> None:
    for _ in range(rounds):
        listener = transport.listen()
        name = random.choice(NAMES)
        address = listener.address

        def dial(address: str = address, name: str = name) -> None:
            transport.connect(address, transport=name, timeout_s=patience(60)).close()

        calls: Calls = [lambda one=listener: one.accept(timeout_s=patience(60)), dial]
        raised = race(calls, [listener.close, listener.close], 0.006)
        kinds = sorted(raised, key=lambda error: isinstance(error, TransportError))
        assert [type(kinds[0]), isinstance(kinds[-1], TransportError)] == [ConnectionClosedError, True], raised
        with pytest.raises(ConnectionClosedError):
            listener.accept()
        assert (listener.address, listener.refusal * 0, repr(listener) != "") == (address, "", True)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_region_is_closed_from_two_threads_beside_its_peers_reads(name: str, rounds: int) -> None:
    with transport.listen() as listener:
        mine, theirs = pair(listener, name)
        for _ in range(rounds):
            region: MemoryRegion = theirs.expose(np.zeros(50_000), writable=True)
            handle, into = region.handle, np.zeros(50_000)
            calls: Calls = [
                lambda h=handle, into=into: mine.read(h, into, timeout_s=patience(60)),
                lambda h=handle, into=into: mine.write(h, into, timeout_s=patience(60)),
            ]
            raised = race(calls, [region.close, region.close], 0.003)
            assert [type(error) for error in raised] == [RegionError] * 2, raised
            assert (region.closed, region.nbytes, len(region.handle)) == (True, 400_000, 56)
        mine.send(b"still there")
        assert theirs.receive(timeout_s=patience(30)).header == b"still there"
