"""The switch of emulated hosts, without root: frames over socket pairs take the time and way that were asked for."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from deadlines import patience

from geartrain.tools.testing.network_switch import Switch, SwitchError


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
