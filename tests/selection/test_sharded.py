"""One population, cut into shards anywhere: every rank knows the batch that one store would have given."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import geartrain as gt
from geartrain.errors import ArgumentError, EmptyStoreError, NotEnoughRowsError, SplitGroupError
from geartrain.selection import (
    Candidates,
    Draw,
    Fifo,
    GroupSampling,
    Lifo,
    Limits,
    Linear,
    Prioritized,
    TopK,
    Uniform,
)
from geartrain.selection.sharded import NO_ROW, Shard, ShardedDraw, check_strategy, select_shards
from geartrain.tools.testing import run_ranks

N = 240
SHARDS = [1, 2, 3, 4, 8]
RNG = np.random.default_rng(5)
WEIGHTS = RNG.integers(0, 40, N) * RNG.integers(0, 2, N) / 4.0
STEEP = np.where(np.arange(N) == 77, 60000.0, 0.01)
GROUPS = np.repeat(np.arange(N // 4) * 7 % 61, 4)


def cuts(shards: int) -> list[int]:
    """Where the population is cut: uneven pieces, one of them empty, groups of four kept whole."""
    inner = np.sort(np.random.default_rng(shards).integers(0, N // 4, shards - 1)) * 4
    if shards > 2:
        inner[1] = inner[0]
    return [0, *inner.tolist(), N]


Shards = list[tuple[gt.Store, int]]  # each with the number of its first row in the population


@pytest.fixture
def cut(store_name: Callable[[], str]) -> Iterator[Callable[..., Shards]]:
    made: list[gt.Store] = []

    def make(shards: int, priorities: np.ndarray = WEIGHTS) -> Shards:
        parts: Shards = []
        for first, last in zip(cuts(shards), cuts(shards)[1:], strict=False):
            store = gt.Store.create(
                store_name(),
                {"number": gt.Field((), "int64", per_row=True), "group": gt.Field((), "int64", per_row=True)},
                capacity=N,
            )
            made.append(store)
            store.native.advance_sequence(first + 1)
            if last > first:
                store.insert(
                    {"number": np.arange(first, last), "group": GROUPS[first:last]},
                    priorities=priorities[first:last],
                    versions=np.arange(first, last) % 10,
                )
            parts.append((store, first))
        return parts

    yield make
    for store in made:
        store.close()


def global_batch(parts: Shards, strategy: object, n: int, step: int, state: dict[str, int] | None) -> tuple:
    """The batch by row numbers in the population, with probabilities, after checking that all ranks agree on it."""

    def body(rank: object) -> ShardedDraw:
        store, _ = parts[rank.rank]

        def gather(mine: np.ndarray) -> np.ndarray:
            every = rank.all_gather(np.ascontiguousarray(mine).reshape(-1).view(np.uint8))
            return every.reshape(-1).view(mine.dtype).reshape(len(parts), *mine.shape)

        candidates = Candidates.of_store(store.native, store.column)
        return select_shards(strategy, Shard(candidates, rank.rank, len(parts), gather), n, step, state)

    chosen = run_ranks(len(parts), body)
    owner = chosen[0].shard
    numbers, probability = np.full(n, -1), np.zeros(n)
    for rank, (mine, (store, _)) in enumerate(zip(chosen, parts, strict=True)):
        assert np.array_equal(mine.shard, owner)
        assert mine.state == chosen[0].state
        own = owner == rank
        assert (mine.rows[~own] == NO_ROW).all() and (mine.rows[own] != NO_ROW).all()
        numbers[own] = store.column("number")[mine.rows[own]]
        probability[own] = mine.probability[own]
        assert np.array_equal(
            store.status(gt.Keys(mine.rows[own], mine.generations[own]))["generation"], mine.generations[own]
        )
    return numbers, probability, chosen[0].state


STRATEGIES = {
    "uniform": Uniform(seed=3),
    "uniform stratified": Uniform(seed=4, stratified=True),
    "uniform distinct": Uniform(seed=5, replacement=False),
    "prioritized": Prioritized(seed=6),
    "prioritized stratified": Prioritized(seed=7, stratified=True),
    "prioritized distinct": Prioritized(seed=8, replacement=False),
    "prioritized by schedule": Prioritized(seed=9, alpha=Linear(0.4, 1.0, 10), beta=0.5),
    "top-k": TopK(),
    "lifo": Lifo(),
    "fifo": Fifo(),
    "groups": GroupSampling(by="group", size=4, seed=10),
    "groups by priority": GroupSampling(by="group", size=4, seed=11, prioritized=True),
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_any_number_of_shards_gives_the_batches_of_one_store(cut: Callable[..., Shards], strategy: object) -> None:
    n = 48
    parts = cut(1)
    (store, _) = parts[0]
    expected, state = [], None
    for step in range(3):
        drawn = strategy.select(Candidates.of_store(store.native, store.column), n, step, state=state)
        state = drawn.state or None
        expected.append((store.column("number")[drawn.rows], drawn.probability))
    for shards in SHARDS:
        parts, state = cut(shards), None
        for step in range(3):
            numbers, probability, state = global_batch(parts, strategy, n, step, state)
            assert np.array_equal(numbers, expected[step][0]), (shards, step)
            assert np.allclose(probability, expected[step][1], rtol=1e-12)


@pytest.mark.parametrize("by_priority", [False, True])
def test_without_replacement_agrees_when_hardly_anything_is_left(cut: Callable[..., Shards], by_priority: bool) -> None:
    # All of the rows, or rows of which one weighs more than all others: the one-by-one rounds.
    strategy = Prioritized(seed=1, replacement=False) if by_priority else Uniform(seed=1, replacement=False)
    n, priorities = (32, STEEP) if by_priority else (N, STEEP)
    ((store, _),) = cut(1, priorities)
    drawn = strategy.select(Candidates.of_store(store.native, store.column), n, 0)
    expected = store.column("number")[drawn.rows]
    assert len(set(expected.tolist())) == n
    for shards in (2, 3):
        numbers, _, _ = global_batch(cut(shards, priorities), strategy, n, 0, None)
        assert np.array_equal(numbers, expected)


@pytest.mark.parametrize("strategy", [Uniform, Prioritized, lambda **k: Prioritized(replacement=False, **k)])
def test_limits_hold_on_every_shard_and_do_not_depend_on_the_cut(
    cut: Callable[..., Shards], strategy: Callable
) -> None:
    limited = strategy(seed=2, limits=Limits(min_version=8))
    batches = []
    for shards in SHARDS:
        numbers, _, _ = global_batch(cut(shards), limited, 12, 5, None)
        assert (numbers % 10 >= 8).all()
        batches.append(numbers.tolist())
    assert all(batch == batches[0] for batch in batches)


def test_fifo_loses_no_row_of_a_shard_that_grows_late(cut: Callable[..., Shards]) -> None:
    parts = cut(2)
    seen: list[int] = []
    state = None
    for step in range(3):
        numbers, _, state = global_batch(parts, Fifo(), 64, step, state)
        seen += numbers.tolist()
    # Sequence numbers of the first shard are far behind by now; its new rows must be found all the same.
    parts[0][0].insert({"number": np.arange(1000, 1016), "group": np.zeros(16, np.int64)})
    numbers, _, state = global_batch(parts, Fifo(), N + 16 - 192, 3, state)
    seen += numbers.tolist()
    assert sorted(seen) == [*range(N), *range(1000, 1016)]
    with pytest.raises(NotEnoughRowsError, match="0 can be chosen"):
        global_batch(parts, Fifo(), 1, 4, state)


def test_what_cannot_be_drawn_is_the_same_error_on_all_ranks(cut: Callable[..., Shards]) -> None:
    nothing = np.zeros(N)
    for shards in (1, 3):
        with pytest.raises(EmptyStoreError, match="no selectable row has a priority above zero"):
            global_batch(cut(shards, nothing), Prioritized(), 4, 0, None)
        with pytest.raises(NotEnoughRowsError, match=f"{N + 1} different rows were asked for, {N} can be drawn"):
            global_batch(cut(shards), Uniform(replacement=False), N + 1, 0, None)
        with pytest.raises(NotEnoughRowsError, match="64 groups of 4 were asked for, 60 of 60 are whole"):
            global_batch(cut(shards), GroupSampling(by="group", size=4), 256, 0, None)
        with pytest.raises(NotEnoughRowsError, match="different rows"):
            global_batch(cut(shards, nothing + (np.arange(N) == 3)), Prioritized(replacement=False), 4, 0, None)


@pytest.mark.parametrize("dtype", ["int64", "uint64", "int16", "bool"])
@pytest.mark.parametrize("prioritized", [False, True])
def test_groups_may_be_dealt_to_shards_in_any_way(store_name: Callable[[], str], dtype: str, prioritized: bool) -> None:
    random = np.random.default_rng(7)
    values = np.array([0, 1] if dtype == "bool" else [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 30, 31])
    if dtype in ("int64", "int16"):
        values = values - 9
    if dtype == "uint64":
        values = values.astype(np.uint64) + np.uint64(2**63 - 5)
    size = 2 if dtype == "bool" else 3
    many = np.array([2 + number % 4 for number in range(len(values))])  # rows of each: some groups are not whole
    group = np.repeat(values, many)
    order = random.permutation(len(group))  # of commits
    strategy = GroupSampling("group", size, seed=4, prioritized=prioritized)
    wanted = size * int((many >= size).sum() + 1) // 2 // size * size

    def stores(count: int) -> Shards:
        home = dict(zip(values.tolist(), random.integers(0, count, len(values)).tolist(), strict=True))
        parts = []
        for number in range(count):
            store = gt.Store.create(
                store_name(),
                {"number": gt.Field((), "int64", per_row=True), "group": gt.Field((), dtype, per_row=True)},
                capacity=64,
            )
            parts.append((store, 0))
            for row in order.tolist():
                if home[group[row].item()] == number:
                    store.insert(
                        {"number": np.array([row]), "group": np.array([group[row]], dtype)}, priorities=[row % 5 / 2]
                    )
        return parts

    expected = None
    for count in (1, 1, 2, 3, 4):
        parts = stores(count)
        try:
            if expected is None:
                (store, _) = parts[0]
                drawn = [strategy.select(Candidates.of_store(store.native, store.column), wanted, s) for s in range(3)]
                expected = [(store.column("number")[each.rows].tolist(), each.probability) for each in drawn]
            for step, (numbers, probability) in enumerate(expected):
                found = global_batch(parts, strategy, wanted, step, None)
                assert found[0].tolist() == numbers, (count, step)
                assert np.allclose(found[1], probability, rtol=1e-12)
        finally:
            for store, _ in parts:
                store.close()


def test_a_group_that_is_whole_only_over_several_shards_is_refused_by_all_ranks_alike(
    cut: Callable[..., Shards],
) -> None:
    parts = cut(3)
    strategy = GroupSampling("group", 4, seed=1)
    before, _, _ = global_batch(parts, strategy, 48, 0, None)
    stray = {"number": np.arange(3), "group": np.full(3, 1000)}
    few = parts[0][0].insert({name: array[:1] for name, array in stray.items()})
    parts[2][0].insert({name: array[1:] for name, array in stray.items()})
    # Three of four rows: no group of one store either.
    assert global_batch(parts, strategy, 48, 0, None)[0].tolist() == before.tolist()
    more = parts[0][0].insert({name: array[:1] for name, array in stray.items()})
    said = []

    def body(rank: object) -> None:
        def gather(mine: np.ndarray) -> np.ndarray:
            every = rank.all_gather(np.ascontiguousarray(mine).reshape(-1).view(np.uint8))
            return every.reshape(-1).view(mine.dtype).reshape(3, *mine.shape)

        store = parts[rank.rank][0]
        candidates = Candidates.of_store(store.native, store.column)
        try:
            select_shards(strategy, Shard(candidates, rank.rank, 3, gather), 48, 0, None)
        except SplitGroupError as error:
            said.append(str(error))

    run_ranks(3, body)
    assert len(said) == 3
    assert set(said) == {
        "the group group=1000 has rows in 2 shards (2 in shard 0, 2 in shard 2), but groups of 4 are drawn as a "
        "whole: keep the rows of a group in one shard"
    }
    parts[0][0].delete(few + more)
    assert global_batch(parts, strategy, 48, 0, None)[0].tolist() == before.tolist()


def test_totals_are_all_that_independent_draws_say(cut: Callable[..., Shards]) -> None:
    parts = cut(4)
    sent: list[int] = []

    def gather_of(rank: object) -> Callable[[np.ndarray], np.ndarray]:
        def gather(mine: np.ndarray) -> np.ndarray:
            sent.append(mine.nbytes)
            every = rank.all_gather(np.ascontiguousarray(mine).reshape(-1).view(np.uint8))
            return every.reshape(-1).view(mine.dtype).reshape(4, *mine.shape)

        return gather

    def body(rank: object) -> None:
        candidates = Candidates.of_store(parts[rank.rank][0].native, parts[rank.rank][0].column)
        select_shards(Prioritized(seed=1), Shard(candidates, rank.rank, 4, gather_of(rank)), 4096, 0, None)

    run_ranks(4, body)
    assert sent == [8] * 4


def test_a_strategy_of_ones_own_takes_part_or_is_refused() -> None:
    class Mine:
        seed = 0

        def select(self, candidates: Candidates, n: int, step: int, *, state=None, redraw=None) -> Draw:  # type: ignore[no-untyped-def]
            raise NotImplementedError

    with pytest.raises(ArgumentError, match="Mine does not say how to choose over several ranks"):
        check_strategy(Mine())
    Mine.select_shards = lambda *_: None  # type: ignore[attr-defined]
    check_strategy(Mine())
