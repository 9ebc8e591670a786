"""Threads that end with their work, whoever joins them."""

from __future__ import annotations

import ast
import functools
import itertools
import os
import threading
import time
from pathlib import Path

import pytest
from deadlines import patience
from hostile.instants import Interruption

import geartrain
from geartrain.core.threads import DaemonThread, ReentrantEvent
from geartrain.errors import GeartrainError


def test_a_join_that_has_no_limit_lasts_as_long_as_the_work():
    go_on = threading.Event()
    thread = DaemonThread(go_on.wait, "test")
    thread.start()
    thread.join(0.01)
    assert thread.is_alive() and thread.daemon
    threading.Timer(0.05, go_on.set).start()
    thread.join()
    assert not thread.is_alive() and thread not in threading.enumerate()


@pytest.mark.parametrize("timeout_s", [None, 100.0])
def test_a_handler_that_comes_into_the_end_of_a_join_does_not_wait_for_itself(timeout_s):
    thread = DaemonThread(lambda: None, "test")
    thread.start()
    lock = getattr(thread, "_tstate_lock", None)
    if lock is None:
        pytest.skip("threads of this Python are joined without a lock of their own, or it has ended already")
    assert lock.acquire(timeout=patience(10)), "the thread has not ended"  # as a join has that is interrupted here
    began_s = time.monotonic()
    thread.join(timeout_s)
    assert time.monotonic() - began_s < patience(10) and not thread.is_alive()
    lock.release()


def test_work_that_raises_is_over(monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda what: raised.append(what.exc_type))
    thread = DaemonThread(lambda: 1 // 0, "test")
    thread.start()
    thread.join(patience(10))
    assert not thread.is_alive() and raised == [ZeroDivisionError]


def test_a_forked_child_has_nobody_to_wait_for():
    go_on = threading.Event()
    thread = DaemonThread(go_on.wait, "test")
    thread.start()
    child = os.fork()
    if child == 0:
        began_s = time.monotonic()
        thread.join()
        os._exit(int(thread.is_alive() or time.monotonic() - began_s > patience(10)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    go_on.set()
    thread.join(patience(10))
    assert not thread.is_alive()


def test_an_event_ends_the_waits_of_all_threads_and_lasts_until_it_is_cleared():
    event, ended = ReentrantEvent(), []
    threads = [DaemonThread(lambda: ended.append(event.wait(patience(10))), "test") for _ in range(4)]
    for thread in threads:
        thread.start()
    assert not event.wait(0.01) and not event.is_set() and not ended
    event.set()
    for thread in threads:
        thread.join(patience(10))
    assert ended == [True] * 4 and event.is_set() and event.wait(0) and event.wait()
    event.clear()
    assert not event.is_set() and not event.wait(0) and not event.wait(-1.0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("call", ["set", "wait", "wait without a limit"])
def test_a_handler_sets_an_event_within_any_line_of_its_calls(call):
    for at in itertools.count():
        event, ended = ReentrantEvent(), []
        beside = DaemonThread(lambda event=event, ended=ended: ended.append(event.wait(patience(10))), "test")
        beside.start()
        calls = {"set": event.set, "wait": functools.partial(event.wait, 100), "wait without a limit": event.wait}
        threading.Timer(0.05, event.set).start()  # and what follows is behind the wait
        one = Interruption(at, event.set)
        began_s = time.monotonic()
        one.during(calls[call])
        beside.join(patience(10))
        assert event.is_set() and ended == [True] and time.monotonic() - began_s < patience(10)
        if one.lines <= at:
            break
    assert at > 2


def test_a_thread_that_the_system_refuses_is_an_error_of_ours_that_names_it_and_the_limits(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    for name in ("_start_new_thread", "_start_joinable_thread"):  # until Python 3.12, and since
        if hasattr(threading, name):
            monkeypatch.setattr(threading, name, refuse)
    thread = DaemonThread(lambda: None, "refused")
    with pytest.raises(GeartrainError, match=r"'refused'.*ulimit -u.*pids.max"):
        thread.start()
    assert not thread.is_alive()


def test_every_thread_of_the_package_is_one_whose_start_is_an_error_of_ours():
    package = Path(geartrain.__file__).parent
    found = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in package.rglob("*.py")
        if "Thread(" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("threading.Thread", "Thread", "threading.Timer")
    ]
    assert not found
