"""Groups and reducers: what goes in, what comes out, who is named when it does not. The native side has tests too."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import numpy as np
import pytest
from collectives_crew import MemoryStore, group_of, run_ranks
from deadlines import patience
from reductions import in_order

from geartrain.collectives import Group, Reducer
from geartrain.collectives.buffers import OPS, REDUCED_DTYPES, reduces
from geartrain.errors import (
    ArgumentError,
    CollectiveClosedError,
    CollectiveTimeoutError,
    PeerLostError,
    RankLostError,
    RanksDisagreeError,
    ReducerLostError,
    UntrustedPeerError,
    WaitTimeoutError,
)


def numbers(rank: int, n: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(rank).normal(size=n).astype(dtype)


def in_rank_order(world_size: int, n: int, dtype: str = "float32") -> np.ndarray:
    total = numbers(0, n, dtype)
    for rank in range(1, world_size):
        total = total + numbers(rank, n, dtype)
    return total


def all_fine(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


# --- what is refused at the door --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i2", ">i8"])
def test_an_array_of_the_other_byte_order_is_refused_not_summed_as_if_it_were_of_this_one(dtype: str) -> None:
    with Group(0, 1) as group:
        with pytest.raises(ArgumentError, match="byte order"):
            group.all_reduce(np.ones(4, dtype))
        with pytest.raises(ArgumentError):
            group.all_reduce(memoryview(np.ones(4, dtype)))
        assert group.all_reduce(np.ones(4, np.dtype(dtype).newbyteorder("="))).tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "options",
    [
        {"rank": -1},
        {"rank": "a"},
        {"rank": 1},
        {"world_size": 0},
        {"world_size": 1.5},
        {"timeout_s": float("nan")},
        {"timeout_s": -1},
        {"epoch": -1},
        {"reducers": [5]},
        {"reducers": "127.0.0.1:1"},
        {"window_bytes": -1},
        {"window_bytes": float("nan")},
        {"spin_us": -1},
        {"spin_us": float("nan")},
        {"spin_us": 1e10},
        {"spin_us": "long"},
    ],
    ids=lambda options: "-".join(f"{name}-{value}" for name, value in options.items()),
)
def test_arguments_of_a_group_that_are_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        group_of(**{"rank": 0, "world_size": 1, **options})


def test_timeouts_of_a_group_and_a_reducer_are_numbers_of_seconds() -> None:
    with Group(0, 1) as group, Reducer() as reducer:
        work = group.all_reduce_async(np.ones(4, np.float32))
        for timeout_s in (float("nan"), -1.0, "1", float("inf")):
            for call in (work.wait, group.close, reducer.close):
                with pytest.raises(ArgumentError, match="timeout_s"):
                    call(timeout_s)  # type: ignore[operator]
            with pytest.raises(ArgumentError, match="timeout_s"):
                group.all_reduce(np.ones(4, np.float32), timeout_s=timeout_s)  # type: ignore[arg-type]
        assert group.all_reduce(np.ones(4, np.float32)).tolist() == [1.0] * 4
    for options in ({"max_groups": -1}, {"max_window_bytes": float("nan")}):
        with pytest.raises(ArgumentError):
            Reducer(**options)  # type: ignore[arg-type]


# --- what is reduced --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_sum_has_the_same_bits_on_every_rank_and_those_of_the_rank_order(world_size: int, transport: str) -> None:
    def body(rank: int, group: Group) -> list[np.ndarray]:
        return [group.all_reduce(numbers(rank, n)) for n in (0, 1, 4096, 4097, 300_001)]

    for result in all_fine(run_ranks(world_size, body, transport=transport)):
        for array in result:
            assert np.array_equal(array, in_rank_order(world_size, len(array)))


@pytest.mark.parametrize(
    ("reducers", "shares"), [(1, [0, 0, 0, 1]), (2, [0, 0, 0, 0.5, 0.5]), (2, [0.2, 0.1, 0, 0.3, 0.4]), (2, "auto")]
)
def test_reducers_change_nothing_but_who_adds_up(reducers: int, shares: Any) -> None:
    crew = [Reducer() for _ in range(reducers)]

    def body(rank: int, group: Group) -> np.ndarray:
        return group.all_reduce(numbers(rank, 200_000))

    for result in all_fine(run_ranks(3, body, reducers=[r.address for r in crew], shares=shares)):
        assert np.array_equal(result, in_rank_order(3, 200_000))
    metrics = [reducer.metrics() for reducer in crew]
    assert sum(found["reduced_bytes"] for found in metrics) > 0
    for reducer in crew:
        reducer.close()


def test_every_op_and_dtype_is_what_numpy_says() -> None:
    def body(rank: int, group: Group) -> dict[tuple[str, str], np.ndarray]:
        found = {}
        for dtype in (name for name in REDUCED_DTYPES if name != "bfloat16"):
            for op in (name for name in OPS if reduces(name, dtype)):
                found[dtype, op] = array = given(rank, dtype)
                group.all_reduce(memoryview(array) if op == "max" else array, op)
        return found

    def given(rank: int, dtype: str) -> np.ndarray:
        made = (np.arange(5000) * (rank + 3) % 19 + (0 if dtype.startswith("u") else -4)).astype(dtype)
        if dtype.startswith("u"):  # numbers of which signed ones of these bits are negative, beside others
            made[rank::2] = np.iinfo(dtype).max - made[rank::2]
        return made

    def reference(dtype: str, op: str) -> np.ndarray:
        return in_order(op, [given(rank, dtype) for rank in range(3)])

    for result in all_fine(run_ranks(3, body)):
        assert {op for _, op in result} == set(OPS)
        for (dtype, op), array in result.items():
            assert np.array_equal(array, reference(dtype, op)), (dtype, op)


def test_sixteen_bits_are_added_up_in_float32_and_rounded_once() -> None:
    torch = pytest.importorskip("torch")

    def tensor(rank: int, dtype: Any) -> Any:
        return torch.from_numpy(numbers(rank, 50_000)).to(dtype)

    def body(rank: int, group: Group) -> list[Any]:
        halves = [group.all_reduce(tensor(rank, dtype)) for dtype in (torch.bfloat16, torch.float16)]
        return [*halves, group.all_reduce(torch.from_numpy(numbers(rank, 50_000)), wire_dtype="bfloat16")]

    for found in all_fine(run_ranks(4, body)):
        for array, dtype in zip(found, (torch.bfloat16, torch.float16, torch.bfloat16), strict=True):
            total = tensor(0, dtype).float()
            for rank in range(1, 4):
                total += tensor(rank, dtype).float()
            assert torch.equal(array, total.to(dtype).to(array.dtype))


def test_tensors_that_need_gradients_views_and_ml_dtypes_are_reduced_in_place() -> None:
    torch = pytest.importorskip("torch")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with Group(0, 1) as group:
        weight = torch.nn.Parameter(torch.ones(3, 4))
        assert group.all_reduce(weight, "avg") is weight
        half = np.ones(10, ml_dtypes.bfloat16)
        assert group.all_reduce(half) is half
        assert group.all_reduce(memoryview(np.ones(7, np.float32))) is not None


def test_an_array_that_cannot_be_reduced_is_refused_at_the_door() -> None:
    with Group(0, 1) as group:
        frozen = np.ones(4, np.float32)
        frozen.flags.writeable = False
        for array, op in [
            (np.ones((4, 4), np.float32)[:, 1], "sum"),
            (np.ones(4, np.complex64), "product"),
            (np.ones(4, np.complex64), "max"),
            (np.ones(4, np.longdouble), "sum"),
            (frozen, "sum"),
            (np.ones(4, np.int32), "avg"),
            (np.ones(4, np.bool_), "avg"),
            (np.ones(4, np.float32), "band"),
            (np.ones(4, np.float32), "median"),
            ([1.0, 2.0], "sum"),
        ]:
            with pytest.raises(ArgumentError):
                group.all_reduce(array, op)
        with pytest.raises(ArgumentError):
            group.all_reduce(np.ones(4), wire_dtype="bfloat16")
        assert group.counters()["operations"] == 0


def test_many_operations_under_way_end_right_and_dropped_works_keep_their_arrays() -> None:
    def body(rank: int, group: Group) -> bool:
        works = [group.all_reduce_async(np.full(1 + 997 * i, rank + i, np.float32)) for i in range(60)]
        for i in range(30):
            group.all_reduce_async(np.full(10_000 + i, 1.0))  # nobody keeps these
        return all((work.wait() == 2 * i + 1).all() for i, work in enumerate(works))

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_ring_gives_the_same_bits_on_every_rank(world_size: int) -> None:
    def body(rank: int, group: Group) -> list[np.ndarray]:
        works = [group.all_reduce_async(numbers(rank, n)) for n in (0, 5, 100_003)]
        return [work.wait() for work in works]

    first, *others = all_fine(run_ranks(world_size, body, algorithm="ring"))
    for array in first:
        np.testing.assert_allclose(array, in_rank_order(world_size, len(array)), rtol=1e-4, atol=1e-5)
    for other in others:
        assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_rank_moves_k_with_reducers_and_the_rings_bytes_without() -> None:
    reducer = Reducer(transport="tcp")
    n = 1 << 20

    def body(rank: int, group: Group) -> int:
        group.all_reduce(numbers(rank, n))
        return group.counters()["bytes_received"]["tcp"]

    dedicated = run_ranks(4, body, reducers=[reducer.address], shares=[0, 0, 0, 0, 1], transport="tcp")
    assert all(1 <= received / (4 * n) < 1.003 for received in dedicated)
    ring = run_ranks(4, body, algorithm="ring", transport="tcp")
    assert all(1.5 <= received / (4 * n) < 1.505 for received in ring)
    reducer.close()


# --- who finds whom ---------------------------------------------------------------------------------------------------


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(WaitTimeoutError, match=r"\[1, 2\]"):
        Group(0, 3, store=MemoryStore(), timeout_s=0.3)


def test_a_reducer_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Exception, match=f"reducer 127.0.0.1:{port}"):
        Group(0, 1, reducers=[f"127.0.0.1:{port}"], shares=[0, 1], timeout_s=0.5)


def test_ranks_with_different_shares_are_told_so() -> None:
    store = MemoryStore()
    raised: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            Group(number, 2, store=store, shares=[0.5, 0.5] if number else [0.4, 0.6], timeout_s=patience(10))
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    [thread.start() for thread in threads]
    [thread.join(patience(30)) for thread in threads]
    assert [type(error) for error in raised] == [RanksDisagreeError] * 2
    assert "0.6" in str(raised[0])


def test_groups_of_several_names_and_epochs_live_on_one_store() -> None:
    store = MemoryStore()

    def body(rank: int, group: Group) -> float:
        again = [
            Group(rank, 2, store=store, name=name, epoch=epoch, timeout_s=patience(20))
            for name, epoch in (("default", 1), ("other", 0))
        ]
        total = sum(float(g.all_reduce(np.ones(100, np.float32))[0]) for g in (*again, group))
        for g in again:
            g.close()
        return total

    assert run_ranks(2, body, store=store) == [6.0, 6.0]


def test_a_reducer_with_a_secret_takes_only_those_who_know_it() -> None:
    with Reducer(secret="swordfish") as reducer:
        for secret in (None, "trout"):
            with pytest.raises(UntrustedPeerError):
                Group(0, 1, reducers=[reducer.address], shares=[0, 1], secret=secret, timeout_s=patience(5))
        with Group(
            0, 1, reducers=[reducer.address], shares=[0, 1], secret=b"swordfish", timeout_s=patience(5)
        ) as group:
            assert group.all_reduce(np.ones(10, np.float32)).sum() == 10
        assert reducer.metrics()["refused"] >= 2
    with pytest.raises(UntrustedPeerError):
        Reducer("0.0.0.0:0")


@pytest.mark.parametrize("reducers", [1, 3])
def test_a_reducer_with_another_secret_is_the_same_error_on_all_ranks_at_once(reducers: int) -> None:
    crew = [Reducer(secret="swordfish" if i else "trout") for i in range(reducers)]
    addresses = [reducer.address for reducer in crew]
    began = time.monotonic()
    results = run_ranks(4, lambda *_: None, reducers=addresses, secret="swordfish", timeout_s=3600.0)
    assert time.monotonic() - began < patience(10)
    for result in results:
        assert isinstance(result, UntrustedPeerError), result
        assert addresses[0] in str(result)
        assert result.reducers == (addresses[0],), [str(each) for each in results]
    for reducer in crew:
        reducer.close(0.0)


def test_what_ends_one_ranks_bootstrap_is_told_to_all_at_once() -> None:
    """Of a cause that one rank alone sees: a reducer's name that is wrong there, say."""
    store = MemoryStore()
    results: list[Any] = [None] * 4

    class Broken(MemoryStore):
        def __init__(self) -> None:
            self.values, self.changed = store.values, store.changed

        def get(self, key: str) -> Any:
            if "/address/2" in key:
                raise RuntimeError("the disk is full")
            return super().get(key)

    def rank(number: int) -> None:
        try:
            Group(number, 4, store=Broken() if number == 1 else store, timeout_s=3600.0)
        except BaseException as error:
            results[number] = error

    began = time.monotonic()
    threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads]
    [thread.join(patience(30)) for thread in threads]
    assert time.monotonic() - began < patience(10)
    for result in results:
        assert isinstance(result, PeerLostError)
        assert "the disk is full" in str(result)


