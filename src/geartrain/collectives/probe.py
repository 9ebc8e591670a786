"""Tests which reducers accept a connection."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from contextlib import suppress

from geartrain.core.threads import DaemonThread

PROBE_TIMEOUT_S = 3.0


def unreachable(addresses: Iterable[str]) -> set[str]:
    """The addresses (host:port) that accept no connection. Probes them in parallel, within some seconds.

    A process that is stopped still accepts.
    """
    asked = set(addresses)
    accepted: set[str] = set()

    def probe(address: str) -> None:
        host, _, port = address.rpartition(":")
        with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S):
            accepted.add(address)

    threads = [DaemonThread(probe, "geartrain-probe", (address,)) for address in asked]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + PROBE_TIMEOUT_S + 1
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))  # name resolution has no timeout of its own
    return asked - accepted
