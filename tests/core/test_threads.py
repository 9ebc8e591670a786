"""Threads that end with their work, whoever joins them."""

from __future__ import annotations

import os
import threading
import time

import pytest
from deadlines import patience

from geartrain.core.threads import DaemonThread


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
