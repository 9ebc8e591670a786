"""The selection bench: every case has its floor and its numbers, and wrong draws show. No timing is judged."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import patience

import geartrain_bench.harness.baseline_worker as peer_worker
import geartrain_bench.selection.bench as selection
import geartrain_bench.selection.names as names
from geartrain.store.store import Store
from geartrain_bench import plot_saved
from geartrain_bench.harness.timing import BenchResult, Lap, Row, System
from geartrain_bench.selection.bench import SelectionResult
from geartrain_bench.selection.speedups import speedups
from geartrain_bench.selection.steps import NamedSteps
from geartrain_bench.selection.uniformity import uniformity

TINY = selection.Plan(
    sizes=(1000, 20_000),
    batches=(16, 300),
    check_rows=20_000,
    check_draws=80_000,
    repeats=3,
    case_s=0.05,
    peer_case_s=0.05,
    peer_sizes=(20_000,),
    lap_s=1e-4,
)


@pytest.fixture(scope="module")
def tiny() -> SelectionResult:
    return selection.run(TINY, {}, quick=True)


def test_every_case_has_its_floor_and_finite_numbers(tiny: SelectionResult) -> None:
    for row in tiny.rows:
        numbers = (row.p50, row.p75, row.p90, row.p95, row.ratio_to_floor)
        assert all(math.isfinite(number) and number >= 0 for number in numbers), row
    cases = {names.case_name(rows, batch) for rows in TINY.sizes for batch in TINY.batches}
    for what in ("sample", "update"):
        for clock in ("CPU", "wall"):
            of_metric = [row for row in tiny.rows if row.metric == f"{what}, {clock} time per row"]
            assert {row.case for row in of_metric} == cases
            for case in cases:
                ratios = {row.system: row.ratio_to_floor for row in of_metric if row.case == case}
                assert ratios["floor"] == pytest.approx(1.0)
                assert {"floor", "geartrain"} < set(ratios)


def test_steps_are_drawn_and_updated_in_a_store_opened_by_name_and_writers_rows_are_taken_away() -> None:
    rng = np.random.default_rng(0)
    timed: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {}

    def keep(name: str, prepare: Callable[[], Any], call: Callable[[Any], object]) -> System:
        timed[name] = (prepare, call)
        return System(name, lambda: Lap(0.0, 0.0))

    with NamedSteps(5000, lambda n: rng.random(n, np.float32), alpha=0.6, beta=0.4, seed=1) as steps:
        filled = steps.store.keys()
        before = steps.store.stats()["priorities_updated"]
        for what in ("sample", "update"):
            steps.systems(what, 64, keep)
        deadline, appeared = time.monotonic() + patience(20), 0
        while time.monotonic() < deadline and steps.store.stats()["deleted"] < 8:  # rows of two writers
            for prepare, call in timed.values():
                call(prepare())
            appeared = max(appeared, len(steps.store.keys()))
        assert steps.store.stats()["priorities_updated"] > before
        name = steps.store.name
        with Store.open(name) as kept:
            steps.__exit__(None, None, None)
            assert steps.kills >= 2 and appeared > len(filled) == 5
            assert kept.keys() == filled
            assert kept.audit() == []


def test_equal_priorities_are_drawn_alike(tiny: SelectionResult) -> None:
    assert sum(tiny.counts["geartrain"]) == pytest.approx(TINY.check_draws / 2, rel=0.02)
    (row,) = [row for row in tiny.rows if row.metric == names.P_METRIC]
    assert row.p50 > 1e-4


def test_the_chance_of_counts_is_the_one_in_the_tables() -> None:
    # Chi-square with 7 degrees of freedom is above 14.067 with a chance of 5 %, above 18.475 with one of 1 %.
    for x, p in ((14.067, 0.05), (18.475, 0.01)):
        off = math.sqrt(x * 1e6 / 2)
        assert uniformity([1_000_000 + off, 1_000_000 - off, *[1_000_000] * 6]) == pytest.approx(p, rel=1e-3)
    assert uniformity([5] * 8) == 1.0
    assert uniformity([0, 0, 0, 342_673, 0, 0, 0, 1_657_665]) == 0.0
    with pytest.raises(ValueError, match="8 counts"):
        uniformity([0] * 8)


def test_speedups_are_over_the_baseline_that_is_best_at_both_together() -> None:
    times = {"a": (100, 300), "b": (150, 150), "only samples": (1, None), "geartrain with importance": (20, None)}
    times |= {"geartrain with alpha": (None, 40), "geartrain steps with importance": (60, None)}
    result = BenchResult("selection", "", {}, {})
    for system, both in times.items():
        for what, ns in zip(("sample", "update"), both, strict=True):
            if ns is not None:
                result.rows.append(Row("N 1000, B 16", system, names.cpu_metric(what), "ns", ns, 0, 0, 0, 1.0))
    assert speedups(result, ["a", "b", "only samples"]) == {"N 1000, B 16": {"rows": 300 / 60}}
    assert speedups(result, []) == {}


def test_a_result_becomes_tables_json_and_a_plot(
    tiny: SelectionResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    selection.show(TINY, tiny, tmp_path / "result.json", tmp_path / "plot.png")
    printed = capsys.readouterr().out
    assert "geartrain bench selection --quick" in printed
    assert "by index mod 8" in printed
    assert "best baseline" not in printed  # a table of nothing, where none was measured
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "result.json").read_text())
    assert list(written)[:5] == ["bench", "command", "machine", "versions", "rows"]
    assert len(written["counts"]["geartrain"]) == 8
    plot_saved(tmp_path / "result.json", tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "plot.png").read_bytes()


# --- peers ------------------------------------------------------------------------------------------------------


class Exact(peer_worker.PriorityBaseline):
    """A peer without a library: cumsum and searchsorted."""

    def make(self) -> None:
        self.priorities = np.zeros(self.rows)

    def write(self, rows: object, priorities: object) -> None:
        self.priorities[rows] = priorities

    def draw(self, n: int) -> object:
        return np.searchsorted(np.cumsum(self.priorities), self.noise.random(n) * self.priorities.sum(), side="right")


def test_a_priority_peer_fills_draws_changes_and_counts() -> None:
    peer = Exact()
    peer.setup(1600, {})
    assert (peer.priorities > 0).all()
    assert peer.laps() == ["sample", "update"]
    for what in peer.laps():
        timed = peer_worker.timed(peer, what, 32, 3)
        assert timed["seconds"] >= 0
    counts = peer.counts(40_000)
    assert sum(counts) == pytest.approx(20_000, rel=0.05)
    assert uniformity(counts) > 1e-4
