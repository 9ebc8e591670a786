"""Many peers that dial one TCP listener at once: all of them connect, beside others that are silent."""

from __future__ import annotations

import os
import socket
import threading

import pytest
from deadlines import patience

import geartrain.transport.connection as transport
from geartrain.errors import TransportError, WaitTimeoutError
from geartrain.transport.connection import Connection, MessageLimits


def dial_at_once(address: str, peers: int, **options: object) -> tuple[list[Connection], list[str]]:
    """The connections, and the errors of those that did not connect."""
    connections: list[Connection] = []
    errors: list[str] = []
    together = threading.Barrier(peers)

    def dial() -> None:
        together.wait()
        try:
            connections.append(transport.connect(address, timeout_s=patience(30), **options))  # type: ignore[arg-type]
        except Exception as error:
            errors.append(str(error))

    threads = [threading.Thread(target=dial) for _ in range(peers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return connections, errors


def test_a_hundred_peers_that_dial_at_once_connect_beside_silent_ones() -> None:
    with transport.listen(shm=False) as listener:
        host, port = listener.address.rpartition("tcp=")[2].split(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(150)]
        connections, errors = dial_at_once(listener.address, 100, transport="tcp")
        assert not errors
        assert len(connections) == 100
        tags = set()
        for number, connection in enumerate(connections):
            connection.send(b"", tag=number)
        for _ in connections:
            tags.add(listener.accept(timeout_s=patience(30)).receive(timeout_s=patience(30)).tag)
        assert tags == set(range(100))
        for one in silent:
            one.close()


@pytest.mark.parametrize("name", ["tcp", "shm"])
def test_peers_try_again_until_there_is_a_place_for_them(name: str) -> None:
    with transport.listen(limits=MessageLimits(max_pending=2)) as listener:
        connections, errors = dial_at_once(listener.address, 24, transport=name)
        assert not errors
        assert {connection.transport for connection in connections} == {name}


def test_a_peer_that_never_gets_a_place_is_told_so_at_its_own_deadline() -> None:
    with transport.listen(shm=False) as listener:
        for _ in range(1024):  # which the program does not accept
            transport.connect(listener.address, transport="inproc").close()
        with pytest.raises(WaitTimeoutError, match=r"none of \d+ attempts.*no place for another connection"):
            transport.connect(listener.address, transport="tcp", timeout_s=1.0)
        assert "wait to be accepted" in listener.refusal
        with pytest.raises(WaitTimeoutError, match="accepted none of 1024"):
            transport.connect(listener.address, timeout_s=0.1)


def test_a_listener_that_is_gone_is_not_waited_for() -> None:
    listener = transport.listen(shm=False)
    listener.close()
    with pytest.raises(TransportError, match="refused"):
        transport.connect(listener.address, transport="tcp", timeout_s=patience(600))


def test_a_process_without_descriptors_says_so() -> None:
    import resource

    with transport.listen(shm=False) as listener:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest, wait_s = os.dup(0), patience(10)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        taken = []
        try:
            with pytest.raises(OSError, match="Too many"):
                while True:
                    taken.append(os.dup(0))
            with pytest.raises(TransportError, match="no socket can be made: Too many open files"):
                transport.connect(listener.address, transport="tcp", timeout_s=wait_s)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for one in [*taken, highest]:
                os.close(one)
        transport.connect(listener.address, transport="tcp", timeout_s=patience(30))
