"""Rows are drawn as often as their priorities say: tests that see a bias of 1 %, and are seen to see it.

p-values are of fixed seeds, so they are the same in every run; below 1e-4 counts as wrong. The same tests are given
draws from priorities that are off by 1 %, and have to find p below 1e-8.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from geartrain import _native

NONE = np.empty(0, np.uint32)
Floats = NDArray[np.float64]


def counts_of(
    priorities: NDArray[np.uint32], draws: int, by_priority: bool = True, strata: bool = False
) -> NDArray[np.int64]:
    """How often each row was drawn."""
    candidates = _native.Candidates(priorities)
    counts = np.zeros(len(priorities), np.int64)
    piece = 2**20
    for step in range(draws // piece):
        numbers = np.arange(piece, dtype=np.uint32)
        rows, _, _, failed = candidates.draw(by_priority, 11, step, 0, numbers, piece if strata else 0)
        assert failed == 0
        counts += np.bincount(rows, minlength=len(priorities))
    return counts


def bins_of(values: NDArray[np.generic], bins: int, how: str) -> Floats:
    """Sums over `bins` groups of rows: neighbours, or every bins-th."""
    rows = np.arange(len(values))
    group = rows * bins // len(values) if how == "neighbours" else rows % bins
    return np.bincount(group, weights=values, minlength=bins)


def chi_square(counts: NDArray[np.int64], priorities: NDArray[np.uint32], bins: int, how: str) -> float:
    observed, share = bins_of(counts, bins, how), bins_of(priorities, bins, how)
    return float(stats.chisquare(observed, share / share.sum() * observed.sum()).pvalue)


def kolmogorov_smirnov(counts: NDArray[np.int64], priorities: NDArray[np.uint32]) -> float:
    """Of the rows' numbers. They are whole, which makes the p-value too large, never too small."""
    n = counts.sum()
    there, should = np.cumsum(counts) / n, np.cumsum(priorities, dtype=np.float64)
    return float(stats.kstwobign.sf(np.sqrt(n) * np.abs(there - should / should[-1]).max()))


def uneven(n: int) -> NDArray[np.uint32]:
    """Priorities over two orders of magnitude, far from 2^32 so that 1 % can be added."""
    return np.exp2(np.random.default_rng(n).uniform(20, 27, n)).astype(np.uint32)


def one_per_cent_off(priorities: NDArray[np.uint32], how: str) -> NDArray[np.uint32]:
    """Half of the rows 1 % heavier: the upper half, or every second row."""
    rows = np.arange(len(priorities))
    heavier = rows >= len(priorities) // 2 if how == "neighbours" else rows % 2 == 1
    return np.where(heavier, (priorities * 1.01).astype(np.uint32), priorities)


@pytest.mark.parametrize("n", [1000, 1_000_000])
def test_plain_draws_follow_the_priorities(n: int) -> None:
    priorities = uneven(n)
    counts = counts_of(priorities, 8 * 2**20)
    for how in ("neighbours", "every"):
        for bins in (2, 8, 16, 100, 1000):
            assert chi_square(counts, priorities, bins, how) > 1e-4, (how, bins)
    assert kolmogorov_smirnov(counts, priorities) > 1e-4
    if n == 1000:
        assert stats.chisquare(counts, priorities / priorities.sum() * counts.sum()).pvalue > 1e-4


@pytest.mark.parametrize("n", [1000, 1_000_000])
def test_these_tests_see_a_bias_of_one_per_cent(n: int) -> None:
    priorities = uneven(n)
    for how in ("neighbours", "every"):
        counts = counts_of(one_per_cent_off(priorities, how), 8 * 2**20)
        assert chi_square(counts, priorities, 2, how) < 1e-8
        assert chi_square(counts, priorities, 100, how) < 1e-8
        if how == "neighbours":
            assert kolmogorov_smirnov(counts, priorities) < 1e-8


def test_draws_by_row_do_not_ask_for_priorities() -> None:
    priorities = uneven(1000)
    same = np.ones(1000, np.uint32)
    counts = counts_of(priorities, 4 * 2**20, by_priority=False)
    assert stats.chisquare(counts).pvalue > 1e-4
    assert kolmogorov_smirnov(counts, same) > 1e-4


