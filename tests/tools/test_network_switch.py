"""The switch of emulated hosts, without root: frames over socket pairs take the time and way that were asked for."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from deadlines import patience

from geartrain.tools.testing.network_switch import Switch, SwitchError, address_of

EVERYBODY = b"\xff" * 6
ARP = b"\x08\x06"
IP = b"\x08\x00"


def frame(to: int | None, number: int = 0, size: int = 100, kind: bytes = IP) -> bytes:
    address = EVERYBODY if to is None else bytes.fromhex(address_of(to).replace(":", ""))
    head = address + bytes(6) + kind + number.to_bytes(4, "little")
    return head + bytes(size - len(head))


@contextlib.contextmanager
def switch(n: int, **options: Any) -> Iterator[tuple[Switch, list[socket.socket]]]:
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(n)]
    ours = [pair[0] for pair in pairs]
    for one in ours:
        one.settimeout(10)
    options = {"rates": [0.0] * n, "sites": list(range(n)), **options}
    made = Switch([pair[1].detach() for pair in pairs], **options)
    try:
        yield made, ours
    finally:
        made.close()
        for one in ours:
            one.close()


def receive(port: socket.socket, wait_s: float = 10.0) -> bytes | None:
    port.settimeout(wait_s)
    try:
        return port.recv(10_000)
    except TimeoutError:
        return None


def test_a_frame_goes_to_its_host_alone_and_a_question_to_all_others() -> None:
    with switch(3) as (made, ports):
        ports[0].send(frame(2))
        assert receive(ports[2]) == frame(2)
        ports[1].send(frame(None, kind=ARP))
        assert receive(ports[0]) == receive(ports[2]) == frame(None, kind=ARP)
        ports[0].send(frame(7))  # there is no such host
        ports[0].send(b"short")
        ports[0].send(frame(0))  # to itself
        assert [receive(port, 0.1) for port in ports] == [None] * 3
        assert made.counters()["delivered_bytes"] == 300


def test_frames_between_sites_take_the_delay_and_stay_in_order() -> None:
    with switch(3, sites=[0, 0, 1], delay_s=0.05) as (_, ports):
        began_s = time.monotonic()
        for number in range(20):
            ports[0].send(frame(2, number))
        assert [receive(ports[2]) for _ in range(20)] == [frame(2, number) for number in range(20)]
        assert 0.05 <= time.monotonic() - began_s < patience(2)
        near_s = []
        for _ in range(5):
            began_s = time.monotonic()
            ports[0].send(frame(1))
            assert receive(ports[1]) == frame(1)
            near_s.append(time.monotonic() - began_s)
        assert min(near_s) < 0.05, "within a site there is no delay"


def test_a_link_passes_a_burst_and_then_its_rate() -> None:
    with switch(2, rates=[0.0, 1e6], queue_s=10.0, burst_bytes=20_000) as (_, ports):
        began_s = time.monotonic()
        for number in range(120):
            ports[0].send(frame(1, number, 1000))
        assert [receive(ports[1]) for _ in range(120)] == [frame(1, number, 1000) for number in range(120)]
        # 120 KB at 1 MB/s, 20 KB of them at once. A busy machine is later, never earlier.
        assert 0.0999 <= time.monotonic() - began_s < patience(1.0)


def test_what_finds_the_queue_full_is_dropped_and_counted() -> None:
    with switch(2, rates=[0.0, 1e5], queue_s=0.1, burst_bytes=1000) as (made, ports):
        began_s = time.monotonic()
        for number in range(100):
            ports[0].send(frame(1, number, 1000))
        got, dropped = 0, 0
        while got + dropped < 100 and time.monotonic() - began_s < patience(20):
            got += receive(ports[1], 0.2) is not None
            dropped = made.counters()["dropped_frames"]
        # 10 KB wait; each 10 ms that the sender or the switch takes, one more frame has left the queue.
        assert got + dropped == 100 and 10 <= got < 15 + 100 * (time.monotonic() - began_s)


def test_losses_are_as_frequent_as_asked_and_spare_arp() -> None:
    with switch(2, loss=0.3, seed=7) as (made, ports):
        for start in range(0, 2000, 50):  # a socket holds not many more
            for number in range(start, start + 50):
                ports[0].send(frame(1, number))
            ports[0].send(frame(1, 0, 60, ARP))
            while (got := receive(ports[1])) is not None and got[12:14] != ARP:
                pass
            assert got is not None, "ARP came through"
        lost = made.counters()["lost_frames"]
    assert abs(lost - 600) < 4 * (2000 * 0.3 * 0.7) ** 0.5


def test_an_unplugged_host_hears_and_says_nothing() -> None:
    with switch(2) as (made, ports):
        made.unplug(1)
        ports[0].send(frame(1))
        ports[1].send(frame(0))
        assert receive(ports[1], 0.1) is None and receive(ports[0], 0.1) is None
        made.plug(1)
        ports[0].send(frame(1))
        assert receive(ports[1]) == frame(1)
        with pytest.raises(SwitchError, match="does not understand"):
            made.plug(9)


def test_a_switch_that_cannot_be_says_why() -> None:
    for options, said in (
        ({"rates": [1.0]}, "a rate and a site for each"),
        ({"loss": 1.5}, "loses 0 to 1; found 0, 0.05 and 1.5"),
        ({"rates": [1.0, -1.0]}, "not below zero, found -1"),
    ):
        with pytest.raises(SwitchError, match=said):
            with switch(2, **options):
                pass


def test_the_switch_ends_with_its_maker() -> None:
    script = (
        "import os, signal, socket, sys\n"
        "from geartrain.tools.testing.network_switch import Switch\n"
        "pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]\n"
        "made = Switch([pair[1].detach() for pair in pairs], rates=[0, 0], sites=[0, 1])\n"
        "print(made._process.pid, flush=True)\n"
        "sys.stdin.readline()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    maker = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    handle = os.pidfd_open(int(maker.stdout.readline()))
    try:
        maker.communicate("now\n", timeout=patience(20))
        assert maker.returncode == -signal.SIGKILL
        assert select.select([handle], [], [], 20)[0], "the switch still runs"
    finally:
        os.close(handle)


def test_a_dead_switch_is_an_error_not_a_hang() -> None:
    with switch(2) as (made, _):
        made._process.kill()
        with pytest.raises(SwitchError, match="ended"):
            made.counters()
            made.counters()
