"""Roles on some hosts: those that only simulate feed the learners' stores, reducers are found, errors say who."""

from __future__ import annotations

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
