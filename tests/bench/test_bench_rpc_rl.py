"""The RL benchmark takes the original's arguments, does its work over both backends, and writes its JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
from deadlines import patience

import geartrain_bench as bench
from geartrain.errors import ArgumentError, PeerLostError

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.rpc.is_available():
    pytest.skip("this torch has no torch.distributed.rpc", allow_module_level=True)

import geartrain_bench.rpc_rl.bench as rpc_rl  # noqa: E402
from geartrain_bench.rpc_rl.samples import METRICS, Samples  # noqa: E402
from geartrain_bench.rpc_rl.settings import read  # noqa: E402
from geartrain_bench.rpc_rl.team import started  # noqa: E402

ORIGINAL_KEYS = [
    "world_size",
    "master_addr",
    "master_port",
    "batch",
    "state_size",
    "nlayers",
    "out_features",
    "output_file_path",
]
SMALL = ["--master-port", "0", "--state-size", "3-4", "--nlayers", "1"]


# --- arguments -----------------------------------------------------------------------------------------------------


def test_arguments_have_both_spellings_and_the_defaults_of_the_original() -> None:
    defaults = dict(read([]).values)
    assert list(defaults) == ORIGINAL_KEYS
    assert list(defaults.values()) == [
        10, "127.0.0.1", "29501", True, "10-20-10", 5, 10, "benchmark_report.json",
    ]  # fmt: skip
    dashes = read(["--world-size=12", "--out-features", "3", "--output-file-path", "a.json", "--batch", "N"])
    lines = read(["--world_size", "12", "--out_features=3", "--output_file_path=a.json", "--batch=false"])
    assert dashes == lines
    assert dashes.values["world_size"] == 12 and dashes.values["batch"] is False


def test_one_list_becomes_the_x_axis_and_a_second_is_refused() -> None:
    settings = read(["--batch", "True,no", "--world-size", "5"])
    assert settings.x_axis_name == "batch"
    assert [point["batch"] for point in settings.points()] == [True, False]
    with pytest.raises(ValueError, match=r"^Only 1 x axis graph variable allowed$"):
        read(["--world_size=10,20", "--nlayers", "1,2"])


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        ("--world-size", "2", "3 or more, found '2'"),
        ("--world-size", "10,x", "found 'x'"),
        ("--batch", "maybe", "true or false, found 'maybe'"),
        ("--state-size", "10-0", "such as 10-20-10, found '10-0'"),
        ("--out-features", "0", "1 or more"),
        ("--threads", "0", "must be at least 1, found 0"),
        ("--agent-threads", "0", "must be at least 1, found 0"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(argument: str, value: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        read([argument, value])


# --- metrics -------------------------------------------------------------------------------------------------------


def test_metrics_are_percentiles_of_samples_and_only_the_original_fields_are_rounded() -> None:
    samples = Samples(batch_size=8, agent=[0.0012345] * 10, observer=np.linspace(0.001, 0.002, 101).tolist())
    found = samples.metrics()
    assert found["agent latency (seconds)"] == {"p50": 0.001, "p75": 0.001, "p90": 0.001, "p95": 0.001}
    assert found["agent_latency_us"]["p50"] == pytest.approx(1234.5)
    assert found["agent throughput"]["p50"] == int(8 / 0.0012345)
    assert found["observer_latency_us"]["p95"] == pytest.approx(1950)
    rates = list(found["observer throughput"].values())
    assert rates == sorted(rates), "p95 of a throughput is that of the best"


# --- the work ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "backend"),
    [
        (True, "geartrain"),
        (False, "torch"),
        pytest.param(False, "geartrain", marks=pytest.mark.slow),
        pytest.param(True, "torch", marks=pytest.mark.slow),
    ],
)
def test_every_step_of_every_observer_is_measured(backend: str, batch: bool) -> None:
    settings = read([*SMALL, "--world-size", "5", "--batch", str(batch), "--agent-threads", "2"])
    with started(backend, settings, settings.points()[0]) as team:
        assert len(team.floor(10)) == 10
        for _ in range(2):
            agent, observer = team.episode(7)
            assert len(observer) == 3 * 7
            assert len(agent) == (7 if batch else 3 * 7)
            assert min(agent) > 0 and min(observer) > 0
            if batch:  # whoever asks first waits as long as the agent takes for all
                assert max(observer) > min(agent)
    assert all(process.exitcode == 0 for process in team.processes)


def test_a_killed_observer_is_an_error_not_a_hang() -> None:
    settings = read([*SMALL, "--world-size", "4"])
    with pytest.raises(PeerLostError, match=r"(observer3 .*exit code -9|failed)"):
        with started("geartrain", settings, settings.points()[0]) as team:
            os.kill(team.processes[3].pid, signal.SIGKILL)
            team.episode(1000)
    assert not any(process.is_alive() for process in team.processes)


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_writes_a_report_for_each_backend_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    words = ["bench", "rpc-rl", "--quick", "--backend", "both", *SMALL, "--world_size=3,4", "--plot", "a.png"]
    patient = f"""
