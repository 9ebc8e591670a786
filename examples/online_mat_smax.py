"""A team that learns to fight: the Multi-Agent Transformer with PPO, on SMAX battles, rollouts through a store.

    pip install "geartrain[torch,cli,plot,smax]"
    python examples/online_mat_smax.py   # map 3m, 12 CPU minutes
    python examples/online_mat_smax.py --task smax/2s3z
    python examples/online_mat_smax.py --task vmas/balance   # the same team with continuous actions (extra vmas)
    python examples/online_mat_smax.py --checkpoint run.pt   # run again after it was cut, it goes on from there

An actor steps 256 battles and writes what happens straight into rows of at most 32 actions, each with the version of
the model that acted. The learner takes the oldest rows, every one once: `Fifo` chooses them and `max_times_sampled=1`
makes room. Advantages are computed over whole rows; where a row breaks off, the model values its last observation.

The transformer (`mat_model.py`) encodes what all agents observe and decodes their actions one after the other.

A checkpoint has model, optimizer, torch's random state, the curve and the time so far. Rows that were not learned from
and battles under way are not in it: a resumed run begins new battles.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import console
from torch import Tensor, nn

import curves
import geartrain as gt
from geartrain.actors import Actor, LocalPolicy, recorded_fields
from geartrain.actors.envs import make
from geartrain.errors import MissingDependencyError
from mat_model import Team, act, evaluate

ACTIONS = 32  # in a row at most; the step behind them has the observation that they led to
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


# ---------------------------------------------------------------------------------------------------- checkpoints


def setting(chosen: argparse.Namespace) -> dict[str, Any]:
    """What a run follows from; a checkpoint of another one is refused."""
    names = ("task", "seed", "steps", "seconds", "envs", "epochs", "minibatches", "rate")
    return {name: getattr(chosen, name) for name in names}


def save(file: Path, team: Team, optimizer: torch.optim.Optimizer, run: dict[str, Any]) -> None:
    """The run as one unit: absent, or complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.new")
    with beside.open("wb") as written:
        parts = {"team": team.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
        torch.save({**parts, "run": run}, written)
        written.flush()
        os.fsync(written.fileno())
    beside.replace(file)


def resume(
    chosen: argparse.Namespace, team: Team, optimizer: torch.optim.Optimizer, curve: curves.Curve
) -> dict[str, Any]:
    """Brings model and optimizer to where the checkpoint is, if there is one; the run so far."""
    run: dict[str, Any] = {"setting": setting(chosen), "points": [], "recent": [], "ages": [], "version": 0}
    run |= dict.fromkeys(("steps", "spent_s", "cpu_s", "learn_s", "policy_s", "environment_s", "store_s"), 0)
    if chosen.checkpoint is None or not chosen.checkpoint.exists():
        return run
    state = torch.load(chosen.checkpoint, weights_only=True)
    if state["run"]["setting"] != run["setting"]:
        raise SystemExit(f"{chosen.checkpoint} is of a run with {state['run']['setting']}; remove it, or choose those")
    team.load_state_dict(state["team"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    run = state["run"]
    curve.content["points"][:] = run["points"]
    curve.began_s -= run["spent_s"]
    return run


# ------------------------------------------------------------------------------------------------------- learning


@torch.no_grad()
def advantages(team: Team, batch: gt.Batch, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of whole rows: advantages and wanted values, (B, steps, agents), and which steps have an action, (B, steps)."""
    acted = batch.mask & ~batch["last"]
    seen = batch["obs.agents" if "obs.agents" in batch else "obs"]
    rows, end = torch.arange(len(seen)), batch.length.long() - 1
    value = batch["value"].clone()
    value[rows, end] = team.encode(seen[rows, end])[1]
    reward = scale * batch["reward"]
    reward = reward[..., None].expand_as(value) if reward.ndim == 2 else reward
    going = (~batch["terminated"]).float()[..., None]
    advantage = torch.zeros_like(value)
    ahead = torch.zeros_like(value[:, 0])
    for t in range(value.shape[1] - 2, -1, -1):
        error = reward[:, t] + GAMMA * going[:, t] * value[:, t + 1] - value[:, t]
        ahead = torch.where(acted[:, t, None], error + GAMMA * LAMBDA * going[:, t] * ahead, 0.0)
        advantage[:, t] = ahead
    return advantage, advantage + value, acted


def update(team: Team, optimizer: torch.optim.Optimizer, batch: gt.Batch, entropy: float, chosen: Any) -> None:
    """PPO: some epochs over the rows, in minibatches of single steps."""
    advantage, wanted, acted = advantages(team, batch, chosen.scale)
    discrete = "obs.available" in batch
    seen = batch["obs.agents" if discrete else "obs"][acted]
    available = batch["obs.available"][acted] if discrete else None
    actions, before = batch["action"][acted], batch["log_prob"][acted]
    advantage, wanted = advantage[acted], wanted[acted]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-5)
    for _ in range(chosen.epochs):
        for part in torch.randperm(len(seen)).chunk(chosen.minibatches):
            encoded, value = team.encode(seen[part])
            chances = team.decode(encoded, None if available is None else available[part], actions[part])
            ratio = (chances.log_prob(actions[part]) - before[part]).exp()
            gain = torch.min(ratio * advantage[part], ratio.clamp(1 - CLIP, 1 + CLIP) * advantage[part])
            off = nn.functional.huber_loss(value, wanted[part])
            loss = -gain.mean() + off - entropy * chances.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(team.parameters(), 0.5)
            optimizer.step()


def learn(
    chosen: argparse.Namespace, team: Team, battles: Any, store: gt.Store, curve: curves.Curve
) -> dict[str, float]:
    policy = LocalPolicy(act, team)
    optimizer = torch.optim.Adam(team.parameters(), lr=chosen.rate, eps=1e-5)
    run = resume(chosen, team, optimizer, curve)
    policy.version = run["version"]
    actor = Actor(battles, policy, store, seed=chosen.seed + 2_000 * run["version"])  # battles that it has not had
    stats, ages, began_s, began_cpu_s = actor.stats, run["ages"], time.perf_counter(), curves.used_cpu_s()
    before = {name: run[name] for name in ("steps", "spent_s", "cpu_s", "policy_s", "environment_s", "store_s")}

    def add_up() -> None:
        run["version"] = policy.version
        run["spent_s"] = before["spent_s"] + time.perf_counter() - began_s
        run["cpu_s"] = before["cpu_s"] + curves.used_cpu_s() - began_cpu_s
        for name in ("steps", "policy_s", "environment_s", "store_s"):
            run[name] = before[name] + getattr(stats, name)

    with (
        gt.Replay(store, gt.selection.Fifo(), chosen.envs, prefetch=0) as replay,
        curves.bars() as bars,
    ):
        bar = bars.add_task(chosen.task, total=chosen.steps)
        if run["version"]:
            bars.console.print(f"goes on after {run['steps']:,} steps of {chosen.checkpoint}")
        while run["steps"] < chosen.steps and run["spent_s"] < chosen.seconds:
            actor.run(until=lambda: len(store) >= chosen.envs)
            batch = replay.sample()
            ages.append(float(policy.version - batch.version.float().mean()))
            add_up()
            done = max(run["steps"] / chosen.steps, run["spent_s"] / chosen.seconds)  # whichever ends first
            optimizer.param_groups[0]["lr"] = chosen.rate * max(0.02, 1 - done)
            since_s = time.perf_counter()
            update(team, optimizer, batch, 0.01 - 0.009 * min(1.0, done), chosen)
            run["learn_s"] += time.perf_counter() - since_s
            policy.version += 1
            run["recent"] = [*run["recent"], score(chosen, batch, actor)][-5:]
            mean, returns = float(np.mean(run["recent"])), float(np.mean(stats.returns or [np.nan]))
            words = f"{curve.content['y']} {mean:.3f}"
            if chosen.measure == "win rate":
                words += f", return {returns:.2f}"
            add_up()
            bars.update(bar, completed=run["steps"], description=f"{chosen.task}: {words}")
            if policy.version % chosen.every == 0:
                curve.point(run["steps"], mean, mean_return=returns)
                share = 100 * run["learn_s"] / run["spent_s"]
                words += f"; {share:.0f} % of the time to learn"
                bars.console.print(f"{run['spent_s']:4.0f} s, {run['steps']:>9,} steps: {words}")
                if chosen.checkpoint:
                    save(chosen.checkpoint, team, optimizer, run | {"points": curve.content["points"]})
    result = {
        "return": float(np.mean(stats.returns or [np.nan])),
        "environment_steps": run["steps"],
        "versions": policy.version,
        "row_age_versions": float(np.mean(ages)),
        **{name: run[name] for name in ("policy_s", "environment_s", "store_s", "learn_s")},
        "train_s": run["spent_s"],
    }
    best = evaluate(team, battles, 1_000_000 + chosen.seed)
    curve.point(run["steps"], best[chosen.measure], mean_return=best["return"])
    actor.close()
    figures = {
        "greedy": best[chosen.measure],
        "greedy_return": best["return"],
        "training": float(np.mean(run["recent"])),
    }
    return {**figures, **result, "before_cpu_s": before["cpu_s"]}


def score(chosen: argparse.Namespace, batch: gt.Batch, actor: Actor) -> float:
    """Of the battles that ended in these rows, the share that was won; or the mean return of late episodes."""
    if chosen.measure == "win rate":
        ended = batch["terminated"]
        return float((batch["reward"][ended] >= 1.0).float().mean()) if ended.any() else 0.0  # 1 for the victory
    return float(np.mean(actor.stats.returns)) if actor.stats.returns else float("nan")


def main(arguments: list[str] | None = None) -> int:
    text = curves.options(__doc__)
    add = text.add_argument
    add("--task", default="smax/3m", help="smax/MAP or vmas/SCENARIO (smax/3m)")
    add("--steps", type=int, help="steps of all environments together (1,150,000)")
    add("--seconds", type=float, default=float("inf"), help="stop training after so long")
    add("--envs", type=int, help="environments stepped together, and rows of a batch (256)")
    add("--epochs", type=int, default=5, help="over each batch (5)")
    add("--measure", choices=("win rate", "return"), help="of the curve (SMAX: win rate)")
    add("--minibatches", type=int, default=4, help="of each epoch (4)")
    add("--rate", type=float, default=1e-3, help="learning rate at the beginning; it falls to 2 %% of that (1e-3)")
    add("--every", type=int, default=10, help="versions from one point of the curve, and checkpoint, to the next (10)")
    add("--checkpoint", type=Path, help="the run's file, resumed when it is there")
    chosen = text.parse_args(arguments)
    if chosen.tiny:
        chosen.steps, chosen.envs, chosen.every = chosen.steps or 600, chosen.envs or 4, 1
    chosen.steps, chosen.envs = chosen.steps or 1_150_000, chosen.envs or 256
    chosen.measure = chosen.measure or ("win rate" if chosen.task.startswith("smax") else "return")
    chosen.scale = 1.0 if chosen.task.startswith("smax") else 0.1  # of rewards, for values of about 1
    curves.prepare()
    torch.manual_seed(chosen.seed)
    screen = console.Console()
    try:
        battles = make(chosen.task, chosen.envs)
    except MissingDependencyError as error:
        raise SystemExit(str(error)) from None
    discrete = chosen.task.startswith("smax")
    steps = ACTIONS + 1
    fields = recorded_fields(
        battles.fields(),
        log_prob=gt.Field((battles.agents,), "float32"),
        value=gt.Field((battles.agents,), "float32"),
    )
    seen = fields["obs.agents" if discrete else "obs"].shape[-1]
    team = Team(battles.agents, seen, battles.actions, discrete)
    curve = curves.Curve(f"Multi-Agent Transformer on {chosen.task}", "environment steps", chosen.measure, chosen)
    with gt.Store.create(
        f"mat-{os.getpid()}", fields, max_length=steps, capacity=8 * chosen.envs, max_times_sampled=1
    ) as store:
        result = learn(chosen, team, battles, store, curve)
    finished = curve.finish(others_cpu_s=result.pop("before_cpu_s"), **result)["result"]
    screen.print(" ".join(f"{name}={value:,.2f}" for name, value in finished.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
