"""The scheduler of calls, without connections or threads: its rules one by one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from geartrain.errors import BusyError, GeartrainError
from geartrain.rpc.batching import Batcher
from geartrain.rpc.protocol import CALL
from geartrain.rpc.scheduler import Call, Scheduler, about_to_wait, current


class _Session:
    """A client, with what it got by the number of its call: results, or types of errors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.replies: dict[int, Any] = {}

    def reply(self, kind: int, tag: int, value: Any = None, error: BaseException | None = None) -> None:
        assert tag not in self.replies
        self.replies[tag] = value if error is None else type(error).__name__


class Harness:
    """A scheduler whose threads are run when the test says so, and whose functions and results are names."""

    def __init__(self, *, max_threads: int = 4, max_open: int = 4, threads: int = 1000) -> None:
        self.started: list[Callable[[], object]] = []
        self.executed: list[str] = []
        self.stepped_aside = 0
        self.during: dict[str, Callable[[], object]] = {}
        self._threads_left = threads
        self._tags = 0
        self.scheduler = Scheduler(
            "server",
            self,  # type: ignore[arg-type]  # its `start` is all that is used
            self._step_aside,
            max_threads=max_threads,
            max_open=max_open,
            max_queued_bytes=1000,
        )

    def start(self, run: Callable[[], object], what: str) -> None:
        if self._threads_left == 0:
            raise GeartrainError("cannot start a thread")
        self._threads_left -= 1
        self.started.append(run)

    def run_started(self) -> None:
        while self.started:
            outer, current.call = current.call, None  # as in a thread of its own
            try:
                self.started.pop(0)()
            finally:
                current.call = outer

    def _execute(self, name: str) -> Any:
        self.executed.append(name)
        return self.during.get(name, lambda: None)()

    def _step_aside(self) -> None:
        self.stepped_aside += 1

    def session(self, name: str) -> Any:
        one: Any = _Session(name)
        self.scheduler.add(one)
        return one

    def ask(self, session: Any, name: str, *, ordered: bool = True, until_s: float = 1e9) -> Call | None:
        """A new call, if this thread is to run it."""
        self._tags += 1
        call = Call(session, CALL, self._tags, self._execute, (name,), {}, 10, until_s, ordered)
        return call if self.scheduler.admit(call) else None

    def idle(self, *sessions: Any) -> bool:
        """Whether a full set of calls could start, and nothing is left of what ran."""
        left = sum(self.scheduler.open_calls(one) for one in sessions)
        other = self.session("other")
        calls = [self.ask(other, "probe", ordered=False) for _ in range(self.scheduler._max_threads)]
        full = all(calls) and self.ask(other, "one too many", ordered=False) is None
        return full and not left and self.scheduler.backlog == 1


def test_a_sessions_calls_run_in_order_and_other_sessions_beside_it() -> None:
    harness = Harness()
    a, b = harness.session("a"), harness.session("b")
    first = harness.ask(a, "a1")
    assert first is not None
    assert harness.ask(a, "a2") is None
    assert harness.ask(a, "a3") is None
    beside = harness.ask(b, "b1")
    concurrent = harness.ask(a, "a-any", ordered=False)
    assert beside is not None and concurrent is not None
    for worker in (beside, concurrent, first):
        harness.scheduler.run(worker)
    assert harness.executed == ["b1", "a-any", "a1", "a2", "a3"]
    assert not harness.started
    assert harness.idle(a, b)


def test_the_turn_passes_when_a_function_waits_for_a_call_of_its_own() -> None:
    harness = Harness(max_threads=1)
    a = harness.session("a")
    first = harness.ask(a, "a1")
    assert first is not None
    assert harness.ask(a, "a2") is None

    def wait() -> None:
        about_to_wait()
        about_to_wait()  # again, which changes nothing
        assert len(harness.started) == 1
        harness.run_started()  # another thread, while this one waits
        assert harness.executed == ["a1", "a2"]
        third = harness.ask(a, "a3")  # the turn is free, and so is a thread's place
        assert third is not None
        harness.scheduler.run(third)

    harness.during["a1"] = wait
    harness.scheduler.run(first)
    assert harness.executed == ["a1", "a2", "a3"]
    assert harness.stepped_aside == 1
    assert harness.idle(a)


def test_at_most_max_threads_run_and_the_backlog_follows_in_the_same_thread() -> None:
    harness = Harness(max_threads=1)
    a, b, c = (harness.session(name) for name in "abc")
    first = harness.ask(a, "a1")
    assert first is not None
    assert harness.ask(b, "b1") is None
    assert harness.ask(c, "c1") is None
    assert harness.ask(b, "b2") is None
    assert harness.scheduler.backlog == 2
    harness.scheduler.run(first)
    assert harness.executed == ["a1", "b1", "b2", "c1"]
    assert harness.idle(a, b, c)


def test_a_cancelled_call_does_not_begin_and_a_running_one_holds_up_nobody() -> None:
    harness = Harness(max_threads=1)
    a, b = harness.session("a"), harness.session("b")
    first = harness.ask(a, "a1")
    assert first is not None
    harness.ask(a, "a2")
    harness.ask(a, "a3")
    harness.ask(b, "b1")
    harness.ask(b, "b2")
    harness.scheduler.cancel(a, 2)
    harness.scheduler.cancel(b, 4)  # of the backlog, and its turn passes to b2

    def stuck() -> None:
        harness.scheduler.cancel(a, 1)  # by its client, while it runs
        harness.run_started()
        assert sorted(harness.executed) == ["a1", "a3", "b2"]

    harness.during["a1"] = stuck
    harness.scheduler.run(first)
    assert sorted(harness.executed) == ["a1", "a3", "b2"]
    assert list(a.replies) == [3]  # the client forgot the others
    assert harness.idle(a, b)


