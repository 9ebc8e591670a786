"""Server-side batching: when batches run, what they return, and how many wait."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from deadlines import patience
from rpc_functions import add, batch_sizes, triple

from geartrain import rpc
from geartrain.errors import ArgumentError, BusyError, WaitTimeoutError
from geartrain.rpc.registry import functions


class Asked:
    """A call, as a batch sees it: its arguments, and the result or the error that it got."""

    cancelled = False

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.kwargs: dict[str, Any] = {}
        self.value: Any = None
        self.error: BaseException | None = None

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        self.value, self.error = value, error


def asked(*args: Any) -> Any:
    return Asked(*args)


def test_batches_are_run_when_full_or_when_time_is_up(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    batch_sizes.clear()
    futures = [client.call_async("server", "double", i) for i in range(8)]
    assert [future.result() for future in futures] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert batch_sizes == [4, 4]
    batch_sizes.clear()
    before = rpc.batch_stats(triple)
    futures = [client.call_async("server", "triple", i) for i in range(2)]
    assert [future.result() for future in futures] == [0, 3]
    assert sum(batch_sizes) == 2  # in one batch, unless the second call took longer to come than the first waits
    until_s = time.monotonic() + patience(5)
    while (stats := rpc.batch_stats(triple)).calls < before.calls + 2:  # it is counted after the answers have left
        assert time.monotonic() < until_s
        time.sleep(0.001)
    assert stats.full == before.full
    assert stats.waited.quantile(0.0) >= 0.018  # of each call's batch, by a histogram's steps
    rows = [client.call_async("server", "total", np.full(5, i)) for i in range(3)]
    assert [int(future.result()) for future in rows] == [0, 5, 10]


def test_a_stacked_batch_may_be_answered_by_arrays_by_name(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    asked = [client.call_async("server", "halves", np.full(4, i, "float32"), np.int64(0)) for i in range(3)]
    for i, future in enumerate(asked):
        answer = future.result()
        assert sorted(answer) == ["half", "sum"]
        np.testing.assert_array_equal(answer["half"], np.full(4, i / 2, "float32"))
        assert float(answer["sum"]) == 4 * i
    asked = [client.call_async("server", "halves", np.full(4, i, "float32"), np.int64(i // 2)) for i in range(3)]
    for future in asked:
        with pytest.raises(ArgumentError, match=r"got 3 calls and returned 'sum' as \(2,\), not 3 rows"):
            future.result()
    with pytest.raises(ArgumentError, match="only with stack=True"):
        client.call("server", "unstacked_dict", 1)


@pytest.mark.parametrize(
    "returned", [None, np.float64(3), np.array(3.0), iter([1])], ids=["None", "number", "0-d", "iterator"]
)
def test_a_batched_function_that_returns_no_sequence_is_told_so(
    pair: tuple[rpc.Node, rpc.Node], returned: object
) -> None:
    _, client = pair

    @rpc.batched(max_size=1)
    def no_sequence(values: list[int]) -> object:
        return returned

    try:
        with pytest.raises(ArgumentError, match=f"got 1 calls and returned a {type(returned).__name__}, not a seq"):
            client.call("server", "no_sequence", 1)
    finally:
        functions.pop("no_sequence", None)


def test_a_full_queue_refuses_more(pair: tuple[rpc.Node, rpc.Node]) -> None:
    from geartrain.rpc.batching import Batcher

    batcher = Batcher(lambda values: values, max_size=3, max_wait_us=None, max_queued=3, stack=False)
    for i in range(2):
        batcher.submit(asked(i))
    batcher._max_queued = 2
    with pytest.raises(BusyError):
        batcher.submit(asked(9))


def test_a_batched_function_tells_how_long_its_batches_take(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    done: list[rpc.BatchDone] = []
    batches = iter(range(10))
    longest_wait_s = patience(0.1)  # the last call waits for another so long, and no two of the others longer

    @rpc.batched(max_size=2, max_wait_us=int(longest_wait_s * 1e6), on_batch=done.append)
    def timed(values: list[int]) -> list[int]:
        time.sleep(0.02)
        if next(batches) == 1:
            raise ValueError("the second one")
        return values

    try:
        futures = [client.call_async("server", "timed", i) for i in range(5)]
        errors = [future.exception() for future in futures]
        assert [type(error).__name__ for error in errors] == ["NoneType"] * 2 + ["ValueError"] * 2 + ["NoneType"]
        until_s = time.monotonic() + patience(5)
        while len(done) < 3 and time.monotonic() < until_s:
            time.sleep(0.001)  # it is told of a batch after the answers have left
        assert [one.size for one in done] == [2, 2, 1]
        for one in done:
            assert one.asked_s <= one.began_s <= one.returned_s - 0.02 <= one.answered_s
        assert isinstance(done[1].error, ValueError)
        stats = rpc.batch_stats(timed)
        assert (stats.calls, stats.batches, stats.full, stats.errors, stats.sizes) == (5, 3, 2, 1, {2: 2, 1: 1})
        assert stats.ran.count == 3
        assert 0.018 < stats.ran.quantile(0.5) <= stats.took.quantile(0.99) <= stats.took.most_s
        assert stats.waited.most_s >= longest_wait_s  # of the last one
        assert rpc.batch_stats("timed").batches == 3
        with pytest.raises(LookupError, match="no batched function 'add'"):
            rpc.batch_stats(add)
    finally:
        del functions["timed"]


def test_batches_that_never_return_hold_up_no_other() -> None:
    stuck, seen = threading.Event(), []

    @rpc.batched(max_size=8, max_wait_us=1_000)
    def moody(values: list[int]) -> list[int]:
        seen.append(values)
        if values[0] < 3:
            stuck.wait(patience(20))
        return values

    try:
        with (
            rpc.Node("server", timeout_s=patience(20)) as server,
            rpc.Node("client", peers={"server": server.address}) as client,
        ):
            lost = []
            assert client.call("server", "add", 1, 1) == 2  # connected: the deadlines below are the calls' alone
            for i in range(3):
                lost.append(client.call_async("server", "moody", i, timeout_s=patience(0.3)))
                until_s = time.monotonic() + patience(5)
                while len(seen) <= i:
                    assert time.monotonic() < until_s
                    time.sleep(0.001)
            assert client.call("server", "moody", 7, timeout_s=patience(5)) == 7
            for one in lost:
                with pytest.raises(WaitTimeoutError):
                    one.result()
            stuck.set()
    finally:
        stuck.set()
        del functions["moody"]


def test_calls_of_another_shape_dtype_or_number_of_arguments_are_a_batch_of_their_own() -> None:
    from geartrain.rpc.batching import Batcher

    seen = []

    def twice(obs: np.ndarray) -> np.ndarray:
        seen.append((obs.shape, str(obs.dtype)))
        return 2 * obs

    batcher = Batcher(twice, max_size=7, max_wait_us=None, max_queued=7, stack=True)
    given = [
        (np.full(3, 1, np.float32),),
        (np.full(4, 2, np.float32),),
        (np.full(3, 3, np.float64),),
        (np.full(3, 4, np.float32), "one too many"),
        ([[1, 2], [3]],),  # ragged
        (np.full(3, 5, np.float32),),
        ([6, 7],),
    ]
    pending = [asked(*args) for args in given]
    for one in pending:
        batcher.submit(one)
    assert seen == [((2, 3), "float32"), ((1, 4), "float32"), ((1, 3), "float64"), ((1, 2), "int64")]
    assert [type(one.error) for one in pending] == [type(None)] * 3 + [TypeError, ValueError] + [type(None)] * 2
    for one, args in zip(pending, given, strict=True):
        if one.error is None:
            assert np.asarray(one.value).dtype == np.asarray(args[0]).dtype
            np.testing.assert_array_equal(one.value, 2 * np.asarray(args[0]))
    assert batcher.stats().calls == 7
    unstacked = Batcher(lambda a, b: [a[0] + b[0]], max_size=2, max_wait_us=None, max_queued=2, stack=False)
    wrong, right = asked(1), asked(1, 2)
    for one in (wrong, right):
        unstacked.submit(one)
    assert isinstance(wrong.error, TypeError)
    assert right.value == 3
