"""Performance model of all-reduce: time on a network, the best shares, and the cheapest number of reducers.

An array is split into shares. The owner of a share receives it from all workers, sums it and returns the sum. Let K be
the array's bytes and N the number of workers. A worker that owns the fraction x moves K (1 + (N - 2) x) bytes each way.
A reducer that owns the fraction y moves K N y. The best shares follow in closed form
(`native/collectives/share_planner.h`). From Python:

    from geartrain.tools.plan.allreduce import Network, plan

    found = plan(Network(workers=(12.5e9,) * 8, reducers=(4e9,) * 14, nbytes=1.2e9))
    assert round(found.seconds / 0.096, 3) == 1.232 and found.needed_dedicated == 25

The algorithms, for N workers behind links of B bytes a second:

| | bytes of a worker, each way | hops, one after the other |
|---|---|---|
| single: one reducer sums for all, the naive way | K; the reducer N K | 2 |
| root: one worker sums and broadcasts | the root (N - 1) K | 2 |
| ring | 2 (N - 1) / N K | 2 (N - 1) |
| tree (halving and doubling) | 2 (N - 1) / N K; K more where N is no power of two | 2 log2 N, 2 more |
| dedicated | K, if there are enough reducers | 2 |
| hybrid | K (1 + (N - 2) x) | 2 |

A hop costs half a round trip. The model leaves out headers (4.5 % for TCP over Ethernet), the processors' time to sum,
other traffic, and stragglers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import geartrain._native as _native
from geartrain.core.arguments import check_real
from geartrain.errors import ArgumentError

ALGORITHMS = ("single", "root", "ring", "tree", "dedicated", "hybrid")
#: Costs by formula, each way: bytes of a worker, bytes of the member that moves most, hops. N workers, an array of K
#: bytes, a worker that owns the fraction x, a reducer that owns y; *: where N is no power of two, of the next lower one
#: and K more, and 2 hops.
FORMULAS = {
    "single": ("K", "N K, the reducer", "2"),
    "root": ("K", "(N - 1) K, the root", "2"),
    "ring": ("2 (N - 1) / N K", "the same", "2 (N - 1)"),
    "tree": ("2 (N - 1) / N K *", "the same", "2 log2 N *"),
    "dedicated": ("K", "N K y, a reducer", "2"),
    "hybrid": ("K (1 + (N - 2) x)", "that, or N K y", "2"),
}
#: Most reducers that are compared when the cheapest number is searched.
MOST_REDUCERS = 10_000


@dataclass(frozen=True)
class Network:
    """Links, in bytes a second in each direction at the same time, and the array to reduce.

    Attributes:
        workers, reducers: the rate of each worker's and each reducer's link.
        nbytes: size of the array.
        rtt_s: the time of a round trip between any two of them.
    """

    workers: tuple[float, ...]
    reducers: tuple[float, ...] = ()
    nbytes: float = 1e9
    rtt_s: float = 0.0

    def __post_init__(self) -> None:
        check_real("nbytes", self.nbytes, 0)
        check_real("rtt_s", self.rtt_s, 0)
        _native.plan_shares(len(self.workers), self.rates)  # raises for invalid rates

    @property
    def rates(self) -> tuple[float, ...]:
        """The rates of all links, workers first."""
        return (*self.workers, *self.reducers)

    @property
    def unit_s(self) -> float:
        """K / B: the time of the array through the slowest worker's link, once. The lower bound of every all-reduce."""
        return self.nbytes / min(self.workers)


@dataclass(frozen=True)
class AlgorithmCost:
    """Cost of one algorithm.

    Attributes:
        algorithm: of `ALGORITHMS`.
        workers, reducers: number that take part.
        worker_bytes: of the worker that moves most, each way.
        busiest_bytes: of the worker or reducer that moves most.
        hops: sequential one-way delays.
        latency_s: time of the hops.
        seconds: total time, of bytes and latency.
    """

    algorithm: str
    workers: int
    reducers: int
    worker_bytes: float
    busiest_bytes: float
    hops: int
    latency_s: float
    seconds: float


