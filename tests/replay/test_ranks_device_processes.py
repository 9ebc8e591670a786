"""Batches on devices over ranks that are processes: rows of others come by way of the host, or from their devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import preloaded
import pytest
from deadlines import patience

pytest.importorskip("torch")
pytest.importorskip("triton")
from test_ranks_processes import lines

WORKER = Path(__file__).parents[1] / "support" / "ranks_device_worker.py"


def start(scenario: str, name: str, ranks: int, tmp_path: Path, **env: str) -> list[subprocess.Popen[str]]:
    settings = {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "MEET": f"file://{tmp_path}/meet", **env}
    settings["PYTHONPATH"] = str(Path(__file__).parent)  # rows are those of test_ranks_device
    return [
        preloaded.Popen(
            [sys.executable, str(WORKER), scenario, name], env={**os.environ, **settings, "RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]  # fmt: skip


@pytest.mark.parametrize("exchange", ["host", "nccl"])
def test_batches_are_those_of_the_host_however_rows_come(
    store_name: Callable[[], str], tmp_path: Path, exchange: str
) -> None:
    said = [lines(p)[0] for p in start("batches", store_name(), 3, tmp_path, EXCHANGE=exchange)]
    for one in said:
        assert one["path"] == "gather"
        assert one["exchange"] == ("gloo" if exchange == "nccl" else "host")
    received = [sum(of_case) for of_case in zip(*(one["received"] for one in said), strict=True)]
    assert received[0] and received[2], received


def test_a_rank_that_reads_nothing_sends_from_its_device(store_name: Callable[[], str], tmp_path: Path) -> None:
    head, middle, tail = (lines(p)[0] for p in start("stages", store_name(), 3, tmp_path))
    assert head["fields"] == ["pixels"]
    assert tail["fields"] == ["group", "x"]
    assert middle["fields"] == []
    assert middle["received"] == 0
    assert head["received"] > 0
    assert tail["received"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("carrier", ["auto", "gloo"])
def test_ranks_of_one_store_may_differ_in_where_their_batches_are(
    store_name: Callable[[], str], tmp_path: Path, carrier: str
) -> None:
    said = [lines(p)[0]["numbers"] for p in start("shared", store_name(), 3, tmp_path, GEARTRAIN_RANK_CARRIER=carrier)]
    for parts in zip(*said, strict=True):
        assert all(len(rows) == len(draws) for draws, rows in parts)
        assert sorted(draw for draws, _ in parts for draw in draws) == list(range(24))
    assert [len(each) for each in said] == [8, 8, 8], "four batches of each of two strategies"


@pytest.mark.parametrize("when", ["killed", "killed_in_all_to_all"])
def test_a_killed_rank_is_an_error_on_the_others_and_not_a_hang(
    store_name: Callable[[], str], tmp_path: Path, when: str
) -> None:
    processes = start(when, store_name(), 3, tmp_path)
    for rank, process in enumerate(processes):
        if rank != 1:
            (said,) = lines(process, timeout_s=patience(30))
            assert "rank 1" in said["error"]
            assert said["waited_s"] < patience(10)
    processes[1].wait(timeout=patience(10))
