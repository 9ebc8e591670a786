"""The mpi4py example, where there is an MPI: in this environment, or in the one of GEARTRAIN_TEST_MPI_PYTHON.

python -m venv mpi && mpi/bin/pip install mpich mpi4py numpy
GEARTRAIN_TEST_MPI_PYTHON=mpi/bin/python pytest tests/bench/test_allreduce_mpi.py
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import patience

ROOT = Path(__file__).parents[2]
python = os.environ.get("GEARTRAIN_TEST_MPI_PYTHON") or (sys.executable if importlib.util.find_spec("mpi4py") else None)


@pytest.mark.skipif(python is None, reason="no mpi4py here, and GEARTRAIN_TEST_MPI_PYTHON names none")
def test_an_mpi_program_gets_mpis_integers_and_sums_in_rank_order() -> None:
    assert python is not None
    mpiexec = Path(python).with_name("mpiexec")
    done = subprocess.run(
        [str(mpiexec), "-n", "3", python, str(ROOT / "examples" / "mpi4py_allreduce.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patience(100),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert "3 ranks: integers as MPI's, floats as one loop's" in done.stdout
