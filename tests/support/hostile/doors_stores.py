"""Calls of stores, their fields, rows, keys and journals, each with arguments that it takes."""

from __future__ import annotations

from typing import Any

import numpy as np

import geartrain as gt
from geartrain.core.keys import Keys
from hostile.stores import CAPACITY, STEPS, new_store, rows
from hostile.subject import Tools
from hostile.values import (
    PRIORITY,
    SECONDS,
    VERSION,
    Door,
    choice,
    door,
    flag,
    nothing,
    number,
    one_or_array,
    path,
    whole,
)

#: One row is so large that a hostile capacity is refused, or takes nothing but addresses.
LARGE = {"x": gt.Field((1 << 20,), "uint8", per_row=True)}
OPTIONS: dict[str, Any] = {
    "max_rows": None,
    "remover": "fifo",
    "max_times_sampled": None,
    "max_age_s": None,
    "priority_fraction_bits": 16,
    "priority_per": "row",
    "persist": None,
    "reserve": False,
    "trust": "user",
    "timeout_s": 1.0,
    "journal": None,
}

#: Of one row or of each of two.
PRIORITIES, VERSIONS = one_or_array(PRIORITY, 2), one_or_array(VERSION, 2)


def lengths_of_two(value: Any) -> bool:
    return value is not None and one_or_array(whole(1, STEPS), 2)(value)


def a_name(value: Any) -> bool:
    return value is None or path(value)


# --- fields, stores ---------------------------------------------------------------------------------------------------


@door("Field", per_row=flag)
def field(tools: Tools) -> Door:
    return gt.Field, {"shape": (2,), "dtype": "float32", "per_row": False}


def created(**arguments: Any) -> None:
    """Creates a store and leaves nothing of it."""
    made = gt.Store.create(**arguments)
    made.unlink()
    made.close()


@door(
    "Store.create",
    name=a_name,
    fields=nothing,
    capacity=whole(1, 2**32),
    max_rows=whole(1, 2**32 - 1, none=True),
    remover=nothing,
    max_times_sampled=whole(1, 2**32 - 1, none=True),
    max_age_s=number(0, above=True, none=True, most=1e9),
    priority_fraction_bits=whole(0, 32),
    persist=lambda value: value is None or flag(value),
    reserve=flag,
    trust=nothing,
    timeout_s=SECONDS,
    journal=a_name,
)
def create(tools: Tools) -> Door:
    return created, {"name": tools.name(), "fields": LARGE, "capacity": 2, **OPTIONS}


@door("Store.create, in steps", max_length=whole(1, 2**31 - 1), capacity_steps=whole(2, 2**63))
def create_in_steps(tools: Tools) -> Door:
    fields = {"x": gt.Field((1 << 20,), "uint8")}
    return created, {"name": tools.name(), "fields": fields, "max_length": 2, "capacity_steps": 4, "reserve": False}


@door("Store.create, in bytes", capacity_bytes=whole(2**20, 2**63))
def create_in_bytes(tools: Tools) -> Door:
    return created, {"name": tools.name(), "fields": LARGE, "capacity_bytes": 1 << 24, "reserve": False}


@door("Store.create, with a journal", journal=path, journal_sync_s=number(0, none=True), journal_full=choice(None))
def create_with_a_journal(tools: Tools) -> Door:
    folder = tools.folder()
    given = {"journal": folder / "journal", "journal_sync_s": 1.0, "journal_full": "wait"}
    return created, {"name": tools.name(), "fields": LARGE, "capacity": 2, "reserve": False, **given}


@door("Store.open", name=nothing, fields=choice(None), create=nothing, adopt=flag, timeout_s=SECONDS)
def open_store(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))

    given = {"max_length": None, "create": "never", "adopt": False, "trust": "user", "timeout_s": 1.0}
    return gt.Store.open, {"name": there.name, "fields": there.fields, **given}


@door("Store.open, that creates", name=path, fields=nothing, capacity=whole(1, 2**32))
def open_or_create(tools: Tools) -> Door:
    def call(**arguments: Any) -> None:
        made = gt.Store.open(**arguments)
        made.unlink()
        made.close()

    return call, {"name": tools.name(), "fields": LARGE, "create": "missing", "capacity": 2, "reserve": False}


@door("Store.open, to read", name=nothing, mode=nothing, trust=nothing)
def open_to_read(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))
    return gt.Store.open, {"name": there.name, "mode": "r", "trust": "user"}


