"""PPO on MuJoCo whose actors have no model: an agent infers for all of them, observations and actions go by RPC.

    pip install "geartrain[torch,cli,mujoco]"
    geartrain launch examples/online_ppo_mujoco.toml          # one process learns, one infers: two or three minutes
    geartrain launch examples/online_ppo_mujoco_stages.toml   # learner and agent in two pipeline stages each

    actors --observations--> agent --actions, log-probabilities--> actors --steps--> store --rows, by key--> learner
                               ^------------------------------ weights ---------------------------------------'

The learner takes the newest rows, trains on them and removes them; meanwhile actors go on with the weights before.
That is what the ratio of PPO corrects: the agent's log-probability is recorded with every action. An evaluator plays
with the likeliest actions, and writes the learning curve to `curve.jsonl` in the job's folder; its first line has what
random actions get.

In two stages rank 0 has the body of the model and rank 1 its heads: both fetch what they need of the same rows, by keys
that rank 0 chose, and exchange activations and gradients in microbatches. The agent's body calls the process "heads-0"
in the same way. On several hosts give the roles `hosts`: actors on hosts without learners write into the learners'
store as they do here (docs/launch.md). PPO_TASK names another task of Gymnasium's.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import geartrain as gt
from geartrain import rpc
from geartrain.actors import environments_of, recorded_fields

TASK = os.environ.get("PPO_TASK", "InvertedPendulum-v5")
ROW = 129  # steps of a row: 128 actions, and where they led to; longer episodes continue in the next row
GAMMA, LAMBDA, CLIP, WIDTH = 0.99, 0.95, 0.2, 64


# --- the model, in two stages ---------------------------------------------------------------------------------------


class Body(nn.Module):
    """First stage: observations (B, n), normalised by their mean and deviation so far, to features (B, 2 WIDTH)."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(inputs, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.value = nn.Sequential(nn.Linear(inputs, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.register_buffer("seen", torch.tensor(1e-4))
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("variance", torch.ones(inputs))

    def forward(self, obs: Tensor) -> Tensor:
        scaled = ((obs.float() - self.mean) / (self.variance + 1e-8).sqrt()).clamp(-10, 10)
        return torch.cat([self.policy(scaled), self.value(scaled)], -1)

    def see(self, obs: Tensor) -> None:
        """Takes observations (B, n) into mean and deviation."""
        more, mean = len(obs), obs.float().mean(0)
        both, gap = self.seen + more, mean - self.mean
        variance = self.variance * self.seen + obs.float().var(0, correction=0) * more
        self.variance.copy_((variance + gap**2 * self.seen * more / both) / both)
        self.mean += gap * more / both
        self.seen.copy_(both)


class Heads(nn.Module):
    """Second stage: features to the actions' distribution and the value (B,)."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.policy, self.value = nn.Linear(WIDTH, actions), nn.Linear(WIDTH, 1)
        self.log_std = nn.Parameter(torch.zeros(actions))
        nn.init.orthogonal_(self.policy.weight, 0.01)

    def forward(self, features: Tensor) -> tuple[torch.distributions.Normal, Tensor]:
        of_policy, of_value = features.split(WIDTH, -1)
        chances = torch.distributions.Normal(self.policy(of_policy), self.log_std.exp())
        return chances, self.value(of_value)[..., 0]

    def act(self, features: Tensor) -> dict[str, Tensor]:
        """Drawn actions (B, n) and their log-probability (B,)."""
        chances, _ = self(features)
        action = chances.sample()
        return {"action": action, "log_prob": chances.log_prob(action).sum(-1)}


def make_stages() -> tuple[Body, Heads]:
    with gym.make(TASK) as made:
        return Body(made.observation_space.shape[0]), Heads(made.action_space.shape[0])


def state_of(body: Body, heads: Heads) -> dict[str, Tensor]:
    return {
        f"{part}.{name}": value
        for part, stage in (("body", body), ("heads", heads))
        for name, value in stage.state_dict().items()
    }


class Follower:
    """Stages of this process that follow the learner's weights."""

    def __init__(self, context: Any, **stages: nn.Module) -> None:
        self.reader, self.stages, self.version = context.reader(), stages, 0

    def follow(self) -> int:
        """Loads the newest weights, if they are others; returns their version."""
        newest = self.reader.version
        if newest is not None and newest != self.version:
            found = self.reader.latest()
            for part, stage in self.stages.items():
                own = {name.removeprefix(f"{part}."): value for name, value in found.items() if name.startswith(part)}
                stage.load_state_dict(own)
            self.version = found.version
        return self.version


# --- agents and actors ----------------------------------------------------------------------------------------------


