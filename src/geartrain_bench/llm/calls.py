"""Calls of one process: puts, packed fetches, fields that come later, single rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain_bench.harness.timing as harness
from geartrain.core.schema import Field
from geartrain.core.tasks import Task
from geartrain.errors import ReplayError
from geartrain.replay.fetch import fetch
from geartrain.store.store import Store
from geartrain_bench.harness.timing import Lap, System
from geartrain_bench.llm.run import Run, prepared
from geartrain_bench.llm.samples import (
    TOKEN_FIELDS,
    USUAL,
    answer_fields,
    digest,
    in_rows,
    insert_prompts,
    nbytes,
    store_of_answers,
    store_of_tasks,
)

#: Calls of a lap with single rows.
SINGLE = 200


def floor(size: int, calls: int) -> System:
    """One warm copy of so many bytes."""
    source, copy = np.ones(size, np.uint8), np.ones(size, np.uint8)

    def one() -> None:
        np.copyto(copy, source)

    def body() -> None:
        for _ in range(calls):
            one()

    return System("floor", lambda: harness.lap(calls, body, one), floor=True)


def repeated(name: str, one: Callable[[], object], calls: int) -> System:
    """A system that makes the same call again and again."""

    def body() -> None:
        for _ in range(calls):
            one()

    return System(name, lambda: harness.lap(calls, body, one))


def rows_of(per_row: int) -> str:
    """Of a case's name."""
    return f"rows of {per_row}"


