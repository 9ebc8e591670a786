"""A job's processes are started, watched and ended together."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
import time
import traceback
import urllib.error
import urllib.request

import launched
import numpy as np
import pytest
from launch_jobs import nobody_is_left, run, text

import geartrain as gt
import geartrain.core.counters as counters
import geartrain.weights as weights
from geartrain import launch
from geartrain.errors import ArgumentError, ProcessDiedError, StoreMissingError, UntrustedStoreError

pytestmark = pytest.mark.usefixtures("preloaded_children")


def test_learners_an_agent_and_actors_work_together_until_the_learners_are_done(
    job, tmp_path, capfd, real_interpreters
):
    made = job(
        launch.learners(launched.learn, 2, args={"steps": 80, "pause_s": 0.05}),
        launch.agents(launched.serve),
        launch.actors(launched.environments, launched.remote_policy, 2),
    )
    summary = run(made, tmp_path)
    assert summary.outcome == "finished"
    assert summary.restarts == {"learner": 0, "agent": 0, "actor": 0}
    for rank in range(2):
        learner = summary.processes[f"learner-{rank}"]
        assert (learner["exit_code"], learner["steps"], learner["version"]) == (0, 80, 80)
        assert learner["metrics"]["loss"] == pytest.approx(1 / 80)
        assert learner["samples"] == 80 * 8
    for number in range(2):
        actor = summary.processes[f"actor-{number}"]
        assert actor["exit_code"] == 0
        assert actor["version"] > 0, "it never acted with a version that was published meanwhile"
        assert actor["metrics"]["return"] == 21  # 0 + 1 + ... + 6
    assert sum(summary.processes[f"actor-{i}"]["rows"] for i in range(2)) == summary.store["inserted"]
    assert summary.processes["agent-0"]["steps"] > 0
    assert json.loads((tmp_path / "logs" / "summary.json").read_text())["outcome"] == "finished"
    assert "learned 80 steps" in text(tmp_path, "learner-1")
    lines = capfd.readouterr().out
    # A line every two seconds: the second has a rate, and the learners take four seconds.
    assert re.search(r"learner [12]/2, .*samples/s, waits \d+%, version \d+, loss", lines), lines
    with pytest.raises(StoreMissingError):
        gt.Store.open(made.name)  # the job went well: nothing of it stays
    assert f"launch-{made.name}" not in counters.names()
    assert nobody_is_left(str(tmp_path)) is None


def scrape(context):
    context.report(steps=3, version=2, loss=0.25)
    text = ""
    log = context.folder / "launch.log"
    while "metrics for Prometheus" not in text:
        text = log.read_text()
        time.sleep(0.02)
    port = re.search(r"Prometheus on http://127\.0\.0\.\d:(\d+)/metrics", text)[1]
    for host in ("127.0.0.1", "127.0.0.2"):
        try:
            with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=20) as reply:
                print(f"{reply.read().decode()}\nserved at {host}")
        except urllib.error.URLError:
            print(f"refused at {host}")


@pytest.mark.parametrize(
    ("given", "served", "refused"),
    [({}, "127.0.0.1", "127.0.0.2"), ({"metrics_host": "127.0.0.2"}, "127.0.0.2", "127.0.0.1")],
)
def test_metrics_are_served_to_prometheus_on_loopback_or_the_address_that_is_given(
    job, tmp_path, given, served, refused
):
    pytest.importorskip("prometheus_client", reason="an extra: pip install 'geartrain[metrics]'")
    run(job(launch.learners(scrape)), tmp_path, metrics_port=0, **given)
    said = text(tmp_path, "learner-0").splitlines()
    for line in (
        f"served at {served}",
        f"refused at {refused}",
        'geartrain_job_steps_total{process="learner-0"} 3.0',
        'geartrain_job_wait_seconds_total{process="learner-0"} 0.0',
        'geartrain_job_version{process="learner-0"} 2.0',
        'geartrain_job_metric{name="loss",process="learner-0"} 0.25',
    ):
        assert line in said


def test_a_job_goes_well_where_exit_codes_of_children_are_ignored(job, tmp_path):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        summary = run(job(launch.learners(launched.tell_environment)), tmp_path)
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert summary.processes["learner-0"]["exit_code"] == 0


def test_ranks_are_told_what_torchrun_tells_them(job, tmp_path):
    run(
        job(launch.learners(launched.tell_environment, 2), launch.Role("other", launched.tell_environment)),
        tmp_path,
    )
    for rank in range(2):
        said = text(tmp_path, f"learner-{rank}")
        assert f"'RANK': '{rank}', 'WORLD_SIZE': '2', 'LOCAL_RANK': '{rank}', 'LOCAL_WORLD_SIZE': '2'" in said
        assert "'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '" in said
        assert said.strip().endswith(f"{rank} 2")


def test_a_command_is_a_part_as_well_and_needs_to_know_nothing_of_it(job, tmp_path):
    code = "from geartrain import launch; p = launch.context(); p.report(steps=7, loss=2.5); print(p.name, p.rank)"
    summary = run(
        job(
            launch.learners([sys.executable, "-c", code], 1, env={"MINE": "1"}),
            launch.Role("plain", ["sh", "-c", "echo plain; sleep 100"]),
        ),
        tmp_path,
    )
    assert summary.processes["learner-0"]["steps"] == 7
    assert summary.processes["learner-0"]["metrics"] == {"loss": 2.5}
    assert text(tmp_path, "learner-0") == "learner-0 0\n"
    assert summary.processes["plain-0"]["exit_code"] == -signal.SIGTERM
    with pytest.raises(ProcessDiedError, match="nothing-like-it: No such file"):
        run(job(launch.learners(["nothing-like-it"])), tmp_path / "again")


def test_a_job_without_learners_is_over_when_its_actors_are(job, tmp_path):
    made = job(
        launch.Role("maker", make_store),
        launch.actors(launched.environments, launched.local_policy, 2, steps=300),
        keep_store="always",
    )
    summary = run(made, tmp_path)
    assert [summary.processes[f"actor-{i}"]["steps"] for i in range(2)] == [300, 300]
    with gt.Store.open(made.name, adopt=True) as store:
        assert len(store) == summary.store["inserted"]
        assert store.audit() == []


def make_store(context):
    with context.store(launched.FIELDS, max_length=launched.LENGTH, capacity=100):
        launched.wait_for_rows(context, gt.Store.open(context.job), 28)


@pytest.mark.parametrize("keep", ["always", "never"])
def test_a_store_whose_processes_have_all_ended_at_once_stays_until_the_launcher_decides(job, tmp_path, keep):
    made = job(launch.Role("maker", insert_and_return), keep_store=keep)
    summary = run(made, tmp_path)
    assert (summary.store["inserted"], summary.store["selectable"]) == (5, 5)
    if keep == "never":
        with pytest.raises(StoreMissingError):
            gt.Store.open(made.name)
    else:
        with gt.Store.open(made.name, adopt=True) as store:
            assert (len(store), store.audit()) == (5, [])
            store.unlink()


def insert_and_return(context):
    with context.store({"x": gt.Field((), "float32")}, max_length=1, capacity=100) as store:
        store.insert({"x": np.zeros((5, 1), np.float32)})


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_programs_of_other_users_join_the_store_and_weights_of_a_job_that_trusts_them(job, tmp_path):
    made = job(launch.Role("trainer", join_by_another_user), launch.Role("opener", open_store), trust="any")
    assert run(made, tmp_path).store["inserted"] == 6
    assert run(dataclasses.replace(made, keep_store="always"), tmp_path / "kept").outcome == "finished"
    with pytest.raises(UntrustedStoreError, match="every user may write to it"):
        gt.Store.open(made.name, adopt=True)
    with pytest.raises(UntrustedStoreError):  # it may hold what anybody wrote
        run(dataclasses.replace(made, trust="user"), tmp_path / "user")
    with gt.Store.open(made.name, adopt=True, trust="any") as store:
        assert (len(store), store.audit()) == (6, [])
        store.unlink()


def join_by_another_user(context):
    with context.store({"x": gt.Field((), "float32", per_row=True)}, capacity=100) as store:
        store.insert({"x": np.zeros(1, np.float32)})
        with context.publisher() as publisher:
            publisher.publish(1, {"w": np.full(3, 2.0, np.float32)})
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    os.setgroups([])
                    os.setgid(65534)
                    os.setuid(65534)
                    with gt.Store.open(context.job, trust="any") as mine:
                        mine.insert({"x": np.ones(3, np.float32)})
                    with weights.Reader(context.job, trust="any") as reader:
                        assert reader.latest(timeout_s=60).version == 1
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            with context.reader() as reader:
                assert reader.latest(timeout_s=60).version == 1
        with pytest.raises(ArgumentError, match=r"Job\.trust"):
            context.store({"x": gt.Field((), "float32", per_row=True)}, capacity=100, trust="group")
        launched.wait_for_rows(context, store, 6)


def open_store(context):
    with context.store() as store:
        store.insert({"x": np.zeros(2, np.float32)})