import geartrain_bench.harness.timing as timing
from geartrain.__main__ import main
if __name__ == "__main__":
    timing.QUICK_S = {patience(60)}  # sizes that do not fit into it are left out
    main()
"""
    done = preloaded.run(
        [sys.executable, "-c", patient, *words, "--json", "all.json", "--output_file_path", "out.json"],
        cwd=tmp_path,
        env={**os.environ, "NO_COLOR": "1"},
        timeout=patience(100),
    )
    assert done.returncode == 0, done.stderr
    for name, backend in (("out.json", "geartrain"), ("out.torch.json", "torch")):
        written: dict[str, Any] = json.loads((tmp_path / name).read_text())
        kept = [key for key in ORIGINAL_KEYS if key != "world_size"]
        assert list(written) == [*kept, "x_axis_name", "benchmark_results", "about"]
        assert written["x_axis_name"] == "world_size" and written["batch"] is True
        assert [one["world_size"] for one in written["benchmark_results"]] == [3, 4]
        for one in written["benchmark_results"]:
            assert list(one) == [*METRICS, "agent_latency_us", "observer_latency_us", "world_size"]
            assert all(list(one[key]) == ["p50", "p75", "p90", "p95"] for key in list(one)[:-1])
            assert one["observer_latency_us"]["p50"] > 0 and isinstance(one["agent throughput"]["p50"], int)
        assert written["about"]["backend"] == backend and written["about"]["threads"] == 1
        assert "--world_size=3,4" in written["about"]["command"]
    assert "world_size | agent latency (seconds)" in done.stdout and "x_axis_name : world_size" in done.stdout
    assert "geartrain's observer latency p50 is" in done.stdout
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert {row["system"] for row in rows} == {"floor", "geartrain", "torch"}
    bench.plot_saved(tmp_path / "all.json", tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "a.png").read_bytes()
    for name, backend in (("out.json", "geartrain"), ("out.torch.json", "torch")):
        assert f"geartrain bench plot {name} draws it" in done.stdout
        bench.plot_saved(tmp_path / name, tmp_path / "report.png")
        assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
        of_report = {
            (row.metric, row.case.rpartition(" ")[2]): row
            for row in rpc_rl.result_of_report(json.loads((tmp_path / name).read_text())).rows
        }
        for row in rows:
            if row["system"] == backend:
                drawn = of_report[row["metric"], re.findall(r"\d+", row["case"])[0]]
                # The report's median rate lies between two samples as rates, the table's as times: few samples tell
                # them apart. Their tails are of the same times.
                scale = drawn.p50 / row["p50"] if "throughput" in row["metric"] else 1.0
                assert scale == pytest.approx(1.0, rel=0.5), (row, drawn)
                for quantile in ("p50", "p75", "p90", "p95"):
                    assert getattr(drawn, quantile) == pytest.approx(row[quantile] * scale, rel=0.02), (row, drawn)


def test_a_second_list_and_arguments_of_others_are_refused_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("typer")

    def said(*words: str) -> str:
        command = [sys.executable, "-m", "geartrain", "bench", *words]
        done = preloaded.run(command, cwd=tmp_path, env={**os.environ, "NO_COLOR": "1"}, timeout=patience(60))
        assert done.returncode == 2
        return done.stderr.strip()

    assert said("rpc-rl", "--world-size", "10,20", "--batch=t,f") == "error: Only 1 x axis graph variable allowed"
    assert said("store", "--world-size", "10") == "error: the benchmark 'store' takes no --world-size 10"
    assert "no --baseline-python" in said("rpc-rl", "--baseline-python", f"torch={sys.executable}")
    assert bench.load("rpc-rl") is rpc_rl.main