def test_garbage_and_silence_at_a_reducers_port_disturb_nobody() -> None:
    reducer = Reducer(transport="tcp")
    host, _, port = reducer.address.rpartition(":")
    scanners = [socket.create_connection((host, int(port))) for _ in range(20)]

    def body(rank: int, group: Group) -> bool:
        for i, scanner in enumerate(scanners):
            if rank == 0 and i % 2 == 0:
                scanner.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
            assert group.all_reduce(np.ones(30_000, np.float32))[0] == 2
        return True

    assert run_ranks(2, body, reducers=[reducer.address], shares=[0, 0, 1], transport="tcp") == [True, True]
    until = time.monotonic() + patience(10)
    while reducer.metrics()["refused"] < 10 and time.monotonic() < until:
        time.sleep(0.05)
    assert reducer.metrics()["refused"] >= 10
    assert reducer.metrics()["groups_failed"] == 0
    for scanner in scanners:
        scanner.close()
    reducer.close()


# --- who failed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [("float32", "float64"), ("sum", "max"), (1000, 1001)])
def test_ranks_that_disagree_raise_the_same_words(first: Any, second: Any) -> None:
    def body(rank: int, group: Group) -> None:
        mine = second if rank else first
        dtype = mine if mine in ("float32", "float64") else "float32"
        group.all_reduce(
            np.ones(mine if isinstance(mine, int) else 50_000, dtype), mine if mine in ("sum", "max") else "sum"
        )

    one, other = run_ranks(2, body)
    assert isinstance(one, RanksDisagreeError)
    assert str(one) == str(other)
    assert str(first) in str(one)
    assert str(second) in str(one)
    assert one.ranks == (0, 1)


