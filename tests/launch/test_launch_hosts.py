"""One job on two hosts: the same description on each, by itself and under torchrun."""

from __future__ import annotations

import os
import signal

import pytest
from deadlines import patience
from launch_jobs import GROUP

from geartrain.tools.testing.cluster import Hosts

pytest.importorskip("typer")
pytestmark = [
    pytest.mark.skipif(Hosts.viable() is not None, reason=f"no hosts can be made here: {Hosts.viable()}"),
    pytest.mark.timeout(180),
]

REMOTE = """
name = "over-hosts"
timeout_s = {limit_s}
stop_s = 5
directory = "{tests}"
[learner]
run = "launched:learn"
args = {{ steps = 60, pause_s = 0.02, follow = "{folder}" }}
[agent]
run = "launched:serve"
hosts = "{agents}"
[actor]
environments = "launched:environments"
policy = "launched:remote_policy"
"""


@pytest.mark.parametrize("agents", ["all", pytest.param("first", marks=pytest.mark.slow)])
def test_actors_ask_agents_and_weights_follow_over_hosts(hosts_job, tmp_path, agents):
    job = hosts_job(2, REMOTE, agents=agents, folder=tmp_path, interpreters=agents == "first")
    assert job.codes() == [0, 0], job.said()
    found = job.summary(0)["processes"] | job.summary(1)["processes"]
    asked = ["agent-0", "agent-1"] if agents == "all" else ["agent-0"]
    assert sorted(found) == ["actor-0", "actor-1", *asked, "learner-0", "learner-1"]
    for name in ["actor-0", "actor-1", *asked]:
        assert found[name]["version"] > 0, f"{name} saw no version of learner-0's"
        assert found[name]["steps"] > 0


@pytest.mark.slow
def test_under_torchrun_ranks_of_all_hosts_draw_one_batch(hosts_job):
    pytest.importorskip("torch")
    job = hosts_job(2, GROUP, torchrun=True, steps=30)
    assert job.codes() == [0, 0], job.said()
    for i in range(2):
        learner = job.summary(i)["processes"][f"learner-{i}"]
        assert (learner["steps"], learner["samples"]) == (30, 30 * 8)  # half of the global batch
        assert job.summary(i)["outcome"] == "finished"


def test_a_death_on_one_host_ends_the_job_on_both_and_is_named_on_both(hosts_job):
    pytest.importorskip("torch")
    job = hosts_job(2, GROUP, steps=100_000)
    for text in ("learner 1/1,", "samples/s"):
        job.wait_for(1, "launch.log", text)
    os.kill(job.pid(1, "learner-1"), signal.SIGKILL)
    assert job.codes() == [1, 1]
    assert "error: learner-1 was killed by SIGKILL" in job.launcher_said(1)
    assert "error: host 1: learner-1 was killed by SIGKILL" in job.launcher_said(0)


def test_a_host_that_is_gone_ends_the_job_on_the_others(hosts_job):
    pytest.importorskip("torch")
    job = hosts_job(2, GROUP, steps=100_000)
    job.wait_for(0, "launch.log", "samples/s")
    job.kill_launcher(1, signal.SIGKILL)
    assert job.launchers[0].wait(patience(60)) == 1
    assert "error: the launcher of host 1 is lost" in job.launcher_said(0)
