"""The small Gato: tokens and losses are those of slow loops, and a run that was cut goes on to the bit."""

from __future__ import annotations

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

torch = pytest.importorskip("torch", reason="the model is torch's")
pytest.importorskip("rich", reason="the examples draw progress bars with rich")
pytest.importorskip("matplotlib", reason="the examples draw their curves with matplotlib")

ROOT = Path(__file__).parents[2]
LENGTHS = (30, 2, 21, 1, 25, 9)


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


@pytest.fixture
def gato(examples):
    return importlib.import_module("gato_model")


@pytest.fixture
def tasks(examples):
    return importlib.import_module("gato_tasks")


@pytest.fixture
def example(examples):
    return importlib.import_module("offline_gato_small")


# --- tokens -----------------------------------------------------------------------------------------------------------


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(gato, tasks):
    torch.manual_seed(0)
    made = gato.Gato(tasks.SHAPES, 4, width=32, layers=2)
    made.head.weight.data *= 40  # or all tokens would be about as likely,
    made.patches.out.weight.data *= 20  # and all pictures alike
    return made


def windows(tasks, task, n, seed=0):
    """(tokens, frames, mask) of random windows, the first of which begin before their episodes do."""
    rng, shape = np.random.default_rng(seed), tasks.SHAPES[task]
    tokens = np.zeros((n, 4, tasks.TOKENS), np.int16)
    tokens[..., : shape.numbers] = rng.integers(1024, 2048, (n, 4, shape.numbers))
    actions = rng.integers(shape.allowed.start, shape.allowed.stop, (n, 4, shape.actions))
    tokens[..., shape.numbers : shape.numbers + shape.actions] = actions
    frames = None
    if shape.frame:  # noise, of another brightness in each part of the picture
        bright = rng.integers(0, 128, (n, 4, 3, 4), np.uint8).repeat(14, 2).repeat(10, 3)
        frames = torch.from_numpy(bright + rng.integers(0, 128, bright.shape, np.uint8))
    mask = np.arange(4) >= 3 - np.arange(n)[:, None].clip(max=3)
    return torch.from_numpy(tokens), frames, torch.from_numpy(mask)


def slow_logits(model, tasks, task, tokens, frames, step, number):
    """What is expected of one action token of one window, whose tokens up to it are laid out one after the other."""
    shape = tasks.SHAPES[task]
    x = model.embed(task, tokens[None], None if frames is None else frames[None]).flatten(1, 2)
    known = shape.tokens * step + shape.observed + 1 + number
    return x, known


@pytest.mark.parametrize("task", ["hopper", "halfcheetah", "freeway"])
def test_the_loss_is_that_of_a_slow_loop_over_real_steps_alone(model, tasks, task):
    tokens, frames, mask = windows(tasks, task, 5)
    shape, losses = tasks.SHAPES[task], []
    with torch.no_grad():
        for n, step in mask.nonzero().tolist():
            first = int(mask[n].int().argmax())
            for number in range(shape.actions):
                one = None if frames is None else frames[n]
                x, known = slow_logits(model, tasks, task, tokens[n], one, step, number)
                x = x[:, first * shape.tokens : known]  # padding is left out, and so is what comes later
                for layer in model.layers:
                    x, _ = layer(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril())
                logits = model.head(model.norm(x[0, -1]))
                losses.append(-logits.log_softmax(-1)[int(tokens[n, step, shape.numbers + number])])
        torch.testing.assert_close(model.loss(task, tokens, frames, mask), torch.stack(losses).mean())


# --- the stores -------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tasks, tmp_path, store_name):
    """Recordings of three tasks: ragged episodes of random tokens; a frame's pixels tell its row and step."""
    rng = np.random.default_rng(0)
    for task, shape in tasks.SHAPES.items():
        directory = tmp_path / "data" / task
        directory.mkdir(parents=True)
        fields = tasks.fields_of(task)
        with gt.Store.create(store_name(), fields, max_length=tasks.LONGEST[task], capacity=len(LENGTHS)) as store:
            for number, length in enumerate(LENGTHS):
                with store.row() as row:
                    row["tokens"][:length] = 0
                    low, high = shape.allowed.start, shape.allowed.stop
                    row["tokens"][:length, : shape.numbers] = rng.integers(1024, 2048, (length, shape.numbers))
                    actions = rng.integers(low, high, (length, shape.actions))
                    row["tokens"][:length, shape.numbers : shape.numbers + shape.actions] = actions
                    if shape.frame:
                        row["frame"][:length] = 40 * number + np.arange(length)[:, None, None]
                        row["tokens"][:length, -1] = 40 * number + np.arange(length)  # which this task does not use
                    row.length = length
            store.save(directory / "store")
        reached = {"returns": [1.0, 3.0], "lengths": [30, 20]}
        content = {"episodes": len(LENGTHS), "steps": sum(LENGTHS), "expert": reached}
        content["random"] = {"returns": [0.0], "lengths": [5]}
        (directory / "recorded.json").write_text(json.dumps(content))
    return tmp_path / "data"


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def train(example, data, monkeypatch, tmp_path):
    """Runs the example on those recordings, with tasks that need no simulator; its result."""

    def evaluate(learner, episodes, chosen, bars):
        first = learner.mean.module.head.weight.detach().sum().item()  # of the weights that would play
        return {task: {"returns": [first] * episodes, "lengths": [7] * episodes} for task in example.SHARES}

    monkeypatch.setattr(example, "evaluate", evaluate)
    monkeypatch.setattr(example, "plot", lambda *_: None)  # takes longer than all else

    def run(name, *options):
        out = tmp_path / name
        options = ["--tiny", "--data", str(data), "--out", str(out), *options]
        assert example.main(options) == 0
        return json.loads((out / "result.json").read_text())

    return run


