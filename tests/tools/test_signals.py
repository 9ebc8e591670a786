"""SIGTERM ends every command that waits, promptly and in order, whichever of its threads the kernel hands it to."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import deadlines
import preloaded
import pytest
from deadlines import patience
from reports import make

pytest.importorskip("typer")

#: The most that a wait of the main thread lasts, some times over.
PROMPT_S = 5.0
TGKILL = 234  # of x86-64

JOB = """
name = "waits"
directory = "{folder}"
[role.sleeper]
kind = "actor"
run = ["sleep", "1000"]
"""


@pytest.fixture(autouse=True)
def host(reporting_host: Path) -> Path:
    return reporting_host


#: Commands that wait for hours, each with its exit code after SIGTERM.
WAITING = {
    "metrics": (["metrics", "--port", "0"], 0),
    "reducer": (["reducer", "--every-s", "0"], 0),
    "doctor --listen": (["doctor", "--listen"], 0),
    "checkpoint --every": (["checkpoint", "rows", "{folder}/saved", "--every", "2h"], 143),
    "launch": (["launch", "{folder}/job.toml", "--folder", "{folder}/logs", "--lines", "--every-s", "0.2"], 130),
    "top": (["top", "--every-s", "3600"], 143),
}


@contextlib.contextmanager
def waiting(command: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The command, which has printed its first line and waits."""
    (folder / "job.toml").write_text(JOB.format(folder=folder))
    words = [word.format(folder=folder) for word in WAITING[command][0]]
    master, slave = pty.openpty()
    terminal = command == "top"
    with make(), contextlib.ExitStack() as stack:
        process = preloaded.Popen(
            [sys.executable, "-m", "geartrain", *words],
            stdin=slave if terminal else subprocess.DEVNULL,
            stdout=slave if terminal else subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(slave)
        stack.callback(os.close, master)
        stack.enter_context(deadlines.killed(process))
        if terminal:
            os.read(master, 1)
        else:
            assert process.stdout is not None and process.stdout.readline()
        time.sleep(0.3)
        yield process


def last_thread(pid: int) -> int:
    """A thread of the process that is not its first, where there is one."""
    return max(int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir())


@pytest.mark.parametrize("how", ["another thread", "stopped and continued"])
@pytest.mark.parametrize("command", WAITING)
def test_sigterm_ends_a_command_that_waits(command: str, how: str, tmp_path: Path) -> None:
    with waiting(command, tmp_path) as process:
        if how == "another thread":
            assert ctypes.CDLL(None).syscall(TGKILL, process.pid, last_thread(process.pid), signal.SIGTERM) == 0
        else:
            deadlines.stop(process.pid)
            os.kill(process.pid, signal.SIGTERM)
            os.kill(process.pid, signal.SIGCONT)
        assert process.wait(patience(PROMPT_S)) == WAITING[command][1]
        assert process.stderr is not None
        errors = process.stderr.read()
    assert "Traceback" not in errors
    assert errors.count("\n") <= 1, errors
