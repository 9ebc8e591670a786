"""Packed batches over ranks: the same global batch however many there are, balanced, ended and failed alike."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpo
import numpy as np
import packed_rows
import preloaded
import pytest
from deadlines import patience
from packed_rows import joined, over_ranks, rows_of
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import ArgumentError, NotEnoughRowsError, PeerLostError, SchemaError, WaitTimeoutError
from geartrain.replay.distributed.packed_rank_rows import PackedRankRows
from geartrain.replay.distributed.sharded_sampler import ShardedSampler
from geartrain.selection import Epochs, Fifo, Lifo, Prioritized, Uniform
from geartrain.tools.testing import ThreadRankGroup, run_ranks

N, B = 96, 24
TASKS = ("answer", "reward", "ref", "advantage")
Make = Callable[..., list[gt.Store]]


@pytest.fixture
def axes_stores(store_name: Callable[[], str]) -> Iterator[Make]:
    """The rows of `packed_rows` in shards of different sizes; the second of several is empty."""
    made: list[gt.Store] = []

    def make(shards: int, rows: int = N) -> list[gt.Store]:
        bounds = [0, *[rows * (s + 1) // (shards + 1) for s in range(1, shards)], rows] if shards > 1 else [0, rows]
        if shards > 2:
            bounds[2] = bounds[1]
        ranges = [range(first, last) for first, last in itertools.pairwise(bounds)]
        stores = [packed_rows.new_store(store_name(), each) for each in ranges]
        made.extend(stores)
        return stores

    yield make
    for store in made:
        store.close()


@pytest.fixture
def task_stores(store_name: Callable[[], str]) -> Iterator[Make]:
    """Rows that are due for the last task, in shards; `finish` was called."""
    made: list[gt.Store] = []

    def make(shards: int, rows: int = N, tasks: tuple[str, ...] = TASKS, finish: bool = True) -> list[gt.Store]:
        stores = []
        for shard in range(shards):
            store = grpo.new_store(store_name(), capacity=128)
            numbers = range(rows * shard // shards, rows * (shard + 1) // shards)
            store.native.advance_sequence(numbers.start + 1)
            if numbers:
                grpo.insert(store, numbers)
            packed_rows.claimed_rows(store, tasks, grpo.work)
            if finish:
                store.finish()
            stores.append(store)
        made.extend(stores)
        return stores

    yield make
    for store in made:
        assert store.audit() == []
        store.close()


STRATEGIES = {
    "uniform": Uniform(seed=3),
    "distinct": Uniform(seed=5, replacement=False),
    "prioritized": Prioritized(seed=6, beta=0.5),
    "fifo": Fifo(),
    "lifo": Lifo(),
}
SHARDED = [(1, 1), (1, 2), (2, 2), (3, 3), (2, 4), (4, 4), (3, 8), (8, 8)]


@pytest.mark.parametrize("selection", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_any_number_of_ranks_makes_the_packed_batches_of_one_process(axes_stores: Make, selection: Any) -> None:
    (store,) = axes_stores(1)
    with gt.Replay(store, selection, B, output="numpy", num_batches=3) as replay:
        expected = [rows_of(batch) for batch in replay]
    for row in expected[0]:
        number = row["id"][0]
        assert {"id": [number], "title": [row["title"][0]]} == {name: row[name] for name in ("id", "title")}
        assert row["ids"] == packed_rows.values_of(number)["ids"].tolist() and row["version"] == number + 7
    for shards, ranks in SHARDED:
        for balance in (None, "tokens"):
            batches, _, _ = over_ranks(axes_stores(shards), ranks, selection, B, num_batches=3, balance=balance)
            assert batches == expected, (shards, ranks, balance)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_row_with_tasks_is_drawn_once_by_any_number_of_ranks(task_stores: Make, name: str) -> None:
    (store,) = task_stores(1)
    with gt.Replay(store, STRATEGIES[name], B, output="numpy") as replay:
        expected = [rows_of(batch) for batch in replay]
    assert sorted(row["id"][0] for batch in expected for row in batch) == list(range(N))
    for shards, ranks in SHARDED[1:]:
        stores = task_stores(shards)
        batches, _, _ = over_ranks(stores, ranks, STRATEGIES[name], B, grpo.check, balance=gt.Cost("tokens"))
        assert batches == expected, (shards, ranks)
        assert [len(store) for store in stores] == [0] * shards  # all were freed


@pytest.mark.parametrize("balance", [None, "tokens"])
def test_a_pass_has_every_row_once_on_any_number_of_ranks(axes_stores: Make, balance: str | None) -> None:
    for shards, numbers in ((1, (1, 2, 4, 8)), (3, (3, 4, 8))):
        stores = axes_stores(shards)
        size = 40 if shards == 1 else 48
        made = [over_ranks(stores, ranks, Epochs(seed=1), size, balance=balance)[0] for ranks in numbers]
        assert all(batches == made[0] for batches in made)
        assert [len(batch) for batch in made[0]] == ([40, 40, 16] if shards == 1 else [48, 48])
        assert sorted(row["id"][0] for batch in made[0] for row in batch) == list(range(N))
    with gt.Replay(axes_stores(1)[0], Epochs(seed=1), 40, output="numpy") as replay:
        alone = [rows_of(batch) for batch in replay]
    assert alone == over_ranks(axes_stores(1), 4, Epochs(seed=1), 40, balance=balance)[0]


def test_every_rank_knows_the_lengths_of_the_whole_batch_and_who_has_which_row(axes_stores: Make) -> None:
    for balance in (None, "tokens"):
        batches, parts, _ = over_ranks(axes_stores(2), 4, Uniform(seed=1), B, num_batches=1, balance=balance)
        for rank, part in enumerate(parts[0]):
            lengths = part._lengths
            assert (lengths.me, lengths.replicas, len(lengths)) == (rank, 4, B)
            assert lengths.places.tolist() == part.draw.tolist() == np.asarray(part.keys.draw).tolist()
            assert sorted(lengths.places.tolist()) == np.flatnonzero(lengths.replica == rank).tolist()
            for name, axis in (("ids", "tokens"), ("prompt", "prompt"), ("length", "answers")):
                assert lengths.lengths[axis].tolist() == [len(row[name]) for row in batches[0]]
            counts, flat = lengths.parts["tokens"]
            assert counts.tolist() == [len(row["length"]) for row in batches[0]]
            assert flat.tolist() == [each for row in batches[0] for each in row["length"]]
            assert {name: each.tolist() for name, each in lengths.sums.items()} == {
                "mask": [sum(row["mask"]) for row in batches[0]]
            }


def test_ranks_have_about_the_same_cost_and_stats_tell_how_much(axes_stores: Make) -> None:
    _, parts, stats = over_ranks(axes_stores(2), 4, Uniform(seed=1), 64, num_batches=3, balance="tokens")
    loads = np.array([[len(part["ids"]) for part in step] for step in parts])
    assert (loads.max(1) / loads.mean(1)).max() < 1.03
    for figures in stats:
        assert figures["balance"] == pytest.approx(loads.max(1).sum() / loads.mean(1).sum())
        assert figures["balance_newest"] == pytest.approx(loads[-1].max() / loads[-1].mean())
    assert [figures["rows"] for figures in stats] == [sum(map(len, each)) for each in zip(*parts, strict=True)]
    assert sum(figures["received_bytes"] for figures in stats) == sum(figures["sent_bytes"] for figures in stats) > 0
    read = sum(figures["local_bytes"] + figures["received_bytes"] for figures in stats)
    assert read == sum(part.nbytes for step in parts for part in step)
    by_square = gt.Cost("tokens", per_item=2, per_square=3)
    _, parts, stats = over_ranks(axes_stores(2), 4, Uniform(seed=1), 64, num_batches=1, balance=by_square)
    squares = [int((2 * part["length"] + 3 * part["length"] ** 2).sum()) for part in parts[0]]
    assert stats[0]["balance"] == pytest.approx(max(squares) / np.mean(squares)) and stats[0]["balance"] < 1.03
    assert stats[0]["balance"] < max(loads := [len(part["ids"]) for part in parts[0]]) / np.mean(loads)


def test_ranks_of_one_shard_move_no_row(task_stores: Make) -> None:
    _, _, stats = over_ranks(task_stores(1), 4, Fifo(), B, balance="tokens")
    assert all(each["received_bytes"] == each["sent_bytes"] == 0 and each["local_share"] == 1 for each in stats)


@pytest.mark.parametrize("mesh", [(2, 1, 2), (2, 2, 2), (1, 2, 2), (2, 3, 1)], ids=str)
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_all_ranks_of_a_replica_get_the_same_rows_in_the_same_order(
    axes_stores: Make, mesh: tuple[int, int, int], shards: int
) -> None:
    ranks, (replicas, _, tensor) = int(np.prod(mesh)), mesh
    with gt.Replay(axes_stores(1)[0], Prioritized(seed=6, beta=0.5), B, output="numpy", num_batches=2) as replay:
        expected = [rows_of(batch) for batch in replay]
    for balance in (None, "tokens"):
        stores = axes_stores(shards)  # those of a replica's ranks may be of several hosts
        batches, parts, stats = over_ranks(
            stores, ranks, Prioritized(seed=6, beta=0.5), B, num_batches=2, balance=balance, mesh=mesh
        )
        assert batches == expected
        for step in parts:
            for rank, part in enumerate(step):
                replica = rank // tensor % replicas
                first = step[replica * tensor]
                assert part.draw.tolist() == first.draw.tolist() and rows_of(part) == rows_of(first)
                assert (part._lengths.me, part._lengths.replicas) == (replica, replicas)
                assert len(list(part.mini_batches(B // 2))) == 2
        moved = [sum(each[name] for each in stats) for name in ("sent_bytes", "received_bytes")]
        assert moved[0] == moved[1] and (moved[0] > 0) == (shards > 1)


def test_a_rank_without_rows_gets_an_empty_batch(axes_stores: Make) -> None:
    stores = axes_stores(2, rows=10)
    batches, parts, _ = over_ranks(stores, 4, Epochs(seed=0), 8)  # the last batch of the pass has 2 rows
    assert [[len(part) for part in step] for step in parts] == [[2, 2, 2, 2], [1, 1, 0, 0]]
    empty = parts[1][3]
    assert empty["ids"].shape == (0,) and empty["ids"].dtype == np.int32 and empty["prompt"].shape == (0, 2)
    assert empty["title"] == empty["raw"] == [] and empty.cu_seqlens.tolist() == [0] and empty.draw.shape == (0,)
    assert sorted(row["id"][0] for step in batches for row in step) == list(range(10))


def test_received_values_are_tensors_that_can_be_moved_and_pickled(axes_stores: Make) -> None:
    import pickle

    import torch

    _, parts, _ = over_ranks(axes_stores(2), 2, Uniform(seed=1), B, num_batches=1, output="torch")
    assert any(len(set(np.asarray(part.keys.shard).tolist())) == 2 for part in parts[0])  # of both shards
    for part in parts[0]:
        assert part["ids"].dtype == torch.int32 and part["mask"].dtype == torch.bool
        for other in (pickle.loads(pickle.dumps(part)), part.to("cpu"), part.clone()):
            assert rows_of(other) == rows_of(part) and other.draw.equal(part.draw)
            assert other._lengths.places.tolist() == part._lengths.places.tolist()


def test_priorities_go_to_the_rows_shards(axes_stores: Make) -> None:
    made = []
    for shards, ranks in ((1, 1), (2, 4), (3, 3)):
        stores = axes_stores(shards)

        def body(rank: ThreadRankGroup, stores: Any = stores) -> list[gt.Batch]:
            options: dict[str, Any] = {"group": rank, "output": "numpy", "num_batches": 4, "prefetch": 1}
            with replay_of(stores[rank.rank % len(stores)], Prioritized(seed=1), B, **options) as replay:
                found = []
                for batch in replay:
                    replay.update_priorities(batch.keys, batch["id"] % 7)
                    found.append(batch)
                return found

        results = run_ranks(ranks, body)
        made.append([joined([result[step] for result in results]) for step in range(4)])
    assert made[0] == made[1] == made[2]


# --- the end of the rows, and waits for them ---------------------------------------------------------------------


def test_iterations_end_on_all_ranks_alike_once_all_shards_are_finished(task_stores: Make) -> None:
    stores = task_stores(2, rows=20, tasks=(), finish=False)
    stores[0].finish()

    def work() -> None:
        for store in stores:
            packed_rows.claimed_rows(store, TASKS, grpo.work)
        stores[1].finish()

    def body(rank: ThreadRankGroup) -> list[list[int]]:
        with replay_of(stores[rank.rank], Fifo(), 6, group=rank, timeout_s=patience(20)) as replay:
            found = [grpo.check(batch) for batch in replay]
            with pytest.raises(NotEnoughRowsError, match=r"finish\(\) was called for all shards.*6.*2 can be drawn"):
                replay.sample()
            return found

    with stores[1].expect_writers():
        late = threading.Timer(0.2, work)
        late.start()
        seen = run_ranks(2, body)
        late.join()
    assert len(seen[0]) == len(seen[1]) == 3
    assert len({number for part in seen for batch in part for number in batch}) == 18


def test_a_wait_tells_which_task_of_which_shard_lags(task_stores: Make) -> None:
    stores = task_stores(2, rows=8, tasks=("answer",), finish=False)

    def body(rank: ThreadRankGroup) -> None:
        with (
            replay_of(stores[rank.rank], Fifo(), 4, group=rank, timeout_s=0.2) as replay,
            pytest.raises(
                WaitTimeoutError, match=rf"{stores[1].name}.*'re(ward|f)' lags by 4 rows, 4 due and 0 claimed"
            ),
        ):
            replay.sample()

    with stores[1].expect_writers():
        run_ranks(2, body)
    with (
        stores[0].expect_writers(),
        replay_of(stores[0], Fifo(), 4, timeout_s=0.2) as replay,
        pytest.raises(WaitTimeoutError, match=r"'re(ward|f)' lags by 4 rows"),  # as on one host
    ):
        replay.sample()


_WORKER = """
import sys, time, grpo, geartrain as gt, packed_rows
with grpo.new_store(sys.argv[1]) as store:
    print("open", flush=True)
    sys.stdin.readline()
    packed_rows.claimed_rows(store, ("answer", "reward", "ref", "advantage"), grpo.work)
    store.finish()