@pytest.mark.parametrize("options", [{}, {"algorithm": "ring"}])
def test_a_rank_that_stays_away_is_named_by_all_others_at_the_deadline(options: dict[str, Any]) -> None:
    others = threading.Barrier(3)

    def body(rank: int, group: Group) -> None:
        try:
            if rank != 1:
                group.all_reduce(np.ones(100_000, np.float32), timeout_s=patience(2.0))
        finally:
            others.wait(patience(30))

    began = time.monotonic()
    results = run_ranks(3, body, **options)
    assert time.monotonic() - began < patience(15)
    for rank in (0, 2):
        assert isinstance(results[rank], CollectiveTimeoutError)
        assert results[rank].ranks == (1,)


def test_an_abort_and_a_close_are_told_to_everyone() -> None:
    def body(rank: int, group: Group) -> None:
        if rank == 0:
            group.abort("enough")
        group.all_reduce(np.ones(50_000, np.float32))

    for result in run_ranks(2, body):
        assert isinstance(result, CollectiveClosedError)
        assert "enough" in str(result)

    def leave(rank: int, group: Group) -> None:
        if rank == 1:
            group.all_reduce(np.ones(50_000, np.float32))

    _, other = run_ranks(2, leave)
    assert isinstance(other, RankLostError)
    assert other.ranks == (0,)


