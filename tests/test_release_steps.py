"""Builds of wheels go on where they were interrupted, and do again only what changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import patience

RELEASE = Path(__file__).parent.parent / "release"


@pytest.fixture(autouse=True)
def _import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RELEASE)


def build(folder: Path, sources: dict[str, str], broken: str = "") -> tuple[list[str], list[str]]:
    """What was done of a step for each source, and what failed."""
    from steps import Made, StepError, Steps, digest

    done = []

    def make(name: str) -> Made:
        if name == broken:
            raise StepError("the compiler failed")
        done.append(name)
        made = folder / f"{name}.whl"
        made.write_text(sources[name].upper())
        return Made((made,))

    steps = Steps(folder / "steps", list(sources))
    for name, source in sources.items():
        steps.once(name, digest(source), lambda name=name: make(name))
    return done, steps.failed


def test_a_step_is_done_once_for_what_it_is_made_of(tmp_path: Path) -> None:
    assert build(tmp_path, {"a": "x", "b": "y"}) == (["a", "b"], [])
    assert build(tmp_path, {"a": "x", "b": "y"}) == ([], [])
    assert build(tmp_path, {"a": "x", "b": "z"}) == (["b"], [])


def test_a_step_whose_file_is_another_is_done_again(tmp_path: Path) -> None:
    build(tmp_path, {"a": "x", "b": "y", "c": "z"})
    (tmp_path / "a.whl").unlink()
    (tmp_path / "b.whl").write_text("torn")
    assert build(tmp_path, {"a": "x", "b": "y", "c": "z"}) == (["a", "b"], [])


def test_a_step_that_fails_costs_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(tmp_path, {"a": "x", "b": "y", "c": "z"}, broken="b") == (["a", "c"], ["b: the compiler failed"])
    assert "[2/3] b: FAILED" in capsys.readouterr().out
    assert build(tmp_path, {"a": "x", "b": "y", "c": "z"}) == (["b"], [])
    told = capsys.readouterr().out
    assert "[1/3] a: as it was; left: b, c" in told and "[2/3] b: done in" in told


def test_a_step_that_failed_is_not_taken_for_what_it_was_before(tmp_path: Path) -> None:
    build(tmp_path, {"a": "x"})
    assert build(tmp_path, {"a": "y"}, broken="a")[1]
    assert build(tmp_path, {"a": "x"}) == (["a"], [])  # the failed one may have changed the files


def test_an_interrupted_step_is_done_again_and_lets_go_of_its_lock(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from steps import Made, Steps
folder = Path(sys.argv[1])
steps = Steps(folder / "steps", ["a", "b"])
steps.once("a", "1", Made)
steps.once("b", "1", lambda: os.kill(os.getpid(), signal.SIGKILL))
"""
    # (an interpreter without site, which imports nothing else: cheaper than a fork of one that has imported torch)
    killed = subprocess.Popen(
        [sys.executable, "-S", "-c", program, str(tmp_path)],
        env={"PYTHONPATH": str(RELEASE)},
        stdout=subprocess.DEVNULL,
    )
    assert killed.wait(patience(30)) == -9
    from steps import Made, Steps

    done = []
    steps = Steps(tmp_path / "steps", ["a", "b"])
    for name in ("a", "b"):
        steps.once(name, "1", lambda name=name: (done.append(name), Made())[1])
    assert done == ["b"]
