"""A store whose rows are prompts with their answers, and the work of each of its tasks.

Every value follows from the prompt's number, so that whoever draws a row can tell whether it is whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain as gt

ANSWERS = 3


def tokens(dtype: str) -> gt.Field:
    return gt.Field(("tokens",), dtype)


def answers(dtype: str, **options: Any) -> gt.Field:
    return gt.Field(("answers",), dtype, **options)


FIELDS = {"prompt": gt.Field(("prompt",), "int32"), "id": gt.Field((), "int64")}
TASKS = {
    "answer": gt.Task(
        {"ids": tokens("int32"), "log_prob": tokens("float32"), "length": answers("int32", divides="tokens")},
        keep_partial=True,
    ),
    "reward": gt.Task({"reward": answers("float32")}, after="answer", rewritable=True),
    "ref": gt.Task({"ref": tokens("float32")}, after="answer"),
    "advantage": gt.Task({"advantage": answers("float32")}, after="reward"),
    "train": gt.Task(after=("ref", "advantage")),
}


def new_store(name: str | None = None, **options: Any) -> gt.Store:
    given = {"capacity": 64, "span_bytes": 1 << 20, "reserve": False, **options}
    if name is None:
        return gt.Store.create(FIELDS, tasks=TASKS, **given)
    return gt.Store.open(name, FIELDS, tasks=TASKS, create="missing", adopt=True, **given)


def prompt_of(number: int) -> NDArray[np.int32]:
    return np.full(1 + number % 5, number, np.int32)


def insert(store: gt.Store, numbers: range | list[int], **options: Any) -> gt.Keys:
    return store.insert({"prompt": [prompt_of(each) for each in numbers], "id": list(numbers)}, **options)


def answer_of(number: int, item: int) -> NDArray[np.int32]:
    """What is appended to an answer, in turns."""
    return np.arange((number + 2 * item) % 7 + 1, dtype=np.int32) + 100 * number + 10 * item


def lengths_of(number: int) -> list[int]:
    return [len(answer_of(number, item)) for item in range(ANSWERS)]


def ids_of(number: int) -> NDArray[np.int32]:
    return np.concatenate([answer_of(number, item) for item in range(ANSWERS)])


def append(row: gt.ClaimedRow, number: int) -> None:
    """Answers in turns of two tokens, interleaved, from where they were left on."""
    begun = row.partial.lengths
    for at in range(0, 8, 2):
        for item in range(ANSWERS):
            turn = answer_of(number, item)[at : at + 2]
            if begun.get(item, 0) <= at and len(turn):
                row.append(item=item, ids=turn, log_prob=-turn.astype(np.float32))


def work(store: gt.Store, task: str, claim: gt.Claim) -> None:
    numbers = np.asarray(claim["id"]).tolist()
    if task == "answer":
        for row, number in zip(claim, numbers, strict=True):
            assert np.asarray(row["prompt"]).tolist() == prompt_of(number).tolist()
            append(row, number)
            row.put()
    elif task == "reward":
        sums = np.add.reduceat(np.asarray(claim["ids"]), np.asarray(claim.cu_seqlens)[:-1])
        claim.put(reward=sums.astype(np.float32))
    elif task == "ref":
        claim.put(ref=np.asarray(claim["ids"]).astype(np.float32) / 2)
    else:
        claim.put(advantage=np.asarray(claim["reward"]) * 2)


def check(batch: Any) -> list[int]:
    """Checks the rows that a replay has drawn, and returns their numbers."""
    numbers: list[int] = np.asarray(batch["id"]).tolist()
    at = first = 0
    for number in numbers:
        mine = slice(at, at + sum(lengths_of(number)))
        its = slice(first, first + ANSWERS)
        ids = ids_of(number)
        assert np.asarray(batch["ids"])[mine].tolist() == ids.tolist()
        assert np.asarray(batch["log_prob"])[mine].tolist() == (-ids).tolist()
        assert np.asarray(batch["ref"])[mine].tolist() == (ids / 2).tolist()
        assert np.asarray(batch["length"])[its].tolist() == lengths_of(number)
        sums = [float(answer_of(number, item).sum()) for item in range(ANSWERS)]
        assert np.asarray(batch["reward"])[its].tolist() == sums
        assert np.asarray(batch["advantage"])[its].tolist() == [2 * each for each in sums]
        at, first = mine.stop, its.stop
    return numbers
