"""Copies of a listening socket, as a child has them that was forked just now: a closed listener's accept nobody."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterator

import hostile.groups
import hostile.jobs
import hostile.peers
import hostile.stores  # noqa: F401  # the factories
import pytest
from deadlines import factor, patience
from hostile.subject import FACTORIES, Tools

import geartrain.transport.connection as transport
from geartrain.errors import TransportError

#: The public classes that listen while they are open, or whose peers do.
LISTENING = ("Listener", "Node", "Group", "Group: over TCP", "Reducer", "StoreServer", "Bus", "Queue")


def listening() -> dict[int, int]:
    """This process's listening sockets: descriptor by inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found[status.st_ino] = int(name)
    return found


def copied(before: dict[int, int]) -> list[socket.socket]:
    """Copies of the listening sockets that have come since."""
    return [socket.socket(fileno=os.dup(fd)) for inode, fd in listening().items() if inode not in before]


def refuses(one: socket.socket) -> None:
    with socket.socket(one.family, one.type) as dialer:
        dialer.settimeout(patience(10))
        with pytest.raises(ConnectionRefusedError):
            dialer.connect(one.getsockname())


@pytest.fixture
def tools() -> Iterator[Tools]:
    one = Tools("geartrain-listening", factor())
    yield one
    one.clean()


@pytest.mark.parametrize("subject", LISTENING)
def test_no_copy_accepts_once_its_owner_is_closed(tools: Tools, subject: str) -> None:
    before = listening()
    made = FACTORIES[subject].make(tools)
    copies = copied(before)
    assert copies, "nothing listens: this tests nothing"
    made.close()
    tools.clean()
    for copy in copies:
        refuses(copy)
        copy.close()


def test_the_port_of_a_listener_is_free_beside_a_copy() -> None:
    before = listening()
    with transport.listen("127.0.0.1", shm=False) as listener:
        (copy,) = copied(before)
        port = int(listener.address.rsplit(":", 1)[1])
    with copy, transport.listen("127.0.0.1", port, shm=False) as again:
        with transport.connect(again.address, timeout_s=patience(10)) as mine, again.accept(timeout_s=patience(10)):
            assert mine.transport in ("inproc", "tcp")


def test_whom_a_closed_listener_has_not_accepted_is_hung_up_on_beside_a_copy() -> None:
    before = listening()
    listener = transport.listen("127.0.0.1")
    copies = copied(before)
    assert {one.family for one in copies} == {socket.AF_UNIX, socket.AF_INET}
    listener.close()
    began_s = time.monotonic()
    with pytest.raises(TransportError):
        transport.connect(listener.address, timeout_s=patience(20))
    assert time.monotonic() - began_s < patience(3)
    for copy in copies:
        copy.close()
