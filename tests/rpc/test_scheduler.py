"""The scheduler of calls, without connections or threads: its rules one by one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from geartrain.errors import BusyError, GeartrainError
from geartrain.rpc.protocol import CALL
from geartrain.rpc.running import about_to_wait, current
from geartrain.rpc.scheduler import Scheduler
from geartrain.rpc.session import Call, ServerSession, Worker


class Harness:
    """A scheduler whose threads are run when the test says so, and whose calls are named by their functions."""

    def __init__(self, *, max_threads: int = 4, max_open: int = 4, threads: int = 1000) -> None:
        self.started: list[Callable[[], object]] = []
        self.executed: list[str] = []
        self.refused: list[str] = []
        self.stepped_aside = 0
        self.during: dict[str, Callable[[], object]] = {}
        self._threads_left = threads
        self._tags = 0
        self.scheduler = Scheduler(
            "server",
            self,  # type: ignore[arg-type]  # its `start` is all that is used
            self._execute,
            lambda call, error: self.refused.append(call.function),
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
            outer, current.worker = current.worker, None  # as in a thread of its own
            try:
                self.started.pop(0)()
            finally:
                current.worker = outer

    def _execute(self, call: Call) -> None:
        self.executed.append(call.function)
        self.during.get(call.function, lambda: None)()

    def _step_aside(self) -> None:
        self.stepped_aside += 1

    def session(self, name: str) -> ServerSession:
        nothing: Any = SimpleNamespace(authenticated=False)
        session = ServerSession(None, 0, nothing, False, nothing)
        session.name = name
        return session

    def admit(self, session: ServerSession, name: str, *, ordered: bool = True, until_s: float = 1e9) -> Worker | None:
        self._tags += 1
        return self.scheduler.admit(Call(session, CALL, self._tags, name, (), {}, 10, until_s), ordered)

    def idle(self, *sessions: ServerSession) -> bool:
        """Whether a full set of workers could start, and nothing is left of what ran."""
        left = [one for one in sessions if one.queue or one.queued_bytes or one.worker or one.running]
        other = self.session("other")
        workers = [self.admit(other, "probe", ordered=False) for _ in range(self.scheduler._max_threads)]
        full = all(workers) and self.admit(other, "one too many", ordered=False) is None
        return full and not left and self.scheduler.backlog == 1


def test_a_sessions_calls_run_in_order_and_other_sessions_beside_it() -> None:
    harness = Harness()
    a, b = harness.session("a"), harness.session("b")
    first = harness.admit(a, "a1")
    assert first is not None
    assert harness.admit(a, "a2") is None
    assert harness.admit(a, "a3") is None
    beside = harness.admit(b, "b1")
    concurrent = harness.admit(a, "a-any", ordered=False)
    assert beside is not None and concurrent is not None
    for worker in (beside, concurrent, first):
        harness.scheduler.run(worker)
    assert harness.executed == ["b1", "a-any", "a1", "a2", "a3"]
    assert not harness.started
    assert harness.idle(a, b)


def test_the_turn_passes_when_a_function_waits_for_a_call_of_its_own() -> None:
    harness = Harness(max_threads=1)
    a = harness.session("a")
    first = harness.admit(a, "a1")
    assert first is not None
    assert harness.admit(a, "a2") is None

    def wait() -> None:
        about_to_wait()
        about_to_wait()  # again, which changes nothing
        assert len(harness.started) == 1
        harness.run_started()  # another thread, while this one waits
        assert harness.executed == ["a1", "a2"]
        third = harness.admit(a, "a3")  # the turn is free, and so is a thread's place
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
    first = harness.admit(a, "a1")
    assert first is not None
    assert harness.admit(b, "b1") is None
    assert harness.admit(c, "c1") is None
    assert harness.admit(b, "b2") is None
    assert harness.scheduler.backlog == 2
    harness.scheduler.run(first)
    assert harness.executed == ["a1", "b1", "b2", "c1"]
    assert harness.idle(a, b, c)


def test_a_cancelled_call_does_not_begin_and_a_running_one_holds_up_nobody() -> None:
    harness = Harness(max_threads=1)
    a, b = harness.session("a"), harness.session("b")
    first = harness.admit(a, "a1")
    assert first is not None
    harness.admit(a, "a2")
    harness.admit(a, "a3")
    harness.admit(b, "b1")
    harness.admit(b, "b2")
    harness.scheduler.cancel(a, 2)
    harness.scheduler.cancel(b, 4)  # of the backlog, and its turn passes to b2

    def stuck() -> None:
        harness.scheduler.cancel(a, 1)  # by its client, while it runs
        harness.run_started()
        assert sorted(harness.executed) == ["a1", "a3", "b2"]

    harness.during["a1"] = stuck
    harness.scheduler.run(first)
    assert sorted(harness.executed) == ["a1", "a3", "b2"]
    assert harness.idle(a, b)


def test_calls_of_a_lost_client_do_not_begin() -> None:
    harness = Harness(max_threads=1)
    a, b = harness.session("a"), harness.session("b")
    first = harness.admit(a, "a1")
    assert first is not None
    harness.admit(a, "a2")
    harness.admit(a, "a-any", ordered=False)
    harness.admit(b, "b1")

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
    first = harness.admit(a, "a1")
    assert first is not None
    assert harness.admit(a, "a2") is None
    assert harness.admit(a, "a3") is None
    with pytest.raises(BusyError, match="2 calls of 'a' wait"):
        harness.admit(a, "a4")
    for i in range(8):
        assert harness.admit(harness.session(f"b{i}"), f"b{i}") is None
    late = harness.session("late")
    with pytest.raises(BusyError, match="runs 1 functions"):
        harness.admit(late, "late")
    harness.scheduler.run(first)
    assert harness.executed == ["a1", "a2", "a3", *(f"b{i}" for i in range(8))]
    assert harness.idle(a, late)  # what was refused holds no turn


def test_calls_that_find_no_thread_are_refused_and_later_ones_run() -> None:
    harness = Harness(threads=0)
    a = harness.session("a")
    first = harness.admit(a, "a1")
    assert first is not None
    harness.admit(a, "a2")
    harness.admit(a, "a3")
    harness.during["a1"] = about_to_wait
    harness.scheduler.run(first)
    assert harness.executed == ["a1"]
    assert harness.refused == ["a2", "a3"]
    last = harness.admit(a, "a4")
    assert last is not None
    harness.scheduler.run(last)
    assert harness.executed == ["a1", "a4"]
    assert harness.idle(a)


def test_an_error_of_ours_does_not_end_what_follows(capsys: pytest.CaptureFixture[str]) -> None:
    harness = Harness()
    a = harness.session("a")
    first = harness.admit(a, "a1")
    assert first is not None
    harness.admit(a, "a2")

    def broken() -> None:
        raise OSError("no reply could be sent")

    harness.during["a1"] = broken
    harness.scheduler.run(first)
    assert harness.executed == ["a1", "a2"]
    assert "no reply could be sent" in capsys.readouterr().err
    assert current.worker is None
    assert harness.idle(a)


def test_calls_beyond_their_deadline_are_found_wherever_they_are() -> None:
    harness = Harness(max_threads=1)
    a, b = harness.session("a"), harness.session("b")
    assert harness.admit(a, "running", until_s=1.0) is not None
    harness.admit(a, "queued", until_s=1.0)
    harness.admit(b, "in the backlog", until_s=1.0)
    harness.admit(b, "in time", until_s=9.0)
    assert sorted(tag for _, tag in harness.scheduler.expired([a, b], 5.0)) == [1, 2, 3]


def test_one_more_thread_waits_for_messages_than_functions_run() -> None:
    harness = Harness(max_threads=2)
    scheduler = harness.scheduler
    assert [scheduler.claim_receiver() for _ in range(4)] == [True, True, True, False]
    worker = harness.admit(harness.session("a"), "a1")
    assert worker is not None

    def wait() -> None:
        about_to_wait()
        assert [scheduler.claim_receiver() for _ in range(2)] == [True, False]  # one takes its place
        assert not scheduler.retire_receiver()

    harness.during["a1"] = wait
    harness.scheduler.run(worker)
    assert [scheduler.retire_receiver() for _ in range(2)] == [True, False]  # and goes when it is back