def test_stratified_draws_follow_the_priorities_closer_than_chance() -> None:
    priorities = uneven(100_000)
    counts = counts_of(priorities, 4 * 2**20, strata=True)
    # Each n-th of the priority has its draw: no running count is off by more than one a step, at either end.
    expected = np.cumsum(priorities, dtype=np.float64) / priorities.sum(dtype=np.float64) * counts.sum()
    assert np.abs(np.cumsum(counts) - expected).max() <= 2 * 4
    # Where a stratum lies across rows, the draw falls on each in proportion: row 1 has a third of stratum 1 of 2.
    candidates = _native.Candidates(np.array([20, 10, 30], np.uint32))
    rows = [candidates.draw(True, 3, step, 0, np.array([0], np.uint32), 2)[0][0] for step in range(40_000)]
    assert stats.binomtest(rows.count(1), len(rows), 1 / 3).pvalue > 1e-4
    assert rows.count(2) == 0


def test_draws_without_replacement_take_each_from_those_left() -> None:
    priorities = np.array([1, 2, 3, 6], np.uint32)
    candidates = _native.Candidates(priorities)
    pairs = np.zeros((4, 4))
    steps = 60_000
    for step in range(steps):
        rows = candidates.draw_distinct(True, 7, step, 0, 2, NONE)[0]
        pairs[rows[0], rows[1]] += 1
    share = priorities / priorities.sum()
    expected = share[:, None] * share[None, :] / (1 - share[:, None])
    np.fill_diagonal(expected, 0)
    apart = ~np.eye(4, dtype=bool)
    assert pairs[~apart].sum() == 0
    assert stats.chisquare(pairs[apart], expected[apart] * steps).pvalue > 1e-4


def test_the_last_rows_without_replacement_are_drawn_in_proportion_too() -> None:
    """Two rows are so heavy that 4 n + 64 draws rarely find another: the rest comes from a copy."""
    priorities = np.array([2**31, 1, 2, 3, 2**31], np.uint32)
    candidates = _native.Candidates(priorities)
    third = np.zeros(5)
    for step in range(20_000):
        third[candidates.draw_distinct(True, 8, step, 0, 3, NONE)[0][2]] += 1
    assert third[[0, 4]].sum() == 0
    assert stats.chisquare(third[1:4], np.array([1, 2, 3]) / 6 * 20_000).pvalue > 1e-4


def upper_half_by_8(n: int, priority: int, draws: int) -> NDArray[np.int64]:
    """Draws of equal priorities by index mod 8, in the upper half of n rows: what sums in float32 get wrong."""
    candidates = _native.Candidates(np.full(n, priority, np.uint32))
    counts = np.zeros(8, np.int64)
    lower = 0
    for step in range(draws // 2**20):
        rows = candidates.draw(True, 12, step, 0, np.arange(2**20, dtype=np.uint32))[0]
        upper = rows[rows >= n // 2]
        lower += len(rows) - len(upper)
        counts += np.bincount(upper % 8, minlength=8)
    assert stats.binomtest(lower, draws // 2**20 * 2**20, (n // 2) / n).pvalue > 1e-4
    return counts


@pytest.mark.parametrize("priority", [1, 65536, 2**32 - 1])
def test_rows_beyond_2_to_the_24_are_all_drawn_alike(priority: int) -> None:
    counts = upper_half_by_8(2**24 + 2**22 + 8, priority, 4 * 2**20)
    assert stats.chisquare(counts).pvalue > 1e-4, counts


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_million_rows_are_all_drawn_alike() -> None:
    counts = upper_half_by_8(100_000_000, 65536, 8 * 2**20)
    assert stats.chisquare(counts).pvalue > 1e-4, counts


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_million_rows_of_uneven_priorities() -> None:
    priorities = uneven(100_000_000)
    candidates = _native.Candidates(priorities)
    rows = np.concatenate(
        [candidates.draw(True, 13, step, 0, np.arange(2**20, dtype=np.uint32))[0] for step in range(16)]
    )
    del candidates
    for how, group in (("neighbours", rows.astype(np.int64) * 1000 // len(priorities)), ("every", rows % 1000)):
        share = bins_of(priorities, 1000, how)
        observed = np.bincount(group, minlength=1000)
        assert stats.chisquare(observed, share / share.sum() * len(rows)).pvalue > 1e-4, how
    should = np.cumsum(priorities, dtype=np.float64)
    rows.sort()
    there = np.arange(1, len(rows) + 1) / len(rows)
    assert stats.kstwobign.sf(np.sqrt(len(rows)) * np.abs(there - should[rows] / should[-1]).max()) > 1e-4
