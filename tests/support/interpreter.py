"""Scripts of tests/support in a process where Triton interprets: it does or does not from its import on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import preloaded
from deadlines import patience

HERE = Path(__file__).parent


def interpreted(script: str, *arguments: str, timeout_s: float) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = preloaded.run([sys.executable, str(HERE / script), *arguments], env=environment, timeout=patience(timeout_s))
    assert done.returncode == 0, done.stderr
    return done.stdout
