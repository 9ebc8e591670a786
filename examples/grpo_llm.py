"""GRPO on a Hugging Face decoder: prompts, answers, rewards, advantages, reference and learner work by tasks.

    pip install "geartrain[torch,cli,plot,transformers]"
    python examples/grpo_llm_run.py                    # 3 seeds, a few minutes; downloads nothing
    python examples/grpo_llm_run.py --tool             # products, for which the model learns to ask a calculator
    python examples/grpo_llm_run.py --kill-every 20    # a random process is killed, again and again

    loader --prompts--> rollouts --answers--> reward --> advantage --> reference --> learners
                           ^----------------------- weights ------------------------------'

A row is a prompt with its answers, as bytes. Each process claims the rows that are due for its task. A decoder of half
a million parameters first sees solved problems until some of its answers are right. From then on a program checks the
answers, and GRPO makes the right ones likelier. This file has the processes; grpo_llm_run.py starts and measures them.

After a death:

- The claims of the dead process are due again, and an answer that it began is continued.
- All learners start again, load the last checkpoint, and train the steps behind it again on the same rows, because the
  store keeps trained rows until `replay.saved`.
- The loader continues behind the number that it noted last. It notes a number before it inserts the prompts up to it: a
  death in between skips these prompts, and none comes twice.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt
from geartrain import launch

GROUP, PROMPTS = 8, 16  # answers to a prompt, prompts of a batch
TURN, MOST = 12, 32  # most tokens of one turn of the model, and of an answer
CLIP, BETA, RATE = 0.2, 0.01, 3e-4
IN_FLIGHT = 2 * PROMPTS  # rows whose batch is not trained: answers are at most about one update old


def per_token(dtype: str) -> gt.Field:
    return gt.Field(("tokens",), dtype)


def per_answer(dtype: str, **options: Any) -> gt.Field:
    return gt.Field(("answers",), dtype, **options)


FIELDS = {"number": gt.Field((), "int64"), "prompt": gt.Field(("prompt",), "uint8")}
TASKS = {
    "answer": gt.Task(
        {
            "ids": per_token("uint8"),
            "log_prob": per_token("float32"),  # of each token when it was written
            "mask": per_token("bool"),  # which tokens the model wrote, and not the tool
            "length": per_answer("int32", divides="tokens"),
        },
        keep_partial=True,
    ),
    "reward": gt.Task({"reward": per_answer("float32")}, after="answer"),
    "advantage": gt.Task({"advantage": per_answer("float32")}, after="reward"),
    "ref": gt.Task({"ref": per_token("float32")}, after="advantage"),  # log-probabilities of the supervised model
    "train": gt.Task(after="ref"),
}


# --------------------------------------------------------------------------------- problems, and who checks them


def problem(rng: np.random.Generator, tool: bool) -> tuple[str, int]:
    """A prompt and its result."""
    a, b = rng.integers(10, 100, 2) if tool else rng.integers(20, size=2)
    return (f"{a}*{b}=", int(a * b)) if tool else (f"{a}+{b}=", int(a + b))


def example(rng: np.random.Generator, tool: bool) -> tuple[str, str, list[bool]]:
    """A prompt, an answer, and which of its characters the model shall write. With a tool three of four guess."""
    prompt, result = problem(rng, tool)
    if not tool:
        answer = f"{result}\n"
    elif rng.integers(4):
        answer = f"{rng.integers(100, 10_000)}\n"
    else:
        call = f"[{prompt[:-1]}]"
        return prompt, f"{call}{result}\n", [True] * len(call) + [False] * len(str(result)) + [True]
    return prompt, answer, [True] * len(answer)


def calculate(said: bytes) -> bytes:
    """What the tool answers to the call that ends here, such as b"[12*3]"."""
    found = re.search(rb"\[(\d{1,3})([+*])(\d{1,3})\]$", said)
    if found is None:
        return b"?"
    a, sign, b = int(found[1]), found[2], int(found[3])
    return b"%d" % (a + b if sign == b"+" else a * b)


def tool_turn(said: bytes) -> tuple[bytes, np.ndarray]:
    """The tool's answer, in the place of the model's, with log-probabilities that nobody counts."""
    answer = calculate(said)
    return answer, np.zeros(len(answer), np.float32)


def is_right(prompt: bytes, answer: bytes) -> bool:
    """Whether an answer ends with the result; what stands before a tool's answer does not count."""
    return answer.rpartition(b"]")[2] == calculate(b"[%s]" % prompt[:-1]) + b"\n"


def turn_after(said: bytes) -> str:
    """Who goes on with an answer: "model", "tool" or "nobody"."""
    if said.endswith(b"\n") or len(said) > MOST - TURN:
        return "nobody"
    return "tool" if said.endswith(b"]") else "model"


# --------------------------------------------------------------------------------------------------- the model


