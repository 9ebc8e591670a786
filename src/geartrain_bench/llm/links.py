"""The part "ranks over links": learners on hosts of their own, whose rows of answers they share out by tokens."""

from __future__ import annotations

import sys

import geartrain_bench.harness.timing as harness
from geartrain.tools.testing.cluster import Hosts
from geartrain_bench.harness.fleet import Fleet, Measured
from geartrain_bench.llm.run import Run

ARGV = [sys.executable, "-m", "geartrain_bench.llm.rank_worker"]
RATE_MBIT = 200.0
#: Rows of answers of a batch, for each host.
ROWS = 8
PER_ROW = 16
STORE = "text"
TIME = "time of 1,000 tokens a rank"
ONE, BALANCED = "one host", "balance='tokens'"


def links(run: Run) -> None:
    """Time of a thousand tokens a rank, on one host and on several, which balance tokens or have as many rows each."""
    plan, result = run.plan, run.result
    reason = Hosts.viable()
    if reason is not None:
        result.notes.append(f"ranks over links were not measured: {reason}")
        return
    configurations: dict[str, tuple[int, str | None]] = {
        ONE: (1, None),
        BALANCED: (plan.link_hosts, "tokens"),
        "as many rows each": (plan.link_hosts, None),
    }
    case = f"{plan.link_hosts} hosts, {RATE_MBIT:g} Mbit/s, {ROWS} rows of {PER_ROW} answers a host and batch"
    found: dict[str, list[Measured]] = {name: [] for name in configurations}
    with Hosts(plan.link_hosts, rate_mbit=RATE_MBIT) as hosts, Fleet.on(hosts, range(plan.link_hosts), ARGV) as fleet:
        rows = ROWS * (plan.link_batches + 4)
        ask = {"do": "fill", "store": STORE, "rows": rows, "per_row": PER_ROW}
        fleet.ask_each({i: {**ask, "seed": i} for i in range(plan.link_hosts)}, 180.0)
        for _ in range(plan.link_rounds):
            for name, (n, balance) in configurations.items():
                measured = fleet.measure(
                    range(n),
                    batches=plan.link_batches,
                    train_ms=plan.train_ms,
                    hosts=hosts,
                    warm=2,
                    store=STORE,
                    batch=ROWS * n,
                    balance=balance,
                )
                found[name].append(measured)
    for name, rounds in found.items():
        times_s = [1e3 * one.seconds * one.ranks / one.stats["tokens"] for one in rounds]
        result.rows.append(harness.time_row(case, name, TIME, "ms", times_s, plan.train_ms / 1e3))
        last = rounds[-1]
        moved = last.stats["received_bytes"] / (last.stats["received_bytes"] + last.stats["local_bytes"])
        result.notes.append(
            f"{name}: the rank with the most tokens had {last.stats['balance'] / last.ranks:.2f} of the mean; "
            f"{100 * moved:.0f} % of bytes came from other hosts"
        )


__all__ = ["BALANCED", "ONE", "TIME", "links"]
