"""Hierarchical all-reduce: within hosts and then across them. Ranks are threads, their hosts are names."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from collectives_crew import MemoryStore, group_of, run_ranks
from deadlines import patience, until

import geartrain._native as _native
from geartrain.collectives import Group, Reducer
from geartrain.collectives.bootstrap import Bootstrap
from geartrain.collectives.hierarchical_stages import PIECE_BYTES, StagedOperation
from geartrain.collectives.host_map import HostMap, RingOrder, cut
from geartrain.errors import (
    ArgumentError,
    CollectiveClosedError,
    CollectiveTimeoutError,
    ConnectionClosedError,
    GeartrainError,
    RankLostError,
    RanksDisagreeError,
)

MAPS = ["aabb", "abab", "aaabbc", "aaaa", "abcd"]
BEYOND_A_PIECE = PIECE_BYTES // 4 + 100_003


def numbers(rank: int, count: int, dtype: Any = np.float32) -> np.ndarray:
    made = np.random.default_rng(rank).standard_normal(count) * 30
    return made.astype(dtype)


def two_levels(hosts: str, arrays: list[np.ndarray]) -> np.ndarray:
    """The promise: in rank order within each host, then in the order of the hosts."""
    sums = []
    for host in dict.fromkeys(hosts):
        mine = [array for name, array in zip(hosts, arrays, strict=True) if name == host]
        total = mine[0].copy()
        for array in mine[1:]:
            total = total + array
        sums.append(total)
    total = sums[0]
    for one in sums[1:]:
        total = total + one
    return total


def right(found: list[Any]) -> list[Any]:
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def test_a_map_has_hosts_by_their_lowest_rank_and_lanes_of_the_smallest() -> None:
    found = HostMap.of("baabb")
    assert found.hosts == ((0, 3, 4), (1, 2)) and found.lanes == 2
    assert found.lane(1) == (3, 2) and found.place_of(4) == (0, 2)
    for count in (0, 1, 4096, 4097, 100_003):
        for lanes in (1, 2, 3, 7):
            parts = cut(count, 4, lanes, 5)
            assert [start for start, _ in parts[1:]] == [start + n for start, n in parts[:-1]] or count <= 4096
            assert sum(n for _, n in parts) == count and len(parts) == lanes
            assert sum(n > 0 for _, n in parts) == (min(count, 1) if count <= 4096 else lanes)


def test_a_ring_is_told_when_its_neighbours_are_on_other_hosts_for_no_reason() -> None:
    assert RingOrder.of("aabb").advice() is None and RingOrder.of("aaaa").crossings == 0
    found = RingOrder.of("abab")
    assert (found.crossings, found.least, found.order) == (4, 2, (0, 2, 1, 3))
    assert "4 of 4 hops" in (found.advice() or "")


@pytest.mark.parametrize("hosts", MAPS)
def test_the_bits_are_those_of_rank_order_within_hosts_and_then_of_the_hosts(hosts: str) -> None:
    counts = [0, 1, 10, 5000, 100_003, BEYOND_A_PIECE]

    def body(rank: int, group: Group) -> list[np.ndarray]:
        arrays = [numbers(rank, count) for count in counts]
        works = [group.all_reduce_async(array) for array in arrays]  # all in progress at once
        assert all(work.wait() is array for work, array in zip(works, arrays, strict=True))
        figures = group.counters()
        assert figures["operations"] == len(counts) and figures["elements"] == sum(counts)
        return arrays

    found = right(run_ranks(len(hosts), body, hierarchical=True, hosts=list(hosts)))
    for i, count in enumerate(counts):
        wanted = two_levels(hosts, [numbers(rank, count) for rank in range(len(hosts))])
        assert all(np.array_equal(arrays[i], wanted) for arrays in found), count


@pytest.mark.parametrize("how", ["reducers", pytest.param("shares", marks=pytest.mark.slow)])
def test_the_bits_do_not_depend_on_shares_and_reducers(how: str) -> None:
    hosts = "abab"

    def body(rank: int, group: Group) -> np.ndarray:
        return np.asarray(group.all_reduce(numbers(rank, 100_003)))

    with Reducer("127.0.0.1:0", secret="shared") as reducer:
        more: dict[str, Any] = {"shares": (0.1, 0.3, 0.4, 0.2)}
        if how == "reducers":
            more = {"reducers": [reducer.address], "shares": (0, 0, 0.1, 0.1, 0.8), "secret": "shared"}
        found = right(run_ranks(4, body, hierarchical=True, hosts=list(hosts), **more))
        assert how == "shares" or reducer.metrics()["groups_served"] + reducer.metrics()["groups"] >= 2  # one a lane
    wanted = two_levels(hosts, [numbers(rank, 100_003) for rank in range(4)])
    assert all(np.array_equal(array, wanted) for array in found)


def test_every_operation_and_dtype_that_a_group_knows() -> None:
    def body(rank: int, group: Group) -> None:
        for dtype in (np.float32, np.float64, np.float16, np.int32, np.uint8):
            array = np.full(5000, rank + 1, dtype)
            assert (group.all_reduce(array.copy(), op="product") == 24).all()
            assert (group.all_reduce(array.copy()) == 10).all()
            assert (group.all_reduce(array.copy(), op="min") == 1).all()
            assert (group.all_reduce(array.copy(), op="max") == 4).all()
            if np.dtype(dtype).kind == "f":
                assert (group.all_reduce(array.copy(), op="avg") == 2.5).all()
            else:
                assert (group.all_reduce(array.copy(), op="bxor") == 4).all()
                with pytest.raises(ArgumentError, match="no avg of"):
                    group.all_reduce(array, op="avg")
        assert (group.all_reduce(np.full(5000, 1j * (rank + 1)), op="avg") == 2.5j).all()
        assert not group.all_reduce(np.full(5000, rank < 2), op="band").any()
        halves = group.all_reduce(np.full(5000, 1 + 2.0**-9, np.float32), wire_dtype="bfloat16")
        assert (halves == 4).all()  # 2 + 2^-8 of each host, rounded to 2
        with pytest.raises(ArgumentError, match="sent as"):
            group.all_reduce(np.ones(3), wire_dtype="bfloat16")

    right(run_ranks(4, body, hierarchical=True, hosts=list("aabb")))


@pytest.mark.parametrize("hosts", ["aabb", "aaab", "abcc", "abc", "aaa"])
@pytest.mark.parametrize(("dtype", "wire"), [("float16", None), ("float32", "float16"), ("float32", "bfloat16")])
def test_an_average_is_divided_before_it_is_rounded_to_16_bits(hosts: str, dtype: str, wire: str | None) -> None:
    n, narrow = len(hosts), np.dtype(np.float16)

    def array(rank: int) -> np.ndarray:
        made = numbers(rank, 9000)
        made[::7] = 40_000 + 100 * rank  # the sum of two is beyond float16
        return made.astype(dtype)

    def body(rank: int, group: Group) -> np.ndarray:
        return np.asarray(group.all_reduce(array(rank), op="avg", wire_dtype=wire))

    found = right(run_ranks(n, body, hierarchical=True, hosts=list(hosts)))
    assert all(np.array_equal(one, found[0]) for one in found)
    exact = sum(array(rank).astype(np.float64) for rank in range(n)) / n
    np.testing.assert_allclose(found[0].astype(np.float64), exact, rtol=0.02 if wire == "bfloat16" else 2e-3, atol=0.5)
    if wire == "bfloat16":
        return  # no dtype of NumPy's
    singles = len(set(hosts)) == n
    level = []  # each host's, as it crosses
    for host in dict.fromkeys(hosts):
        mine = [array(rank) for rank in range(n) if hosts[rank] == host]
        total = mine[0].astype(np.float32)
        for one in mine[1:]:
            total = total + one.astype(np.float32)
        level.append((total if singles else total / np.float32(n)).astype(dtype))
    wanted = level[0].astype(narrow).astype(np.float32)
    for one in level[1:]:
        wanted = wanted + one.astype(narrow).astype(np.float32)
    wanted = (wanted / np.float32(n) if singles else wanted).astype(narrow).astype(dtype)
    if len(level) == 1:
        wanted = level[0]  # never crosses
    assert np.array_equal(found[0], wanted)


def test_a_ring_of_hosts_has_the_same_bits_on_every_rank() -> None:
    def body(rank: int, group: Group) -> np.ndarray:
        return np.asarray(group.all_reduce(numbers(rank, 300_000)))

    found = right(run_ranks(6, body, hierarchical=True, hosts=list("aabbcc"), algorithm="ring"))
    assert all(np.array_equal(array, found[0]) for array in found)
    np.testing.assert_allclose(found[0], sum(numbers(rank, 300_000) for rank in range(6)), rtol=1e-3, atol=1e-3)


def test_threads_of_one_process_are_on_one_host_unless_told() -> None:
    def body(rank: int, group: Group) -> Any:
        links = group.counters()["links"]  # before any rank leaves
        assert (group.all_reduce(np.full(1000, rank, np.float32)) == 3).all()
        return links

    assert right(run_ranks(3, body, hierarchical=True)) == [{"tcp": 0, "shm": 4}] * 3  # within the host, and back


def test_a_map_that_was_found_wrong_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _native.CollectiveGroup.make

    class Native:  # what could not share memory after all
        @staticmethod
        def make(options: dict[str, Any]) -> Any:
            return made({**options, "shm": False})

    monkeypatch.setattr(_native, "CollectiveGroup", Native)
    assert right(run_ranks(2, lambda rank, group: group.all_reduce(np.ones(5))[0], hierarchical=True)) == [2, 2]
    assert sum("share no memory" in record.getMessage() for record in caplog.records) == 2


def test_a_ring_whose_neighbours_cross_hosts_says_so_once_and_counts_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def identity() -> str:
        number = int(threading.current_thread().name.split("-")[1].split()[0])  # the ranks' threads, in their order
        return "ab"[number % 2]

    monkeypatch.setattr("geartrain.collectives.bootstrap.host_identity", identity)

    def body(rank: int, group: Group) -> Any:
        assert (group.all_reduce(np.ones(1000)) == 4).all()
        return group.counters()["ring"]

    assert right(run_ranks(4, body, algorithm="ring")) == [{"crossings": 4, "least_crossings": 2}] * 4
    said = [record.getMessage() for record in caplog.records if "hops of the ring" in record.getMessage()]
    assert len(said) == 1 and "4 of 4 hops" in said[0] and "of today's ranks: 0, 2, 1, 3" in said[0]


# --- arguments --------------------------------------------------------------------------------------------------------


def refused(rank: int, store: MemoryStore, options: dict[str, Any]) -> GeartrainError:
    with pytest.raises(GeartrainError) as caught:
        group_of(rank, 2, store=store, timeout_s=20.0, **options)
    return caught.value


def test_ranks_that_disagree_on_the_hierarchy_are_told() -> None:
    for options in ([{}, {"hierarchical": True}], [{"hierarchical": True, "hosts": [0, i]} for i in (0, 1)]):
        with ThreadPoolExecutor(2) as pool:
            errors = list(pool.map(refused, (0, 1), [MemoryStore()] * 2, options))
        assert all(isinstance(error, RanksDisagreeError) for error in errors), errors
        assert all("h" in str(error) and "rank 1" in str(error) for error in errors), errors


def test_what_a_hierarchical_group_does_not_do_is_refused_at_the_door() -> None:
    for more in ({"hosts": ["a"]}, {"hierarchical": True, "hosts": "ab"}, {"hierarchical": True, "hosts": [1, 2, 3]}):
        with pytest.raises(ArgumentError, match="name for each of 2 ranks"):
            group_of(0, 2, store=MemoryStore(), **more)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="connections between all ranks"):
        group_of(0, 2, store=MemoryStore(), hierarchical=True, on_reducer_loss="continue")

    def body(rank: int, group: Group) -> None:
        with pytest.raises(ArgumentError, match="hierarchical"):
            group.broadcast(np.ones(3), root=0)
        assert group.all_reduce(np.ones(3))[0] == 2

    right(run_ranks(2, body, hierarchical=True, hosts=[0, 1]))


# --- failures ---------------------------------------------------------------------------------------------------------


def failing(body: Any, hosts: str = "aabb", **options: Any) -> list[Any]:
    """What each rank has raised, in groups that are closed only when all have."""
    over = threading.Barrier(len(hosts))

    def run(rank: int, group: Group) -> Any:
        try:
            body(rank, group)
            return None
        except GeartrainError as error:
            return error
        finally:
            with suppress(threading.BrokenBarrierError):  # a rank has not even joined
                over.wait(patience(60))

    return run_ranks(len(hosts), run, on_error=over.abort, hierarchical=True, hosts=list(hosts), **options)


def test_a_rank_that_hangs_is_named_on_every_rank_by_its_number_among_all() -> None:
    def body(rank: int, group: Group) -> None:
        group.all_reduce(np.ones(100_000, np.float32))
        if rank != 3:
            group.all_reduce(np.ones(100_000, np.float32), timeout_s=1.5)

    found = failing(body, "ababab")
    assert found[3] is None
    for rank in (0, 1, 2, 4, 5):
        error = found[rank]
        assert isinstance(error, CollectiveTimeoutError) and error.ranks == (3,), (rank, error)
        assert "rank(s) 3" in str(error)


def test_a_rank_that_leaves_is_named_on_every_rank() -> None:
    def body(rank: int, group: Group) -> None:
        group.all_reduce(np.ones(100_000, np.float32))
        if rank == 2:
            group.close(0.0)
            return
        for _ in range(3):
            group.all_reduce(np.ones(100_000, np.float32), timeout_s=patience(20))

    found = failing(body)
    for rank in (0, 1, 3):
        error = found[rank]
        assert isinstance(error, RankLostError) and error.ranks == (2,) and "rank 2" in str(error), (rank, error)


def test_an_abort_and_its_reason_reach_every_rank() -> None:
    def body(rank: int, group: Group) -> None:
        if rank == 3:
            group.abort("the loss is not a number")
            assert "loss is not a number" in str(group.error())
        group.all_reduce(np.ones(1000, np.float32))

    for error in failing(body):
        assert isinstance(error, CollectiveClosedError) and error.ranks == (3,)
        assert "rank 3 aborted: the loss is not a number" in str(error)


@pytest.mark.parametrize("letter", ["x", "é", "日", "🙂", '"'], ids=["1", "2", "3", "4", "quote"])
def test_a_long_reason_is_cut_between_its_letters(letter: str) -> None:
    def body(rank: int, group: Group) -> None:
        if rank == 3:
            group.abort(letter * 3000)
        group.all_reduce(np.ones(1000, np.float32))

    for rank, error in enumerate(failing(body)):
        assert isinstance(error, CollectiveClosedError) and error.ranks == (3,), (rank, error)
        said = str(error).partition("rank 3 aborted: ")[2]
        assert set(said) == {letter} and len(said) >= 100, (rank, error)


@pytest.mark.parametrize("odd", [1, 2])
def test_ranks_that_ask_for_other_sizes_are_told_whether_on_one_host_or_not(odd: int) -> None:
    def body(rank: int, group: Group) -> None:
        mine = rank == 1 if odd == 1 else rank >= 2  # one rank of host a; both of host b
        group.all_reduce(np.ones(100_000 + 64 * mine, np.float32))

    for error in failing(body):
        assert isinstance(error, RanksDisagreeError), error
        assert (len(error.ranks) == 2 and set(error.ranks) != {0, 1}) or odd == 1, error


@pytest.mark.parametrize("odd", [[0], [2, 3], [1, 3]], ids=["a rank", "a host", "a lane"])
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"op": "avg"}, "avg of 100000 float32"),
        ({"op": "min"}, "min of 100000 float32"),
        ({"wire_dtype": "bfloat16"}, "sum of 100000 float32 as bfloat16"),
    ],
    ids=["avg", "min", "wire"],
)
def test_ranks_that_ask_for_other_operations_are_told_on_every_rank(
    odd: list[int], more: dict[str, Any], said: str
) -> None:
    def body(rank: int, group: Group) -> None:
        group.all_reduce(np.ones(100_000, np.float32), **(more if rank in odd else {}))

    for error in failing(body):
        assert isinstance(error, RanksDisagreeError), error
        assert said in str(error) and "the sum of 100000 float32 (a piece of it" in str(error), error
        assert len(error.ranks) == 2 and len(set(error.ranks) & set(odd)) == 1, error


def test_a_fault_while_other_ranks_still_join_is_told_to_them_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    unchanged = Bootstrap.watching

    @contextmanager
    def watching(self: Bootstrap, give_up: Any) -> Iterator[None]:
        with unchanged(self, give_up):
            yield
            if "lane" in self._name and self._numbers[self._rank] >= 2:  # connected, and has not noticed yet
                native = give_up.__self__
                until(lambda: native.fault() is not None)
                raise ConnectionClosedError(native.fault()[1])  # as `connect` does where the abort comes before its end

    monkeypatch.setattr(Bootstrap, "watching", watching)

    def body(rank: int, group: Group) -> None:
        group.all_reduce(np.ones(100_000, np.float32), op="min" if rank == 1 else "sum")

    for error in failing(body):
        assert isinstance(error, RanksDisagreeError) and error.ranks == (0, 1), error
        assert "rank 0 asks for the sum" in str(error) and "rank 1 for the min" in str(error), error
        assert "fault of a part" not in str(error), error


def test_arrays_in_another_order_are_told_though_their_pieces_have_the_same_sizes() -> None:
    piece = PIECE_BYTES // 4

    def body(rank: int, group: Group) -> None:
        sizes = [2 * piece, piece] if rank < 2 else [piece, 2 * piece]
        for work in [group.all_reduce_async(np.ones(size, np.float32)) for size in sizes]:
            work.wait()

    for error in failing(body):
        assert isinstance(error, RanksDisagreeError), error
        assert f"sum of {2 * piece} float32" in str(error) and f"sum of {piece} float32" in str(error), error


def test_a_group_is_closed_beside_its_operations_and_then_refuses_calls() -> None:
    def body(rank: int, group: Group) -> None:
        if rank == 0:
            return  # never takes part
        works = [group.all_reduce_async(np.ones(BEYOND_A_PIECE, np.float32)) for _ in range(3)]
        began = time.monotonic()
        group.close(5.0)
        assert time.monotonic() - began < patience(4)
        for work in works:
            with pytest.raises((CollectiveClosedError, RankLostError)):
                work.wait()
        with pytest.raises(CollectiveClosedError):
            group.all_reduce(np.ones(1))
        with pytest.raises(CollectiveClosedError):
            group.counters()

    assert failing(body) == [None] * 4


def test_close_gives_one_moment_to_all_operations_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(operation: StagedOperation, timeout_s: float) -> bool:
        waits.append(timeout_s)
        time.sleep(timeout_s)
        return False

    def body(rank: int, group: Group) -> None:
        if rank == 1:
            return  # never takes part
        works = [group.all_reduce_async(np.ones(1000, np.float32)) for _ in range(10)]
        monkeypatch.setattr(StagedOperation, "wait", wait)
        group.close()
        monkeypatch.undo()
        for work in works:
            with pytest.raises((CollectiveClosedError, RankLostError)):
                work.wait()

    assert failing(body, "ab") == [None] * 2
    assert len(waits) == 10 and sum(waits) <= 0.31, waits


@pytest.mark.parametrize("hosts", ["ab", "aa"])
@pytest.mark.parametrize("when", ["before", "between"])
def test_an_operation_that_close_overtakes_is_refused(when: str, hosts: str) -> None:
    over = threading.Barrier(2)

    def body(rank: int, group: Group) -> None:
        stages: Any = group._session.native
        begin, queue = stages.begin, stages.summed

        class Summed:
            @staticmethod
            def put(piece: Any) -> None:
                queue.put(piece)
                if not stages.ended and piece is not None:
                    stages.close(0.0)

        def begin_after_close(work: Any) -> Any:
            stages.close(0.0)
            return begin(work)

        if when == "before":
            stages.begin = begin_after_close
        else:
            stages.summed = Summed
        over.wait(patience(30))  # both are connected
        with pytest.raises(CollectiveClosedError):  # no work that nobody ends
            group.all_reduce_async(np.ones(3 * PIECE_BYTES, np.uint8)).wait(patience(2))

    right(run_ranks(2, body, hierarchical=True, hosts=list(hosts)))


def test_a_group_that_is_dropped_ends_its_threads() -> None:
    def alive() -> set[str]:
        return {
            thread.name for thread in threading.enumerate() if thread.name in ("geartrain-across", "geartrain-back")
        }

    before = threading.active_count()

    def body(rank: int, group: Group) -> None:
        group.all_reduce(np.ones(10))
        assert alive()

    right(run_ranks(2, body, hierarchical=True, hosts=[0, 1]))
    stores = MemoryStore()
    made: list[Any] = [None, None]

    def make(rank: int) -> None:
        made[rank] = group_of(rank, 2, store=stores, hierarchical=True, hosts=[0, 1], timeout_s=30.0)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(30))
    made.clear()
    until = time.monotonic() + patience(10)
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before
