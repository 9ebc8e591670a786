"""Strategies that a user defines, by their traits alone: the same batches on one host, on a device, over ranks and in a
mixture, equal to NumPy to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from replay_calls import replay_of
from selection_reference import OLDEST, ReferenceCandidates

import geartrain as gt
from geartrain.errors import ArgumentError
from geartrain.replay.device import DeviceOptions
from geartrain.selection import Candidates, DeclaredStrategy, Draw, Mixture, Traits, Uniform
from geartrain.tools.testing import ThreadRankGroup, run_ranks

N, B, BATCHES = 60, 12, 4
FIELDS = {"x": gt.Field((), "int64")}
PRIORITIES = np.random.default_rng(1).integers(0, 9, N).astype(float)
NONE = np.empty(0, np.uint32)


@dataclass(frozen=True)
class Tempered(DeclaredStrategy):
    """By priority, stratified, with importance weights of its own."""

    seed: int | None = 3
    traits = Traits("random", by_priority=True, stratified=True, importance=True)

    def importance_weights(self, draw: Draw, count: int, step: int) -> NDArray[np.float64]:
        lowest = draw.probability.min() if draw.lowest is None else draw.lowest
        return np.sqrt(lowest / draw.probability) * (count + step)


@dataclass(frozen=True)
class Differing(DeclaredStrategy):
    """By priority, no row twice."""

    seed: int | None = 4
    traits = Traits("random", by_priority=True, replacement=False)


@dataclass(frozen=True)
class Eldest(DeclaredStrategy):
    """The oldest rows, whatever was chosen before."""

    seed: int | None = 5
    traits = Traits("oldest", importance=True)

    def importance_weights(self, draw: Draw, count: int, step: int) -> NDArray[np.float64]:
        return draw.probability / (1 + count * step)


STRATEGIES = [Tempered(), Differing(), Eldest()]
Expected = tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64] | None]


def by_numpy(strategy: Any, words: NDArray[np.uint32], n: int, step: int) -> Expected:
    """Rows, probabilities and importance weights of a step."""
    reference, numbers = ReferenceCandidates(words), np.arange(n, dtype=np.uint32)
    if isinstance(strategy, Tempered):
        rows, _, probability, _ = reference.draw(True, strategy.seed, step, 0, numbers, n)
        return rows, probability, np.sqrt(probability.min() / probability) * (reference.count() + step)
    if isinstance(strategy, Differing):
        rows, _, probability, _ = reference.draw_distinct(True, strategy.seed, step, 0, n, NONE)
        return rows, probability, None
    rows, _, probability, _ = reference.first(OLDEST, n, 0, NONE)
    return rows, probability, probability / (1 + reference.count() * step)


def as_numpy(value: Any) -> Any:
    return None if value is None else np.asarray(value)


def check(batch: gt.Batch, expected: Expected) -> None:
    rows, probability, weights = expected
    np.testing.assert_array_equal(as_numpy(batch["x"])[:, 0], rows)
    np.testing.assert_array_equal(as_numpy(batch.probability), probability)
    assert (batch.importance_weights is None) == (weights is None)
    if weights is not None:
        np.testing.assert_array_equal(as_numpy(batch.importance_weights), weights)


MakeStore = Callable[[int, int], gt.Store]


@pytest.fixture
def make_store(store_name: Callable[[], str]) -> Iterator[MakeStore]:
    """A shard of the population: rows first to last, row i holds i."""
    made: list[gt.Store] = []

    def make(first: int = 0, last: int = N) -> gt.Store:
        store = gt.Store.create(store_name(), FIELDS, max_length=1, capacity=N)
        made.append(store)
        store.native.advance_sequence(first + 1)
        store.insert({"x": np.arange(first, last)[:, None]}, priorities=PRIORITIES[first:last])
        return store

    yield make
    for store in made:
        store.close()


def words_of(store: gt.Store) -> NDArray[np.uint32]:
    """The priorities of all rows as the store keeps them."""
    candidates = Candidates.of_store(store.native, store.column)
    return candidates.native.priorities(np.arange(len(store), dtype=np.uint32))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_on_one_host(make_store: MakeStore, strategy: Any) -> None:
    store = make_store(0, N)
    words = words_of(store)
    with gt.Replay(store, strategy, B, num_batches=BATCHES, output="numpy") as replay:
        for step, batch in enumerate(replay):
            check(batch, by_numpy(strategy, words, B, step))


@pytest.mark.parametrize("path", ["gather", "staged"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_on_a_device(make_store: MakeStore, strategy: Any, path: Any) -> None:
    pytest.importorskip("triton")
    from geartrain.tools.testing import SimulatedDevice

    store, device = make_store(0, N), SimulatedDevice(1)
    words = words_of(store)
    options = DeviceOptions(device, path=path)
    with gt.Replay(store, strategy, B, num_batches=BATCHES, device=options) as replay:
        for step, batch in enumerate(replay):
            device.finish()
            check(batch, by_numpy(strategy, words, B, step))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_on_three_ranks(make_store: MakeStore, strategy: Any) -> None:
    words = words_of(make_store(0, N))
    shards = [make_store(first, last) for first, last in ((0, 25), (25, 40), (40, N))]
    third = B // 3

    def body(rank: ThreadRankGroup) -> None:
        with replay_of(
            shards[rank.rank], strategy, B, num_batches=BATCHES, output="numpy", group=rank, assignment="ordered"
        ) as replay:
            for step, batch in enumerate(replay):
                rows, probability, weights = by_numpy(strategy, words, B, step)
                mine = slice(rank.rank * third, (rank.rank + 1) * third)
                check(batch, (rows[mine], probability[mine], None if weights is None else weights[mine]))

    run_ranks(3, body)


def test_in_a_mixture(make_store: MakeStore) -> None:
    stores = [make_store(0, N), make_store(0, N)]
    words = words_of(stores[0])
    mixture = Mixture([0.6, 0.4], [Differing(), Tempered()], seed=7)
    with gt.Replay(stores, mixture, B, num_batches=BATCHES, output="numpy") as replay:
        for step, batch in enumerate(replay):
            parts = [
                by_numpy(strategy, words, quota, step)
                for strategy, quota in zip(mixture.strategies, mixture.quotas(B, step), strict=True)
            ]
            # A strategy without importance weights has ones beside one that has some.
            weights = np.concatenate([np.ones(len(part[0])) if part[2] is None else part[2] for part in parts])
            rows, probability = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
            check(batch, (rows, probability, weights))


class Filled:
    """A strategy of the protocol alone, whose draws come with importance weights."""

    seed = 1

    def select(self, candidates: Any, n: int, step: int, *, state: Any = None, redraw: Any = None) -> Draw:
        draw = Uniform(seed=1).select(candidates, n, step, redraw=redraw)
        return Draw(draw.rows, draw.generations, draw.probability, draw.rows / 2.0)


@pytest.mark.parametrize("path", [None, "gather", "staged"])
def test_what_select_fills_in_is_delivered(make_store: MakeStore, path: Any) -> None:
    options: dict[str, Any] = {"output": "numpy"}
    if path is not None:
        pytest.importorskip("triton")
        from geartrain.tools.testing import SimulatedDevice

        options = {"device": DeviceOptions(SimulatedDevice(0), path=path)}
    with replay_of(make_store(0, N), Filled(), B, num_batches=2, **options) as replay:
        for batch in replay:
            if path is not None:
                options["device"].device.finish()
            np.testing.assert_array_equal(as_numpy(batch.importance_weights), batch.keys.row / 2.0)


def test_importance_weights_of_another_shape_are_refused(make_store: MakeStore) -> None:
    class Short(Filled):
        def importance_weights(self, draw: Draw, count: int, step: int) -> Any:
            return draw.probability[:1]

    with gt.Replay(make_store(0, N), Short(), B, prefetch=0) as replay:
        with pytest.raises(ArgumentError, match=r"importance weights of Short have shape \(1,\), the draw \(12,\)"):
            replay.sample()


def test_a_strategy_without_a_form_cannot_draw_over_ranks(make_store: MakeStore) -> None:
    store = make_store(0, N)

    def body(rank: ThreadRankGroup) -> None:
        with pytest.raises(ArgumentError, match="declare a form in its traits"):
            gt.Replay(store, Filled(), B, group=rank)

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("traits", "message"),
    [
        ({"form": "best"}, "form is one of .*, found 'best'"),
        ({"form": "random", "stratified": True, "replacement": False}, "stratified draws are with replacement"),
        ({"form": "newest", "cursor": True}, "a cursor goes from the oldest row on"),
        ({"atom": 0}, "atom must be at least 1"),
    ],
)
def test_traits_that_do_not_go_together_are_refused(traits: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Traits(**traits)


# --- seeds -----------------------------------------------------------------------------------------------------


def draws(store: Any, selection: Any, **options: Any) -> list[list[int]]:
    with replay_of(store, selection, B, num_batches=3, output="numpy", **options) as replay:
        return [batch["x"][:, 0].tolist() for batch in replay]


def test_a_strategy_without_a_seed_has_the_replays(make_store: MakeStore) -> None:
    store = make_store(0, N)
    assert draws(store, Uniform(), seed=9) == draws(store, Uniform(seed=9))
    assert draws(store, Uniform()) == draws(store, Uniform(seed=0))
    assert draws(store, Uniform(seed=2), seed=9) == draws(store, Uniform(seed=2))


def test_stores_of_a_mixture_draw_by_seeds_of_their_own(make_store: MakeStore) -> None:
    stores = [make_store(0, N), make_store(0, N)]
    batches = draws(stores, Mixture([0.5, 0.5], [Uniform(), Uniform()]))
    assert all(batch[: B // 2] != batch[B // 2 :] for batch in batches)
    assert batches == draws(stores, Mixture([0.5, 0.5], [Uniform(), Uniform()]), seed=0)
    assert batches != draws(stores, Mixture([0.5, 0.5], [Uniform(), Uniform()]), seed=1)


def test_a_strategy_that_cannot_be_given_a_seed_is_refused(make_store: MakeStore) -> None:
    class Seedless(Filled):
        seed = None  # type: ignore[assignment]

    with pytest.raises(ArgumentError, match="Seedless has no seed"):
        gt.Replay(make_store(0, N), Seedless(), B)
