"""A game of Atari learned from its pixels: double DQN with prioritized replay of steps and n-step targets.

    pip install "geartrain[torch,cli,plot,atari]"
    python examples/online_dqn_atari.py   # under three CPU minutes
    python examples/online_dqn_atari.py --game boxing --steps 60000 --halve-rate 10000
    python examples/online_dqn_atari.py --game boxing --constants   # what random play and single actions reach

Actors in processes of their own step the games and write each frame once into rows of shared memory; they take the
newest weights by their version. The learner draws transitions, those with the largest errors most often, whose stacks
and n-step rewards the view makes. The store's rate limiter keeps both to a fixed number of samples per step.

Where an action makes little difference for long, as at the kerb in Freeway, the values of the actions differ by less
than the network's error, and what is greedy changes from one update to the next. So random actions are held, for up to
a crossing of the road, and targets have the rewards of 20 steps: what an action leads to is seen at once, and values
need few updates to travel. The network begins with values of 0 and sees what differs from a mean frame. The targets of
actions that are not the best are lowered by a part of what they are behind (advantage learning, Bellemare et al.,
2016), the learning rate falls with the steps taken, and a running mean of the weights acts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import console, progress
from torch import Tensor, nn

import curves
import geartrain as gt
from geartrain import weights
from geartrain.actors import LocalPolicy, recorded_fields
from geartrain.actors.envs import make
from geartrain.launch import ActorContext, ActorPool

FRAME, STACK, N_STEP, GAMMA = (42, 40), 4, 20, 0.99
VIEW = gt.Transitions(n_step=N_STEP, gamma=GAMMA, frame_stack=STACK)
OVERLAP = STACK - 1 + N_STEP - 1  # steps of a row that repeat the row before, so that stacks and sums are whole
ROW = 128 + OVERLAP + 1  # steps of a row: 128 new ones, and the observation that the last one led to
EVERY = 50  # learner steps from one version of the weights to the next
PATIENCE_S = 300.0  # without a new step or batch; where other programs run, everything is slow and nothing is wrong


class QNetwork(nn.Module):
    """(B, STACK, *FRAME) bytes to the values of the actions, (B, actions): a state's value and their advantages.

    It sees what differs from `background`, a mean frame, so that what moves is not a few among many equal pixels. All
    values are 0 at first: whatever it prefers later it has learned.
    """

    background: Tensor

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.see = nn.Sequential(
            nn.Conv2d(STACK, 16, 6, 3), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten(), nn.LayerNorm(800)
        )
        self.think = nn.Sequential(nn.Linear(800, 256), nn.LayerNorm(256), nn.ReLU())
        self.value, self.advantage = nn.Linear(256, 1), nn.Linear(256, actions)
        for head in (self.value, self.advantage):
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
        self.register_buffer("background", torch.zeros(FRAME))

    @property
    def is_trained(self) -> bool:
        return bool(self.background.any())

    def forward(self, stacks: Tensor) -> Tensor:
        thought = self.think(self.see((stacks - self.background) / 64))
        advantage = self.advantage(thought)
        return self.value(thought) + advantage - advantage.mean(1, keepdim=True)


class Player:
    """Acts greedily but for random actions, on stacks that it makes of the single frames it is shown.

    A random action is kept for a while, most often for a step and seldom for up to `longest`, because single
    random steps cancel out (Dabney et al., 2021). All actions are random while the model is not trained.
    """

    def __init__(self, n: int, actions: int, epsilon: np.ndarray, seed: int, longest: int = 1) -> None:
        self._stacks = np.zeros((n, STACK, *FRAME), np.uint8)
        self._actions, self._epsilon, self._rng = actions, epsilon, np.random.default_rng(seed)
        self._left, self._kept, self._longest = np.zeros(n, int), np.zeros(n, int), longest

    @torch.no_grad()
    def act(self, model: QNetwork, obs: dict[str, np.ndarray]) -> np.ndarray:
        begins = obs["age"] == 0
        self._stacks[begins] = 0
        self._left[begins] = 0
        self._stacks = np.concatenate([self._stacks[:, 1:], obs["frame"][:, None]], 1)
        greedy = model(torch.from_numpy(self._stacks)).argmax(1).numpy()
        n, rng = len(greedy), self._rng
        epsilon = self._epsilon if model.is_trained else 1.0
        chance = (self._left == 0) & (rng.random(n) < epsilon)
        self._kept = np.where(chance, rng.integers(self._actions, size=n), self._kept)
        self._left = np.where(chance, rng.zipf(1.5, n).clip(max=self._longest), self._left)
        chosen = np.where(self._left > 0, self._kept, greedy)
        self._left = np.maximum(self._left - 1, 0)
        return chosen


# --------------------------------------------------------------------------- what the actors' processes call


def make_games(chosen: argparse.Namespace, context: ActorContext) -> Any:
    return make(f"atari/{chosen.game}", chosen.games)


def make_policy(chosen: argparse.Namespace, reader: str, context: ActorContext) -> LocalPolicy:
    """Every game begins random actions as often as its place says: at one of three steps, down to one of a hundred."""
    actions = context.environments.actions
    place = context.number + context.actors * np.arange(chosen.games)
    epsilon = 0.3 ** (1 + 3 * place / max(1, chosen.games * context.actors - 1))
    player = Player(chosen.games, actions, epsilon, context.seed, longest=128)
    return LocalPolicy(player.act, QNetwork(actions), weights.Reader(reader), refresh_every=10)


# ----------------------------------------------------------------------------------------------- the learner


def errors_of(online: QNetwork, target: QNetwork, batch: gt.Batch, widen: float = 0.0) -> Tensor:
    """(B,) temporal-difference errors.

    Args:
        widen: how much of what an action is behind the best one its target is lowered by, from 0 to below 1. The best
            action stays the best, and the others fall behind by up to 1 / (1 - widen) times as much.
    """
    stacks, following = batch["obs.frame"], batch["next_obs.frame"]
    action = batch["action"][:, None]
    with torch.no_grad():
        best = online(following).argmax(1, keepdim=True)
        wanted = batch["reward"] + batch["discount"] * target(following).gather(1, best)[:, 0]
        before = target(stacks)
        wanted -= widen * (before.amax(1) - before.gather(1, action)[:, 0])
    values = online(stacks).gather(1, action)[:, 0]
    return wanted - values


class Learner:
    """The network that learns, and a running mean of it, which is bootstrapped from, acts, and is evaluated.

    From one action to the next, values differ by a few percent; the mean of many steps' weights tells them apart.
    """

    def __init__(self, actions: int, chosen: argparse.Namespace) -> None:
        torch.manual_seed(chosen.seed)
        self.online, self.mean = QNetwork(actions), QNetwork(actions)
        self.mean.load_state_dict(self.online.state_dict())
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=chosen.rate, eps=1e-5)
        # By the steps taken, not by those still to come: a longer run begins as a shorter one.
        self.rate = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step / chosen.halve_rate))
        self.widen = chosen.widen

    def look_at(self, batch: gt.Batch) -> None:
        """Takes the mean of a batch's frames for the background of all."""
        for network in (self.online, self.mean):
            network.background.copy_(batch["obs.frame"].float().mean((0, 1)))

    def train(self, batch: gt.Batch, follow: float = 0.01) -> Tensor:
        """One step; the sizes of the errors, (B,)."""
        error = errors_of(self.online, self.mean, batch, self.widen)
        size = error.abs()
        huber = torch.where(size < 1, 0.5 * error.square(), size - 0.5)
        loss = (batch.importance_weights * huber).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.online.parameters(), 10.0)
        self.optimizer.step()
        self.rate.step()
        with torch.no_grad():
            for mean, value in zip(self.mean.parameters(), self.online.parameters(), strict=True):
                mean.lerp_(value, follow)
        return size.detach()