class CutError(Exception):
    pass


@pytest.mark.parametrize("cut_after", [2, 5, 8])
def test_a_run_that_was_cut_has_the_losses_of_one_that_was_not_to_the_bit(
    example, train, monkeypatch, tmp_path, cut_after
):
    """Cut before the first checkpoint (5), at it, and between two: from the checkpoint all is done again."""
    whole = train("whole")
    assert whole["done"] and len(whole["losses"]) == 12
    assert whole["losses"][0] != whole["losses"][-1]
    with monkeypatch.context() as patched:
        real = example.Learner.train

        def cut(learner, step, found):
            if step == cut_after:
                raise CutError
            return real(learner, step, found)

        patched.setattr(example.Learner, "train", cut)
        with pytest.raises(CutError):
            train("cut")
    assert (tmp_path / "cut" / "seed-0.pt").exists() == (cut_after >= 5)
    again = train("cut")
    assert again["losses"] == whole["losses"]
    assert again["evaluations"] == whole["evaluations"], "the mean of the weights went on too"
    other = train("other", "--seed", "1")
    assert other["losses"] != whole["losses"]


def test_a_checkpoint_of_another_run_or_of_other_recordings_is_refused(train, data):
    train("run", "--minutes", "0")
    with pytest.raises(SystemExit, match="choose those options again"):
        train("run", "--batch", "9")
    content = json.loads((data / "hopper" / "recorded.json").read_text())
    (data / "hopper" / "recorded.json").write_text(json.dumps(content | {"cpu_s": 3.5}))  # recorded once more
    with pytest.raises(SystemExit, match="other recordings"):
        train("run")


@pytest.mark.parametrize(
    "option",
    [
        *("steps=0", "batch=-1", "rate=0", "rate=nan", "width=20", "layers=0", "minutes=nan", "minutes=-1", "seed=-1"),
        *("evaluations=-1", "save-every=0", "final-episodes=0", "episodes=1", "games=0", "data-seed=-3"),
    ],
)
def test_senseless_options_are_refused_with_what_is_allowed(example, option, capsys):
    with pytest.raises(SystemExit) as refused:
        example.main(["--tiny", f"--{option}"])
    assert refused.value.code == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert f"--{option.partition('=')[0]} " in told


# --- simulators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["hopper", "halfcheetah"])
def test_the_experts_that_ship_reach_what_they_say_by_actions_of_1024_bins(tasks, task):
    pytest.importorskip("mujoco", reason="a MuJoCo task")
    pytest.importorskip("gymnasium", reason="Gymnasium has the task")
    envs, made = tasks.play(task, [123], tasks.linear_expert(task), lambda actions: actions, 1000)
    assert envs.lengths.tolist() == [1000] and made["tokens"].shape == (1000, 1, tasks.TOKENS)
    said = float(np.load(tasks.HERE / "data" / f"{task}_expert.npz")["ret"])
    assert envs.returns[0] > 0.9 * said


@pytest.mark.slow  # trains Freeway's expert too, in a process of its own
def test_the_whole_example_runs_and_leaves_nothing_in_shared_memory(tmp_path):
    """Records all three tasks, Freeway by a network that the DQN example wrote, trains, plays and draws."""
    pytest.importorskip("mujoco", reason="two tasks are MuJoCo's")
    pytest.importorskip("ale_py", reason="one task is Atari's")
    curve = tmp_path / "curve.json"
    command = [sys.executable, "examples/offline_gato_small.py", "--tiny", "--out", str(tmp_path / "out")]
    command += ["--data", str(tmp_path / "data"), "--network", str(tmp_path / "freeway.pt"), "--curve", str(curve)]
    with tempfile.TemporaryDirectory(prefix="geartrain-test-", dir="/dev/shm") as segments:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GEARTRAIN_DIR": segments}
        done = preloaded.run(command, timeout=patience(110), cwd=ROOT, env=environment)
        assert done.returncode == 0, done.stderr
        assert not list(Path(segments).glob("geartrain[.-]*"))
    assert (tmp_path / "freeway.pt").exists(), "the DQN example kept its network"
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["done"] and [point["step"] for point in result["evaluations"]] == [6, 12]
    assert all(set(each) == {"hopper", "halfcheetah", "freeway"} for each in result["losses"])
    final = result["evaluations"][-1]["episodes"]
    assert final["halfcheetah"]["lengths"] == [40, 40] and final["freeway"]["lengths"] == [40, 40]
    assert all(0 < length <= 40 for length in final["hopper"]["lengths"])
    assert (tmp_path / "out" / "returns.png").stat().st_size > 5000
    figures = json.loads(curve.read_text())["result"]
    assert figures["halfcheetah_return"] == np.mean(final["halfcheetah"]["returns"])
