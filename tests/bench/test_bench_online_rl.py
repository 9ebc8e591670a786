"""`geartrain bench online` measures what it says, and says what it could not measure."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("gymnasium")
pytest.importorskip("rich")

import geartrain_bench.online_rl.bench as online
import geartrain_bench.online_rl.worker as online_worker
from geartrain.errors import ArgumentError
from geartrain_bench import plot_saved
from geartrain_bench.harness.report import write_json
from geartrain_bench.harness.timing import new_result

pytestmark = pytest.mark.usefixtures("preloaded_children")
#: On the clock of `time.monotonic`: far away.
LATER_S = 1e12
ASKED = {
    "environment": "CartPole-v1",
    "actors": 1,
    "environments": 2,
    "seconds": 1.3,
    "warm_s": 0.1,
    "capacity": 10_000,
    "batch": 32,
    "frames": 50,
    "least": 100,
    "train_ms": 10.0,
    "publish_every": 5,
    "max_wait_us": 500.0,
}


def test_a_learner_and_actors_are_measured_while_both_work():
    slices = online._ours({**ASKED, "loop": "train"})
    assert slices
    for one in slices:
        assert one["steps"] > 0
        assert one["rows"] > 0
        assert 0 < one["updates"] < 100  # it sleeps 10 ms an update
        assert 0 <= one["wait"] < 1
    result = new_result("online", quick=True, baselines=(), packages=())
    online._add_rates(result, "a case", "geartrain", slices, 1 / slices[0]["steps"], ASKED)
    assert [row.metric for row in result.rows] == [online.STEPS, online.ROWS, online.UPDATES, online.WAITS]
    assert result.rows[2].ratio_to_floor < 1  # no faster than a learner that never waits
    assert result.rows[3].unit == "%"


def test_every_observer_tells_how_long_its_actions_took(tmp_path):
    took_s = online._asking({**ASKED, "observers": 2, "seconds": 0.5})
    assert len(took_s) > 20
    assert 0 < min(took_s) < max(took_s) < 30
    alone_s = online_worker.policy_alone_s(50)
    assert len(alone_s) == 45
    result = new_result("online", quick=True, baselines=(), packages=())
    result.rows.append(online.time_row("2 observers", "geartrain", online.ACTION, "us", took_s, alone_s[0]))
    pytest.importorskip("matplotlib")
    online.plot(result, tmp_path / "online.png")
    drawn = (tmp_path / "online.png").read_bytes()
    assert len(drawn) > 1000
    write_json(result, tmp_path / "online.json")
    plot_saved(tmp_path / "online.json", tmp_path / "online.png")
    assert (tmp_path / "online.png").read_bytes() == drawn


def test_a_peer_that_cannot_run_is_named_with_its_reason(tmp_path):
    result = new_result("online", quick=True, baselines=(), packages=())
    assert online._baseline(result, "torchrl", {}, {**ASKED, "loop": "train"}, LATER_S) is None
    assert "--baseline-python torchrl" in result.baselines_missing["torchrl"]
    wrong = tmp_path / "python"
    wrong.write_text("#!/bin/sh\necho no such thing >&2\nexit 1\n")
    wrong.chmod(0o755)
    assert online._baseline(result, "torchrl", {"torchrl": str(wrong)}, {**ASKED, "loop": "train"}, LATER_S) is None
    assert result.baselines_missing["torchrl, train"] == "it ended: no such thing"
    try:
        import torchrl  # noqa: F401
    except ImportError:
        assert (
            online._baseline(result, "torchrl", {"torchrl": sys.executable}, {**ASKED, "loop": "collect"}, LATER_S)
            is None
        )
        assert "No module named" in result.baselines_missing["torchrl, collect"]
    assert online._baseline(result, "torchrl", {"torchrl": str(wrong)}, {**ASKED, "loop": "train"}, 0.0) is None
    assert result.baselines_missing["torchrl, train"] == "the run's 235 s were used up"
    with pytest.raises(ArgumentError, match="a baseline of this benchmark is one of 'torchrl', 'reverb'"):
        online.main(quick=True, baselines={"nobody": "python"})


@pytest.mark.long
def test_the_quick_form_ends_with_all_its_tables(tmp_path):
    result = online.main(quick=True, json_path=tmp_path / "online.json", plot_path=tmp_path / "online.png")
    systems = {(row.metric, row.system) for row in result.rows}
    for metric in (online.STEPS, online.ROWS, online.UPDATES, online.WAITS, online.ACTION):
        assert (metric, "geartrain") in systems
    assert json.loads((tmp_path / "online.json").read_text())["bench"] == "online"
