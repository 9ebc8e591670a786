"""The command `geartrain reducer`: runs a reducer as a process, logs its counters, and serves them to Prometheus."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from geartrain.collectives.reducer import Reducer
from geartrain.core.metrics_server import Metric, MetricsServer, Values
from geartrain.core.threads import set_by
from geartrain.errors import GeartrainError

SECRET_VARIABLE = "GEARTRAIN_SECRET"

# Help texts of a reducer's counters; those not among GAUGES only grow.
METRICS = {
    "groups": "groups that have a rank connected now",
    "ranks": "ranks that are connected now",
    "memory_bytes": "memory of chunks in use now",
    "groups_served": "groups since the start",
    "groups_failed": "groups that ended with a fault",
    "operations": "shares of operations that are complete",
    "bytes_received": "bytes of frames, headers and all",
    "bytes_sent": "bytes of frames, headers and all",
    "reduced_bytes": "bytes that were summed, of all ranks",
    "refused": "connections that were refused",
}
GAUGES = ("groups", "ranks", "memory_bytes")


def serve(
    bind: str,
    secret_file: Path | None,
    metrics_port: int | None,
    window_bytes: int,
    every_s: float,
    grace_s: float,
    threads: int = 1,
) -> None:
    """Runs a reducer until SIGTERM or SIGINT. Prints its address, then a line of counters at most every `every_s`.

    With several threads the address stands there as often, as GEARTRAIN_REDUCERS has it for all of them.

    Raises:
        UntrustedPeerError: no secret, and not loopback.
        MissingDependencyError: `metrics_port` without prometheus-client.
    """
    secret = read_secret(secret_file)
    with contextlib.ExitStack() as stack:
        stopped = stack.enter_context(set_by(signal.SIGTERM, signal.SIGINT))
        reducer = Reducer(bind, secret=secret, max_window_bytes=window_bytes, threads=threads)
        if metrics_port is not None:
            host = reducer.address.rpartition(":")[0]
            metrics = stack.enter_context(contextlib.closing(serve_metrics(reducer, host, metrics_port)))
        stack.callback(reducer.close, grace_s)
        print(
            f"reducer listening on {','.join(reducer.addresses)}, {'with' if secret else 'without'} a secret",
            flush=True,
        )
        if metrics_port is not None:
            print(f"metrics on {metrics.url}", flush=True)
        before, at = reducer.metrics(), time.monotonic()
        while not stopped.wait(every_s or None):
            now, now_at = reducer.metrics(), time.monotonic()
            if now != before:
                print(line(before, now, now_at - at), flush=True)
            before, at = now, now_at
        print("reducer stops", flush=True)


def line(before: dict[str, Any], now: dict[str, Any], seconds: float) -> str:
    """A line of counters over a span of time."""
    gbit = {key: (now[key] - before[key]) * 8e-9 / max(seconds, 1e-9) for key in ("bytes_received", "bytes_sent")}
    return (
        f"{now['groups']} groups, {now['ranks']} ranks, {now['operations'] - before['operations']} operations, "
        f"in {gbit['bytes_received']:.2f} Gbit/s, out {gbit['bytes_sent']:.2f} Gbit/s, "
        f"{now['memory_bytes'] / 1e6:.1f} MB held, {now['groups_failed']} failed, {now['refused']} refused"
    )


def read_secret(path: Path | None) -> bytes | None:
    """The secret in a file, stripped of white space; without a file, that of the environment."""
    if path is None:
        return os.environ.get(SECRET_VARIABLE, "").encode() or None
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise GeartrainError(f"cannot read the secret: {error}") from None
    if not secret:
        raise GeartrainError(f"{path} holds no secret")
    return secret


def serve_metrics(reducer: Reducer, host: str, port: int) -> MetricsServer:
    """Serves a reducer's counters to Prometheus over HTTP."""
    metrics = {
        name: Metric(f"geartrain_reducer_{name}", "gauge" if name in GAUGES else "counter", about, ())
        for name, about in METRICS.items()
    }

    def read() -> Values:
        found = reducer.metrics()
        return [(metric, {(): float(found[name])}) for name, metric in metrics.items()]

    return MetricsServer(read, host, port)
