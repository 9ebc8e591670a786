"""`geartrain bench llm`: every part has its figures beside its floor, and targets are judged as written. No time is."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import geartrain_bench.harness.timing as harness
import geartrain_bench.llm.bench as llm
import geartrain_bench.llm.links as links
import geartrain_bench.llm.memory as memory
import geartrain_bench.llm.processes as processes
import geartrain_bench.llm.report as llm_report
from geartrain.tools.testing.cluster import Hosts
from geartrain_bench import BenchResult, load, plot_saved
from geartrain_bench.harness.report import write_json
from geartrain_bench.harness.timing import Row
from geartrain_bench.llm.run import CPU, PEER, WALL, Plan, Run

TINY = Plan(
    answers=16, per_row=(4,), repeats=2, case_s=0.05, calls=2, ready_rows=128, claimers=2, claims=2, wakes=20,
    wake_laps=1, pipeline_rows=64, pipeline_laps=1, region_rows=16, region_bytes=4 << 20, growing_bytes=4 << 20,
    settling=1, full_moments=2, gather_bytes=1 << 20, read_bytes=1 << 17, link_hosts=2, train_ms=0.1, link_batches=2,
    link_rounds=1, remote_rows=16, remote_laps=1,
)  # fmt: skip


def new_run(**changes: object) -> Run:
    result = harness.new_result("llm", quick=False, baselines=(), packages=())
    return Run(dataclasses.replace(TINY, **changes), result)


def test_without_its_peer_every_call_is_measured_beside_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "_memory", lambda one: {})
    monkeypatch.setattr(llm, "_alone", lambda one: {})
    monkeypatch.setattr(processes, "claims", lambda one: None)
    result = llm.run(TINY, {"transferqueue": sys.executable + "-that-is-not", "pigeon": sys.executable})
    cases = [f"{part}, rows of {n}" for n in TINY.per_row for part in ("put", "packed fetch", "a later field")]
    for case in (*cases, "one row"):
        for metric in (CPU, WALL):
            rows = {row.system: row for row in result.rows if (row.case, row.metric) == (case, metric)}
            assert rows["floor"].ratio_to_floor == 1.0 and rows["geartrain"].p50 > 0
            assert ("geartrain, padded rows" in rows) == (case == "one row" or "later" in case)
    assert "does not start" in result.baselines_missing["transferqueue"]
    assert llm.INSTALL in result.baselines_missing["transferqueue"]
    assert "unknown" in result.baselines_missing["pigeon"]
    assert llm.INSTALL in llm.run(TINY, {}, only=("one row",)).baselines_missing["transferqueue"]


def test_a_peer_that_returns_other_bytes_or_fails_is_lost_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from geartrain_bench.llm.calls import packed_fetch

    class Stranger:
        def digest(self) -> str:
            return "other"

        def close(self) -> None:
            closed.append(True)

    closed: list[bool] = []
    run = new_run()
    run.peer = Stranger()  # type: ignore[assignment]
    packed_fetch(run, 4)
    assert run.peer is None and closed and "other bytes" in run.result.baselines_missing["transferqueue"]
    assert {row.system for row in run.result.rows} == {"floor", "geartrain"}


def test_processes_claim_wake_and_train(monkeypatch: pytest.MonkeyPatch, preloaded_children: None) -> None:
    run = new_run()
    processes.claims(run)
    processes.wakes(run)
    processes.example(run, appends=True)
    processes.example(run, appends=False)
    found = {(row.case, row.system): row for row in run.result.rows}
    assert found["claim 16 of 128 rows", "geartrain"].p50 > 0
    for case in ("16 answers of 20 tokens, each appended", "16 answers of 20 tokens, a put a claim"):
        assert found[case, "geartrain"].unit == "rows/s"
        assert {system for of, system in found if of == case} == {
            "geartrain",
            *(f"geartrain, {loop}" for loop in processes.LOOPS),
        }


@pytest.mark.slow
@pytest.mark.skipif(Hosts.viable() is not None, reason=str(Hosts.viable()))
def test_learners_of_several_hosts_are_compared_with_one(preloaded_children: None) -> None:
    run = new_run()
    links.links(run)
    assert [row.system for row in run.result.rows] == [links.ONE, links.BALANCED, "as many rows each"]
    assert all(row.p50 >= 0.1 for row in run.result.rows), "training alone takes so long"
    assert "0 % of bytes came from other hosts" in run.result.notes[0]


def result_of(*rows: tuple[str, str, str, float]) -> BenchResult:
    made = harness.new_result("llm", quick=False, baselines=(), packages=())
    made.rows = [Row(case, system, metric, "ms", p50, p50, p50, p50, 0.5) for case, system, metric, p50 in rows]
    return made


def test_targets_are_met_or_not_as_they_are_written(tmp_path: Path) -> None:
    def judged(*rows: tuple[str, str, str, float]) -> dict[str, bool]:
        return {one.what: one.met for one in llm_report.targets(result_of(*rows))}

    put, fetch = "put, rows of 16", "packed fetch, rows of 1"
    assert judged((put, PEER, CPU, 40.0), (put, "geartrain", CPU, 1.0)) == {f"{put}: its CPU / ours": True}
    assert judged((put, PEER, CPU, 39.0), (put, "geartrain", CPU, 1.0)) == {f"{put}: its CPU / ours": False}
    assert judged((fetch, "geartrain", WALL, 2.1), (fetch, "floor", WALL, 1.0)) == {f"{fetch}: time / memcpy": False}
    wake = processes.WAKES
    assert list(
        judged(("p50 of 9 wakes", "geartrain", wake, 99.0), ("p99 of 9 wakes", "geartrain", wake, 1001.0)).values()
    ) == [
        True,
        False,
    ]
    rows_of_16 = "20 to 2,000 tokens, mean 500, rows of 16"
    full = [
        (rows_of_16, "geartrain", memory.MEMORY, 1.06),
        (f"{rows_of_16}, growing", "geartrain", memory.MEMORY, 1.06),
    ]
    assert list(judged(*full).values()) == [False, True]
    gathers = ("20 to 400 tokens, rows of 1", "200 to 2,048 tokens, rows of 16", "1.2 KB a field and row")
    assert list(judged(*((case, "geartrain", memory.GATHER, 1.0) for case in gathers)).values()) == [True, False]
    times = [("4 hosts", links.ONE, links.TIME, 5.0), ("4 hosts", links.BALANCED, links.TIME, 5.2)]
    assert list(judged(*times).values()) == [True]
    assert judged((put, "geartrain", CPU, 1.0)) == {}


def test_it_is_known_by_name_and_its_saved_result_is_drawn_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    assert load("llm") is llm.main
    case = "put, rows of 16"
    result = result_of(
        (case, "floor", CPU, 0.1), (case, "geartrain", CPU, 0.4), (case, PEER, CPU, 40.0),
        ("200 to 2,048 tokens, rows of 16", "geartrain", memory.MEMORY, 1.02),
        ("1.2 KB a field and row", "geartrain", memory.GATHER, 3.0),
    )  # fmt: skip
    llm_report.show(result, tmp_path / "llm.json", tmp_path / "drawn.png")
    printed = capsys.readouterr().out
    assert "targets" in printed and ">= 40" in printed
    plot_saved(tmp_path / "llm.json", tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "drawn.png").read_bytes()
    write_json(result, tmp_path / "llm.json")
    assert math.isclose(llm_report.targets(result)[0].found, 100.0)
