"""A tiny language model learns to sort digits from rewards alone: GRPO, with rows that pass through tasks.

    pip install "geartrain[torch,cli,plot]"
    python examples/grpo_toy.py   # two CPU minutes; downloads nothing

A row is a prompt. A rollout process answers it several times with the newest weights, a reward loop scores the answers,
and an advantage loop compares them with each other. Groups whose answers are all equally good are dropped. The learner
draws the rest, oldest first, each once. The reward is a program: the share of digits that stand where they belong.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from rich import console
from torch import Tensor, nn
from torch.nn import functional

import curves
import geartrain as gt
from geartrain import weights
from geartrain.errors import StoreClosedError

DIGITS = 5  # of a prompt; the text is the prompt, "=", and the same digits in order
EQUALS, WORDS, TEXT = 10, 11, 2 * DIGITS + 1
GROUP, CLIP = 8, 0.2  # answers to one prompt
MAX_STALE = 4  # batches of prompts in the store, and so the most versions between an answer and its use
FIELDS = {"prompt": gt.Field(("digits",), "int64")}
TASKS = {
    "answer": gt.Task(
        {
            "ids": gt.Field(("tokens",), "int64"),
            "log_prob": gt.Field(("tokens",), "float32"),  # of each token when it was written
            "length": gt.Field(("answers",), "int32", divides="tokens"),
            "version": gt.Field((), "int64"),  # of the weights
        }
    ),
    "reward": gt.Task({"reward": gt.Field(("answers",), "float32")}, after="answer"),
    "advantage": gt.Task({"advantage": gt.Field(("answers",), "float32")}, after="reward"),
    "train": gt.Task(after="advantage"),
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
    """The whole texts (n, TEXT), log-probabilities of the answers (n, DIGITS); likeliest tokens without a generator."""
    text, log_probs = prompts, torch.zeros(len(prompts), DIGITS)
    for at in range(DIGITS):
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


# ------------------------------------------------------------------------------------------------- the tasks


def load(store: gt.Store, seed: int) -> None:
    rng = np.random.default_rng(seed)
    while True:
        store.insert({"prompt": list(make_prompts(4, rng))})  # waits for room


def answer(store_name: str, most: int, seed: int, timeout_s: float) -> None:
    """The rollout process: answers prompts with the newest weights until it is ended."""
    torch.set_num_threads(1)
    generator, model = torch.Generator().manual_seed(seed), LanguageModel()
    with gt.Store.open(store_name) as store, weights.Reader(store_name) as reader:
        for claim in store.claims("answer", most):
            snapshot, n = reader.latest(timeout_s=timeout_s), len(claim)
            model.load_state_dict(dict(snapshot))
            prompts = claim["prompt"].view(n, -1).repeat_interleave(GROUP, 0)
            text, log_prob = complete(model, prompts, generator)
            ids, log_prob = (list(each.reshape(n, -1)) for each in (text[:, -DIGITS:], log_prob))
            claim.put(ids=ids, log_prob=log_prob, length=[[DIGITS] * GROUP] * n, version=[snapshot.version] * n)


def reward(store: gt.Store) -> None:
    for claim in store.claims("reward", 64):
        claim.put(reward=right_places(texts(claim)).float().mean(1))


def advantage(store: gt.Store) -> None:
    for claim in store.claims("advantage"):
        reward = claim["reward"]
        if (spread := reward.std()) > 0.01:
            claim.put(advantage=(reward - reward.mean()) / spread)
        else:
            claim.drop()  # nothing to learn


def texts(rows: gt.Claim | gt.Batch) -> Tensor:
    """(answers, TEXT): each answer behind its prompt."""
    return rows.joined("prompt", "ids").values.view(-1, TEXT)


def until_closed(loop: Callable[[gt.Store], None], store: gt.Store) -> None:
    with contextlib.suppress(StoreClosedError):
        loop(store)


@contextlib.contextmanager
def working(store: gt.Store, chosen: argparse.Namespace) -> Iterator[None]:
    """All of them for as long as the block runs: rollouts in a process, the short loops in threads."""
    for loop in (functools.partial(load, seed=chosen.seed + 2), reward, advantage):
        threading.Thread(target=until_closed, args=(loop, store), daemon=True).start()
    arguments = (store.name, chosen.prompts // 2, chosen.seed + 1, chosen.timeout_s)
    rollouts = multiprocessing.get_context("spawn").Process(target=answer, args=arguments, daemon=True)
    rollouts.start()
    try:
        yield
    finally:
        rollouts.terminate()
        rollouts.join()


# ------------------------------------------------------------------------------------------------ the learner


def loss_of(model: LanguageModel, text: Tensor, log_prob: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """GRPO's loss, and how far the model has moved from the one that wrote the answers (share of clipped tokens)."""
    logits = model(text[:, :-1])[:, DIGITS:]
    ratio = (logits.log_softmax(-1).gather(2, text[:, DIGITS + 1 :, None])[..., 0] - log_prob).exp()
    kept = torch.minimum(ratio * advantage[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantage[:, None])
    return -kept.mean(), ((ratio - 1).abs() > CLIP).float().mean()


def learn(
    chosen: argparse.Namespace, store: gt.Store, curve: curves.Curve, screen: console.Console
) -> dict[str, float]:
    torch.manual_seed(chosen.seed)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.rate, betas=(0.9, 0.98), weight_decay=0.0)
    questions = make_prompts(500, np.random.default_rng([chosen.seed, 1]))
    version, stale, clipped = 1, np.zeros(MAX_STALE + 1), 0.0

    with (
        weights.Publisher(store.name) as publisher,
        curves.bars(screen) as bars,
        store.expect_writers(),
        working(store, chosen),
        # prefetch=0: what is drawn is drawn now, so that no answer is older than need be.
        gt.Replay(
            store, gt.selection.Fifo(), chosen.prompts, prefetch=0, options=gt.ReplayOptions(timeout_s=chosen.timeout_s)
        ) as replay,
    ):
        publisher.publish(version, model.state_dict())
        bar = bars.add_task("rollouts start", total=chosen.steps)
        began_s = None
        for step, batch in zip(range(1, chosen.steps + 1), replay, strict=False):
            began_s = began_s or time.perf_counter()
            stale += np.bincount(version - batch["version"].numpy(), minlength=MAX_STALE + 1)
            for group in optimizer.param_groups:
                group["lr"] = chosen.rate * min(1.0, step / 20) * (1.02 - step / chosen.steps)
            loss, moved = loss_of(model, texts(batch), batch["log_prob"].view(-1, DIGITS), batch["advantage"])
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
        train_s, waited = time.perf_counter() - began_s, replay.stats()["wait_share"]
    return {
        "solved": solved,
        "steps": step,
        "answers": GROUP * store.task_stats()["answer"]["done"],
        "dropped_share": store.stats()["dropped"] / store.stats()["inserted"],
        "mean_staleness": float((stale * np.arange(len(stale))).sum() / stale.sum()),
        "greatest_staleness": int(np.flatnonzero(stale).max()),
        "clipped_share": clipped / step,
        "wait_share": waited,
        "train_s": train_s,
    }


