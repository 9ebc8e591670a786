"""Jobs on Ray: a cluster of two nodes runs them, and their ends are those of `geartrain launch`."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import pytest
from deadlines import patience
from launch_jobs import processes_of
from ray_cluster import RayCluster, why_not

from geartrain import launch
from geartrain.errors import ArgumentError, GeartrainError
from geartrain.launch.ray import check_answers

TESTS = Path(__file__).parents[1] / "support"
WHY_NOT = why_not()


def clustered(test):
    reason = f"no Ray cluster can be made here: {WHY_NOT}"
    for mark in (pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.skipif(WHY_NOT is not None, reason=reason)):
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="gt-ray-") as folder, RayCluster(Path(folder)) as made:
        yield made


TRAINS = """
name = "on-ray"
timeout_s = {limit_s}
directory = "{tests}"
shared_memory_gb = 0.1
[learner]
run = "launched:learn_tagged"
args = {{ steps = 30 }}
memory_gb = 0.5
[role.inserter]
run = "launched:insert"
args = {{ pause_s = 0.002 }}
cpus = 2
memory_gb = 0.5
"""
#: Runs it, and counts what the object stores of all nodes have ever held.
COUNTS = """
import json, sys
import ray
from geartrain import launch
from geartrain.launch.ray import run
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

ray.init(address=sys.argv[1], logging_level="ERROR")
state = get_state_from_address(sys.argv[1])

def created():
    places = [(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ray.nodes()]
    return [get_memory_info_reply(state, *place).store_stats.cumulative_created_bytes for place in places]

before = created()
summaries = run(launch.load(sys.argv[2]), hosts=2, folder=sys.argv[3], every_s=1)
after = created()
kept = ray.put(bytes(1 << 20))  # that the counter counts
json.dump({"before": before, "after": after, "put": created(), "summaries": [each.__dict__ for each in summaries]},
          open(sys.argv[4], "w"))
"""


@clustered
def test_ranks_of_two_nodes_draw_one_batch_and_no_row_passes_the_object_store(cluster, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "job.toml").write_text(TRAINS.format(limit_s=patience(100), tests=TESTS))
    (tmp_path / "counts.py").write_text(COUNTS)
    words = ["counts.py", cluster.address, "job.toml", "logs", "told.json"]
    driver = cluster.popen([sys.executable, *words], tmp_path / "said.txt", cwd=tmp_path)
    assert driver.wait(patience(150)) == 0, (tmp_path / "said.txt").read_text()
    told = json.loads((tmp_path / "told.json").read_text())
    assert [each["outcome"] for each in told["summaries"]] == ["finished"] * 2
    for host, each in enumerate(told["summaries"]):
        learner = each["processes"][f"learner-{host}"]
        assert (learner["steps"], learner["samples"]) == (30, 30 * 8)  # half of the global batch
        assert each["store"]["inserted"] >= 64, "rows of this node's store"
        assert json.loads((tmp_path / f"logs-host{host}" / "summary.json").read_text()) == each
    row_bytes = 8 * 100  # of launched.learn_tagged's rows, at least
    moved = sum(each["store"]["inserted"] for each in told["summaries"]) * row_bytes
    passed = sum(told["after"]) - sum(told["before"])
    assert passed < 4096 < moved, "a job's rows have gone through Ray's object store"
    assert sum(told["put"]) - sum(told["after"]) >= 1 << 20, "the counter does not count"


STAYS = """
name = "stays-{name}"
timeout_s = {limit_s}
stop_s = 5
directory = "{tests}"
[learner]
run = "launched:linger"
"""


def started(cluster, tmp_path, *words):
    """A job whose learners stay, on both nodes: its driver, and the file of what it says."""
    (tmp_path / "job.toml").write_text(STAYS.format(name=os.getpid(), limit_s=patience(100), tests=TESTS))
    command = [sys.executable, "-m", "geartrain", "launch", "job.toml", "--ray", cluster.address, "--hosts", "2"]
    driver = cluster.popen([*command, "--folder", "logs", *words], tmp_path / "said.txt", cwd=tmp_path)
    until_s = time.monotonic() + patience(60)
    while len(found := pids(tmp_path)) < 2 or not all(handles_sigterm(pid) for pid, _ in found.values()):
        assert driver.poll() is None and time.monotonic() < until_s, (tmp_path / "said.txt").read_text()
        time.sleep(0.1)
    return driver


def pids(tmp_path):
    """Of the job's learners: (their own, their launcher's), by rank."""
    return {number: found for (_, number), found in processes_of(tmp_path).items()}


def handles_sigterm(pid):
    """Whether a process has its context: before, a signal ends it as it ends any process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) & 1 << (signal.SIGTERM - 1))


