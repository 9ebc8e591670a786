"""Publishers and readers that are killed, replaced or late: the last whole version is there, and files go."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from deadlines import patience
from weights_processes import filled, heard, kill, run

from geartrain import weights
from geartrain.errors import GeartrainError, IncompatibleStoreError, WaitTimeoutError


def test_a_publisher_killed_in_the_middle_leaves_the_version_before(host: Path) -> None:
    child = run(
        "p = weights.Publisher('p', directory=sys.argv[1])\n"
        "p.publish(1, filled(1)); p.publish(2, filled(2))\n"
        "with p._writer.writing(3, 5) as views:\n"
        "    views[0][:500] = 3\n"
        "    say('half'); sys.stdin.read()",
        host,
    )
    assert heard(child) == "half"
    with weights.Reader("p", directory=host) as reader:
        kill(child)
        for _ in range(2):
            assert {int(v) for a in reader.latest().values() for v in np.unique(a)} == {2}
        with pytest.raises(WaitTimeoutError, match="no publisher of it is alive"):
            reader.latest(at_least=3, timeout_s=0.02)
        with weights.Publisher("p", directory=host) as again:  # carries on with the same memory
            inode = (host / "geartrain-weights.p").stat().st_ino
            assert reader.latest().version == 2
            again.publish(3, filled(3))
            assert (host / "geartrain-weights.p").stat().st_ino == inode
            assert {int(v) for a in reader.latest(at_least=3).values() for v in np.unique(a)} == {3}


@pytest.mark.parametrize("step", ["slot", "head", "wake"])
def test_a_publisher_killed_at_any_step_of_a_commit_leaves_a_whole_version(host: Path, step: str) -> None:
    child = run(
        "from geartrain.weights import segment\n"
        "p = weights.Publisher('p', directory=sys.argv[1])\n"
        "for v in (1, 2, 3): p.publish(v, filled(v))\n"
        "S, put, wake = segment.WeightsSegment, segment.WeightsSegment._put, segment.WeightsSegment.wake_readers\n"
        "def dying_put(self, record, at):\n"
        "    if not int(record['sequence']): return put(self, record, at)\n"  # the claim
        "    wanted = segment.SLOT if sys.argv[2] == 'slot' else segment.HEAD\n"
        "    if record.dtype == wanted:\n"
        "        half = segment.seal(record)[: record.dtype.itemsize // 2]\n"
        "        self._bytes[at : at + len(half)] = np.frombuffer(half, np.uint8)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    put(self, record, at)\n"
        "def dying_wake(self): os.kill(os.getpid(), signal.SIGKILL)\n"
        "if sys.argv[2] == 'wake': S.wake_readers = dying_wake\n"
        "else: S._put = dying_put\n"
        "say('ready'); sys.stdin.readline(); p.publish(4, filled(4))",
        host,
        step,
    )
    assert heard(child) == "ready"
    with weights.Reader("p", directory=host) as reader:
        child.communicate("go\n")
        assert child.returncode == -signal.SIGKILL
        version = 4 if step == "wake" else 3
        found = reader.latest()
        assert found.version == version
        assert {int(v) for a in found.values() for v in np.unique(a)} == {version}
        with weights.Publisher("p", directory=host) as again:
            again.publish(5, filled(5))
            assert reader.latest().version == 5


def test_a_new_publisher_may_bring_other_weights(host: Path) -> None:
    with weights.Reader("p", directory=host) as reader:
        with weights.Publisher("p", directory=host) as publisher:
            publisher.publish(9, filled(9))
            old = reader.latest()
        with weights.Publisher("p", directory=host) as publisher:
            assert reader.latest().version == 9  # until there is something new
            publisher.publish(1, {"c": np.ones(3)})
            assert list(reader.latest()) == ["c"]
            assert (old["a"] == 9).all()


def test_a_waiting_reader_follows_to_the_file_of_a_new_publisher(host: Path) -> None:
    found: list[list[str]] = []
    with weights.Reader("p", directory=host) as reader:
        with weights.Publisher("p", directory=host) as publisher:
            publisher.publish(1, filled(1))
        thread = threading.Thread(target=lambda: found.append(list(reader.latest(at_least=2, timeout_s=patience(60)))))
        thread.start()
        with weights.Publisher("p", directory=host) as publisher:
            publisher.publish(2, {"c": np.ones(3)})
            thread.join(patience(10))
    assert found == [["c"]]


def test_a_reader_whose_file_lost_its_name_finds_the_next_one(host: Path) -> None:
    with weights.Reader("p", directory=host) as reader:
        with weights.Publisher("p", directory=host) as publisher:
            publisher.publish(1, filled(1))
            assert reader.latest().version == 1
        (host / "geartrain-weights.p").unlink()
        with weights.Publisher("p", directory=host) as publisher:
            publisher.publish(2, filled(2))
            assert reader.latest(timeout_s=0).version == 2


def test_there_is_one_publisher(host: Path) -> None:
    with (
        weights.Publisher("p", directory=host),
        pytest.raises(GeartrainError, match="a publisher on this host already"),
    ):
        weights.Publisher("p", directory=host)


def test_what_everybody_left_by_being_killed_is_removed_later(host: Path) -> None:
    child = run(
        "p = weights.Publisher('p', directory=sys.argv[1]); p.publish(1, filled(1)); say('x'); sys.stdin.read()", host
    )
    heard(child)
    assert weights.reap(host) == []
    kill(child)
    assert weights.reap(host) == ["p"]


def test_the_last_reader_removes_what_a_killed_publisher_left(host: Path) -> None:
    child = run(
        "p = weights.Publisher('p', directory=sys.argv[1]); p.publish(1, filled(1)); say('x'); sys.stdin.read()", host
    )
    heard(child)
    with weights.Reader("p", directory=host) as reader:
        kill(child)
        held = reader.latest()
    assert not list(host.iterdir())
    assert (held["a"] == 1).all()


def test_a_file_that_is_something_else_is_refused(host: Path) -> None:
    path = host / "geartrain-weights.p"
    for content, why in ((b"", "too small"), (b"x" * 8192, "no segment of weights")):
        path.write_bytes(content)
        with pytest.raises(IncompatibleStoreError, match=why):
            weights.Reader("p", directory=host)
        path.unlink()


# --- what holds a version, when it ends in odd ways -------------------------------------------------------------------


def test_a_forked_child_that_drops_a_snapshot_leaves_the_parents_hold(host: Path, fork: Callable[..., int]) -> None:
    with weights.Publisher("p", directory=host, buffers=2) as publisher, weights.Reader("p", directory=host) as reader:
        publisher.publish(1, filled(1))
        held = [reader.latest()]

        def body() -> int:
            held.clear()
            gc.collect()
            reader.close()
            return 0

        assert os.waitpid(fork(body), 0)[1] == 0
        publisher.publish(2, filled(2))
        with pytest.raises(weights.BuffersHeldError):
            publisher.publish(3, filled(3), timeout_s=0.05)
        assert (held[0]["a"] == 1).all()
        held.clear()
        publisher.publish(3, filled(3), timeout_s=patience(10))


def test_a_snapshot_that_outlives_its_reader_wakes_the_publisher_when_it_is_dropped(host: Path) -> None:
    with weights.Publisher("p", directory=host, buffers=2) as publisher:
        publisher.publish(1, filled(1))
        with weights.Reader("p", directory=host) as reader:
            held = [reader.latest()]
        del reader
        gc.collect()
        publisher.publish(2, filled(2))
        array = held[0]["a"]
        held.clear()
        with pytest.raises(weights.BuffersHeldError):  # the array alone holds it
            publisher.publish(3, filled(3), timeout_s=0.05)
        assert (array == 1).all()
        waits = threading.Thread(target=publisher.publish, args=(3, filled(3)), kwargs={"timeout_s": 60.0})
        waits.start()
        time.sleep(0.05)
        began_s = time.monotonic()
        del array
        waits.join(patience(20))
        assert not waits.is_alive() and time.monotonic() - began_s < patience(5)


@pytest.mark.parametrize(
    "end",
    [
        "",
        "os.fork() or time.sleep(0.1)",
        *(
            pytest.param(end, marks=pytest.mark.slow)
            for end in ("reader.close()", "del snapshot, reader", "publisher.close()")
        ),
    ],
)
def test_daemon_threads_that_read_a_version_do_not_hinder_the_end_of_a_process(host: Path, end: str) -> None:
    code = f"""
import os, sys, threading, time
import numpy as np
from geartrain import weights
publisher = weights.Publisher("p", directory=sys.argv[1], buffers=2)
publisher.publish(1, {{"a": np.ones(300_000)}})
reader = weights.Reader("p", directory=sys.argv[1])
snapshot = reader.latest()
begun = threading.Barrier(4)
def read(held):
    begun.wait()
    while True:
        assert held["a"].sum() == 300_000
def take():
    begun.wait()
    while True:
        with weights.Reader("p", directory=sys.argv[1]) as mine:
            mine.latest()
for target, given in ((read, (snapshot,)), (read, (dict(snapshot),)), (take, ())):
    threading.Thread(target=target, args=given, daemon=True).start()
begun.wait()
time.sleep(0.02)
{end}
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, str(host)], capture_output=True, timeout=patience(60), check=False
    )
    assert ended.returncode == 0, ended.stderr.decode()
    weights.reap(host)
    assert list(host.iterdir()) == []