def test_calls_of_a_lost_client_do_not_begin() -> None:
    harness = Harness(max_threads=1)
    a, b = harness.session("a"), harness.session("b")
    first = harness.ask(a, "a1")
    assert first is not None
    harness.ask(a, "a2")
    harness.ask(a, "a-any", ordered=False)
    harness.ask(b, "b1")

    def lost() -> None:
        harness.scheduler.drop(a)
        harness.run_started()  # b1 has the place of the function that still runs

    harness.during["a1"] = lost
    harness.scheduler.run(first)
    assert harness.executed == ["a1", "b1"]
    assert harness.idle(a, b)


def test_queues_are_bounded() -> None:
    harness = Harness(max_threads=1, max_open=2)
    a = harness.session("a")
    first = harness.ask(a, "a1")
    assert first is not None
    assert harness.ask(a, "a2") is None
    assert harness.ask(a, "a3") is None
    with pytest.raises(BusyError, match="2 calls of 'a' wait"):
        harness.ask(a, "a4")
    for i in range(8):
        assert harness.ask(harness.session(f"b{i}"), f"b{i}") is None
    late = harness.session("late")
    with pytest.raises(BusyError, match="runs 1 functions"):
        harness.ask(late, "late")
    harness.scheduler.run(first)
    assert harness.executed == ["a1", "a2", "a3", *(f"b{i}" for i in range(8))]
    assert harness.idle(a, late)  # what was refused holds no turn


def test_calls_that_find_no_thread_are_refused_and_later_ones_run() -> None:
    harness = Harness(threads=0)
    a = harness.session("a")
    first = harness.ask(a, "a1")
    assert first is not None
    harness.ask(a, "a2")
    harness.ask(a, "a3")
    harness.during["a1"] = about_to_wait
    harness.scheduler.run(first)
    assert harness.executed == ["a1"]
    assert a.replies == {1: None, 2: "BusyError", 3: "BusyError"}
    last = harness.ask(a, "a4")
    assert last is not None
    harness.scheduler.run(last)
    assert harness.executed == ["a1", "a4"]
    assert harness.idle(a)


def test_an_error_of_ours_does_not_end_what_follows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness()
    a = harness.session("a")
    first = harness.ask(a, "a1")
    assert first is not None
    harness.ask(a, "a2")

    def broken(*_: object, **__: object) -> None:
        raise OSError("no reply could be sent")

    monkeypatch.setattr(a, "reply", broken)
    harness.scheduler.run(first)
    assert harness.executed == ["a1", "a2"]
    assert "no reply could be sent" in capsys.readouterr().err
    assert current.call is None
    assert harness.idle(a)


def test_calls_beyond_their_deadline_are_found_wherever_they_are() -> None:
    harness = Harness(max_threads=1)
    a, b = harness.session("a"), harness.session("b")
    running = harness.ask(a, "running", until_s=1.0)
    harness.ask(a, "queued", until_s=1.0)
    harness.ask(b, "in the backlog", until_s=1.0)
    harness.ask(b, "in time", until_s=9.0)
    assert running is not None

    def late() -> None:
        harness.scheduler.expire(5.0)
        harness.run_started()

    harness.during["running"] = late
    harness.scheduler.run(running)
    assert harness.executed == ["running", "in time"]
    assert harness.idle(a, b)


def test_a_call_of_a_future_or_a_batch_is_open_until_that_is_done() -> None:
    harness = Harness(max_threads=1)
    a = harness.session("a")
    futures: dict[str, Future[int]] = {name: Future() for name in ("done", "fails", "cancelled")}
    for name, future in futures.items():
        harness.during[name] = lambda future=future: future  # type: ignore[misc]
        call = harness.ask(a, name)
        assert call is not None  # the one before passed the turn
        harness.scheduler.run(call)
    assert (a.replies, harness.scheduler.open_calls(a)) == ({}, 3)
    batched = Batcher(lambda values: [10 * value for value in values], 1, None, 1, False)
    fourth = Call(a, CALL, 4, batched, (4,), {}, 10, 1e9, True)
    assert harness.scheduler.admit(fourth)
    harness.scheduler.run(fourth)  # which fills its batch
    futures["done"].set_result(7)
    futures["fails"].set_exception(ValueError("no"))
    harness.scheduler.cancel(a, 3)
    assert futures["cancelled"].cancelled()
    assert a.replies == {4: 40, 1: 7, 2: "ValueError"}
    assert harness.idle(a)


def test_one_more_thread_waits_for_messages_than_functions_run() -> None:
    harness = Harness(max_threads=2)
    scheduler = harness.scheduler
    assert [scheduler.claim_receiver() for _ in range(4)] == [True, True, True, False]
    worker = harness.ask(harness.session("a"), "a1")
    assert worker is not None

    def wait() -> None:
        about_to_wait()
        assert [scheduler.claim_receiver() for _ in range(2)] == [True, False]  # one takes its place
        assert not scheduler.retire_receiver()

    harness.during["a1"] = wait
    harness.scheduler.run(worker)
    assert [scheduler.retire_receiver() for _ in range(2)] == [True, False]  # and goes when it is back