def ended(driver, tmp_path):
    """The driver's exit code, and its error."""
    code = driver.wait(patience(90))
    lines = (tmp_path / "said.txt").read_text().splitlines()
    until_s = time.monotonic() + patience(20)
    while pids(tmp_path):
        assert time.monotonic() < until_s, "processes of the job are left"
        time.sleep(0.1)
    return code, [line for line in lines if line.startswith("error: ")]


@clustered
def test_a_learner_that_dies_is_named_by_the_driver(cluster, tmp_path):
    driver = started(cluster, tmp_path)
    os.kill(pids(tmp_path)[1][0], signal.SIGKILL)
    code, errors = ended(driver, tmp_path)
    assert code == 1
    assert len(errors) == 1
    assert errors[0].startswith(("error: learner-1 was killed by SIGKILL", "error: host 1: learner-1 was killed by"))


@clustered
def test_a_node_whose_launcher_is_lost_ends_the_job_on_the_other(cluster, tmp_path):
    driver = started(cluster, tmp_path)
    os.kill(pids(tmp_path)[1][1], signal.SIGKILL)
    code, errors = ended(driver, tmp_path)
    assert code == 1
    assert len(errors) == 1
    assert errors[0].startswith("error: the launcher of host 1 is lost")


@clustered
def test_ctrl_c_ends_the_job_on_all_nodes(cluster, tmp_path):
    driver = started(cluster, tmp_path)
    os.killpg(driver.pid, signal.SIGINT)
    assert ended(driver, tmp_path) == (130, ["error: stopped by SIGINT"])
    for host in range(2):
        assert (tmp_path / f"logs-host{host}" / f"learner-{host}.log").read_text() == "told to go\n"


@clustered
def test_nodes_that_ray_does_not_have_are_waited_for_so_long(cluster, tmp_path):
    (tmp_path / "job.toml").write_text(STAYS.format(name="x", limit_s=100, tests=TESTS) + "cpus = 9\n")
    text = "from geartrain import launch; from geartrain.launch.ray import run\n"
    text += f"run(launch.load('job.toml'), hosts=2, address={cluster.address!r}, place_s=1.0)\n"
    driver = cluster.popen([sys.executable, "-c", text], tmp_path / "said.txt", cwd=tmp_path)
    assert driver.wait(patience(60)) == 1
    said = (tmp_path / "said.txt").read_text()
    assert "WaitTimeoutError: Ray did not find 2 nodes with up to 9 CPU free within 1 s: see ray status" in said
    assert not (tmp_path / "runs").exists()


def test_what_ray_cannot_mean_is_refused_before_it_is_asked():
    pytest.importorskip("ray")
    from geartrain.launch.ray import run

    job = launch.Job("x", [launch.learners("x:y", hosts="first")])
    with pytest.raises(ArgumentError, match="has one node, but the job needs 2"):
        run(launch.Job("x", [launch.learners("x:y")]), hosts=2, address="local")
    with pytest.raises(ArgumentError, match="no role runs on host 1 of 2"):
        run(job, hosts=2)


def test_an_address_where_nothing_answers_is_refused_before_ray_tries_it():
    with socket.socket() as nobody, socket.create_server(("127.0.0.1", 0)) as somebody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        for address in (f"127.0.0.1:{nobody.getsockname()[1]}", "127.0.0.1:70000", f"ray://127.0.0.1:{10**30}"):
            with pytest.raises(GeartrainError, match="there is no Ray cluster at"):
                check_answers(address)
        check_answers(f"127.0.0.1:{somebody.getsockname()[1]}")
    check_answers("auto")
