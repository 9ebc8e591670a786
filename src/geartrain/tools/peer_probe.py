"""Connectivity probe of a peer for `geartrain doctor --peer`: transport, latency and throughput."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any, TextIO

import numpy as np

import geartrain.rpc as rpc
from geartrain.core.arguments import check_choice, optional
from geartrain.core.progress import Progress
from geartrain.core.threads import set_by
from geartrain.errors import ArgumentError, WaitTimeoutError
from geartrain.rpc.probe import ABOUT, GIVE, MOST_BYTES, TAKE
from geartrain.transport.connection import TRANSPORTS

ROUND_TRIPS = 500
_PEER = "peer"


@dataclass
class PeerReport:
    """A connection to a peer, and what was measured over it."""

    address: str
    about: dict[str, Any]  # the peer's: name, host, pid, cores, geartrain
    transport: str
    description: str  # of the connection, for people
    forced: bool
    authenticated: bool
    not_taken: dict[str, str]  # faster transport -> why it was not taken
    connect_ms: float
    round_trip_us: dict[str, float] = field(default_factory=dict)  # p50, p99
    megabytes: float = 0.0  # of one message
    there_gb_s: float = 0.0  # the median message
    back_gb_s: float = 0.0
    bytes_by_path: dict[str, dict[str, int]] = field(default_factory=dict)

    def in_words(self) -> dict[str, str]:
        """The results as a table: name -> text."""
        table = {
            "transport": self.transport + (", as requested" if self.forced else ", the fastest that works"),
            "connection": self.description,
            "trust": "both know the secret" if self.authenticated else "no secret",
            "peer": f"geartrain {self.about['geartrain']}, cores: {self.about['cores']}",
            "connected in": f"{self.connect_ms:.1f} ms",
            "round trip": f"{self.round_trip_us['p50']:.1f} us p50, {self.round_trip_us['p99']:.1f} us p99",
            f"{self.megabytes:.0f} MB there": f"{self.there_gb_s:.2f} GB/s",
            f"{self.megabytes:.0f} MB back": f"{self.back_gb_s:.2f} GB/s",
        }
        for name, why in self.not_taken.items():
            table[f"not {name}"] = why
        for direction, paths in self.bytes_by_path.items():
            table[f"bytes {direction}"] = ", ".join(f"{path} {count:,}" for path, count in paths.items()) or "none"
        return table


def serve(host: str = "127.0.0.1", secret: bytes = b"") -> None:
    """Prints an address for `probe`, and replies to probes until Ctrl-C or SIGTERM."""
    if not host.strip():
        raise ArgumentError("a host to bind is needed, found an empty one")
    with set_by(signal.SIGINT, signal.SIGTERM) as ended, rpc.Node("doctor", host=host, secret=secret) as node:
        sys.stdout.write(node.address + "\n")
        sys.stdout.flush()
        sys.stderr.write("on the other side: geartrain doctor --peer 'ADDRESS'; Ctrl-C ends this one\n")
        ended.wait()


def probe(
    address: str,
    *,
    transport: str | None = None,
    secret: bytes = b"",
    timeout_s: float = 10.0,
    megabytes: float = 16.0,
    seconds: float = 1.0,
    progress: bool = True,
    stream: TextIO | None = None,
) -> PeerReport:
    """Connects to a node and measures round trips of small calls, and big messages in each direction for `seconds`.

    Args:
        address: of a node of geartrain.rpc: `node.address`, or what `geartrain doctor --listen` printed.
        transport: to force one of `transport.TRANSPORTS`.
        secret: the cluster's.
        timeout_s: for connecting, and for every call.
        megabytes: of one big message; 64 MiB at most.
        progress: whether to show progress on `stream` (stderr).

    Raises:
        ArgumentError: the address is none, there is no such transport, or the message is too big.
        TransportError: no transport, or not the one asked for, reaches the peer; with every reason.
        UntrustedPeerError: the secrets differ. WaitTimeoutError, PeerLostError: the peer did not reply.
    """
    nbytes = int(megabytes * 1e6)
    if not 0 < nbytes <= MOST_BYTES:
        raise ArgumentError(f"a message has up to {MOST_BYTES / 1e6:.1f} MB, found {megabytes}")
    optional(check_choice, "transport", transport, TRANSPORTS)
    with rpc.Node(
        f"doctor-{time.time_ns()}", peers={_PEER: address}, transport=transport, secret=secret, timeout_s=timeout_s
    ) as node:
        began_s = time.perf_counter()
        try:
            about = node.call(_PEER, ABOUT)
        except WaitTimeoutError as error:
            description = node.connections().get(_PEER)
            if description is None:
                raise
            raise WaitTimeoutError(
                f"connected over {description}, but what listens there answers no calls: {error}"
            ) from None
        connect_ms = 1e3 * (time.perf_counter() - began_s)
        description = node.connections()[_PEER]
        found = PeerReport(
            address=address,
            about=about,
            transport=description.split()[0],
            description=description,
            forced=transport is not None,
            authenticated=node.authenticated()[_PEER],
            not_taken=dict(node.considered()[_PEER]),
            connect_ms=connect_ms,
        )
        out = stream if stream is not None else sys.stderr
        with Progress("round trips", ROUND_TRIPS, unit="calls", enabled=progress, stream=out) as bar:
            found.round_trip_us = _round_trips(node, bar)
        found.megabytes = nbytes / 1e6
        data = np.ones(nbytes, np.uint8)
        for title, one in (("there", (TAKE, data)), ("back", (GIVE, nbytes))):
            with Progress(title, None, unit="messages", enabled=progress, stream=out) as bar:
                rate = _rate(node, one, nbytes, seconds, bar)
            setattr(found, f"{title}_gb_s", rate)
        counts = node.counts()[_PEER]
        found.bytes_by_path = {"sent": counts["bytes_sent"], "received": counts["bytes_received"]}
    return found


def _round_trips(node: rpc.Node, bar: Progress) -> dict[str, float]:
    took: list[float] = []
    for _ in range(ROUND_TRIPS):
        began_s = time.perf_counter()
        node.call(_PEER, GIVE, 0)
        took.append(1e6 * (time.perf_counter() - began_s))
        bar.advance(0)
    return {"p50": float(np.quantile(took, 0.5)), "p99": float(np.quantile(took, 0.99))}


def _rate(node: rpc.Node, call: tuple[str, Any], nbytes: int, seconds: float, bar: Progress) -> float:
    node.call(_PEER, *call)  # warms up the memory
    took: list[float] = []
    ends_s = time.monotonic() + seconds
    while len(took) < 3 or time.monotonic() < ends_s:
        began_s = time.perf_counter()
        node.call(_PEER, *call)
        took.append(time.perf_counter() - began_s)
        bar.advance(nbytes)
    return float(nbytes / 1e9 / np.median(took))
