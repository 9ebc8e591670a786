"""Calls of stores with tasks, their claims and rows, each with arguments that it takes."""

from __future__ import annotations

from typing import Any

import numpy as np

import geartrain as gt
from hostile.subject import Tools
from hostile.tasks import FIELDS, SPAN_BYTES, TASKS, new_store, rows
from hostile.values import SECONDS, Door, choice, door, flag, nothing, number, whole

#: Seconds, or None for the default.
LIMIT = number(0, none=True, most=1e9)


def undurable(value: Any) -> bool:
    """The value of `durable=` that a store without a journal takes."""
    return flag(value) and not value


def text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value.encode()) < 64 and "\0" not in value


@door("Text", axis=lambda value: value is None or text(value))
def a_text(tools: Tools) -> Door:
    return gt.Text, {"axis": "answers"}


@door("Bytes", axis=lambda value: value is None or text(value))
def some_bytes(tools: Tools) -> Door:
    return gt.Bytes, {"axis": None}


@door(
    "Task",
    fields=lambda value: value is None or value == {},
    after=lambda value: text(value) or (isinstance(value, tuple | list) and all(map(text, value))),
    keep_partial=flag,
    rewritable=flag,
)
def a_task(tools: Tools) -> Door:
    return gt.Task, {"fields": {"y": FIELDS["x"]}, "after": (), "keep_partial": False, "rewritable": False}


@door("Store.create, with tasks", tasks=lambda value: value is None, span_bytes=whole(4096, 2**46 - 1))
def create_with_tasks(tools: Tools) -> Door:
    def call(**arguments: Any) -> None:
        made = gt.Store.create(tools.name(), FIELDS, capacity=2, reserve=False, **arguments)
        made.unlink()
        made.close()

    return call, {"tasks": TASKS, "span_bytes": SPAN_BYTES}


@door(
    "Store.insert, with tasks",
    fields=nothing,
    lengths=lambda value: value is None or value == {},
    timeout_s=LIMIT,
    durable=undurable,
)
def insert_with_tasks(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))

    def call(fields: Any, **given: Any) -> None:
        there.delete(there.insert(fields, **given))

    return call, {"fields": rows(2), "lengths": None, "timeout_s": 1.0, "durable": False}


@door("Store.insert, a field with an axis")
def insert_a_field_with_an_axis(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))

    def call(x: Any, text: Any, tag: Any, lengths: Any) -> None:
        there.delete(there.insert({"x": x, "text": text, "tag": tag}, lengths={"m": lengths}, casting="same_kind"))

    return call, {**rows(1), "lengths": [3]}


COUNT = whole(1, 10**400, none=True)


@door("Store.claim", task=nothing, n=COUNT, max_items=whole(1, 10**400), of=choice(None), output=nothing)
def claim(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))

    def call(**given: Any) -> None:
        there.claim(**given).release()

    return call, {"task": "work", "n": 2, "max_items": 4, "of": "m", "output": "numpy", "version": 3}


@door("Store.advance", version=whole(0, 2**63 - 1))
def advance(tools: Tools) -> Door:
    return tools.enter(new_store(tools)).advance, {"version": 3}


@door(
    "RateLimiter.set, with tasks",
    in_flight=lambda value: isinstance(value, str) or whole(1, 2**32, none=True)(value),
    max_stale=lambda value: isinstance(value, str) or whole(0, 2**62, none=True)(value),
)
def limits(tools: Tools) -> Door:
    return tools.enter(new_store(tools)).limiter.set, {"in_flight": 20, "max_stale": 4}


@door("Store.claims", task=nothing, n=COUNT, timeout_s=LIMIT, output=nothing)
def claims(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))

    def call(**given: Any) -> None:
        for found in there.claims(**given):
            found.release()
            break

    return call, {"task": "work", "n": 2, "timeout_s": 1.0, "output": "numpy"}


@door("Store.put", keys=nothing, task=nothing, fields=nothing, timeout_s=SECONDS, durable=undurable)
def put(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))
    keys = gt.Keys([0, 1], [1, 1], store=there.id)
    given = {"keys": keys, "task": "judge", "fields": {"z": np.zeros(2, np.float32)}, "casting": "no", "timeout_s": 1.0}
    return there.put, {**given, "durable": False}


@door("Claim.put", timeout_s=SECONDS, durable=undurable)
def claim_put(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))

    def call(**given: Any) -> None:
        with there.claim("work", 1, output="numpy") as one:
            one.put(**given)
            there.delete(one.keys)
        there.insert(rows(1))

    return call, {"y": [np.ones(2, np.float32)], "timeout_s": 1.0, "durable": False}


@door("Claim[]")
def claim_field(tools: Tools) -> Door:
    one = tools.enter(tools.enter(new_store(tools)).claim("work", 2, output="numpy"))

    def call(field: Any, axis: Any, of: Any) -> None:
        one[field], one.lengths(axis), one.cu_seqlens_of(of)

    return call, {"field": "x", "axis": "m", "of": "x"}


@door("ClaimedRow.append", item=lambda value: value == 0 and not isinstance(value, bool), timeout_s=SECONDS)
def append(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))

    def call(y: Any, item: Any, timeout_s: Any) -> None:
        with there.claim("work", 1, output="numpy") as one:
            next(iter(one)).append({"y": y}, item=item, timeout_s=timeout_s)
            there.delete(one.keys)
        there.insert(rows(1))

    return call, {"y": np.ones(2, np.float32), "item": 0, "timeout_s": 1.0}


@door("ClaimedRow.put", timeout_s=SECONDS, durable=undurable)
def row_put(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))

    def call(**given: Any) -> None:
        with there.claim("judge", 1, output="numpy") as one:
            next(iter(one)).put(**given)
            there.delete(one.keys)
        there.insert(rows(1))
        there.claim("work", output="numpy").put(y=[[1.0]])

    return call, {"z": 1.0, "timeout_s": 1.0, "durable": False}
