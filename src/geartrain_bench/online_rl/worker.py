"""Processes of `geartrain bench online`: roles of a job of `geartrain.launch`."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.actors import LocalPolicy, environments_of, recorded_fields
from geartrain.core.counters import SharedCounters
from geartrain.launch import ActorContext, Context
from geartrain.replay.replay import Replay
from geartrain.selection import Uniform

#: What CartPole observes, the width of the policy, and its actions.
OBSERVED, WIDTH, ACTIONS = 4, 64, 2
#: Steps of a row: longer episodes continue in the next one.
ROW_STEPS = 64
ENVIRONMENT = "BENCH_ENVIRONMENT"
ENVIRONMENTS = "BENCH_ENVIRONMENTS"


def make_network() -> Any:
    """The policy, equal in all systems."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(OBSERVED, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, ACTIONS)
    ).requires_grad_(False)


def greedy(network: Any, observation: Any) -> NDArray[np.int64]:
    """The best actions, (n,)."""
    import torch

    with torch.inference_mode():
        actions: NDArray[np.int64] = network(torch.from_numpy(observation)).argmax(-1).numpy()
    return actions


def environments(_context: ActorContext) -> Any:
    """So many environments as the role's environment variables say."""
    import gymnasium

    return [gymnasium.make(os.environ[ENVIRONMENT]) for _ in range(int(os.environ.get(ENVIRONMENTS, "1")))]


def local_policy(context: ActorContext) -> LocalPolicy:
    """The network, which follows the learner's versions."""
    return LocalPolicy(greedy, make_network(), context.job.reader())


def bare(context: Context) -> None:
    """The floor of an actor: acts and steps in the same way, and stores nothing."""
    made = environments_of(environments(ActorContext(context.number, context.processes, context.number, 0)))
    network = make_network()
    observation = made.reset(context.number)
    steps = 0
    while not context.stopping:
        assert isinstance(observation, np.ndarray)
        observation = made.step(greedy(network, observation)).next
        steps += made.n
        context.report(steps=steps)


def learn(context: Context, asked: dict[str, Any]) -> None:
    """The learner: waits for rows, samples and trains or only observes, and writes its measurements to result.json."""
    network = make_network()
    counters = SharedCounters.open(f"launch-{context.job}")
    replay = None
    if asked["loop"] != "bare":
        shapes = environments_of(environments(ActorContext(0, 1, 0, 0))).fields()
        store = context.store(recorded_fields(shapes), max_length=ROW_STEPS, capacity=asked["capacity"] // 16)
        publisher = context.publisher()
        publisher.publish(1, network.state_dict())
    until_s = time.monotonic() + 60
    while counters.column("steps").sum() < asked["least"]:
        if time.monotonic() > until_s or context.stopping:
            raise RuntimeError("no steps came")
        time.sleep(0.01)
    if asked["loop"] == "train":
        replay = Replay(store, Uniform(seed=0), asked["batch"], window=2)
        replay.sample()
    time.sleep(asked["warm_s"])

    slices: list[dict[str, float]] = []
    updates, wait_s = 0, 0.0
    total_updates, version = 0, 1
    began_s = since_s = time.perf_counter()
    before = _counts(counters)
    while (now_s := time.perf_counter()) < began_s + asked["seconds"]:
        if now_s - since_s >= 1.0:
            after = _counts(counters)
            elapsed_s = now_s - since_s
            rates = {name: (after[name] - before[name]) / elapsed_s for name in after}
            slices.append({**rates, "updates": updates / elapsed_s, "wait": wait_s / elapsed_s})
            before, since_s, updates, wait_s = after, now_s, 0, 0.0
        if replay is None:
            time.sleep(0.02)
            continue
        asked_s = time.perf_counter()
        replay.sample()
        wait_s += time.perf_counter() - asked_s
        time.sleep(asked["train_ms"] / 1e3)
        updates += 1
        total_updates += 1
        if total_updates % asked["publish_every"] == 0:
            version += 1
            publisher.publish(version, network.state_dict())
    assert context.folder is not None
    (context.folder / "result.json").write_text(json.dumps({"slices": slices}))


def _counts(counters: SharedCounters) -> dict[str, float]:
    return {name: float(counters.column(name).sum()) for name in ("steps", "rows")}


# --- agent and observers-----------------------------------------------------------------------------------------------


def serve(context: Context, asked: dict[str, Any]) -> None:
    """The agent: one forward pass for all requests within `max_wait_us`."""
    import geartrain.rpc as rpc

    network = make_network()

    @rpc.batched(max_size=asked["observers"], max_wait_us=asked["max_wait_us"], stack=True)
    def act(observations: NDArray[Any]) -> NDArray[Any]:
        return greedy(network, observations)

    context.node()
    while not context.stopping:
        time.sleep(0.05)


def observe(context: Context, asked: dict[str, Any]) -> None:
    """One observer: steps one environment, and records the latency of each action."""
    import gymnasium

    environment = gymnasium.make(os.environ[ENVIRONMENT])
    policy = context.policy("act")
    observation, _ = environment.reset(seed=context.number)
    policy.act(observation[None])
    counters = SharedCounters.open(f"launch-{context.job}")
    context.report(samples=1)
    while counters.column("samples").sum() < asked["observers"] and not context.stopping:
        time.sleep(0.01)
    began_s = time.perf_counter()
    took_s = []
    while (asked_s := time.perf_counter()) < began_s + asked["warm_s"] + asked["seconds"]:
        action = int(np.asarray(policy.act(observation[None])[0])[0])
        if asked_s > began_s + asked["warm_s"]:
            took_s.append(time.perf_counter() - asked_s)
        observation, _, terminated, truncated, _ = environment.step(action)
        if terminated or truncated:
            observation, _ = environment.reset()
    assert context.folder is not None
    (context.folder / f"took-{context.number}.json").write_text(json.dumps(took_s))


def policy_alone_s(calls: int = 2000) -> list[float]:
    """The floor of an action: the policy's own time for one observation, without an RPC."""
    network = make_network()
    observation = np.zeros((1, OBSERVED), np.float32)
    took_s = []
    for _ in range(calls):
        began_s = time.perf_counter()
        greedy(network, observation)
        took_s.append(time.perf_counter() - began_s)
    return took_s[calls // 10 :]


__all__ = ["bare", "environments", "learn", "local_policy", "observe", "policy_alone_s", "serve"]
