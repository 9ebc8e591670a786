"""One job on two hosts: the same description on each, by itself and under torchrun."""

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

GROUP = """
name = "over-hosts"
timeout_s = {limit_s}
stop_s = 5
directory = "{tests}"
[learner]
run = "launched:learn_tagged"
args = {{ steps = {steps} }}
[role.inserter]
run = "launched:insert"
args = {{ pause_s = 0.002 }}
"""


@pytest.fixture
def hosts():
    with Hosts(2) as made:
        yield made


def start(hosts, tmp_path, text, *before, plain=False):
    """The launchers of both hosts."""
    path = tmp_path / "job.toml"
    path.write_text(text)
    launchers = []
    for i in range(2):
        words = ["launch", str(path), "--folder", str(tmp_path / f"logs{i}"), "--every-s", "2"]
        if plain:
            argv = [sys.executable, "-m", "geartrain", *words, "--hosts", "2", "--host", str(i)]
            argv += ["--master", "host0:29500"]
        else:
            run = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=host0", "--master-port=29500", "--node-rank"]
            argv = [sys.executable, "-m", "torch.distributed.run", *run, str(i), "-m", "geartrain", *words]
        said = (tmp_path / f"launcher{i}.txt").open("w")
        env = {"GEARTRAIN_SECRET": "a secret of this test", "OMP_NUM_THREADS": "1"}
        launchers.append(hosts.popen(i, argv, env=env, stdout=said, stderr=said, cwd=TESTS))
    return launchers


def said(tmp_path, i):
    return (tmp_path / f"launcher{i}.txt").read_text()


def summary(tmp_path, i):
    return json.loads((tmp_path / f"logs{i}" / "summary.json").read_text())


@pytest.mark.parametrize("agents", ["all", pytest.param("first", marks=pytest.mark.slow)])
def test_actors_ask_agents_and_weights_follow_over_hosts(hosts, tmp_path, agents):
    job = REMOTE.format(tests=TESTS, limit_s=patience(100), agents=agents, folder=tmp_path)
    launchers = start(hosts, tmp_path, job, plain=True)
    codes = [launcher.wait(patience(100)) for launcher in launchers]
    assert codes == [0, 0], said(tmp_path, 0) + said(tmp_path, 1)
    found = summary(tmp_path, 0)["processes"] | summary(tmp_path, 1)["processes"]
    asked = ["agent-0", "agent-1"] if agents == "all" else ["agent-0"]
    assert sorted(found) == ["actor-0", "actor-1", *asked, "learner-0", "learner-1"]
    for name in ["actor-0", "actor-1", *asked]:
        assert found[name]["version"] > 0, f"{name} saw no version of learner-0's"
        assert found[name]["steps"] > 0


def test_under_torchrun_ranks_of_all_hosts_draw_one_batch(hosts, tmp_path):
    pytest.importorskip("torch")
    launchers = start(hosts, tmp_path, GROUP.format(tests=TESTS, limit_s=patience(100), steps=30))
    codes = [launcher.wait(patience(100)) for launcher in launchers]
    assert codes == [0, 0], said(tmp_path, 0) + said(tmp_path, 1)
    for i in range(2):
        learner = summary(tmp_path, i)["processes"][f"learner-{i}"]
        assert (learner["steps"], learner["samples"]) == (30, 30 * 8)  # half of the global batch
        assert summary(tmp_path, i)["outcome"] == "finished"


def test_a_death_on_one_host_ends_the_job_on_both_and_is_named_on_both(hosts, tmp_path):
    pytest.importorskip("torch")
    launchers = start(hosts, tmp_path, GROUP.format(tests=TESTS, limit_s=patience(100), steps=100_000), plain=True)
    until_s = time.monotonic() + patience(60)
    while "learner 1/1," not in said(tmp_path, 1) or "samples/s" not in said(tmp_path, 1):
        assert time.monotonic() < until_s, said(tmp_path, 0) + said(tmp_path, 1)
        time.sleep(0.1)
    os.kill(rank_of(str(tmp_path / "logs1"), "learner"), signal.SIGKILL)
    codes = [launcher.wait(patience(60)) for launcher in launchers]
    assert codes == [1, 1]
    assert "error: learner-1 was killed by SIGKILL" in said(tmp_path, 1)
    assert "error: host 1: learner-1 was killed by SIGKILL" in said(tmp_path, 0)


def test_a_host_that_is_gone_ends_the_job_on_the_others(hosts, tmp_path):
    pytest.importorskip("torch")
    launchers = start(hosts, tmp_path, GROUP.format(tests=TESTS, limit_s=patience(100), steps=100_000), plain=True)
    until_s = time.monotonic() + patience(60)
    while "samples/s" not in said(tmp_path, 0):
        assert time.monotonic() < until_s, said(tmp_path, 0) + said(tmp_path, 1)
        time.sleep(0.1)
    os.killpg(launchers[1].pid, signal.SIGKILL)
    launchers[1].wait(patience(20))
    assert launchers[0].wait(patience(60)) == 1
    assert "error: the launcher of host 1 is lost" in said(tmp_path, 0)


def rank_of(folder, role):
    """The pid of a role's process whose logs go to that folder."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            told = dict(entry.partition("=")[::2] for entry in path.read_text().split("\0"))
        except OSError:
            continue
        order = json.loads(told.get("GEARTRAIN_PROCESS", "{}"))
        if order.get("folder") == folder and order.get("role") == role:
            return int(path.parent.name)
    raise AssertionError(f"no {role} of {folder}")