def main(arguments: list[str] | None = None) -> int:
    text = curves.options(__doc__)
    text.add_argument("--steps", type=int, help="of the learner, a version of the weights each (400)")
    text.add_argument("--prompts", type=int, default=32, help=f"of a batch, with {GROUP} answers each (32)")
    text.add_argument("--rate", type=float, default=1e-3, help="learning rate at its peak (1e-3)")
    text.add_argument("--evaluate-every", type=int, default=50, help="steps (50)")
    text.add_argument("--timeout-s", type=float, default=300.0, help="how long to wait for answers or weights (300)")
    chosen = text.parse_args(arguments)
    chosen.steps = chosen.steps or (6 if chosen.tiny else 400)
    if chosen.tiny:
        chosen.prompts = 4
    curves.prepare()
    screen = console.Console()
    curve = curves.Curve("GRPO: sorting five digits", "learner steps", "share of prompts sorted", chosen, promise=0.95)
    name, rows = f"grpo-{os.getpid()}", MAX_STALE * chosen.prompts
    with gt.Store.create(name, FIELDS, tasks=TASKS, capacity=rows, span_bytes=4096 * rows) as store:
        result = learn(chosen, store, curve, screen)
    finished = curve.finish(**result)["result"]
    screen.print(", ".join(f"{name} {value:,.3g}" for name, value in finished.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
