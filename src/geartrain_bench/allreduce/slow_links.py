"""All-reduces with reducers over slow links beside one-way TCP over the same links, in turns.

    python -m geartrain_bench.allreduce.slow_links --ranks 2,4,8 --mb 16 --rate-mbit 200        # N dedicated reducers
    python -m geartrain_bench.allreduce.slow_links --ranks 4 --reducers 1,2,3 --mb 16,64        # as planned

The floor is a one-way transfer of the array's K bytes by plain TCP from rank 0 to rank 1: what dedicated reducers would
take if sums came for nothing. Of a hybrid it is as many times that as the planner says it takes K over the link's rate.
One host a process (geartrain.tools.testing.Hosts, which needs the right to create network namespaces); a round begins
on all ranks at one instant, every element of every sum is checked.

It would mislead where the processes of all hosts do not get a core as soon as they want one: the fastest round tells
more than the median then.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics

from geartrain.tools.plan.allreduce import Network
from geartrain.tools.testing import Hosts
from geartrain_bench.allreduce.testbed import AllReduceTestbed, dedicated, hybrid

QUEUE_MS = 50.0


def measure(n: int, reducers: list[int], sizes_mb: list[float], rate_mbit: float, rounds: int) -> None:
    """Prints a table of one number of ranks; no reducers: as many dedicated ones."""
    chosen = [hybrid(n, count) for count in reducers] or [dedicated(n, n)]
    most = max(reducers, default=n)
    with (
        Hosts(n + most, rate_mbit=rate_mbit, queue_ms=QUEUE_MS) as hosts,
        AllReduceTestbed(hosts, n, most) as testbed,
        contextlib.ExitStack() as stack,
    ):
        groups = [stack.enter_context(testbed.group(configuration, n)) for configuration in chosen]
        for mb in sizes_mb:
            nbytes = int(mb * 2**20)
            floors: list[float] = []
            laps: list[list[float]] = [[] for _ in groups]
            moved = [0.0] * len(groups)
            for number in range(rounds + 1):
                floors.append(testbed.one_way_s(nbytes))
                for place in range(len(groups))[:: 1 if number % 2 else -1]:
                    timed = groups[place].rounds(nbytes, calls=1, rounds=1, warm=0)
                    laps[place] += timed.laps_s
                    moved[place] = max(timed.sent_bytes, timed.received_bytes)
            floor_s = statistics.median(floors[1:])
            load = os.getloadavg()[0]
            print(f"N = {n}, {mb:g} MB, {rate_mbit:g} Mbit/s, {rounds} rounds; load {load:.1f}")
            print(f"  one-way TCP              {1e3 * floor_s:8.1f} ms, fastest {1e3 * min(floors[1:]):8.1f}")
            for configuration, found, sent in zip(chosen, laps, moved, strict=True):
                rates = (rate_mbit * 1e6 / 8,)
                network = Network(rates * n, rates * configuration.reducers, float(nbytes))
                planned = configuration.planned_s(network) / network.unit_s
                seconds, fastest = statistics.median(found[1:]), min(found[1:])
                unit_s = floor_s * planned
                print(
                    f"  {configuration.name:24} {1e3 * seconds:8.1f} ms, fastest {1e3 * fastest:8.1f}: "
                    f"{seconds / unit_s:.3f} ({fastest / unit_s:.3f}) of {planned:.3f} transfers; "
                    f"{sent / nbytes:.3f} K through rank 0's link",
                    flush=True,
                )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--reducers", default="", help="as planned; by default as many dedicated ones as ranks")
    parser.add_argument("--mb", default="16")
    parser.add_argument("--rate-mbit", type=float, default=200.0)
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    reducers = [int(word) for word in given.reducers.split(",") if word]
    for n in map(int, given.ranks.split(",")):
        measure(n, reducers, [float(word) for word in given.mb.split(",")], given.rate_mbit, given.rounds)


if __name__ == "__main__":
    main()
