"""Launcher of mpi_worker.py: a job of MPI ranks on this host, which runs all its cases and ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from geartrain_bench.allreduce.rounds import RoundBarrier
from geartrain_bench.allreduce.testbed import Timed
from geartrain_bench.harness.baselines import BaselineError

SCRIPT = Path(__file__).with_name("mpi_worker.py")
TIMEOUT_S = 300.0
#: Options of each MPI to run more ranks than cores, as root.
OPTIONS = {"openmpi": ["--allow-run-as-root", "--oversubscribe"]}


def run(
    name: str, python: str, ranks: int, asked: Mapping[int, tuple[int, int]], baidu: str | None
) -> tuple[dict[int, Timed], dict[str, str]]:
    """Times so many ranks at each of these sizes: nbytes -> (calls of a round, rounds). Returns versions as well.

    Raises:
        BaselineError: they did not start, failed, found a wrong sum, or did not end in time; carries their output.
    """
    home = Path(python).parent
    mpiexec = home / "mpiexec"
    if not mpiexec.exists():
        raise BaselineError(f"there is no {mpiexec}")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"PATH": f"{home}:{os.environ.get('PATH', '')}", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="geartrain-bench-") as directory:
        path = Path(directory) / "rounds"
        path.write_bytes(bytes(RoundBarrier.bytes(ranks)))
        cases = [[nbytes, calls, rounds, 2] for nbytes, (calls, rounds) in asked.items()]
        words = json.dumps({"file": str(path), "baidu": baidu, "cases": cases})
        argv = [str(mpiexec), *OPTIONS.get(name, []), "-n", str(ranks), python, str(SCRIPT), words]
        process = subprocess.Popen(
            argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise BaselineError(f"{ranks} ranks of {name} did not end within {TIMEOUT_S:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    results = [line.removeprefix("RESULT ") for line in out.splitlines() if line.startswith("RESULT ")]
    if not results:
        words = " ".join((err or out).strip().splitlines()[-1:]) or "no output"
        raise BaselineError(f"{ranks} ranks of {name} ended with {process.returncode}: {words}")
    found = json.loads(results[0])
    timed = {int(nbytes): Timed(np.array(seconds).max(axis=0).tolist()) for nbytes, seconds in found["seconds"].items()}
    return timed, found["versions"]
