"""The example whose agent infers for remote actors: its targets are right, stages change nothing, and it learns."""

from __future__ import annotations

import dataclasses
import json
import queue
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from deadlines import patience

from geartrain import launch

torch = pytest.importorskip("torch", reason="the example trains a torch model")
pytest.importorskip("gymnasium", reason="the example acts in simulators")

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import online_ppo_mujoco as ppo  # noqa: E402


class Rows(dict):
    """As a batch: fields by name, and a mask."""

    mask = torch.tensor([[True] * 5, [False, True, True, True, True]])


@pytest.fixture
def rows():
    last = torch.zeros(2, 5, dtype=torch.bool)
    last[:, 4] = True
    terminated = torch.zeros(2, 5, dtype=torch.bool)
    terminated[0, 3] = True  # the second row was cut
    return Rows(last=last, terminated=terminated, reward=torch.arange(10.0).reshape(2, 5))


def test_advantages_are_those_of_a_slow_loop(rows):
    values = torch.linspace(-1, 1, 10).reshape(2, 5)
    advantage, target = ppo.advantages(rows, values)
    expected = []
    for row, first in ((0, 0), (1, 1)):
        for t in range(first, 4):
            total, factor = 0.0, 1.0
            for k in range(t, 4):
                going = 0.0 if rows["terminated"][row, k] else 1.0
                error = rows["reward"][row, k] + ppo.GAMMA * going * values[row, k + 1] - values[row, k]
                total += factor * float(error)
                factor *= ppo.GAMMA * ppo.LAMBDA * going
            expected.append(total)
    assert advantage.tolist() == pytest.approx(expected, abs=1e-5)
    acted = rows.mask & ~rows["last"]
    assert (target - advantage).tolist() == pytest.approx(values[acted].tolist(), abs=1e-5)


class Between:
    """`torch.distributed` of two threads, as far as the stages use it."""

    def __init__(self):
        self.to = {0: queue.Queue(), 1: queue.Queue()}
        self.mine = threading.local()

    def send(self, tensor, to):
        self.to[to].put(tensor.clone())

    def isend(self, tensor, to):
        self.send(tensor, to)
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensor, of):
        tensor.copy_(self.to[self.mine.rank].get(timeout=patience(10)))


def test_two_stages_make_the_gradients_of_one(monkeypatch):
    torch.manual_seed(0)
    data = {
        "obs": torch.randn(64, 3),
        "action": torch.randn(64, 2),
        "log_prob": torch.randn(64) - 2,
        "advantage": torch.randn(64),
        "target": torch.randn(64),
    }
    chosen = torch.randperm(64)[:50]
    whole = (ppo.Body(3), ppo.Heads(2))
    loss = ppo.step(*whole, data, (chosen,), True, True)
    between = Between()
    monkeypatch.setattr(ppo, "dist", between)
    stages = (ppo.Body(3), ppo.Heads(2))
    for mine, theirs in zip(stages, whole, strict=True):
        mine.load_state_dict(theirs.state_dict())
    losses = {}

    def run(rank):
        between.mine.rank = rank
        losses[rank] = ppo.step(*stages, data, chosen.chunk(4), rank == 0, rank == 1)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(20))
    assert losses[1] == pytest.approx(loss, rel=1e-5)
    for mine, theirs in zip(stages, whole, strict=True):
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert one.grad is not None and torch.allclose(one.grad, other.grad, atol=1e-6)


def run_job(name, description, tmp_path, **args):
    """The job of a TOML file beside the example, with other arguments of the learner."""
    job = launch.load(str(EXAMPLES / description))
    roles = [
        dataclasses.replace(role, args={**role.args, **args}) if role.kind == "learner" else role for role in job.roles
    ]
    job = dataclasses.replace(job, name=name, roles=roles, timeout_s=patience(500))
    summary = launch.run(job, folder=tmp_path / "logs", live=False)
    assert summary.outcome == "finished" and not any(summary.restarts.values())
    return summary, [json.loads(line) for line in (tmp_path / "logs" / "curve.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("preloaded_children")
@pytest.mark.parametrize("description", ["online_ppo_mujoco.toml", "online_ppo_mujoco_stages.toml"])
def test_it_runs_with_the_model_in_one_process_and_in_two(description, store_name, tmp_path):
    pytest.importorskip("mujoco", reason="MuJoCo is an extra: pip install 'geartrain[mujoco]'")
    summary, curve = run_job(store_name(), description, tmp_path, iterations=2, batch=200, epochs=1)
    learner = summary.processes["learner-0"]
    assert (learner["steps"], learner["version"]) == (2, 3) and learner["samples"] >= 400
    assert summary.processes["agent-0"]["steps"] > 0, "the agent has answered"
    assert curve[0]["version"] == 0 and np.isfinite(curve[0]["return"])
    if "stages" in description:
        assert summary.processes["heads-0"]["steps"] > 0 and summary.processes["learner-1"]["steps"] == 2


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("description", ["online_ppo_mujoco.toml", "online_ppo_mujoco_stages.toml"])
def test_it_learns(description, store_name, tmp_path):
    pytest.importorskip("mujoco", reason="MuJoCo is an extra: pip install 'geartrain[mujoco]'")
    _, curve = run_job(store_name(), description, tmp_path, iterations=25)
    random, returns = curve[0]["return"], [point["return"] for point in curve[1:]]
    assert random < 20 and max(returns) > 10 * random, curve
