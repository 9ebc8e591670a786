"""Ranks and reducers as processes that die, hang and come back; the command line's reducer; the C interface."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from deadlines import patience
from speaking import HERE, Process, reducer_process

from geartrain.collectives import include_path, library_path
from geartrain.errors import MissingDependencyError


def test_what_a_process_has_said_ahead_of_its_reader_is_not_lost() -> None:
    process = Process(sys.executable, "-c", "print('{\"step\": 3}'); print('{\"done\": true}')")
    process.child.wait(patience(60))
    assert process.say() == {"step": 3}
    assert process.last() == {"done": True}


def test_a_process_whose_output_nobody_asks_for_goes_on(processes: list[Process]) -> None:
    processes.append(Process(sys.executable, "-c", "for i in range(100_000): print('{\"step\": %d}' % i)"))
    processes[0].child.wait(patience(60))  # 1.5 MB, of which a pipe holds 64 KiB
    assert processes[0].last() == {"step": 99_999}


def start(processes: list[Process], root: Path, size: int, **options: Any) -> list[Process]:
    root.mkdir(exist_ok=True)
    ranks = [
        Process(
            sys.executable, str(HERE / "collectives_worker.py"), str(root), str(rank), str(size), json.dumps(options)
        )
        for rank in range(size)
    ]
    processes += ranks
    return ranks


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_processes_of_one_host_share_memory_unless_told_not_to(
    processes: list[Process], tmp_path: Path, transport: str
) -> None:
    ranks = start(processes, tmp_path, 3, steps=5, transport=transport)
    used, unused = ("tcp", "shm") if transport == "tcp" else ("shm", "tcp")
    links = [rank.last()["links"] for rank in ranks]
    assert max(each[used] for each in links) >= 1  # two each, less those ranks that have left before this one counts
    assert all(each[unused] == 0 for each in links)


KINDS = [
    pytest.param({"algorithm": "shares"}, id="shares"),
    pytest.param({"algorithm": "ring"}, id="ring"),
    pytest.param({"exchanges": True}, id="exchanges"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_is_an_error_on_all_others_by_name(
    processes: list[Process], tmp_path: Path, kind: dict[str, Any]
) -> None:
    ranks = start(processes, tmp_path, 4, steps=1_000_000, **kind)
    for rank in ranks:
        while rank.say()["step"] < 3:
            pass
    killed_at = time.time()
    ranks[2].child.kill()
    for number in (0, 1, 3):
        said = ranks[number].last()
        assert said["error"] == "RankLostError"
        assert said["ranks"] == [2]
        assert "rank 2 went away" in said["text"]
        assert said["at"] - killed_at < patience(10)


@pytest.mark.parametrize(
    "kind", [*KINDS[:2], pytest.param({"exchanges": True}, id="exchanges", marks=pytest.mark.slow)]
)
def test_a_stopped_rank_is_named_by_all_others_at_the_deadline(
    processes: list[Process], tmp_path: Path, kind: dict[str, Any]
) -> None:
    ranks = start(processes, tmp_path, 4, steps=1_000_000, op_timeout_s=patience(3.0), **kind)
    for rank in ranks:
        while rank.say()["step"] < 3:
            pass
    ranks[1].child.send_signal(signal.SIGSTOP)
    for number in (0, 2, 3):
        said = ranks[number].last()
        assert said["error"] == "CollectiveTimeoutError", said
        assert said["ranks"] == [1]
        assert "waiting for rank(s) 1" in said["text"]
    ranks[1].child.send_signal(signal.SIGCONT)
    assert "error" in ranks[1].last()


def test_a_killed_reducer_is_named_and_without_it_the_work_goes_on(processes: list[Process], tmp_path: Path) -> None:
    reducers = [reducer_process(processes) for _ in range(2)]
    addresses = [address for _, address in reducers]
    shares = [0, 0, 0, 0.5, 0.5]
    told = start(processes, tmp_path, 3, steps=1_000_000, reducers=addresses, shares=shares)
    for rank in told:
        while rank.say()["step"] < 3:
            pass
    reducers[0][0].child.kill()
    for rank in told:
        said = rank.last()
        assert said["error"] == "ReducerLostError"
        assert said["reducers"] == [addresses[0]]
        assert addresses[0] in said["text"]
    for rank in start(processes, tmp_path, 3, steps=3, epoch=1, reducers=addresses[1:], shares=[0, 0, 0, 1]):
        assert rank.last().get("done")


def test_a_stopped_reducer_is_named_at_the_deadline(processes: list[Process], tmp_path: Path) -> None:
    stopped, address = reducer_process(processes)
    ranks = start(
        processes, tmp_path, 2, steps=1_000_000, op_timeout_s=patience(3.0), reducers=[address], shares=[0, 0, 1]
    )
    for rank in ranks:
        while rank.say()["step"] < 3:
            pass
    stopped.child.send_signal(signal.SIGSTOP)
    for rank in ranks:
        said = rank.last()
        assert said["error"] == "CollectiveTimeoutError"
        assert said["reducers"] == [address]
    stopped.child.send_signal(signal.SIGCONT)


def test_a_job_that_starts_again_joins_with_a_new_epoch(processes: list[Process], tmp_path: Path) -> None:
    _, address = reducer_process(processes)
    first = start(processes, tmp_path, 2, steps=1_000_000, reducers=[address], shares=[0, 0, 1])
    while first[0].say()["step"] < 3:
        pass
    for rank in first:
        rank.child.kill()
    again = start(processes, tmp_path, 2, steps=5, epoch=1, reducers=[address], shares=[0, 0, 1])
    for rank in again:
        assert rank.last()["done"]


def test_the_reducer_command_wants_a_secret_beyond_loopback_and_stops_when_told(
    processes: list[Process], tmp_path: Path
) -> None:
    refused = subprocess.run(
        [sys.executable, "-m", "geartrain", "reducer", "--bind", "0.0.0.0:0"],
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    assert refused.returncode == 1
    assert "secret" in refused.stderr
    (tmp_path / "secret").write_text("swordfish\n")
    process, address = reducer_process(processes, "--secret-file", str(tmp_path / "secret"), "--every-s", "0.2")
    ranks = start(processes, tmp_path / "store", 2, steps=3, reducers=[address], shares=[0, 0, 1], secret="swordfish")
    for rank in ranks:
        assert rank.last()["done"]
    assert "ranks" in process.line()
    process.child.send_signal(signal.SIGTERM)
    out = process.end(30)
    assert process.child.returncode == 0, process.errors()
    assert "reducer stops" in out[-1]


def test_the_reducer_command_serves_metrics(processes: list[Process]) -> None:
    pytest.importorskip("prometheus_client")
    process, _ = reducer_process(processes, "--metrics-port", "0")
    url = process.line().removeprefix("metrics on ")
    text = urllib.request.urlopen(url, timeout=patience(20)).read().decode()
    assert "geartrain_reducer_groups_served_total 0.0" in text
    assert "geartrain_reducer_memory_bytes 0.0" in text


def test_a_program_in_c_reduces_with_the_shipped_header_and_library(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    try:
        library, include = library_path(), include_path()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    program = tmp_path / "program"
    source = HERE.parents[1] / "native" / "tests" / "collectives" / "allreduce_in_c.c"
    subprocess.run(
        [
            compiler,
            "-std=c99",
            "-Wall",
            "-Werror",
            f"-I{include}",
            str(source),
            str(library),
            f"-Wl,-rpath,{library.parent}",
            "-o",
            str(program),
        ],
        check=True,
    )
    done = subprocess.run([str(program), "4"], capture_output=True, text=True, timeout=patience(60), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
