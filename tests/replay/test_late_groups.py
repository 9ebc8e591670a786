"""Groups that stay short: attempts keep apart, late groups are drawn with the rows they have, and errors name them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from deadlines import patience
from replay_calls import replay_of

import geartrain as gt
import geartrain.replay.distributed.draw as draw
import geartrain.replay.sampler as sampler
from geartrain.errors import ArgumentError, FieldError, NotEnoughRowsError, SplitGroupError, WaitTimeoutError
from geartrain.replay.distributed.rank_reader import RankReader
from geartrain.selection import Candidates, Draw, GroupSampling, Mixture, Uniform
from geartrain.tools.testing import SimulatedDevice, ThreadRankGroup, run_ranks

SIZE = 4
FIELDS = {
    "token": gt.Field((2,), "int64"),
    "number": gt.Field((), "int64", per_row=True),
    "prompt": gt.Field((), "int64", per_row=True),
    "attempt": gt.Field((), "uint8", per_row=True),
    "score": gt.Field((), "float32", per_row=True),
    "pair": gt.Field((2,), "int64", per_row=True),
}
LATE: dict[str, Any] = {"attempt": "attempt", "least": 2, "deadline_s": 5.0}
# Prompt, attempt, rows: five whole groups, one of them of too many rows; three late ones; one of too few rows.
GROUPS = [(7, 0, 4), (7, 1, 3), (8, 0, 2), (-3, 2, 6), (9, 0, 1), (10, 0, 4), (10, 1, 4), (11, 0, 3), (12, 5, 4)]


@pytest.fixture
def make_store(store_name: Callable[[], str]) -> Any:
    with contextlib.ExitStack() as stores:

        def make(**options: Any) -> gt.Store:
            return stores.enter_context(gt.Store.create(store_name(), FIELDS, max_length=5, capacity=64, **options))

        yield make


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The clock that draws compare commits with: `clock.ahead_s` ahead of the real one; it counts who looks at it."""

    class Clock:
        ahead_s = 60.0
        looks = 0

        def __call__(self) -> int:
            self.looks += 1
            return time.time_ns() + int(self.ahead_s * 1e9)

    made = Clock()
    for module in (sampler, draw):
        monkeypatch.setattr(module, "now_ns", made)
    return made


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


def groups_in(batch: Any) -> list[tuple[int, int, int]]:
    """Prompt, attempt and rows of each group of a batch, after a check of every value."""
    there = batch.length > 0
    tokens = (batch["number"][:, None] * 10 + batch.start[:, None] + np.cumsum(batch.mask, 1) - 1) * batch.mask
    assert np.array_equal(batch["token"], np.repeat(tokens[:, :, None], 2, 2))
    assert np.array_equal(batch.length[there], 3 + batch["number"][there] % 3)
    assert np.array_equal(batch.version, batch["number"])
    assert np.array_equal(batch.keys.generation % 2 == 1, there)
    for name in ("number", "prompt", "attempt", "score", "pair"):
        assert not batch[name][~there].any(), name
    found = []
    for first in range(0, len(batch), SIZE):
        have = there[first : first + SIZE]
        count = int(have.sum())
        assert have[:count].all(), "the rows of a late group stand first"
        keys = set(
            zip(batch["prompt"][first:][:count].tolist(), batch["attempt"][first:][:count].tolist(), strict=True)
        )
        assert len(keys) == 1 and (np.diff(batch["number"][first:][:count]) == 1).all(), "one group, the oldest first"
        found.append((*keys.pop(), count))
    return found


def batches_of(store: gt.Store, selection: Any, batch_size: int, count: int = 1, **options: Any) -> list[Any]:
    settings = {"output": "numpy", "prefetch": 0, **options}
    with replay_of(store, selection, batch_size, **settings) as replay:
        return [replay.sample() for _ in range(count)]


# --- one process ------------------------------------------------------------------------------------------------


