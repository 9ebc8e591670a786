"""Whole jobs in which somebody is killed at a random moment: they go on as documented, or end with a named error.

All batches check themselves, so a half-written row that was selected fails a learner, and with it the test.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import launched
import preloaded
import pytest
import tagged
from deadlines import patience

import geartrain as gt
from geartrain import launch
from geartrain.core.counters import SharedCounters
from geartrain.errors import GeartrainError, ProcessDiedError

TESTS = Path(__file__).parents[1] / "support"
pytestmark = pytest.mark.usefixtures("preloaded_children")


class Killer(threading.Thread):
    """Kills one process of a role, a random time after the first of the job reports; `killed` names it.

    When another is in its place it makes the file `restarted`.
    """

    def __init__(self, job, role, seed, restarted, longest_s=1.5):
        super().__init__(daemon=True)
        self._job, self._role, self._random, self._longest_s = job, role, random.Random(seed), longest_s
        self._restarted = restarted
        self.killed = ""
        self._over = threading.Event()

    def run(self):
        slots = [f"{role.name}-{i}" for role in self._job.roles for i in range(role.processes)]
        victim = self._random.choice([i for i, name in enumerate(slots) if name.startswith(self._role)])
        while not self._over.wait(0.01):
            try:
                column = SharedCounters.open(f"launch-{self._job.name}").column
                if column("beat_s").any() and column("pid")[victim]:
                    break
            except GeartrainError:
                continue
        if not self._over.wait(self._random.uniform(0, self._longest_s)):
            self.killed = slots[victim]
            pid = int(column("pid")[victim])
            os.kill(pid, signal.SIGKILL)
            while column("pid")[victim] in (0, pid) and not self._over.wait(0.01):
                pass
            self._restarted.touch()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc):
        self._over.set()
        self.join(patience(10))


def run_and_kill(job, role, seed, folder):
    """The summary, or the error, and who was killed."""
    with Killer(job, role, seed, folder.with_name("restarted")) as killer:
        try:
            ended = launch.run(job, folder=folder, live=False)
        except GeartrainError as error:
            ended = error
    return ended, killer.killed


def counting_job(name, until=None, **options):
    return launch.Job(
        name,
        [
            launch.learners(launched.learn, 1, args={"steps": 30, "pause_s": 0.02, "until": until}),
            launch.agents(launched.serve),
            launch.actors(launched.environments, launched.remote_policy, 2),
        ],
        timeout_s=patience(90),
        stop_s=4,
        directory=str(TESTS),
        **options,
    )


def tagged_job(name, steps=30, pause_s=0.0, until=None, **options):
    """Two ranks that draw one global batch, and two inserters that die in the middle of rows unless they pause."""
    return launch.Job(
        name,
        [
            launch.learners(launched.learn_tagged, 2, args={"steps": steps, "until": until}),
            launch.Role("inserter", launched.insert, 2, kind="actor", max_restarts=3, args={"pause_s": pause_s}),
        ],
        timeout_s=patience(90),
        stop_s=4,
        directory=str(TESTS),
        **options,
    )


def check_going_on(role, seed, name, tmp_path, make):
    """A death of this role does not end the job, and leaves a store without fault."""
    job = make(name, keep_store="always", until=str(tmp_path / "restarted"))
    ended, killed = run_and_kill(job, role, seed, tmp_path / "logs")
    assert isinstance(ended, launch.Summary), ended
    assert killed, "the job was over before anybody was killed"
    assert ended.restarts[role] == 1
    assert ended.processes[killed]["restarts"] == 1
    with gt.Store.open(name, adopt=True) as store:
        assert store.audit() == []
        counts = store.stats()
        assert counts["writing"] == counts["open"] == 0
        assert counts["inserted"] > 0


def check_rank_lost(seed, name, tmp_path):
    """A rank's death is a named error; the store is there for the next start, with the rows it had, all whole."""
    job = tagged_job(name, steps=100_000, pause_s=0.002)
    ended, killed = run_and_kill(job, "learner", seed, tmp_path / "first")
    assert isinstance(ended, ProcessDiedError), ended
    assert f"{killed} was killed by SIGKILL" in str(ended)
    rows = 0
    left = Path(f"/dev/shm/geartrain.{name}")
    if left.exists():  # the moment may have been before the store was made
        peeked = gt.Store.open(name, mode="r", adopt=True)
        rows = len(peeked)
        assert peeked.native.live_clients() == 0
    summary = launch.run(tagged_job(name, steps=20, pause_s=0.002), folder=tmp_path / "second", live=False)
    assert summary.outcome == "finished"
    found = int((tmp_path / "second" / "learner-0.log").read_text().split("found ")[1].split(" rows")[0])
    assert found >= rows, "rows that survived were not adopted"
    assert not left.exists()  # the second one went well


