"""Roles of a job that are tasks of its store: claims, puts, restarts, errors of the function, and the end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time

import grpo
import launched_tasks
import numpy as np
import preloaded
import pytest
from deadlines import patience
from launch_jobs import TESTS, nobody_is_left, run, text, wait_for

from geartrain import launch
from geartrain.core.counters import SharedCounters
from geartrain.errors import ArgumentError, ProcessDiedError
from geartrain.launch.job import UNUSABLE
from geartrain.launch.metrics import Reporter
from geartrain.launch.resources import host_resources
from geartrain.launch.worker_role import ERRORS_IN_SEQUENCE, ERRORS_OF_A_ROW, work

JOB = """
name = "{name}"
directory = "{tests}"
timeout_s = {limit_s}
[learner]
run = "launched_tasks:learn"
args = {{ rows = {rows} }}
[role.loader]
run = "launched_tasks:load"
args = {{ rows = {rows} }}
[role.answer]
task = "answer"
run = "launched_tasks:answer"
concurrency = 8
output = "numpy"
[role.judge]
task = "reward"
run = "launched_tasks:Judge"
args = {{ factor = 1 }}
rows = 4
[role.ref]
task = "ref"
run = "launched_tasks:rest"
max_items = 100
of = "tokens"
[role.advantage]
task = "advantage"
run = "launched_tasks:rest"
rows = 4
"""


@pytest.mark.usefixtures("preloaded_children")
def test_a_job_of_tasks_draws_every_row_although_a_worker_is_killed(store_name, tmp_path):
    pytest.importorskip("typer")
    rows = 30
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(name=store_name(), tests=TESTS, limit_s=patience(60), rows=rows))
    launcher = preloaded.Popen(
        [sys.executable, "-m", "geartrain", "launch", str(path), "--folder", str(tmp_path / "logs"), "--every-s", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=TESTS,
        env={**os.environ, "NO_COLOR": "1"},
    )
    said, _ = launcher.communicate(timeout=patience(90))
    assert launcher.returncode == 0, said
    assert text(tmp_path, "learner-0") == "drew all\n"
    summary = json.loads((tmp_path / "logs" / "summary.json").read_text())
    assert summary["restarts"] == {"learner": 0, "loader": 0, "answer": 0, "judge": 1, "ref": 0, "advantage": 0}
    assert "judge-0 was killed by SIGKILL; judge-0 started again (1 of at most 10 times)" in said
    done = {name: summary["processes"][f"{name}-0"]["rows"] for name in ("answer", "judge", "ref", "advantage")}
    assert done == dict.fromkeys(done, rows), "each row once, and those of the killed process again"
    assert summary["processes"]["judge-0"]["wait_s"] > 0
    assert nobody_is_left(str(tmp_path)) is None


GOES_ON = """
name = "{name}"
directory = "{tests}"
timeout_s = {limit_s}
[learner]
run = "launched_tasks:learn_kept"
args = {{ rows = {rows}, folder = "{folder}" }}
max_restarts = 3
[role.loader]
run = "launched_tasks:load_rest"
args = {{ rows = {rows} }}
[role.answer]
task = "answer"
run = "launched_tasks:answer"
output = "numpy"
[role.reward]
task = "reward"
run = "launched_tasks:rest"
[role.ref]
task = "ref"
run = "launched_tasks:rest"
[role.advantage]
task = "advantage"
run = "launched_tasks:rest"
"""


@pytest.mark.usefixtures("preloaded_children")
def test_a_job_of_tasks_goes_on_after_deaths_of_its_learner_and_of_its_launcher(store_name, tmp_path):
    pytest.importorskip("typer")
    rows, name, record = 60, store_name(), tmp_path / "record"
    path = tmp_path / "job.toml"
    path.write_text(GOES_ON.format(name=name, tests=TESTS, limit_s=patience(60), rows=rows, folder=tmp_path))

    def steps():
        return len(record.read_text().splitlines()) if record.exists() else 0

    def start(logs):
        command = [sys.executable, "-m", "geartrain", "launch", str(path), "--folder", str(tmp_path / logs), "--lines"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": TESTS}
        return preloaded.Popen(command, env={**os.environ, "NO_COLOR": "1"}, **options)

    launcher = start("killed")
    wait_for(lambda: steps() > 3)
    os.kill(int(SharedCounters.open(f"launch-{name}").column("pid")[0]), signal.SIGKILL)
    wait_for(lambda: steps() > 8)
    launcher.kill()
    said, _ = launcher.communicate(timeout=patience(30))
    assert "learner-0 was killed by SIGKILL; learner-0 started again (1 of at most 3 times)" in said
    again = start("logs")
    said, _ = again.communicate(timeout=patience(90))
    assert again.returncode == 0, said
    assert re.search(rf"the store '{name}' was left with \d+ rows to draw, \d+ under way and \d+ kept", said), said
    batches = {}
    for line in record.read_text().splitlines():
        step, numbers = json.loads(line)
        assert batches.setdefault(step, numbers) == numbers, "steps since the last checkpoint are drawn again"
    assert sorted(number for numbers in batches.values() for number in numbers) == list(range(rows))
    done = json.loads(text(tmp_path, "learner-0").partition("done ")[2])
    assert done == dict.fromkeys(done, rows), "what was done is not done again"


@pytest.mark.usefixtures("preloaded_children")
def test_workers_that_wait_or_run_end_with_the_job(job, tmp_path):
    hanging = launch.workers("answer", hang, name="hangs", output="numpy")
    waiting = launch.workers("reward", launched_tasks.rest)
    began_s = time.monotonic()
    summary = run(job(launch.learners(end_when_claimed), hanging, waiting, stop_s=patience(30)), tmp_path)
    assert time.monotonic() - began_s < patience(15)
    assert [summary.processes[name]["exit_code"] for name in ("hangs-0", "reward-0")] == [0, 0]
    assert summary.store["under_way"] == 2
    assert text(tmp_path, "hangs-0") == "cancelled\n" * 2


def end_when_claimed(context):
    store = context.store(grpo.FIELDS, **launched_tasks.STORE)
    grpo.insert(store, range(2))
    until_s = time.monotonic() + patience(30)
    while store.task_stats()["answer"]["claimed"] < 2 or store.other_processes() < 2:
        assert time.monotonic() < until_s
        time.sleep(0.01)


async def hang(claim):
    try:
        await asyncio.sleep(3600)
    finally:
        print("cancelled", flush=True)


def test_a_put_that_waits_for_room_does_not_delay_the_end(store_name):
    with grpo.new_store(store_name(), span_bytes=1 << 15) as store:
        grpo.insert(store, [0, 1])
        for task in ("answer", "ref", "reward", "advantage"):  # the first row keeps most of the room
            with store.claim(task, 1, output="numpy") as claim:
                claim.put(large(claim))
        role = launch.workers("answer", f"{__name__}:large_async", store=store.name, concurrency=1)
        context = launch.Context()
        began_s = time.monotonic()
        context.reporter = Stopping(store)
        work(context, **role.args)
        assert not store.closed and time.monotonic() - began_s < patience(10)
        figures = store.task_stats()["answer"]
        assert (figures["done"], figures["claimed"]) == (1, 0), "the worker's row is due again"


class Stopping(Reporter):
    """Asks for the end a second after the row was claimed."""

    def __init__(self, store):
        super().__init__(None, None)
        self._store, self._claimed_s = store, None

    @property
    def stop_requests(self):
        if self._claimed_s is None and self._store.task_stats()["answer"]["claimed"]:
            self._claimed_s = time.monotonic()
        return int(self._claimed_s is not None and time.monotonic() > self._claimed_s + 1)


def large(claim):
    n = 2000
    ids = {"ids": [np.zeros(n, np.int32)], "log_prob": [np.zeros(n, np.float32)], "length": [[n]]}
    rest = {"ref": np.zeros(n, np.float32), "reward": np.zeros(1, np.float32), "advantage": np.zeros(1, np.float32)}
    return ids if claim.task == "answer" else {claim.task: rest[claim.task]}


async def large_async(claim):
    return large(claim)


def test_a_worker_that_waits_says_which_task_lags(store_name, monkeypatch, capfd):
    monkeypatch.setattr("geartrain.launch.worker_role._IDLE_S", 0.1)
    with grpo.new_store(store_name()) as store:
        grpo.insert(store, range(2))
        role = launch.workers("reward", f"{__name__}:poisoned", store=store.name)
        context = launch.Context()
        context.reporter = Beats(2)
        work(context, **role.args)
    assert "'answer' lags by 2 rows, 2 due and 0 claimed: start a process" in capfd.readouterr().out


class Beats(Reporter):
    """Asks for the end after so many heartbeats."""

    def __init__(self, beats):
        super().__init__(None, None)
        self._left = beats

    def heartbeat(self):
        self._left -= 1

    @property
    def stop_requests(self):
        return int(self._left < 0)


# --- errors of the function -------------------------------------------------------------------------------------------


def worked(store, run, task="answer", args=None, **limits):
    """Runs a worker in this process, until no row can become due."""
    role = launch.workers(task, f"{__name__}:{run.__name__}", store=store.name, args=args, output="numpy", **limits)
    context = launch.Context()
    seen = {}
    context.report = lambda **counts: seen.update(counts)
    work(context, **role.args)
    return seen


BAD = 2
calls: list[list[int]] = []


def poisoned(claim):
    numbers = claim["id"].tolist()
    calls.append(numbers)
    if BAD in numbers:
        raise ValueError(f"{BAD} is bad")
    grpo.work(None, claim.task, claim)


async def poisoned_async(claim):
    await asyncio.sleep(0)
    poisoned(claim)


@pytest.mark.parametrize("function", [poisoned, poisoned_async])
def test_a_row_whose_function_fails_is_dropped_alone(store_name, capfd, function):
    calls.clear()
    with grpo.new_store(store_name()) as store:
        grpo.insert(store, range(6))
        store.finish()
        concurrency = {"concurrency": 1} if function is poisoned_async else {}
        seen = worked(store, function, rows=4, **concurrency)
        assert calls[0] == [0, 1, 2, 3], "together with healthy rows"
        assert calls.count([BAD]) == ERRORS_OF_A_ROW
        assert (seen["rows"], seen["errors"]) == (5, 1 + ERRORS_OF_A_ROW)
        stats = store.stats()
        assert (stats["dropped"], store.task_stats()["answer"]["done"]) == (1, 5)
    said = capfd.readouterr()
    assert "answer failed on 4 rows: ValueError: 2 is bad; they are due again" in said.out
    assert "answer failed on 1 row: ValueError: 2 is bad; the row is dropped after 3 errors" in said.out
    assert "in poisoned" in said.err, "with the traceback"


def fails(claim):
    calls.append(claim["id"].tolist())
    raise OSError("no server")


async def fails_async(claim):
    fails(claim)


@pytest.mark.parametrize("function", [fails, fails_async])
def test_a_function_that_fails_again_and_again_is_an_error_of_its_process(store_name, monkeypatch, function):
    monkeypatch.setattr("geartrain.launch.worker_role._FIRST_PAUSE_S", 0.001)
    calls.clear()
    with grpo.new_store(store_name()) as store:
        grpo.insert(store, range(32))
        store.finish()
        concurrency = {"concurrency": 1} if function is fails_async else {}
        with pytest.raises(OSError, match="no server"):
            worked(store, function, rows=16, **concurrency)
        assert len(calls) == ERRORS_IN_SEQUENCE
        figures = store.task_stats()["answer"]
        assert (figures["claimed"], figures["deaths"], store.stats()["dropped"]) == (0, 0, 3)


def taken_back(claim):
    for row in claim:
        if not calls:
            calls.append([int(row["id"])])
            row.release()
            row.put(ids=[1], log_prob=[0.0], length=[1])
    grpo.work(None, claim.task, claim)


def gives_no_dict(claim):
    return [1.0]


def gives_wrong_fields(claim):
    return {"rewards": [1.0]}


def test_a_row_that_is_taken_back_is_no_error(store_name):
    calls.clear()
    with grpo.new_store(store_name()) as store:
        grpo.insert(store, range(3))
        store.finish()
        seen = worked(store, taken_back)
        assert seen["rows"] == 3 and "errors" not in seen


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (gives_no_dict, r"returns a dict of the task's fields, or None; it returned \[1.0\]"),
        (gives_wrong_fields, "rewards"),
    ],
)
def test_what_a_function_returns_is_checked(store_name, capfd, function, complaint):
    with grpo.new_store(store_name()) as store:
        grpo.insert(store, range(1))
        store.finish()
        worked(store, function)
        assert store.stats()["dropped"] == 1
    assert re.search(complaint, capfd.readouterr().out)


# --- at the door --------------------------------------------------------------------------------------------------


class Uncallable:
    pass


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"task": "rewrd"}, "rewrd"),
        ({"task": "train"}, "the last task 'train' has no claims"),
        ({"run": "launched_tasks:nothing"}, "launched_tasks has no nothing"),
        ({"run": "no_such_module:f"}, "no module 'no_such_module'"),
        ({"run": "launched_tasks:STORE"}, "cannot be called with a claim"),
        ({"run": f"{__name__}:Uncallable"}, "cannot be called with a claim"),
        ({"concurrency": 4}, "concurrency=4 is for async functions"),
        ({"max_items": 10, "of": "steps"}, "steps"),
    ],
)
def test_what_no_restart_mends_is_said_before_a_row_is_claimed(store_name, capfd, asked, complaint):
    with grpo.new_store(store_name()) as store:
        store.finish()
        role = launch.workers(**{"task": "answer", "run": f"{__name__}:poisoned", "store": store.name, **asked})
        with pytest.raises(SystemExit) as ended:
            work(launch.Context(), **role.args)
        assert ended.value.code == UNUSABLE
    assert complaint in capfd.readouterr().err


@pytest.mark.usefixtures("preloaded_children")
@pytest.mark.parametrize(
    "role",
    [
        launch.workers("answer", "launched_tasks:nothing"),
        launch.actors("launched:environments", "launched_tasks:nothing", name="answer"),
        launch.Role("answer", "launched_tasks:nothing", max_restarts=10),
    ],
)
def test_a_function_that_is_not_there_ends_the_job_at_once(job, tmp_path, role):
    with pytest.raises(
        ProcessDiedError, match=r"(?s)answer-0 failed with exit code 78; .*launched_tasks has no nothing"
    ):
        run(job(launch.learners(launched_tasks.learn_long), role), tmp_path)
    assert "started again" not in text(tmp_path, "launch")


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"task": ""}, "the name of a task must be text"),
        ({"rows": 0}, "role 'reward': rows must be at least 1, found 0"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"of": "tokens"}, "leave out of='tokens'"),
        ({"output": "jax"}, "output"),
        ({"run": ["python", "reward.py"]}, "no command"),
        ({"args": {"x": object()}}, "what JSON can hold"),
        ({"store": 3}, "store must be text, found 3"),
        ({"prcesses": 3}, "prcesses"),
    ],
)
def test_descriptions_that_are_wrong_are_refused(asked, complaint):
    with pytest.raises((ArgumentError, TypeError), match=complaint):
        launch.workers(**{"task": "reward", "run": "a:b", **asked})


def test_workers_of_hosts_without_learners_have_a_stores_server_and_resources():
    """Slurm, Kubernetes and Ray ask for what `host_resources` says."""
    roles = [
        launch.learners("a:b", hosts="first", memory_gb=2),
        launch.workers("reward", "a:b", 3, hosts="1-", cpus=2, gpus=1, memory_gb=4),
    ]
    here, there = host_resources(launch.Job("x", roles), 2)
    assert here.roles == (("learner", 1), ("store", 1))
    assert (there.roles, there.cpus, there.gpus, there.memory_gb) == ((("reward", 3),), 6, 3, 12)
