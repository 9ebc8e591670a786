"""A point robot learns to reach its goal, from LeRobot's replay buffer over a store in shared memory.

Takes a few minutes on one core. LeRobot itself is not needed.

    python examples/lerobot_replay.py

Episodes are cut off after 20 steps, as on a robot: each is truncated and none is done. The agent is TD3 without
delays: twin critics and a deterministic actor.
"""

from __future__ import annotations

import argparse
from copy import deepcopy

import torch
from torch import nn
from torch.nn import functional

from geartrain.integrations.lerobot import ReplayBuffer

STATE = "observation.state"
LENGTH, GAMMA = 20, 0.9


def step(state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The point moves by up to 0.2 in each direction; the reward is the distance to the origin, negative."""
    state = (state + 0.2 * action.clamp(-1, 1)).clamp(-1, 1)
    return state, -float(state.norm())


def net(inputs: int, outputs: int, *last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs), *last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    torch.set_num_threads(1)
    actor, critics = net(2, 2, nn.Tanh()), [net(4, 1), net(4, 1)]
    targets = deepcopy(critics)
    actor_optimizer = torch.optim.Adam(actor.parameters(), 1e-3)
    critic_optimizer = torch.optim.Adam([p for each in critics for p in each.parameters()], 1e-3)
    rewards: list[float] = []
    with ReplayBuffer(5_000, "cpu", state_keys=[STATE]) as buffer:
        state = torch.rand(2) * 2 - 1
        for t in range(steps):
            with torch.no_grad():
                action = (actor(state) + 0.3 * torch.randn(2)).clamp(-1, 1)
            following, reward = step(state, action)
            truncated = t % LENGTH == LENGTH - 1
            buffer.add({STATE: state}, action, reward, {STATE: following}, done=False, truncated=truncated)
            rewards.append(reward)
            state = torch.rand(2) * 2 - 1 if truncated else following
            if t < 100:
                continue
            batch = buffer.sample(64)
            here, there = batch["state"][STATE], batch["next_state"][STATE]
            with torch.no_grad():
                ahead = torch.cat([there, actor(there)], 1)
                value = torch.minimum(*(each(ahead) for each in targets)).squeeze(1)
                target = batch["reward"] + GAMMA * (1 - batch["done"]) * value
            taken = torch.cat([here, batch["action"]], 1)
            loss = sum(functional.mse_loss(each(taken).squeeze(1), target) for each in critics)
            critic_optimizer.zero_grad()
            loss.backward()
            critic_optimizer.step()
            actor_optimizer.zero_grad()
            (-critics[0](torch.cat([here, actor(here)], 1)).mean()).backward()
            actor_optimizer.step()
            with torch.no_grad():
                for mine, own in zip(targets, critics, strict=True):
                    for p, q in zip(mine.parameters(), own.parameters(), strict=True):
                        p.lerp_(q, 0.02)
    first, last = rewards[: max(1, steps // 10)], rewards[-max(1, steps // 10) :]
    print(f"mean reward {sum(first) / len(first):.3f} in the first tenth, {sum(last) / len(last):.3f} in the last")


if __name__ == "__main__":
    main()
