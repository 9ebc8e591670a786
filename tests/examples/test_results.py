"""`make results` tells the truth: a promise that was not kept, a crash and a missing curve are no success."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import preloaded
import pytest
from deadlines import patience

pytest.importorskip("rich", reason="progress bars need rich")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import results

pytestmark = pytest.mark.usefixtures("preloaded_children")
SCRIPT = """
import sys
sys.path.insert(0, {examples!r})
import curves
chosen = curves.options("").parse_args(sys.argv[2:])
curve = curves.Curve("test", "step", "score", chosen, baseline=1.0)
for step in range(4):
    curve.point(step, step * chosen.seed, step - 1, step + 1)
curve.content["losses"] = [1.0, 0.5 + chosen.seed / 100]
curve.finish(score=3.0 * chosen.seed)
sys.exit(sys.argv[1])
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The table of results, the folder where all of them were run, what was printed and the exit code."""
    folder = tmp_path_factory.mktemp("results")
    script = folder / "script.py"
    script.write_text(
        SCRIPT.replace("{examples!r}", repr(str(results.HERE))).replace("sys.argv[1])", "int(sys.argv[1]))")
    )

    def entry(seed, code=0, **how):
        how = {"at_least": 6.0, "timeout_s": patience(60.0), **how}
        return results.Result(f"python {script} {code} --seed {seed}", "score of 6", "score", **how)

    table = {
        "good": entry(2),
        "poor": entry(1),
        "crashed": entry(2, 3),
        "nothing": results.Result("python -c pass", "a curve", "score"),
        "near": entry(3, follows="good", apart=0.05),
        "far": entry(9, follows="good", apart=0.05),
    }
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(said), preloaded.children():
        patched.setattr(results, "RESULTS", table)
        code = results.main([*table, "--out", str(folder / "out")])
    return table, folder / "out", said.getvalue(), code


@pytest.fixture
def table(made, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", made[0])


def summary(out):
    return json.loads((out / "summary.json").read_text())


def test_a_promise_is_kept_or_not(table, made, capsys, tmp_path):
    _, out, printed, code = made
    assert code == 1
    assert summary(out)["good"]["measured"] == 6.0
    assert summary(out)["near"]["losses_apart"] == pytest.approx(0.01 / 0.52)
    assert (summary(out)["near"]["met"], summary(out)["poor"]["met"]) == (True, False)
    assert (out / "good.png").stat().st_size > 5000
    assert "score of 6" in printed and "score 3" in printed
    assert results.main(["good", "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    assert results.main(["--markdown", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "| near | score of 6 | 9 |" in shown and "| poor | score of 6 | 3, **not met** |" in shown


def test_a_crash_or_no_curve_or_another_curve_is_no_success(table, made, tmp_path):
    _, out, _, _ = made
    lines = summary(out)
    assert not lines["crashed"]["met"] and lines["crashed"]["why"] == "exit code 3"
    assert not lines["nothing"]["met"] and "no curve" in lines["nothing"]["why"]
    assert not lines["far"]["met"] and lines["far"]["losses_apart"] > 0.05
    with pytest.raises(SystemExit):
        results.main(["unknown"])
    assert results.main(["near", "--out", str(tmp_path / "empty")]) == 1
    assert "run good first" in summary(tmp_path / "empty")["near"]["why"]
    assert set(lines) == set(made[0])


def test_every_result_runs_an_example_that_is_there():
    for name, result in results.RESULTS.items():
        (script,) = (word for word in result.command.split() if word.endswith(".py"))
        assert (results.HERE.parent / script).exists(), f"{name} runs {script}"
        assert "--seed" in result.command
        assert result.at_least > float("-inf") or result.at_most < float("inf")
        assert result.follows is None or result.follows in results.RESULTS
