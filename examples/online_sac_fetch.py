"""A robot arm learns to reach: soft actor-critic with hindsight, whose goals are fetched out of the store.

    pip install "geartrain[torch,cli,plot,fetch]"
    python examples/online_sac_fetch.py   # FetchReach, a minute or two on two cores

The arm is told only whether it is at the goal (0) or not (-1), and at first it never is. In hindsight every place that
it got to was a goal (Andrychowicz et al., 2017). Nothing of that is written into the store: a row is an episode as it
was. The learner draws transitions, windows of two steps; for most of them it draws a later step of the same episode,
fetches what was achieved there by the row's key, and takes that for the goal. Rewards follow from the two.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
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

EPISODE = 50  # actions; a row has one step more, with the last observation
GAMMA, NEAR_M = 0.95, 0.05
SEEN, GOAL, ACHIEVED = "obs.observation", "obs.desired_goal", "obs.achieved_goal"


def network(inputs: int, outputs: int, width: int = 128) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


class Agent(nn.Module):
    """A policy and two critics over what the arm senses and the goal, (B, seen + goal), as deviations from a mean."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.policy = network(inputs, 2 * actions)
        self.critics = nn.ModuleList(network(inputs + actions, 1) for _ in range(2))
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("deviation", torch.ones(inputs))

    def state(self, seen: Tensor, goal: Tensor) -> Tensor:
        return (torch.cat([seen, goal], -1).float() - self.mean) / self.deviation

    def act(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """An action within -1 and 1 drawn by the policy, (B, actions), its log probability (B,), and the likeliest."""
        mean, log_std = self.policy(state).chunk(2, -1)
        chances = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = chances.rsample()
        squeezed = 2 * (np.log(2) - raw - nn.functional.softplus(-2 * raw))  # log(1 - tanh(raw)**2)
        return raw.tanh(), (chances.log_prob(raw) - squeezed).sum(-1), mean.tanh()

    def values(self, state: Tensor, action: Tensor) -> Tensor:
        """(2, B): what each critic expects."""
        together = torch.cat([state, action], -1)
        return torch.stack([critic(together)[:, 0] for critic in self.critics])


@torch.inference_mode()
def act(agent: Agent, obs: dict[str, np.ndarray], *, likeliest: bool = False) -> Tensor:
    seen, goal = (torch.from_numpy(obs[name]) for name in ("observation", "desired_goal"))
    drawn, _, best = agent.act(agent.state(seen, goal))
    return best if likeliest else drawn


class Hindsight:
    """Transitions with goals in hindsight, as they are drawn.

    Args:
        store: rows of whole episodes.
        size: transitions of a batch.
        share: of them whose goal is one that was achieved later in the same episode.
    """

    def __init__(self, store: gt.Store, size: int, share: float, seed: int) -> None:
        fields = [SEEN, ACHIEVED, GOAL, "action"]
        self.replay = gt.Replay(store, gt.selection.Uniform(seed=seed), size, fields=fields, window=2, prefetch=0)
        self._store, self._share, self._rng = store, share, np.random.default_rng(seed)

    def sample(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What was seen before and after (B, seen), the goal (B, 3), the action (B, 4) and the reward (B,)."""
        batch = self.replay.sample()
        end = (batch.start + batch.mask.sum(1) - 1).numpy()  # the step that the action led to
        later = self._rng.integers(end, batch.length.numpy())  # that step or one behind it
        goals = gt.fetch(self._store, batch.keys, fields=[ACHIEVED], window=1, ends=later)[ACHIEVED][:, 0]
        relabelled = torch.from_numpy(self._rng.random(len(end)) < self._share)
        goal = torch.where(relabelled[:, None], goals, batch[GOAL][:, 0])
        reward = -((batch[ACHIEVED][:, 1] - goal).norm(dim=-1) > NEAR_M).float()
        real = batch.mask[:, 0]  # a window that ends with the first step of an episode has no action
        found = (batch[SEEN][:, 0], batch[SEEN][:, 1], goal, batch["action"][:, 0], reward)
        before, after, goal, action, reward = (each[real] for each in found)
        return before, after, goal, action, reward


class Learner:
    """Soft actor-critic: two critics, targets that follow them, a temperature that keeps the policy's entropy."""

    def __init__(self, agent: Agent, actions: int, rate: float) -> None:
        self.agent = agent
        self.target = [nn.Sequential(*critic) for critic in _copy(agent.critics)]
        self.log_temperature = torch.tensor(np.log(0.1), requires_grad=True, dtype=torch.float32)
        self.entropy = -float(actions)
        self.optimizers = [
            torch.optim.Adam(of, lr=rate)
            for of in (agent.critics.parameters(), agent.policy.parameters(), [self.log_temperature])
        ]

    def learn(self, before: Tensor, after: Tensor, goal: Tensor, action: Tensor, reward: Tensor) -> None:
        agent = self.agent
        state, following = agent.state(before, goal), agent.state(after, goal)
        temperature = self.log_temperature.exp().detach()
        with torch.no_grad():
            chosen, log_prob, _ = agent.act(following)
            together = torch.cat([following, chosen], -1)
            worth = torch.min(*(critic(together)[:, 0] for critic in self.target)) - temperature * log_prob
            wanted = reward + GAMMA * worth  # reaching does not end an episode
        self._step(0, (agent.values(state, action) - wanted).square().mean())
        chosen, log_prob, _ = agent.act(state)
        self._step(1, (temperature * log_prob - agent.values(state, chosen).min(0).values).mean())
        self._step(2, -(self.log_temperature * (log_prob.detach() + self.entropy).mean()))
        with torch.no_grad():
            for slow, fast in zip(self.target, agent.critics, strict=True):
                for mine, its in zip(slow.parameters(), fast.parameters(), strict=True):
                    mine.lerp_(its, 0.02)

    def _step(self, which: int, loss: Tensor) -> None:
        self.optimizers[which].zero_grad()
        loss.backward()
        self.optimizers[which].step()


def _copy(modules: nn.ModuleList) -> list[nn.Module]:
    import copy

    return [copy.deepcopy(module).requires_grad_(False) for module in modules]


class Anything:
    """Random actions, before there is anything to learn from."""

    version = 0

    def __init__(self, actions: int, seed: int) -> None:
        self._actions, self._rng = actions, np.random.default_rng(seed)

    def act(self, obs: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        n = len(obs["observation"])
        return self._rng.uniform(-1, 1, (n, self._actions)).astype("float32"), {}


def learn(
    chosen: argparse.Namespace, agent: Agent, arms: Any, store: gt.Store, curve: curves.Curve
) -> dict[str, float]:
    actions = store.fields["action"].shape[-1]
    actor = Actor(arms, Anything(actions, chosen.seed), store, seed=chosen.seed)
    learner, hindsight = (
        Learner(agent, actions, chosen.rate),
        Hindsight(store, chosen.batch, chosen.hindsight, chosen.seed),
    )
    judges = make(chosen.task, chosen.arms)
    curve.line("random actions", evaluate(judges, actor.policy.act, chosen.eval_episodes, chosen.seed))
    actor.run(steps=chosen.first_steps)
    first = gt.fetch(store, store.keys(), fields=[SEEN, ACHIEVED])
    known = torch.cat([first[SEEN], first[ACHIEVED]], -1).flatten(0, 1).float()
    agent.mean.copy_(known.mean(0))
    agent.deviation.copy_(known.std(0).clamp(min=0.01))
    policy = actor.policy = LocalPolicy(act, agent)
    best = lambda obs: (act(agent, obs, likeliest=True).numpy(), {})  # noqa: E731
    learned_s, fetched_s, judged_s, began_s = 0.0, 0.0, 0.0, time.perf_counter()
    with curves.bars() as bars:
        bar = bars.add_task(chosen.task, total=chosen.steps)
        while actor.stats.steps < chosen.steps and time.perf_counter() - began_s < chosen.seconds:
            actor.run(steps=chosen.arms * EPISODE)
            for _ in range(int(chosen.arms * EPISODE * chosen.updates)):
                asked_s = time.perf_counter()
                batch = hindsight.sample()
                drawn_s = time.perf_counter()
                learner.learn(*batch)
                fetched_s += drawn_s - asked_s
                learned_s += time.perf_counter() - drawn_s
            policy.version += 1
            steps = actor.stats.steps
            bars.update(bar, completed=steps)
            if policy.version % chosen.every == 0:
                since_s = time.perf_counter()
                success = evaluate(judges, best, chosen.eval_episodes, chosen.seed)
                judged_s += time.perf_counter() - since_s
                curve.point(steps, success)
                spent_s = time.perf_counter() - began_s - judged_s
                bars.console.print(f"{spent_s:4.0f} s, {steps:,} steps: success {success:.2f}")
    trained_s = time.perf_counter() - began_s - judged_s
    success = evaluate(judges, best, 2 * chosen.eval_episodes, chosen.seed + 1)
    curve.point(actor.stats.steps, success)
    hindsight.replay.close()
    actor.close()
    return {
        "success": success,
        "environment_steps": actor.stats.steps,
        "environment_s": actor.stats.environment_s,
        "policy_s": actor.stats.policy_s,
        "store_s": actor.stats.store_s,
        "fetch_s": fetched_s,
        "learn_s": learned_s,
        "train_s": trained_s,
    }


def evaluate(arms: Any, act: Any, episodes: int, seed: int) -> float:
    """The share of episodes, with seeds that no actor has, at whose end the arm is at its goal."""
    reached = 0
    rounds = -(-episodes // arms.n)
    for number in range(rounds):
        obs = arms.reset(seed=1_000_000 * (1 + seed) + arms.n * number)
        for _ in range(EPISODE):
            stepped = arms.step(act(obs)[0])
            obs = stepped.next
        reached += int((stepped.reward == 0).sum())
    return reached / (rounds * arms.n)


def main(arguments: list[str] | None = None) -> int:
    text = curves.options(__doc__)
    add = text.add_argument
    add("--task", default="fetch/FetchReach-v4", help="fetch/TASK (fetch/FetchReach-v4)")
    add("--steps", type=int, help="steps of all arms together (4,000)")
    add("--seconds", type=float, default=float("inf"), help="stop training after so long")
    add("--arms", type=int, default=4, help="stepped side by side (4)")
    add("--batch", type=int, default=256, help="transitions (256)")
    add("--hindsight", type=float, default=0.8, help="share of them with a goal in hindsight; 0 turns it off (0.8)")
    add("--updates", type=float, default=0.5, help="batches for each step of an arm (0.5)")
    add("--rate", type=float, default=1e-3, help="learning rate (1e-3)")
    add("--first-steps", type=int, default=1000, help="with random actions (1000)")
    add("--every", type=int, default=2, help="rounds of episodes from one evaluation to the next (2)")
    add("--eval-episodes", type=int, default=40, help="on the way; twice as many at the end (40)")
    chosen = text.parse_args(arguments)
    if chosen.tiny:
        chosen.steps, chosen.arms, chosen.first_steps = chosen.steps or 200, 2, 100
        chosen.batch, chosen.eval_episodes, chosen.every = 32, 2, 1
    chosen.steps = chosen.steps or 4_000
    curves.prepare()
    torch.manual_seed(chosen.seed)
    screen = console.Console()
    try:
        arms = make(chosen.task, chosen.arms)
    except MissingDependencyError as error:
        raise SystemExit(str(error)) from None
    fields = recorded_fields(arms.fields())
    agent = Agent(fields[SEEN].shape[-1] + fields[GOAL].shape[-1], fields["action"].shape[-1])
    curve = curves.Curve(f"SAC with hindsight on {chosen.task}", "environment steps", "success", chosen)
    capacity = chosen.steps // EPISODE + 4 * chosen.arms  # every episode stays
    with gt.Store.create(f"fetch-{os.getpid()}", fields, max_length=EPISODE + 1, capacity=capacity) as store:
        result = learn(chosen, agent, arms, store, curve)
    finished = curve.finish(**result)["result"]
    screen.print(" ".join(f"{name}={value:,.2f}" for name, value in finished.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
