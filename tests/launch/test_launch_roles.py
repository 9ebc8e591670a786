"""Roles on some hosts: those that only simulate feed the learners' stores, reducers are found, errors say who."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from deadlines import patience

from geartrain.tools.testing.cluster import Hosts

TESTS = Path(__file__).parents[1] / "support"

pytest.importorskip("typer")
pytestmark = [
    pytest.mark.skipif(Hosts.viable() is not None, reason=f"no hosts can be made here: {Hosts.viable()}"),
    pytest.mark.timeout(240),
]

FED = """
name = "fed"
timeout_s = {limit_s}
stop_s = 5
directory = "{tests}"
[hosts]
simulators = "0"
trainers = "1-"
[learner]
run = "launched:learn"
hosts = "trainers"
args = {{ steps = {steps}, pause_s = {pause_s}, until = "{until}" }}
[actor]
environments = "launched:environments"
policy = "launched:local_policy"
hosts = "simulators"
processes = 2
"""

REDUCED = """
name = "reduced"
timeout_s = {limit_s}
stop_s = 5
directory = "{tests}"
[learner]
run = "launched:learn_reduced"
hosts = "1-2"
[reducer]
hosts = [0]
processes = 2
[role.evaluator]
run = "launched:read_lengths"
hosts = "first"
"""


class Launched:
    """The launchers of a job on so many hosts."""

    def __init__(self, hosts: Hosts, folder: Path, text: str) -> None:
        self.folder = folder
        path = folder / "job.toml"
        path.write_text(text)
        self.launchers = []
        for i in range(hosts.n):
            words = ["launch", str(path), "--folder", str(folder / f"logs{i}"), "--every-s", "1"]
            argv = [sys.executable, "-m", "geartrain", *words, "--hosts", str(hosts.n), "--host", str(i)]
            out = (folder / f"launcher{i}.txt").open("w")
            env = {"GEARTRAIN_SECRET": "a secret of this test", "OMP_NUM_THREADS": "1"}
            argv += ["--master", "host0:29500"]
            self.launchers.append(hosts.popen(i, argv, env=env, stdout=out, stderr=out, cwd=TESTS))

    def said(self) -> str:
        texts = [f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("launcher*.txt"))]
        return "".join([*texts, *(f"--- {p.name}\n{p.read_text()[-800:]}" for p in self.folder.glob("logs*/*-*.log"))])

    def codes(self) -> list[int]:
        return [launcher.wait(patience(100)) for launcher in self.launchers]

    def summary(self, i: int) -> dict:
        return json.loads((self.folder / f"logs{i}" / "summary.json").read_text())

    def wait_for(self, host: int, log: str, text: str) -> None:
        path = self.folder / f"logs{host}" / log
        until_s = time.monotonic() + patience(60)
        while not path.exists() or text not in path.read_text():
            assert time.monotonic() < until_s, f"{text!r} not in {path}\n{self.said()}"
            assert all(launcher.poll() is None for launcher in self.launchers), self.said()
            time.sleep(0.05)


@pytest.fixture
def make_job(tmp_path):
    made = []

    def make(n, text, **given):
        hosts = Hosts(n)
        made.append(hosts)
        return Launched(hosts, tmp_path, text.format(tests=TESTS, limit_s=patience(100), **given))

    yield make
    for hosts in made:
        hosts.close()


def pid_of(folder, role):
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            told = dict(entry.partition("=")[::2] for entry in path.read_text().split("\0"))
        except OSError:
            continue
        spec = json.loads(told.get("GEARTRAIN_PROCESS", "{}"))
        if spec.get("folder") == str(folder) and spec.get("role") == role:
            return int(path.parent.name)
    raise AssertionError(f"no {role} of {folder}")


def test_a_host_that_only_simulates_feeds_the_learners_store(make_job, tmp_path):
    (tmp_path / "until").touch()
    job = make_job(2, FED, steps=40, pause_s=0.0, until=tmp_path / "until")
    assert job.codes() == [0, 0], job.said()
    simulating, training = job.summary(0), job.summary(1)
    assert sorted(simulating["processes"]) == ["actor-0", "actor-1"]
    assert sorted(training["processes"]) == ["learner-0", "store-0"]
    rows = [simulating["processes"][f"actor-{i}"]["rows"] for i in range(2)]
    assert training["processes"]["learner-0"]["samples"] == 40 * 8, "the learner checks what is in each row"
    assert min(rows) > 0 and training["store"]["inserted"] >= 20
    assert not simulating.get("store"), "no store is on a host without learners"
    assert not any(simulating["restarts"].values()) and not any(training["restarts"].values())


@pytest.mark.slow
def test_actors_outlive_the_server_of_their_store(make_job, tmp_path):
    job = make_job(2, FED, steps=1, pause_s=0.01, until=tmp_path / "until")
    job.wait_for(1, "launch.log", "samples/s")
    os.kill(pid_of(tmp_path / "logs1", "store"), signal.SIGKILL)
    for actor in ("actor-0", "actor-1"):
        job.wait_for(0, f"{actor}.log", "the store's server is lost")
        job.wait_for(0, f"{actor}.log", "goes on with <RemoteStore 'fed' of 'store-0'>")
    (tmp_path / "until").touch()
    assert job.codes() == [0, 0], job.said()
    assert job.summary(1)["restarts"] == {"learner": 0, "actor": 0, "store": 1}
    assert job.summary(0)["restarts"]["actor"] == 0, "the actors' processes went on"
    assert "store-0 was killed by SIGKILL; store-0 started again" in job.said()


@pytest.mark.slow
def test_a_simulators_host_that_is_lost_is_named(make_job, tmp_path):
    job = make_job(2, FED.replace('"0"', '"1"').replace('"1-"', '"0"'), steps=1, pause_s=0.01, until=tmp_path / "until")
    job.wait_for(0, "launch.log", "samples/s")
    os.killpg(job.launchers[1].pid, signal.SIGKILL)
    job.launchers[1].wait(patience(20))
    assert job.launchers[0].wait(patience(60)) == 1
    assert "error: the launcher of host 1 is lost" in job.said()


@pytest.mark.slow
def test_learners_elsewhere_than_on_host_0_find_each_other_and_the_reducers(make_job, tmp_path):
    pytest.importorskip("torch")
    job = make_job(3, REDUCED)
    assert job.codes() == [0, 0, 0], job.said()
    operations = [job.summary(0)["processes"][f"reducer-{i}"]["steps"] for i in range(2)]
    assert min(operations) >= 5, "both reducers have owned shares of the gradients"
    for i in (1, 2):
        assert job.summary(i)["processes"][f"learner-{i - 1}"]["metrics"]["total"] == 3.0
    assert job.summary(0)["processes"]["evaluator-0"]["rows"] == 2, "two rows of the store of host 1"
