"""Groups that are not whole: attempts keep apart, batches wait for missing rows, and errors name the groups."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from deadlines import patience
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import ArgumentError, FieldError, NotEnoughRowsError, WaitTimeoutError
from geartrain.selection import GroupSampling
from geartrain.tools.testing import ThreadRankGroup, run_ranks

SIZE = 4
FIELDS = {
    "token": gt.Field((2,), "int64"),
    "number": gt.Field((), "int64", per_row=True),
    "prompt": gt.Field((), "int64", per_row=True),
    "attempt": gt.Field((), "uint8", per_row=True),
    "score": gt.Field((), "float32", per_row=True),
    "pair": gt.Field((2,), "int64", per_row=True),
}
# Prompt, attempt, rows: five whole groups, one of them of too many rows; four of too few.
GROUPS = [(7, 0, 4), (7, 1, 3), (8, 0, 2), (-3, 2, 6), (9, 0, 1), (10, 0, 4), (10, 1, 4), (11, 0, 3), (12, 5, 4)]


@pytest.fixture
def make_store(store_name: Callable[[], str]) -> Any:
    with contextlib.ExitStack() as stores:

        def make(**options: Any) -> gt.Store:
            return stores.enter_context(gt.Store.create(store_name(), FIELDS, max_length=5, capacity=64, **options))

        yield make


def insert(store: gt.Store, prompt: int, attempt: int, count: int, first: int = 0) -> Any:
    """Rows of a group, of 3 to 5 steps, in which every value tells its row."""
    numbers = 1000 * (prompt + 4) + 100 * attempt + first + np.arange(count)
    return store.insert(
        {
            "token": np.broadcast_to(numbers[:, None, None] * 10 + np.arange(5)[:, None], (count, 5, 2)),
            "number": numbers,
            "prompt": np.full(count, prompt),
            "attempt": np.full(count, attempt, np.uint8),
            "score": np.ones(count, np.float32),
            "pair": np.ones((count, 2), np.int64),
        },
        lengths=3 + numbers % 3,
        priorities=1 + numbers % 4,
        versions=numbers,
    )


def insert_all(store: gt.Store, groups: Any = GROUPS) -> None:
    for prompt, attempt, count in groups:
        insert(store, prompt, attempt, count)


def groups_in(batch: Any) -> list[tuple[int, int]]:
    """Prompt and attempt of each group of a batch, after a check of every value."""
    tokens = (batch["number"][:, None] * 10 + batch.start[:, None] + np.cumsum(batch.mask, 1) - 1) * batch.mask
    assert np.array_equal(batch["token"], np.repeat(tokens[:, :, None], 2, 2))
    assert np.array_equal(batch.version, batch["number"])
    found = []
    for first in range(0, len(batch), SIZE):
        here = slice(first, first + SIZE)
        keys = set(zip(batch["prompt"][here].tolist(), batch["attempt"][here].tolist(), strict=True))
        assert len(keys) == 1 and (np.diff(batch["number"][here]) == 1).all(), "one group, the oldest first"
        found.append(keys.pop())
    return found


def batches_of(store: gt.Store, selection: Any, batch_size: int, count: int = 1, **options: Any) -> list[Any]:
    settings = {"output": "numpy", "prefetch": 0, **options}
    with replay_of(store, selection, batch_size, **settings) as replay:
        return [replay.sample() for _ in range(count)]


def test_attempts_at_a_prompt_are_groups_of_their_own(make_store: Any) -> None:
    store = make_store()
    insert(store, 7, 0, 3)
    insert(store, 7, 1, 4)
    insert(store, 8, 1, 4)
    (batch,) = batches_of(store, GroupSampling("prompt", SIZE, attempt="attempt"), 8)
    assert sorted(groups_in(batch)) == [(7, 1), (8, 1)]
    with pytest.raises(NotEnoughRowsError, match=r"3 groups of 4 were asked for, 2 of 3 are whole; 1 is incomplete"):
        batches_of(store, GroupSampling("prompt", SIZE, attempt="attempt"), 12)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attempt": 3}, "attempt must be text that is not empty, found 3"),
        ({"attempt": "prompt"}, "`by` and `attempt` are different fields, found 'prompt' for both"),
        ({"size": 0}, "size must be at least 1, found 0"),
    ],
)
def test_wrong_settings_are_refused_when_the_strategy_is_made(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        GroupSampling(**{"by": "prompt", "size": SIZE, **given})


@pytest.mark.parametrize(
    ("selection", "options", "kind", "message"),
    [
        (GroupSampling("promt", SIZE), {}, FieldError, "no field 'promt'.*did you mean 'prompt'"),
        (GroupSampling("prompt", SIZE, attempt="atempt"), {}, FieldError, "no field 'atempt'"),
        (GroupSampling("score", SIZE), {}, ArgumentError, "a per_row field of one .* 'score' of .* is float32"),
        (GroupSampling("pair", SIZE), {}, ArgumentError, r"'pair' of the store .* is int64 \(2,\)"),
        (GroupSampling("token", SIZE), {}, ArgumentError, "'token' of .* has a value for each step"),
        (GroupSampling("prompt", SIZE, attempt="score"), {}, ArgumentError, "'score' of the store .* is float32"),
        (GroupSampling("prompt", 3), {}, ArgumentError, "batch of 8 rows is not a multiple of groups of 3"),
    ],
)  # fmt: skip
def test_what_a_store_cannot_group_by_is_refused_when_the_replay_is_made(
    make_store: Any, selection: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        replay_of(make_store(), selection, 8, **options)


# --- waits ------------------------------------------------------------------------------------------------------


def test_errors_name_a_few_incomplete_groups(make_store: Any) -> None:
    store = make_store()
    insert_all(store, [(each, each % 2, 1 + each % 3) for each in range(9)])
    named = "9 are incomplete: prompt=0, attempt=0 (1 of 4 rows), prompt=1, attempt=1 (2 of 4 rows), prompt=2"
    with pytest.raises(NotEnoughRowsError) as raised:
        batches_of(store, GroupSampling("prompt", SIZE, attempt="attempt"), 4)
    assert named in str(raised.value) and str(raised.value).endswith("and 4 more")
    with pytest.raises(NotEnoughRowsError, match="9 are incomplete: prompt=0 "):
        batches_of(store, GroupSampling("prompt", SIZE), 4, min_rows=40)


def test_a_wait_that_times_out_names_incomplete_groups(make_store: Any) -> None:
    store, selection = make_store(), GroupSampling("prompt", SIZE)
    insert_all(store, [(5, 0, 3), (6, 0, 1)])
    named = r"2 are incomplete: prompt=5 \(3 of 4 rows\), prompt=6 \(1 of 4 rows\)"
    with store.expect_writers():
        with pytest.raises(WaitTimeoutError, match=f"too few rows within 0.05 s.*{named}"):
            batches_of(store, selection, 4, min_rows=8, timeout_s=0.05)
        with pytest.raises(WaitTimeoutError, match=f"too few whole groups within 0.05 s.*{named}"):
            batches_of(store, selection, 4, timeout_s=0.05)
    store.limiter.set(min_size_to_sample=5)
    with pytest.raises(WaitTimeoutError, match=named):
        batches_of(store, selection, 4, timeout_s=0.05)


def test_a_batch_waits_for_the_rest_of_a_group(make_store: Any) -> None:
    store = make_store()
    insert_all(store, [(5, 0, 3)])
    with store.expect_writers():
        timer = threading.Timer(0.1, lambda: insert(store, 5, 0, 1, first=3))
        timer.start()
        (batch,) = batches_of(store, GroupSampling("prompt", SIZE), 4, timeout_s=30.0)
        timer.join()
    assert groups_in(batch) == [(5, 0)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_wait_for_groups_ends_when_the_replay_is_closed(make_store: Any, prefetch: int) -> None:
    store = make_store()
    insert_all(store, [(5, 0, 3)])
    with store.expect_writers():
        replay = replay_of(store, GroupSampling("prompt", SIZE), 4, prefetch=prefetch, timeout_s=600.0)
        timer = threading.Timer(0.2, replay.close)
        timer.start()
        with pytest.raises(gt.errors.GeartrainError):
            replay.sample()
        timer.join(patience(30))
        assert not timer.is_alive()


# --- over ranks -------------------------------------------------------------------------------------------------


def sharded(make_store: Any, shards: int, **options: Any) -> list[gt.Store]:
    stores = [make_store(**options) for _ in range(shards)]
    for number, (prompt, attempt, count) in enumerate(GROUPS):
        insert(stores[number * number % shards], prompt, attempt, count)
    return stores


def over_ranks(stores: list[gt.Store], ranks: int, selection: Any, n: int, batches: int = 3, **options: Any) -> Any:
    """The global batches as groups in the order of draws. Rank r has store r % len(stores)."""
    settings = {"output": "numpy", "prefetch": 0, "num_batches": batches, **options}

    def body(rank: ThreadRankGroup) -> list[Any]:
        with replay_of(stores[rank.rank % len(stores)], selection, n, group=rank, **settings) as replay:
            # None is kept, so that all are in recycled memory.
            return [list(zip(batch.draw[::SIZE].tolist(), groups_in(batch), strict=True)) for batch in replay]

    steps = zip(*run_ranks(ranks, body), strict=True)
    return [[group for _, group in sorted(itertools.chain(*parts))] for parts in steps]


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("limited", [False, True])
def test_the_same_groups_of_attempts_are_drawn_on_any_number_of_ranks(
    make_store: Any, prioritized: bool, limited: bool
) -> None:
    options: dict[str, Any] = {"max_times_sampled": 100} if limited else {}
    selection = GroupSampling("prompt", SIZE, prioritized=prioritized, seed=5, attempt="attempt")
    with gt.Replay(sharded(make_store, 1)[0], selection, 16, prefetch=0, output="numpy") as replay:
        expected = [groups_in(replay.sample()) for _ in range(3)]
    for shards, ranks in ((1, 1), (1, 2), (2, 2), (2, 4), (3, 4)):
        stores = sharded(make_store, shards, **options)
        assert over_ranks(stores, ranks, selection, 16) == expected, (shards, ranks)
        assert sum(store.stats()["sampled"] for store in stores) == 3 * 16, (shards, ranks)


def test_ranks_name_groups_that_are_not_whole(make_store: Any) -> None:
    stores = [make_store(), make_store()]
    insert(stores[0], 1, 0, 4)
    insert(stores[1], 2, 0, 3)
    named = r"1 is incomplete: prompt=2 \(3 of 4 rows\)"
    with pytest.raises(NotEnoughRowsError, match=f"2 groups of 4 were asked for, 1 of 2 are whole; {named}"):
        over_ranks(stores, 2, GroupSampling("prompt", SIZE), 8)
    with stores[0].expect_writers(), pytest.raises(WaitTimeoutError, match=named):
        over_ranks(stores, 2, GroupSampling("prompt", SIZE), 8, timeout_s=0.05)
    with stores[0].expect_writers(), pytest.raises(WaitTimeoutError, match="prompt=2"):
        over_ranks(stores, 2, GroupSampling("prompt", SIZE), 8, timeout_s=0.05, min_rows=40)