def check_launcher_killed(seed, name, tmp_path):
    """All die with the launcher, and the next start finds the rows."""
    code = (
        "import sys; from geartrain import launch; import test_launch_failures as t; "
        "launch.run(t.tagged_job(sys.argv[1], steps=100_000), folder=sys.argv[2], live=False)"
    )
    launcher = preloaded.Popen(
        [sys.executable, "-c", code, name, str(tmp_path / "first")],
        cwd=TESTS,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    until_s = time.monotonic() + patience(60)
    while True:  # until the learners draw
        assert time.monotonic() < until_s
        try:
            if SharedCounters.open(f"launch-{name}").column("samples").any():
                break
        except GeartrainError:
            pass
        time.sleep(0.02)
    time.sleep(random.Random(seed).uniform(0, 0.5))
    launcher.kill()
    launcher.wait()
    while gt.Store.open(name, mode="r", adopt=True).native.live_clients():
        assert time.monotonic() < until_s
        time.sleep(0.02)
    rows = len(gt.Store.open(name, mode="r", adopt=True))
    assert rows > 0
    with gt.Replay(gt.Store.open(name, adopt=True), gt.selection.Uniform(seed=0), 64, output="numpy") as replay:
        assert tagged.mixed(replay.sample()) == []
        assert replay.stores[0].audit() == []
        replay.stores[0].close(keep=True)
    summary = launch.run(tagged_job(name, steps=20, pause_s=0.002), folder=tmp_path / "second", live=False)
    assert summary.outcome == "finished"
    found = int((tmp_path / "second" / "learner-0.log").read_text().split("found ")[1].split(" rows")[0])
    assert found >= rows, "rows that survived were not adopted; inserters may have added some before the learner looked"


def test_a_job_goes_on_without_a_killed_actor(store_name, tmp_path):
    check_going_on("actor", 1, store_name(), tmp_path, counting_job)


def test_a_job_goes_on_without_a_killed_agent_and_its_actors_wait_for_the_next(store_name, tmp_path):
    check_going_on("agent", 2, store_name(), tmp_path, counting_job)


def test_a_killed_inserter_leaves_no_half_written_row(store_name, tmp_path):
    pytest.importorskip("torch")
    check_going_on("inserter", 3, store_name(), tmp_path, tagged_job)


def test_a_killed_rank_ends_the_job_by_name_and_the_store_is_adopted(store_name, tmp_path):
    pytest.importorskip("torch")
    check_rank_lost(4, store_name(), tmp_path)


def test_a_killed_launcher_takes_all_with_it_but_the_rows(store_name, tmp_path):
    pytest.importorskip("torch")
    check_launcher_killed(5, store_name(), tmp_path)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("role", ["actor", "agent", "inserter", "learner", "launcher"])
def test_the_same_many_times(role, store_name, tmp_path):
    pytest.importorskip("torch")
    for seed in range(100, 112):
        name, path = store_name(), tmp_path / str(seed)
        if role == "learner":
            check_rank_lost(seed, name, path)
        elif role == "launcher":
            check_launcher_killed(seed, name, path)
        else:
            check_going_on(role, seed, name, path, tagged_job if role == "inserter" else counting_job)