"""


def test_ranks_wait_for_processes_that_work_for_the_store(task_stores: Make) -> None:
    import os

    (store,) = task_stores(1, rows=8, tasks=(), finish=False)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with preloaded.Popen(
        [sys.executable, "-c", _WORKER, store.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as worker:
        assert worker.stdout is not None and worker.stdin is not None and worker.stdout.readline() == "open\n"
        threading.Timer(0.2, worker.stdin.close).start()
        batches, _, _ = over_ranks([store], 2, Fifo(), 4, timeout_s=patience(30))
        assert worker.wait(patience(30)) == 0
    assert [[row["id"][0] for row in batch] for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_rows_that_are_finished_late_are_drawn_first_over_shards(task_stores: Make) -> None:
    stores = task_stores(2, rows=8, tasks=("answer",), finish=False)
    claims = [store.claim("reward", 2) for store in stores]  # the two oldest rows of each stay behind
    for store in stores:
        packed_rows.claimed_rows(store, TASKS, grpo.work)
    for claim in claims:
        assert claim is not None

    def finish_late(batch: gt.Batch) -> None:
        if batch.step == 0 and 2 in np.asarray(batch["id"]):
            for store, claim in zip(stores, claims, strict=True):
                grpo.work(store, "reward", claim)
                packed_rows.claimed_rows(store, TASKS, grpo.work)
                store.finish()

    with stores[0].expect_writers():
        batches, _, _ = over_ranks(stores, 2, Fifo(), 4, finish_late, prefetch=0, timeout_s=patience(20))
    assert [sorted(row["id"][0] for row in batch) for batch in batches] == [[2, 3, 6, 7], [0, 1, 4, 5]]


def test_a_row_that_comes_while_ranks_tell_of_their_shards_is_in_the_next_draw(
    task_stores: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First rows are told before rows are counted: the count had all four of them, the first rows but three."""
    stores, original, early = task_stores(2, rows=8), ShardedSampler._offer, set[int]()

    def told_early(self: ShardedSampler, number: int, quota: int, state: Any) -> Any:
        offer = original(self, number, quota, state)
        if self.members.group.rank not in early:
            early.add(self.members.group.rank)
            offer[3 - self.members.group.rank :] = 0
        return offer

    monkeypatch.setattr(ShardedSampler, "_offer", told_early)
    batches, _, _ = over_ranks(stores, 2, Fifo(), 8, timeout_s=patience(20))
    assert [sorted(row["id"][0] for row in batch) for batch in batches] == [list(range(8))]
    assert early == {0, 1}


