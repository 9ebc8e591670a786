"""A tiny language model learns to sort digits from rewards alone: GRPO, with groups chosen by the store.

    pip install "geartrain[torch,cli,plot]"
    python examples/grpo_toy.py   # three CPU minutes; downloads nothing

A sampler, in a process of its own, takes the newest weights, answers each prompt several times and writes the answers
as rows: tokens, their log-probabilities, the reward, and the version of the model that wrote them. The learner draws
whole groups of answers to one prompt, none of them more than a few versions old, and raises the probability of those
that are better than their group. The reward is a program: the share of digits that stand where they belong.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import multiprocessing.process
import os
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
from rich import console
from torch import Tensor, nn
from torch.nn import functional

import curves
import geartrain as gt
from geartrain import weights

DIGITS = 5  # of a prompt; the text is the prompt, "=", and the same digits in order
EQUALS, WORDS, TEXT = 10, 11, 2 * DIGITS + 1
GROUP = 8  # answers to one prompt
MAX_STALE = 4  # versions that a row may be old when it is drawn
FIELDS = {
    "prompt": gt.Field((), "int64", per_row=True),  # numbers the groups
    "text": gt.Field((), "uint8"),
    "log_prob": gt.Field((), "float32"),  # of each token when it was written; 0 for the prompt's
    "reward": gt.Field((), "float32", per_row=True),
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ask, self.answer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.ask(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.answer(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x))


class LanguageModel(nn.Module):
    """(B, t) tokens to the logits of each one's successor, (B, t, DIGITS)."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(WORDS, width), nn.Parameter(0.1 * torch.randn(TEXT, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.word(text) + self.place[: text.shape[1]])))


def make_prompts(n: int, rng: np.random.Generator) -> Tensor:
    """(n, DIGITS + 1): random digits and the sign that asks for the answer."""
    prompts = rng.integers(10, size=(n, DIGITS + 1))
    prompts[:, -1] = EQUALS
    return torch.from_numpy(prompts)


