"""Jobs under Slurm: the batch scripts, and a cluster of two nodes that runs them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from deadlines import patience
from launch_jobs import GROUP, processes_of
from slurm_cluster import SlurmCluster, why_not

from geartrain import launch
from geartrain.errors import ArgumentError
from geartrain.launch.hosts import first_host, host_position
from geartrain.launch.slurm import batch_script

TESTS = Path(__file__).parents[1] / "support"
WHY_NOT = why_not()
#: Of a task that srun has started, of the batch script around it, and of a shell of salloc: as Slurm 22.05 sets them.
ALLOCATION = {
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "host[0-1]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
BATCH = {**ALLOCATION, "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = {
    **ALLOCATION,
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "host[0-1]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
}


def job(**options):
    roles = [
        launch.learners("x:learn", 4, hosts="trainers", cpus=2.5, gpus=1, memory_gb=10),
        launch.actors("x:environments", "x:policy", 30, hosts="1-", memory_gb=0.5),
    ]
    return launch.Job("walker", roles, hosts={"trainers": "0-1"}, **options)


def directives(text):
    lines = (line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH"))
    return dict(shlex.split(line)[0].removeprefix("--").partition("=")[::2] for line in lines)


def test_a_task_of_srun_has_its_place_and_a_shell_beside_it_has_none():
    assert host_position(STEP) == launch.HostPosition(1, 2, "host0", 29506, 29507)
    for shell in (BATCH, ALLOCATION):
        with pytest.raises(
            ArgumentError, match="2 hosts, and this is a shell on one of them: start a launcher on each with srun"
        ):
            host_position(shell)
    alone = {**BATCH, "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "4"}  # a node, whose processors are tasks
    assert host_position(alone) == launch.HostPosition()
    with pytest.raises(ArgumentError, match="4 launchers on 2 hosts, but one a host"):
        host_position({**STEP, "SLURM_STEP_NUM_TASKS": "4"})
    assert first_host("a[1-2]b[07,09]-ib,c") == "a1b07-ib"
    for none in ("", ",a", "[]"):
        with pytest.raises(ArgumentError, match="names none"):
            first_host(none)


def test_a_script_asks_for_what_the_largest_host_needs():
    text = batch_script(job(shared_memory_gb={"trainers": 20, "2-": 1}, timeout_s=3600), "w.toml", hosts=3)
    asked = directives(text)
    # Host 1 has ranks, actors, and the server of its store: 4 x 2.5 + 30 + 1 processors, 40 + 15 + 20 GiB.
    assert (asked["cpus-per-task"], asked["gpus-per-node"], asked["mem"]) == ("41", "4", f"{75 * 1024}M")
    assert (asked["nodes"], asked["ntasks-per-node"], asked["job-name"]) == ("3", "1", "walker")
    assert int(asked["time"]) * 60 > 3600
    assert "# Hosts differ" in text
    one = launch.Job("one", [launch.learners("x:learn", 3)])
    asked = directives(batch_script(one, "w.toml"))
    assert asked["cpus-per-task"] == "3"
    assert not {"mem", "time", "gpus-per-node"} & set(asked), "what the description does not say is Slurm's"


def test_options_of_sbatch_replace_what_follows_from_the_description_and_are_checked():
    options = {"mem": "0", "exclusive": "", "comment": "two words", "partition": "a,b"}
    asked = directives(batch_script(job(timeout_s=60), "w.toml", hosts=2, options=options, setup=["module load x"]))
    assert {name: asked[name] for name in options} == options
    for wrong in ({"nodes": "3"}, {"--mem": "1"}, {"mem": 'a"b'}, {"mem": "1\n#SBATCH --x"}, {"Mem": "1"}):
        with pytest.raises(ArgumentError, match="of sbatch"):
            batch_script(job(), "w.toml", hosts=2, options=wrong)
    for wrong in ("", "a\nb"):
        with pytest.raises(ArgumentError, match="one line of shell"):
            batch_script(job(), "w.toml", hosts=2, setup=[wrong])
    with pytest.raises(ArgumentError, match="no role runs on host"):
        batch_script(launch.Job("x", [launch.learners("x:y", hosts="first")]), "w.toml", hosts=2)


def test_resources_are_checked_where_they_are_said():
    for options in ({"cpus": 0}, {"cpus": "2"}, {"gpus": -1}, {"gpus": 0.5}, {"memory_gb": float("nan")}):
        with pytest.raises(ArgumentError, match="found"):
            launch.learners("x:y", **options)
    for wrong in (0, "20", True, {"trainers": "2"}, {"3-1": 2.0}, {"nobody": 2}):
        with pytest.raises(ArgumentError, match="shared_memory_gb"):
            job(shared_memory_gb=wrong)


def test_a_script_starts_one_launcher_on_each_host_with_a_secret_of_the_job(tmp_path):
    """The script is bash: srun is replaced by a command that says what it was given."""
    told = tmp_path / "srun"
    told.write_text('#!/bin/sh\nprintf "%s\\n" "$GEARTRAIN_SECRET" "$READY" "$@"\n')
    told.chmod(0o755)
    script = tmp_path / "a job.sbatch"
    script.write_text(batch_script(job(), "a job's.toml", hosts=2, python="/a b/python", setup=["export READY=yes"]))
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "5"}
    runs = [
        subprocess.run(["bash", script, "--fresh"], env={**path, **more}, capture_output=True, text=True, check=True)
        for more in ({}, {}, {"GEARTRAIN_SECRET": "mine"})
    ]
    first, second, third = (run.stdout.splitlines() for run in runs)
    assert len(first[0]) == 32 and first[0] != second[0] and third[0] == "mine"
    assert first[1:4] == ["yes", "--ntasks-per-node=1", "--cpus-per-task=5"]
    assert first[-7:] == ["/a b/python", "-m", "geartrain", "launch", "a job's.toml", "--lines", "--fresh"]


# --- on a cluster --------------------------------------------------------------------------------------------------


def clustered(test):
    reason = f"no Slurm cluster can be made here: {WHY_NOT}"
    for mark in (pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.skipif(WHY_NOT is not None, reason=reason)):
        test = mark(test)
    return test


TOML = GROUP + "cpus = 2\n"


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="gt-slurm-") as folder, SlurmCluster(Path(folder)) as made:
        yield made


def submit(cluster, tmp_path, steps, *words):
    """Writes the script by the command, and submits it: the job's number, and where its output goes."""
    (tmp_path / "job.toml").write_text(TOML.format(limit_s=patience(100), tests=TESTS, steps=steps))
    argv = [sys.executable, "-m", "geartrain", "generate", "slurm", "job.toml", "--hosts", "2"]
    env = {**os.environ, "NO_COLOR": "1"}
    argv += ["--setup", "export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0"]
    text = subprocess.run(argv, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout
    (tmp_path / "job.sbatch").write_text(text)
    number = cluster.run("sbatch", "--parsable", str(tmp_path / "job.sbatch"), *words).strip()
    return number, tmp_path / f"over-hosts-{number}.out"


def wait_for(path, what, cluster):
    until_s = time.monotonic() + patience(90)
    while not path.exists() or what not in path.read_text():
        assert time.monotonic() < until_s, (path.read_text() if path.exists() else "no output", cluster.logs())
        time.sleep(0.1)


def summaries(tmp_path):
    return [json.loads(path.read_text()) for path in sorted((tmp_path / "runs").glob("*/summary.json"))]


@clustered
def test_ranks_of_two_nodes_draw_one_batch_and_the_job_is_completed(cluster, tmp_path):
    number, output = submit(cluster, tmp_path, 20, "--every-s", "1")
    ended = cluster.wait_for_job(number)
    assert (ended["JobState"], ended["ExitCode"], ended["NumNodes"]) == ("COMPLETED", "0:0", "2"), output.read_text()
    assert ended["CPUs/Task"] == "3"
    found = summaries(tmp_path)
    assert [each["outcome"] for each in found] == ["finished"] * 2
    for host, each in enumerate(found):
        learner = each["processes"][f"learner-{host}"]
        assert (learner["steps"], learner["samples"]) == (20, 20 * 8)  # half of the global batch


@clustered
def test_scancel_ends_the_job_as_ctrl_c_does(cluster, tmp_path):
    number, output = submit(cluster, tmp_path, 10**9, "--every-s", "0.2")
    wait_for(output, "samples/s", cluster)
    cluster.run("scancel", number)
    assert cluster.wait_for_job(number)["JobState"] == "CANCELLED"
    said = output.read_text()
    found = summaries(tmp_path)
    assert [each["outcome"] for each in found] == ["interrupted"] * 2, said
    codes = [each["exit_code"] for host in found for each in host["processes"].values()]
    assert len(codes) == 4 and not set(codes) - {0, -signal.SIGTERM}, f"killed, or failed: {said}"
    assert "error: stopped by SIGTERM" in said
    assert "failed" not in said and "is killed" not in said, said


@clustered
def test_a_rank_that_dies_is_named_on_both_nodes_and_the_job_has_failed(cluster, tmp_path):
    number, output = submit(cluster, tmp_path, 10**9, "--every-s", "0.2")
    wait_for(output, "samples/s", cluster)
    os.kill(processes_of(tmp_path)["learner", 1][0], signal.SIGKILL)
    ended = cluster.wait_for_job(number)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0")
    said = output.read_text()
    assert "error: learner-1 was killed by SIGKILL" in said
    assert "error: host 1: learner-1 was killed by SIGKILL" in said


@clustered
def test_a_node_that_is_lost_ends_the_job_by_its_name(cluster, tmp_path):
    number, output = submit(cluster, tmp_path, 10**9, "--every-s", "0.2")
    wait_for(output, "samples/s", cluster)
    cluster.hosts.unplug(1)
    try:
        wait_for(output, "error: the launcher of host 1 is lost", cluster)
    finally:
        cluster.hosts.plug(1)
        cluster.run("scancel", number)
        cluster.wait_for_job(number)


@clustered
def test_the_shell_of_a_batch_job_is_told_to_use_srun(cluster, tmp_path):
    script = tmp_path / "job.sbatch"
    (tmp_path / "job.toml").write_text(TOML.format(limit_s=100, tests=TESTS, steps=1))
    command = f"{shlex.quote(sys.executable)} -m geartrain launch job.toml"
    script.write_text(f"#!/bin/bash\n#SBATCH --nodes=2 --output=out --chdir={tmp_path}\nexec {command}\n")
    number = cluster.run("sbatch", "--parsable", str(script)).strip()
    assert cluster.wait_for_job(number)["ExitCode"] == "2:0"
    assert (tmp_path / "out").read_text().startswith("error: Slurm gave this job 2 hosts")
