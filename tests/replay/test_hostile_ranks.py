"""Native readers of global batches, and rounds of ranks, that are given what no replay gives them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from deadlines import patience

import geartrain as gt
import geartrain._native as _native
from geartrain.errors import SchemaError, StoreClosedError
from geartrain.replay.distributed.assignment import Assigner, Replica
from geartrain.replay.distributed.messages import ROW_HEADER

ROWS, N = 16, 4
FIELDS = {"x": gt.Field((3,), "float32")}
BY_TOTALS = (True, True, False, None, False, False)
PLAN = (BY_TOTALS, 1, 1, False)
# Of two ranks on two hosts, this one and another.
REPLICAS = [Replica((0,), (frozenset({0}),)), Replica((1,), (frozenset({1}),))]


@pytest.fixture
def stores() -> Iterator[Callable[..., gt.Store]]:
    made: list[gt.Store] = []

    def make(width: int = 3, **options: Any) -> gt.Store:
        store = gt.Store.create({"x": gt.Field((width,), "float32")}, max_length=4, capacity=ROWS, **options)
        store.insert({"x": np.zeros((ROWS, 4, width), np.float32)}, priorities=np.ones(ROWS))
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()


def reader(
    store: gt.Store,
    consumers: Any = ((0, 0, [0]), (1, 1, [0])),
    plan: Any = PLAN,
    counts: bool = False,
    window: int = 0,
    replica: int | None = 0,
) -> _native.RankReader:
    shards = [(store.native, 0, [0], counts, 0, 1, [7]), (None, 0, [], False, 0, 1, [1])]
    assigner = Assigner(REPLICAS, [[0], [1]], {0: set(), 1: set()})
    return _native.RankReader(
        0, list(consumers), [plan], shards, assigner.native, window, True, 1, False, None, None, replica
    )


def batch(store: gt.Store, n: int = N, window: int = 0) -> _native.SampledBatch:
    return _native.SampledBatch(store.native, n, [0], window, True, None)


def drawn(n: int, shard: int = 0) -> Any:
    """Draws of which each of the two ranks gets as many."""
    rows, ones = np.arange(n, dtype=np.uint32), np.ones(n)
    return np.full(n, shard, np.int64), rows, ones.astype(np.uint32), ones, None, None, 1.0, 0


def rounds(*stores: gt.Store, all_to_all: Any = lambda parts: parts) -> tuple[_native.RankSteps, _native.RankExchange]:
    """Of a group of one rank."""
    steps = _native.RankSteps(0, 1, 7, [(each.native, True, True, [0], 1, 0) for each in stores], False)
    exchange = _native.RankExchange(None, 1.0, False, False, [[0] for _ in stores], all_to_all, lambda mine: mine)
    return steps, exchange


def one_update() -> Any:
    zeros = np.zeros(1, np.uint32)
    return [(zeros, zeros, None, np.zeros(1, np.int64), None, np.ones(1))]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"plan": (BY_TOTALS, 1, 0, False)}, "an atom has one row"),
        ({"consumers": [(0, 0, []), (0, 0, [0]), (1, 1, [0])]}, "rank 0 gets the rows of one replica"),
        ({"replica": 1}, "another replica"),
        ({"replica": None}, "another replica"),
    ],
)
def test_readers_that_cannot_be_are_refused(stores: Callable[..., gt.Store], options: Any, why: str) -> None:
    with pytest.raises(SchemaError, match=why):
        reader(stores(), **options)


def test_transitions_are_handed_out_in_their_order(stores: Callable[..., gt.Store]) -> None:
    """What is copied of them knows no other."""
    fields = {"o": gt.Field((3,), "float32"), "r": gt.Field((), "float32"), "terminated": gt.Field((), "bool")}
    view = _native.TransitionView(1, 1, [1.0, 0.5], [1, 2, 3])
    assigner = Assigner(REPLICAS[:1], [[0]], {0: set()})
    with gt.Store.create(fields, max_length=4, capacity=4) as store:
        shard = (store.native, 0, [0, 1, 2], False, 0, 1, [0])

        def make(arrays: list[int]) -> _native.RankReader:
            consumers = [(0, 0, arrays)]
            return _native.RankReader(0, consumers, [PLAN], [shard], assigner.native, 0, True, 1, False, None, view, 0)

        assert make([0, 1, 2, 3, 4, 5]).row_bytes(0) == 2 * 12 + 4 + 4 + 2
        for arrays in ([5, 4, 3, 2, 1, 0], [5, 5, 5, 5, 5, 5], [0, 1, 2]):
            with pytest.raises(SchemaError, match="as a whole"):
                make(arrays)


def test_samples_are_counted_for_others_of_draws_by_totals_only(stores: Callable[..., gt.Store]) -> None:
    store = stores()
    with pytest.raises(SchemaError, match="by totals only"):
        reader(store, counts=True).read_drawn(batch(store), [], True, [drawn(2 * N)], 0, None, None, None)


def test_steps_are_not_drawn_by_the_totals_of_rows(stores: Callable[..., gt.Store]) -> None:
    store = stores(priority_per="step")
    steps, _ = rounds(store)
    (heard, _) = steps.hear(0, steps.begin(0, []))
    assigner = Assigner(REPLICAS[:1], [[0]], {0: set()})
    shard = (store.native, 0, [0], False, 0, 1, [0])
    made = _native.RankReader(0, [(0, 0, [0])], [PLAN], [shard], assigner.native, 2, True, 1, False, None, None, 0)
    with pytest.raises(SchemaError, match="steps are not drawn"):
        made.read(batch(store, window=2), heard, 0, [N], None)


def test_rows_of_messages_have_places_in_the_batch_that_they_were_read_for(stores: Callable[..., gt.Store]) -> None:
    small, large = stores(), stores(width=300_000)
    read = reader(small).read_drawn(batch(small), [], True, [drawn(2 * N, shard=1)], 0, None, None, None)
    assert [len(message) for _, message in read.receives] == [N * (4 * 12 + ROW_HEADER.itemsize)]
    with pytest.raises(SchemaError, match="another reader"):
        reader(large).place(batch(large), read)


def test_headers_begin_where_numbers_do(stores: Callable[..., gt.Store]) -> None:
    store = stores()
    memory, x = np.zeros(N * ROW_HEADER.itemsize + 8, np.uint8), np.zeros((N, 4, 3), np.float32)
    message = np.zeros(N * ROW_HEADER.itemsize, np.uint8)
    made, draws = reader(store), [drawn(2 * N)]
    for at in (1, 4):
        own = (0, [x], memory[at : at + N * ROW_HEADER.itemsize], None)
        with pytest.raises(SchemaError, match="a multiple of 8"):
            made.read_drawn(own, [(1, [x.copy()], message, None)], False, draws, 0, None, None, None)
    own = (0, [x], memory[8:], None)
    assert made.read_drawn(own, [(1, [x.copy()], message, None)], False, draws, 0, None, None, None).failed is None


@pytest.mark.parametrize("told", [1, 3, 500])
def test_a_rank_tells_as_much_as_there_are_stores(stores: Callable[..., gt.Store], told: int) -> None:
    steps, exchange = rounds(stores(), stores())
    offer = (0, None, np.zeros(8, np.uint8), 8)
    with pytest.raises(SchemaError, match=f"{told} offers were given for 2 stores"):
        steps.agree(exchange, 0, [], [offer] * told, None, None)
    assert [each.size for each in steps.agree(exchange, 0, [], [offer] * 2, None, None).offers] == [8, 8]


def test_a_batch_has_a_quota_for_each_store(stores: Callable[..., gt.Store]) -> None:
    store = stores()
    steps, exchange = rounds(store, stores())
    with pytest.raises(SchemaError, match="1 quotas were given for 2 stores"):
        reader(store).build(batch(store), steps, exchange, 0, [2 * N], [], None, None, None)


def test_an_exchange_is_one_call_at_a_time(stores: Callable[..., gt.Store]) -> None:
    entered, leave = threading.Event(), threading.Event()

    def all_to_all(parts: Any) -> Any:
        entered.set()
        assert leave.wait(patience(30))
        return parts

    steps, exchange = rounds(stores(), all_to_all=all_to_all)
    other = threading.Thread(target=lambda: steps.agree(exchange, 0, [], [], None, None))
    other.start()
    assert entered.wait(patience(30))
    with pytest.raises(SchemaError, match="one call at a time"):
        steps.agree(exchange, 0, [], [], None, None)
    leave.set()
    other.join()

    def change(store: int, priorities: Any) -> Any:
        with pytest.raises(SchemaError, match="one call at a time"):
            steps.agree(exchange, 0, [], [], None, None)
        return priorities

    assert steps.agree(exchange, 0, one_update(), [], change, None).changed


class Launched:
    """Copies of N rows that were launched; the end of this waits for another thread to close the store."""

    def __init__(self, close: threading.Thread) -> None:
        self.close = close

    def __del__(self) -> None:
        self.close.start()
        self.close.join(patience(5))


class Copies:
    """A transfer that copies N rows, which are whole; see native/python/python_copier.h."""

    def __init__(self, close: threading.Thread) -> None:
        self.close = close

    def launch(self, *rows: Any) -> Launched:
        return Launched(self.close)

    def resolve(self, launched: Launched) -> Any:
        n = np.zeros(N, np.int32)
        return n.astype(np.uint8), n, n, n, n.astype(np.int64)


def test_a_store_may_be_closed_at_the_end_of_what_copies_rows(stores: Callable[..., gt.Store]) -> None:
    store, closed = stores(), threading.Event()

    def close() -> None:
        store.close()
        closed.set()

    thread = threading.Thread(target=close, daemon=True)
    assigner = Assigner(REPLICAS[:1], [[0]], {0: set()})
    shard = (store.native, 0, [0], False, 0, 1, [0])
    made = _native.RankReader(0, [(0, 0, [0])], [PLAN], [shard], assigner.native, 0, True, 1, False, None, None, 0)
    headers = np.zeros(N * ROW_HEADER.itemsize, np.uint8)
    own = (0, [], headers, Copies(thread))
    with pytest.raises(StoreClosedError):  # and no wait of the two threads for each other
        made.read_drawn(own, [], True, [drawn(N)], 0, None, None, None)
    assert closed.is_set()
