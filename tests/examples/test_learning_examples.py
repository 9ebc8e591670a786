"""The examples that learn: their targets are right, they run, and ranks do not change what they learn."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import preloaded
import pytest
from deadlines import patience

import geartrain as gt

torch = pytest.importorskip("torch", reason="the examples train torch models")
pytest.importorskip("rich", reason="the examples draw progress bars with rich")
pytest.importorskip("matplotlib", reason="the examples draw their curves with matplotlib")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
pytestmark = pytest.mark.usefixtures("preloaded_children")


def run(command, tmp_path, timeout_s=110):
    """Runs an example; what its curve says. Nothing of it may stay in shared memory."""
    curve = tmp_path / "curve.json"
    with tempfile.TemporaryDirectory(prefix="geartrain-test-", dir="/dev/shm") as segments:
        done = preloaded.run(
            [*command, "--curve", str(curve), "--plot", str(tmp_path / "curve.png")],
            timeout=patience(timeout_s),
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GEARTRAIN_DIR": segments},
        )
        assert done.returncode == 0, done.stderr
        assert not list(Path(segments).glob("geartrain[.-]*"))
    assert (tmp_path / "curve.png").stat().st_size > 5000
    return json.loads(curve.read_text())


# --- DQN ----------------------------------------------------------------------------------------------------------


def test_dqn_runs_and_leaves_nothing_behind(tmp_path):
    pytest.importorskip("ale_py", reason="ALE is an extra: pip install 'geartrain[atari]'")
    file = tmp_path / "folder" / "network.pt"
    command = [sys.executable, "examples/online_dqn_atari.py", "--tiny", "--game", "pong", "--network", str(file)]
    found = run(command, tmp_path)
    result = found["result"]
    assert result["learner_steps"] == 20
    assert result["environment_steps"] >= 200
    assert found["lines"]["random actions"] == result["random"]
    import online_dqn_atari as dqn

    network = dqn.QNetwork(6)
    network.load_state_dict(torch.load(file, weights_only=True))
    assert network.is_trained, "what was kept has seen the game"


class SlowPool:
    """Actors that make a step from one look to the next, up to `most`."""

    def __init__(self, most):
        self.steps, self.most = 0, most

    def check(self):
        self.steps = min(self.most, self.steps + 1)

    def stats(self):
        return {"steps": self.steps}


def test_dqn_waits_for_slow_actors_and_not_for_those_that_stand_still():
    from rich import progress

    import online_dqn_atari as dqn

    with progress.Progress(disable=True) as bars:
        bar = bars.add_task("")
        dqn.first_steps(SlowPool(10), 4, bars, bar, patience_s=0.15)
        with pytest.raises(gt.errors.WaitTimeoutError, match=r"after 2 steps the actors made none within 0\.15 s"):
            dqn.first_steps(SlowPool(2), 4, bars, bar, patience_s=0.15)


# --- one curve on any number of ranks -----------------------------------------------------------------------------


@pytest.mark.slow
def test_two_stages_and_two_replicas_learn_what_one_process_learns(tmp_path, store_name):
    pytest.importorskip("torch.distributed.pipelining", reason="needs torch 2.4")
    worker = [str(ROOT / "tests" / "support" / "pipeline_gato_worker.py"), str(tmp_path), store_name()]
    done = preloaded.run(
        [*TORCHRUN, "--nproc-per-node", "2", *worker],
        timeout=patience(110),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    alone = first["alone"]
    assert len(alone) == 8 and alone[-1] < alone[0]
    for losses in (second["2x1"], first["1x2"], second["1x2"]):
        assert losses == pytest.approx(alone, rel=1e-4)
    for ways in (first, second):  # both have the whole model's averaged weights in the end
        assert ways["norm 2x1"] == pytest.approx(first["norm alone"], rel=1e-4)
        assert ways["norm 1x2"] == pytest.approx(first["norm alone"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hopper_has_one_curve_on_one_rank_and_on_two(tmp_path):
    for module in ("gymnasium", "mujoco"):
        pytest.importorskip(module, reason=f"Hopper needs {module}")
    found = []
    for ranks, stages in ((1, 1), (2, 2), (2, 1)):
        command = [*TORCHRUN, "--nproc-per-node", str(ranks), "examples/pipeline_gato.py", "--tiny", "--seed", "3"]
        found.append(run([*command, "--stages", str(stages)], tmp_path))
    for other in found[1:]:
        assert other["losses"] == pytest.approx(found[0]["losses"], rel=1e-4)
        assert [p["y"] for p in other["points"]] == pytest.approx(
            [p["y"] for p in found[0]["points"]], rel=0.02, abs=0.02
        )