def serve(context: Any, heads_in: str = "") -> None:
    """The agent: actions for the observations of many actors, in one batch. `heads_in` has the second stage, if any."""
    torch.set_num_threads(1)
    body, heads = make_stages()
    follower = Follower(context, body=body) if heads_in else Follower(context, body=body, heads=heads)
    node = context.node

    @rpc.batched(max_size=64, max_wait_us=500, stack=True)
    def act(obs: Any) -> dict[str, Any]:
        version = follower.follow()
        with torch.inference_mode():
            features = body(torch.as_tensor(obs))
            acted = node().call(heads_in, "act_on", features) if heads_in else heads.act(features)
        return {**acted, "version": torch.full((len(features),), version)}

    wait_for_weights(context, follower)
    node()  # from now on actors find it
    while not context.stopping:
        context.report(steps=rpc.batch_stats(act).calls, version=follower.version)
        time.sleep(0.1)


def serve_heads(context: Any) -> None:
    """The agent's second stage, in a process of its own."""
    torch.set_num_threads(1)
    _, heads = make_stages()
    follower, batches = Follower(context, heads=heads), 0

    @rpc.function
    def act_on(features: Tensor) -> dict[str, Tensor]:
        nonlocal batches
        batches += 1
        follower.follow()
        with torch.inference_mode():
            return heads.act(torch.as_tensor(features))

    wait_for_weights(context, follower)
    context.node()
    while not context.stopping:
        context.report(steps=batches, version=follower.version)
        time.sleep(0.1)


def wait_for_weights(context: Any, follower: Follower) -> None:
    while not follower.follow() and not context.stopping:
        context.report()
        time.sleep(0.05)


def environments(context: Any) -> list[gym.Env]:
    return [gym.make(TASK) for _ in range(4)]


def policy(context: Any) -> Any:
    return context.job.policy("act", timeout_s=120.0)


def evaluate(context: Any, episodes: int = 3) -> None:
    """Plays each version that it finds with the likeliest actions: a line of the curve has the mean return.

    The first line, of version 0, is of random actions.
    """
    torch.set_num_threads(1)
    body, heads = make_stages()
    follower, played, began_s = Follower(context, body=body, heads=heads), 0, time.monotonic()
    environment = gym.make(TASK)
    with (context.folder / "curve.jsonl").open("a", buffering=1) as curve:

        def point(version: int, returns: list[float]) -> None:
            wall_s = round(time.monotonic() - began_s, 1)
            curve.write(json.dumps({"version": version, "return": float(np.mean(returns)), "wall_s": wall_s}) + "\n")
            context.report(version=version, returned=float(np.mean(returns)))

        point(0, [play(environment, None, seed) for seed in range(20)])
        while not context.stopping:
            if follower.follow() == played:
                context.report()
                time.sleep(0.05)
                continue
            played = follower.version
            point(played, [play(environment, (body, heads), seed) for seed in range(episodes)])


@torch.inference_mode()
def play(environment: gym.Env, stages: tuple[Body, Heads] | None, seed: int) -> float:
    """Return of an episode with the likeliest actions, or with random ones."""
    obs, _ = environment.reset(seed=10_000 + seed)
    environment.action_space.seed(seed)
    total, over = 0.0, False
    while not over:
        action = environment.action_space.sample()
        if stages is not None:
            body, heads = stages
            action = heads(body(torch.as_tensor(obs)[None]))[0].mean[0].numpy()
        obs, reward, terminated, truncated, _ = environment.step(action)
        total, over = total + float(reward), terminated or truncated
    return total


# --- learners -------------------------------------------------------------------------------------------------------


def take(store: gt.Store, least: int, context: Any) -> gt.Keys | None:
    """Keys of the newest rows, of so many actions together once there are enough; older ones are removed.

    None when the job ends.
    """
    while not context.stopping:
        keys = store.keys()  # oldest first
        actions = np.cumsum(np.maximum(store.status(keys)["length"][::-1].astype(int) - 1, 0))
        if len(keys) and actions[-1] >= least:
            newest = int(np.searchsorted(actions, least)) + 1
            store.delete(keys[: len(keys) - newest])
            return keys[len(keys) - newest :]
        context.report()
        time.sleep(0.01)
    return None


