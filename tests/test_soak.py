"""The soak: half a minute of it, and the proof that it would notice what it looks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import patience
from soak.__main__ import last_words
from soak.figures import Sample, growths

SUPPORT = Path(__file__).parent / "support"
STEADY = Sample(0.0, 150.0, 26.0, 12, 30, 5, 26.0, 90.0, 20.0)


def samples_that_end(**late: float) -> list[Sample]:
    """A hundred seconds of one and the same, but for the last quarter."""
    return [STEADY._replace(at_s=at, **(late if at >= 75 else {})) for at in range(101)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "late",
    [{"private_mb": 180.0}, {"shared_mb": 34.0}, {"threads": 15}, {"descriptors": 40}, {"segments": 7},
     {"segments_mb": 30.0}, {"journal_mb": 300.0}, {"spans_kb": 30.0}],
)  # fmt: skip
def test_each_figure_that_grows_is_found(late: dict[str, float]) -> None:
    assert [one.figure for one in growths(samples_that_end(**late)) if one.grew] == list(late)


def test_a_learner_that_does_not_end_is_told_and_costs_no_samples() -> None:
    ignored = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    program = f"{ignored}; print('ready', flush=True); time.sleep(600)"
    learner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert learner.stdout is not None and learner.stdout.readline() == "ready\n"
        assert last_words(learner, 0.1)["problems"] == ["the learner did not end within 0.1 s of SIGTERM"]
    finally:
        learner.kill()
        learner.communicate()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_half_a_minute_of_soak_does_its_work_and_looks_at_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "soak", "--minutes", "0.5", "--json", str(tmp_path / "soak.json")],
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        timeout=patience(150),
        check=False,
    )
    found = json.loads((tmp_path / "soak.json").read_text())
    figures = found["figures"]
    assert found["problems"] == [] and figures["mixed"] == 0 and found["ended_by_themselves"] == 0, done.stdout
    assert found["kills"] > 0 and figures["batches"] > 0 and figures["calls"] > 0 and figures["journal_rows"] > 0
    assert figures["task_rows"] > 0
    # So short a time is all warming up for threads and descriptors; segments must not grow from the first second on.
    assert not any(one["grew"] for one in found["growth"] if one["figure"].startswith("segments")), done.stdout
