"""Reducer processes that are killed or stopped: the ranks finish every operation in their place, to the bit."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collectives_crew import group_of, run_ranks
from deadlines import patience
from speaking import HERE, Process, reducer_process

from geartrain.collectives import Group, Reducer, include_path, library_path
from geartrain.errors import ArgumentError, MissingDependencyError


def start(processes: list[Process], root: Path, size: int, **options: Any) -> list[Process]:
    command = (sys.executable, str(HERE / "lost_reducers_worker.py"), str(root))
    ranks = [Process(*command, str(rank), str(size), json.dumps(options)) for rank in range(size)]
    processes += ranks
    return ranks


def steps_until(rank: Process, holds: Any) -> dict[str, Any]:
    until_s = time.monotonic() + patience(60)
    while True:
        said = rank.say()
        assert "error" not in said, said
        if holds(said):
            return said
        assert time.monotonic() < until_s, said


def test_reducers_that_are_killed_one_after_the_other_cost_no_step(processes: list[Process], tmp_path: Path) -> None:
    """The second one is stopped in order: it leaves its groups at the end of its grace period."""
    reducers = [reducer_process(processes, "--grace-s", "0.2") for _ in range(2)]
    shares = [0.1, 0.1, 0.0, 0.4, 0.4]
    ranks = start(processes, tmp_path, 3, reducers=[address for _, address in reducers], shares=shares)
    for lost, (process, _) in enumerate(reducers):
        seen = steps_until(ranks[0], lambda said, lost=lost: said["lost"] == lost)
        steps_until(ranks[0], lambda said, seen=seen: said["step"] > seen["step"] + 5)
        process.child.send_signal((signal.SIGKILL, signal.SIGTERM)[lost])
        steps_until(ranks[0], lambda said, lost=lost: said["lost"] == lost + 1)
    (tmp_path / "end").touch()
    for rank in ranks:
        said = rank.last()
        assert said.get("done"), said
        assert (said["lost"], said["epoch"]) == (2, 0)
        assert said["taken_over_bytes"] > 0
        assert said["longest_s"] < patience(2.0), said


def test_a_reducer_that_is_lost_for_good_costs_neither_time_nor_memory_over_1000_operations(
    processes: list[Process], tmp_path: Path
) -> None:
    """The worker compares every sum with that in rank order, and makes five operations a step."""
    (reducer, lost), (_, stays) = (reducer_process(processes) for _ in range(2))
    ranks = start(processes, tmp_path, 3, reducers=[lost, stays], shares=[0.1, 0.1, 0.0, 0.4, 0.4])
    before = [ranks[0].say() for _ in range(40)]
    reducer.child.kill()
    steps_until(ranks[0], lambda said: said["lost"] == 1)
    after = [ranks[0].say() for _ in range(200)]
    (tmp_path / "end").touch()
    for rank in ranks:
        said = rank.last()
        assert said.get("done") and (said["lost"], said["epoch"]) == (1, 0), said
    with_it, first, last = (np.median([said["took_s"] for said in of]) for of in (before[10:], after[:50], after[-50:]))
    assert last < patience(3 * max(with_it, 0.01)) and last < patience(2 * max(first, 0.01)), (with_it, first, last)
    grown = after[-1]["resident"] - after[20]["resident"]
    assert grown < 4 << 20, [said["resident"] for said in after[::20]]


def test_two_reducers_that_are_lost_in_one_operation_cost_no_bit_of_it(
    processes: list[Process], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "geartrain")
    reducers = [reducer_process(processes) for _ in range(3)]
    begun = threading.Barrier(3)

    def array(rank: int, operation: int) -> Any:
        return np.random.default_rng((rank, operation)).standard_normal(1_000_000).astype(np.float32)

    def body(rank: int, group: Group) -> tuple[list[bool], dict[str, Any]]:
        same = []
        for operation in range(3):
            given = array(rank, operation)
            if operation == 1 and rank == 2:  # the reducers have numbers of two ranks, and no results
                begun.wait(patience(30))
                for process, _ in reducers[:2]:
                    process.child.kill()
                for process, _ in reducers[:2]:
                    process.child.wait()
            work = group.all_reduce_async(given)
            if operation == 1 and rank < 2:
                begun.wait(patience(30))
            expected = array(0, operation) + array(1, operation) + array(2, operation)
            same.append(work.wait().tobytes() == expected.tobytes())
        return same, group.counters()

    options = {"shares": [0.1, 0.1, 0.1, 0.3, 0.2, 0.2], "on_reducer_loss": "continue"}
    for result in run_ranks(3, body, begun.abort, reducers=[address for _, address in reducers], **options):
        assert not isinstance(result, BaseException), result
        same, counters = result
        assert same == [True] * 3
        assert (counters["reducer_losses"], counters["lost_reducers"]) == (2, 2)
    lost = [record.getMessage() for record in caplog.records if "is lost (" in record.getMessage()]
    assert len(lost) == 6 and sum("in operation 1, after 0 of" in text for text in lost) >= 4, lost


def test_a_reducer_that_is_started_again_gets_its_share_back(processes: list[Process], tmp_path: Path) -> None:
    first, address = reducer_process(processes)
    ranks = start(processes, tmp_path, 2, reducers=[address], shares=[0, 0, 1])
    steps_until(ranks[0], lambda said: said["step"] > 3 and said["lost"] == 0)
    first.child.kill()
    first.child.wait()
    steps_until(ranks[0], lambda said: said["lost"] == 1)
    first, again = reducer_process(processes, "--bind", address)
    assert again == address
    steps_until(ranks[0], lambda said: said["lost"] == 0)
    (tmp_path / "end").touch()
    for rank in ranks:
        said = rank.last()
        assert said.get("done"), said
        assert (said["lost"], said["epoch"]) == (0, 0)
        assert said["longest_s"] < patience(2.0), said


@pytest.mark.parametrize("silence_s", [pytest.param(3.0, marks=pytest.mark.slow), 0.3])
def test_a_reducer_that_is_stopped_is_replaced_long_before_the_deadline(
    processes: list[Process], tmp_path: Path, silence_s: float
) -> None:
    stopped, address = reducer_process(processes)
    ranks = start(processes, tmp_path, 2, reducers=[address], shares=[0, 0, 1], reducer_silence_s=silence_s)
    steps_until(ranks[0], lambda said: said["step"] > 5)
    stopped.child.send_signal(signal.SIGSTOP)
    steps_until(ranks[0], lambda said: said["lost"] == 1)
    stopped.child.send_signal(signal.SIGCONT)
    steps_until(ranks[0], lambda said: said["lost"] == 0)
    (tmp_path / "end").touch()
    for rank in ranks:
        said = rank.last()
        assert said.get("done"), said
        assert 0.8 * silence_s < said["longest_s"] < patience(silence_s + 3.0), said


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_reducers_that_die_and_stop_at_random_for_minutes_cost_no_step(
    processes: list[Process], tmp_path: Path
) -> None:
    lasts_s, random = 300.0, np.random.default_rng(11)
    reducers = [reducer_process(processes) for _ in range(3)]
    places, counts = [address for _, address in reducers], {"killed": 0, "stopped": 0}
    ranks = start(processes, tmp_path, 3, reducers=places, shares=[0.1 / 3] * 3 + [0.3] * 3, lasts_s=lasts_s)
    (tmp_path / "end").touch()
    until_s = time.monotonic() + lasts_s - 10
    while time.monotonic() < until_s:
        time.sleep(float(random.uniform(0.5, 6)))
        i = int(random.integers(3))
        process, address = reducers[i]
        if random.random() < 0.3:
            process.child.send_signal(signal.SIGSTOP)
            time.sleep(float(random.uniform(0, 6)))
            process.child.send_signal(signal.SIGCONT)
            counts["stopped"] += 1
            continue
        process.kill()
        counts["killed"] += 1
        time.sleep(float(random.uniform(0, 2)))
        reducers[i] = reducer_process(processes, "--bind", address)
    for rank in ranks:
        lines = rank.end(patience(120))
        said = json.loads(lines[-1])
        assert said.get("done"), said
        print(counts, said)


def test_torch_jobs_train_on_while_a_reducer_is_killed_and_started_again(
    processes: list[Process], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    reducer, address = reducer_process(processes)
    options = {
        "GEARTRAIN_REDUCERS": address,
        "GEARTRAIN_ALLREDUCE_SHARES": "0.1,0.1,0.8",
        "GEARTRAIN_ALLREDUCE_ON_REDUCER_LOSS": "continue",
        "OMP_NUM_THREADS": "1",
    }
    command = (sys.executable, str(HERE / "lost_reducers_torch_worker.py"), str(tmp_path))
    ranks = [Process(*command, str(rank), "2", **options) for rank in range(2)]
    processes += ranks
    steps_until(ranks[0], lambda said: said["step"] > 3 and said["lost"] == 0)
    reducer.child.kill()
    reducer.child.wait()
    seen = steps_until(ranks[0], lambda said: said["lost"] == 1)
    steps_until(ranks[0], lambda said: said["step"] > seen["step"] + 3)
    reducer_process(processes, "--bind", address)
    steps_until(ranks[0], lambda said: said["lost"] == 0)
    (tmp_path / "end").touch()
    for rank in ranks:
        said = rank.last()
        assert said.get("done") and said["same"], said
        assert (said["lost_reducers"], said["reducer_losses"], said["reducer_returns"]) == (0, 1, 1)
        assert said["taken_over_bytes"] > 0


def test_a_program_in_c_goes_on_without_a_reducer_that_is_killed(processes: list[Process], tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    try:
        library, include = library_path(), include_path()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    source = HERE.parents[1] / "native" / "tests" / "collectives" / "lost_reducer_in_c.c"
    program = tmp_path / "program"
    build = [compiler, "-std=c99", "-Wall", "-Werror", f"-I{include}", str(source), str(library)]
    subprocess.run([*build, f"-Wl,-rpath,{library.parent}", "-o", str(program)], check=True)
    reducer, address = reducer_process(processes)
    with subprocess.Popen([str(program), address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ranks:
        try:
            assert ranks.stdout is not None and ranks.stdout.readline() == "ready\n"
            reducer.child.kill()
            said, errors = ranks.communicate(timeout=patience(60))
        finally:
            ranks.kill()
    assert (ranks.returncode, said) == (0, "every sum was right\n"), errors


def test_each_loss_takeover_and_return_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "geartrain")
    reducers = [Reducer()]
    address = reducers[0].address

    def body(rank: int, group: Group) -> dict[str, Any]:
        array = np.ones(100_000, np.float32)
        group.all_reduce(array)
        if rank == 0:
            reducers[0].close(0.0)
        until_s = time.monotonic() + patience(30)
        over = np.zeros(2, np.int64)
        while not over.any():
            if rank == 0 and len(reducers) == 1 and group.counters()["reducer_losses"] == 1:
                reducers.append(Reducer(address))
            # One rank may see the return an operation before the other: both go on until both have seen it.
            over[:] = group.counters()["reducer_returns"], time.monotonic() > until_s
            group.all_reduce(over, op="min")
        return group.counters()

    options = {"reducers": [address], "shares": [0, 0, 1], "on_reducer_loss": "continue", "reducer_silence_s": 30.0}
    try:
        found = run_ranks(2, body, **options)
    finally:
        for reducer in reducers:
            reducer.close(0.0)
    for counters in found:
        assert (counters["reducer_losses"], counters["lost_reducers"]) == (1, 0)
    logged = [record.getMessage() for record in caplog.records if address in record.getMessage()]
    for rank in range(2):
        lost = [text for text in logged if "is lost (" in text and f"[seen by rank {rank}]" in text]
        assert len(lost) == 1 and "after" in lost[0], logged
    for event in ("ranks do the work of", "is back, and has its share from operation"):
        assert sum(event in text for text in logged) == 2, logged  # one of each rank


@pytest.mark.parametrize("silence_s", [0, 0.01, -1.0, float("nan"), float("inf")])
def test_a_senseless_time_of_silence_is_refused(silence_s: float) -> None:
    with pytest.raises(ArgumentError, match="reducer_silence_s"):
        group_of(0, 1, reducer_silence_s=silence_s)


def test_a_reducer_that_only_waits_for_a_slow_rank_is_kept() -> None:
    with Reducer() as reducer:

        def body(rank: int, group: Group) -> int:
            if rank == 1:
                time.sleep(5.0)  # longer than a reducer may be silent
            group.all_reduce(np.ones(100_000, np.float32))
            return int(group.counters()["lost_reducers"])

        options = {"reducers": [reducer.address], "shares": [0, 0, 1], "on_reducer_loss": "continue"}
        assert run_ranks(2, body, **options) == [0, 0]


def test_a_reducer_that_is_stopped_in_order_is_replaced_too() -> None:
    reducer = Reducer()

    def body(rank: int, group: Group) -> tuple[float, int, str]:
        group.all_reduce(np.ones(100_000, np.float32))
        if rank == 0:
            reducer.close(0.0)
        found = [float(group.all_reduce(np.full(100_000, rank + step, np.float32))[7]) for step in range(3)]
        return sum(found), int(group.counters()["lost_reducers"]), str(group.error())

    options = {"reducers": [reducer.address], "shares": [0, 0, 0, 1], "on_reducer_loss": "continue"}
    assert run_ranks(3, body, **options) == [(18.0, 1, "None")] * 3


def test_an_unknown_answer_to_a_lost_reducer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match="on_reducer_loss is one of 'raise', 'continue', found 'reform'"):
        group_of(0, 1, on_reducer_loss="reform")