@dataclass(frozen=True)
class AllReducePlan:
    """The best shares of an all-reduce, their time, and the costs of all algorithms.

    Attributes:
        shares: the fraction that each process owns, workers first; for `Group(shares=...)`.
        moved: bytes that each process moves, each way.
        seconds: with latency.
        costs: of every algorithm on this network; dedicated where there are reducers.
        needed, needed_dedicated: reducers like the slowest given one (or like the slowest worker, where none is given)
            with which the best shares, or dedicated ones, take K / B.
        needed_rate: that reducer's rate.
    """

    network: Network
    shares: tuple[float, ...]
    moved: tuple[float, ...]
    seconds: float
    costs: tuple[AlgorithmCost, ...]
    needed: int
    needed_dedicated: int
    needed_rate: float


@dataclass(frozen=True)
class Priced:
    """Time of a training step with that many reducers, and its cost in the prices' currency."""

    reducers: int
    step_s: float
    cost: float


def plan(network: Network) -> AllReducePlan:
    """The best shares for this network, and the costs of all algorithms on it."""
    shares = _native.plan_shares(len(network.workers), network.rates)
    costs = tuple(cost(network, name) for name in ALGORITHMS if name != "dedicated" or network.reducers)
    rate = min(network.reducers or network.workers)
    return AllReducePlan(
        network=network,
        shares=tuple(shares),
        moved=tuple(moved_bytes(network, shares)),
        seconds=costs[-1].seconds,
        costs=costs,
        needed=reducers_needed(network.workers, rate),
        needed_dedicated=dedicated_reducers_needed(network.workers, rate),
        needed_rate=rate,
    )


def cost(network: Network, algorithm: str) -> AlgorithmCost:
    """Cost of one algorithm. Raises `ArgumentError` for an unknown one, and for dedicated without reducers.

    The single reducer is the fastest given one, or like the slowest worker where none is given.
    """
    n, k, slowest = len(network.workers), network.nbytes, min(network.workers)
    if algorithm in ("ring", "tree"):
        whole = n if algorithm == "ring" else 1 << (n.bit_length() - 1)
        beyond = k if whole != n else 0.0  # of workers that give their array to a partner, and get the result last
        moved = busiest = 2 * (whole - 1) / whole * k + beyond
        seconds = (moved + beyond) / slowest
        hops = 2 * (n - 1) if algorithm == "ring" else 2 * (whole.bit_length() - 1) + 2 * (whole != n)
        reducers = 0
    else:
        if algorithm == "single":
            network = replace(network, reducers=(max(network.reducers, default=slowest),) if n > 1 else ())
            shares = dedicated_shares(network)
        elif algorithm == "root":
            network = replace(network, reducers=())
            root = network.workers.index(max(network.workers))
            shares = [float(i == root) for i in range(n)]
        elif algorithm == "dedicated":
            shares = dedicated_shares(network)
        elif algorithm == "hybrid":
            shares = _native.plan_shares(n, network.rates)
        else:
            raise ArgumentError(f"there are {', '.join(ALGORITHMS)}; found {algorithm!r}")
        all_moved = moved_bytes(network, shares)
        moved, busiest, seconds = max(all_moved[:n]), max(all_moved), shares_seconds(network, shares)
        hops = 2 if n > 1 else 0
        reducers = sum(share > 0 for share in shares[n:])
    latency_s = hops * network.rtt_s / 2
    return AlgorithmCost(algorithm, n, reducers, moved, busiest, hops, latency_s, seconds + latency_s)


def dedicated_shares(network: Network) -> list[float]:
    """All shares on the reducers, in proportion to their rates. Raises `ArgumentError` without any."""
    if len(network.workers) == 1:
        return [1.0] + [0.0] * len(network.reducers)
    if not network.reducers:
        raise ArgumentError("dedicated shares need a reducer, found none")
    return [0.0] * len(network.workers) + [rate / sum(network.reducers) for rate in network.reducers]


