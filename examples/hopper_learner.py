"""The learner of the Hopper examples, whoever feeds it: a causal transformer, its training loop, and its evaluation.

It knows no replay and imports nothing of geartrain's: `train` takes whatever yields windows with a mask.
`offline_gato_hopper.py` feeds it from a store, `hopper_feeds.py` from three sources one after the other.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from rich import progress
from torch import Tensor, nn

EPISODE_STEPS = 1000  # Hopper-v5 stops an episode here at the latest.
OBS, ACTION, CONTEXT, BATCH = 11, 3, 20, 32
#: What a step of a window has, and its shapes.
WINDOW_SHAPES = {"return_to_go": (), "obs": (OBS,), "action": (ACTION,)}
WINDOW_FIELDS = list(WINDOW_SHAPES)


class Windows(Protocol):
    """A batch: (B, CONTEXT, ...) tensors by name, the newest step at the right end, and which steps are real."""

    @property
    def mask(self) -> Any:
        """(B, CONTEXT) bool tensor."""
        ...

    def __getitem__(self, name: str) -> Any: ...


def make_hopper() -> Any:
    import gymnasium

    with warnings.catch_warnings():  # MuJoCo 4 deprecates a name that Gymnasium still uses.
        warnings.simplefilter("ignore")
        return gymnasium.make("Hopper-v5", disable_env_checker=True)


class DecisionTransformer(nn.Module):
    """Predicts each step's action from the returns, observations and actions up to it.

    A step is three tokens: return-to-go, observation, action. The prediction is read off the
    observation token and attention only looks back, so the action itself is never in sight.
    """

    def __init__(self, obs: int, action: int, *, width: int = 128, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.register_buffer("obs_mean", torch.zeros(obs))
        self.register_buffer("obs_std", torch.ones(obs))
        self.register_buffer("return_scale", torch.ones(()))
        self.embed_return, self.embed_obs = nn.Linear(1, width), nn.Linear(obs, width)
        self.embed_action = nn.Linear(action, width)
        self.embed_place = nn.Parameter(0.02 * torch.randn(3 * CONTEXT, width))
        self.heads = heads
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, action)

    def forward(self, window: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """(B, W, action) for a `window` of (B, W, ...) tensors; `mask` is True at real steps."""
        x, hidden = self.embed(window), self.hidden(mask)
        for layer in self.layers:
            x = layer(x, src_mask=hidden)
        return self.read(x)

    def embed(self, window: Mapping[str, Tensor]) -> Tensor:
        """(B, 3 W, width): the tokens."""
        returns = window["return_to_go"][..., None] / self.return_scale
        obs = (window["obs"] - self.obs_mean) / self.obs_std
        action = self.embed_action(window["action"])
        tokens = torch.stack([self.embed_return(returns), self.embed_obs(obs), action], dim=2)
        return tokens.flatten(1, 2) + self.embed_place

    def hidden(self, mask: Tensor) -> Tensor:
        """(B * heads, 3 W, 3 W): True where a token must not look, for what comes later and for padding."""
        tokens = 3 * mask.shape[1]
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        real = mask.repeat_interleave(3, dim=1)[:, None, None, :]
        # Padding sees itself, because attention to nothing at all would give NaN.
        seen = (real & causal) | torch.eye(tokens, dtype=torch.bool)
        return ~seen.expand(-1, self.heads, -1, -1).flatten(0, 1)

    def read(self, x: Tensor) -> Tensor:
        """(B, W, action): what the observations' tokens tell."""
        return self.head(self.norm(x[:, 1::3]))


def make_model(seed: int, obs: np.ndarray, target: float) -> DecisionTransformer:
    """The model with its first weights, which follow from the seed, and the scales of what it will see."""
    torch.manual_seed(seed)
    model, seen = DecisionTransformer(OBS, ACTION), torch.from_numpy(obs)
    model.obs_mean.copy_(seen.mean(0))
    model.obs_std.copy_(seen.std(0) + 1e-6)
    model.return_scale.fill_(target)
    return model


def learning_rate(step: int, steps: int, peak: float = 1e-3, warmup: int = 20) -> float:
    """Linear warm-up to `peak`, then half a cosine down to 2 % of it."""
    done = max(0.0, (step - warmup) / max(1, steps - warmup))
    return peak * min(1.0, (step + 1) / warmup) * (0.51 + 0.49 * math.cos(math.pi * done))


def train(model: DecisionTransformer, source: Iterable[Windows], steps: int) -> Iterator[float]:
    """Trains on `steps` batches and yields the loss, the mean squared action error, of each."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=1e-4)
    for step, batch in zip(range(steps), source, strict=False):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
        error = (model(batch, batch.mask) - batch["action"]).square().mean(-1)
        loss = error[batch.mask].mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


# ----------------------------------------------------------------------- back to the simulator


@torch.inference_mode()
def evaluate(model: nn.Module, numbers: Sequence[int], target: float, bars: progress.Progress) -> np.ndarray:
    """The returns of the episodes of these numbers, stepped together: one model call per step for all."""
    episodes = len(numbers)
    bar = bars.add_task("evaluation, 1,000 steps", total=EPISODE_STEPS)
    envs = [make_hopper() for _ in range(episodes)]
    obs = np.stack([env.reset(seed=10_000 + i)[0] for i, env in zip(numbers, envs, strict=True)])
    window = {name: torch.zeros(episodes, CONTEXT, *shape) for name, shape in WINDOW_SHAPES.items()}
    mask = torch.zeros(episodes, CONTEXT, dtype=torch.bool)
    returns, hopping = np.zeros(episodes), list(range(episodes))
    for _ in range(EPISODE_STEPS):
        for past in (*window.values(), mask):
            past[:, :-1] = past[:, 1:].clone()
        window["return_to_go"][:, -1] = torch.from_numpy(target - returns)
        window["obs"][:, -1] = torch.from_numpy(obs)
        window["action"][:, -1] = 0.0
        mask[:, -1] = True
        action = model({name: past[hopping] for name, past in window.items()}, mask[hopping])
        window["action"][hopping, -1] = action[:, -1].clamp(-1.0, 1.0)
        for i in hopping.copy():
            obs[i], reward, fell, _, _ = envs[i].step(window["action"][i, -1].numpy())
            returns[i] += reward
            if fell:
                hopping.remove(i)
        bars.update(bar, advance=1)
        if not hopping:
            break
    bars.remove_task(bar)
    return returns
