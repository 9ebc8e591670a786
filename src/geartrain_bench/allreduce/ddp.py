"""Launcher of ddp_worker.py: a DistributedDataParallel job over emulated hosts."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from geartrain.tools.testing.cluster import Hosts
from geartrain_bench.allreduce.rounds import NICENESS
from geartrain_bench.allreduce.testbed import SECRET, Configuration, Testbed
from geartrain_bench.harness.baselines import BaselineError

WORKER = [sys.executable, "-m", "geartrain_bench.allreduce.ddp_worker"]
JOB_S = 400.0
_ports = itertools.count(29_600)


@dataclass(frozen=True)
class Trained:
    """Seconds of each step, the slowest rank's; bytes of a step that rank 0 sent; the weights of each at the end."""

    laps_s: list[float]
    sent_bytes: float
    parameters: int
    checksums: list[str]


def reference(n: int, steps: int) -> str:
    """Checksum of the weights of one process that computes the steps of n ranks, summed in rank order."""
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [*WORKER, "--reference", str(n), "--steps", str(steps)], stdout=subprocess.PIPE, stderr=stderr
        )
        return str(_answers([process], [stderr])[0]["checksum"])


def run(hosts: Hosts, testbed: Testbed, configuration: Configuration, n: int, steps: int) -> Trained:
    """Trains with n ranks, one on each of the first hosts.

    Raises:
        BaselineError: a rank failed or did not end in time; carries its last output.
    """
    environment = {
        "WORLD_SIZE": str(n),
        "MASTER_ADDR": hosts.address(0),
        "MASTER_PORT": str(next(_ports)),
        "OMP_NUM_THREADS": "1",
    }
    if configuration.library == "geartrain":
        # The secret is for reducers, which listen on more than loopback.
        reducers = ",".join(testbed.reducer(i) for i in range(configuration.reducers))
        environment |= {
            "GEARTRAIN_REDUCERS": reducers,
            "GEARTRAIN_SECRET": SECRET,
            "GEARTRAIN_ALLREDUCE_SHARES": ",".join(map(str, configuration.shares or ())) or "equal",
        }
    argv = ["nice", "-n", str(NICENESS), *WORKER, "--backend", configuration.library, "--steps", str(steps)]
    with contextlib.ExitStack() as stack:
        said = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(n)]
        ranks = [
            hosts.popen(i, argv, env={**environment, "RANK": str(i)}, stdout=subprocess.PIPE, stderr=said[i])
            for i in range(n)
        ]
        answers = _answers(ranks, said)
    laps_s = np.array([answer["step_s"] for answer in answers]).max(axis=0)
    return Trained(
        [float(lap) for lap in laps_s],
        answers[0]["sent_bytes"] / steps,
        int(answers[0]["params"]),
        [str(answer["checksum"]) for answer in answers],
    )


def _answers(processes: Sequence[subprocess.Popen[bytes]], said: Sequence[Any]) -> list[dict[str, Any]]:
    """The last line of each, as JSON."""
    ends_s = time.monotonic() + JOB_S
    answers = []
    try:
        for number, process in enumerate(processes):
            try:
                out, _ = process.communicate(timeout=max(0.1, ends_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise BaselineError(f"rank {number} of DDP did not end within {JOB_S:g} s") from None
            if process.returncode != 0:
                said[number].seek(0)
                words = said[number].read().decode(errors="replace").strip().splitlines()
                raise BaselineError(f"rank {number} of DDP failed: {words[-1] if words else 'no output'}")
            answers.append(json.loads(out.decode().strip().splitlines()[-1]))
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                process.wait(30)
    return answers