def test_a_stopped_reducer_is_named() -> None:
    reducers = [Reducer() for _ in range(2)]
    address = reducers[1].address

    def body(rank: int, group: Group) -> None:
        group.all_reduce(np.ones(100_000, np.float32))
        if rank == 0:
            reducers[1].close(0.0)
        group.all_reduce(np.ones(100_000, np.float32))

    for result in run_ranks(2, body, reducers=[r.address for r in reducers], shares=[0, 0, 0.5, 0.5]):
        assert isinstance(result, ReducerLostError)
        assert result.reducers == (address,)
        assert address in str(result)
    reducers[0].close()


def test_a_reducer_can_be_taken_out_between_operations() -> None:
    """By a group of the next epoch, over the same store and beside the same reducers."""
    reducers = [Reducer() for _ in range(2)]
    left, store = (reducers[1].address,), MemoryStore()

    def body(rank: int, group: Group) -> tuple[float, tuple[str, ...], int]:
        group.all_reduce(np.ones(100_000, np.float32))
        group.close()
        with Group(rank, 2, store=store, reducers=left, epoch=group.epoch + 1, timeout_s=patience(20)) as following:
            return float(following.all_reduce(np.ones(100_000, np.float32))[5]), following.reducers, following.epoch

    results = run_ranks(2, body, store=store, reducers=[r.address for r in reducers])
    assert results == [(2.0, left, 1)] * 2
    for reducer in reducers:
        reducer.close()
