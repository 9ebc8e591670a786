"""The tokens and the transformer of the small Gato: one set of weights for continuous control and for a game.

Everything is a token, as Reed et al. (2022) have it. A number is encoded by a mu-law where it may lie outside of -1 and
1, and falls into one of 1,024 bins; a discrete action is its own number; a picture is cut into patches, each embedded
by a small residual block. A step is its observation's tokens, a separator, and its action's tokens; a sequence is some
steps. The model is asked for action tokens only, each from all that came before it.

It knows no replay and imports nothing of geartrain's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

MU, MU_RANGE, BINS = 100.0, 256.0, 1024
#: Token ids: discrete values, bins, the separator between an observation and an action.
CONTINUOUS, SEPARATOR, VOCABULARY = BINS, 2 * BINS, 2 * BINS + 1
PATCH = (14, 10)  # lines and columns
#: A layer's keys and values of the tokens so far.
Cache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Shape:
    """What a step of a task is made of.

    Attributes:
        numbers: of an observation; each is a token.
        frame: lines and columns of the picture that is observed instead.
        actions: tokens of an action.
        choices: how many values a discrete action has; 0: actions are numbers between -1 and 1.
    """

    numbers: int = 0
    frame: tuple[int, int] | None = None
    actions: int = 1
    choices: int = 0

    @property
    def observed(self) -> int:
        """Tokens of an observation."""
        if self.frame is None:
            return self.numbers
        return (self.frame[0] // PATCH[0]) * (self.frame[1] // PATCH[1])

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.observed + 1 + self.actions

    @property
    def allowed(self) -> range:
        """Ids that an action's tokens may have."""
        return range(self.choices) if self.choices else range(CONTINUOUS, CONTINUOUS + BINS)


# --------------------------------------------------------------------------------------- tokens of numbers


def mu_law(values: Any) -> Any:
    """Numbers of any size to -1 and 1 and, far out, beyond: fine steps near 0, steps of 2 % from 1 on."""
    return np.sign(values) * np.log(np.abs(values) * MU + 1.0) / np.log(MU_RANGE * MU + 1.0)


def binned(values: Any) -> Any:
    """Ids of numbers between -1 and 1, by bins of one width; what lies outside falls into the last ones."""
    bins = np.floor((np.asarray(values, np.float64) + 1.0) * (BINS / 2))
    return (CONTINUOUS + bins.clip(0, BINS - 1)).astype(np.int16)


def observation_tokens(values: Any) -> Any:
    """Ids of observations, which may have any size."""
    return binned(mu_law(np.asarray(values, np.float64)))


def numbers_of(tokens: Any) -> Any:
    """The middles of the tokens' bins, float32 numbers between -1 and 1."""
    return ((np.asarray(tokens, np.float64) - CONTINUOUS + 0.5) * (2 / BINS) - 1.0).astype(np.float32)


# ------------------------------------------------------------------------------------------- the transformer


def smooth_table(rows: int, width: int, waves: int = 64) -> Tensor:
    """(rows, width) first values of a table for bins: neighbours are alike, as learned ones come to be.

    Sums of cosines over the bins with random factors, the shorter the wave the smaller, of unit variance.
    """
    place = (torch.arange(rows) + 0.5) / rows
    wave = torch.arange(waves)
    table = torch.cos(math.pi * wave * place[:, None]) / (1 + wave / 8)
    table = table @ torch.randn(waves, width)
    return table / table.std()


