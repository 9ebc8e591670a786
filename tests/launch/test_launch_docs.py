"""The job of docs/launch.md runs as it is written there."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import preloaded
import pytest
from deadlines import patience

PAGE = Path(__file__).parents[2] / "docs" / "launch.md"
pytestmark = pytest.mark.usefixtures("preloaded_children")


def files(name: str, steps: int, least: int) -> dict[str, str]:
    """The files of the page's job, but for the job's name, the number of steps and that of rows waited for."""
    text = PAGE.read_text()
    (toml,) = re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for wanted, instead in (('name = "pendulum"', f'name = "{name}"'), ("steps = 10_000", f"steps = {steps}")):
        assert toml.count(wanted) == 1, wanted
        toml = toml.replace(wanted, instead)
    scripts = dict(re.findall(r"^```py\n# (\S+\.py)\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    assert scripts["pendulum.py"].count("min_rows=16") == 1
    scripts["pendulum.py"] = scripts["pendulum.py"].replace("min_rows=16", f"min_rows={least}")
    return {"pendulum.toml": toml, **scripts}


def run(folder: Path, made: dict[str, str]) -> dict[str, object]:
    for name, text in made.items():
        (folder / name).write_text(text)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the page's command is `python`
    done = preloaded.run(
        [sys.executable, "-m", "geartrain", "launch", "pendulum.toml", "--folder", "logs", "--lines"],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        timeout=patience(110),
    )
    logs = "".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted((folder / "logs").glob("*.log")))
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{logs}"
    summary: dict[str, object] = json.loads((folder / "logs" / "summary.json").read_text())
    return summary


def check(summary: dict[str, object], learners: int, steps: int, least: int) -> None:
    assert summary["outcome"] == "finished"
    for rank in range(learners):
        learner = summary["processes"][f"learner-{rank}"]  # type: ignore[index]
        assert (learner["steps"], learner["version"]) == (steps, steps)
        assert learner["samples"] == steps * 256 // learners
    assert summary["store"]["inserted"] >= least, "the first batch waited for rows"  # type: ignore[index]
    assert not any(summary["restarts"].values())  # type: ignore[attr-defined]


@pytest.mark.timeout(400)
def test_a_learner_that_starts_before_there_are_rows_waits_for_them(
    store_name: Callable[[], str], tmp_path: Path
) -> None:
    made = files(store_name(), 5, 4)
    assert made["pendulum.toml"].count("processes = 2") == made["pendulum.toml"].count("processes = 4") == 1
    fewer = re.sub("processes = [24]", "processes = 1", made["pendulum.toml"])
    without = fewer[: fewer.index("[role.evaluator]")]
    check(run(tmp_path, {**made, "pendulum.toml": without}), 1, 5, 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_job_of_the_page_runs_with_all_of_its_processes(store_name: Callable[[], str], tmp_path: Path) -> None:
    made = files(store_name(), 30, 16)
    assert list(made) == ["pendulum.toml", "pendulum.py", "evaluate.py", "grpo.py"]
    check(run(tmp_path, made), 2, 30, 16)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tasks_of_the_page_are_done(store_name: Callable[[], str], tmp_path: Path) -> None:
    (toml,) = re.findall(r"^```\n(name = \"grpo\".*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    script = files("unused", 1, 1)["grpo.py"]
    made = {"pendulum.toml": toml.replace('"grpo"', f'"{store_name()}"', 1), "grpo.py": script}
    summary = run(tmp_path, made)
    done = {name: each["rows"] for name, each in summary["processes"].items()}  # type: ignore[attr-defined]
    assert (done["answer-0"], done["reward-0"] + done["reward-1"]) == (64, 64)
    assert summary["processes"]["learner-0"]["steps"] == 64  # type: ignore[index]
