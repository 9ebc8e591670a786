"""Prioritized torchrl replay buffer that an actor process and a learner share.

Takes a few seconds on one core. The actor plays CartPole at random and writes. The learner learns the discounted
return by TD(0), and its errors are the priorities.

    pip install "geartrain[torchrl]"
    python examples/torchrl_shared_buffer.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets

import gymnasium as gym
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from geartrain.integrations.torchrl import PrioritizedSampler, RoundRobinWriter, SharedStorage

ITEMS = 20_000


def make_buffer(name: str) -> TensorDictReplayBuffer:
    """The buffer, in any process."""
    return TensorDictReplayBuffer(
        storage=SharedStorage(ITEMS, store=name),
        sampler=PrioritizedSampler(alpha=0.6, beta=0.4),
        writer=RoundRobinWriter(),
        batch_size=128,
        priority_key="td_error",
    )


def act(name: str, steps: int) -> None:
    """Writes the steps of a random policy."""
    buffer, env = make_buffer(name), gym.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    env.action_space.seed(0)
    for _ in range(steps):
        next_obs, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        step = {
            "obs": torch.as_tensor(obs),
            "next": {"obs": torch.as_tensor(next_obs), "reward": torch.tensor(float(reward))},
            "terminated": torch.tensor(terminated),
        }
        buffer.add(TensorDict(step, []))
        obs = env.reset()[0] if terminated or truncated else next_obs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000, help="of the environment")
    parser.add_argument("--batches", type=int, default=600)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    name = f"torchrl-example-{secrets.token_hex(4)}"
    buffer = make_buffer(name)
    # One item before the actor begins, so that the learner makes the store and is the last to leave it.
    nothing = {"obs": torch.zeros(4), "next": {"obs": torch.zeros(4), "reward": torch.tensor(0.0)}}
    buffer.add(TensorDict({**nothing, "terminated": torch.tensor(True)}, []))
    actor = multiprocessing.get_context("spawn").Process(target=act, args=(name, options.steps))
    actor.start()
    actor.join(timeout=300)
    if actor.exitcode != 0:
        raise SystemExit(f"the actor ended with {actor.exitcode}")
    value = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(value.parameters(), lr=1e-2)

    def errors_of(batch: TensorDict) -> torch.Tensor:
        with torch.no_grad():
            future = value(batch["next", "obs"])[:, 0] * ~batch["terminated"]
        return batch["next", "reward"] + 0.5 * future - value(batch["obs"])[:, 0]

    before = errors_of(buffer[:]).square().mean()
    for _ in range(options.batches):
        batch = buffer.sample()
        td_error = errors_of(batch)
        loss = (batch["priority_weight"] * td_error.square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch["td_error"] = td_error.detach().abs()
        buffer.update_tensordict_priority(batch)
    after = errors_of(buffer[:]).square().mean()
    print(f"{len(buffer)} items of two processes; squared TD error {before:.2f} at first, {after:.2f} at the end")
    buffer.storage.close()


if __name__ == "__main__":
    main()
