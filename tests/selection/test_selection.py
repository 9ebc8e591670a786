"""Draws: bit for bit what a slow reference gives, and in the right proportions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

import geartrain as gt
from geartrain import _native
from geartrain.errors import ArgumentError, EmptyStoreError
from geartrain.selection import Candidates, Prioritized, Redraw, Uniform

MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10, as the paper writes it down."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k0, p1 & MASK, p0 >> 32 ^ c[3] ^ k1, p0 & MASK]
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return tuple(c)


def reference_below(seed: int, step: int, draw: int, attempt: int, stream: int, bound: int) -> int:
    """floor(128 random bits * bound / 2**128)."""
    words = philox4x32((draw, stream << 24 | attempt, step & MASK, step >> 32), (seed & MASK, seed >> 32))
    bits = words[0] << 96 | words[1] << 64 | words[2] << 32 | words[3]
    return bits * bound >> 128


def reference_prioritized(priorities: np.ndarray, seed: int, step: int, n: int) -> np.ndarray:
    """The row whose share of the running sum holds each random number."""
    ends = np.cumsum(priorities.astype(np.uint64))
    targets = [reference_below(seed, step, draw, 0, 0, int(ends[-1])) for draw in range(n)]
    return np.searchsorted(ends, np.array(targets, np.uint64), side="right")


def reference_uniform(count: int, seed: int, step: int, n: int) -> np.ndarray:
    return np.array([reference_below(seed, step, draw, 0, 0, count) for draw in range(n)])


def chi_square_p(counts: np.ndarray, expected: np.ndarray) -> float:
    """The probability of counts at least this far from the expected ones, if those were the truth."""
    some = expected > 0
    assert not counts[~some].any()
    statistic = float(((counts[some] - expected[some]) ** 2 / expected[some]).sum())
    return float(chi2.sf(statistic, int(some.sum()) - 1))


# --- exactly --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK,) * 4, (MASK, MASK), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_reference_generator_gives_the_published_vectors(counter, key, expected):
    assert philox4x32(counter, key) == expected


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1000, 4096, 4097, 70_001])
def test_draws_are_bit_for_bit_those_of_the_slow_reference(rows):
    random = np.random.default_rng(rows)
    priorities = random.integers(0, 5000, rows, dtype=np.uint32)
    priorities[random.integers(rows)] = 77
    candidates = Candidates(priorities)
    for seed, step in ((0, 0), (2**64 - 1, 2**40 + 3), (12345, 2**32)):
        drawn = Prioritized(seed).select(candidates, 150, step)
        assert drawn.failed == 0
        assert drawn.rows.tolist() == reference_prioritized(priorities, seed, step, 150).tolist()
        assert np.array_equal(drawn.probability, priorities[drawn.rows] / priorities.sum(dtype=np.uint64))
        assert (drawn.generations == 1).all()
        drawn = Uniform(seed).select(candidates, 150, step)
        assert drawn.rows.tolist() == reference_uniform(rows, seed, step, 150).tolist()
        assert np.array_equal(drawn.probability, np.full(150, 1 / rows))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    priorities=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=90),
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**64 - 1),
)
def test_any_priorities_seed_and_step_give_the_references_rows(priorities, seed, step):
    array = np.array(priorities, np.uint32)
    if array.sum(dtype=np.uint64) == 0:
        with pytest.raises(EmptyStoreError):
            Prioritized(seed).select(Candidates(array), 5, step)
        return
    drawn = Prioritized(seed).select(Candidates(array), 30, step)
    assert drawn.rows.tolist() == reference_prioritized(array, seed, step, 30).tolist()


def test_window_ends_are_bit_for_bit_those_of_the_slow_reference():
    numbers = np.arange(200, dtype=np.uint32)
    lengths = np.random.default_rng(1).integers(1, 1000, 200).astype(np.int32)
    for seed, step, attempt in ((0, 0, 0), (9, 2**33, 3)):
        ends = _native.window_ends(seed, step, attempt, numbers, lengths)
        expected = [
            reference_below(seed, step, draw, attempt * 64, 1, int(length)) for draw, length in enumerate(lengths)
        ]
        assert ends.tolist() == expected


def test_a_store_gives_the_draws_of_an_array_with_its_priorities(name):
    priorities = np.random.default_rng(3).integers(0, 60, 300) / 4
    with gt.Store.create(name, {"x": gt.Field((), "int64", per_row=True)}, capacity=300) as store:
        store.insert({"x": np.arange(300)}, priorities=priorities)
        ours, arrays = (
            Candidates.of_store(store.native, store.column),
            Candidates((priorities * 65536).astype(np.uint32)),
        )
        for strategy in (Prioritized(5), Uniform(5)):
            for step in range(3):
                assert np.array_equal(strategy.select(ours, 500, step).rows, strategy.select(arrays, 500, step).rows)


def test_a_draw_depends_on_seed_step_number_and_attempt_and_on_nothing_else():
    candidates = Candidates(np.arange(1, 5001, dtype=np.uint32))
    for strategy in (Prioritized, Uniform):
        whole = strategy(1).select(candidates, 400, 7).rows
        assert np.array_equal(strategy(1).select(candidates, 400, 7).rows, whole)
        some = np.array([399, 0, 17, 17], np.uint32)
        every = np.arange(400, dtype=np.uint32)
        redraw = Redraw(0, some, np.empty(0, np.uint32))
        assert np.array_equal(strategy(1).select(candidates, 400, 7, redraw=redraw).rows, whole[some])
        others = [
            strategy(2).select(candidates, 400, 7).rows,
            strategy(1).select(candidates, 400, 8).rows,
            strategy(1).select(candidates, 400, 7, redraw=Redraw(1, every, np.empty(0, np.uint32))).rows,
        ]
        assert all((other != whole).mean() > 0.9 for other in others)


# --- in proportion ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 7, 160])
def test_window_ends_are_uniform_over_the_steps_of_a_row(length):
    counts = np.zeros(length, np.int64)
    for step in range(40):
        numbers = np.arange(50_000, dtype=np.uint32)
        ends = _native.window_ends(6, step, 0, numbers, np.full(50_000, length, np.int32))
        counts += np.bincount(ends, minlength=length)
    if length == 1:
        assert counts.tolist() == [2_000_000]
    else:
        assert chi_square_p(counts, np.full(length, 2_000_000 / length)) > 1e-4


def test_the_window_of_a_draw_is_independent_of_its_row():
    drawn = Uniform(seed=8).select(Candidates(np.ones(16, np.uint32)), 800_000, 0)
    ends = _native.window_ends(8, 0, 0, np.arange(800_000, dtype=np.uint32), np.full(800_000, 16, np.int32))
    table = np.bincount(drawn.rows.astype(np.int64) * 16 + ends, minlength=256)
    assert chi_square_p(table, np.full(256, 800_000 / 256)) > 1e-4


# --- refused ------------------------------------------------------------------------------------------------------


def test_priorities_that_are_not_unsigned_integers_are_refused_and_not_cut():
    with pytest.raises(ArgumentError):
        Candidates(np.array([0.5, 1.7]))
    with pytest.raises(ArgumentError, match="found 0"):
        Candidates(np.empty(0, np.uint32))


@pytest.mark.parametrize("strategy", [Prioritized, Uniform])
def test_what_cannot_be_drawn_is_refused(strategy):
    candidates = Candidates(np.ones(4, np.uint32))
    for n in (0, -1, 2**32):
        with pytest.raises(ArgumentError, match=str(n)):
            strategy().select(candidates, n, 0)
    for seed in (-1, 2**64):
        with pytest.raises(ArgumentError, match=str(seed)):
            strategy(seed)


def test_all_priorities_zero_can_still_be_drawn_uniformly():
    candidates = Candidates(np.zeros(5, np.uint32))
    with pytest.raises(EmptyStoreError):
        Prioritized().select(candidates, 1, 0)
    assert set(Uniform().select(candidates, 200, 0).rows.tolist()) == {0, 1, 2, 3, 4}
