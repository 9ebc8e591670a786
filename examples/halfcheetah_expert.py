"""A linear expert for HalfCheetah by augmented random search: the file that the small Gato's recordings come from.

    python examples/halfcheetah_expert.py --out examples/data/halfcheetah_expert.npz

The policy is one matrix over observations less their running mean, in units of their deviation. An update tries the
matrix with `--directions` random changes, forwards and backwards, and moves it along the best of them, by what each
gained (Mania et al., 2018, V2-t). Nothing is differentiated. The best matrix of those evaluated on whole episodes is
kept, with the mean, the deviations, its mean return and the steps that were made. 300 updates are 3.8 M steps, two to
three CPU minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from rich import console

import curves

EPISODE_STEPS = 1000
OBS, ACTION = 17, 6


def make_cheetah() -> Any:
    import gymnasium

    with warnings.catch_warnings():  # MuJoCo 4 deprecates a name that Gymnasium still uses.
        warnings.simplefilter("ignore")
        return gymnasium.make("HalfCheetah-v5", disable_env_checker=True)


class Seen:
    """Mean and deviations of all observations so far."""

    def __init__(self) -> None:
        self.count, self.total, self.squares = 0, np.zeros(OBS), np.zeros(OBS)

    def add(self, observations: np.ndarray) -> None:
        self.count += len(observations)
        self.total += observations.sum(0)
        self.squares += np.square(observations).sum(0)

    def scales(self) -> tuple[np.ndarray, np.ndarray]:
        if not self.count:
            return np.zeros(OBS), np.ones(OBS)
        mean = self.total / self.count
        return mean, np.sqrt(np.maximum(self.squares / self.count - mean**2, 1e-6))


def play(
    env: Any, matrix: np.ndarray, mean: np.ndarray, std: np.ndarray, steps: int, seed: int
) -> tuple[float, np.ndarray]:
    """The return of so many steps from a new start, and their observations."""
    env = env.unwrapped
    observations = np.empty((steps, OBS))
    scaled = matrix / std
    offset = scaled @ mean
    total = 0.0
    obs, _ = env.reset(seed=seed)
    for t in range(steps):
        observations[t] = obs
        obs, reward, _, _, _ = env.step((scaled @ obs - offset).clip(-1.0, 1.0))
        total += reward
    return total, observations


def search(chosen: argparse.Namespace, screen: console.Console) -> dict[str, Any]:
    rng, env, seen = np.random.default_rng(chosen.seed), make_cheetah(), Seen()
    matrix = np.zeros((ACTION, OBS))
    best: dict[str, Any] = {"ret": -np.inf}
    made = 0
    curve = curves.Curve("Augmented random search on HalfCheetah", "environment steps", "return", chosen)
    with curves.bars(screen) as bars:
        bar = bars.add_task("updates", total=chosen.updates)
        for update in range(1, chosen.updates + 1):
            began_s = time.perf_counter()
            mean, std = seen.scales()
            directions = rng.normal(size=(chosen.directions, ACTION, OBS))
            returns = np.empty((chosen.directions, 2))
            for number, direction in enumerate(directions):
                seed = int(rng.integers(2**31))
                for side, sign in enumerate((1.0, -1.0)):
                    tried = matrix + sign * chosen.noise * direction
                    returns[number, side], observations = play(env, tried, mean, std, chosen.horizon, seed)
                    seen.add(observations)
                    made += chosen.horizon
            top = np.argsort(-returns.max(1))[: chosen.top]
            gained = (returns[top, 0] - returns[top, 1])[:, None, None] * directions[top]
            matrix = matrix + chosen.rate / (len(top) * returns[top].std() + 1e-9) * gained.sum(0)
            bars.update(bar, advance=1, description=f"updates, {returns.mean():,.0f}")
            if update % chosen.every == 0 or update == chosen.updates:
                mean, std = seen.scales()
                whole = [
                    play(env, matrix, mean, std, EPISODE_STEPS, 10_000 + i)[0] for i in range(chosen.eval_episodes)
                ]
                curve.point(made, np.mean(whole), min(whole), max(whole))
                took_s = time.perf_counter() - began_s
                bars.console.print(f"{update:4}: {made:,} steps, return {np.mean(whole):,.0f} ({took_s:.1f} s)")
                if np.mean(whole) > best["ret"]:
                    best = {"W": matrix, "mean": mean, "std": std, "ret": np.mean(whole), "steps": made}
                    save(chosen.out, best, chosen.seed)
    curve.finish(**{"return": best["ret"]})
    return best


def save(out: Path, best: dict[str, Any], seed: int) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(out, **best, seed=seed)


def main(arguments: list[str] | None = None) -> int:
    text = curves.options(__doc__)
    add = text.add_argument
    add("--updates", type=int, help="of the matrix (300)")
    add("--directions", type=int, default=16, help="random changes tried for an update, each both ways (16)")
    add("--top", type=int, default=8, help="of them that the matrix moves along (8)")
    add("--horizon", type=int, help="steps of a try (400)")
    add("--rate", type=float, default=0.02, help="step size (0.02)")
    add("--noise", type=float, default=0.03, help="size of a change (0.03)")
    add("--every", type=int, default=10, help="updates from one evaluation to the next (10)")
    add("--eval-episodes", type=int, default=3, help="whole episodes of an evaluation (3)")
    add("--out", type=Path, default=Path("runs/halfcheetah_expert.npz"), help="where the expert goes (NPZ)")
    chosen = text.parse_args(arguments)
    chosen.updates = chosen.updates or (2 if chosen.tiny else 300)
    chosen.horizon = chosen.horizon or (20 if chosen.tiny else 400)
    if chosen.tiny:
        chosen.directions, chosen.top, chosen.eval_episodes = 2, 1, 1
    screen = console.Console()
    best = search(chosen, screen)
    screen.print(f"best: return {best['ret']:,.0f} after {best['steps']:,} steps; wrote {chosen.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
