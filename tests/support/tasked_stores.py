"""A store whose rows pass through tasks, with fields of all kinds, and what is in it."""

from __future__ import annotations

from typing import Any

import numpy as np

import geartrain as gt
from geartrain.store.saved_parts import FREE, NOT_DONE, as_bytes, changed_parts

TOKENS = {"ids": gt.Field(("tokens",), "int32"), "length": gt.Field(("answers",), "int32", divides="tokens")}
TASKS = {
    "answer": gt.Task(TOKENS, keep_partial=True),
    "reward": gt.Task({"reward": gt.Field(("answers",), "float32"), "why": gt.Text("answers")}, after="answer"),
    "train": gt.Task(after="reward"),
}
INSERTED = {"number": gt.Field((), "int64"), "prompt": gt.Field(("prompt",), "int32"), "text": gt.Text()}


def make_store(*, name: Any = None, **options: Any) -> gt.Store:
    return gt.Store.create(
        name, INSERTED, tasks=TASKS, **{"capacity": 8, "span_bytes": 1 << 16, "max_times_sampled": 1, **options}
    )


def insert(store: gt.Store, *numbers: int) -> None:
    for n in numbers:
        store.insert({"number": [n], "prompt": [list(range(n + 1))], "text": [f"row {n}"]})


def answer(store: gt.Store, rows: int) -> None:
    claim = store.claim("answer", rows)
    claim.put(ids=[[n, n + 1, n + 2] for n in range(len(claim))], length=[[1, 2]] * len(claim))


def reward(store: gt.Store, rows: int) -> None:
    claim = store.claim("reward", rows)
    claim.put(reward=[[0.5, 1.5]] * len(claim), why=[["bad", "good"]] * len(claim))


def contents(store: gt.Store) -> dict[str, Any]:
    batch = gt.fetch(store, store.keys(), output="numpy")
    return {name: np.asarray(batch[name]).tolist() for name in batch}


def everything(store: gt.Store) -> dict[str, Any]:
    """All that a checkpoint keeps of a store: rows, parts with their bytes, and what is beside them."""
    _, rows, parts = changed_parts(store.native, 0)
    content, bounds, ok = store.native.copy_parts(as_bytes(parts))
    assert ok.all()
    rows = rows[rows["state"] != FREE]
    assert (parts["state"] != NOT_DONE).all()
    return {
        "rows": {int(row["row"]): [row[name].tolist() for name in rows.dtype.names] for row in rows},
        "parts": {
            (int(part["row"]), int(part["task"])): (
                [part[name].tolist() for name in parts.dtype.names if name != "span"],
                content[int(bounds[i]) : int(bounds[i + 1])].tobytes(),
            )
            for i, part in enumerate(parts)
        },
        "next_sequence": store.native.next_sequence(),
        "state": store.native.task_state(),
    }


def in_all_states(**options: Any) -> gt.Store:
    """Rows 0 and 1 are taken, 2 is committed, 3 answered and claimed, 4 claimed, 5 inserted; one is gone."""
    store = make_store(**options)
    insert(store, 9)
    store.claim("answer", 1).drop()
    insert(store, *range(6))
    store.limiter.set(in_flight=8, max_stale=100)
    store.advance(3)
    answer(store, 4)
    reward(store, 3)
    rows, generations = store.native.keys()
    store.native.count_samples(rows[:2], generations[:2], 5, np.array([1, 0], np.uint32))
    store.claim("reward", 1)
    next(iter(store.claim("answer", 1))).append(item=0, ids=[7, 7])
    return store
