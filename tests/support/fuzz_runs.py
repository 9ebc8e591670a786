"""Fuzz workers: processes that open damaged files many times and say how each attempt ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from deadlines import patience

SUPPORT = Path(__file__).parent


def endings(worker: str, seed: int, runs: int, folder: Path, timeout_s: float) -> dict[str, int]:
    """How often each way to end occurred in `runs` runs of a worker of this folder, which none of them may kill."""
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, SUPPORT / worker, str(seed), str(runs), folder]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=patience(timeout_s), check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    ended: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert sum(ended.values()) == runs
    return ended
