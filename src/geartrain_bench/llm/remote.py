"""The part "remote": a worker on another host claims rows of 16 answers and puts them, over a link of 1 Gbit/s."""

from __future__ import annotations

import sys

import geartrain_bench.harness.timing as harness
from geartrain.tools.testing.cluster import Hosts
from geartrain_bench.harness.fleet import Fleet
from geartrain_bench.llm.run import PEER, Run

ARGV = [sys.executable, "-m", "geartrain_bench.llm.remote_worker"]
RATE_MBIT = 1000.0
PER_ROW = 16
#: Of the worker: while one row crosses the link, others are claimed and acknowledged.
THREADS = 8
#: Values that a worker has ready, which it puts again and again.
VALUES = 8
SERVER, BARE = "geartrain", "bare socket"
TIME, SERVER_CPU = "time of a row", "CPU time of the server a row"
CASE = f"claim and put, {RATE_MBIT:g} Mbit/s, rows of {PER_ROW}"


def remote(run: Run) -> None:
    """Time of a row over the link beside that of its bytes over a bare socket, and CPU time of the server."""
    plan, result = run.plan, run.result
    reason = Hosts.viable()
    if reason is not None:
        result.notes.append(f"remote claims were not measured: {reason}")
        return
    rows = plan.remote_rows
    times_s: dict[str, list[float]] = {SERVER: [], BARE: []}
    cpu_s: dict[str, list[float]] = {SERVER: [], BARE: []}
    with Hosts(2, rate_mbit=RATE_MBIT) as hosts, Fleet.on(hosts, range(2), ARGV) as fleet:
        host = hosts.address(0)
        (served,) = fleet.ask([0], do="serve", host=host, store=run.store_name(), rows=rows, row_bytes=450_000)
        (bare,) = fleet.ask([0], do="listen", host=host)
        (made,) = fleet.ask([1], do="connect", address=served["address"], seed=1, rows=VALUES, per_row=PER_ROW)
        for _ in range(plan.remote_laps + 1):
            (before,) = fleet.ask([0], do="refill", rows=rows)
            (worked,) = fleet.ask([1], do="work", rows=rows, threads=THREADS)
            (after,) = fleet.ask([0], do="cpu")
            if after["done"] != rows:
                raise ValueError(f"{after['done']} of {rows} rows were put")
            (sent,) = fleet.ask([1], do="send", host=host, port=bare["port"], nbytes=worked["bytes"])
            times_s[SERVER].append(worked["seconds"] / rows)
            times_s[BARE].append(sent["seconds"] / rows)
            (ended,) = fleet.ask([0], do="cpu")
            cpu_s[SERVER].append((after["cpu_s"] - before["cpu_s"]) / rows)
            cpu_s[BARE].append((ended["cpu_s"] - after["cpu_s"]) / rows)
    floor_s = harness.quantiles(times_s[BARE][1:])[0]
    for name, found in times_s.items():
        result.rows.append(harness.time_row(CASE, name, TIME, "ms", found[1:], floor_s))
    least_ms = 1e3 * harness.quantiles(cpu_s[BARE][1:])[0]
    for name, found in cpu_s.items():
        run.add(CASE, name, SERVER_CPU, "ms", [1e3 * each for each in found[1:]], least_ms)
    if run.peer is not None:
        put_rows = plan.answers / PER_ROW
        units_s = [run.peer.unit_cpu_s("put", plan.peer_calls) / put_rows for _ in range(plan.remote_laps)]
        run.add(CASE, PEER, SERVER_CPU, "ms", [1e3 * each for each in units_s], least_ms)
    seconds = harness.quantiles(times_s[SERVER][1:])[0]
    megabytes = made["row_bytes"] / 1e6
    result.notes.append(
        f"remote: {1 / seconds:.1f} rows/s, {megabytes / seconds:.1f} MB/s; rows of {megabytes:.2f} MB; the link has "
        f"{RATE_MBIT / 8:g} MB/s"
    )


__all__ = ["BARE", "CASE", "SERVER", "SERVER_CPU", "TIME", "remote"]
