"""Strategies beyond plain draws: each chooses what it says, replaces what was lost, and resumes where it stopped."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from scipy import stats

import geartrain as gt
from geartrain.errors import ArgumentError, EmptyStoreError, FieldError, NotEnoughRowsError
from geartrain.selection import (
    Candidates,
    Fifo,
    GroupSampling,
    Lifo,
    Limits,
    Linear,
    Mixture,
    Prioritized,
    Redraw,
    TopK,
    Traits,
    Uniform,
    importance_weights,
)
from geartrain.selection.strategy import seed_of, traits_of

FIELDS = {"x": gt.Field((), "int64"), "prompt": gt.Field((), "int64", per_row=True)}
NONE = np.empty(0, np.uint32)


@pytest.fixture
def store(store_name: Any) -> Any:
    """80 rows; row i holds i, belongs to prompt i // 4 and has priority 1 + i % 5."""
    with gt.Store.create(store_name(), FIELDS, max_length=6, capacity=100) as made:
        n = np.arange(80)
        made.insert(
            {"x": np.repeat(n[:, None], 6, 1), "prompt": n // 4},
            priorities=1 + n % 5,
            versions=n // 10,
            lengths=1 + n % 6,
        )
        yield made


def candidates_of(store: gt.Store) -> Candidates:
    return Candidates.of_store(store.native, store.column)


# --- without replacement, stratified ------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [Uniform(3, replacement=False), Prioritized(3, replacement=False)])
def test_without_replacement_no_row_comes_twice_up_to_the_last_one(strategy: Any) -> None:
    priorities = np.random.default_rng(0).integers(0, 50, 300).astype(np.uint32)
    drawable = 300 if isinstance(strategy, Uniform) else int((priorities > 0).sum())
    candidates = Candidates(priorities)
    for n in (1, 10, drawable // 2, drawable - 1, drawable):
        rows = strategy.select(candidates, n, step=n).rows
        assert len(set(rows.tolist())) == n
    with pytest.raises(NotEnoughRowsError, match=str(drawable + 1)):
        strategy.select(candidates, drawable + 1, step=0)


def test_without_replacement_is_drawing_one_after_the_other_in_proportion_to_what_is_left() -> None:
    priorities = np.array([1, 3, 4, 8], np.uint32)
    candidates, strategy = Candidates(priorities), Prioritized(11, replacement=False)
    share = priorities / priorities.sum()
    expected = {(a, b): share[a] * share[b] / (1 - share[a]) for a, b in itertools.permutations(range(4), 2)}
    draws = 60_000
    counts = dict.fromkeys(expected, 0)
    for step in range(draws):
        counts[tuple(strategy.select(candidates, 2, step).rows.tolist())] += 1
    p = stats.chisquare(list(counts.values()), [draws * expected[pair] for pair in counts]).pvalue
    assert p > 1e-4


def test_replacements_without_replacement_avoid_the_rows_that_are_kept() -> None:
    candidates = Candidates(np.ones(20, np.uint32))
    kept = np.arange(15, dtype=np.uint32)
    for strategy in (Uniform(1, replacement=False), Prioritized(1, replacement=False)):
        redraw = Redraw(1, np.arange(15, 20, dtype=np.uint32), kept)
        assert sorted(strategy.select(candidates, 20, 0, redraw=redraw).rows.tolist()) == [15, 16, 17, 18, 19]


def test_stratified_draws_take_one_row_from_each_share_of_the_total() -> None:
    priorities = np.random.default_rng(1).integers(0, 1000, 777).astype(np.uint32)
    candidates = Candidates(priorities)
    edges = np.concatenate([[0], np.cumsum(priorities, dtype=np.uint64)]).astype(np.float64)
    n = 64
    rows = Prioritized(5, stratified=True).select(candidates, n, step=3).rows
    total = edges[-1]
    for i, row in enumerate(rows.tolist()):
        assert edges[row] < (i + 1) * total / n and edges[row + 1] > i * total / n
    counts = np.bincount(Uniform(5, stratified=True).select(candidates, 777 * 3, 0).rows, minlength=777)
    assert counts.min() >= 1 and counts.max() <= 5, "three draws a row, each strayed by less than one share"


def test_stratified_and_without_replacement_exclude_each_other() -> None:
    for kind in (Uniform, Prioritized):
        with pytest.raises(ArgumentError, match="stratified"):
            kind(0, stratified=True, replacement=False)


# --- in order -----------------------------------------------------------------------------------------------------


def test_top_k_takes_the_heaviest_and_the_older_of_equals(store: gt.Store) -> None:
    rows = TopK().select(candidates_of(store), 20, 0).rows
    assert rows.tolist() == [*range(4, 80, 5), 3, 8, 13, 18]


def test_fifo_chooses_every_row_once_in_order_and_lifo_the_newest(store: gt.Store) -> None:
    with gt.Replay(store, Fifo(), 20, num_batches=4, output="numpy") as replay:
        rows = np.concatenate([batch.keys.row for batch in replay])
        assert rows.tolist() == list(range(80))
        with pytest.raises(NotEnoughRowsError, match="20 rows were asked for, 0"):
            replay.sample()
        store.insert({"x": np.zeros((20, 6), np.int64), "prompt": np.zeros(20, np.int64)})
        assert replay.sample().keys.row.tolist() == list(range(80, 100)), "rows that come later are chosen too"
    assert Lifo().select(candidates_of(store), 3, 0).rows.tolist() == [99, 98, 97]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_resumed_fifo_goes_on_behind_the_last_row_that_was_delivered(store: gt.Store, prefetch: int) -> None:
    with gt.Replay(store, Fifo(), 10, prefetch=prefetch, output="numpy") as replay:
        seen = [replay.sample().keys.row.tolist() for _ in range(2)]
        state = replay.state_dict()
        seen += [replay.sample().keys.row.tolist() for _ in range(2)]
    with gt.Replay(store, Fifo(), 10, prefetch=prefetch, output="numpy") as resumed:
        resumed.load_state_dict(state)
        assert [resumed.sample().keys.row.tolist() for _ in range(2)] == seen[2:]


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda limits: Uniform(1, limits=limits),
        lambda limits: Prioritized(1, limits=limits),
        lambda limits: Uniform(1, replacement=False, limits=limits),
        lambda limits: Prioritized(1, replacement=False, limits=limits),
        lambda limits: Prioritized(1, stratified=True, limits=limits),
        lambda limits: TopK(limits=limits),
        lambda limits: Fifo(limits=limits),
        lambda limits: Lifo(limits=limits),
        lambda limits: GroupSampling("prompt", 1, limits=limits),
    ],
)
def test_limits_hold_for_every_strategy(store: gt.Store, make: Any) -> None:
    rows = make(Limits(min_version=6, min_length=3)).select(candidates_of(store), 4, 0).rows
    assert all(row // 10 >= 6 and 1 + row % 6 >= 3 for row in rows.tolist())
    with pytest.raises((EmptyStoreError, NotEnoughRowsError)):
        make(Limits(min_version=8)).select(candidates_of(store), 4, 0)


def test_limits_that_let_one_row_in_eighty_through_still_draw_in_proportion(store: gt.Store) -> None:
    store.update_priorities(store.keys()[78:], [1.0, 3.0])
    rows = Prioritized(2, limits=Limits(min_version=7, min_length=1)).select(candidates_of(store), 10, 0).rows
    assert rows.min() >= 70
    strict = Prioritized(2, limits=Limits(min_version=lambda: 7, min_length=6))  # row 71 and 77
    counts = np.bincount(strict.select(candidates_of(store), 30_000, 1).rows, minlength=100)
    assert set(np.flatnonzero(counts)) == {71, 77}
    priority = {71: 1 + 71 % 5, 77: 1 + 77 % 5}
    assert abs(counts[71] / 30_000 - priority[71] / (priority[71] + priority[77])) < 0.015


def test_an_age_limit_leaves_out_what_is_older(store: gt.Store) -> None:
    assert len(Uniform(limits=Limits(max_age_s=3600)).select(candidates_of(store), 5, 0).rows) == 5
    with pytest.raises(EmptyStoreError, match="limits"):
        Uniform(limits=Limits(max_age_s=1e-9)).select(candidates_of(store), 5, 0)
    with pytest.raises(ArgumentError, match="max_age_s"):
        Limits(max_age_s=0)
    with pytest.raises(ArgumentError, match="bare arrays"):
        Uniform(limits=Limits(min_length=2)).select(Candidates(np.ones(3, np.uint32)), 2, 0)


# --- groups ---------------------------------------------------------------------------------------------------------


def test_groups_come_whole_side_by_side_and_none_twice(store: gt.Store) -> None:
    store.delete(store.keys()[[5, 42]])  # prompts 1 and 10 are no longer whole
    with gt.Replay(store, GroupSampling("prompt", 4, seed=2), 40, num_batches=30, output="numpy") as replay:
        seen = set()
        for batch in replay:
            prompts = batch["prompt"].reshape(10, 4)
            assert (prompts == prompts[:, :1]).all() and len(set(prompts[:, 0])) == 10
            assert (np.diff(batch.keys.row.reshape(10, 4).astype(int), axis=1) > 0).all(), "the oldest first"
            seen |= set(prompts[:, 0].tolist())
    assert seen == set(range(20)) - {1, 10}
    with pytest.raises(NotEnoughRowsError, match="19 groups of 4 were asked for, 18 of 20"):
        GroupSampling("prompt", 4).select(candidates_of(store), 76, 0)


def test_prioritized_groups_come_in_proportion_to_the_sum_of_their_rows() -> None:
    priorities = np.array([1, 1, 3, 3, 6, 6], np.uint32)
    candidates = Candidates(priorities, {"g": np.array([0, 0, 1, 1, 2, 2])})
    counts = np.zeros(3)
    for step in range(6000):
        counts[GroupSampling("g", 2, seed=1, prioritized=True).select(candidates, 2, step).rows[0] // 2] += 1
    assert stats.chisquare(counts, 6000 * np.array([1, 3, 6]) / 10).pvalue > 1e-4


def test_groups_refuse_what_makes_no_groups(store: gt.Store) -> None:
    with pytest.raises(ArgumentError, match="batch of 10 rows is not a multiple of groups of 4"):
        GroupSampling("prompt", 4).select(candidates_of(store), 10, 0)
    with pytest.raises(ArgumentError, match="one whole number a row"):
        GroupSampling("x", 4).select(candidates_of(store), 8, 0)
    with pytest.raises(FieldError, match="nope"):
        GroupSampling("nope", 4).select(candidates_of(store), 8, 0)
    with pytest.raises(FieldError, match="they have none"):
        GroupSampling("g", 2).select(Candidates(np.ones(4, np.uint32)), 4, 0)


class LosesRows:
    """Overwrites some of the rows that another strategy chose, once, before they can be copied."""

    def __init__(self, store: gt.Store, inner: Any, positions: list[int]) -> None:
        self.store, self.inner, self.positions = store, inner, positions
        self.seed = seed_of(inner)
        self.traits = Traits(atom=traits_of(inner).atom)
        self.asked: list[Redraw] = []

    def select(self, candidates: Any, n: int, step: int, *, state: Any = None, redraw: Any = None) -> Any:
        drawn = self.inner.select(candidates, n, step, state=state, redraw=redraw)
        if redraw is None:
            keys = gt.Keys(drawn.rows, drawn.generations)
            self.store.delete(keys[self.positions])
        else:
            self.asked.append(redraw)
        return drawn


@pytest.mark.parametrize(
    "inner",
    [
        Uniform(4),
        Prioritized(4),
        Uniform(4, replacement=False),
        Prioritized(4, replacement=False),
        TopK(),
        Fifo(),
        Lifo(),
    ],
)
def test_rows_lost_before_they_were_copied_are_replaced_by_others_of_the_same_kind(store: gt.Store, inner: Any) -> None:
    losing = LosesRows(store, inner, [1, 7])
    with gt.Replay(store, losing, 16, prefetch=0, output="numpy") as replay:
        batch = replay.sample()
    assert losing.asked[0].attempt == 1 and {1, 7} <= set(losing.asked[0].numbers.tolist())
    assert (batch["x"][:, 0] == batch.keys.row).all(), "row i holds i: none of the lost ones is in the batch"
    assert store.status(batch.keys)["generation"].tolist() == batch.keys.generation.tolist()
    if isinstance(inner, (TopK, Fifo, Lifo)) or not inner.replacement:
        assert len(set(batch.keys.row.tolist())) == 16


def test_a_group_that_lost_a_row_is_replaced_as_a_whole(store: gt.Store) -> None:
    losing = LosesRows(store, GroupSampling("prompt", 4, seed=1), [5])
    with gt.Replay(store, losing, 16, prefetch=0, output="numpy") as replay:
        batch = replay.sample()
    assert losing.asked[0].numbers.tolist() == [4, 5, 6, 7]
    prompts = batch["prompt"].reshape(4, 4)
    assert (prompts == prompts[:, :1]).all() and len(set(prompts[:, 0].tolist())) == 4


# --- priorities -----------------------------------------------------------------------------------------------------


def test_priorities_are_stored_to_the_power_of_the_exponent(store: gt.Store) -> None:
    with gt.Replay(store, Prioritized(0, alpha=0.5), 8, prefetch=0, output="numpy") as replay:
        batch = replay.sample()
        assert replay.update_priorities(batch.keys, np.full(8, -9.0)) == 0
        assert store.status(batch.keys)["priority"] == pytest.approx(np.full(8, 3.0), abs=2**-16)
        with pytest.raises(ArgumentError, match="nan"):
            replay.update_priorities(batch.keys, np.full(8, np.nan))
        with pytest.raises(ArgumentError, match="shape"):
            replay.update_priorities(batch.keys, np.ones(3))
    with pytest.raises(ArgumentError, match="alpha"):
        gt.Replay(store, Prioritized(0, alpha=lambda step: -1.0), 8, output="numpy")


def test_all_priorities_follow_an_exponent_that_changes(store: gt.Store) -> None:
    keys = store.keys()
    priorities = np.random.default_rng(0).uniform(0.5, 200, 80)
    with gt.Replay(store, Prioritized(0, alpha=Linear(0.4, 0.8, steps=50)), 8, prefetch=0, output="numpy") as replay:
        replay.update_priorities(keys, priorities)
        assert store.status()["priority"] == pytest.approx(priorities**0.4, rel=1e-3)
        for _ in range(60):
            batch = replay.sample()
            replay.update_priorities(batch.keys[:1], [priorities[batch.keys.row[0]]])
        assert store.status()["priority"] == pytest.approx(priorities**0.8, rel=0.05)
        assert store.audit() == []
        state = replay.state_dict()
    assert state["exponents"] == [pytest.approx(0.8, rel=0.01)]


@pytest.mark.parametrize("remover", ["fifo", "lowest_priority"])
def test_raising_all_priorities_keeps_sums_order_and_zeros(store_name: Any, remover: Any) -> None:
    with gt.Store.create(
        store_name(), {"x": gt.Field((), "int64", per_row=True)}, capacity=500, remover=remover
    ) as store:
        priorities = np.random.default_rng(0).uniform(0, 100, 400)
        priorities[::7] = 0
        store.insert({"x": np.arange(400)}, priorities=priorities)
        store.raise_priorities(0.3)
        found = store.status()["priority"]
        assert found == pytest.approx(priorities**0.3 * (priorities > 0), abs=1e-3)
        assert store.audit() == []
        for power in (0, -1, np.inf, np.nan):
            with pytest.raises(ArgumentError):
                store.raise_priorities(power)


def test_importance_weights_undo_the_bias_of_weighted_draws() -> None:
    priorities = np.random.default_rng(3).integers(1, 1000, 500).astype(np.uint32)
    strategy = Prioritized(1, beta=1.0)
    drawn = strategy.select(Candidates(priorities), 400_000, 0)
    of_draw = strategy.importance_weights(drawn, 500, 0)
    assert of_draw is not None and of_draw.max() == 1
    value = np.random.default_rng(4).normal(size=500)
    corrected = (of_draw * value[drawn.rows]).sum() / of_draw.sum()
    assert corrected == pytest.approx(value.mean(), abs=0.02)
    assert (importance_weights(drawn.probability, 500, 0.0) == 1).all()
    with pytest.raises(ArgumentError, match="beta"):
        importance_weights(drawn.probability, 500, -0.1)


def test_a_batch_carries_importance_weights_when_the_strategy_makes_them(store: gt.Store) -> None:
    with gt.Replay(store, Prioritized(0, beta=Linear(0.0, 1.0, steps=1)), 8, prefetch=0, output="numpy") as replay:
        assert (replay.sample().importance_weights == 1).all()
        batch = replay.sample()
        assert (
            batch.importance_weights.shape == (8,)
            and float(batch.importance_weights.max()) == 1
            and "importance_weights" in batch.as_dict()
        )
    with gt.Replay(store, Uniform(), 8, prefetch=0, output="numpy") as replay:
        assert replay.sample().importance_weights is None


# --- mixtures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_mixture_draws_its_quotas_and_updates_the_right_stores(
    store: gt.Store, store_name: Any, prefetch: int
) -> None:
    with gt.Store.create(store_name(), FIELDS, max_length=6, capacity=50) as online:
        online.insert({"x": np.full((40, 6), 1000), "prompt": np.zeros(40, np.int64)})
        mixture = Mixture([3, 1], [Uniform(0), Prioritized(1)])
        with gt.Replay(
            [store, online], mixture, 32, window=3, num_batches=5, prefetch=prefetch, output="numpy"
        ) as replay:
            for batch in replay:
                assert batch.keys.shard is not None
                assert batch.keys.shard.tolist() == [0] * 24 + [1] * 8
                assert ((batch["x"][:, -1] == 1000) == (batch.keys.shard == 1)).all()
                assert batch["x"].shape == (32, 3) and batch.mask.shape == (32, 3)
            assert replay.update_priorities(batch.keys, np.arange(32)) == 0
        assert online.status(batch.keys[24:])["priority"].max() == 31


def test_the_quotas_of_a_mixture_add_up_and_are_right_on_average() -> None:
    shares = np.array([0.1, 0.25, 0.65])
    mixture = Mixture(shares.tolist(), [Uniform()] * 3, seed=9)
    quotas = np.array([mixture.quotas(7, step) for step in range(5000)])
    assert (quotas.sum(1) == 7).all() and (abs(quotas - 7 * shares) < 1).all()
    assert quotas.mean(0) == pytest.approx(7 * shares, abs=0.03)
    assert Mixture([1.0, 0.0], [Uniform()] * 2).quotas(5, 0) == [5, 0]


def test_mixtures_that_cannot_be_are_refused(store: gt.Store, store_name: Any) -> None:
    with pytest.raises(ArgumentError, match="strategy for each share"):
        Mixture([1.0], [])
    with pytest.raises(ArgumentError, match="not all 0"):
        Mixture([0.0, 0.0], [Uniform(), Uniform()])
    with pytest.raises(ArgumentError, match="needs as many stores"):
        gt.Replay(store, Mixture([1.0, 1.0], [Uniform(), Uniform()]), 4, output="numpy")
    with pytest.raises(ArgumentError, match="need a Mixture"):
        gt.Replay([store, store], Uniform(), 4, output="numpy")
    with gt.Store.create(
        store_name(),
        {"x": gt.Field((), "int32"), "prompt": gt.Field((), "int64", per_row=True)},
        max_length=6,
        capacity=5,
    ) as other:
        with pytest.raises(ArgumentError, match="must be the same in all stores"):
            gt.Replay([store, other], Mixture([1, 1], [Uniform(), Uniform()]), 4, output="numpy")


# --- the same everywhere --------------------------------------------------------------------------------------------

ALL = [
    Uniform(7),
    Prioritized(7),
    Uniform(7, stratified=True),
    Prioritized(7, stratified=True),
    Uniform(7, replacement=False),
    Prioritized(7, replacement=False),
    TopK(),
    Lifo(),
    Fifo(),
    GroupSampling("prompt", 4, seed=7),
    GroupSampling("prompt", 4, seed=7, prioritized=True),
]


@pytest.mark.parametrize("strategy", ALL, ids=lambda s: repr(s)[:40])
def test_a_restored_store_and_a_resumed_replay_choose_what_the_uninterrupted_run_would_have(
    store: gt.Store, store_name: Any, tmp_path: Any, strategy: Any
) -> None:
    with gt.Replay(store, strategy, 16, window=2, output="numpy") as replay:
        replay.sample()
        state = replay.state_dict()
        store.save(tmp_path / "ckpt")
        expected = [replay.sample() for _ in range(3)]
        with (
            gt.Store.load(tmp_path / "ckpt", store_name()) as restored,
            gt.Replay(restored, strategy, 16, window=2, output="numpy") as resumed,
        ):
            resumed.load_state_dict(state)
            for batch in expected:
                found = resumed.sample()
                assert found.keys == batch.keys and bool((found["x"] == batch["x"]).all())