def advantages(rows: Any, values: Tensor) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and value targets of rows (R, T), where there are actions.

    A row that ends without `terminated` was cut, by its length or by a time limit: the value of its last observation
    stands for the rest.
    """
    acted = rows.mask & ~rows["last"]
    going = (~rows["terminated"]).float()
    found, after = torch.zeros_like(values), torch.zeros(len(values))
    for t in reversed(range(values.shape[1] - 1)):
        error = rows["reward"][:, t] + GAMMA * going[:, t] * values[:, t + 1] - values[:, t]
        after = torch.where(acted[:, t], error + GAMMA * LAMBDA * going[:, t] * after, torch.zeros(()))
        found[:, t] = after
    return found[acted], (found + values)[acted]


def loss_of(heads: Heads, features: Tensor, data: dict[str, Tensor]) -> Tensor:
    """PPO's clipped objective and the value's error, means of the rows given."""
    chances, value = heads(features)
    ratio = (chances.log_prob(data["action"]).sum(-1) - data["log_prob"]).exp()
    gain = torch.min(ratio * data["advantage"], ratio.clamp(1 - CLIP, 1 + CLIP) * data["advantage"])
    return -gain.mean() + 0.5 * (value - data["target"]).square().mean()


def learn(
    context: Any,
    iterations: int = 40,
    batch: int = 2048,
    epochs: int = 8,
    minibatch: int = 256,
    microbatches: int = 4,
    rate: float = 1e-3,
    seed: int = 0,
) -> None:
    """One process, or two stages in two: the same steps on the same rows."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    body, heads = make_stages()
    if context.world_size not in (1, 2):
        raise ValueError(f"the model has two stages, for one or two learners, and there are {context.world_size}")
    staged = context.world_size == 2
    first, second = context.rank == 0, context.rank == context.world_size - 1
    if staged:
        dist.init_process_group("gloo")
    fields = environments_of(environments(None)[:1]).fields()
    recorded = recorded_fields(fields, log_prob=gt.Field((), "float32"))
    store = context.store(recorded, max_length=ROW, capacity=8_000)  # never full: nothing is evicted that is read
    publisher = context.publisher() if first else None
    own = [*(body.parameters() if first else ()), *(heads.parameters() if second else ())]
    optimizer = torch.optim.Adam(own, lr=rate, eps=1e-5)
    generator = torch.Generator().manual_seed(seed + 1)  # the same on both stages

    def publish(version: int) -> None:
        state = [heads.state_dict()]
        if staged:
            dist.broadcast_object_list(state, src=1)
            heads.load_state_dict(state[0])
        if publisher is not None:
            publisher.publish(version, state_of(body, heads))

    publish(1)
    trained = 0
    for iteration in range(1, iterations + 1):
        keys = [take(store, batch, context)] if first else [None]
        if staged:
            dist.broadcast_object_list(keys, src=0)
        if keys[0] is None:
            break
        data = prepare(store, keys[0], body, heads, first, second)
        if staged:
            dist.barrier()  # both stages have their part of the rows
        if first:
            store.delete(keys[0])
        count, losses = len(next(iter(data.values()))), []
        for _ in range(epochs):
            for chosen in torch.randperm(count, generator=generator).split(minibatch):
                optimizer.zero_grad()
                parts = chosen.chunk(microbatches if staged else 1)
                losses.append(step(body, heads, data, parts, first, second))
                nn.utils.clip_grad_norm_(own, 0.5)
                optimizer.step()
        trained += count
        publish(iteration + 1)
        context.report(steps=iteration, samples=trained, version=iteration + 1, loss=float(np.mean(losses)))
    if staged:
        dist.destroy_process_group()


def prepare(store: gt.Store, keys: gt.Keys, body: Body, heads: Heads, first: bool, second: bool) -> dict[str, Tensor]:
    """What this stage trains on: of every action its observation, or what became of it."""
    data: dict[str, Tensor] = {}
    with torch.no_grad():
        if first:
            rows = gt.fetch(store, keys, fields=["obs", "last"])
            acted = rows.mask & ~rows["last"]
            body.see(rows["obs"][rows.mask])
            data["obs"] = rows["obs"][acted].clone()
            features = body(rows["obs"])
            if not second:
                dist.send(features, 1)
        if second:
            rows = gt.fetch(store, keys, fields=["action", "reward", "terminated", "last", "log_prob"])
            acted = rows.mask & ~rows["last"]
            if not first:
                features = torch.empty(*rows.mask.shape, 2 * WIDTH)
                dist.recv(features, 0)
            advantage, target = advantages(rows, heads(features)[1])
            data["advantage"] = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            data |= {"target": target, "action": rows["action"][acted].clone()}
            data["log_prob"] = rows["log_prob"][acted].clone()
    return data


def step(
    body: Body, heads: Heads, data: dict[str, Tensor], parts: tuple[Tensor, ...], first: bool, second: bool
) -> float:
    """Gradients of one minibatch, in parts: the first stage works on the next one while the second has the last."""
    total, size = 0.0, sum(map(len, parts))
    sent: list[tuple[Tensor, Any]] = []
    for chosen in parts:
        if first:
            features = body(data["obs"][chosen])
            if not second:
                sent.append((features, dist.isend(features.detach(), 1)))
                continue
        else:
            features = torch.empty(len(chosen), 2 * WIDTH)
            dist.recv(features, 0)
            features.requires_grad_()
        own = {name: value[chosen] for name, value in data.items()}
        loss = loss_of(heads, features, own) * (len(chosen) / size)
        loss.backward()
        total += loss.item()
        if not first:
            dist.send(features.grad, 0)
    for features, sending in sent:
        gradient = torch.empty_like(features)
        dist.recv(gradient, 1)
        sending.wait()
        features.backward(gradient)
    return total