def test_attempts_at_a_prompt_are_groups_of_their_own(make_store: Any) -> None:
    store = make_store()
    insert(store, 7, 0, 3)
    insert(store, 7, 1, 4)
    insert(store, 8, 1, 4)
    (batch,) = batches_of(store, GroupSampling("prompt", SIZE, attempt="attempt"), 8)
    assert sorted(groups_in(batch)) == [(7, 1, 4), (8, 1, 4)]
    with pytest.raises(NotEnoughRowsError, match=r"3 groups of 4 were asked for, 2 of 3 are whole; 1 is incomplete"):
        batches_of(store, GroupSampling("prompt", SIZE, attempt="attempt"), 12)


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("window", [None, 2, gt.Windows(2, at=lambda keys, lengths, random: lengths - 1)])
def test_a_late_group_is_drawn_with_the_rows_it_has(
    make_store: Any, clock: Any, prioritized: bool, window: Any
) -> None:
    store = make_store()
    insert_all(store)
    selection = GroupSampling("prompt", SIZE, prioritized=prioritized, seed=3, **LATE)
    (batch,) = batches_of(store, selection, 32, window=window)
    expected = sorted((prompt, attempt, min(count, SIZE)) for prompt, attempt, count in GROUPS if count > 1)
    assert sorted(groups_in(batch)) == expected
    clock.ahead_s = 4.0
    with pytest.raises(WaitTimeoutError, match="6 groups of 4 were asked for, 5 of 9 are whole or late"):
        batches_of(store, selection, 24, timeout_s=0)
    with pytest.raises(NotEnoughRowsError, match="5 of 9 are whole; 4 are incomplete"):
        batches_of(store, GroupSampling("prompt", SIZE, attempt="attempt"), 24)


def test_the_deadline_runs_from_the_first_row(make_store: Any, clock: Any) -> None:
    store = make_store()
    insert(store, 7, 0, 1)
    time.sleep(0.3)
    insert(store, 7, 0, 2, first=1)
    selection = GroupSampling("prompt", SIZE, **{**LATE, "deadline_s": 10.0})
    clock.ahead_s = 9.85  # the first row was committed more than ten seconds ago, the others less
    (batch,) = batches_of(store, selection, 4)
    assert groups_in(batch) == [(7, 0, 3)]


def test_each_late_group_is_drawn_as_often_as_a_whole_one(make_store: Any, clock: Any) -> None:
    store = make_store()
    insert_all(store, [(1, 0, 4), (2, 0, 2), (3, 0, 3), (4, 0, 4)])
    selection = GroupSampling("prompt", SIZE, seed=1, **LATE)
    with gt.Replay(store, selection, 4, output="numpy", num_batches=800) as replay:
        drawn = [groups_in(batch)[0][0] for batch in replay]  # in recycled memory
    counts = np.bincount(drawn, minlength=5)[1:]
    assert counts.min() > 140 and counts.max() < 260


def test_samples_and_the_rate_limiter_count_the_rows_that_are_there(make_store: Any, clock: Any) -> None:
    store = make_store(max_times_sampled=1)
    store.limiter.set(min_size_to_sample=1, samples_per_insert=1.0, error_buffer=1000.0)
    insert_all(store, [(1, 0, 2), (2, 0, 3)])
    # Of eight places five have a row, so that the default of min_rows is 2 * least and not 8.
    (batch,) = batches_of(store, GroupSampling("prompt", SIZE, **LATE), 8)
    assert sorted(groups_in(batch)) == [(1, 0, 2), (2, 0, 3)]
    assert len(store) == 0 and store.stats()["sampled"] == store.limiter.state().samples == 5


def test_keys_of_places_without_a_row_are_stale(make_store: Any, clock: Any) -> None:
    store = make_store()
    insert_all(store, [(1, 0, 2), (2, 0, 4)])
    with gt.Replay(store, GroupSampling("prompt", SIZE, **LATE), 8, prefetch=0) as replay:
        batch = replay.sample()
        assert replay.update_priorities(batch.keys, np.arange(8.0) + 1) == 2
    there = batch.keys[(batch.length > 0).numpy()]
    assert sorted(store.status(there)["priority"]) == sorted((np.flatnonzero(batch.length > 0) + 1.0).tolist())
    assert len(gt.fetch(store, there)) == 6


