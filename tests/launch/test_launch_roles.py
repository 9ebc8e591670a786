"""Roles on some hosts: those that only simulate feed the learners' stores, reducers are found, errors say who."""

from __future__ import annotations

import json
import os
import signal

import pytest
from deadlines import patience

from geartrain.tools.testing.cluster import Hosts

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
threads = 2
[role.evaluator]
run = "launched:read_lengths"
hosts = "first"
"""


KEYED = """
name = "keyed"
timeout_s = {limit_s}
stop_s = 5
serve_stores = true
directory = "{tests}"
[learner]
run = "launched:learn_keyed"
args = {{ folder = "{folder}" }}
"""

TASKED = """
name = "tasked"
timeout_s = {limit_s}
stop_s = 5
directory = "{tests}"
[hosts]
trainers = "0"
workers = "1"
[learner]
run = "launched_tasks:learn_kept"
hosts = "trainers"
args = {{ rows = {rows}, folder = "{folder}" }}
[role.loader]
run = "launched_tasks:load_rest"
hosts = "workers"
max_restarts = 3
args = {{ rows = {rows} }}
[role.answer]
task = "answer"
run = "launched_tasks:answer"
output = "numpy"
hosts = "workers"
concurrency = 4
[role.judge]
task = "reward"
run = "launched_tasks:Judge"
args = {{ factor = 1 }}
hosts = "workers"
rows = 4
[role.rest]
task = "ref"
run = "launched_tasks:rest"
max_items = 100
of = "tokens"
[role.advantage]
task = "advantage"
run = "launched_tasks:rest"
hosts = "trainers"
"""


@pytest.mark.parametrize("server_dies", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "server dies"])
def test_a_host_without_learners_does_tasks_of_their_store(hosts_job, tmp_path, server_dies):
    """The loader, an async function, a class whose first process is killed, and a task that both hosts do."""
    rows, record = 90, tmp_path / "record"
    job = hosts_job(2, TASKED, rows=rows, folder=tmp_path)
    if server_dies:
        job.wait(lambda: record.exists() and len(record.read_text().splitlines()) > 3, "some batches")
        os.kill(job.pid(0, "store-0"), signal.SIGKILL)
    assert job.codes() == [0, 0], job.said()
    working, training = job.summary(1), job.summary(0)
    assert sorted(working["processes"]) == ["answer-0", "judge-0", "loader-0", "rest-1"]
    assert sorted(training["processes"]) == ["advantage-0", "learner-0", "rest-0", "store-0"]
    assert [each["exit_code"] for each in working["processes"].values()] == [0] * 4, job.said()
    restarts = {role: working["restarts"].get(role, 0) + n for role, n in training["restarts"].items()}
    assert restarts.pop("loader") <= server_dies, "an insert fails whose reply is lost"
    assert {role: n for role, n in restarts.items() if n} == {"judge": 1} | ({"store": 1} if server_dies else {})
    batches = dict(json.loads(line) for line in record.read_text().splitlines())
    assert sorted(number for numbers in batches.values() for number in numbers) == list(range(rows))
    done = json.loads((tmp_path / "logs0" / "learner-0.log").read_text().partition("done ")[2])
    assert done == dict.fromkeys(done, rows), "each task once"
    assert training["store"]["given_up"] == 0


def test_a_host_that_only_simulates_feeds_the_learners_store(hosts_job, tmp_path):
    job = hosts_job(2, FED, steps=40, pause_s=0.01, until=tmp_path / "until")
    job.wait_for(1, "launch.log", "samples/s")
    job.wait(lambda: min(job.column(0, "rows")) > 0, "rows of both actors")
    (tmp_path / "until").touch()
    assert job.codes() == [0, 0], job.said()
    simulating, training = job.summary(0), job.summary(1)
    assert sorted(simulating["processes"]) == ["actor-0", "actor-1"]
    assert sorted(training["processes"]) == ["learner-0", "store-0"]
    rows = [simulating["processes"][f"actor-{i}"]["rows"] for i in range(2)]
    assert training["processes"]["learner-0"]["samples"] >= 40 * 8, "the learner checks what is in each row"
    assert min(rows) > 0 and training["store"]["inserted"] >= 20
    assert not simulating.get("store"), "no store is on a host without learners"
    assert not any(simulating["restarts"].values()) and not any(training["restarts"].values())


@pytest.mark.slow
def test_actors_outlive_the_server_of_their_store(hosts_job, tmp_path):
    rests = FED.replace("args = {{ ", "args = {{ rests = true, ")
    job = hosts_job(2, rests, steps=1, pause_s=0.01, until=tmp_path / "until")
    job.wait_for(1, "launch.log", "samples/s")
    os.kill(job.pid(1, "store-0"), signal.SIGKILL)
    for actor in ("actor-0", "actor-1"):
        job.wait_for(0, f"{actor}.log", "the store's server is lost")
        job.wait_for(0, f"{actor}.log", "goes on with <RemoteStore 'fed' of 'store-0'>")
    (tmp_path / "until").touch()
    assert job.codes() == [0, 0], job.said()
    assert job.summary(1)["restarts"] == {"learner": 0, "actor": 0, "store": 1}
    assert job.summary(0)["restarts"]["actor"] == 0, "the actors' processes went on"
    assert "store-0 was killed by SIGKILL; store-0 started again" in job.said()


@pytest.mark.slow
def test_a_simulators_host_that_is_lost_is_named(hosts_job, tmp_path):
    job = hosts_job(
        2, FED.replace('"0"', '"1"').replace('"1-"', '"0"'), steps=1, pause_s=0.01, until=tmp_path / "until"
    )
    job.wait_for(0, "launch.log", "samples/s")
    job.kill_launcher(1, signal.SIGKILL)
    assert job.launchers[0].wait(patience(60)) == 1
    assert "error: the launcher of host 1 is lost" in job.said()


@pytest.mark.slow
def test_learners_elsewhere_than_on_host_0_find_each_other_and_the_reducers(hosts_job, tmp_path):
    pytest.importorskip("torch")
    job = hosts_job(3, REDUCED)
    assert job.codes() == [0, 0, 0], job.said()
    operations = [job.summary(0)["processes"][f"reducer-{i}"]["steps"] for i in range(2)]
    assert min(operations) >= 5, "both reducers have owned shares of the gradients"
    for i in (1, 2):
        assert job.summary(i)["processes"][f"learner-{i - 1}"]["metrics"]["total"] == 3.0
    assert job.summary(0)["processes"]["evaluator-0"]["rows"] == 2, "two rows of the store of host 1"


@pytest.mark.slow
def test_a_learner_reaches_rows_of_other_hosts_by_their_keys(hosts_job, tmp_path):
    job = hosts_job(2, KEYED, folder=tmp_path)
    assert job.codes() == [0, 0], job.said()
    for i in range(2):
        learner = job.summary(i)["processes"][f"learner-{i}"]
        assert (learner["rows"], learner["metrics"]["theirs"]) == (4, 1.0)
        assert sorted(job.summary(i)["processes"]) == [f"learner-{i}", f"store-{i}"]
