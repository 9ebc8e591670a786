"""The demo's promises: its model learns, never sees the answer, and the script cleans up."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from deadlines import patience

import geartrain as gt

torch = pytest.importorskip("torch", reason="the demo trains a torch model")
pytest.importorskip("rich", reason="the demo draws its progress bars with rich")

SCRIPT = Path(__file__).parents[2] / "examples" / "offline_gato_hopper.py"
STEPS = 60


@pytest.fixture(scope="module")
def learner():
    spec = importlib.util.spec_from_file_location("hopper_learner", SCRIPT.with_name("hopper_learner.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def store(store_name):
    """Ragged episodes of random observations, in which the right action is part of what is seen.

    A step's return-to-go is its number in the episode, which lets a test tell steps apart.
    """
    fields = {
        "obs": gt.Field((6,), "float32"),
        "action": gt.Field((2,), "float32"),
        "return_to_go": gt.Field((), "float32"),
    }
    rng = np.random.default_rng(0)
    with gt.Store.create(store_name(), fields, max_length=STEPS, capacity=32) as store:
        for length in rng.integers(5, STEPS + 1, 32):
            with store.row() as row:
                obs = rng.uniform(-1.0, 1.0, (length, 6)).astype(np.float32)
                row["obs"][:length], row["action"][:length] = obs, obs[:, :2]
                row["return_to_go"][:length] = np.arange(length)
                row.length = length
        yield store


def windows(store, batch_size=32):
    return gt.Replay(
        store,
        gt.selection.Uniform(seed=1),
        batch_size=batch_size,
        fields=["return_to_go", "obs", "action"],
        window=20,
    )


@pytest.mark.slow
def test_the_model_learns_the_identity_task_from_the_store(learner, store):
    torch.manual_seed(0)
    model = learner.DecisionTransformer(6, 2, width=48, layers=2, heads=2)
    model.return_scale.fill_(STEPS)
    with windows(store) as replay:
        losses = list(learner.train(model, replay, steps=150))
    assert len(losses) == 150
    assert np.mean(losses[-10:]) < losses[0] / 30
    with windows(store) as replay, torch.inference_mode():
        batch = next(iter(replay))
        error = (model(batch, batch.mask) - batch["action"])[batch.mask].abs().mean()
    assert error < 0.1, "a guess of zero is off by 0.5 on average"


def test_a_prediction_never_depends_on_its_own_action_or_on_the_future(learner):
    torch.manual_seed(0)
    model = learner.DecisionTransformer(6, 2, width=32, layers=2, heads=2)
    shapes = {"return_to_go": (4, 20), "obs": (4, 20, 6), "action": (4, 20, 2)}
    window = {name: torch.randn(shape) for name, shape in shapes.items()}
    mask = torch.ones(4, 20, dtype=torch.bool)
    mask[0, :7] = False
    before = model(window, mask)
    for t in range(7, 20):
        other = {name: column.clone() for name, column in window.items()}
        other["action"][:, t:] += 1.0
        for name in ("return_to_go", "obs"):
            other[name][:, t + 1 :] += 1.0
        torch.testing.assert_close(model(other, mask)[:, : t + 1], before[:, : t + 1])
        # The test itself can fail: what the model may see does change the prediction.
        other["obs"][:, t] += 1.0
        assert (model(other, mask)[:, t] - before[:, t]).abs().amax(-1).min() > 1e-4


def demo_segments():
    return {path.name for path in Path("/dev/shm").glob("*hopper-demo*")}


@pytest.fixture
def simulator():
    for module in ("gymnasium", "mujoco", "matplotlib"):
        pytest.importorskip(module, reason=f"the demo's simulator run needs {module}")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_script_runs_end_to_end_and_repeats_itself(simulator, tmp_path):
    results = []
    for out in (tmp_path / "first", tmp_path / "second"):
        command = [sys.executable, str(SCRIPT), "--quick", "--steps=5", "--episodes=4", "--seed=3"]
        done = subprocess.run(
            [*command, "--out", str(out)], capture_output=True, text=True, timeout=patience(120), check=False
        )
        assert done.returncode == 0, done.stderr
        assert (out / "learning_curve.png").stat().st_size > 10_000
        for promised in ("expert return", "model return", "GB/s", "samples/s", "waiting for data"):
            assert promised in done.stdout
        results.append(json.loads((out / "result.json").read_text()))
    first, second = results
    assert 2_900 < first["expert_return"]["mean"] < 3_300
    assert first["losses"] == second["losses"]
    assert first["evaluations"] == second["evaluations"]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after_s", [0.2, 6.0])
def test_an_interrupted_run_leaves_no_segment_behind(simulator, tmp_path, stop, after_s):
    command = [sys.executable, str(SCRIPT), "--episodes=60", "--out", str(tmp_path)]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    mine = f"hopper-demo-{running.pid}"
    try:
        until = time.monotonic() + patience(60)
        while not any(mine in name for name in demo_segments()) and time.monotonic() < until:
            time.sleep(0.05)
        assert any(mine in name for name in demo_segments()), "the run never made its store"
        time.sleep(after_s)  # 0.2 s: collectors are starting; 6 s: they are writing.
        running.send_signal(stop)
        _, errors = running.communicate(timeout=patience(30))
    finally:
        running.kill()
    assert running.returncode == 128 + stop
    assert b"Traceback" not in errors
    assert not [name for name in demo_segments() if mine in name], "others may run at the same time"
