"""Jobs that tests launch: run them, read their logs, and look for processes that are left."""

from __future__ import annotations

import json
import time
from pathlib import Path

import launched
from deadlines import patience

from geartrain import launch

TESTS = Path(__file__).parents[1] / "support"

#: Ranks of several hosts draw one batch while others insert: `limit_s`, `tests` and `steps` are filled in.
GROUP = """
name = "over-hosts"
timeout_s = {limit_s}
stop_s = 8
directory = "{tests}"
[learner]
run = "launched:learn_tagged"
args = {{ steps = {steps} }}
[role.inserter]
run = "launched:insert"
args = {{ pause_s = 0.002 }}
"""

LINGER = launch.Role("linger", launched.linger)


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


def processes_of(folder):
    """The job's processes that have their logs below this folder: {(role, number): (their pid, their launcher's)}."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            told = dict(entry.partition("=")[::2] for entry in path.read_text().split("\0"))
        except OSError:
            continue
        spec = json.loads(told.get("GEARTRAIN_PROCESS", "{}"))
        if spec.get("folder", "").startswith(str(folder)):
            found[spec["role"], spec["number"]] = (int(path.parent.name), spec["parent"])
    return found


def wait_for(condition, timeout_s=60.0):
    until_s = time.monotonic() + patience(timeout_s)
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)
