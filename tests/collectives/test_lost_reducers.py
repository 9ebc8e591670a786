"""Reducer processes that are killed or stopped: the ranks finish every operation in their place, to the bit."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collectives_crew import run_ranks
from deadlines import patience
from test_collectives_processes import HERE, Process, reducer_process

from geartrain.collectives import Group, Reducer
from geartrain.errors import ArgumentError


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.child.kill()
        process.child.communicate()


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
    reducers = [reducer_process(processes) for _ in range(2)]
    shares = [0.1, 0.1, 0.0, 0.4, 0.4]
    ranks = start(processes, tmp_path, 3, reducers=[address for _, address in reducers], shares=shares)
    for lost, (process, _) in enumerate(reducers):
        seen = steps_until(ranks[0], lambda said, lost=lost: said["lost"] == lost)
        steps_until(ranks[0], lambda said, seen=seen: said["step"] > seen["step"] + 5)
        process.child.kill()
        steps_until(ranks[0], lambda said, lost=lost: said["lost"] == lost + 1)
    (tmp_path / "end").touch()
    for rank in ranks:
        said = rank.last()
        assert said.get("done"), said
        assert (said["lost"], said["epoch"]) == (2, 0)
        assert said["taken_over_bytes"] > 0
        assert said["longest_s"] < patience(2.0), said


def test_a_reducer_that_is_started_again_gets_its_share_back(processes: list[Process], tmp_path: Path) -> None:
    first, address = reducer_process(processes)
    ranks = start(processes, tmp_path, 2, reducers=[address], shares=[0, 0, 1])
    for _ in range(2):
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


def test_a_reducer_that_is_stopped_is_replaced_long_before_the_deadline(
    processes: list[Process], tmp_path: Path
) -> None:
    stopped, address = reducer_process(processes)
    ranks = start(processes, tmp_path, 2, reducers=[address], shares=[0, 0, 1])
    steps_until(ranks[0], lambda said: said["step"] > 5)
    stopped.child.send_signal(signal.SIGSTOP)
    steps_until(ranks[0], lambda said: said["lost"] == 1)
    stopped.child.send_signal(signal.SIGCONT)
    steps_until(ranks[0], lambda said: said["lost"] == 0)
    (tmp_path / "end").touch()
    for rank in ranks:
        said = rank.last()
        assert said.get("done"), said
        assert 1.0 < said["longest_s"] < patience(6.0), said


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


def test_hierarchical_groups_do_not_outlive_reducers() -> None:
    with pytest.raises(ArgumentError, match="does not go on without a reducer"):
        Group(0, 1, hierarchical=True, on_reducer_loss="continue")
