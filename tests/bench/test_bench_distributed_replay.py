"""`geartrain bench ranks`: every case has its floor, bytes and times; a lost rank ends it. No timing is judged."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
from deadlines import patience

pytest.importorskip("torch")

import geartrain_bench as bench
import geartrain_bench.distributed_replay.bench as ranks
import geartrain_bench.distributed_replay.report as ranks_report
import geartrain_bench.harness.report as report
from geartrain.tools.testing.cluster import Hosts
from geartrain_bench.harness.baselines import BaselineError
from geartrain_bench.harness.fleet import Fleet

no_hosts = Hosts.viable()
needs_hosts = pytest.mark.skipif(no_hosts is not None, reason=str(no_hosts))
ROW_BYTES = 4096
SCALING = ranks.Scaling((2,), (2,), (16,), ("prioritized", "fifo"), (16,), rows=400, case_bytes=0, least=20, most=20)
LINKS = ranks.Links(hosts=2, rate_mbit=100, batch_per_host=16, train_ms=(2.0,), batches=20, rows_per_host=100)
# Up to three batches are made ahead, before a lap that lasts 20 or after it; the slow arms of LINKS last 8.
ABOUT = 0.2, 1.8


#: Tests of one run of the whole bench, ten seconds of a core. Without them laps, refusals and failures are looked at.
whole_bench = pytest.mark.slow


@pytest.fixture(scope="module")
def result() -> ranks.RanksResult:
    """Two processes on one host; where hosts can be made, two hosts and the links as well."""
    with preloaded.children():
        return ranks.run(ranks.Plan(SCALING, LINKS, ROW_BYTES), {}, quick=True, constants=False)


def cases(result: ranks.RanksResult, part: str) -> dict[str, dict[str, Any]]:
    return {case["case"]: case for case in result.cases if case["part"] == part}


@whole_bench
def test_processes_of_one_host_move_nothing_and_every_case_has_a_floor(result: ranks.RanksResult) -> None:
    found = cases(result, "scaling")
    assert {"2 on 1 host, prioritized x 16", "2 on 1 host, fifo x 16"} <= set(found)
    for name, case in found.items():
        floors = [row for row in result.rows if row.case == name and row.system == "floor"]
        assert [row.ratio_to_floor for row in floors] == [pytest.approx(1.0)]
        assert case["samples_per_s"] > 0 and case["batch_ms"] > 0
        assert case["select_ms"] > 0 and case["fetch_ms"] > 0
        assert case["selection_bytes"] > ABOUT[0] * 2 * 56, "two ranks tell each other who they are, and their totals"
        if case["hosts"] == 1:
            assert case["moved_bytes"] == 0
    numbers = [number for row in result.rows for number in (row.p50, row.p75, row.p90, row.p95, row.ratio_to_floor)]
    assert all(math.isfinite(number) and number >= 0 for number in numbers)


def test_laps_of_the_floor_are_taken_before_and_after_each_round_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    ask = Fleet.ask

    def recorded(self: Fleet, members: Any, timeout_s: float = 180.0, **request: Any) -> Any:
        done.append(request["do"])
        return ask(self, members, timeout_s, **request)

    monkeypatch.setattr(Fleet, "ask", recorded)
    plan = ranks.Plan(
        ranks.Scaling((1,), (), (16,), ("prioritized",), (), rows=400, least=12, rounds=3), None, ROW_BYTES
    )
    with preloaded.children():
        result = ranks.run(plan, {}, quick=True, constants=False)
    floor = ["floor", "floor"]  # with ordinary and with streaming stores
    assert done[done.index("prepare") + 1 : done.index("finish")] == [*[*floor, "warm", "go"] * 3, *floor]
    (row,) = (row for row in result.rows if row.system == "floor")
    assert row.p50 >= row.p75 >= row.p95 > 0 and row.p50 > row.p95, "of several laps"


@whole_bench
@needs_hosts
def test_hosts_move_only_the_surplus_but_for_the_arms_that_move_all(result: ranks.RanksResult) -> None:
    found = {case["system"]: case for case in cases(result, "links").values()}
    assert list(found) == ["one host", "local_first", "ordered", "central"]
    batch_bytes = 32 * ROW_BYTES
    assert found["one host"]["wire_bytes"] < 2000
    assert found["local_first"]["moved_bytes"] < found["ordered"]["moved_bytes"] < batch_bytes
    # All rows are host 0's: half of the batch goes to the other host.
    assert found["central"]["expected_bytes"] == batch_bytes / 2
    for case in found.values():
        if case["hosts"] > 1:
            counted, told = case["wire_bytes"], case["moved_bytes"]
            assert ABOUT[0] * told < counted < 10 * told, (
                "the interfaces counted about what the replay did, and headers"
            )
            # A host's own count may hold frames that were queued in the shaper when counting began.
            assert case["busiest_bytes"] <= 1.25 * counted
        if case["system"] in ("ordered", "central"):
            assert ABOUT[0] < case["moved_bytes"] / case["expected_bytes"] < ABOUT[1]


@whole_bench
@needs_hosts
def test_the_result_can_be_shown_kept_and_drawn(
    result: ranks.RanksResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    report.report(result, overview=lambda measured: ranks_report.print_cases(measured.cases))
    printed = capsys.readouterr().out
    assert "2 ms, local_first" in printed and "2 on 1 host, prioritized x 16" in printed
    report.write_json(result, tmp_path / "ranks.json")
    written = json.loads((tmp_path / "ranks.json").read_text())
    assert written["bench"] == "ranks" and len(written["cases"]) == len(result.cases)
    ranks_report.plot(result, result.cases, tmp_path / "ranks.png")
    for name in ("ranks.png", "ranks-batch.png", "ranks-scale.png"):
        drawn = (tmp_path / name).read_bytes()
        assert drawn.startswith(b"\x89PNG")
        bench.plot_saved(tmp_path / "ranks.json", tmp_path / "ranks.png")
        assert (tmp_path / name).read_bytes() == drawn


def test_a_rank_that_fails_ends_the_bench_with_its_own_words() -> None:
    with Fleet.here(1) as fleet:
        with pytest.raises(BaselineError, match="rank 0: KeyError: 'no such store'"):
            fleet.ask([0], do="floor", store="no such store", rows=1, calls=1, threads=1, stream=False)
        with pytest.raises(BaselineError, match="rank 0 ended"):
            fleet.ask([0], do="leave")


def test_a_process_that_never_answers_is_an_error_not_a_hang() -> None:
    with Fleet.here(1, ["sh", "-c", "read one; read another"]) as fleet:
        with pytest.raises(BaselineError, match=r"ranks \[0\] gave no answer .* in 0\.2 s"):
            fleet.ask([0], timeout_s=0.2, do="leave")


def test_plan_predicts_a_cluster_and_writes_what_it_predicted(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    words = "plan ranks --hosts 3 --gpus 8 --rows 1e9 --batch 1032 --row-bytes 100e3 --link-gbit 200 --memory-gb 1000"
    path = tmp_path / "plan.json"
    command = [sys.executable, "-m", "geartrain", *words.split(), "--json", str(path)]
    done = preloaded.run(command, env={**os.environ, "COLUMNS": "140"}, timeout=patience(60))
    assert done.returncode == 0, done.stderr
    assert "3 x 8 ranks" in done.stdout and "33 times the hosts' memory" in done.stdout
    (cluster,) = json.loads(path.read_text())["clusters"]
    assert [each["arm"] for each in cluster["predictions"]] == ["local_first", "ordered", "central"]