def first_steps(
    pool: ActorPool, wanted: int, bars: progress.Progress, bar: progress.TaskID, patience_s: float = PATIENCE_S
) -> None:
    """Waits until the actors have made so many steps, for as long as they make any.

    Raises:
        WaitTimeoutError: none was made for so long.
        ActorDiedError: as `ActorPool.check`.
    """
    made, until_s = 0, time.monotonic() + patience_s
    while made < wanted:
        time.sleep(0.1)
        pool.check()
        before, made = made, pool.stats()["steps"]
        bars.update(bar, description=f"{made:,} of the first {wanted:,} steps")
        if made > before:
            until_s = time.monotonic() + patience_s
        elif time.monotonic() > until_s:
            raise gt.errors.WaitTimeoutError(f"after {made:,} steps the actors made none within {patience_s:g} s")


def learn(
    chosen: argparse.Namespace, store: gt.Store, curve: curves.Curve, screen: console.Console
) -> dict[str, float]:
    learner = Learner(make(f"atari/{chosen.game}").actions, chosen)
    random = evaluate(learner.mean, chosen, chosen.eval_episodes, epsilon=1.0)
    curve.line("random actions", random.mean())
    curve.point(0, random.mean(), random.min(), random.max())
    screen.print(f"random actions: {random.mean():.1f}")

    row = chosen.samples_per_step * (ROW - OVERLAP - 1)  # samples of the new steps of one
    store.limiter.set(
        samples_per_insert=chosen.samples_per_step,
        min_size_to_sample=max(1, chosen.first_steps),
        error_buffer=max(20 * row, 8 * chosen.batch),
        unit="steps",
    )
    selection = gt.selection.Prioritized(seed=chosen.seed, alpha=0.5, beta=0.5)
    games, policy = functools.partial(make_games, chosen), functools.partial(make_policy, chosen, store.name)
    every, train_s = max(1, chosen.steps // chosen.evaluations), 0.0
    with (
        weights.Publisher(store.name) as publisher,
        curves.bars(screen) as bars,
        contextlib.ExitStack() as stack,
    ):
        publisher.publish(1, learner.mean.state_dict())
        pool = ActorPool(store, games, policy, chosen.actors, seed=chosen.seed, overlap=OVERLAP)
        stack.enter_context(pool)
        replay = gt.Replay(
            store,
            selection,
            chosen.batch,
            view=VIEW,
            num_batches=chosen.steps,
            options=gt.ReplayOptions(timeout_s=PATIENCE_S),
        )
        stack.enter_context(replay)
        bar = bars.add_task("waiting for the first steps", total=chosen.steps)
        first_steps(pool, chosen.first_steps, bars, bar)
        since = None
        for step, batch in enumerate(replay, start=1):
            if since is None:
                since = time.perf_counter()  # it starts when there is something to learn from
                learner.look_at(batch)
            size = learner.train(batch)
            replay.update_priorities(batch.keys, size + 0.01)
            if step % EVERY == 0:
                publisher.publish(1 + step, learner.mean.state_dict())
                pool.check()
                played = pool.stats()
                words = f"{played['steps']:,} steps, return {played['mean_return']:.1f}"
                bars.update(bar, completed=step, description=words)
            if step % every == 0 and step < chosen.steps:
                train_s += time.perf_counter() - since
                played, returns = pool.stats(), evaluate(learner.mean, chosen, chosen.eval_episodes)
                curve.point(played["steps"], returns.mean(), returns.min(), returns.max())
                words = f"{train_s:4.0f} s, {step:,} batches, {played['steps']:,} steps"
                bars.console.print(f"{words}: return {returns.mean():.1f}")
                if train_s > chosen.seconds:
                    break
                since = time.perf_counter()
        train_s += time.perf_counter() - since if step == chosen.steps else 0.0
        played, drawn, wait_s = pool.stats(), store.limiter.state().samples, replay.stats()["wait_s"]
    returns = evaluate(learner.mean, chosen, chosen.eval_episodes)
    curve.point(played["steps"], returns.mean(), returns.min(), returns.max())
    if chosen.network:
        chosen.network.parent.mkdir(parents=True, exist_ok=True)
        torch.save(learner.mean.state_dict(), chosen.network)
    return {
        "random": random.mean(),
        "return": returns.mean(),
        "gain": returns.mean() - random.mean(),
        "environment_steps": played["steps"],
        "learner_steps": step,
        "samples_per_step": drawn / max(1, played["steps"]),
        "train_s": train_s,
        "wait_s": wait_s,
    }


@torch.inference_mode()
def evaluate(
    model: QNetwork, chosen: argparse.Namespace, episodes: int, epsilon: float = 0.01, constant: int | None = None
) -> np.ndarray:
    """Returns of so many games by the game's own score, played side by side with seeds that no actor has.

    Args:
        constant: an action to be taken at every step, instead of what the model prefers.
    """
    games = make(f"atari/{chosen.game}", episodes, sign_rewards=False)
    player = Player(episodes, games.actions, np.full(episodes, epsilon), chosen.seed)
    obs = games.reset(seed=1_000_000 + chosen.seed)
    returns, playing = np.zeros(episodes), np.ones(episodes, bool)
    for _ in range(chosen.eval_steps):
        actions = player.act(model, obs) if constant is None else np.full(episodes, constant)
        stepped = games.step(actions)
        returns[playing] += stepped.reward[playing]
        playing &= ~(stepped.terminated | stepped.truncated)
        obs = stepped.next
        if not playing.any():
            break
    games.close()
    return returns


def play_without_learning(chosen: argparse.Namespace, screen: console.Console) -> None:
    """Shows what random play and each action alone reach."""
    actions = make(f"atari/{chosen.game}").actions
    for constant in (None, *range(actions)):
        returns = evaluate(QNetwork(actions), chosen, chosen.eval_episodes, epsilon=1.0, constant=constant)
        name = "random actions" if constant is None else f"action {constant} alone"
        screen.print(f"{name}: {returns.mean():.1f} ({returns.min():g} to {returns.max():g})")


def main(arguments: list[str] | None = None) -> int:
    text = curves.options(__doc__)
    add = text.add_argument
    add("--game", default="freeway", help="name of a ROM (freeway)")
    add("--steps", type=int, help="batches to train on (1500)")
    add("--seconds", type=float, default=float("inf"), help="stop at the first evaluation after so long")
    add("--actors", type=int, default=1, help="processes that play (1)")
    add("--games", type=int, default=8, help="that each of them plays side by side (8)")
    add("--batch", type=int, default=64, help="transitions of a batch (64)")
    add("--rate", type=float, default=3e-4, help="first learning rate; half of it after --halve-rate steps (3e-4)")
    add("--halve-rate", type=float, default=1500, help="at three times as many it is a quarter, and so on (1500)")
    add("--widen", type=float, default=0.5, help="of advantage learning, 0 for none (0.5)")
    add("--samples-per-step", type=float, default=4.0, help="how often a step is trained on (4)")
    add("--first-steps", type=int, default=5000, help="steps in the store before the first batch (5000)")
    add("--capacity", type=int, default=200_000, help="steps that the store keeps (200,000)")
    add("--eval-episodes", type=int, default=6, help="of an evaluation (6)")
    add("--evaluations", type=int, default=4, help="while it trains (4)")
    add("--network", type=Path, help="write the network that was evaluated last here, its weights (PT)")
    add("--constants", action="store_true", help="show what random play and each action alone reach, and end")
    chosen = text.parse_args(arguments)
    chosen.eval_steps = 27_000
    if chosen.tiny:
        chosen.steps, chosen.batch, chosen.games, chosen.first_steps = chosen.steps or 20, 8, 2, 200
        chosen.eval_episodes, chosen.eval_steps, chosen.evaluations = 2, 100, 1
    chosen.steps = chosen.steps or 1500
    curves.prepare()
    screen = console.Console()
    if chosen.constants:
        play_without_learning(chosen, screen)
        return 0
    curve = curves.Curve(f"DQN on {chosen.game}", "environment steps", "return", chosen)
    fields = recorded_fields(make(f"atari/{chosen.game}").fields(), overlap=True, n_step=N_STEP)
    rows = max(64, chosen.capacity // (ROW - OVERLAP - 1))
    name = f"atari-{os.getpid()}"
    with gt.Store.create(name, fields, max_length=ROW, capacity=rows, priority_per="step", new_priority="max") as store:
        result = learn(chosen, store, curve, screen)
    finished = curve.finish(**result)["result"]
    screen.print(" ".join(f"{name}={value:,.2f}" for name, value in finished.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
