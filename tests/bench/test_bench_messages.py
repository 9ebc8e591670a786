"""`geartrain bench p2p` measures every system in every case, beside its floor."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import certificates
import preloaded
import pytest
from deadlines import patience
from p2p_gpu_worker import NoGpus, measure

import geartrain_bench.messages.bench as p2p
import geartrain_bench.messages.gpu as p2p_gpu
import geartrain_bench.messages.report as p2p_report
from geartrain.errors import GeartrainError
from geartrain_bench import load, plot_saved
from geartrain_bench.harness.child_process import BaselineError
from geartrain_bench.harness.report import write_json
from geartrain_bench.messages.baseline_client import SYSTEMS, Foreign
from geartrain_bench.messages.bench import Plan, run

pytestmark = pytest.mark.usefixtures("preloaded_children")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_calls_are_measured_where_both_processes_are_placed() -> None:
    usable = sorted(os.sched_getaffinity(0))
    with p2p.worker("raw", "unix", "1024"):
        server = p2p._servers[-1]
        for cores in ((0, 0), (0, 1)):
            with p2p.placed(cores) as is_placed:
                assert is_placed
                assert os.sched_getaffinity(0) == {usable[cores[0]]}
                assert os.sched_getaffinity(server) == {usable[cores[1]]}
            assert os.sched_getaffinity(0) == os.sched_getaffinity(server) == set(usable)
        with p2p.placed((0, len(usable))) as is_placed:
            assert not is_placed


@pytest.mark.slow
def test_every_system_is_measured_in_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    systems = {"geartrain shm", "geartrain tcp", "raw unix", "raw tcp", "TensorPipe"}
    if certificates.why_not() is None:
        loopback = certificates.Authority(tmp_path).sign("bench", "IP:127.0.0.1")
        for variable, value in certificates.environment(loopback).items():
            monkeypatch.setenv(variable, value)
        systems.add("geartrain tcp, TLS")
    monkeypatch.setattr(p2p, "SYSTEMS", {})  # those that are installed take a minute: Ray starts a cluster
    result = run(Plan((1_280, 1_310_720), 1, 0.5, 0.3), {"pigeon": "/usr/bin/python"})
    placed = 3 if len(os.sched_getaffinity(0)) > 1 else 2
    for metric, cases in (("call", 2 * placed), ("one way, acknowledged", 2), ("throughput", 2)):
        rows = [row for row in result.rows if row.metric == metric]
        assert len({row.case for row in rows}) == cases
        assert systems <= {row.system for row in rows}
        assert all(row.p50 > 0 and row.ratio_to_floor > 0 for row in rows)
    others = {name for of_one in SYSTEMS.values() for name in of_one}  # of packages that may be installed here
    in_flight = {row.system for row in result.rows if row.case == "64 in flight"} - others
    assert in_flight == (systems | {"geartrain shm, spinning"}) - {"raw unix", "raw tcp"}
    assert "geartrain shm, copied" in {row.system for row in result.rows if row.metric == "throughput"}
    assert "pigeon" in result.baselines_missing
    assert load("p2p")
    tables = p2p_report.overview(result)
    columns, shown = tables["one way, acknowledged: p50, ms"]
    assert columns == ["system", "1.28 KB", "1.31 MB"]
    assert systems | {"memcpy"} <= shown.keys()
    pytest.importorskip("matplotlib")
    p2p_report.plot(result, tmp_path / "p2p.png")
    drawn = (tmp_path / "p2p.png").read_bytes()
    assert len(drawn) > 20_000
    write_json(result, tmp_path / "p2p.json")
    plot_saved(tmp_path / "p2p.json", tmp_path / "p2p.png")
    assert (tmp_path / "p2p.png").read_bytes() == drawn


@contextlib.contextmanager
def no_tensorpipe(*_: object) -> Iterator[None]:
    """In the place of torch's RPC, whose processes poll: seconds of a core, even while they are idle."""
    yield


@pytest.mark.parametrize("tensorpipe", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["faked", "TensorPipe"])
def test_the_columns_of_gpus_have_both_systems_and_their_floor(
    tmp_path: Path, tensorpipe: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rpc = pytest.importorskip("torch.distributed.rpc")
    pytest.importorskip("matplotlib")
    if tensorpipe:  # a process of its own, because it joins once in a process
        command = [sys.executable, str(Path(__file__).parents[1] / "support" / "p2p_gpu_worker.py"), str(tmp_path)]
        done = preloaded.run(command, timeout=patience(110))
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    else:
        monkeypatch.setattr(p2p, "joined_torch", no_tensorpipe)
        monkeypatch.setattr(rpc, "rpc_sync", lambda _, function, args: function(*args))
        measure(tmp_path)
        printed = capsys.readouterr().out
    result = json.loads((tmp_path / "p2p.json").read_text())
    assert not result["baselines_missing"]
    for case in ("0.02048 MB", "1.311 MB"):
        rows = {r["system"]: r for r in result["rows"] if r["case"] == case and r["metric"] == "throughput"}
        assert rows.keys() == {"geartrain shm", "TensorPipe", "copy"}
        assert rows["copy"]["ratio_to_floor"] == 1.0
        assert all(row["p50"] > 0 for row in rows.values())
    assert "one way, acknowledged: p50, ms" in printed
    assert "calls: p50" not in printed  # nothing of the kind was measured
    assert (tmp_path / "p2p.png").stat().st_size > 10_000


def test_without_a_gpu_there_are_no_columns_of_gpus() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(GeartrainError, match="no GPU"):
        load("p2p", "cuda")()
    unviable = type("Unviable", (NoGpus,), {"transport": "cuda_ipc"})()
    with pytest.raises(GeartrainError, match="not viable here"), p2p_gpu._rpc(unviable):
        pass


def test_a_peer_that_does_not_work_is_named_and_the_others_are_measured(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no such luck' >&2; exit 3\n")
    broken.chmod(0o755)
    with pytest.raises(BaselineError, match=r"it has ended.*no such luck"):
        Foreign(str(broken), "zmq ipc")
    with pytest.raises(BaselineError, match="does not start"):
        Foreign(str(tmp_path / "nothing"), "zmq ipc")
    without = Path(sys.executable)
    for package in SYSTEMS:
        if importlib.util.find_spec(package) is None:
            with pytest.raises(BaselineError, match="No module named"):
                Foreign(str(without), next(iter(SYSTEMS[package].values())))


@pytest.mark.slow
@pytest.mark.parametrize("package", list(SYSTEMS))
def test_other_systems_are_measured_where_they_are_installed(package: str) -> None:
    pytest.importorskip(package)
    for system in SYSTEMS[package].values():
        with Foreign(sys.executable, system) as peer:
            assert peer.lap("echo", 10).seconds > 0
            assert peer.lap("acknowledge", 2, nbytes=1_000_000).seconds > 0
            assert peer.lap("in flight", 100, open_calls=64).seconds > 0
