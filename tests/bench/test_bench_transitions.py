"""The transitions bench: every case has its floor and its numbers, absent baselines are named. No timing is judged."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from deadlines import patience

import geartrain_bench as bench
import geartrain_bench.transitions.bench as transitions
import geartrain_bench.transitions.worker as worker
from geartrain.core.schema import Field
from geartrain.errors import ArgumentError
from geartrain.store.store import Store
from geartrain_bench.harness.child_process import AnsweringProcess, BaselineError
from geartrain_bench.harness.killed_writers import KilledWriters

TINY = transitions.Plan(3000, 1000, 300, 6000, repeats=3, case_s=0.02, calls=1)


@pytest.fixture(scope="module")
def tiny() -> bench.BenchResult:
    return transitions.run(TINY, {"sb3": sys.executable + "-that-is-not", "other": sys.executable}, quick=True)


def test_it_is_known_by_name() -> None:
    assert bench.load("transitions") is transitions.main


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


def test_rates_are_told_for_transitions_that_every_system_samples_alike(tiny: bench.BenchResult) -> None:
    (note,) = [note for note in tiny.notes if note.startswith("SAC, sample 256: million transitions")]
    (row,) = [row for row in tiny.rows if (row.case, row.system) == ("SAC, sample 256", "geartrain")]
    assert f"geartrain {256 / row.p50:.3g}, " in note


def test_one_case_alone_is_measured_by_its_name_and_an_unknown_name_is_refused() -> None:
    found = transitions.run(TINY, {}, only=("a step of 16",))
    assert {row.case for row in found.rows} == {"SAC, add a step of 16"}
    assert found.command.endswith('--case "a step of 16"')
    with pytest.raises(ArgumentError, match="no case has 'Pong' in its name; cases are SAC, sample 256, "):
        transitions.run(TINY, {}, only=("Pong",))


def test_writers_are_killed_beside_every_case(tiny: bench.BenchResult) -> None:
    for case in transitions.CASES:
        (note,) = [
            note for note in tiny.notes if note.startswith(f"{case.name}: ") and note.endswith("killed meanwhile")
        ]
        assert re.fullmatch(r".*: [1-9]\d* writers were killed meanwhile", note)


def test_a_writer_that_cannot_record_is_an_error() -> None:
    fields = {"x": Field((), "float32")}  # no recorder's
    with (
        Store.create(f"bench-{os.getpid()}", fields, max_length=2, capacity=8) as store,
        pytest.raises(BaselineError, match="ended by themselves"),
        KilledWriters(store.name),
    ):
        time.sleep(patience(1.0))


def test_a_step_takes_the_bytes_of_its_fields_and_little_more(tiny: bench.BenchResult) -> None:
    found = {row.system: row.p50 for row in tiny.rows if row.metric == "memory"}
    assert found["floor"] == 4 * (17 + 6 + 1) + 3
    assert found["floor"] < found["geartrain"] < 10 * found["floor"]


def test_absent_baselines_are_named_with_the_reason(tiny: bench.BenchResult) -> None:
    missing = tiny.baselines_missing
    assert set(missing) == {*transitions.ALL_BASELINES, "other"}
    assert "does not start" in missing["sb3"]
    assert "--baseline-python" in missing["torchrl"] and "unknown" in missing["other"]


class _Kept(worker.Buffer):
    def make(self) -> None:
        self.stored: list[object] = []

    def store(self, step: object) -> None:
        self.stored.append(step)

    def nbytes(self) -> int:
        return 7


def test_a_baseline_is_filled_with_steps_of_the_case() -> None:
    case = transitions.CASES[2]
    made = _Kept(transitions.setup_of(case, "sb3", 50, fill=True))
    assert len(made.stored) == 50
    observation, following, action, reward, ended = made.noise[0]
    assert observation.shape == following.shape == (1, 4, 84, 84) and observation.dtype == np.uint8
    assert action.shape == (1, 6) and reward.shape == ended.shape == (1,)


def test_a_buffer_without_windows_is_left_out_of_their_cases() -> None:
    case = transitions.CASES[-1]
    with pytest.raises(ValueError, match="no windows of steps"):
        _Kept(transitions.setup_of(case, "sb3", 50, fill=True))


def test_torchrl_samples_as_many_steps_as_the_windows_have() -> None:
    pytest.importorskip("torchrl")
    case = next(case for case in transitions.CASES if case.window == 20)
    made = worker.Torchrl(transitions.setup_of(case, "torchrl", 400, fill=True))
    sampled = made.buffer.sample(case.batch * case.window)
    assert sampled["observation"].shape == (case.batch * case.window, 17) and ("next", "observation") not in sampled
    assert sampled["action"].shape[1:] == (6,) and sampled["next", "reward"].shape == (case.batch * case.window,)
    made.sample(case.batch)


def test_the_floor_of_windows_copies_every_step_of_four_fields() -> None:
    ten, twenty = (case for case in transitions.CASES if case.window)
    assert ten.copied == dict.fromkeys(("obs", "action", "reward", "terminated"), 10)
    assert twenty.copied == dict.fromkeys(ten.read, 20)
    assert transitions.CASES[0].copied == {"obs": 2, "action": 1, "reward": 1, "terminated": 1, "truncated": 1}


def test_a_request_that_fails_is_an_error_and_the_worker_goes_on() -> None:
    with AnsweringProcess("cpprb", sys.executable, transitions.WORKER, {}) as peer:
        for _ in range(2):
            with pytest.raises(BaselineError, match="nothing was set up"):
                peer.ask({"do": "sample", "batch": 1, "calls": 1}, 60)


def test_the_plot_is_an_image(tiny: bench.BenchResult, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    transitions.plot(tiny, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_result_is_json(tiny: bench.BenchResult) -> None:
    assert json.loads(json.dumps(tiny.as_json()))["bench"] == "transitions"
