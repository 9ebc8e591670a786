"""Factories of stores whose rows pass through tasks, of claims and of claimed rows."""

from __future__ import annotations

from typing import Any

import numpy as np

import geartrain as gt
from hostile.subject import Subject, Tools, factory

FIELDS = {"x": gt.Field(("m",), "float32"), "text": gt.Text(), "tag": gt.Field((), "int64")}
TASKS = {
    "work": gt.Task({"y": gt.Field(("k",), "float32")}, keep_partial=True),
    "judge": gt.Task({"z": gt.Field((), "float32")}, after="work", rewritable=True),
    "later": gt.Task(after="judge"),
    "train": gt.Task(after="later"),
}
SPAN_BYTES = 1 << 18


def rows(n: int = 2) -> dict[str, Any]:
    return {"x": [np.ones(3, np.float32)] * n, "text": ["text"] * n, "tag": np.arange(n)}


def new_store(tools: Tools, **options: Any) -> gt.Store:
    """A store of 16 rows, of which 4 are due for each of the first two tasks and 2 are judged."""
    store = gt.Store.create(
        tools.name(), FIELDS, tasks=TASKS, capacity=64, span_bytes=SPAN_BYTES, max_times_sampled=1, **options
    )
    store.insert(rows(10))
    store.claim("work", 6, output="numpy").put(y=[np.ones(2, np.float32)] * 6)
    store.claim("judge", 2, output="numpy").put(z=np.ones(2, np.float32))
    return store


def pass_through(store: gt.Store) -> None:
    """One more row, which the next call finds dropped."""
    keys = store.insert(rows(1))
    with store.claim("work", output="numpy"):
        pass
    store.delete(keys)


@factory(gt.Store, "with tasks", waits=True)
def store_with_tasks(tools: Tools) -> Subject:
    one = new_store(tools)
    judged = one.keys_of([0, 1]) if len(one) else gt.Keys([0, 1], [1, 1], store=one.id)

    def claim_and_release() -> None:
        with one.claim("work", 2, output="numpy") as claim:
            claim["x"], [row["text"] for row in claim]

    return Subject(
        calls={
            "len": lambda: len(one),
            "stats": one.stats,
            "task_stats": one.task_stats,
            "insert": lambda: pass_through(one),
            "claim": claim_and_release,
            "put": lambda: one.put(judged, "judge", {"z": np.zeros(2, np.float32)}),
            "finish": one.finish,
            "clock": lambda: one.advance(one.clock + 1),
            "limits": lambda: (one.limiter.set(in_flight=one.capacity, max_stale=9), one.limiter.off()),
            "audit": one.audit,
            "about": lambda: (one.tasks, one.axes, one.options),
        },
        close=one.close,
        survives=frozenset({"about"}),
        work=lambda: one.claim("work", output="numpy"),
        in_child=frozenset({"len", "insert", "claim", "put", "audit"}),
        blocked={"claim": lambda: (one.claim("later", 1, timeout_s=1e6, output="numpy") and None) or _wait(one)},
    )


def _wait(store: gt.Store) -> None:
    """Claims all rows that are due, and waits for more."""
    while store.claim("later", 9, timeout_s=1e6, output="numpy"):
        pass


@factory(gt.Claim)
def claim(tools: Tools) -> Subject:
    there = new_store(tools)
    one = there.claim("work", 2, output="numpy")
    return Subject(
        calls={
            "len": lambda: len(one),
            "repr": lambda: repr(one),
            "rows": lambda: [row.key for row in one],
            "stale": lambda: one.stale,
            "read": lambda: (one["x"], one["text"], one.lengths("m")),
            "put": lambda: one.put(y=[np.ones(1, np.float32)] * 2),
            "release": one.release,
        },
        close=there.close,
        survives=frozenset({"len", "repr", "rows", "release"}),
        either=frozenset({"read"}),
        owned=[there],
    )


@factory(gt.ClaimedRow)
def claimed_row(tools: Tools) -> Subject:
    there = new_store(tools)
    claim = there.claim("work", 2, output="numpy")
    one = next(iter(claim))
    one.append(y=[1.0, 2.0])
    return Subject(
        calls={
            "key": lambda: one.key,
            "repr": lambda: repr(one),
            "read": lambda: (one["x"], one["text"], one.length("m")),
            "partial": lambda: one.partial["y"],
        },
        close=there.close,
        survives=frozenset({"key", "repr"}),
        either=frozenset({"read"}),
        owned=[there, claim],
    )
