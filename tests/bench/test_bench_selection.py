"""The selection bench: every case has its floor and its numbers, and wrong draws show. No timing is judged."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import geartrain_bench as bench
import geartrain_bench.harness.baseline_worker as peer_worker
import geartrain_bench.selection.bench as selection
import geartrain_bench.selection.names as names
from geartrain_bench import plot_saved
from geartrain_bench.harness.baselines import BaselineError, BaselineProcess
from geartrain_bench.selection.bench import SelectionResult
from geartrain_bench.selection.uniformity import uniformity, upper_half_counts

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
#: As for 20000 rows, with the store and the peers one after the other, as above 2e7 rows.
APART = selection.Plan(**{**vars(TINY), "sizes": (20_000,), "batches": (16,), "rows_beside_peers": 1000})


@pytest.fixture(scope="module")
def tiny() -> SelectionResult:
    return selection.run(TINY, {}, quick=True)


def test_it_is_known_by_name() -> None:
    assert bench.load("selection") is selection.main


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


def test_all_our_ways_of_drawing_and_changing_are_there(tiny: SelectionResult) -> None:
    systems = {what: {r.system for r in tiny.rows if r.metric.startswith(what)} for what in ("sample", "update")}
    ours = {"", " with importance", " stratified", " Uniform", " store"}
    assert {f"geartrain{way}" for way in ours} < systems["sample"]
    assert systems["update"] == {"floor", "geartrain", "geartrain with alpha"}
    assert "NumPy cumsum+searchsorted" in systems["sample"]


def test_small_batches_have_their_time_per_call_as_well(tiny: SelectionResult) -> None:
    calls = [row for row in tiny.rows if row.metric == "sample, CPU time per call"]
    assert {row.case for row in calls} == {names.case_name(rows, 16) for rows in TINY.sizes}
    assert {row.unit for row in calls} == {"us"}


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


def test_only_the_upper_half_is_counted() -> None:
    rows = np.array([0, 7, 8, 9, 15, 15], np.uint32)
    assert upper_half_counts(rows, 16).tolist() == [1, 1, 0, 0, 0, 0, 0, 2]


def test_a_large_case_is_measured_in_two_parts_and_says_so() -> None:
    result = selection.run(APART, {})
    assert any("were not interleaved" in note for note in result.notes)
    systems = {row.system for row in result.rows if row.metric == names.cpu_metric("update")}
    assert systems == {"floor", "geartrain", "geartrain with alpha"}
    sampled = {row.system for row in result.rows if row.metric == names.cpu_metric("sample")}
    assert {"geartrain", "geartrain store"} < sampled


def test_sizes_are_written_shortly() -> None:
    assert [names.short(n) for n in (256, 1000, 10_000, 100_000_000, 50_000_000)] == [
        "256",
        "1000",
        "1e4",
        "1e8",
        "5e7",
    ]


def test_peers_that_did_not_run_are_named_with_the_reason(tiny: SelectionResult) -> None:
    assert set(selection.ALL_BASELINES) <= set(tiny.baselines_missing)
    result = selection.run(APART, {"cpprb": "/nowhere/python", "elsewhere": sys.executable})
    assert "does not start" in result.baselines_missing["cpprb"]
    assert "unknown to this bench" in result.baselines_missing["elsewhere"]


def test_no_segment_is_left_behind(tiny: SelectionResult) -> None:
    assert tiny.rows
    assert not Path(f"/dev/shm/geartrain_bench-{os.getpid()}").exists()


def test_a_result_becomes_tables_json_and_a_plot(
    tiny: SelectionResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    selection.show(TINY, tiny, tmp_path / "result.json", tmp_path / "plot.png")
    printed = capsys.readouterr().out
    assert "geartrain bench selection --quick" in printed
    assert "by index mod 8" in printed
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "result.json").read_text())
    assert list(written)[:5] == ["bench", "command", "machine", "versions", "rows"]
    assert len(written["counts"]["geartrain"]) == 8
    plot_saved(tmp_path / "result.json", tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "plot.png").read_bytes()


def test_the_plot_has_a_line_per_system_over_all_sizes(tiny: SelectionResult) -> None:
    panels = selection.panels(TINY, tiny)
    assert list(panels) == [f"{what}, B = {batch}" for what in ("sample", "update") for batch in (16, 300)]
    assert [x for x, _ in panels["sample, B = 16"]["geartrain"]] == [1000.0, 20_000.0]


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


def test_a_priority_peer_that_is_not_installed_is_an_error_that_says_so() -> None:
    with pytest.raises(BaselineError, match="No module named"):
        BaselineProcess("tianshou", sys.executable, 4, {}, kind="priorities")
