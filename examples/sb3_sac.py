"""SAC of Stable-Baselines3 over a replay buffer of geartrain's: `python examples/sb3_sac.py [--stock]`.

Pendulum takes a few minutes on one core; with MuJoCo installed, `--env HalfCheetah-v5 --steps 100000` takes hours.
"""

from __future__ import annotations

import argparse

from stable_baselines3 import SAC
from stable_baselines3.common.evaluation import evaluate_policy

from geartrain.integrations.sb3 import ReplayBuffer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stock", action="store_true", help="with Stable-Baselines3's own buffer, to compare")
    options = parser.parse_args()
    model = SAC(
        "MlpPolicy",
        options.env,
        replay_buffer_class=None if options.stock else ReplayBuffer,
        buffer_size=100_000,
        learning_rate=1e-3,
        policy_kwargs={"net_arch": [64, 64]},
        seed=options.seed,
    )
    model.learn(options.steps)
    mean, spread = evaluate_policy(model, model.get_env(), n_eval_episodes=10)
    print(f"{options.env}, seed {options.seed}: mean return {mean:.1f}, spread {spread:.1f}, of 10 episodes")


if __name__ == "__main__":
    main()