def losing(store: gt.Store, clock: Any, places: list[int]) -> GroupSampling:
    """Groups of which rows at some places of a batch are deleted, once they were drawn; then an hour passes."""

    class Loses(GroupSampling):
        def select(self, candidates: Any, n: int, step: int, *, state: Any = None, redraw: Any = None) -> Draw:
            drawn = super().select(candidates, n, step, state=state, redraw=redraw)
            if redraw is None:
                store.delete(gt.Keys(drawn.rows, drawn.generations)[places])
                clock.ahead_s += 3600
            return drawn

    return Loses("prompt", SIZE, seed=1, **LATE)


def test_a_batch_that_is_drawn_again_reuses_what_was_late(make_store: Any, clock: Any) -> None:
    store = make_store()
    insert_all(store, [(1, 0, 4), (2, 0, 3)])
    clock.ahead_s = 0.0
    with gt.Replay(store, losing(store, clock, [1]), 4, prefetch=0, output="numpy") as replay:
        with pytest.raises(NotEnoughRowsError, match="1 groups of 4 were asked for, 0 of 2 are whole or late"):
            replay.sample()
        assert clock.looks == 1


def test_a_late_group_that_lost_a_row_is_replaced_as_a_whole(make_store: Any, clock: Any) -> None:
    store = make_store()
    insert_all(store, [(each, 0, 2) for each in range(1, 5)])
    with gt.Replay(store, losing(store, clock, [4]), 12, prefetch=0, output="numpy") as replay:
        batch = replay.sample()
    assert len(set(groups_in(batch))) == 3 and clock.looks == 1


def test_the_priority_of_a_late_group_is_the_sum_of_its_rows(make_store: Any, clock: Any) -> None:
    store = make_store()
    insert_all(store, [(1, 0, 4), (2, 0, 2), (3, 0, 1)])
    rows = Candidates.of_store(store.native, store.column).at(clock())
    groups = GroupSampling("prompt", SIZE, prioritized=True, **LATE).whole_groups(rows)
    priority = store.status(store.keys())["priority"]
    whole, late = groups.priorities / groups.priorities.sum()
    assert late / whole == pytest.approx(priority[4:6].sum() / priority[:4].sum())
    assert (groups.generations[1] != 0).tolist() == [True, True, False, False]


def test_a_mixture_takes_late_groups(make_store: Any, clock: Any) -> None:
    first, second = make_store(), make_store()
    insert_all(first)
    insert_all(second)
    mixture = Mixture([0.5, 0.5], [Uniform(seed=1), GroupSampling("prompt", SIZE, seed=2, **LATE)])
    with gt.Replay([first, second], mixture, 24, prefetch=0, output="numpy") as replay:
        batch = replay.sample()
    assert batch.keys.shard.tolist() == [0] * 12 + [1] * 12
    assert (batch.length[:12] > 0).all() and not batch["number"][batch.length == 0].any()


