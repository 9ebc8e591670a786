"""A job's processes are started, watched and ended together, whatever happens to any of them."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
import urllib.request
from pathlib import Path

import launched
import numpy as np
import preloaded
import pytest
from deadlines import patience

import geartrain as gt
import geartrain.core.counters as counters
import geartrain.weights as weights
from geartrain import launch
from geartrain.errors import (
    ArgumentError,
    JobTimeoutError,
    ProcessDiedError,
    StoreExistsError,
    StoreMissingError,
    UntrustedStoreError,
)
from geartrain.launch.hosts import host_position

TESTS = Path(__file__).parents[1] / "support"
LINGER = launch.Role("linger", launched.linger)
pytestmark = pytest.mark.usefixtures("preloaded_children")


@pytest.fixture
def job(store_name):
    """Jobs of a name of their own, whose processes find the tests."""

    def make(*roles, **options):
        return launch.Job(store_name(), roles, **{"timeout_s": 60, "directory": str(TESTS), **options})

    return make


def run(job, tmp_path, **options):
    return launch.run(job, folder=tmp_path / "logs", live=False, every_s=1.0, **options)


def text(tmp_path, name):
    return (tmp_path / "logs" / f"{name}.log").read_text()


def nobody_is_left(folder):
    """All processes of the logs' folder are gone: none has it in its environment, or writes to a file in it."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            # A fork of the preloaded process has the environment that that began with, for all who look from outside.
            if folder.encode() in path.read_bytes() or (path.parent / "fd" / "1").readlink().is_relative_to(folder):
                return (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
    return None


# --- a job that goes well ---------------------------------------------------------------------------------------------


def test_learners_an_agent_and_actors_work_together_until_the_learners_are_done(
    job, tmp_path, capfd, real_interpreters
):
    made = job(
        launch.learners(launched.learn, 2, args={"steps": 80, "pause_s": 0.02}),
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
    assert re.search(r"learner 2/2, .*samples/s, waits \d+%, version \d+, loss", lines), lines
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
    port = re.search(r"Prometheus on port (\d+)", text)[1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as reply:
        print(reply.read().decode())


def test_metrics_are_served_to_prometheus(job, tmp_path):
    pytest.importorskip("prometheus_client", reason="an extra: pip install 'geartrain[metrics]'")
    run(job(launch.learners(scrape)), tmp_path, metrics_port=0)
    said = text(tmp_path, "learner-0").splitlines()
    for line in (
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


# --- a job that does not ----------------------------------------------------------------------------------------------


def test_a_part_that_fails_ends_the_job_and_its_last_lines_are_told(job, tmp_path):
    with pytest.raises(
        ProcessDiedError, match=r"(?s)learner-1 failed with exit code 1; .*ValueError: on purpose"
    ) as told:
        run(job(launch.learners(fail_second, 2), LINGER, stop_s=4), tmp_path)
    assert "I am learner-1, and I fail" in str(told.value)
    assert str(tmp_path / "logs" / "learner-1.log") in str(told.value)
    assert text(tmp_path, "linger-0") == "told to go\n"
    summary = json.loads((tmp_path / "logs" / "summary.json").read_text())
    assert summary["outcome"] == "failed"
    assert "on purpose" in summary["error"]
    assert nobody_is_left(str(tmp_path)) is None


def fail_second(context):
    return launched.fail(context) if context.rank == 1 else launched.linger(context)


def test_an_agent_that_returns_is_started_again_up_to_its_limit(job, tmp_path):
    with pytest.raises(ProcessDiedError, match="agent-0 ended without being told to, after 2 restarts"):
        run(job(launch.agents(return_at_once, max_restarts=2), LINGER), tmp_path)
    assert text(tmp_path, "agent-0").count("here") == 3
    assert "agent-0 is started again (2)" in text(tmp_path, "agent-0")


def return_at_once(context):
    print("here", context.restart)


def test_a_time_limit_is_an_error_and_nobody_outlives_it(job, tmp_path):
    began_s = time.monotonic()
    with pytest.raises(JobTimeoutError, match=r"was not over within 5 s"):
        run(job(launch.learners(launched.stuck), LINGER, timeout_s=5, stop_s=3), tmp_path)
    assert time.monotonic() - began_s < patience(12)
    assert nobody_is_left(str(tmp_path)) is None
    assert "told to go" in text(tmp_path, "linger-0")


def test_who_does_not_listen_is_killed(job, tmp_path, capfd):
    deaf = launch.learners(["sh", "-c", "trap '' TERM; sleep 100 & while :; do sleep 1; done"])
    with pytest.raises(JobTimeoutError):
        run(job(deaf, timeout_s=4, stop_s=1), tmp_path)
    assert "learner-0 is killed: it did not end within 1" in capfd.readouterr().out
    wait_for(lambda: nobody_is_left(str(tmp_path)) is None)  # with what it had started, once that is reaped


def test_a_process_that_reports_nothing_is_killed_and_started_again(job, tmp_path):
    mute = launch.Role("mute", stuck_once, max_restarts=1, silent_s=4)
    summary = run(job(mute), tmp_path)
    assert summary.restarts == {"mute": 1}
    with pytest.raises(ProcessDiedError, match="mute-0 was killed, for it had reported nothing for 2 s"):
        run(job(launch.Role("mute", launched.stuck, silent_s=2)), tmp_path / "again")


def stuck_once(context):
    if context.restart == 0:
        launched.stuck(context)


def test_ranks_die_together_and_come_back_together(job, tmp_path):
    summary = run(job(launch.learners(die_once, 2, max_restarts=1)), tmp_path)
    assert summary.restarts == {"learner": 1}
    ports = [re.findall(r"port (\d+)", text(tmp_path, f"learner-{rank}")) for rank in range(2)]
    assert ports[0] == ports[1]
    assert len(set(ports[0])) == 2  # they met anew


def die_once(context):
    print("port", os.environ["MASTER_PORT"], flush=True)
    if context.restart == 0:
        if context.rank == 1:
            time.sleep(1)  # both have said it
            os.kill(os.getpid(), signal.SIGKILL)
        launched.stuck(context)


# --- the command ------------------------------------------------------------------------------------------------------


def started(job_file, tmp_path, *options):
    return preloaded.Popen(
        [sys.executable, "-m", "geartrain", "launch", str(job_file), "--folder", str(tmp_path / "logs"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=TESTS,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "100"},
        start_new_session=True,
    )


def toml(tmp_path, name, more="", learner='run = "launched:linger"'):
    path = tmp_path / "job.toml"
    path.write_text(f'name = "{name}"\ndirectory = "{TESTS}"\n{more}\n[learner]\n{learner}\n')
    return path


def wait_for(condition, timeout_s=30.0):
    until_s = time.monotonic() + patience(timeout_s)
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_ctrl_c_ends_all_of_a_job(store_name, tmp_path, number, code):
    pytest.importorskip("typer")
    name = store_name()
    launcher = started(toml(tmp_path, name, learner='run = "launched:linger"\nprocesses = 2'), tmp_path)
    wait_for(lambda: f"launch-{name}" in counters.names() and counters.describe(f"launch-{name}").totals["steps"] == 2)
    with pytest.raises(StoreExistsError, match="exist already"):
        launch.run(launch.Job(name, [LINGER]), folder=tmp_path / "second", live=False)  # one of a name
    os.killpg(launcher.pid, number)  # as a terminal does
    out, error = launcher.communicate(timeout=patience(30))
    assert launcher.returncode == code, error
    assert f"error: stopped by {number.name}" in error
    assert f"{name} interrupted after" in out
    for rank in range(2):
        assert text(tmp_path, f"learner-{rank}") == "told to go\n"
    assert nobody_is_left(str(tmp_path)) is None


def test_a_second_ctrl_c_waits_for_nobody(store_name, tmp_path):
    pytest.importorskip("typer")
    name = store_name()
    path = toml(tmp_path, name, "stop_s = 100", 'run = "launched:linger"\nargs = {deaf = true}')
    launcher = started(path, tmp_path)
    wait_for(lambda: f"launch-{name}" in counters.names() and counters.describe(f"launch-{name}").totals["steps"] == 1)
    os.killpg(launcher.pid, signal.SIGINT)
    time.sleep(1)
    assert launcher.poll() is None  # the first one asks, and waits
    os.killpg(launcher.pid, signal.SIGINT)
    out, _ = launcher.communicate(timeout=patience(20))
    assert launcher.returncode == 130
    assert "learner-0 is killed" in out
    assert nobody_is_left(str(tmp_path)) is None


def test_what_a_failure_leaves_is_adopted_or_begun_afresh(job, tmp_path, capfd):
    made = job(launch.learners(fill_and_fail))
    for folder, options, found in (("a", {}, 0), ("b", {}, 5), ("c", {"fresh": True}, 0)):
        with pytest.raises(ProcessDiedError, match="on purpose"):
            run(made, tmp_path / folder, **options)
        assert f"found {found}\n" in text(tmp_path / folder, "learner-0")
        assert f"the store {made.name!r} stays with {found + 5} rows" in capfd.readouterr().out
    with gt.Store.open(made.name, adopt=True), pytest.raises(StoreExistsError, match="living process"):
        run(made, tmp_path / "d", fresh=True)
    with pytest.raises(ProcessDiedError):
        run(dataclasses.replace(made, keep_store="never"), tmp_path / "e")
    with pytest.raises(StoreMissingError):
        gt.Store.peek(made.name)


def fill_and_fail(context):
    with context.store({"x": gt.Field((), "float32")}, max_length=1, capacity=100) as store:
        print("found", len(store), flush=True)
        store.insert({"x": np.zeros((5, 1), np.float32)})
        launched.fail(context, 0.5)


def test_processes_die_with_a_launcher_that_is_killed_and_its_name_is_free_again(store_name, tmp_path):
    pytest.importorskip("typer")
    name = store_name()
    learner = 'run = ["sleep", "1000"]'
    more = '[role.deaf]\nrun = "launched:linger"\nargs = {deaf = true}'
    launcher = started(toml(tmp_path, name, more, learner), tmp_path)
    wait_for(lambda: f"launch-{name}" in counters.names() and counters.describe(f"launch-{name}").totals["steps"] == 1)
    launcher.kill()
    launcher.communicate(timeout=patience(30))
    wait_for(lambda: nobody_is_left(str(tmp_path)) is None, 10)
    assert counters.describe(f"launch-{name}").in_use is False
    shown = preloaded.run([sys.executable, "-m", "geartrain", "inspect", f"launch-{name}"], timeout=patience(60))
    assert "left behind" in shown.stdout
    gone = preloaded.run([sys.executable, "-m", "geartrain", "remove", f"launch-{name}"], timeout=patience(60))
    assert gone.returncode == 0, gone.stderr
    assert f"launch-{name}" not in counters.names()


def test_exit_codes_tell_what_happened(store_name, tmp_path):
    pytest.importorskip("typer")
    codes = {}
    for learner, options in (
        ('run = "launched:tell_environment"', ()),
        ('run = "launched:fail"', ()),
        ('run = "launched:linger"', ("--timeout-s", "1")),
    ):
        path = toml(tmp_path, store_name(), learner=learner)
        launcher = started(path, tmp_path, *options)
        _, error = launcher.communicate(timeout=patience(60))
        codes[learner.split(":")[1][:-1]] = (launcher.returncode, error.partition("\n")[0])
    assert codes["tell_environment"][0] == 0
    assert codes["fail"] == (1, "error: learner-0 failed with exit code 1; its last lines:")
    assert codes["linger"][0] == 124


def test_a_script_that_describes_its_job_can_be_launched_and_can_launch_itself(tmp_path, store_name):
    script = tmp_path / "own.py"
    script.write_text(
        f"""
import sys
from geartrain import launch

def learn(context, steps):
    context.report(steps=steps)
    print("learnt", steps, __name__)

job = launch.Job({store_name()!r}, [launch.learners(learn, args={{"steps": 3}})], timeout_s=30)

if __name__ == "__main__":
    launch.run(job, folder=sys.argv[1])
"""
    )
    first = preloaded.run([sys.executable, str(script), str(tmp_path / "a")], cwd="/", timeout=patience(60))
    assert first.returncode == 0
    assert (tmp_path / "a" / "learner-0.log").read_text() == "learnt 3 own\n"
    pytest.importorskip("typer")
    again = [sys.executable, "-m", "geartrain", "launch", str(script), "--folder", str(tmp_path / "b")]
    assert preloaded.run(again, cwd="/", timeout=patience(60)).returncode == 0
    assert (tmp_path / "b" / "learner-0.log").read_text() == "learnt 3 own\n"


# --- descriptions -----------------------------------------------------------------------------------------------------


def test_a_toml_file_says_what_python_says(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        """
name = "both"
timeout_s = 60
keep_store = "never"

[learner]
run = "launched:learn"
processes = 2
args = { steps = 5 }

[agent]
run = "launched:serve"

[actor]
environments = "launched:environments"
policy = "launched:remote_policy"
processes = 3
publish_every = 4

[role.watcher]
run = ["python", "watch.py"]
env = { A = "b" }
"""
    )
    assert launch.load(str(path)) == launch.Job(
        "both",
        [
            launch.learners("launched:learn", 2, args={"steps": 5}),
            launch.agents("launched:serve"),
            launch.actors("launched:environments", "launched:remote_policy", 3, publish_every=4),
            launch.Role("watcher", ["python", "watch.py"], env={"A": "b"}),
        ],
        timeout_s=60,
        keep_store="never",
        directory=str(tmp_path),
    )
    assert launch.load("launched:job") is launched.job
    assert launch.load(f"{TESTS}/launched.py").name == "launched"


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ("name = 'x'\n[lerner]\nrun = 'a:b'", "lerner means nothing here"),
        ("name = 'x'\n[learner]\nrun = 'a:b'\nranks = 2", r"ranks means nothing in \[learner\]; there are args, env"),
        ("name = 'x'\n[learner]\nprocesses = 2", r"\[learner\] needs run"),
        ("name = 'x'\n[actor]\npolicy = 'a:b'", "needs environments and policy"),
        ("name = 'x'\n[learner]\nrun = 'train.py'", "names no function"),
        ("name = 'x'\n[learner]\nrun = 'a:b'\nprocesses = 0", "processes is a whole number from 1 on, found 0"),
        ("[learner]\nrun = 'a:b'", "a job needs a name"),
        ("name = 'x'\n[agent]\nrun = 'a:b'", "agents alone never end"),
        ("name = 'x y'\n[learner]\nrun = 'a:b'", "a plain word"),
        ("name = 'x'\n[learner]\nrun = ['a']\nargs = {b = 1}", "a command takes no args"),
        ("name = ", "is not TOML"),
    ],
)
def test_a_description_that_is_wrong_says_where(tmp_path, lines, complaint):
    path = tmp_path / "wrong.toml"
    path.write_text(lines)
    with pytest.raises(ArgumentError, match=complaint):
        launch.load(str(path))


def test_targets_that_nobody_finds_are_refused(tmp_path):
    for wrong, complaint in (
        ("nowhere.toml", "no file"),
        ("nowhere_at_all:job", "no module 'nowhere_at_all'"),
        ("launched:nothing", "has no nothing"),
        ("launched:FIELDS", "and not a geartrain.launch.Job"),
    ):
        with pytest.raises(ArgumentError, match=complaint):
            launch.load(wrong)
    with pytest.raises(ArgumentError, match="must find the function by its name"):
        launch.learners(lambda context: None)
    with pytest.raises(ArgumentError, match="what JSON can hold"):
        launch.learners(launched.learn, args={"x": object()})


def test_a_place_is_what_torchrun_or_slurm_says():
    torchrun = {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": "1",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "host0",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    assert host_position(torchrun) == launch.HostPosition(1, 3, "host0", 29500, 29501, True)
    slurm = {
        "SLURM_PROCID": "2",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_NODELIST": "gpu[03-06]",
        "SLURM_JOB_ID": "1007",
    }
    assert host_position(slurm) == launch.HostPosition(2, 4, "gpu03", 29514, 29515)
    assert host_position({}) == launch.HostPosition()
    assert host_position({}, hosts=2, host=1, master="a:7") == launch.HostPosition(1, 2, "a", 7, 8)
    with pytest.raises(ArgumentError, match="--nproc-per-node 1"):
        host_position({**torchrun, "LOCAL_WORLD_SIZE": "4"})
    with pytest.raises(ArgumentError, match="go together"):
        host_position({}, hosts=2, host=1)
    with pytest.raises(ArgumentError, match="numbered from 0"):
        host_position({}, hosts=2, host=2, master="a:7")
    with pytest.raises(ArgumentError, match="needs a secret"):
        os.environ.pop("GEARTRAIN_SECRET", None)
        launch.run(
            launch.Job("x", [LINGER]), position=host_position({}, hosts=2, host=0, master="127.0.0.1:7"), live=False
        )


def test_the_table_shows_what_there_is(job, tmp_path):
    rich = pytest.importorskip("rich.console")
    from geartrain.launch.display import JobView, table_of
    from geartrain.launch.job_process import JobProcess
    from geartrain.launch.metrics import ProcessMetrics

    made = job(launch.learners(launched.learn), launch.actors(launched.environments, launched.local_policy, 2))
    processes = [
        JobProcess(made, role, local, 0, launch.HostPosition(), tmp_path)
        for role in made.roles
        for local in range(role.processes)
    ]
    zero = dict.fromkeys(("steps", "samples", "rows", "wait_s"), 0.0)
    seen = [
        ProcessMetrics(
            {**zero, "steps": 9}, {**zero, "steps": 12.5, "samples": 3200, "wait_s": 0.25}, 41, {"loss": 0.125}
        ),
        ProcessMetrics({**zero, "steps": 9}, {**zero, "steps": 700, "rows": 30, "wait_s": 0.1}, 39, {"return": 20.0}),
        ProcessMetrics({**zero, "steps": 9}, {**zero, "steps": 500, "rows": 20, "wait_s": 0.3}, 40, {"return": 22.0}),
    ]
    console = rich.Console(width=100, record=True, file=io.StringIO())
    console.print(table_of("mine", JobView(61.0, processes, seen, {"actor": 1}, 41, None)))
    shown = [line.split() for line in console.export_text().splitlines()]
    assert shown[0] == ["mine,", "1:01,", "weights", "41"]
    assert ["learner", "0/1", "12.5", "3,200", "25%", "41", "loss", "0.125"] in shown
    assert ["actor", "0/2", "1", "1,200", "50", "20%", "39", "2", "return", "21"] in shown