# --- lost rows, lost ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "selection", [Uniform(seed=1), Fifo(), Lifo(), Epochs(seed=0)], ids=lambda each: type(each).__name__
)
@pytest.mark.parametrize("when", ["_tell", "_exchange"])
def test_all_ranks_draw_again_where_rows_are_deleted_between_draw_and_read(
    axes_stores: Make, monkeypatch: pytest.MonkeyPatch, selection: Any, when: str
) -> None:
    stores, deleted = axes_stores(2), threading.Event()
    original = getattr(PackedRankRows, when)

    def deletes(self: PackedRankRows, step: int, given: Any, *rest: Any) -> Any:
        found = given.found[0] if when == "_tell" else given
        if step == 1 and not deleted.is_set() and self.group.rank == found.shard[0]:
            store = stores[found.shard[0]]
            keys = store.keys()
            assert store.delete(keys[np.isin(keys.row, found.rows[found.shard == found.shard[0]])]) == 0
            deleted.set()
        return original(self, step, given, *rest)

    monkeypatch.setattr(PackedRankRows, when, deletes)
    batches, _, _ = over_ranks(stores, 2, selection, B, num_batches=2, prefetch=0)
    assert deleted.is_set()
    left = {int(number) for store in stores for number in gt.fetch(store, store.keys(), fields=["id"])["id"]}
    assert len(batches[1]) == B and {row["id"][0] for row in batches[1]} <= left
    for row in batches[1]:
        assert row["ids"] == packed_rows.values_of(row["id"][0])["ids"].tolist()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_rows_of_a_global_batch_are_in_flight_on_their_shards_until_it_is_finished(
    task_stores: Make, prefetch: int
) -> None:
    stores, together = task_stores(2), threading.Barrier(4)
    for store in stores:
        store.limiter.set(in_flight=N)

    def in_flight() -> int:
        return sum(store.stats()["in_flight"] for store in stores)

    def body(rank: ThreadRankGroup) -> None:
        with replay_of(
            stores[rank.rank % 2], Uniform(seed=1), B, group=rank, prefetch=prefetch, num_batches=3,
            timeout_s=patience(20),
        ) as replay:  # fmt: skip
            for done, _ in enumerate(replay):
                together.wait(patience(20))
                assert in_flight() == N - B * done
                together.wait(patience(20))
        together.wait(patience(20))
        assert in_flight() == N - 3 * B

    run_ranks(ThreadRankGroup.make(4), body)
    for store in stores:
        store.limiter.set(in_flight=B // 2 - 1)

    def refused(rank: ThreadRankGroup) -> None:
        with pytest.raises(ArgumentError, match=f"lets {B - 2} rows be in flight, and a batch that needs {B}"):
            replay_of(stores[rank.rank % 2], Uniform(seed=1), B, group=rank, timeout_s=patience(20))

    run_ranks(ThreadRankGroup.make(4), refused)


@pytest.mark.parametrize("selection", [Uniform(seed=1), Uniform(seed=1, replacement=False), Fifo()])
def test_rows_that_another_replay_was_first_to_draw_are_replaced(
    task_stores: Make, monkeypatch: pytest.MonkeyPatch, selection: Any
) -> None:
    stores, taken = task_stores(2), list[int]()
    count = ShardedSampler.count_mine

    def takes(self: ShardedSampler, number: int, rows: Any, generations: Any, *rest: Any) -> Any:
        store = self.samplers[0].plan.store
        if store is stores[1] and not taken and len(rows):
            native = store.native
            some = np.ascontiguousarray(rows[:2]), np.ascontiguousarray(generations[:2])
            taken.extend(native.lengths(some[0]).tolist())
            assert native.count_samples(*some)[0].all()
            native.release_exhausted(*some)
        return count(self, number, rows, generations, *rest)

    monkeypatch.setattr(ShardedSampler, "count_mine", takes)
    batches, _, stats = over_ranks(stores, 2, selection, B, grpo.check)
    numbers = [row["id"][0] for batch in batches for row in batch]
    assert taken and len(numbers) == len(set(numbers)) == N - B  # 94 rows, in full batches
    assert sum(figures["redrawn"] for figures in stats) > 0


def test_a_rank_that_fails_is_an_error_on_all_others(task_stores: Make) -> None:
    stores = task_stores(2)
    group = ThreadRankGroup.make(4)
    group[2].die_at = 14
    raised = []

    def body(rank: ThreadRankGroup) -> None:
        with replay_of(stores[rank.rank % 2], Fifo(), 8, group=rank, timeout_s=patience(20)) as replay:
            try:
                list(replay)
            except PeerLostError as error:
                raised.append(str(error))

    run_ranks(group, body)
    assert len(raised) == 4 and all("die_at" in each for each in raised)


def test_what_ranks_do_not_take_is_refused(axes_stores: Make) -> None:
    (store,) = axes_stores(1)

    def body(rank: ThreadRankGroup) -> None:
        for options, error, text in (
            ({"balance": "token"}, SchemaError, "did you mean 'tokens'"),
            ({"balance": 3}, ArgumentError, "name of an axis"),
            ({"balance": "tokens", "assignment": "ordered"}, ArgumentError, "leave out assignment"),
            ({"update_lag": 3}, ArgumentError, "takes no update_lag"),
        ):
            with pytest.raises(error, match=text):
                replay_of(store, Fifo(), 4, group=rank, **options)
        if rank.rank == 0:  # the ranks would have other rows each
            with pytest.raises(gt.errors.RanksDisagreeError, match="balance"):
                replay_of(store, Fifo(), 4, group=rank, balance="tokens")
        else:
            with pytest.raises(gt.errors.RanksDisagreeError, match="balance"):
                replay_of(store, Fifo(), 4, group=rank, balance="prompt")

    run_ranks(2, body)
    with (
        gt.Store.create({"x": gt.Field((), "float32", per_row=True)}, capacity=4) as plain,
        pytest.raises(ArgumentError, match="no lengths of different axes: leave out balance"),
    ):
        replay_of(plain, Uniform(), 2, balance="x")