def moved_bytes(network: Network, shares: Sequence[float]) -> list[float]:
    """Bytes that each process moves with these shares, each way, workers first."""
    n, k = len(network.workers), network.nbytes
    return [k * (max(0.0, 1 + (n - 2) * each) if i < n else n * each) for i, each in enumerate(shares)]


def shares_seconds(network: Network, shares: Sequence[float]) -> float:
    """Seconds without latency: the slowest process's bytes over its rate."""
    moved = moved_bytes(network, shares)
    return max(each / rate for each, rate in zip(moved, network.rates, strict=False))


def reducers_needed(workers: Sequence[float], rate: float) -> int:
    """How many reducers of that rate the best shares need to reach K / B."""
    n = len(workers)
    if n <= 2:  # they move K, or nothing, by themselves
        return 0
    return _at_least(((2 * n - 2) * min(workers) - sum(workers)) * n / ((n - 2) * rate))


def dedicated_reducers_needed(workers: Sequence[float], rate: float) -> int:
    """The same of dedicated reducers."""
    return 0 if len(workers) == 1 else _at_least(len(workers) * min(workers) / rate)


def _at_least(value: float) -> int:
    """The smallest number that is not below `value`, which may be a rounding above a whole one."""
    return max(0, math.ceil(value * (1 - 1e-12)))


def growing(network: Network, counts: Sequence[int]) -> list[list[AlgorithmCost]]:
    """Scaling: for each number of workers the cost of every algorithm.

    All workers have the slowest one's link. `dedicated` gets as many reducers as it needs, of the rate that the
    plan names; `hybrid` has those that are given.
    """
    slowest = min(network.workers)
    rate = min(network.reducers or network.workers)
    rows = []
    for n in counts:
        now = replace(network, workers=(slowest,) * n)
        enough = replace(now, reducers=(rate,) * max(1, dedicated_reducers_needed(now.workers, rate)))
        rows.append([cost(enough if name == "dedicated" else now, name) for name in ALGORITHMS])
    return rows


def with_reducers(network: Network, rate: float, most: int) -> list[tuple[float, float]]:
    """Seconds of hybrid and of dedicated shares with 0, 1, ... `most` reducers of that rate (inf: none to dedicate)."""
    found = []
    for count in range(most + 1):
        now = replace(network, reducers=(rate,) * count)
        found.append((cost(now, "hybrid").seconds, cost(now, "dedicated").seconds if count else float("inf")))
    return found


def cheapest(
    network: Network, *, price_worker: float, price_reducer: float, compute_s: float
) -> tuple[Priced, list[Priced]]:
    """The number of reducers with which a training step costs least, and all numbers up to those that are of use.

    A step is `compute_s` and then the all-reduce; nothing overlaps. Prices are of a machine for an hour. All reducers
    are like the given one.

    Raises:
        ArgumentError: reducers of several kinds, none at all, or a price or time below zero.
    """
    if len(set(network.reducers)) != 1:
        raise ArgumentError("the cheapest number of reducers needs reducers of one kind: --reducers 1x32Gbit")
    for what, value in (("price_worker", price_worker), ("price_reducer", price_reducer), ("compute_s", compute_s)):
        check_real(what, value, 0)
    rate = network.reducers[0]
    most = reducers_needed(network.workers, rate)
    if most > MOST_REDUCERS:
        raise ArgumentError(f"{most:,} such reducers would be of use; more than {MOST_REDUCERS:,} are not compared")
    priced = []
    for count in range(most + 1):
        step_s = compute_s + cost(replace(network, reducers=(rate,) * count), "hybrid").seconds
        hourly = len(network.workers) * price_worker + count * price_reducer
        priced.append(Priced(count, step_s, hourly * step_s / 3600))
    return min(priced, key=lambda one: (one.cost, one.step_s, one.reducers)), priced
