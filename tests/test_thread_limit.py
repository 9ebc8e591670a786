"""Constructors where the system has no more threads: an error at once, for peers too, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import deadlines
import pytest
from hostile import thread_limit

import geartrain.rpc as rpc
from geartrain.core.threads import DaemonThread
from geartrain.errors import GeartrainError

SUPPORT = Path(__file__).parent / "support"
#: Short tests try one of each kind that joins something.
SHORT = {
    "groups": ("Group: with a reducer", "Group: hierarchical, of hosts"),
    "peers": ("Reader: of another host", "Queue"),
    "stores": ("Store: with a journal", "Replay: of two ranks"),
    "jobs": ("StoreServer", "ActorPool", "PrometheusEndpoint"),
}


@pytest.fixture(scope="module")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "LD_PRELOAD" in os.environ:
        pytest.skip("another library is preloaded")
    made = thread_limit.library(tmp_path_factory.mktemp("thread_limit"))
    if made is None:
        pytest.skip("no C compiler")
    return made


def check(preload: Path, module: str, *names: str) -> None:
    factor = deadlines.factor()
    ran = subprocess.run(
        [sys.executable, "-m", "hostile.thread_limit", module, *names],
        env={
            **os.environ,
            "LD_PRELOAD": str(preload),
            "PYTHONPATH": os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "THREAD_LIMIT_FACTOR": str(factor),
        },
        capture_output=True,
        text=True,
        timeout=600 * factor,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert not ran.stdout, ran.stdout + ran.stderr[-10000:]


@pytest.mark.parametrize("module", SHORT)
def test_what_cannot_start_a_thread_tells_its_peers_at_once_and_leaves_nothing(preload, module):
    check(preload, module, *SHORT[module])


@pytest.mark.slow
@pytest.mark.parametrize("module", ["groups", "peers", "stores", "jobs", "lerobot", "rlinf", "sb3"])
def test_any_public_class_that_cannot_start_a_thread_leaves_nothing(preload, module):
    check(preload, module)


@rpc.function(name="thread_limit.wait_for", concurrent=True)
def wait_for(name: str) -> str:
    _begun.release()
    _set[name].wait(deadlines.patience(20))
    return name


_begun = threading.Semaphore(0)
_set = {name: threading.Event() for name in ("a", "b", "c")}


def test_a_node_that_can_have_no_further_thread_answers_all_calls(monkeypatch):
    start = DaemonThread.start

    def start_or_not(thread: DaemonThread) -> None:
        if "serves" in thread.name:
            raise GeartrainError("no more threads")
        start(thread)

    with rpc.Node("one") as one, rpc.Node("other", peers={"one": one.address}) as other:
        monkeypatch.setattr(DaemonThread, "start", start_or_not)
        calls = []
        for name in _set:  # the first two have a thread each, the third waits for one
            calls.append(other.call_async("one", "thread_limit.wait_for", name))
            _begun.acquire(timeout=0.3)
        for event in _set.values():
            event.set()
        assert [call.result(timeout_s=deadlines.patience(10)) for call in calls] == list(_set)
        assert other.call("one", "thread_limit.wait_for", "a", timeout_s=deadlines.patience(10)) == "a"