@door(
    "Store.load",
    directory=nothing,
    name=path,
    journal=path,
    progress=flag,
    journal_sync_s=number(0, none=True),
    journal_full=choice(None),
    reserve=flag,
)
def load(tools: Tools) -> Door:
    with new_store(tools) as there:
        saved = there.save(tools.folder() / "checkpoint").path

    def call(**arguments: Any) -> None:
        made = gt.Store.load(**arguments)
        made.unlink()
        made.close()

    return call, {
        "directory": saved,
        "name": tools.name(),
        "create": "missing",
        "progress": False,
        "journal": tools.folder() / "journal",
        "journal_sync_s": 1.0,
        "journal_full": "wait",
        "persist": None,
        "reserve": False,
        "trust": "user",
        "timeout_s": 1.0,
    }


@door("Store.save", directory=path, base=a_name, incremental=flag, progress=flag)
def save(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))
    return there.save, {"directory": tools.folder() / "checkpoint", "incremental": True, "progress": False}


@door("Store.close", keep=flag)
def close(tools: Tools) -> Door:
    def call(keep: Any) -> None:
        with new_store(tools) as there:
            there.unlink()
            there.close(keep=keep)

    return call, {"keep": False}


# --- rows -------------------------------------------------------------------------------------------------------------


@door(
    "Store.insert",
    fields=nothing,
    lengths=one_or_array(whole(1, STEPS), 2),
    priorities=PRIORITIES,
    versions=VERSIONS,
    threads=whole(1, 4096, none=True),
    casting=nothing,
)
def insert(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))
    given = {"lengths": None, "priorities": None, "versions": None, "threads": 1, "casting": "no"}
    return there.insert, {"fields": rows(2), **given}


@door("Store.insert, a field", x=nothing, tag=one_or_array(nothing, 2), casting=nothing)
def insert_a_field(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))

    def call(x: Any, tag: Any, casting: Any) -> None:
        there.insert({"x": x, "tag": tag}, threads=1, casting=casting)

    return call, {**rows(2), "casting": "same_kind"}


@door("Store.row", priority=PRIORITY, version=VERSION)
def row(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))

    def call(priority: Any, version: Any, zeros: Any) -> None:
        with there.row(priority=priority, version=version, zeros=zeros) as one:
            one["x"][:], one["tag"], one.length = 1, 1, STEPS

    return call, {"priority": 1.0, "version": 0, "zeros": ["x"]}


@door("Row", field=choice("x"), length=whole(1, STEPS), priority=PRIORITY, version=VERSION)
def a_row(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))

    def call(**given: Any) -> None:
        with there.row(zeros=there.fields) as one:
            one[given["field"]] = given["value"]
            one.length, one.priority, one.version = given["length"], given["priority"], given["version"]

    names = {"field": "tag", "value": 3}
    return call, {**names, "length": 3, "priority": 1.0, "version": 0}


@door("Row.torch")
def row_torch(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))

    def call(field: Any, of_several: Any) -> None:
        one, some = there.row(), there.rows(2)
        one.torch(field), some[0].torch(of_several)
        one.abandon(), some.abandon()

    return call, {"field": "x", "of_several": "x"}


@door("Rows[]")
def one_of_rows(tools: Tools) -> Door:
    some = tools.enter(new_store(tools)).rows(2)
    tools.stack.callback(some.abandon)
    return lambda index: some[index], {"index": 1}


@door("Row.publish", length=whole(1, 3))
def publish(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))

    def call(length: Any, extend: Any, priority: Any) -> None:
        with there.row(zeros=there.fields) as one:
            one.publish(length=length)
            one.priority = priority
            one.extend(extend)

    return call, {"length": 1, "extend": 3, "priority": 1.0}


@door("Store.rows", n=whole(1, CAPACITY), priority=PRIORITY, version=VERSION)
def several_rows(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))

    def call(n: Any, priority: Any, version: Any, zeros: Any) -> None:
        with there.rows(n, priority=priority, version=version, zeros=zeros) as some:
            some.lengths = STEPS
            for one in some:
                one["x"], one["tag"] = 1, 1

    return call, {"n": 2, "priority": 1.0, "version": 0, "zeros": ["x"]}


