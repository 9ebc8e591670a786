"""The examples that learn in simulators: what they compute is what slow loops compute, and they run."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import preloaded
import pytest
from deadlines import patience

import geartrain as gt
from geartrain.actors import StepResult, recorded_fields

torch = pytest.importorskip("torch", reason="the examples train torch models")
pytest.importorskip("rich", reason="the examples draw progress bars with rich")
pytest.importorskip("matplotlib", reason="the examples draw their curves with matplotlib")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))


@pytest.fixture
def mat():
    return importlib.import_module("online_mat_smax")


def run(example, tmp_path, *options, timeout_s=110):
    """Runs an example; its curve. Nothing of it may stay in shared memory."""
    curve, picture = tmp_path / "curve.json", tmp_path / "curve.png"
    command = [sys.executable, f"examples/{example}", "--tiny", *options, "--curve", str(curve), "--plot", str(picture)]
    with tempfile.TemporaryDirectory(prefix="geartrain-test-", dir="/dev/shm") as segments:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GEARTRAIN_DIR": segments}
        done = preloaded.run(command, timeout=patience(timeout_s), cwd=ROOT, env=environment)
        assert done.returncode == 0, done.stderr
        assert not list(Path(segments).glob("geartrain[.-]*"))
    assert picture.stat().st_size > 5000
    return json.loads(curve.read_text())


# --- the transformer ------------------------------------------------------------------------------------------------


class Agree:
    """Battles of one to three rounds, won by three agents that all do what is asked of the last one alone."""

    agents, actions = 3, 4

    def __init__(self, n):
        self.n = n
        self.won = np.zeros(n, bool)

    def reset(self, seed):
        self._rng = np.random.default_rng(seed)
        self._begin(np.ones(self.n, bool))
        return self._look()

    def step(self, actions):
        right = (actions == self._asked[:, None]).all(1)
        self._left -= 1
        over = self._left == 0
        self.won = over & right
        last = self._look()
        self._begin(over)
        no = np.zeros(self.n, bool)
        return StepResult(last, right.astype("float32"), over, no, self._look(), ~no)

    def fields(self):
        return {
            "obs.agents": gt.Field((3, 5), "float32"),
            "obs.available": gt.Field((3, 4), "bool"),
            "action": gt.Field((3,), "int64"),
            "reward": gt.Field((), "float32"),
        }

    def close(self):
        pass

    def _begin(self, which):
        if which.all():
            self._asked, self._left = np.zeros(self.n, int), np.ones(self.n, int)
        self._asked[which] = self._rng.integers(4, size=which.sum())
        self._left[which] = self._rng.integers(1, 4, size=which.sum())

    def _look(self):
        seen = np.zeros((self.n, 3, 5), "float32")
        seen[np.arange(self.n), 2, self._asked] = 1
        seen[..., 4] = self._left[:, None]
        return {"agents": seen, "available": np.ones((self.n, 3, 4), bool)}


def agreed(mat, name, **options):
    """Teams learn to agree, in a store of that name: the team, the curve, and what came of it."""
    chosen = argparse.Namespace(
        task="smax/agree", seed=0, envs=128, steps=6_000, seconds=90.0, epochs=4, rate=3e-3, every=1000, scale=1.0,
        curve=None, plot=None, minibatches=4, measure="win rate", checkpoint=None,
    )  # fmt: skip
    battles = options.pop("battles", None) or Agree(chosen.envs)
    vars(chosen).update(options)
    torch.manual_seed(0)
    steps = mat.ACTIONS + 1
    told = {name: gt.Field((3,), "float32") for name in ("log_prob", "value")}
    team = mat.Team(3, 5, 4, True)
    curve = mat.curves.Curve("agree", "steps", "won", chosen)
    fields = recorded_fields(battles.fields(), **told)
    with gt.Store.create(name, fields, max_length=steps, capacity=1024, max_times_sampled=1) as store:
        return team, curve, mat.learn(chosen, team, battles, store, curve)


@pytest.mark.slow
def test_the_team_learns_to_agree_through_the_store(mat, store_name):
    _, _, result = agreed(mat, store_name())
    assert result["greedy"] > 0.9, "three agents that guess agree with what is asked once in 64 times"
    assert result["row_age_versions"] <= 1


class CutError(Exception):
    pass


class CutShort(Agree):
    """Breaks after so many steps."""

    left = 30

    def step(self, actions):
        self.left -= 1
        if not self.left:
            raise CutError
        return super().step(actions)


@pytest.mark.slow
def test_a_run_that_was_cut_goes_on_from_its_checkpoint(mat, store_name, tmp_path, monkeypatch):
    file = tmp_path / "run.pt"
    with pytest.raises(CutError):
        agreed(mat, store_name(), battles=CutShort(128), every=2, checkpoint=file)
    saved = torch.load(file, weights_only=True)
    cut = saved["run"]
    assert cut["version"] >= 2 and 0 < cut["steps"] < 6_000 and len(cut["points"]) == cut["version"] // 2
    loaded = []
    resume = mat.resume

    def watched(chosen, team, optimizer, curve):
        run = resume(chosen, team, optimizer, curve)
        weights = {name: value.clone() for name, value in team.state_dict().items()}
        loaded.append((weights, float(optimizer.state_dict()["state"][0]["step"])))
        return run

    monkeypatch.setattr(mat, "resume", watched)
    _, curve, result = agreed(mat, store_name(), every=2, checkpoint=file)
    ((team, updates),) = loaded
    assert all(torch.equal(value, saved["team"][name]) for name, value in team.items())
    assert updates == saved["optimizer"]["state"][0]["step"] > 0
    assert curve.content["points"][: len(cut["points"])] == cut["points"]
    steps = [point["x"] for point in curve.content["points"]]
    assert steps == sorted(steps) and 6_000 <= result["environment_steps"] < 7_000, "none is counted twice"
    assert result["versions"] > cut["version"] and result["train_s"] > cut["spent_s"]
    assert result["greedy"] > 0.8
    with pytest.raises(SystemExit, match="of a run with"):
        agreed(mat, store_name(), every=2, checkpoint=file, rate=1e-3)


@pytest.mark.slow  # JAX compiles for many seconds
@pytest.mark.timeout(300)
def test_battles_are_learned_from_end_to_end(tmp_path):
    pytest.importorskip("jaxmarl", reason="SMAX is an extra: pip install 'geartrain[smax]'")
    found = run("online_mat_smax.py", tmp_path, timeout_s=patience(280))
    assert found["result"]["environment_steps"] >= 600
    assert 0 <= found["result"]["greedy"] <= 1
    assert found["result"]["versions"] == len(found["points"]) - 1 > 1


def test_continuous_teams_run_end_to_end(tmp_path):
    pytest.importorskip("vmas", reason="VMAS is an extra: pip install 'geartrain[vmas]'")
    found = run("online_mat_smax.py", tmp_path, "--task", "vmas/balance", "--steps", "200")
    assert found["result"]["environment_steps"] >= 200
    assert np.isfinite(found["result"]["greedy"])


@pytest.mark.parametrize(
    ("example", "package"), [("online_mat_smax.py", "jaxmarl"), ("online_sac_fetch.py", "gymnasium_robotics")]
)
def test_a_missing_simulator_is_one_line_with_the_cure(tmp_path, example, package):
    (tmp_path / f"{package}.py").write_text(f"raise ImportError('no {package}')")
    broken = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, str(ROOT / "examples" / example), "--tiny"]
    done = preloaded.run(command, env=broken, timeout=patience(60))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install 'geartrain[" in done.stderr


# --- the arm --------------------------------------------------------------------------------------------------------


def test_the_arm_runs_end_to_end(tmp_path):
    pytest.importorskip("gymnasium_robotics", reason="robot arms are an extra: pip install 'geartrain[fetch]'")
    mujoco = pytest.importorskip("mujoco", reason="robot arms are an extra: pip install 'geartrain[fetch]'")
    fetch = importlib.import_module("geartrain.actors.envs.robotics")
    if tuple(int(part) for part in mujoco.__version__.split(".")[:2]) >= fetch.TOO_NEW:
        pytest.skip(f"robot arms need an older MuJoCo than {mujoco.__version__}: pip install 'geartrain[fetch]'")
    found = run("online_sac_fetch.py", tmp_path)
    assert found["result"]["environment_steps"] == 200
    assert 0 <= found["result"]["success"] <= 1
    assert found["lines"].keys() == {"random actions"}
