"""Answers of a language model: lengths of four distributions, values of four fields, and stores that hold them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.schema import Field
from geartrain.core.tasks import Task
from geartrain.store.store import Store

#: What an answer has for each token: 13 bytes.
TOKEN_FIELDS = {"ids": "int32", "log_prob": "float32", "mask": "bool", "version": "int32"}
TOKEN_BYTES = sum(np.dtype(dtype).itemsize for dtype in TOKEN_FIELDS.values())
PROMPT_TOKENS = 20
#: Of a row's values, one array for each field and answer.
Answers = dict[str, list[NDArray[Any]]]


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens: from `low` to `high`, uniform if `mean` is in the middle, else skewed."""

    low: int
    high: int
    mean: float

    @property
    def name(self) -> str:
        """Of a case."""
        mean = "" if 2 * self.mean == self.low + self.high else f", mean {self.mean:,.0f}"
        return f"{self.low:,} to {self.high:,} tokens{mean}"

    def draw(self, n: int, random: np.random.Generator) -> NDArray[np.int64]:
        """n lengths."""
        width = self.high - self.low
        tail = width / (self.mean - self.low) - 1.0  # Beta(1, b) has the mean 1 / (1 + b)
        return np.rint(self.low + width * random.beta(1.0, tail, n)).astype(np.int64)


#: What TransferQueue is measured with, and the three others whose memory is measured.
USUAL = Lengths(200, 2048, 1124.0)
DISTRIBUTIONS = (USUAL, Lengths(20, 2000, 500.0), Lengths(200, 20_000, 5000.0), Lengths(500, 128_000, 9000.0))


def make_answers(lengths: Sequence[int] | NDArray[np.int64], random: np.random.Generator) -> Answers:
    """Noise of each field, cut into answers of these lengths."""
    total, cuts = int(np.sum(lengths)), np.cumsum(lengths)[:-1]
    flat = {
        "ids": random.integers(0, 150_000, total, np.int32),
        "log_prob": -random.random(total, np.float32),
        "mask": random.random(total, np.float32) < 0.9,
        "version": random.integers(0, 100, total, np.int32),
    }
    return {name: [np.ascontiguousarray(one) for one in np.split(values, cuts)] for name, values in flat.items()}


def in_rows(answers: Answers, per_row: int) -> dict[str, list[NDArray[Any]]]:
    """The answers as rows of so many each: an array a field and row, and the lengths of a row's answers."""
    n = len(answers["ids"])
    rows = {
        name: [np.concatenate(values[at : at + per_row]) for at in range(0, n, per_row)]
        for name, values in answers.items()
    }
    rows["length"] = [
        np.array([len(one) for one in answers["ids"][at : at + per_row]], np.int32) for at in range(0, n, per_row)
    ]
    return rows


def nbytes(rows: Mapping[str, Sequence[NDArray[Any]]]) -> int:
    """Of all values."""
    return sum(one.nbytes for values in rows.values() for one in values)


def digest(flat: Mapping[str, Any]) -> str:
    """Hash of the fields of tokens, each with its values one behind the other."""
    found = hashlib.sha256()
    for name in TOKEN_FIELDS:
        found.update(np.ascontiguousarray(flat[name]).tobytes())
    return found.hexdigest()


def answer_fields() -> dict[str, Field]:
    """Of a row with answers."""
    made = {name: Field(("tokens",), dtype) for name, dtype in TOKEN_FIELDS.items()}
    return {**made, "length": Field(("answers",), "int32", divides="tokens")}


def store_of_answers(name: str, rows: int, span_bytes: int) -> Store:
    """A store whose inserts have whole rows, without tasks."""
    return Store.create(name, answer_fields(), capacity=rows, span_bytes=span_bytes)


def store_of_tasks(name: str, tasks: Mapping[str, Task], rows: int, span_bytes: int) -> Store:
    """A store whose inserts have a prompt."""
    prompt = {"prompt": Field(("prompt",), "int32")}
    return Store.create(name, prompt, tasks=tasks, capacity=rows, span_bytes=span_bytes)


def example_tasks() -> dict[str, Task]:
    """Those of the GRPO example."""
    tokens = {"ids": "int32", "log_prob": "float32", "mask": "bool"}
    answer = {name: Field(("tokens",), dtype) for name, dtype in tokens.items()}
    return {
        "answer": Task(
            {**answer, "length": Field(("answers",), "int32", divides="tokens")},
            keep_partial=True,
        ),
        "reward": Task({"reward": Field(("answers",), "float32")}, after="answer"),
        "ref": Task({"ref": Field(("tokens",), "float32")}, after="answer"),
        "advantage": Task({"advantage": Field(("answers",), "float32")}, after="reward"),
        "train": Task(after=("ref", "advantage")),
    }


def prompts(n: int) -> list[NDArray[np.int32]]:
    """n prompts of `PROMPT_TOKENS`."""
    return [np.arange(PROMPT_TOKENS, dtype=np.int32)] * n


def insert_prompts(store: Store, n: int) -> None:
    """n rows that are due for the first task."""
    store.insert({"prompt": prompts(n)})
