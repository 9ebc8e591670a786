"""Parts of a job that fail, return, hang or die: restarted up to their limits, or the end of the job."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import launched
import pytest
from deadlines import patience
from ended import has_ended
from launch_jobs import LINGER, nobody_is_left, run, text, wait_for

from geartrain import launch
from geartrain.errors import JobTimeoutError, ProcessDiedError
from geartrain.launch.supervisor import Supervisor

pytestmark = pytest.mark.usefixtures("preloaded_children")


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


@pytest.mark.parametrize("form", ["function", "command"])
def test_sigterm_does_not_interrupt_a_process_that_ends_by_itself(job, tmp_path, real_interpreters, form):
    script = (
        "import atexit, launched; atexit.register(launched.told_twice)\nfrom geartrain import launch; launch.context()"
    )
    summary = run(
        job(launch.learners(told_at_exit if form == "function" else [sys.executable, "-c", script])), tmp_path
    )
    assert summary.processes["learner-0"]["exit_code"] == 0
    assert text(tmp_path, "learner-0") == "told twice\n"


def told_at_exit(context):
    atexit.register(launched.told_twice)


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
    told = tmp_path / "trapped"  # once the shell no longer listens: a SIGTERM before that would end it
    deaf = launch.learners(["sh", "-c", f"trap '' TERM; sleep 100 & : > '{told}'; while :; do sleep 1; done"])
    ends = launch.Role("ends", fail_once_there, args={"path": str(told)})
    with pytest.raises(ProcessDiedError, match="ends-0 failed"):
        run(job(deaf, ends, timeout_s=patience(60), stop_s=1), tmp_path)
    assert "learner-0 is killed: it did not end within 1" in capfd.readouterr().out
    wait_for(lambda: nobody_is_left(str(tmp_path)) is None)  # with what it had started, once that is reaped


def fail_once_there(context, path):
    wait_for(Path(path).exists)
    raise RuntimeError("on purpose")


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


def test_ranks_that_die_at_the_same_time_are_started_again_once(job, tmp_path, monkeypatch):
    before = Supervisor.wait

    def wait_for_both(supervisor, timeout_s):
        before(supervisor, timeout_s)
        told = [tmp_path / f"pid-{rank}-0" for rank in range(2)]
        if all(path.exists() and path.read_text() for path in told):
            wait_for(lambda: all(has_ended(path.read_text()) for path in told))

    monkeypatch.setattr(Supervisor, "wait", wait_for_both)
    args = {"folder": str(tmp_path)}
    summary = run(job(launch.learners(launched.die_together, 2, max_restarts=1, args=args)), tmp_path)
    assert summary.restarts == {"learner": 1}
    assert [summary.processes[f"learner-{rank}"]["restarts"] for rank in range(2)] == [1, 1]
