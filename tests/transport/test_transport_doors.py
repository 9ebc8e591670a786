"""Arguments of listeners and connections that are none, memory that cannot be sent, and waits that signals end."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from deadlines import patience

import geartrain.transport.codec as codec
import geartrain.transport.connection as transport
from geartrain.errors import ArgumentError, ListenerGoneError, StoreError, TransportError, WaitTimeoutError
from geartrain.transport.connection import Connection, Listener, MessageLimits
from geartrain.transport.tls import TLS

NONE = [float("nan"), float("inf"), -1.0, "1", None, np.array([1.0])]


@pytest.fixture
def ends() -> Iterator[tuple[Listener, Connection, Connection]]:
    with transport.listen() as listener:
        with transport.connect(listener.address, timeout_s=patience(10)) as mine, listener.accept() as theirs:
            yield listener, mine, theirs


@pytest.mark.parametrize("timeout_s", NONE, ids=str)
def test_a_timeout_is_a_number_of_seconds(ends, timeout_s: Any) -> None:
    listener, mine, theirs = ends
    with theirs.expose(np.zeros(4), writable=True) as region:
        calls: list[Callable[[], object]] = [
            lambda: listener.accept(timeout_s=timeout_s),
            lambda: transport.connect(listener.address, timeout_s=timeout_s),
            lambda: mine.send(b"x", timeout_s=timeout_s),
            lambda: mine.receive(timeout_s=timeout_s),
            lambda: mine.read(region.handle, np.zeros(4), timeout_s=timeout_s),
            lambda: mine.write(region.handle, np.zeros(4), timeout_s=timeout_s),
        ]
        for call in calls:
            with pytest.raises(ArgumentError, match="timeout_s must be from 0 to 1e9 seconds"):
                call()
    with pytest.raises(WaitTimeoutError):
        theirs.receive(timeout_s=0)  # nothing was sent


@pytest.mark.parametrize(
    "options",
    [
        {"spin_us": float("nan")},
        {"spin_us": -1},
        {"peer_timeout_s": float("nan")},
        {"port": -1},
        {"port": 65_536},
    ],
    ids=["spin-nan", "spin--1", "peer-nan", "port--1", "port-65536"],
)
def test_options_that_are_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        transport.listen(**options)


@pytest.mark.parametrize(
    ("limit", "why"),
    [
        ({"max_pending": -1}, "max_pending must be at least 0, found -1"),
        ({"max_header_bytes": 1.5}, "max_header_bytes must be a whole number, found 1.5"),
        ({"handshake_timeout_s": float("nan")}, "handshake_timeout_s must be from 0 to 1e9 seconds, found nan"),
    ],
)
def test_a_limit_that_is_none_is_refused_where_it_is_given(limit: dict[str, Any], why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        MessageLimits(**limit)


@pytest.mark.parametrize("lanes", [-1, 1.5, 17])
def test_lanes_are_a_number_of_connections(ends, lanes: Any) -> None:
    with pytest.raises(ArgumentError):
        transport.connect(ends[0].address, transport="tcp", lanes=lanes)


def test_memory_of_python_objects_is_neither_sent_nor_exposed_nor_written(ends) -> None:
    _, mine, theirs = ends
    objects = np.array([object(), object()])
    with theirs.expose(np.zeros(2), writable=True) as region:
        for memory in (objects, memoryview(objects), np.zeros(2, [("a", "O"), ("b", "i4")])):
            calls: list[Callable[[], object]] = [
                lambda memory=memory: mine.send(b"", [memory]),
                lambda memory=memory: mine.expose(memory, writable=True),
                lambda memory=memory: mine.read(region.handle, memory),
                lambda memory=memory: mine.write(region.handle, memory),
            ]
            for call in calls:
                with pytest.raises(ArgumentError, match="Python objects"):
                    call()
    assert type(objects[0]) is object


SENDS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "header-dict": (({"a": 1},), {}, "header is bytes, or a value that .*codec.encode has encoded; found a dict"),
    "header-text": (("text",), {}, "found a str"),
    "header-none": ((None,), {}, "found a NoneType"),
    "header-array": ((np.zeros(3),), {}, "found a ndarray"),
    "buffers-array": ((b"", np.zeros(3)), {}, "buffers are a sequence of them, found one ndarray"),
    "buffers-bytes": ((b"", b"abc"), {}, "buffers are a sequence of them, found one bytes"),
    "buffers-none": ((b"", None), {}, "buffers are a sequence of them, found a NoneType"),
    "buffer-text": ((b"", ["text"]), {}, "C-contiguous with the buffer protocol, found a str"),
    "buffer-strided": ((b"", [b"", np.zeros((2, 2)).T]), {}, "C-contiguous with the buffer protocol, found a ndarray"),
    "buffers-lost": ((codec.encode(1), [b"more"]), {}, "an encoded value has its own buffers and takes no others"),
    "buffer-none": ((b"", [None]), {}, "C-contiguous with the buffer protocol, found None"),
    "tag--1": ((b"",), {"tag": -1}, "tag must be"),
    "tag-64": ((b"",), {"tag": 2**64}, "tag must be"),
    "tag-text": ((b"",), {"tag": "1"}, "tag must be a whole number"),
    "kind-32": ((b"",), {"kind": 2**32}, "kind must be from 0"),
    "kind-1.5": ((b"",), {"kind": 1.5}, "kind must be a whole number"),
}


@pytest.mark.parametrize("name", SENDS)
def test_what_is_no_message_is_not_sent(ends, name: str) -> None:
    _, mine, theirs = ends
    positional, named, why = SENDS[name]
    with pytest.raises(ArgumentError, match=why):
        mine.send(*positional, **named)
    mine.send(b"next", iter([np.arange(3), bytearray(2)]), tag=2**64 - 1, kind=np.uint32(7))  # type: ignore[arg-type]
    message = theirs.receive(timeout_s=patience(10))
    assert (message.header, message.tag, message.kind) == (b"next", 2**64 - 1, 7)
    assert [each.nbytes for each in message.buffers] == [24, 2]


def test_memory_that_cannot_be_exposed_read_or_written_is_refused(ends) -> None:
    _, mine, theirs = ends
    array = np.zeros(4)
    with theirs.expose(array, writable=True) as region:
        calls: dict[str, Callable[[], object]] = {
            "writable is True or False": lambda: mine.expose(array, writable="no"),  # type: ignore[arg-type]
            "found a list": lambda: mine.expose([1, 2]),
            "found a ndarray": lambda: mine.expose(np.zeros((2, 2)).T),
            "memory is anything writable and C-contiguous.*found a bytes": lambda: mine.expose(b"x", writable=True),
            "found a MemoryRegion; give its `handle`": lambda: mine.read(region, array),  # type: ignore[arg-type]
            "handle is bytes, found a str": lambda: mine.write("handle", array),  # type: ignore[arg-type]
            "not a region's handle": lambda: mine.read(b"handle", array),
            "found a bytes": lambda: mine.read(region.handle, b"read-only"),
            "found a float": lambda: mine.read(region.handle, 1.5),
            "found None": lambda: mine.write(region.handle, None),
            "offset must be at least 0": lambda: mine.read(region.handle, array, offset=-1),
            "offset must be a whole number": lambda: mine.write(region.handle, array, offset=1.5),  # type: ignore[arg-type]
        }
        for why, call in calls.items():
            with pytest.raises(ArgumentError, match=why):
                call()
        mine.write(region.handle, np.datetime64(7, "s").reshape(1), offset=np.int64(8))  # type: ignore[arg-type]
        assert array.view(np.int64).tolist() == [0, 7, 0, 0]


class InterruptionError(Exception):
    pass


def interrupt(*_: Any) -> None:
    raise InterruptionError


@pytest.mark.parametrize("name", ["tcp", "inproc"])
def test_a_signal_interrupts_connect(name: str) -> None:
    """A host that takes connections and says nothing; a listener whose program accepts none."""
    with transport.listen(shm=False) as listener, socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"id=any;tcp=127.0.0.1:{silent.getsockname()[1]}"
        if name == "inproc":
            address = listener.address
            for _ in range(1024):
                transport.connect(address, transport="inproc").close()
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            began_s = time.monotonic()
            with pytest.raises(InterruptionError):
                transport.connect(address, transport=name, timeout_s=patience(600))
            assert time.monotonic() - began_s < patience(5)
        finally:
            signal.signal(signal.SIGALRM, before)
        if name == "tcp":
            with transport.connect(listener.address, transport="tcp", timeout_s=patience(10)) as connection:
                assert connection.transport == "tcp"


def test_only_a_host_that_refuses_says_that_nobody_listens() -> None:
    with transport.listen() as listener:
        address = listener.address
    with pytest.raises(ListenerGoneError, match="refused"):
        transport.connect(address, timeout_s=patience(10))
    for unreachable in ("no-such-host.invalid:1", "255.255.255.255:9"):
        with pytest.raises(TransportError) as found:
            transport.connect(f"{address};tcp={unreachable}", timeout_s=patience(10))
        assert not isinstance(found.value, ListenerGoneError)


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-x\r\n", b"HTTP/1.0 400\r\n\r\n", bytes(200)], ids=["ssh", "http", "zeros"]
)
def test_what_is_not_geartrain_is_told_at_once_however_little_it_says(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"id=any;tcp=127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TransportError, match="what answers there is not geartrain"):
            transport.connect(address, transport="tcp", timeout_s=patience(30))
        thread.join()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: transport.listen(host="no such host"), "host is a name or address"),
        (lambda: transport.listen(host="256.1.1.1"), "host is a name or address"),
        (lambda: transport.connect("nowhere"), "not an address of a listener"),
    ],
)
def test_an_address_that_is_none_is_an_argument_not_a_schema(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said) as refused:
        make()
    assert not isinstance(refused.value, StoreError)


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True], ids=["tcp", "tls"])
def test_a_peer_that_is_busy_for_longer_than_lost_ones_are_waited_for_gets_its_message(
    loopback: TLS, encrypted: bool
) -> None:
    tls = loopback if encrypted else None
    array = np.ones(100_000_000, np.uint8)  # more than a socket's buffers hold
    with transport.listen(tls=tls) as listener:
        mine = transport.connect(listener.address, transport="tcp", tls=tls, timeout_s=patience(10))
        with mine, listener.accept() as theirs:
            sender = threading.Thread(target=mine.send, args=(b"", [array]), kwargs={"timeout_s": patience(90)})
            sender.start()
            time.sleep(36)
            assert sender.is_alive(), "it waits for the peer"
            received = theirs.receive(timeout_s=patience(30))
            sender.join(patience(30))
            assert not sender.is_alive() and np.array_equal(received.buffers[0], array)
