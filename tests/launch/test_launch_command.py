"""The command `geartrain launch`: interrupts, kills, what is left behind, exit codes, scripts."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time

import launched
import numpy as np
import preloaded
import pytest
from deadlines import patience
from launch_jobs import LINGER, TESTS, nobody_is_left, run, text, wait_for

import geartrain as gt
import geartrain.core.counters as counters
from geartrain import launch
from geartrain.errors import ProcessDiedError, StoreExistsError, StoreMissingError

pytestmark = pytest.mark.usefixtures("preloaded_children")


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
        gt.Store.open(made.name, mode="r", adopt=True)


def fill_and_fail(context):
    with context.store({"x": gt.Field((), "float32")}, max_length=1, capacity=100) as store:
        print("found", len(store), flush=True)
        store.insert({"x": np.zeros((5, 1), np.float32)})
        launched.fail(context, 0.5)


def test_processes_die_with_a_launcher_that_is_killed_and_its_name_is_free_again(
    store_name, tmp_path, tmp_path_factory, monkeypatch
):
    pytest.importorskip("typer")
    # Where no other test's job removes what this one leaves behind.
    monkeypatch.setenv("GEARTRAIN_DIR", str(tmp_path_factory.mktemp("segments")))
    name = store_name()
    learner = 'run = ["sleep", "1000"]'
    more = '[role.deaf]\nrun = "launched:linger"\nargs = {deaf = true}'
    launcher = started(toml(tmp_path, name, more, learner), tmp_path)
    wait_for(lambda: f"launch-{name}" in counters.names() and counters.describe(f"launch-{name}").totals["steps"] == 1)
    launcher.kill()
    launcher.communicate(timeout=patience(30))
    wait_for(lambda: nobody_is_left(str(tmp_path)) is None, 10)
    assert counters.describe(f"launch-{name}").in_use is False
    monkeypatch.setenv("COLUMNS", "200")  # in which no cell of the table is wrapped
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


def test_a_command_that_ends_by_a_schedulers_sigterm_before_its_launcher_has_it_is_no_failure(store_name, tmp_path):
    """Schedulers that end a job send SIGTERM to all of its processes, in any order."""
    pytest.importorskip("typer")
    name = store_name()
    more = '[role.watch]\nrun = "launched:linger"'
    launcher = started(toml(tmp_path, name, more, 'run = ["sleep", "1000"]'), tmp_path)
    wait_for(lambda: f"launch-{name}" in counters.names() and counters.describe(f"launch-{name}").totals["steps"] == 1)
    slots = counters.SharedCounters.open(f"launch-{name}")
    wait_for(lambda: slots.column("pid").min() > 1)  # 0, before it is written, would be this process's whole group
    for pid in slots.column("pid"):  # the command ends by it; the function sees that the job stops
        os.kill(int(pid), signal.SIGTERM)
    launcher.send_signal(signal.SIGTERM)
    _, error = launcher.communicate(timeout=patience(30))
    assert (launcher.returncode, error) == (130, "error: stopped by SIGTERM\n")
    assert text(tmp_path, "watch-0") == "told to go\n", "the launcher's SIGTERM was taken for a second one"
