"""Weights whose values tell their version, and processes that publish or read them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import preloaded

SHM = Path("/dev/shm")


def filled(value: int, n: int = 1000) -> dict[str, np.ndarray]:
    return {"a": np.full(n, value, np.int64), "b.weight": np.full((n, 3), value, np.float32)}


def run(code: str, *args: object) -> subprocess.Popen[str]:
    """A Python process that talks over its pipes, with `weights`, `filled` and `say` at hand."""
    head = (
        "import os, sys, signal, time, numpy as np\nfrom geartrain import rpc, weights\n"
        "def filled(v, n=1000): return {'a': np.full(n, v, np.int64), 'b.weight': np.full((n, 3), v, np.float32)}\n"
        "def say(*what): print(*what, flush=True)\n"
    )
    return preloaded.Popen(
        [sys.executable, "-c", head + code, *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