@door("Rows", field=choice("x"), lengths=lengths_of_two, priorities=PRIORITIES, versions=VERSIONS)
def rows_of_one(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))

    def call(**given: Any) -> None:
        with there.rows(2, zeros=there.fields) as some:
            some[1][given["field"]] = given["value"]
            some.lengths, some.priorities, some.versions = given["lengths"], given["priorities"], given["versions"]

    names = {"field": "tag", "value": 3}
    return call, {**names, "lengths": [3, 3], "priorities": [1.0, 1.0], "versions": [0, 0]}


@door(
    "Store.write",
    keys=nothing,
    fields=nothing,
    starts=one_or_array(whole(0, STEPS), 2),
    lengths=one_or_array(whole(0, STEPS), 2),
    casting=nothing,
)
def write(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))
    given = {"fields": {"x": rows(2)["x"]}, "starts": None, "lengths": None, "casting": "no"}
    return there.write, {"keys": there.keys()[:2], **given}


@door("Store.write, a field")
def write_a_field(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))
    keys = there.keys()[:2]
    return lambda x, tag: there.write(keys, {"x": x, "tag": tag}, casting="same_kind"), rows(2)


@door("Store.delete", keys=nothing)
def delete(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))
    return there.delete, {"keys": there.keys()[:2]}


@door("Store.evict", n=whole(1, 10**400))
def evict(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))

    def call(n: Any, by: Any) -> None:
        there.insert(rows(2), threads=1)
        there.evict(n, by)

    return call, {"n": 1, "by": lambda keys: np.zeros(len(keys))}


@door("Store.evict, by what a function returns")
def evict_by(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))

    def call(scores: Any) -> None:
        there.insert(rows(2), threads=1)
        there.evict(1, lambda keys: scores)

    return call, {"scores": 1.0}


@door("Store.update_priorities", keys=nothing, priorities=PRIORITIES)
def update_priorities(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))
    return there.update_priorities, {"keys": there.keys()[:2], "priorities": [1.0, 2.0]}


@door("Store.update_priorities, of steps", steps=one_or_array(whole(0, STEPS - 1), 2), priorities=PRIORITIES)
def update_step_priorities(tools: Tools) -> Door:
    there = tools.enter(new_store(tools, priority_per="step"))
    keys = there.keys()[:2]

    def call(steps: Any, priorities: Any) -> None:
        there.update_priorities(keys.of_steps(steps), priorities)

    return call, {"steps": [1, 2], "priorities": [1.0, 2.0]}


@door("Store.raise_priorities")
def raise_priorities(tools: Tools) -> Door:
    return tools.enter(new_store(tools)).raise_priorities, {"power": 1.0}


@door("Store.keys_of")
def keys_of(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))
    return there.keys_of, {"rows": there.keys().row[:2]}


@door("Store.status", keys=choice(None))
def status(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))
    return there.status, {"keys": there.keys()[:2]}


@door("Store.column", name=choice("x"))
def column(tools: Tools) -> Door:
    return tools.enter(new_store(tools)).column, {"name": "x"}


@door("Store.field_number", name=choice("x"))
def field_number(tools: Tools) -> Door:
    return tools.enter(new_store(tools)).field_number, {"name": "x"}


@door("Store.sync_journal", timeout_s=SECONDS)
def sync_journal(tools: Tools) -> Door:
    there = tools.enter(new_store(tools, journal=tools.folder() / "journal", journal_sync_s=0.05))
    return there.sync_journal, {"timeout_s": 5.0}


# --- keys -------------------------------------------------------------------------------------------------------------


@door("Keys")
def keys(tools: Tools) -> Door:
    given = {"shard": None, "draw": None, "store": None, "step": None}
    return Keys, {"row": [1, 2], "generation": [1, 1], **given}


@door("Keys[]")
def some_keys(tools: Tools) -> Door:
    some = Keys([1, 2], [1, 1], store=7)  # type: ignore[arg-type]
    return lambda index: some[index], {"index": [0]}


@door("Keys, their methods")
def keys_methods(tools: Tools) -> Door:
    some = Keys([1, 2], [1, 1], store=7)  # type: ignore[arg-type]

    def call(**given: Any) -> None:
        some.of_steps(given["steps"])
        some.of_store(given["store"])
        some.of_shard(given["shard"])
        some.is_of(given["mine"])
        Keys.join(given["parts"])
        assert (some == given["other"]) in (True, False)

    given = {"steps": [0, 1], "store": 7, "shard": 1, "mine": 7, "parts": [some, some], "other": some}
    return call, given
