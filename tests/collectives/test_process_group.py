"""The backend "geartrain" of torch.distributed, with ranks that are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from deadlines import patience
from reductions import in_order

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from process_groups import ranks, right  # noqa: E402

from geartrain.collectives.buffers import reduces  # noqa: E402
from geartrain.collectives.torch_backend.options import BackendOptions  # noqa: E402
from geartrain.collectives.torch_backend.process_group import ProcessGroup  # noqa: E402
from geartrain.collectives.torch_backend.tensors import DTYPES, OPS  # noqa: E402
from geartrain.collectives.torch_backend.work import Finisher, TorchWork  # noqa: E402
from geartrain.errors import PeerLostError, WaitTimeoutError  # noqa: E402

ReduceOp = dist.ReduceOp


def made(rank: int, dtype: Any, size: int = 1000) -> Any:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator, dtype=torch.float32).to(dtype)
    return torch.randint(0, 40, (size,), generator=generator).to(dtype)


def in_rank_order(tensors: list[Any], op: str) -> Any:
    """The promise, by NumPy: one after the other; 16-bit numbers in 32 bits, rounded once."""
    wide = [(t.float() if t.dtype in (torch.bfloat16, torch.float16) else t).numpy() for t in tensors]
    return torch.from_numpy(in_order(op, wide)).to(tensors[0].dtype)


def test_every_dtype_and_operation_is_ours_and_right_to_the_bit() -> None:
    ops = {name: op for op, name in OPS}
    cases = [(dtype, op) for dtype in DTYPES for op in ops if reduces(op, DTYPES[dtype])]
    assert {op for _, op in cases} == set(ops) and {dtype for dtype, _ in cases} >= {torch.bool, torch.complex128}

    def body(group: ProcessGroup, rank: int) -> None:
        for dtype, op in cases:
            opts = dist.AllreduceOptions()
            opts.reduceOp = ops[op]
            tensor = made(rank, dtype)
            group.allreduce([tensor], opts).wait()
            expected = in_rank_order([made(r, dtype) for r in range(3)], op)
            assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8)), (dtype, op)
        counters = group.counters()
        assert counters["operations"] == len(cases), "some went to Gloo"
        assert counters["inner_operations"] == 0

    right(ranks(3, body))


def test_any_shape_and_layout() -> None:
    whole = torch.arange(24.0)
    layouts = {
        "scalar": lambda: torch.tensor(3.0),
        "matrix": lambda: whole.clone().view(4, 6),
        "columns": lambda: whole.clone().view(4, 6)[:, 1:3],
        "every third": lambda: whole.clone()[::3],
        "transposed": lambda: whole.clone().view(4, 6).t(),
        "channels last": lambda: whole.clone().view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "repeated": lambda: torch.ones(6, requires_grad=True),
        "negated view": lambda: torch.complex(whole, whole).conj().imag,
        "conjugated view": lambda: torch.complex(whole, whole + 1).conj(),
        "empty": lambda: torch.empty(0),
        "offset": lambda: whole.clone()[5:],
    }

    def body(group: ProcessGroup, rank: int) -> None:
        for name, make in layouts.items():
            tensor = make()
            before, stride = tensor.detach().clone(), tensor.stride()
            group.allreduce([tensor]).wait()
            assert torch.equal(tensor.detach(), 2 * before), name
            assert tensor.stride() == stride
        around = whole.clone().view(4, 6)
        group.allreduce([around[:, 1:3]]).wait()
        assert torch.equal(around[:, 3:], whole.view(4, 6)[:, 3:]), "a neighbour was written"
        assert group.counters()["inner_operations"] == 0

    right(ranks(2, body))


def test_all_of_torchs_forms_of_the_call() -> None:
    def body(group: ProcessGroup, rank: int) -> None:
        opts = dist.AllreduceOptions()
        opts.reduceOp = ReduceOp.MAX
        second = timedelta(seconds=9)
        forms: list[Callable[[Any], Any]] = [
            lambda t: group.allreduce([t], opts),
            lambda t: group.allreduce(tensors=[t], opts=opts),
            lambda t: group.allreduce(t, ReduceOp.MAX),
            lambda t: group.allreduce([t], ReduceOp.MAX, second),
            lambda t: group.allreduce(tensor=t, op=ReduceOp.MAX, timeout=second),
            lambda t: group.allreduce_coalesced([t, t.clone()], _coalesced(ReduceOp.MAX)),
            lambda t: group.allreduce_coalesced(tensors=[t], opts=_coalesced(ReduceOp.MAX)),
        ]
        for form in forms:
            tensor = torch.tensor([float(rank), -rank])
            assert form(tensor).wait() is True
            assert tensor.tolist() == [1.0, 0.0]
        tensor = torch.ones(2)
        group.allreduce([tensor]).wait()  # the sum, if nothing is said
        assert tensor.tolist() == [2.0, 2.0]
        assert group.counters()["operations"] == len(forms) + 1
        with pytest.raises(TypeError, match="unexpected"):
            group.allreduce([tensor], colour="red")

    right(ranks(2, body))


def _coalesced(op: Any) -> Any:
    opts = dist.AllreduceCoalescedOptions()
    opts.reduceOp = op
    return opts


def test_what_a_group_does_not_know_is_left_to_gloo_and_counted() -> None:
    def body(group: ProcessGroup, rank: int) -> None:
        sparse = torch.sparse_coo_tensor([[rank]], [1.0], (2,))
        work = group.allreduce([sparse])
        work.wait()
        assert work.result()[0].to_dense().tolist() == [1.0, 1.0]
        for wrong, op in ((torch.int32, ReduceOp.AVG), (torch.float32, ReduceOp.BAND), (torch.complex64, ReduceOp.MAX)):
            with pytest.raises(RuntimeError):  # Gloo's own refusal
                group.allreduce(torch.ones(2, dtype=wrong), op).wait()
        assert group.counters()["inner"] == {"allreduce": 4}
        assert group.counters()["operations"] == 0

    right(ranks(2, body))


def test_several_are_in_flight_and_finish_in_any_order_of_waiting() -> None:
    def body(group: ProcessGroup, rank: int) -> None:
        tensors = [torch.full((50_000,), float(i + rank)) for i in range(20)]
        works = [group.allreduce([tensor]) for tensor in tensors]
        futures = [work.get_future() for work in works[::2]]
        for work in reversed(works[1::2]):
            work.wait()
        for future in futures:
            (found,) = future.wait()
            assert found.numel() == 50_000
        for i, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
            assert work.is_completed() and work.is_success() and work.exception() is None
            assert work.result()[0] is tensor
            assert torch.equal(tensor, torch.full((50_000,), 2.0 * i + 1))
        assert works[0].get_future() is futures[0]

    right(ranks(2, body))


def test_a_callback_on_a_future_sees_the_result() -> None:
    def body(group: ProcessGroup, rank: int) -> None:
        future = group.allreduce([torch.ones(5)]).get_future().then(lambda f: f.value()[0] / 2)
        assert future.wait().tolist() == [1.0] * 5

    right(ranks(2, body))


def test_a_group_of_one_changes_nothing_and_connects_to_nobody() -> None:
    def body(group: ProcessGroup, rank: int) -> None:
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN):
            tensor = torch.arange(3.0)
            group.allreduce(tensor, op).get_future().wait()
            assert tensor.tolist() == [0.0, 1.0, 2.0]
        assert group.counters()["groups"] == {}

    right(ranks(1, body, BackendOptions(reducers=("127.0.0.1:1",))))


def test_ranks_that_disagree_on_the_size_are_both_told() -> None:
    def body(group: ProcessGroup, rank: int) -> None:
        group.allreduce([torch.ones(1000 + rank)]).wait()

    for error in ranks(2, body):
        assert isinstance(error, dist.DistBackendError) and isinstance(error, RuntimeError)
        assert "rank 0" in str(error) and "rank 1" in str(error), error


def test_a_rank_that_does_not_come_is_named_at_the_deadline() -> None:
    gone = threading.Event()

    def body(group: ProcessGroup, rank: int) -> Any:
        group.allreduce([torch.ones(1000)]).wait()
        if rank == 1:
            gone.wait(patience(20))
            return None
        opts = dist.AllreduceOptions()
        opts.timeout = timedelta(seconds=0.5)
        before = time.monotonic()
        try:
            group.allreduce([torch.ones(1000)], opts).wait()
        finally:
            gone.set()
            assert time.monotonic() - before < patience(10)

    error, _ = ranks(2, body)
    assert isinstance(error, RuntimeError) and "rank" in str(error) and "1" in str(error), error


def test_an_aborted_group_fails_its_own_operations_and_the_others() -> None:
    def body(group: ProcessGroup, rank: int) -> None:
        group.allreduce([torch.ones(1000)]).wait()
        if rank == 1:
            time.sleep(0.2)
            group.abort()
        work = group.allreduce([torch.ones(1000)])
        with pytest.raises(RuntimeError):
            work.get_future().wait()
        work.wait()

    for error in ranks(2, body):
        assert isinstance(error, dist.DistBackendError), error


def test_errors_reach_futures_waits_and_exceptions_alike() -> None:
    """Of the handle alone: an operation that fails."""

    def fail(limit_s: float | None) -> None:
        time.sleep(0.05)
        raise PeerLostError("rank 2 went away in operation 7")

    finisher = Finisher("test")
    work = TorchWork(fail, lambda: False, [torch.ones(1)], finisher)
    future = work.get_future()
    with pytest.raises(RuntimeError, match="rank 2 went away"):
        future.wait()
    with pytest.raises(RuntimeError, match="rank 2 went away"):
        future.then(lambda f: f.value()).wait()
    with pytest.raises(dist.DistBackendError, match="rank 2 went away") as caught:
        work.wait()
    assert isinstance(caught.value.__cause__, PeerLostError)
    assert work.is_completed() and not work.is_success() and "rank 2" in str(work.exception())
    finisher.close(5)


def test_a_callback_may_start_all_reduces_and_wait_for_their_futures() -> None:
    def chain(start: float) -> list[Any]:
        def body(group: ProcessGroup, rank: int) -> float:
            def reduced(value: float) -> Any:
                return group.allreduce([torch.full((1000,), value)]).get_future()

            def twice(future: Any) -> Any:
                first = float(future.value()[0][0])
                second = reduced(first).then(lambda f: reduced(float(f.value()[0][0])).wait()).wait()
                return float(second[0][0])

            return float(reduced(start).then(twice).wait())

        return ranks(2, body)

    # A group each: in which order callbacks of one group start theirs may differ from rank to rank.
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(chain, (1.0, 2.0))) == [[8.0, 8.0], [16.0, 16.0]]


def test_a_callback_may_wait_for_a_later_operation() -> None:
    later: list[Any] = []
    started = threading.Event()

    def of_the_first(_: Any) -> Any:
        started.wait(patience(20))
        return later[0].wait()

    gate = threading.Event()  # the callback is there before the first is done: it runs on a finisher's thread

    def wait(_: float | None) -> None:
        assert gate.wait(patience(20))

    finisher = Finisher("test")
    works = [TorchWork(wait, gate.is_set, [torch.full((1,), i)], finisher) for i in (1.0, 2.0)]
    futures = [work.get_future() for work in works[:1]]
    chain = futures[0].then(of_the_first)
    gate.set()
    later.append(works[1].get_future())
    started.set()
    assert chain.wait()[0] == 2
    finisher.close(5)


def test_after_a_wait_the_future_is_done() -> None:
    def body(group: ProcessGroup, rank: int) -> None:
        for early in (True, False):
            work = group.allreduce([torch.ones(1000)])
            future = work.get_future() if early else None
            work.wait()
            future = work.get_future()
            assert future.done() and future.value()[0][0] == 2
        for _ in range(200):  # whoever completes it, the finisher or this thread
            work = group.allreduce([torch.ones(10)])
            future = work.get_future()
            seen: list[bool] = []
            future.then(lambda _, seen=seen: seen.append(True))
            work.wait()
            assert future.done() and future.value()[0][0] == 2
        if rank == 1:
            group.abort()
        work = group.allreduce([torch.ones(1000)])
        future = work.get_future()
        with pytest.raises(dist.DistBackendError):
            work.wait()
        assert future.done()
        with pytest.raises(RuntimeError):
            future.value()

    results = ranks(2, body)
    assert results[0] is None, results
    assert isinstance(results[1], dist.DistBackendError)  # an aborted group starts nothing


def test_a_group_is_shut_down_while_it_waits_for_other_ranks_to_connect() -> None:
    store = dist.HashStore()
    groups: list[Any] = [None, None]

    def make(rank: int) -> None:
        groups[rank] = ProcessGroup(store, rank, 2, timedelta(seconds=3600), name="test")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(make, range(2)))
        started = threading.Event()

        def reduce() -> None:
            started.set()
            groups[0].allreduce([torch.ones(1000)])

        waiting = pool.submit(reduce)  # the first all-reduce connects, and rank 1 does not come
        started.wait(patience(20))
        time.sleep(0.1)
        began = time.monotonic()
        groups[0].shutdown()
        with pytest.raises(dist.DistBackendError, match="closed"):
            waiting.result(patience(20))
        assert time.monotonic() - began < patience(2)
    groups[1].shutdown()


def test_a_short_wait_ends_and_the_operation_goes_on() -> None:
    gate = threading.Event()

    def wait(limit_s: float | None) -> None:
        if not gate.wait(limit_s):
            raise WaitTimeoutError(f"not within {limit_s} s")

    finisher = Finisher("test")
    work = TorchWork(wait, gate.is_set, [torch.ones(1)], finisher)
    with pytest.raises(dist.DistBackendError, match="not within"):
        work.wait(timedelta(seconds=0.05))
    future = work.get_future()  # the finisher waits as well now
    with pytest.raises(dist.DistBackendError, match=r"not .*within"):
        work.wait(timedelta(seconds=0.05))
    assert not work.is_completed() and not work.is_success()
    gate.set()
    assert work.wait() and work.is_success()
    future.wait()
    finisher.close(5)


def test_options_from_the_environment() -> None:
    env = {
        "GEARTRAIN_REDUCERS": "10.0.0.7:7777, cpu-1.example:7778",
        "GEARTRAIN_ALLREDUCE_WIRE_DTYPE": "bfloat16",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    options = BackendOptions.from_environment(env)
    assert options.reducers == ("10.0.0.7:7777", "cpu-1.example:7778")
    assert options.shares == "auto" and options.epoch == 2
    assert options.wire_dtype_of(torch.float32) == "bfloat16" and options.wire_dtype_of(torch.int32) is None
    shares = BackendOptions.from_environment({"GEARTRAIN_ALLREDUCE_SHARES": "0.25,0.75"}).shares
    assert shares == (0.25, 0.75)
    assert BackendOptions.from_environment({}) == BackendOptions()


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("GEARTRAIN_REDUCERS", "10.0.0.7", "host:port"),
        ("GEARTRAIN_ALLREDUCE_SHARES", "half", "numbers separated by commas"),
        ("GEARTRAIN_ALLREDUCE_SHARES", "1,1.2.3", "numbers separated by commas"),
        ("GEARTRAIN_ALLREDUCE_WIRE_DTYPE", "fp8", "bfloat16 or float16"),
        ("GEARTRAIN_ALLREDUCE_ON_REDUCER_LOSS", "ignore", "raise or continue"),
        ("GEARTRAIN_ALLREDUCE_HIERARCHICAL", "yes", "0 or 1"),
        ("GEARTRAIN_SECRET_FILE", "/nonexistent/secret", "No such file"),
    ],
)
def test_a_variable_that_is_wrong_is_named(variable: str, value: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        BackendOptions.from_environment({variable: value})
    assert variable in str(caught.value)


def test_a_secret_comes_from_a_file_without_its_last_line_end(tmp_path: Any) -> None:
    (tmp_path / "secret").write_text("hunter2\n")
    assert BackendOptions.from_environment({"GEARTRAIN_SECRET_FILE": str(tmp_path / "secret")}).secret == b"hunter2"
    assert BackendOptions.from_environment({"GEARTRAIN_SECRET": "x"}).secret == b"x"


def test_a_subgroup_gets_the_numbers_of_its_ranks() -> None:
    options = BackendOptions(reducers=("a:1", "b:2"), shares=(0.1, 0.2, 0.3, 0.4, 0, 0), rates=(1, 2, 3, 4, 5, 6))
    part = options.of_ranks([1, 3], world_size=4)
    assert part.rates == (2, 4, 5, 6)
    assert part.shares == pytest.approx((1 / 3, 2 / 3, 0, 0))
    with pytest.raises(ValueError, match="4 ranks and 2 reducers, found 3"):
        BackendOptions(reducers=("a:1", "b:2"), rates=(1, 2, 3)).of_ranks([0], 4)


def test_a_group_of_the_next_epoch_leaves_a_reducer_out() -> None:
    from geartrain.collectives import Reducer

    store = dist.HashStore()
    with Reducer("127.0.0.1:0") as goes, Reducer("127.0.0.1:0") as stays:

        def run(rank: int) -> None:
            for epoch, reducers in enumerate(((goes.address, stays.address), (stays.address,))):
                options = BackendOptions(reducers=reducers, epoch=epoch)
                group = ProcessGroup(store, rank, 2, timedelta(seconds=20), name="test", options=options)
                group.allreduce([t := torch.ones(100_000)]).wait()
                assert t[0] == 2
                group.shutdown()

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(run, range(2)))
        assert (goes.metrics()["groups_served"], stays.metrics()["groups_served"]) == (1, 2)


def test_the_rest_of_a_broken_group_opens_anew_with_a_later_epoch_beside_the_same_reducer() -> None:
    """What torchft does: a quorum of those who are left, a store prefix of its own, and the next epoch."""
    from geartrain.collectives import Reducer

    store = dist.HashStore()
    broken = threading.Barrier(3)
    minute = timedelta(seconds=20)

    with Reducer("127.0.0.1:0") as reducer:

        def run(rank: int) -> Any:
            options = BackendOptions(reducers=(reducer.address,), shares=(0.2, 0.2, 0.2, 0.4))
            first = ProcessGroup(dist.PrefixStore("0", store), rank, 3, minute, name="quorum", options=options)
            first.allreduce([t := torch.full((100_000,), 1.0)]).wait()
            assert t[0] == 3
            broken.wait(patience(20))
            if rank == 1:
                first.abort()
                return None
            with pytest.raises(RuntimeError):
                first.allreduce([torch.ones(100_000)]).wait()
            first.abort()
            options = BackendOptions(reducers=(reducer.address,), shares=(0.3, 0.3, 0.4), epoch=1)
            second = ProcessGroup(dist.PrefixStore("1", store), rank // 2, 2, minute, name="quorum", options=options)
            for _ in range(3):
                second.allreduce([t := torch.full((100_000,), 1.0 + rank)]).wait()
                assert t[0] == 4
            second.shutdown()
            return None

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(run, range(3)))
        assert reducer.metrics()["groups_served"] >= 2


def test_two_jobs_with_groups_of_one_name_share_a_reducer() -> None:
    from geartrain.collectives import Reducer

    with Reducer("127.0.0.1:0") as reducer:
        options = BackendOptions(reducers=(reducer.address,), shares=(0.0, 0.0, 1.0))

        def job(number: int) -> list[Any]:
            def body(group: ProcessGroup, rank: int) -> None:
                for i in range(10):
                    group.allreduce([t := torch.full((50_000,), float(number + i + rank))]).wait()
                    assert bool((t == 2 * (number + i) + 1).all())

            return ranks(2, body, options)

        with ThreadPoolExecutor(2) as pool:
            for found in pool.map(job, (100, 200)):
                right(found)