def make_model() -> nn.Module:
    """A decoder of 0.5 M parameters from its configuration; nothing is downloaded."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise SystemExit("this example needs transformers: pip install 'geartrain[transformers]'") from None
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.set_num_threads(1)
    return LlamaForCausalLM(config)


def log_probs(model: nn.Module, ids: Tensor, position_ids: Tensor) -> Tensor:
    """(t,) log-probability of each token of packed sequences (t,), from those before it in its sequence.

    The model attends within sequences, whose begins it sees by the position 0. Their first tokens have no probability.
    """
    ids = ids.long()
    logits = model(input_ids=ids[None], position_ids=position_ids[None], use_cache=False).logits[0]
    following = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return torch.cat([following.new_zeros(1), following])


@torch.no_grad()
def write(model: Any, texts: list[bytes]) -> list[tuple[bytes, np.ndarray]]:
    """The model's next turn behind each text, and the log-probability of each of its tokens."""
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + list(text) for text in texts])
    out = model.generate(
        ids,
        attention_mask=(ids != 0).long(),
        do_sample=True,
        top_k=0,
        max_new_tokens=TURN,
        eos_token_id=list(b"\n]"),
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = out.sequences[:, width:]
    log_prob = torch.stack(out.logits, 1).log_softmax(-1).gather(2, new[:, :, None])[:, :, 0].numpy()
    turns = [re.match(rb"[^\n\]]*[\n\]]?", bytes(row))[0] for row in new.tolist()]
    return [(turn, its[: len(turn)]) for turn, its in zip(turns, log_prob, strict=True)]


# ------------------------------------------------------------------ the loader, and a function or class for each task


def load(context: Any, seed: int, tool: bool, folder: str) -> None:
    """Inserts numbered prompts, and waits while enough rows are in flight."""
    store, noted, rows, waited_s = context.store(), Path(folder, "next-prompt"), 0, 0.0
    while not context.stopping:
        first = int(noted.read_text()) if noted.exists() else 0
        numbers = list(range(first, first + 4))
        write_file(noted, functools.partial(Path.write_text, data=f"{first + 4}"))
        prompts = [problem(np.random.default_rng([seed, 1, number]), tool)[0] for number in numbers]
        began_s = time.perf_counter()
        store.insert({"number": numbers, "prompt": [list(prompt.encode()) for prompt in prompts]})
        rows, waited_s = rows + len(numbers), waited_s + time.perf_counter() - began_s
        context.report(rows=rows, wait_s=waited_s)


class Rollout:
    """Answers prompts with the newest weights, turn after turn; goes on with answers that a dead process began."""

    def __init__(self) -> None:
        self.reader, self.model, self.version = launch.context().reader(), make_model(), -1
        torch.seed()

    def __call__(self, claim: gt.Claim) -> None:
        snapshot = self.reader.latest(timeout_s=600)
        if snapshot.version != self.version:
            self.model.load_state_dict(dict(snapshot))
            self.version = snapshot.version
        del snapshot  # its buffer is the publisher's again
        said = {}
        for row in claim:
            begun = row.partial["ids"]
            said |= {(row, item): begun[item].tobytes() if item in begun else b"" for item in range(GROUP)}
        while said := {its: text for its, text in said.items() if turn_after(text) != "nobody"}:
            asked = [its for its, text in said.items() if turn_after(text) == "model"]
            texts = [row["prompt"].tobytes() + said[row, item] for row, item in asked]
            wrote = dict(zip(asked, write(self.model, texts), strict=True)) if asked else {}
            for row, item in said:
                by_model = (row, item) in wrote
                more, log_prob = wrote[row, item] if by_model else tool_turn(said[row, item])
                row.append(item=item, ids=list(more), log_prob=log_prob, mask=[by_model] * len(more))
                said[row, item] += more
        for row in claim:
            row.put()


class Reward:
    """Checks answers, and notes how many were right while which version of the weights was the newest."""

    def __init__(self, folder: str) -> None:
        self.reader, self.log = launch.context().reader(), Path(folder, "rewards.jsonl")

    def __call__(self, claim: gt.Claim) -> dict[str, Any]:
        rewards, version = [], self.reader.version
        for row in claim:
            answers = [part.tobytes() for part in np.split(row["ids"], np.cumsum(row["length"])[:-1])]
            rewards.append(np.float32([is_right(row["prompt"].tobytes(), answer) for answer in answers]))
        with self.log.open("a") as log:
            log.writelines(json.dumps([version, float(each.mean())]) + "\n" for each in rewards)
        return {"reward": rewards}


def advantage(claim: gt.Claim) -> None:
    """Compares the answers of a prompt. Drops rows whose answers are all equally good: nothing is learned of them."""
    for row in claim:
        rewards = row["reward"]
        if (spread := rewards.std()) > 0.01:
            row.put(advantage=(rewards - rewards.mean()) / spread)
        else:
            row.drop()


class Reference:
    """Log-probabilities of the answers under the supervised model."""

    def __init__(self, folder: str) -> None:
        self.model, file = make_model(), Path(folder, "supervised.pt")
        while not file.exists():
            time.sleep(0.1)
        self.model.load_state_dict(torch.load(file))

    @torch.no_grad()
    def __call__(self, claim: gt.Claim) -> dict[str, Any]:
        both = claim.joined("prompt", "ids")
        return {"ref": both.part("ids", log_probs(self.model, both.values, both.position_ids))}


# ------------------------------------------------------------------------------------------------ the learners


def write_file(path: Path, write_to: Callable[[Path], Any]) -> None:
    """Writes a file that is there whole or not at all."""
    beside = path.with_suffix(".new")
    write_to(beside)
    beside.replace(path)


def supervise(model: nn.Module, steps: int, rng: np.random.Generator, tool: bool) -> None:
    """The supervised phase: examples, until some of the answers are right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    for step in range(steps):
        parts = [example(rng, tool) for _ in range(64 // dist.get_world_size())]
        ids = torch.tensor([byte for prompt, answer, _ in parts for byte in (prompt + answer).encode()])
        places = torch.cat([torch.arange(len(prompt + answer)) for prompt, answer, _ in parts])
        own = torch.tensor([each for prompt, _, mask in parts for each in [False] * len(prompt) + mask])
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 50)
        optimizer.zero_grad()
        (-log_probs(model, ids, places)[own].mean()).backward()
        optimizer.step()


def objective(new: Tensor, old: Tensor, ref: Tensor, gain: Tensor, mask: Tensor) -> Tensor:
    """GRPO's loss, with a penalty for leaving the reference: a sum over the tokens that the model wrote."""
    ratio = (new - old).exp()
    better = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
    away = (ref - new).exp() - (ref - new) - 1
    return -(better - BETA * away)[mask].sum()


def learn(context: Any, **options: Any) -> None:
    dist.init_process_group("gloo")
    train(context, **options)
    dist.destroy_process_group()


def train(context: Any, steps: int, supervised: int, save_every: int, seed: int, tool: bool, folder: str) -> None:
    """One rank. Trains, publishes and saves; after a death it continues from the last checkpoint."""
    store = context.store(FIELDS, tasks=TASKS, capacity=IN_FLIGHT + PROMPTS * (save_every + 2), span_bytes=1 << 24)
    store.limiter.set(in_flight=IN_FLIGHT)
    rank, world_size = context.rank, context.world_size
    begin, file = Path(folder, "supervised.pt"), Path(folder, "learner.pt")
    torch.manual_seed(seed)
    model = make_model()
    ranks = DistributedDataParallel(model)
    if begin.exists():
        model.load_state_dict(torch.load(begin))
    else:
        supervise(ranks, supervised, np.random.default_rng([seed, 2, rank]), tool)
        if rank == 0:
            write_file(begin, functools.partial(torch.save, model.state_dict()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    replay = gt.Replay(
        store,
        gt.selection.Fifo(),
        PROMPTS,
        group=gt.RankOptions(dist.group.WORLD, balance="tokens"),
        options=gt.ReplayOptions(keep="saved"),
        prefetch=0,
    )
    publisher = context.publisher(clock=store) if rank == 0 else None
    with context.watch(replay), Path(folder, f"learner-{rank}.jsonl").open("a", buffering=1) as log:
        if file.exists():
            state = torch.load(file, weights_only=False)
            for name, each in (("model", model), ("optimizer", optimizer), ("replay", replay)):
                each.load_state_dict(state[name])
        if publisher is not None:
            publisher.publish(replay.step, model.state_dict())
        first = replay.step
        while replay.step < steps:
            batch = replay.sample()
            for mini in batch.mini_batches(PROMPTS // 2, seed=seed):  # the same rows on any number of ranks
                for micro in mini.micro_batches(max_items=256, of=("prompt", "tokens")):
                    both = micro.joined("prompt", "ids")
                    new = both.part("ids", log_probs(ranks, both.values, both.position_ids))
                    gain = micro.expand("advantage")
                    loss = objective(new, micro["log_prob"], micro["ref"], gain, micro["mask"])
                    (micro.weight * world_size * loss / mini.total("mask")).backward()  # DDP divides by world_size
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            done = batch.step + 1
            if publisher is not None:
                publisher.publish(done, model.state_dict())
            context.report(steps=done - first, version=done)
            noted = {
                "step": batch.step,
                "rows": batch["number"].tolist(),
                "versions": batch.version.tolist(),
                "tokens": len(batch["ids"]),
                "time": time.time(),
            }
            log.write(json.dumps(noted) + "\n")
            if done % save_every == 0 or done == steps:
                if rank == 0:
                    parts = {"model": model, "optimizer": optimizer, "replay": replay}
                    state = {name: each.state_dict() for name, each in parts.items()}
                    write_file(file, functools.partial(torch.save, state))
                dist.barrier()  # the checkpoint is there
                replay.saved(batch.step)
