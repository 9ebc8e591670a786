"""Returns of Stable-Baselines3's algorithms over its own replay buffers and over geartrain's, for the same seeds.

    python tests/upstream/sb3_training.py [--only NAME ...] [--seeds N] [--json PATH]

SAC and TD3 learn Pendulum, DQN learns CartPole, and DQN with hindsight goals flips bits. Each seed trains on both
buffers, one after the other, with the same settings; then 20 episodes are played without exploration. Printed is the
mean return of each, the mean over the seeds, and whether the two means are within the spread (largest less least) of
the seeds of either side. The draws of the two differ, so the returns do.

Exits with 1 where geartrain's mean is below stock's by more than that spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import DQN, SAC, TD3
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.her import HerReplayBuffer as StockHer

from geartrain.integrations.sb3 import HerReplayBuffer, ReplayBuffer

EPISODES = 20
BITS = 6


def flipping() -> BitFlippingEnv:
    return BitFlippingEnv(n_bits=BITS, continuous=False, max_steps=BITS)


def small(**options: Any) -> dict[str, Any]:
    return {"policy_kwargs": {"net_arch": [64, 64]}, "learning_rate": 1e-3, "buffer_size": 100_000, **options}


def noise() -> NormalActionNoise:
    return NormalActionNoise(np.zeros(1), np.full(1, 0.2))


#: By name: algorithm, policy, environment, stock's buffer, ours, settings, steps.
CASES: dict[str, tuple[Any, str, str | Callable[[], Any], Any, Any, Callable[[], dict[str, Any]], int]] = {
    "SAC, Pendulum": (SAC, "MlpPolicy", "Pendulum-v1", None, ReplayBuffer, small, 8_000),
    "TD3, Pendulum": (
        TD3,
        "MlpPolicy",
        "Pendulum-v1",
        None,
        ReplayBuffer,
        lambda: small(action_noise=noise(), learning_starts=500),
        12_000,
    ),
    "DQN, CartPole": (
        DQN,
        "MlpPolicy",
        "CartPole-v1",
        None,
        ReplayBuffer,
        lambda: {
            "policy_kwargs": {"net_arch": [256, 256]},
            "learning_rate": 2.3e-3,
            "buffer_size": 100_000,
            "learning_starts": 1_000,
            "batch_size": 64,
            "train_freq": 256,
            "gradient_steps": 128,
            "target_update_interval": 10,
            "exploration_fraction": 0.16,
            "exploration_final_eps": 0.04,
        },
        50_000,
    ),
    f"DQN with HER, {BITS} bits": (
        DQN,
        "MultiInputPolicy",
        flipping,
        StockHer,
        HerReplayBuffer,
        lambda: small(
            replay_buffer_kwargs={"n_sampled_goal": 4, "goal_selection_strategy": "future"},
            learning_starts=200,
            batch_size=128,
            train_freq=4,
            gradient_steps=4,
            gamma=0.98,
            target_update_interval=200,
            exploration_fraction=0.5,
        ),
        5_000,
    ),
}


def trained(name: str, seed: int, ours: bool, steps: int | None) -> tuple[float, float]:
    """Mean return of the last policy, and CPU seconds of the training."""
    algorithm, policy, env, stock_buffer, our_buffer, settings, usual = CASES[name]
    buffer = our_buffer if ours else stock_buffer
    venv = make_vec_env(env, seed=seed)
    model = algorithm(policy, venv, replay_buffer_class=buffer, seed=seed, **settings())
    begin = time.process_time()
    model.learn(steps or usual)
    took = time.process_time() - begin
    others = make_vec_env(env, seed=1_000_000 + seed)
    mean = float(evaluate_policy(model, others, n_eval_episodes=EPISODES)[0])
    if ours:
        model.replay_buffer.close()
    return mean, took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose names begin so")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of those of each case, for a look")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report, worse = {}, []
    for name in CASES:
        if options.only and not any(name.startswith(each) for each in options.only):
            continue
        found: dict[str, list[float]] = {"stock": [], "geartrain": []}
        seconds: dict[str, list[float]] = {"stock": [], "geartrain": []}
        for seed in range(options.seeds):
            for side, returns in found.items():
                mean, took = trained(name, seed, side == "geartrain", options.steps)
                returns.append(mean)
                seconds[side].append(took)
                print(f"{name}, seed {seed}, {side}: mean return {mean:.1f}, {took:.0f} s of CPU", flush=True)
        means = {side: statistics.mean(each) for side, each in found.items()}
        spread = max(max(each) - min(each) for each in found.values())
        within = abs(means["stock"] - means["geartrain"]) <= spread
        told = "within" if within else "outside"
        cpu = ", ".join(f"{statistics.median(each):.0f}" for each in seconds.values())
        print(
            f"{name}: stock {means['stock']:.1f}, geartrain {means['geartrain']:.1f}, {told} the spread of "
            f"{spread:.1f}; CPU {cpu} s",
            flush=True,
        )
        report[name] = {"returns": found, "cpu_s": seconds, "spread": spread, "within": within}
        if means["geartrain"] < means["stock"] - spread:
            worse.append(name)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