def _room(rows: int, size: int, times: int) -> int:
    """Bytes of spans for so many puts of rows of that size in all."""
    return times * (size + size // 4 + 1024 * rows)


def put(run: Run, per_row: int) -> None:
    """Answers put by the claim of their rows: whole, and appended one by one."""
    rows, calls = in_rows(run.answers, per_row), run.plan.calls
    n, size = len(rows["ids"]), nbytes(rows)
    tasks = {"answer": Task(answer_fields(), keep_partial=True), "train": Task(after="answer")}
    pieces = [
        [{name: run.answers[name][at + item] for name in TOKEN_FIELDS} for item in range(per_row)]
        for at in range(0, len(run.answers["ids"]), per_row)
    ]

    def append(claim: Any) -> None:
        for row, answers in zip(claim, pieces, strict=True):
            for item, values in enumerate(answers):
                row.append(values, item=item)
            row.put()

    with store_of_tasks(run.store_name(), tasks, n * (calls + 1), 2 * _room(n, size, calls + 1)) as store:

        def claims(times: int) -> list[Any]:
            insert_prompts(store, n * times)
            return [store.claim("answer", n) for _ in range(times)]

        def lap(one: Callable[[Any], object]) -> Lap:
            found = prepared(claims, one, calls)
            store.delete(store.keys())
            return found

        systems = [
            floor(size, calls),
            System("geartrain", lambda: lap(lambda claim: claim.put(rows))),
            System("geartrain, each answer appended", lambda: lap(append)),
        ]
        run.take_turns(f"put, {rows_of(per_row)}", systems, "put")


def packed_fetch(run: Run, per_row: int) -> None:
    """All fields of the answers, one behind the other, and where each sequence begins."""
    rows = in_rows(run.answers, per_row)
    n, size, calls = len(rows["ids"]), nbytes(rows), 2 * run.plan.calls
    with store_of_answers(run.store_name(), n, _room(n, size, 1)) as store:
        keys = store.insert(rows)

        def read() -> dict[str, Any]:
            batch = fetch(store, keys)
            found = {name: batch[name] for name in store.fields}
            return {**found, "cu_seqlens": batch.cu_seqlens}

        ours = {name: value.numpy() for name, value in read().items()}
        wanted = digest({name: np.concatenate(run.answers[name]) for name in TOKEN_FIELDS})
        if digest(ours) != wanted or ours["cu_seqlens"][-1] != len(ours["ids"]):
            raise ReplayError("the packed rows are not those that were inserted")
        if run.peer is not None and run.peer.digest() != wanted:
            run.lose_peer("it returned other bytes than were put")
        systems = [floor(size, calls), repeated("geartrain", read, calls)]
        run.take_turns(f"packed fetch, {rows_of(per_row)}", systems, "get")


def later_field(run: Run, per_row: int) -> None:
    """One float32 a token more, by a claim, by key, and into padded rows by `Store.write`."""
    rows, calls = in_rows(run.answers, per_row), run.plan.calls
    n, size = len(rows["ids"]), nbytes(rows)
    ref = np.concatenate(run.answers["log_prob"])
    tasks = {"ref": Task({"ref": Field(("tokens",), "float32")}, rewritable=True), "train": Task(after="ref")}
    with (
        Store.create(
            run.store_name(),
            answer_fields(),
            tasks=tasks,
            capacity=n * (calls + 1),
            span_bytes=2 * _room(n, size + ref.nbytes, calls + 1),
        ) as store,
        _padded(run, per_row) as (padded, padded_keys, padded_ref, lengths),
    ):

        def claims(times: int) -> list[Any]:
            for _ in range(times):
                store.insert(rows)
            return [store.claim("ref", n) for _ in range(times)]

        def lap() -> Lap:
            found = prepared(claims, lambda claim: claim.put(ref=ref), calls)
            store.delete(store.keys())
            return found

        def rewrite_lap() -> Lap:
            (claim,) = claims(1)
            claim.put(ref=ref)
            found = prepared(
                lambda times: [claim.keys] * times, lambda keys: store.put(keys, "ref", {"ref": ref}), calls
            )
            store.delete(claim.keys)
            return found

        systems = [
            floor(ref.nbytes, calls),
            System("geartrain", lap),
            System("geartrain, Store.put", rewrite_lap),
            repeated(
                "geartrain, padded rows", lambda: padded.write(padded_keys, {"ref": padded_ref}, lengths=lengths), calls
            ),
        ]
        run.take_turns(f"a later field, {rows_of(per_row)}", systems, "later")


class _padded:  # noqa: N801 - a context, used as a function
    """A store of the answers in rows as long as the longest one; and a later field for all of them."""

    def __init__(self, run: Run, per_row: int) -> None:
        self.run, self.per_row = run, per_row

    def __enter__(self) -> tuple[Store, Any, NDArray[np.float32], NDArray[np.int64]]:
        answers = self.run.answers
        n = len(answers["ids"])
        lengths = np.array([len(one) for one in answers["ids"]])
        longest = int(lengths.max())
        fields = {name: Field((), dtype) for name, dtype in {**TOKEN_FIELDS, "ref": "float32"}.items()}
        self.store = Store.create(self.run.store_name(), fields, max_length=longest, capacity=n)
        blocks = {name: np.zeros((n, longest), field.dtype) for name, field in fields.items()}
        for name in TOKEN_FIELDS:
            for i, one in enumerate(answers[name]):
                blocks[name][i, : len(one)] = one
        keys = self.store.insert(blocks, lengths=lengths)
        return self.store, keys, blocks["log_prob"], lengths

    def __exit__(self, *exc: object) -> None:
        self.store.close()


def one_row(run: Run) -> None:
    """A row of one answer: put by its claim, inserted, and written as a padded row by `Store.row`."""
    rows = in_rows({name: values[:1] for name, values in run.answers.items()}, 1)
    values = {name: array for name, (array,) in rows.items()}
    length, size = len(values["ids"]), nbytes(rows)
    fields = {name: Field((), dtype) for name, dtype in TOKEN_FIELDS.items()}
    tasks = {"answer": Task(answer_fields()), "train": Task(after="answer")}
    times = SINGLE + 1
    room = 2 * _room(1, size, times)
    with (
        store_of_tasks(run.store_name(), tasks, times, room) as tasked,
        store_of_answers(run.store_name(), times, room) as plain,
        Store.create(run.store_name(), fields, max_length=USUAL.high, capacity=64) as padded,
    ):

        def claimed(times: int) -> Sequence[Any]:
            insert_prompts(tasked, times)
            return list(tasked.claim("answer", times))

        def put_lap() -> Lap:
            found = prepared(claimed, lambda row: row.put(values), SINGLE)
            tasked.delete(tasked.keys())
            return found

        def insert_lap() -> Lap:
            found = prepared(lambda times: [rows] * times, plain.insert, SINGLE)
            plain.delete(plain.keys())
            return found

        def write() -> None:
            with padded.row() as row:
                for name in TOKEN_FIELDS:
                    row[name][:length] = values[name]
                row.length = length

        systems = [
            floor(size, SINGLE),
            System("geartrain", put_lap),
            System("geartrain, inserted", insert_lap),
            repeated("geartrain, padded rows", write, SINGLE),
        ]
        run.take_turns("one row", systems, "one row", unit="us")


__all__ = ["later_field", "one_row", "packed_fetch", "put", "rows_of"]
