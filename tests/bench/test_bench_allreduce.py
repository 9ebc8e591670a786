"""`geartrain bench allreduce`: sums are checked, bytes counted, promises judged as written. No time is judged."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
from deadlines import patience

pytest.importorskip("torch")

import geartrain_bench.allreduce.arguments as allreduce_arguments
import geartrain_bench.allreduce.bench as allreduce
import geartrain_bench.allreduce.plot as allreduce_plot
import geartrain_bench.allreduce.profile as allreduce_profile
import geartrain_bench.allreduce.report as allreduce_report
import geartrain_bench.harness.report as report
from geartrain.errors import ArgumentError
from geartrain.tools.plan.allreduce import Network
from geartrain.tools.testing.cluster import Hosts
from geartrain_bench import plot_saved
from geartrain_bench.allreduce.mpi_jobs import run as run_mpi
from geartrain_bench.allreduce.rounds import RoundBarrier, contribution, timed_rounds, total
from geartrain_bench.allreduce.testbed import AllReduceTestbed, Configuration, dedicated, gloo, hybrid, ring, workers
from geartrain_bench.harness.baselines import BaselineError

no_hosts = Hosts.viable()
needs_hosts = pytest.mark.skipif(no_hosts is not None, reason=str(no_hosts))
pytestmark = pytest.mark.usefixtures("preloaded_children")
TINY = allreduce.Plan(
    workers=(2,), sizes=(1 << 18,), hybrids=(1,), hybrid_workers=2, hybrid_size=1 << 18, slow_mbit=(50.0, 200.0),
    slow_sizes=(1 << 18,), rtts_ms=(5.0,), delay_workers=(2,), delay_sizes=(4096,), ranks=(2,), loopback_sizes=(4096,),
    throughput_workers=(2,), gradient_bytes=1 << 16, compute_s=0.02, least_rounds=2, most_rounds=2,
)  # fmt: skip


def rounds_of_two(tmp_path: Path, reduce: Any, **what: Any) -> tuple[list[Any], list[BaseException]]:
    """Two ranks as threads."""
    file = tmp_path / "rounds"
    file.write_bytes(bytes(RoundBarrier.bytes(2)))
    found: list[Any] = [None, None]
    errors: list[BaseException] = []

    def rank(i: int) -> None:
        try:
            barrier = RoundBarrier(str(file), 2, i)
            found[i] = timed_rounds(reduce(i), barrier=barrier, rank=i, size=2, **what)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(30))
    return found, errors


def test_rounds_begin_together_and_every_element_is_checked(tmp_path: Path) -> None:
    def right(i: int) -> Any:
        def reduce(array: Any) -> None:
            assert (array == contribution(i, len(array))).all(), "every call gets fresh numbers"
            array[:] = total(2, len(array))

        return reduce

    found, errors = rounds_of_two(tmp_path, right, nbytes=4000, calls=3, rounds=4, warm=1)
    assert not errors and [len(laps) for laps in found] == [4, 4] and min(map(min, found)) > 0

    def wrong(i: int) -> Any:
        def reduce(array: Any) -> Any:
            sums = total(2, len(array))
            sums[999] += 1
            return sums  # not all work in place

        return reduce

    _, errors = rounds_of_two(tmp_path, wrong, nbytes=4000, calls=1, rounds=1, warm=0)
    assert [str(error) for error in errors] and "element 999" in str(errors[0])


def test_arms_know_what_the_model_says_of_them() -> None:
    network = Network((25e6,) * 4, (), 16e6, 0.01)
    with_four = Network((25e6,) * 4, (25e6,) * 4, 16e6, 0.01)
    assert ring().planned_s(network) == pytest.approx(1.5 * 0.64 + 6 * 0.005)
    assert gloo().planned_s(network) == pytest.approx(1.5 * 0.64 + 12 * 0.005)
    assert workers().planned_s(network) == pytest.approx(1.5 * 0.64 + 0.01)
    assert dedicated(4, 4).planned_s(with_four) == pytest.approx(0.64 + 0.01)
    one = hybrid(4, 1)
    assert one.planned_s(Network((25e6,) * 4, (25e6,), 16e6)) == pytest.approx(4 / 3 * 0.64)
    assert one.expected_bytes(Network((25e6,) * 4, (25e6,), 16e6)) == pytest.approx(4 / 3 * 16e6)
    weighted = hybrid(4, 0, (12.5e6, 50e6, 50e6, 50e6))
    assert weighted.name == "geartrain weighted" and weighted.shares is not None and weighted.shares[0] == 0


def shaped(configuration: str, n: int, units: float, sent: float = 1.0, expected: float = 1.0) -> dict[str, Any]:
    return {
        "part": "shaped", "arm": configuration, "workers": n, "reducers": 0, "nbytes": 16 << 20, "rtt_ms": 0.0,
        "units": units, "planned_units": units, "p50_s": units, "p95_s": units,
        "sent": sent, "received": sent, "expected": expected,
    }  # fmt: skip


def test_promises_are_met_or_not_as_they_are_written() -> None:
    def judged(*cases: dict[str, Any]) -> dict[str, bool]:
        return {one["what"]: one["met"] for one in allreduce_report.targets(cases)}

    good = judged(
        shaped("gloo", 4, 1.57),
        shaped("geartrain dedicated", 4, 1.06, 1.008),
        shaped("geartrain ring", 4, 1.58, 1.51, 1.5),
    )
    assert len(good) == 7 and all(good.values())
    bad = judged(shaped("gloo", 8, 1.7), shaped("geartrain dedicated", 8, 1.09, 1.02), shaped("geartrain ring", 8, 1.9))
    assert {name: met for name, met in bad.items() if met} == {
        f"N=8, 16 MB: ring, K {way} by worker 0": True for way in ("sent", "received")
    }
    loop = {"part": "loopback", "workers": 2, "nbytes": 4096, "rtt_ms": 0.0}
    assert judged({**loop, "arm": "gloo", "p50_s": 2.0}, {**loop, "arm": "geartrain workers", "p50_s": 2.1}) == {
        "loopback, 2 ranks, 4 KB: Gloo / ours": False
    }
    assert judged() == {}


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    assert allreduce_arguments.read([]) == allreduce_arguments.Asked(allreduce_arguments.PARTS)
    assert allreduce_arguments.read(["--part", "delay,shaped", "--part", "delay"]) == allreduce_arguments.Asked(
        ("delay", "shaped")
    )
    of_two = allreduce_arguments.read(["--part", "loopback", "--ranks", "2,8", "--profile"])
    assert of_two == allreduce_arguments.Asked(("loopback",), ranks=(2, 8), profile=True)
    for word in ("", "1", "2,", "-2", "two", "999", "2.0", "²", "nan"):
        with pytest.raises(ArgumentError, match="--ranks takes numbers from 2 to 256"):
            allreduce_arguments.read([f"--ranks={word}"])
    with pytest.raises(ArgumentError, match="are for the part loopback"):
        allreduce_arguments.read(["--part", "delay", "--profile"])
    with pytest.raises(ArgumentError, match="found 'wan'"):
        allreduce_arguments.read(["--part", "wan"])
    for word, message in ((f"mpich={tmp_path}/missing.so", "--baidu mpich: there is no"), ("mpich", "MPI=LIBRARY")):
        with pytest.raises(ArgumentError, match=message):
            allreduce_arguments.read(["--baidu", word])


def test_an_mpi_that_is_not_there_or_fails_says_so(tmp_path: Path) -> None:
    with pytest.raises(BaselineError, match="there is no"):
        run_mpi("mpich", str(tmp_path / "python"), 2, {4096: (1, 1)}, None)
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text("#!/bin/sh\necho no fabric >&2; exit 3\n")
    mpiexec.chmod(0o755)
    with pytest.raises(BaselineError, match="2 ranks of mpich ended with 3: no fabric"):
        run_mpi("mpich", str(tmp_path / "python"), 2, {4096: (1, 1)}, None)


def test_loopback_measures_every_arm_beside_a_memcpy(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = allreduce.run(TINY, ("loopback",), {"other": "python"}, {}, quick=True)
    arms = {case["arm"] for case in result.cases}
    assert {"gloo", "geartrain workers", "geartrain workers, tcp", "geartrain ring", "geartrain dedicated"} <= arms
    assert all(case["p50_s"] > 0 and case["floor_s"] > 0 for case in result.cases)
    assert set(result.baselines_missing) == {"mpich", "openmpi", "other"}
    report.write_json(result, tmp_path / "bench.json")
    allreduce_plot.plot(result, tmp_path / "bench.png")
    drawn = (tmp_path / "bench.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    plot_saved(tmp_path / "bench.json", tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes() == drawn


def test_a_profile_says_where_the_time_of_a_call_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = dataclasses.replace(TINY, profile=True, loopback_sizes=(1 << 18,))
    result = allreduce.run(plan, ("loopback",), {}, {}, quick=True)
    if "geartrain workers, C" in result.baselines_missing:
        pytest.skip(result.baselines_missing["geartrain workers, C"])
    assert not any(case["arm"].endswith(("tcp", "ring", "dedicated")) for case in result.cases)
    assert any(case["arm"] == "geartrain workers, reading" for case in result.cases)
    profiled = [case["profile"] for case in result.cases if "profile" in case]
    assert len(profiled) == len([case for case in result.cases if ", C" in case["arm"]]) > 0
    for found in profiled:
        assert set(found["us"]) == {"call", *allreduce_profile.STAGES} - {"outside"}
        assert sum(found["us"].values()) == pytest.approx(found["whole_us"])
        for stage in ("copy out", "copy in", "sum", "frames"):
            assert found["us"][stage] > 0 and found["times"][stage] >= 1, stage
        # Half of the array there, half of the result back: through rings, or read (ranks with a core each try).
        assert found["ring_bytes"] + found["read_bytes"] == pytest.approx(1 << 18, rel=0.05)
        assert found["ring_bytes"] > 0
        assert 0 <= found["by_callers"] <= 1
    allreduce_report.print_cases(result)
    said = capsys.readouterr().out
    assert "where the time of a call goes" in said and "2 ranks, 256 KB, C" in said
    assert "…" not in said and all(stage in said for stage in (*allreduce_profile.STAGES[1:], "by callers"))
    report.write_json(result, tmp_path / "bench.json")
    assert "copy out" in (tmp_path / "bench.json").read_text()


@needs_hosts
@pytest.mark.slow
def test_a_failed_rank_is_named_and_the_bed_goes_on() -> None:
    with Hosts(2, rate_mbit=200) as hosts, AllReduceTestbed(hosts, 2, 0) as testbed:
        with pytest.raises(BaselineError, match=r"rank \d: ArgumentError"):
            with testbed.group(Configuration("wrong", "geartrain", options={"algorithm": "bus"}), 2):
                pass
        testbed.restart()
        with testbed.group(workers(), 2) as group:
            timed = group.rounds(1 << 18, calls=1, rounds=2, warm=1)
        assert len(timed.laps_s) == 2
        assert 0.95 < timed.sent_bytes / (1 << 18) < 1.1 and 0.95 < timed.received_bytes / (1 << 18) < 1.1


@needs_hosts
@pytest.mark.slow
def test_every_part_on_hosts_has_cases_plots_and_bytes_near_theory(tmp_path: Path) -> None:
    result = allreduce.run(TINY, ("shaped", "slow-link", "delay", "throughput"), {}, {}, quick=True)
    assert {case["part"] for case in result.cases} == {"shaped", "slow-link", "delay", "throughput"}
    for case in result.cases:
        if case["part"] in ("shaped", "slow-link") and case["arm"].startswith("geartrain"):
            assert case["sent"] == pytest.approx(case["expected"], rel=0.05), case
    slow = allreduce_report.find(result.cases, part="slow-link", arm="geartrain weighted")
    assert slow is not None and slow["rates_mbit"] == [50, 200]
    delayed = [case for case in result.cases if case["part"] == "delay"]
    # (the rank that begins last may find the other one's message there)
    assert all(max(case["laps_s"]) >= 0.005 for case in delayed), "nothing is faster than a round trip"
    pytest.importorskip("matplotlib")
    allreduce_plot.plot(result, tmp_path / "bench.png")
    allreduce_report.print_cases(result)
    drawn = {"bench.png", "bench-slow-link.png", "bench-delay.png", "bench-throughput.png"}
    assert {path.name for path in tmp_path.iterdir()} == drawn
