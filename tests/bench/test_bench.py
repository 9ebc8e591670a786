"""The benchmark commands: what their numbers mean, and that every one of them is there. No timing is judged."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path

import pytest

import geartrain_bench as bench
import geartrain_bench.harness.report as report
import geartrain_bench.harness.timing as harness
import geartrain_bench.store.bench as store
from geartrain.core.schema import Field
from geartrain.errors import ArgumentError
from geartrain_bench.harness.baselines import BaselineError, BaselineProcess
from geartrain_bench.harness.timing import BenchResult, Clock, Lap, Row, System

ROW_KEYS = ["case", "system", "metric", "unit", "p50", "p75", "p90", "p95", "ratio_to_floor"]
TINY = store.Plan(
    tables=(
        store.Table("4 KB", store.FLAT, 4, 400_000, 400_000, (8, 32)),
        store.Table("100 KB in 4 fields", store.MULTI, store.MULTI_STEPS, 4_000_000, 4_000_000, (8,), (1,)),
    ),
    repeats=3,
    case_s=0.2,
    budget_s=2.0,
    lap_bytes=100_000,
    single_rows=20,
    small_fields=(1, 4),
    small_batches=(8,),
    small_bytes=400_000,
    small_s=0.2,
)


@pytest.fixture(scope="module")
def tiny() -> BenchResult:
    return store.run(TINY, {}, quick=True)


def result_of(rows: list[Row]) -> BenchResult:
    result = harness.new_result("store", quick=True, baselines=["cpprb"], packages=["numpy"])
    result.rows = rows
    return result


# --- what the numbers mean --------------------------------------------------------------------------------------


def test_a_rate_at_p95_is_the_slow_tail() -> None:
    seconds = [1.0] * 90 + [4.0] * 10
    row = harness.rate_row("case", "ours", "fetch", "GB/s", seconds, 8.0, floor_s=0.5)
    assert (row.p50, row.p75, row.p90, row.p95) == (8.0, 8.0, pytest.approx(8.0, rel=0.7), 2.0)
    assert row.ratio_to_floor == 0.5


def test_a_time_at_p95_is_the_slow_tail_and_its_ratio_is_still_speed() -> None:
    row = harness.time_row("case", "ours", "latency", "us", [2e-6] * 9 + [1e-5] * 11, floor_s=1e-6)
    assert row.p50 == pytest.approx(10.0)
    assert row.p95 == pytest.approx(10.0)
    assert row.ratio_to_floor == pytest.approx(0.1)


def test_systems_take_turns_and_none_goes_always_first() -> None:
    """Nor does one always follow the same other one, whose bytes are in the caches."""
    order: list[str] = []

    def system(name: str) -> System:
        def one_lap() -> Lap:
            order.append(name)
            return Lap(1.0, 1.0)

        return System(name, one_lap)

    laps = harness.take_turns([system(name) for name in "abc"], repeats=20, budget_s=10.0, warmups=0)
    turns = ["".join(order[at : at + 3]) for at in range(0, 60, 3)]
    assert len(turns) == 20 and all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) == 6
    assert {name: len(of_one) for name, of_one in laps.items()} == {"a": 20, "b": 20, "c": 20}


def test_disturbed_laps_are_left_out_of_all_systems_or_of_none() -> None:
    calm, disturbed = Lap(1.0, 1.0), Lap(9.0, 1.0, disturbed=True)
    both = {"a": [calm] * 8 + [disturbed], "b": [disturbed] * 2 + [calm] * 7}
    kept, noisy = harness.quiet(both)
    assert (len(kept["a"]), len(kept["b"]), noisy) == (8, 7, [])
    one = {"a": [calm] * 8 + [disturbed], "b": [disturbed] * 9, "baseline": [disturbed] * 2 + [calm] * 7}
    kept, noisy = harness.quiet(one, alone=["baseline"])
    assert (len(kept["a"]), len(kept["b"]), len(kept["baseline"]), noisy) == (9, 9, 7, ["a", "b"])


def test_the_budget_is_shared_over_the_cases_that_are_left() -> None:
    clock = Clock(10.0, 5)
    assert clock.next_case_s(1.0) == 1.0
    assert clock.next_case_s(60.0) == pytest.approx(2.5, abs=0.2)


# --- what is written down ---------------------------------------------------------------------------------------


def test_the_json_has_the_promised_keys_and_names_its_command(tmp_path: Path) -> None:
    rows = [harness.rate_row("case", "floor", "fetch", "GB/s", [1.0, 2.0], 4.0, 1.5)]
    report.write_json(result_of(rows), tmp_path / "sub" / "result.json")
    written = json.loads((tmp_path / "sub" / "result.json").read_text())
    assert list(written)[:5] == ["bench", "command", "machine", "versions", "rows"]
    assert written["command"] == "geartrain bench store --quick --baseline-python cpprb=/path/to/python"
    assert list(written["rows"][0]) == ROW_KEYS
    assert {"cpu", "cores", "memory_gb", "kernel", "load_average_before"} <= set(written["machine"])
    assert {"python", "geartrain", "numpy"} <= set(written["versions"])


def test_every_bench_is_found_by_its_name_and_no_other() -> None:
    assert bench.load("store") is store.main
    assert all(callable(bench.load(name)) for name in bench.BENCHES)
    with pytest.raises(ArgumentError, match=r"a benchmark on cpu is one of .store.*did you mean .store"):
        bench.load("stroe")


def test_peers_come_from_words() -> None:
    words = ["torchrl-thp=/a/python", "cpprb=/b/python", "cpprb=/c/python"]
    assert report.parse_baselines(words) == {"torchrl-thp": "/a/python", "cpprb": "/c/python"}
    with pytest.raises(ArgumentError, match="NAME=/path/to/python"):
        report.parse_baselines(["cpprb"])


# --- the store's bench ------------------------------------------------------------------------------------------


def test_every_case_of_the_store_bench_has_its_floor_and_finite_numbers(tiny: BenchResult) -> None:
    for row in tiny.rows:
        numbers = (row.p50, row.p75, row.p90, row.p95, row.ratio_to_floor)
        assert all(math.isfinite(number) and number >= 0 for number in numbers), row
    for metric in ("fetch", "insert"):
        cases = {row.case for row in tiny.rows if row.metric == metric}
        assert cases == {
            *(f"4 KB x {batch}, {threads}" for batch in (8, 32) for threads in ("1 thread", "2 threads")),
            "100 KB in 4 fields x 8, 1 thread",
        }
        for case in cases:
            ratios = {r.system: r.ratio_to_floor for r in tiny.rows if (r.metric, r.case) == (metric, case)}
            assert ratios["floor"] == pytest.approx(1.0)
            assert ratios["geartrain"] > 0


def test_peers_that_did_not_run_are_named_with_the_reason(tiny: BenchResult) -> None:
    assert set(store.ALL_BASELINES) <= set(tiny.baselines_missing)
    assert "--baseline-python cpprb=" in tiny.baselines_missing["cpprb"]


def test_a_result_becomes_a_table_and_a_plot(
    tiny: BenchResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    report.report(tiny, None, tmp_path / "plot.png")
    printed = capsys.readouterr().out
    assert "geartrain bench store --quick" in printed
    assert "4 KB x 32, 2 threads" in printed
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


class Time:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(harness.time, "monotonic", lambda: self.now_s)


def test_a_deadline_lets_begin_what_fits_and_names_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    deadline = harness.Deadline(50.0)
    time.now_s += 15.0  # before the first case
    begun = []
    for case in range(6):
        if deadline.allows(f"case {case}"):
            begun.append(case)
            time.now_s += 10.0
    assert begun == [0, 1, 2] and deadline.left_out == ["case 3", "case 4", "case 5"]
    assert deadline.left_s() == 5.0
    without = harness.Deadline()
    assert without.allows("any") and without.left_s() == math.inf and without.left_out == []


#: Those whose first case begins within a second; the others start processes first.
SOON = [
    "store",
    "selection",
    "transitions",
    "llm",
    "fetch",
    "rpc-rl",
    *["online"] * (importlib.util.find_spec("gymnasium") is not None),
]


@pytest.mark.parametrize("name", SOON)
def test_a_quick_run_whose_time_is_over_names_all_that_it_left_out(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(harness, "QUICK_S", 0.0)
    monkeypatch.chdir(tmp_path)
    result = bench.load(name)(quick=True)
    assert result.rows == [] and result.left_out
    assert f"left out, for --quick ends within a minute: {result.left_out[0]}" in capsys.readouterr().out
    assert "deadline" not in result.as_json() and result.as_json()["left_out"] == result.left_out


def test_saved_results_are_drawn_again_by_the_command(tiny: BenchResult, tmp_path: Path) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from geartrain.tools.cli.app import app

    report.report(tiny, tmp_path / "one.json", tmp_path / "plot.png")
    shutil.copy(tmp_path / "one.json", tmp_path / "two.json")
    done = CliRunner().invoke(app, ["bench", "plot", str(tmp_path / "one.json"), str(tmp_path / "two.json")])
    assert done.exit_code == 0, done.output
    for name in ("one", "two"):
        assert (tmp_path / f"{name}.png").read_bytes() == (tmp_path / "plot.png").read_bytes()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "it is not the JSON"),
        ("[]", "is no result of geartrain bench"),
        ('{"bench": "pigeons"}', "is no result of geartrain bench"),
        ('{"bench": "store"}', "no saved result"),
        ('{"bench": "store", "rows": [{"case": 1}]}', "no saved result"),
        ('{"bench": "store", "command": "", "machine": {}, "versions": {}, "rows": []}', "no rows to draw"),
    ],
    ids=["cut", "a list", "another", "without rows", "rows without figures", "no rows"],
)
def test_what_is_no_saved_result_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    saved.write_text(text)
    with pytest.raises(ArgumentError, match=said):
        bench.plot_saved(saved, tmp_path / "plot.png")
    assert not (tmp_path / "plot.png").exists()


# --- peers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "python", "said"),
    [("reverb", sys.executable, "No module named"), ("cpprb", "/nowhere/python", "does not start")],
    ids=["reverb", "no interpreter"],
)
def test_a_baseline_that_cannot_be_started_is_an_error_that_says_why(name: str, python: str, said: str) -> None:
    with pytest.raises(BaselineError, match=said):
        BaselineProcess(name, python, 4, {"x": Field((2,), "float32")}, 2)


def test_a_peer_that_never_answers_is_an_error_not_a_hang(tmp_path: Path) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nsleep 60\n")
    silent.chmod(0o755)
    with pytest.raises(BaselineError, match=r"no answer within 0\.2 s"):
        BaselineProcess("cpprb", str(silent), 4, {"x": Field((2,), "float32")}, 2, setup_s=0.2)


def test_a_failing_peer_does_not_end_the_bench() -> None:
    plan = store.Plan(
        tables=(store.Table("4 KB", store.FLAT, 4, 100_000, 100_000, (8,), (1,)),),
        repeats=3,
        case_s=0.1,
        budget_s=0.2,
        lap_bytes=50_000,
        single_rows=5,
    )
    result = store.run(plan, {"cpprb": "/nowhere/python", "elsewhere": sys.executable})
    assert "does not start" in result.baselines_missing["cpprb"]
    assert "unknown to this bench" in result.baselines_missing["elsewhere"]
    assert any(row.system == "geartrain" for row in result.rows)
