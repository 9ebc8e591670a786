"""The planner of all-reduce: the closed form is the optimum, and its edges are where they should be."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from geartrain import _native
from geartrain.errors import ArgumentError
from geartrain.tools.plan.allreduce import (
    Network,
    cost,
    dedicated_reducers_needed,
    dedicated_shares,
    moved_bytes,
    reducers_needed,
    shares_seconds,
)


def optimum_s(workers: list[float], reducers: list[float], nbytes: float) -> float:
    """The least time of any shares, by linear programming; it knows the bytes that owners move and nothing else."""
    from scipy.optimize import linprog

    n, m = len(workers), len(reducers)
    # x_0 .. x_{n-1}, y_0 .. y_{m-1}, T, with an array of one byte and links scaled to about 1.
    scale = max(workers + reducers)
    upper: list[Any] = []
    bounds: list[float] = []
    for i, rate in enumerate(workers + reducers):
        line = [0.0] * (n + m + 1)
        line[i] = float(n - 2 if i < n else n)
        line[-1] = -rate / scale
        upper.append(line)
        bounds.append(-1.0 if i < n else 0.0)
    found = linprog(
        [0.0] * (n + m) + [1.0], upper, bounds, [[1.0] * (n + m) + [0.0]], [1.0], bounds=[(0, None)] * (n + m + 1),
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )  # fmt: skip
    assert found.status == 0, found.message
    return float(found.fun) * nbytes / scale


def random_cluster(random: np.random.Generator) -> tuple[list[float], list[float]]:
    n, m = int(random.integers(2, 17)), int(random.integers(0, 13))
    spread = random.choice([0.0, 0.3, 2.0])  # equal links, similar ones, anything
    workers = 1e8 * np.exp(spread * random.standard_normal(n))
    reducers = 1e8 * np.exp(spread * random.standard_normal(m) + random.uniform(-2, 1))
    return workers.tolist(), reducers.tolist()


def best(workers: list[float], reducers: list[float], nbytes: float) -> tuple[list[float], float]:
    """The shares, and their seconds."""
    network = Network(tuple(workers), tuple(reducers), nbytes)
    shares = _native.plan_shares(len(workers), network.rates)
    return shares, shares_seconds(network, shares)


def dedicated(workers: list[float], reducers: list[float], nbytes: float) -> tuple[list[float], float]:
    network = Network(tuple(workers), tuple(reducers), nbytes)
    shares = dedicated_shares(network)
    return shares, shares_seconds(network, shares)


def test_the_closed_form_is_the_linear_programs_optimum() -> None:
    random = np.random.default_rng(17)
    for _ in range(400):
        workers, reducers = random_cluster(random)
        shares, seconds = best(workers, reducers, 1e7)
        assert seconds == pytest.approx(optimum_s(workers, reducers, 1e7), rel=1e-9), (workers, reducers)
        assert min(shares) >= 0 and math.fsum(shares) == pytest.approx(1, abs=1e-12)
        # The time is what the shares themselves take, counted by hand here.
        n = len(workers)
        moved = [1e7 * (1 + (n - 2) * x) for x in shares[:n]] + [1e7 * n * y for y in shares[n:]]
        assert seconds == pytest.approx(max(b / r for b, r in zip(moved, workers + reducers, strict=True)), rel=1e-12)


def test_a_slow_worker_owns_nothing_and_moves_exactly_the_array() -> None:
    shares, seconds = best([100.0, 400.0, 400.0, 400.0], [], 1.0)
    assert shares == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3]) and shares[0] == 0
    assert seconds == pytest.approx(1 / 100)  # where the ring takes 1.5 / 100
    assert moved_bytes(Network((100.0, 400.0, 400.0, 400.0), nbytes=1.0), shares)[0] == 1.0


def test_nobody_owns_a_rounding() -> None:
    for n in range(2, 40):
        shares, _ = best([1 / 3] * n, [1 / 3] * n, 1e9)
        assert shares[:n] == [0.0] * n and shares[n:] == pytest.approx([1 / n] * n)


def test_a_reducer_that_is_listed_twice_has_one_link() -> None:
    once, twice = (_native.shares_of_equal_links(8, names) for names in (["a:1", "b:1"], ["a:1", "a:1", "b:1"]))
    assert twice[8] == twice[9] and twice[8] + twice[9] == pytest.approx(once[8]) == pytest.approx(once[9])
    assert once == _native.plan_shares(8, [1.0] * 10)


def test_a_group_of_one_moves_nothing_and_a_group_of_two_moves_the_array() -> None:
    assert best([5.0], [], 7.0) == ([1.0], 0.0)
    assert best([5.0], [9.0], 7.0) == ([1.0, 0.0], 0.0)
    assert dedicated([5.0], [], 7.0) == ([1.0], 0.0)
    assert best([5.0, 5.0], [], 10.0) == ([0.5, 0.5], 2.0)
    for reducers in ([], [1.0], [100.0, 3.0]):
        shares, seconds = best([5.0, 2.0], reducers, 10.0)
        assert seconds == 5.0 and sum(shares) == pytest.approx(1)
    assert reducers_needed([5.0, 2.0], 1.0) == 0
    assert dedicated_reducers_needed([5.0, 2.0], 1.0) == 4
    assert best([5.0] * 3, [2.0], 0.0)[1] == 0.0


def test_so_many_reducers_are_enough_and_one_less_is_not() -> None:
    random = np.random.default_rng(3)
    for _ in range(200):
        workers, _ = random_cluster(random)
        rate = float(random.uniform(0.1, 2)) * min(workers)
        floor_s = 1 / min(workers)
        for count, plan in (
            (reducers_needed(workers, rate), best),
            (dedicated_reducers_needed(workers, rate), dedicated),
        ):
            if count > 0:
                assert plan(workers, [rate] * count, 1.0)[1] == pytest.approx(floor_s, rel=1e-9)
            if count > 1 or (count == 1 and plan is best):
                assert plan(workers, [rate] * (count - 1), 1.0)[1] > floor_s * (1 + 1e-9)


def test_ring_and_tree_count_steps_and_bytes() -> None:
    def costs(algorithm: str, *counts: int) -> list[tuple[float, int]]:
        found = [cost(Network((2.0,) * n, nbytes=8.0), algorithm) for n in counts]
        return [(one.busiest_bytes, one.hops) for one in found]

    assert costs("ring", 1, 2, 4, 8) == [(0, 0), (8, 2), (12, 6), (14, 14)]
    assert costs("tree", 1, 2, 4, 8) == [(0, 0), (8, 2), (12, 4), (14, 6)]
    assert [hops for _, hops in costs("tree", 3, 6, 1024)] == [4, 6, 20]
    # Six: two of them give their arrays to partners, four go on, and the two get the result: K, 1.5 K, K.
    assert cost(Network((2.0,) * 6, nbytes=8.0), "tree").seconds == pytest.approx((1 + 1.5 + 1) * 8 / 2)


@pytest.mark.parametrize(
    ("workers", "reducers", "nbytes", "said"),
    [
        ([], [], 1.0, "at least one worker"),
        ([1.0, 0.0], [], 1.0, "that of worker 1 is 0"),
        ([1.0], [-2.0], 1.0, "that of reducer 0 is -2"),
        ([1.0, math.inf], [], 1.0, "worker 1 is inf"),
        ([1.0, 1.0], [], math.nan, "found nan"),
    ],
)
def test_what_is_no_cluster_is_refused(workers: list[float], reducers: list[float], nbytes: float, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        Network(tuple(workers), tuple(reducers), nbytes)


def test_dedicated_shares_without_a_reducer_are_refused() -> None:
    with pytest.raises(ArgumentError, match="need a reducer"):
        dedicated([1.0, 1.0], [], 1.0)
