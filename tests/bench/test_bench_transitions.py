"""The transitions bench: every case has its floor and its numbers, absent baselines are named. No timing is judged."""

from __future__ import annotations

import math
import os
import sys
import time

import pytest
from deadlines import patience

import geartrain_bench as bench
import geartrain_bench.transitions.bench as transitions
from geartrain.core.schema import Field
from geartrain.errors import ArgumentError
from geartrain.store.store import Store
from geartrain_bench.harness.child_process import AnsweringProcess, BaselineError
from geartrain_bench.harness.killed_writers import KilledWriters

TINY = transitions.Plan(3000, 1000, 300, 6000, repeats=3, case_s=0.02, calls=1)


@pytest.fixture(scope="module")
def tiny() -> bench.BenchResult:
    return transitions.run(TINY, {"sb3": sys.executable + "-that-is-not", "other": sys.executable}, quick=True)


def test_every_case_has_its_floor_and_finite_numbers(tiny: bench.BenchResult) -> None:
    for row in tiny.rows:
        assert all(math.isfinite(number) and number > 0 for number in (row.p50, row.p95, row.ratio_to_floor)), row
    for case in [*(case.name for case in transitions.CASES), "SAC, bytes a step"]:
        systems = {row.system for row in tiny.rows if row.case == case}
        assert {"floor", "geartrain"} <= systems
        assert ("geartrain prefetch=0" in systems) == ("sample" in case)
        alike = case in ("SAC, sample 256", "100 KB, sample 256")  # stored as it is sampled, by all
        assert ("NumPy" in systems) == (alike or "windows" in case)
        assert ("torch.index_select(out=)" in systems) == alike


def test_one_case_alone_is_measured_by_its_name_and_an_unknown_name_is_refused() -> None:
    found = transitions.run(TINY, {}, only=("a step of 16",))
    assert {row.case for row in found.rows} == {"SAC, add a step of 16"}
    assert found.command.endswith('--case "a step of 16"')
    with pytest.raises(ArgumentError, match="no case has 'Pong' in its name; cases are SAC, sample 256, "):
        transitions.run(TINY, {}, only=("Pong",))


def test_a_writer_that_cannot_record_is_an_error() -> None:
    fields = {"x": Field((), "float32")}  # no recorder's
    with (
        Store.create(f"bench-{os.getpid()}", fields, max_length=2, capacity=8) as store,
        pytest.raises(BaselineError, match="ended by themselves"),
        KilledWriters(store.name),
    ):
        time.sleep(patience(1.0))


def test_a_request_that_fails_is_an_error_and_the_worker_goes_on() -> None:
    with AnsweringProcess("cpprb", sys.executable, transitions.WORKER, {}) as peer:
        for _ in range(2):
            with pytest.raises(BaselineError, match="nothing was set up"):
                peer.ask({"do": "sample", "batch": 1, "calls": 1}, 60)
