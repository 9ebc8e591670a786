"""The Multi-Agent Transformer (Wen et al., 2022): what all agents see is encoded, their actions decoded one by one.

Each agent knows what those before it do. In training all actions are decoded at once, behind a causal mask.
It knows no replay and imports nothing of geartrain's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal


class Block(nn.Module):
    """Attention over the agents, causal or to another sequence, and a small network, each added to what was there."""

    def __init__(self, width: int, heads: int, cross: bool) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(1 + cross))
        self.merge = nn.ModuleList(nn.Linear(width, width) for _ in range(1 + cross))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 + cross))
        self.think = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def attend(self, place: int, x: Tensor, queries: Tensor, causal: bool) -> Tensor:
        """Of x's keys and values, with queries of the same length."""
        weight, bias = self.project[place].weight, self.project[place].bias
        width = x.shape[-1]
        q = nn.functional.linear(queries, weight[:width], bias[:width])
        k, v = nn.functional.linear(x, weight[width:], bias[width:]).chunk(2, -1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.merge[place](seen.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        x = self.norms[0](x + self.attend(0, x, x, causal=encoded is not None))
        if encoded is not None:
            x = self.norms[1](encoded + self.attend(1, x, encoded, causal=True))
        return self.norms[-1](x + self.think(x))


class Team(nn.Module):
    """(B, agents, seen) observations to a value for each agent, and actions one agent after the other.

    Args:
        agents, seen: how many there are, and numbers that each observes.
        actions: to choose from; of a continuous action, its numbers.
        discrete: which of the two.
    """

    def __init__(self, agents: int, seen: int, actions: int, discrete: bool, width: int = 64, heads: int = 2) -> None:
        super().__init__()
        self.agents, self.actions, self.discrete = agents, actions, discrete
        self.look = nn.Sequential(nn.LayerNorm(seen), nn.Linear(seen, width), nn.GELU(), nn.LayerNorm(width))
        self.who = nn.Parameter(0.02 * torch.randn(agents, width))
        self.encoder, self.decoder = Block(width, heads, cross=False), Block(width, heads, cross=True)
        self.value = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 1))
        self.heard = nn.Linear(actions + 1, width)  # what the agent before does, or that there is none
        self.act = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, actions))
        self.spread = nn.Parameter(torch.full((actions,), -0.5))  # log of the standard deviation, if continuous
        for last, gain in ((self.value[-1], 1.0), (self.act[-1], 0.01)):
            nn.init.orthogonal_(last.weight, gain)
            nn.init.zeros_(last.bias)

    def encode(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """The team's situation, (B, agents, width), and what it is worth, (B, agents)."""
        encoded = self.encoder(self.look(obs) + self.who)
        return encoded, self.value(encoded)[..., 0]

    def decode(self, encoded: Tensor, available: Tensor | None, actions: Tensor) -> Any:
        """Distributions of all agents' actions, of which each is shown the ones before it."""
        done = nn.functional.one_hot(actions, self.actions).float() if self.discrete else actions
        heard = torch.zeros(*done.shape[:2], self.actions + 1)
        heard[:, 0, -1] = 1.0
        heard[:, 1:, :-1] = done[:, :-1]
        out = self.act(self.decoder(self.heard(heard) + self.who[: done.shape[1]], encoded[:, : done.shape[1]]))
        if self.discrete:
            return Categorical(
                logits=out if available is None else out.masked_fill(~available[:, : out.shape[1]], -1e9)
            )
        return Independent(Normal(out, self.spread.exp().expand_as(out)), 1)

    def choose(self, encoded: Tensor, available: Tensor | None, greedy: bool) -> tuple[Tensor, Tensor]:
        """Actions, one agent after the other, and their log probabilities, (B, agents)."""
        shape = (len(encoded), 0) if self.discrete else (len(encoded), 0, self.actions)
        actions, told = torch.zeros(shape, dtype=torch.long if self.discrete else torch.float), []
        blank = actions.new_zeros(len(encoded), 1, *shape[2:])
        for agent in range(self.agents):
            chances = self.decode(encoded, available, torch.cat([actions, blank], 1))
            best = chances.probs.argmax(-1) if self.discrete else chances.mean
            action = best if greedy else chances.sample()
            told.append(chances.log_prob(action)[:, agent])
            actions = torch.cat([actions, action[:, agent : agent + 1]], 1)
        return actions, torch.stack(told, 1)


def split(obs: Any) -> tuple[Tensor, Tensor | None]:
    """What the agents see, and which of their actions are possible, if not all."""
    if isinstance(obs, dict):
        return torch.from_numpy(obs["agents"]), torch.from_numpy(obs["available"])
    return torch.from_numpy(obs), None


@torch.inference_mode()
def act(team: Team, obs: Any, greedy: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    seen, available = split(obs)
    encoded, value = team.encode(seen)
    actions, log_prob = team.choose(encoded, available, greedy)
    return actions, {"log_prob": log_prob, "value": value}


def evaluate(team: Team, battles: Any, seed: int) -> dict[str, float]:
    """The first episode of every battle, with the likeliest actions: the share that was won, and the mean return."""
    obs = battles.reset(seed=seed)
    returns, won, playing = np.zeros(battles.n), np.zeros(battles.n, bool), np.ones(battles.n, bool)
    while playing.any():
        stepped = battles.step(act(team, obs, greedy=True)[0].numpy())
        returns[playing] += stepped.reward.reshape(battles.n, -1).mean(1)[playing]
        won |= playing & getattr(battles, "won", False)
        playing &= ~(stepped.terminated | stepped.truncated)
        obs = stepped.next
    return {"win rate": float(won.mean()), "return": float(returns.mean())}
