"""Reduce-scatter, all-gather, all-to-all, gather, scatter and broadcast under torch, with ranks that are threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from collectives_crew import group_of
from deadlines import patience, until
from reductions import in_order

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from process_groups import ranks, right  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402

from geartrain.collectives import Group, Reducer  # noqa: E402
from geartrain.collectives.buffers import reduces  # noqa: E402
from geartrain.collectives.torch_backend.options import BackendOptions  # noqa: E402
from geartrain.collectives.torch_backend.process_group import ProcessGroup  # noqa: E402
from geartrain.collectives.torch_backend.tensors import DTYPES, OPS  # noqa: E402
from geartrain.errors import ArgumentError, RanksDisagreeError  # noqa: E402

ReduceOp = dist.ReduceOp
WHOLE = [dtype for dtype in DTYPES if not dtype.is_floating_point and not dtype.is_complex]
MOVED = [*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2]


def made(seed: int, dtype: Any, count: int) -> Any:
    numbers = np.random.default_rng(seed).integers(-30 if dtype.is_signed else 0, 30, count)
    numbers = numbers / 4 if dtype.is_floating_point or dtype.is_complex else numbers
    return torch.from_numpy(np.asarray(numbers)).to(dtype)


def sum_of(tensors: list[Any], op: str) -> Any:
    """Of NumPy, in rank order: 16-bit numbers in 32 bits, rounded once."""
    wide = [t.float().numpy() if t.dtype in (torch.bfloat16, torch.float16) else t.numpy() for t in tensors]
    total = in_order(op, wide)
    return torch.from_numpy(np.asarray(total)).to(tensors[0].dtype)


def options(kind: Any, **values: Any) -> Any:
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def same(found: Any, expected: Any) -> bool:
    if found.dtype != expected.dtype or found.numel() != expected.numel():
        return False
    return not found.numel() or torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_form_in_every_dtype_is_numpys_to_the_bit(size: int) -> None:
    ops = {name: op for op, name in OPS}

    def body(group: ProcessGroup, rank: int) -> None:
        for i, dtype in enumerate(MOVED):
            count = [0, 1, 1000, 9001][i % 4]  # of a rank's part
            inputs = [made(100 * i + r, dtype, count * size) for r in range(size)]
            parts = [one.split(count) if count else (one,) * size for one in inputs]
            if dtype in DTYPES:
                op = [name for name in ops if reduces(name, DTYPES[dtype])][i % 7 if dtype in WHOLE else i % 2]
                expected = sum_of([parts[r][rank] for r in range(size)], op)
                output = torch.empty(count, dtype=dtype)
                asked = options(c10d.ReduceScatterOptions, reduceOp=ops[op])
                group.reduce_scatter([output], [list(parts[rank])], asked).wait()
                assert same(output, expected), (dtype, op)
                group.reduce_scatter_single(output.zero_(), inputs[rank], asked).wait()
                assert same(output, expected), (dtype, op)
            outputs = [torch.empty(count, dtype=dtype) for _ in range(size)]
            group.allgather([outputs], [parts[rank][0]]).wait()
            assert all(same(outputs[r], parts[r][0]) for r in range(size)), dtype
            whole = torch.empty(count * size, dtype=dtype)
            group.all_gather_single(whole, parts[rank][0]).wait()
            assert same(whole, torch.cat(outputs)), dtype
            group.alltoall(outputs, list(parts[rank])).wait()
            assert all(same(outputs[r], parts[r][rank]) for r in range(size)), dtype
            group.all_to_all_single(whole, inputs[rank], [], []).wait()
            assert same(whole, torch.cat(outputs)), dtype
            root = i % size
            tensor = inputs[rank].clone()
            group.broadcast([tensor], options(c10d.BroadcastOptions, rootRank=root)).wait()
            assert same(tensor, inputs[root]), dtype
            gathered = [torch.empty(count, dtype=dtype) for _ in range(size)]
            asked = options(c10d.GatherOptions, rootRank=root)
            group.gather([gathered] if rank == root else [], [parts[rank][0]], asked).wait()
            assert rank != root or all(same(gathered[r], parts[r][0]) for r in range(size)), dtype
            output = torch.empty(count, dtype=dtype)
            asked = options(c10d.ScatterOptions, rootRank=root)
            group.scatter([output], [list(parts[root])] if rank == root else [], asked).wait()
            assert same(output, parts[root][rank]), dtype
        group.barrier().wait()
        tensor = torch.full((5,), float(rank))
        group.reduce(tensor, size - 1, ReduceOp.SUM).wait()
        assert tensor.tolist() == [sum(range(size)) if rank == size - 1 else rank] * 5
        counters = group.counters()
        assert counters["inner"] == {}, "some went to Gloo"
        assert counters["ours"]["broadcast"] == len(MOVED) and counters["ours"]["barrier"] == 1

    right(ranks(size, body))


def test_uneven_parts_and_several_at_once() -> None:
    def body(group: ProcessGroup, rank: int) -> None:
        counts = [5, 0, 3000]
        inputs = [torch.arange(float(count)) + rank for count in counts]
        output = torch.empty(counts[rank])
        outputs = [torch.empty(count) for count in counts]
        works = [
            group.reduce_scatter([output], [inputs]),
            group.allgather([outputs], [inputs[rank].clone()]),
        ]
        for work in works:
            work.wait()
        assert torch.equal(output, 3 * torch.arange(float(counts[rank])) + 3)
        assert all(torch.equal(outputs[r], torch.arange(float(counts[r])) + r) for r in range(3))
        # Rank r sends r + 1 rows to rank 0, none to rank 1 and 2 r rows to rank 2.
        sent, got = [rank + 1, 0, 2 * rank], [[1, 2, 3], [0, 0, 0], [0, 2, 4]][rank]
        source, result = torch.full((sum(sent), 4), float(rank)), torch.empty(sum(got), 4)
        group.alltoall_base(result, source, got, sent).wait()
        assert torch.equal(result[:, 0], torch.repeat_interleave(torch.arange(3.0), torch.tensor(got)))
        wholes, scattered = [torch.empty(3 * n) for n in (7, 11)], [torch.empty(n) for n in (7, 11)]
        group.allgather_into_tensor_coalesced(wholes, [torch.full((n,), float(rank)) for n in (7, 11)]).wait()
        group.reduce_scatter_tensor_coalesced(scattered, wholes).wait()
        assert all(bool((one == 3 * rank).all()) for one in scattered)
        future = group._allgather_base(wholes[0], torch.full((7,), float(rank))).get_future()
        assert torch.equal(future.wait()[0], wholes[0]) and wholes[0][7] == 1
        assert group.counters()["inner"] == {}

    right(ranks(3, body))


def test_tensors_that_are_not_contiguous_and_parts_that_are_in_place() -> None:
    def body(group: ProcessGroup, rank: int) -> None:
        field = torch.zeros(6, 8)
        columns = [field[:, 2 * r : 2 * r + 2] for r in range(3)]
        group.allgather([columns], [torch.full((2, 6), float(rank + 1)).t()]).wait()
        assert torch.equal(field[0], torch.tensor([1.0, 1, 2, 2, 3, 3, 0, 0])), "or a neighbour was written"
        output = torch.zeros(6, 4)[:, ::2]
        group.reduce_scatter([output], [columns]).wait()
        assert torch.equal(output, torch.full((6, 2), 3.0 * (rank + 1)))
        whole = torch.zeros(300)
        own = whole[100 * rank : 100 * rank + 100].fill_(rank + 1)
        group.all_gather_single(whole, own).wait()  # as FSDP does it
        assert torch.equal(whole, torch.repeat_interleave(torch.arange(1.0, 4.0), 100))
        group.reduce_scatter_single(own, whole).wait()
        assert torch.equal(own, torch.full((100,), 3.0 * (rank + 1)))
        shifted = torch.arange(300.0)
        group.reduce_scatter_single(shifted[50:150], shifted).wait()  # over what is still to be sent
        assert torch.equal(shifted[50:150], 3 * torch.arange(100.0 * rank, 100.0 * rank + 100))
        view = torch.zeros(6, 6)[1:5, 1:5].fill_(rank)
        group.broadcast(view, 2).wait()
        assert bool((view == 2).all())

    right(ranks(3, body))


def test_completed_work_has_its_results_in_tensors_that_are_not_contiguous() -> None:
    def body(group: ProcessGroup, rank: int) -> None:
        columns = list(torch.full((4, 2), -1.0).t())
        work = group.allgather([columns], [torch.full((4,), float(rank))])
        until(work.is_completed)
        assert torch.equal(torch.stack(columns), torch.tensor([[0.0] * 4, [1.0] * 4]))
        for column in columns:
            column.fill_(-1)
        group.allgather([columns], [torch.full((4,), float(rank))])  # nobody waits for it
        group.barrier().wait()
        until(lambda: torch.equal(torch.stack(columns), torch.tensor([[0.0] * 4, [1.0] * 4])))

    right(ranks(2, body))


def test_a_group_of_one_refuses_what_several_ranks_would() -> None:
    def body(group: ProcessGroup, rank: int) -> None:
        wrong: list[Callable[[], Any]] = [
            lambda: group.reduce_scatter([torch.zeros(4)], [[torch.ones(1)]]),
            lambda: group.allgather([[torch.zeros(4)]], [torch.ones(1)]),
            lambda: group.alltoall([torch.zeros(4)], [torch.ones(1)]),
        ]
        for call in wrong:
            with pytest.raises(dist.DistBackendError, match="1 elements do not go into a result of 4"):
                call()

    right(ranks(1, body))


def test_what_no_group_makes_is_left_to_gloo_and_counted() -> None:
    def body(group: ProcessGroup, rank: int) -> None:
        output = torch.empty(2, dtype=torch.int32)
        asked = options(c10d.ReduceScatterOptions, reduceOp=ReduceOp.AVG)
        with pytest.raises(RuntimeError):  # Gloo's own refusal
            group.reduce_scatter([output], [[torch.full((2,), 3, dtype=torch.int32)] * 2], asked).wait()
        counters = group.counters()
        assert counters["inner"] == {"reduce_scatter": 1} and counters["ours"] == {}

    right(ranks(2, body))


@pytest.mark.parametrize("algorithm", ["shares", "ring"])
def test_beside_reducers_ranks_have_a_group_of_their_own_and_in_a_ring_it_is_gloo(algorithm: str) -> None:
    with Reducer("127.0.0.1:0") as reducer:
        given = BackendOptions(reducers=(reducer.address,), shares=(0.0, 0.0, 1.0))

        def body(group: ProcessGroup, rank: int) -> None:
            whole = torch.empty(20_000)
            group.all_gather_single(whole, torch.full((10_000,), float(rank))).wait()
            group.allreduce([whole]).wait()
            assert whole[0] == 0 and whole[-1] == 2
            counters = group.counters()
            if algorithm == "ring":
                assert counters["inner"] == {"all_gather_single": 1}
            else:
                assert set(counters["groups"]) == {"cpu", "cpu/ranks"} and counters["inner"] == {}

        right(ranks(2, body, given if algorithm == "shares" else BackendOptions(algorithm="ring")))


def test_ranks_that_disagree_or_do_not_come_are_named() -> None:
    gone = threading.Barrier(3)

    def sizes(group: ProcessGroup, rank: int) -> None:
        group.all_gather_single(torch.empty(3 * (10 + rank // 2)), torch.ones(10 + rank // 2)).wait()

    def absent(group: ProcessGroup, rank: int) -> None:
        if rank == 1:
            gone.wait(patience(60))
            return
        asked = options(c10d.ReduceScatterOptions, timeout=timedelta(seconds=0.5))
        try:
            group.reduce_scatter_single(torch.empty(1000), torch.ones(3000), asked).wait()
        finally:
            gone.wait(patience(60))

    for error in ranks(3, sizes):
        assert isinstance(error, dist.DistBackendError) and "rank 2" in str(error), error

    def connected(group: ProcessGroup, rank: int) -> None:
        group.barrier().wait()
        absent(group, rank)

    found = ranks(3, connected)
    for rank in (0, 2):
        assert isinstance(found[rank], RuntimeError) and "waiting for rank(s) 1 " in str(found[rank]), found[rank]


def test_wrong_arguments_are_errors_at_the_door_and_harm_no_other_rank() -> None:
    def body(group: ProcessGroup, rank: int) -> None:
        wrong: list[Callable[[], Any]] = [
            lambda: group.all_gather_single(torch.empty(7), torch.ones(3)),
            lambda: group.all_gather_single(torch.empty(8), torch.ones(3)),
            lambda: group.allgather([[torch.empty(3)]], [torch.ones(3)]),
            lambda: group.all_gather_single(torch.empty(6, dtype=torch.int32), torch.ones(3)),
            lambda: group.alltoall_base(torch.empty(4), torch.ones(4), [1, 1], [2, 2]),
            lambda: group.alltoall([torch.empty(1), torch.empty(1)], [torch.ones(2), torch.ones(2)]),
            lambda: group.alltoall_base(torch.ones(()), torch.ones(()), [], []),
            lambda: group.broadcast(torch.ones(3), 2),
        ]
        for call in wrong:
            with pytest.raises(dist.DistBackendError):
                call()
        group.barrier().wait()

    right(ranks(2, body))


def test_a_group_exchanges_numpy_arrays() -> None:
    store, through = dist.HashStore(), threading.Barrier(3)

    def run(rank: int) -> None:
        with Group(rank, 3, store=store, timeout_s=patience(20)) as group:
            inputs = [np.arange(4, dtype=np.int64) * (r + 1) + rank for r in range(3)]
            output = group.reduce_scatter(inputs, np.empty(4, np.int64))
            assert output.tolist() == (3 * np.arange(4) * (rank + 1) + 3).tolist()
            outputs = group.all_gather(np.full(rank, rank, np.float32), [np.empty(r, np.float32) for r in range(3)])
            assert [one.tolist() for one in outputs] == [[], [1.0], [2.0, 2.0]]
            outputs = group.all_to_all(
                [np.full(2, 3 * rank + r) for r in range(3)], [np.empty(2, int) for _ in range(3)]
            )
            assert [int(one[0]) for one in outputs] == [rank, 3 + rank, 6 + rank]
            assert group.broadcast(np.full(5, rank), root=1).tolist() == [1] * 5
            for bad in (
                lambda: group.broadcast(np.ones(5), root=3),
                lambda: group.all_gather(np.ones(5), [np.ones(5)]),
                lambda: group.reduce_scatter(np.ones((3, 5)), np.ones(5)),  # no sequence of arrays
                lambda: group.reduce_scatter([np.ones(5, int)] * 3, np.ones(5, int), op="avg"),
                lambda: group.all_to_all([np.ones(5)] * 3, [np.ones(5, np.float32)] * 3),
            ):
                with pytest.raises(ArgumentError):
                    bad()
            through.wait(patience(60))  # a rank may be done before the others
            if rank == 0:
                with pytest.raises(RanksDisagreeError):
                    group.broadcast(np.ones(5000), root=1)
            else:
                with pytest.raises(RanksDisagreeError):
                    group.all_gather(np.ones(5000), [np.ones(5000) for _ in range(3)])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))


def test_arrays_are_reduced_out_of_the_ranks_memory_by_request_with_the_same_bits() -> None:
    store, parts = dist.HashStore(), [made(rank, torch.float32, 100_000).numpy() for rank in range(3)]
    expected = parts[0] + parts[1] + parts[2]
    connected = threading.Barrier(3)

    def run(rank: int) -> list[int]:
        read = []
        for name, asked in (
            ("read", {"least_read_bytes": 1}),
            ("larger only", {"least_read_bytes": 10**9}),
            ("not asked for", {}),
            ("not at all", {"cross_memory": False}),
        ):
            with group_of(rank, 3, store=store, name=name, timeout_s=patience(20), **asked) as group:
                connected.wait(patience(60))
                assert (group.all_reduce(parts[rank].copy()) == expected).all()
                assert (group.reduce_scatter([parts[rank]] * 3, np.empty_like(expected)) == expected).all()
                read.append(group.counters()["read_bytes"])
        return read

    with ThreadPoolExecutor(3) as pool:
        for all_reads in pool.map(run, range(3)):
            # Of an all-reduce two others' thirds and the two other shares, of a reduce-scatter two whole arrays.
            assert all_reads[0] == pytest.approx(4 * 100_000 * (4 / 3 + 2), rel=0.01)
            assert all_reads[1:] == [0, 0, 0]


@pytest.mark.skipif(os.sysconf("SC_NPROCESSORS_ONLN") > 4, reason="a rank is a thread with an array here")
def test_many_ranks_for_each_core_read_large_arrays_unasked_and_fewer_ranks_do_not() -> None:
    store, large = dist.HashStore(), 1 << 20
    most = 4 * os.sysconf("SC_NPROCESSORS_ONLN")

    def run(rank: int, size: int) -> list[int]:
        read = []
        with Group(rank, size, store=store, name=f"{size} ranks", timeout_s=patience(60)) as group:
            for count in (large - 16, large):
                assert (group.all_reduce(np.full(count, rank, np.float32)) == size * (size - 1) / 2).all()
                read.append(group.counters()["read_bytes"])
        return read

    for size in (most, most - 1):
        with ThreadPoolExecutor(size) as pool:
            for less, all_of_it in pool.map(run, range(size), [size] * size):
                assert less == 0
                assert (all_of_it > 0) == (size == most)


@pytest.mark.parametrize(
    "given",
    [
        {"least_read_bytes": -1},
        {"least_read_bytes": 1, "algorithm": "ring"},
        {"least_read_bytes": 1, "transport": "tcp"},
        {"least_read_bytes": 1, "cross_memory": False},
    ],
    ids=["negative", "ring", "tcp", "not-read"],
)
def test_reading_where_nothing_can_be_read_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="least_read_bytes"):
        group_of(0, 1, **given)


@pytest.mark.parametrize("crew", [{"algorithm": "ring"}, {"shares": (1.0, 0.0)}])
def test_groups_that_cannot_exchange_say_so(crew: dict[str, Any]) -> None:
    store = dist.HashStore()

    def run(rank: int) -> None:
        with group_of(rank, 2, store=store, timeout_s=patience(20), **crew) as group:
            with pytest.raises(ArgumentError, match="own a share"):
                group.broadcast(np.ones(5), root=0)
            group.all_reduce(np.ones(5))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