@torch.no_grad()
def complete(model: LanguageModel, prompts: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The whole texts and their tokens' log-probabilities, (n, TEXT) both; the likeliest tokens without a generator."""
    text, log_probs = prompts, torch.zeros(len(prompts), TEXT)
    for at in range(DIGITS + 1, TEXT):
        log_prob = model(text)[:, -1].log_softmax(-1)
        if generator is None:
            token = log_prob.argmax(-1, keepdim=True)
        else:
            token = torch.multinomial(log_prob.exp(), 1, generator=generator)
        log_probs[:, at] = log_prob.gather(1, token)[:, 0]
        text = torch.cat([text, token], 1)
    return text, log_probs


def right_places(text: Tensor) -> Tensor:
    """(n, DIGITS): which digits of each answer are the ones that belong there."""
    return text[:, DIGITS + 1 :] == text[:, :DIGITS].sort(1).values


# ---------------------------------------------------------------------------------------- the sampler's process


def write_answers(store_name: str, prompts_at_once: int, seed: int, timeout_s: float) -> None:
    """Answers prompts with the newest weights until it is ended; the store's limiter makes it wait for the learner."""
    torch.set_num_threads(1)
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    model, number = LanguageModel(), 0
    with gt.Store.open(store_name) as store, weights.Reader(store_name) as reader:
        while True:
            snapshot = reader.latest(timeout_s=timeout_s)
            model.load_state_dict(dict(snapshot))
            prompts = make_prompts(prompts_at_once, rng).repeat_interleave(GROUP, 0)
            text, log_probs = complete(model, prompts, generator)
            rewards = right_places(text).float().mean(1)
            groups = number + torch.arange(prompts_at_once).repeat_interleave(GROUP)
            answers = {"prompt": groups, "text": text.to(torch.uint8), "log_prob": log_probs, "reward": rewards}
            store.insert(answers, versions=[snapshot.version] * len(text))  # all of them, or none
            number += prompts_at_once


@contextlib.contextmanager
def sampling(store_name: str, chosen: argparse.Namespace) -> Iterator[multiprocessing.process.BaseProcess]:
    """The process that does it, for as long as the block runs."""
    process = multiprocessing.get_context("spawn").Process(
        target=write_answers,
        args=(store_name, chosen.prompts // 2, chosen.seed + 1, chosen.timeout_s),
        daemon=True,
    )
    process.start()
    try:
        yield process
    finally:
        process.terminate()
        process.join()


# ------------------------------------------------------------------------------------------------ the learner


def loss_of(model: LanguageModel, batch: gt.Batch, clip: float = 0.2) -> tuple[Tensor, Tensor]:
    """GRPO's loss, and how far the model has moved from the one that wrote the rows (share of clipped tokens)."""
    reward = batch["reward"].reshape(-1, GROUP)  # members of a group stand side by side
    advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).reshape(-1, 1)
    text = batch["text"].long()
    logits = model(text[:, :-1])[:, DIGITS:]
    log_prob = logits.log_softmax(-1).gather(2, text[:, DIGITS + 1 :, None])[..., 0]
    ratio = (log_prob - batch["log_prob"][:, DIGITS + 1 :]).exp()
    kept = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return -kept.mean(), ((ratio - 1).abs() > clip).float().mean()


def learn(
    chosen: argparse.Namespace, store: gt.Store, curve: curves.Curve, screen: console.Console
) -> dict[str, float]:
    torch.manual_seed(chosen.seed)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.rate, betas=(0.9, 0.98), weight_decay=0.0)
    questions = make_prompts(500, np.random.default_rng([chosen.seed, 1]))
    version, stale, clipped = 1, np.zeros(MAX_STALE + 1), 0.0

    rows = chosen.prompts * GROUP  # of a batch
    store.limiter.set(
        samples_per_insert=chosen.samples_per_row,
        min_size_to_sample=2 * rows,
        error_buffer=rows * max(1.0, chosen.samples_per_row),
    )
    selection = gt.selection.GroupSampling(
        "prompt", GROUP, seed=chosen.seed, limits=gt.selection.Limits(min_version=lambda: version - MAX_STALE)
    )
    with (
        weights.Publisher(store.name) as publisher,
        curves.bars(screen) as bars,
        sampling(store.name, chosen) as sampler,
        # prefetch=0: what is drawn is drawn now, so that no row is older than the limit when it is trained on.
        gt.Replay(store, selection, rows, prefetch=0, num_batches=chosen.steps, timeout_s=chosen.timeout_s) as replay,
    ):
        publisher.publish(version, model.state_dict())
        bar = bars.add_task("the sampler starts", total=chosen.steps)
        began_s = None
        for step, batch in enumerate(replay, start=1):
            began_s = began_s or time.perf_counter()
            stale += np.bincount(version - batch.version.numpy(), minlength=MAX_STALE + 1)
            for group in optimizer.param_groups:
                group["lr"] = chosen.rate * min(1.0, step / 20) * (1.02 - step / chosen.steps)
            loss, moved = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            version += 1
            publisher.publish(version, model.state_dict())
            clipped += float(moved)
            bars.update(bar, advance=1)
            if step % chosen.evaluate_every == 0 or step == chosen.steps:
                solved = right_places(complete(model, questions, None)[0]).all(1).float().mean().item()
                curve.point(step, solved)
                words = f"reward {batch['reward'].mean():.2f}, sorted {100 * solved:.1f} %"
                bars.update(bar, description=words)
                bars.console.print(f"step {step:>5}: {words}")
                if not sampler.is_alive():
                    raise SystemExit("the sampler died; its traceback is above")
        train_s, waited = time.perf_counter() - began_s, replay.stats()["wait_share"]
    return {
        "solved": solved,
        "steps": step,
        "answers": store.stats()["inserted"],
        "mean_staleness": float((stale * np.arange(len(stale))).sum() / stale.sum()),
        "greatest_staleness": int(np.flatnonzero(stale).max()),
        "clipped_share": clipped / step,
        "wait_share": waited,
        "train_s": train_s,
    }


def main(arguments: list[str] | None = None) -> int:
    text = curves.options(__doc__)
    text.add_argument("--steps", type=int, help="of the learner, a version of the weights each (800)")
    text.add_argument("--prompts", type=int, default=32, help=f"of a batch, with {GROUP} answers each (32)")
    text.add_argument("--rate", type=float, default=1e-3, help="learning rate at its peak (1e-3)")
    text.add_argument("--samples-per-row", type=float, default=1.0, help="how often an answer is trained on (1)")
    text.add_argument("--evaluate-every", type=int, default=50, help="steps (50)")
    text.add_argument("--timeout-s", type=float, default=300.0, help="how long to wait for answers or weights (300)")
    chosen = text.parse_args(arguments)
    chosen.steps = chosen.steps or (6 if chosen.tiny else 800)
    if chosen.tiny:
        chosen.prompts = 4
    curves.prepare()
    screen = console.Console()
    curve = curves.Curve("GRPO: sorting five digits", "learner steps", "share of prompts sorted", chosen, promise=0.95)
    with gt.Store.create(f"grpo-{os.getpid()}", FIELDS, max_length=TEXT, capacity=16 * chosen.prompts * GROUP) as store:
        result = learn(chosen, store, curve, screen)
    finished = curve.finish(**result)["result"]
    screen.print(", ".join(f"{name} {value:,.3g}" for name, value in finished.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
