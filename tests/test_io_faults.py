"""Calls on files that fail, one at a time: an error that names the file, nothing lost, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import deadlines
import pytest
from io_faults import run

SUPPORT = Path(__file__).parent / "support"


@pytest.fixture(scope="module")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "LD_PRELOAD" in os.environ:
        pytest.skip("another library is preloaded")
    made = run.library(tmp_path_factory.mktemp("io_faults"))
    if made is None:
        pytest.skip("no C compiler")
    return made


def check(preload: Path, *words: str) -> None:
    state = preload.with_name("state")
    state.write_bytes(bytes(4096))
    ran = subprocess.run(
        [sys.executable, "-m", "io_faults.run", *words],
        env={
            **os.environ,
            "LD_PRELOAD": str(preload),
            run.VARIABLE: str(state),
            "GEARTRAIN_REPORT_S": "0",  # whose file comes at any time
            "PYTHONPATH": os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        },
        capture_output=True,
        text=True,
        timeout=600 * deadlines.factor(),
        check=False,
    )
    assert not ran.stdout, ran.stdout[:20000] + ran.stderr[-10000:]
    assert ran.returncode == 0, ran.stderr[-10000:]


def test_a_call_on_a_file_that_fails_is_an_error_with_its_path_and_loses_and_leaves_nothing(preload: Path) -> None:
    check(preload)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_any_call_on_a_file_may_fail_with_any_error(preload: Path) -> None:
    check(preload, "--all")
