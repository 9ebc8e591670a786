"""Batches over hosts that are far from each other: samples/s with an emulated delay, beside those without.

    python -m geartrain_bench.distributed_replay.delay [--hosts 2 4] [--delay-ms 20] [--train-ms 50] [--prefetch 0 2 4]
                                                       [--extra-lag none 0 1] [--batches 40] [--laps 1]

Hosts are network namespaces with a shard and one process each (`geartrain.tools.testing.cluster`); the delay is one
way, so that a round trip takes twice as long. Every process updates the priorities of its rows after every batch, and
trains for so many milliseconds before that (it sleeps). The extra lag is `update_lag - prefetch`; "none" leaves
`update_lag` out. Cases with the delay and without take turns.

Threats to validity: all hosts share this machine's cores, also with the switch that delays frames.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any

from geartrain.tools.testing.cluster import Hosts
from geartrain_bench.harness.fleet import Fleet, Measured

ROW_BYTES = 1024
ROWS_PER_HOST = 4000
BATCH_PER_HOST = 32
WARM = 12


def measure(
    hosts: Hosts,
    fleet: Fleet,
    store: str,
    size: int,
    prefetch: int,
    extra_lag: int | None,
    train_ms: float,
    batches: int,
) -> Measured:
    """One case: a new job of the first hosts."""
    options: dict[str, Any] = {} if extra_lag is None else {"update_lag": prefetch + extra_lag}
    return fleet.measure(
        range(size),
        store=store,
        strategy="prioritized",
        batch=BATCH_PER_HOST * size,
        assignment="local_first",
        warm=WARM,
        batches=batches,
        train_ms=train_ms,
        hosts=hosts,
        prefetch=prefetch,
        learns=True,
        **options,
    )


def lag(text: str) -> int | None:
    """An extra lag: a number, or None."""
    return None if text == "none" else int(text)


def main(arguments: Sequence[str]) -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(prog=__spec__.name, description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--delay-ms", type=float, default=20.0, help="one way")
    parser.add_argument("--train-ms", type=float, nargs="+", default=[50.0])
    parser.add_argument("--prefetch", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--extra-lag", type=lag, nargs="+", default=[None, 1])
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--laps", type=int, default=1)
    asked = parser.parse_args(arguments)
    print(
        f"rows of {ROW_BYTES} B, {BATCH_PER_HOST} a host; priorities updated after every batch; samples/s of all hosts"
    )
    print(
        f"{'hosts':>5} {'train':>6} {'prefetch':>8} {'lag':>5} {'no delay':>10} {asked.delay_ms:>5g} ms {'ratio':>6}"
        " load"
    )
    store = f"bench-delay-{os.getpid()}"
    most = max(asked.hosts)
    with Hosts(most, switched=True) as hosts, Fleet.on(hosts, range(most)) as fleet:
        fleet.ask(range(most), do="fill", store=store, rows=ROWS_PER_HOST, row_bytes=ROW_BYTES, capacity=ROWS_PER_HOST)
        cases = itertools.product(range(asked.laps), asked.hosts, asked.train_ms, asked.prefetch, asked.extra_lag)
        for _, size, train_ms, prefetch, extra_lag in cases:
            found = []
            for delay_ms in (0.0, asked.delay_ms):
                hosts.change_rtt(2 * delay_ms)
                measured = measure(hosts, fleet, store, size, prefetch, extra_lag, train_ms, asked.batches)
                found.append(BATCH_PER_HOST * size * measured.batches / measured.seconds)
            hosts.change_rtt(0.0)
            named = "none" if extra_lag is None else prefetch + extra_lag
            print(
                f"{size:>5} {train_ms:>6g} {prefetch:>8} {named:>5} {found[0]:>10.0f} {found[1]:>8.0f} "
                f"{found[1] / found[0]:>6.2f} {os.getloadavg()[0]:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
