"""SAC of Stable-Baselines3 over geartrain's replay buffer.

Learns Pendulum in a few minutes on one core. `--stock` uses the buffer of Stable-Baselines3 instead.

    pip install "geartrain[sb3]"
    python examples/sb3_sac.py
    python examples/sb3_sac.py --env InvertedPendulum-v5 --steps 15000   # needs MuJoCo; two or three minutes
    python examples/sb3_sac.py --env HalfCheetah-v5 --steps 100000       # hours
"""

from __future__ import annotations

from stable_baselines3 import SAC
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

import curves
from geartrain.integrations.sb3 import ReplayBuffer


def main() -> None:
    parser = curves.options(__doc__)
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--evaluations", type=int, default=5, help="while it trains (5)")
    parser.add_argument("--stock", action="store_true", help="with Stable-Baselines3's own buffer, to compare")
    options = parser.parse_args()
    steps, evaluations = (200, 1) if options.tiny else (options.steps, options.evaluations)
    curves.prepare()
    curve = curves.Curve(f"SAC on {options.env}{', stock' * options.stock}", "environment steps", "return", options)
    model = SAC(
        "MlpPolicy",
        options.env,
        replay_buffer_class=None if options.stock else ReplayBuffer,
        buffer_size=100_000,
        learning_rate=1e-3,
        policy_kwargs={"net_arch": [64, 64]},
        seed=options.seed,
    )
    others = make_vec_env(options.env, seed=1_000_000 + options.seed)
    mean = 0.0
    for number in range(evaluations):
        model.learn(steps // evaluations, reset_num_timesteps=number == 0)
        returns = evaluate_policy(model, others, n_eval_episodes=10, return_episode_rewards=True)[0]
        mean = sum(returns) / len(returns)
        curve.point(model.num_timesteps, mean, min(returns), max(returns))
        print(
            f"{options.env}, seed {options.seed}, {model.num_timesteps:,} steps: mean return {mean:.1f} of 10 episodes"
        )
    curve.finish(**{"return": mean})


if __name__ == "__main__":
    main()