@pytest.mark.parametrize("packed", [False, True])
def test_a_device_gets_late_groups_staged(make_store: Any, clock: Any, packed: bool) -> None:
    pytest.importorskip("torch")
    store, selection = make_store(), GroupSampling("prompt", SIZE, seed=1, **LATE)
    insert_all(store)
    device = SimulatedDevice(0)
    (expected,) = batches_of(store, selection, 32, pad="right")
    options = gt.DeviceOptions(device, packed=packed)
    with replay_of(store, selection, 32, pad="right", device=options) as replay:
        batch = replay.sample()
        device.finish()
        assert replay.describe()[0]["path"] == "staged"
    assert batch.length.tolist() == expected.length.tolist() and 0 in batch.length
    assert batch["prompt"].tolist() == expected["prompt"].tolist()
    if packed:
        assert batch.cu_seqlens.diff().tolist() == expected.length.tolist()
        assert np.array_equal(batch["token"][: batch.cu_seqlens[-1]], expected["token"][expected.mask])
    else:
        assert np.array_equal(batch["token"], expected["token"]) and np.array_equal(batch.mask, expected.mask)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"least": 2}, "a late group needs both least and deadline_s, found least=2 and deadline_s=None"),
        ({"deadline_s": 2.0}, "a late group needs both least and deadline_s, found least=None and deadline_s=2.0"),
        ({"least": 0, "deadline_s": 1.0}, "least must be .*, found 0"),
        ({"least": 4, "deadline_s": 1.0}, "least must be .*, found 4"),
        ({"least": 2, "deadline_s": 0.0}, "deadline_s must be a finite number above 0"),
        ({"least": 2, "deadline_s": 1e30}, "above 0 and at most"),
        ({"least": 1, "deadline_s": 1.0, "size": 1}, "groups of one row are always whole: leave out least"),
        ({"attempt": 3}, "attempt must be text that is not empty, found 3"),
        ({"attempt": "prompt"}, "`by` and `attempt` are different fields, found 'prompt' for both"),
        ({"size": 0}, "size must be at least 1"),
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
        (GroupSampling("prompt", SIZE, **LATE), {"device": "cpu", "update_lag": 2}, ArgumentError, "leave out device"),
        (
            GroupSampling("prompt", SIZE, **LATE), {"device": gt.DeviceOptions("cpu", path="gather")}, ArgumentError,
            "batches of late groups are staged: leave out path='gather'",
        ),
    ],
)  # fmt: skip
def test_what_a_store_cannot_group_by_is_refused_when_the_replay_is_made(
    make_store: Any, selection: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        replay_of(make_store(), selection, 8, **options)


def test_rows_of_arrays_are_never_late() -> None:
    rows = Candidates(np.ones(3, np.uint32), {"prompt": np.array([1, 1, 2])})
    with pytest.raises(ArgumentError, match="bare arrays"):
        GroupSampling("prompt", 3, least=2, deadline_s=1.0).select(rows, 3, 0)


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
    assert groups_in(batch) == [(5, 0, 4)]


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


def test_a_batch_waits_until_a_group_is_late(make_store: Any) -> None:
    store = make_store()
    insert_all(store, [(5, 0, 3), (6, 0, 1)])
    began_s = time.monotonic()
    (batch,) = batches_of(store, GroupSampling("prompt", SIZE, least=2, deadline_s=0.3), 4, timeout_s=30.0)
    assert groups_in(batch) == [(5, 0, 3)] and time.monotonic() - began_s > 0.15
    with pytest.raises(NotEnoughRowsError, match="1 of 2 are whole or late"):  # at once: the other has too few rows
        batches_of(store, GroupSampling("prompt", SIZE, least=2, deadline_s=0.1), 8, timeout_s=30.0)


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
def test_the_same_late_groups_are_drawn_on_any_number_of_ranks(
    make_store: Any, clock: Any, prioritized: bool, limited: bool
) -> None:
    options: dict[str, Any] = {"max_times_sampled": 100} if limited else {}
    selection = GroupSampling("prompt", SIZE, prioritized=prioritized, seed=5, **LATE)
    with gt.Replay(sharded(make_store, 1)[0], selection, 24, prefetch=0, output="numpy") as replay:
        expected = [groups_in(replay.sample()) for _ in range(3)]
    assert any(count < SIZE for batch in expected for _, _, count in batch)
    for shards, ranks in ((1, 1), (1, 2), (2, 2), (2, 6), (3, 3)):
        stores = sharded(make_store, shards, **options)
        assert over_ranks(stores, ranks, selection, 24) == expected, (shards, ranks)
        assert over_ranks(stores, ranks, selection, 24, assignment="ordered") == expected, (shards, ranks)
        if limited:
            rows = 2 * sum(count for batch in expected for _, _, count in batch)
            assert sum(store.stats()["sampled"] for store in stores) == rows


def test_only_leaders_look_at_a_clock_and_once_a_batch(make_store: Any, clock: Any) -> None:
    selection = GroupSampling("prompt", SIZE, seed=5, **LATE)
    over_ranks(sharded(make_store, 2), 6, selection, 24, batches=3)
    assert clock.looks == 2 * 3


def test_ranks_that_draw_again_reuse_what_their_leader_found_late(
    make_store: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    insert_all(store, [(1, 0, 4), (2, 0, 4), (3, 0, 3), (4, 0, 3), (5, 0, 2), (6, 0, 3)])
    read, both, lost = RankReader.read, threading.Barrier(2), []

    def loses_and_reads(self: Any, *given: Any) -> Any:
        if both.wait(30) == 0:
            clock.ahead_s = 0.0  # by now no group is late
            (found,) = given[1].found
            lost.append(store.delete(gt.Keys(found.rows, found.generations)[[0, SIZE]]))
        both.wait(30)
        return read(self, *given)

    monkeypatch.setattr(RankReader, "read", loses_and_reads)
    (batch,) = over_ranks([store], 2, GroupSampling("prompt", SIZE, seed=1, **LATE), 8, batches=1)
    assert lost and any(count < SIZE for _, _, count in batch) and clock.looks == 1


def test_the_rate_limiter_of_a_shard_counts_the_rows_that_are_there(make_store: Any, clock: Any) -> None:
    store = make_store()
    store.limiter.set(min_size_to_sample=1, samples_per_insert=1.0, error_buffer=1000.0)
    insert_all(store, [(1, 0, 2), (2, 0, 3)])
    over_ranks([store], 2, GroupSampling("prompt", SIZE, **LATE), 8, batches=1)
    assert store.stats()["sampled"] == store.limiter.state().samples == 5


def test_a_late_group_in_two_shards_is_refused(make_store: Any, clock: Any) -> None:
    stores = sharded(make_store, 2)
    insert(stores[0], 50, 0, 1)
    insert(stores[1], 50, 0, 2)
    with pytest.raises(SplitGroupError, match=r"group prompt=50, attempt=0 has rows in 2 shards \(1 in shard 0, 2 in"):
        over_ranks(stores, 2, GroupSampling("prompt", SIZE, **LATE), 8)
    without = GroupSampling("prompt", SIZE, attempt="attempt")
    assert all(len(batch) == 2 for batch in over_ranks(stores, 2, without, 8))


def test_ranks_wait_together_until_a_group_is_late_and_name_what_is_not(make_store: Any) -> None:
    stores = [make_store(), make_store()]
    insert(stores[0], 1, 0, 4)
    insert(stores[1], 2, 0, 3)
    assert sorted(over_ranks(stores, 2, GroupSampling("prompt", SIZE, least=2, deadline_s=0.3), 8, batches=1)[0]) == [
        (1, 0, 4), (2, 0, 3),
    ]  # fmt: skip
    named = r"1 is incomplete: prompt=2 \(3 of 4 rows\)"
    with pytest.raises(NotEnoughRowsError, match=f"2 groups of 4 were asked for, 1 of 2 are whole; {named}"):
        over_ranks(stores, 2, GroupSampling("prompt", SIZE), 8)
    with stores[0].expect_writers(), pytest.raises(WaitTimeoutError, match=named):
        over_ranks(stores, 2, GroupSampling("prompt", SIZE), 8, timeout_s=0.05)
    insert(stores[1], 4, 0, 1)
    with stores[0].expect_writers(), pytest.raises(WaitTimeoutError, match="prompt=2"):
        over_ranks(stores, 2, GroupSampling("prompt", SIZE), 8, timeout_s=0.05, min_rows=40)