class Block(nn.Module):
    """Attention to the tokens before, and a layer of gated units; each reads a normed copy and adds to the token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_units = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.units, self.back = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(
        self, x: Tensor, seen: Tensor, asked: Tensor | None = None, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(B, Q, width), and keys and values.

        Args:
            x: (B, T, width) tokens.
            seen: (B, 1, Q, T) bool: which tokens each one that is asked for looks at.
            asked: places of those that are wanted, (Q,); all by default.
            past: keys and values of tokens before these.
        """
        normed = self.norm_attention(x)
        key, value = (self._split(each) for each in self.key_value(normed).chunk(2, -1))
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        if asked is not None:
            x, normed = x[:, asked], normed[:, asked]
        looked = functional.scaled_dot_product_attention(self._split(self.query(normed)), key, value, attn_mask=seen)
        x = x + self.out(looked.transpose(1, 2).flatten(2))
        gate, unit = self.units(self.norm_units(x)).chunk(2, -1)
        return x + self.back(functional.gelu(gate) * unit), (key, value)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Patches(nn.Module):
    """(N, lines, columns) bytes to (N, patches, width): a residual block over each patch, and the patch's place."""

    def __init__(self, frame: tuple[int, int], width: int, channels: int = 8) -> None:
        super().__init__()
        self.lines, self.columns = frame[0] // PATCH[0], frame[1] // PATCH[1]
        self.root = nn.Conv2d(1, channels, 3, padding=1)
        self.block = nn.Sequential()
        for _ in range(2):
            self.block.extend([nn.GroupNorm(channels // 2, channels), nn.GELU()])
            self.block.append(nn.Conv2d(channels, channels, 3, padding=1))
        self.out = nn.Linear(channels * PATCH[0] * PATCH[1], width)
        self.line = nn.Parameter(0.3 * torch.randn(self.lines, 1, width))
        self.column = nn.Parameter(0.3 * torch.randn(self.columns, width))

    def forward(self, frames: Tensor) -> Tensor:
        pixels = frames.float() / 127.5 - 1.0
        patches = pixels.unflatten(1, (self.lines, PATCH[0])).unflatten(3, (self.columns, PATCH[1]))
        patches = patches.transpose(2, 3).flatten(0, 2)[:, None]
        x = self.root(patches)
        x = self.out((x + self.block(x)).flatten(1))
        return x.unflatten(0, (len(frames), -1)) + (self.line + self.column).flatten(0, 1)


class Gato(nn.Module):
    """One transformer over the tokens of all tasks.

    Args:
        shapes: of the tasks, by name. All frames are of one size.
        window: steps of a sequence.
    """

    def __init__(
        self, shapes: dict[str, Shape], window: int, *, width: int = 128, layers: int = 3, heads: int = 4
    ) -> None:
        super().__init__()
        self.shapes, self.window = shapes, window
        self.token = nn.Embedding(VOCABULARY, width)
        self.token.weight.data[CONTINUOUS:SEPARATOR] = smooth_table(BINS, width)
        self.token.weight.data *= 0.5
        # A place within an observation, one for all of an action, and a place within the sequence.
        self.observed = nn.Parameter(0.3 * torch.randn(max(shape.observed for shape in shapes.values()), width))
        self.acted = nn.Parameter(0.3 * torch.randn(width))
        self.place = nn.Parameter(0.1 * torch.randn(window * max(shape.tokens for shape in shapes.values()), width))
        frames = [shape.frame for shape in shapes.values() if shape.frame]
        self.patches = Patches(frames[0], width) if frames else None
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, SEPARATOR)
        nn.init.zeros_(self.head.bias)
        self.head.weight.data[CONTINUOUS:] = smooth_table(BINS, width)
        self.head.weight.data *= 0.05

    def loss(self, task: str, tokens: Tensor, frames: Tensor | None, mask: Tensor) -> Tensor:
        """The mean cross-entropy of the action tokens of real steps.

        Args:
            tokens: (B, W, at least numbers + actions) ids: an observation's numbers, then an action.
            frames: (B, W, lines, columns) bytes where the task has pictures.
            mask: (B, W) bool: the steps that are.
        """
        shape = self.shapes[task]
        actions = tokens[..., shape.numbers : shape.numbers + shape.actions].long()
        x = self.embed(task, tokens, frames).flatten(1, 2)
        first = shape.observed + torch.arange(shape.actions)  # the separator tells the first, that one the second, ...
        asked = (shape.tokens * torch.arange(mask.shape[1])[:, None] + first).flatten()
        x, _ = self.think(x, self.seen(task, mask), asked)
        logits = self.head(self.norm(x)).unflatten(1, (-1, shape.actions))
        return functional.cross_entropy(logits[mask].flatten(0, 1), actions[mask].flatten())

    def embed(self, task: str, tokens: Tensor, frames: Tensor | None) -> Tensor:
        """(B, W, tokens of a step, width)."""
        shape, ids = self.shapes[task], tokens.long()
        if frames is not None:
            assert self.patches is not None
            observed = self.patches(frames.flatten(0, 1)).unflatten(0, frames.shape[:2])
        else:
            observed = self.token(ids[..., : shape.numbers])
        observed = observed + self.observed[: shape.observed]
        actions = self.token(ids[..., shape.numbers : shape.numbers + shape.actions]) + self.acted
        separator = self.token.weight[SEPARATOR].expand(*ids.shape[:2], 1, -1)
        x = torch.cat([observed, separator, actions], 2)
        return x + self.place[: ids.shape[1] * shape.tokens].unflatten(0, (-1, shape.tokens))

    def seen(self, task: str, mask: Tensor) -> Tensor:
        """(B, 1, T, T) bool: a token sees itself and those of real steps before it."""
        real = mask.repeat_interleave(self.shapes[task].tokens, 1)
        tokens = real.shape[1]
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        # Padding sees itself, because attention to nothing at all would give NaN.
        return (real[:, None, None, :] & causal) | torch.eye(tokens, dtype=torch.bool)

    def think(self, x: Tensor, seen: Tensor, asked: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        """What the layers make of the tokens `asked` for; only the last layer can leave the others out."""
        cache: Cache = []
        for number, layer in enumerate(self.layers):
            before = past[number] if past else None
            if number + 1 < len(self.layers):
                x, kept = layer(x, seen, None, before)
            else:
                x, kept = layer(x, seen[:, :, asked], asked, before)
            cache.append(kept)
        return x, cache

    @torch.inference_mode()
    def act(self, task: str, tokens: Tensor, frames: Tensor | None, mask: Tensor) -> Tensor:
        """(B, actions) ids of the action of each window's last step, one token after the other.

        A number is the median of what the model expects, given the numbers before it, a discrete action the likeliest.
        Arguments as of `loss`; the last step's action is not looked at.
        """
        shape = self.shapes[task]
        x = self.embed(task, tokens, frames).flatten(1, 2)
        known = x.shape[1] - shape.actions
        seen = self.seen(task, mask)
        # All but the action first; then one token after the other, to the keys and values of those before.
        x, cache = self.think(x[:, :known], seen[:, :, :known, :known], torch.tensor([known - 1]))
        chosen: list[Tensor] = []
        places = self.place[tokens.shape[1] * shape.tokens - shape.actions :]
        while True:
            logits = self.head(self.norm(x[:, -1]))[:, shape.allowed.start : shape.allowed.stop]
            chosen.append(shape.allowed.start + middle(logits, ordered=not shape.choices))
            if len(chosen) == shape.actions:
                return torch.stack(chosen, 1)
            x = (self.token(chosen[-1]) + self.acted + places[len(chosen) - 1])[:, None]
            at = known + len(chosen)
            x, cache = self.think(x, seen[:, :, at - 1 : at, :at], torch.tensor([0]), cache)


def middle(logits: Tensor, ordered: bool) -> Tensor:
    """(B,) the likeliest of (B, N) values; where they are `ordered`, the median, which single peaks do not sway."""
    if not ordered:
        return logits.argmax(1)
    return (logits.softmax(1).cumsum(1) < 0.5).sum(1).clamp(max=logits.shape[1] - 1)
