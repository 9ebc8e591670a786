"""Factories of stores, rows and replays."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from replay_calls import replay_of

import geartrain as gt
from geartrain.selection import Mixture, Prioritized, Uniform
from geartrain.store.rate_limiter import RateLimiter
from geartrain.tools.testing import SimulatedDevice, ThreadRankGroup
from hostile.subject import Subject, Tools, factory, order_lock

FIELDS = {"x": gt.Field((4,), "float32"), "tag": gt.Field((), "int64", per_row=True)}
STEPS, CAPACITY = 8, 64


def rows(n: int = 2) -> dict[str, Any]:
    return {"x": np.ones((n, STEPS, 4), np.float32), "tag": np.arange(n)}


def new_store(tools: Tools, **options: Any) -> gt.Store:
    store = gt.Store.create(tools.name(), FIELDS, max_length=STEPS, capacity=CAPACITY, **options)
    store.insert(rows(16), threads=1)
    return store


def write(store: gt.Store) -> None:
    with store.row() as row:
        row["x"][:] = 1
        row["tag"], row.length = 7, STEPS


def store_calls(store: gt.Store) -> dict[str, Callable[[], object]]:
    keys = store.keys()[:4]
    return {
        "len": lambda: len(store),
        "repr": lambda: repr(store),
        "stats": store.stats,
        "insert": lambda: store.insert(rows(), threads=1),
        "row": lambda: write(store),
        "rows": lambda: store.rows(2).abandon(),
        "keys": store.keys,
        "status": lambda: store.status(keys),
        "fetch": lambda: gt.fetch(store, store.keys()[:4], output="numpy", threads=1, on_stale="drop"),
        "update_priorities": lambda: store.update_priorities(keys, 2.0),
        "raise_priorities": lambda: store.raise_priorities(1.0001),
        "delete": lambda: store.delete(store.keys()[:1]),
        "expire": store.expire,
        "reap": store.reap,
        "audit": store.audit,
        "column": lambda: store.column("x"),
        "expect_writers": lambda: store.expect_writers().close(),
        "limiter.state": store.limiter.state,
        "limiter.set": lambda: store.limiter.set(min_size_to_sample=1),
        "limiter.off": store.limiter.off,
        "limiter.give_back": lambda: store.limiter.give_back(inserts=1),
        "limiter.admit_inserts": lambda: store.limiter.admit_inserts(1, 0.5),
        "about": lambda: (store.name, store.path, store.fields, store.options, store.closed, store.nbytes),
    }


def of_store(store: gt.Store, **more: Any) -> Subject:
    return Subject(
        calls=store_calls(store),
        close=store.close,
        survives=frozenset({"repr", "about", "column"}),
        work=store.row,
        in_child=frozenset({"len", "insert", "row", "fetch", "update_priorities", "audit"}),
        **more,
    )


@factory(gt.Store, waits=True)
def store(tools: Tools) -> Subject:
    one = new_store(tools)

    def wait_for_the_limiter() -> object:
        one.limiter.set(samples_per_insert=1, min_size_to_sample=1, error_buffer=2)
        while True:
            one.insert(rows(1), threads=1)

    return of_store(one, blocked={"insert": wait_for_the_limiter})


@factory(gt.Store, "a file that stays")
def persistent_store(tools: Tools) -> Subject:
    one = gt.Store.create(tools.folder() / "rows", FIELDS, max_length=STEPS, capacity=CAPACITY)
    one.insert(rows(16), threads=1)
    return of_store(one)


@factory(gt.Store, "with a journal")
def journaled_store(tools: Tools) -> Subject:
    one = new_store(tools, journal=tools.folder() / "journal", journal_sync_s=0.05)
    subject = of_store(one)
    subject.calls["journal"] = lambda: one.journal
    subject.calls["sync_journal"] = lambda: one.sync_journal(60.0)
    return subject


@factory(gt.Store, "with a journal that begins with a checkpoint")
def loaded_store(tools: Tools) -> Subject:
    with new_store(tools, priority_per="step") as saved:
        checkpoint = saved.save(tools.folder() / "checkpoint").path
    one = gt.Store.load(checkpoint, tools.name(), journal=tools.folder() / "journal", journal_sync_s=0.05)
    subject = of_store(one)
    keys = one.keys()[:4].of_steps(np.zeros(4, np.int64))
    subject.calls["update_priorities"] = lambda: one.update_priorities(keys, 2.0)
    subject.calls["sync_journal"] = lambda: one.sync_journal(60.0)
    return subject


@factory(gt.Store, "unnamed")
def unnamed_store(tools: Tools) -> Subject:
    one = gt.Store.create(FIELDS, max_length=STEPS, capacity=CAPACITY)
    one.insert(rows(16), threads=1)
    return of_store(one)


@factory(gt.Store, "read-only")
def read_only_store(tools: Tools) -> Subject:
    there = tools.enter(new_store(tools))
    one = gt.Store.open(there.name, mode="r")
    writes = ("insert", "row", "rows", "update_priorities", "raise_priorities", "delete", "reap")
    calls = store_calls(one)
    refused = [*writes, "limiter.set", "limiter.off"]
    for name in refused:
        calls[name] = _refused(calls[name], f"{name} through a read-only handle")
    # The audit locks, and nothing expires or is limited here.
    allowed = ("fetch", "audit", "expire", "limiter.admit_inserts", "limiter.give_back")
    for name in allowed:
        calls[name] = _allowed(calls[name])
    return Subject(
        calls=calls,
        close=one.close,
        survives=frozenset({"repr", "about", "column", *allowed, *refused}),
        owned=[there],
    )


def _refused(call: Callable[[], object], what: str) -> Callable[[], object]:
    """A call that must be refused with an error of geartrain's, every time."""

    def refused() -> None:
        try:
            call()
        except gt.errors.GeartrainError:
            return
        raise AssertionError(f"{what} was not refused")

    return refused


def _allowed(call: Callable[[], object]) -> Callable[[], object]:
    """A call that may be refused."""

    def allowed() -> None:
        try:
            call()
        except gt.errors.GeartrainError:
            return

    return allowed


@factory(RateLimiter, waits=True)
def rate_limiter(tools: Tools) -> Subject:
    one = new_store(tools)
    limiter = one.limiter
    limiter.set(samples_per_insert=1, min_size_to_sample=2, error_buffer=100)

    def wait_to_sample() -> object:
        limiter.set(min_size_to_sample=CAPACITY)
        while True:
            limiter.admit_samples(1, 60.0)

    return Subject(
        calls={
            "set": lambda: limiter.set(samples_per_insert=1, min_size_to_sample=2, error_buffer=100, afresh=True),
            "state": limiter.state,
            "admit_inserts": lambda: limiter.admit_inserts(1, 0.5),
            "admit_samples": lambda: limiter.admit_samples(1, 0.5),
            "give_back": lambda: limiter.give_back(inserts=1),
            "off": limiter.off,
        },
        close=one.close,
        blocked={"admit_samples": wait_to_sample},
        in_child=frozenset({"state"}),
    )


ROWS_ONE_THREAD = "a row has one writer; the store's scenarios write rows from several threads, each its own"


@factory(gt.Row, one_thread=ROWS_ONE_THREAD)
def row(tools: Tools) -> Subject:
    one = new_store(tools)
    held = one.row()
    given = [one.row(zeros=FIELDS) for _ in range(24)]
    for each in given:
        each.length = STEPS
    open_row = one.row(zeros=FIELDS)
    open_row.publish(length=1)

    def next_row() -> gt.Row:
        return given.pop() if len(given) > 1 else given[0]

    return Subject(
        calls={
            "[]": lambda: held["x"],
            "[]=": lambda: held.__setitem__("tag", 3),
            "index": lambda: held.index,
            "extend": lambda: open_row.extend(1),
            "commit": lambda: next_row().commit(),
            "publish": lambda: next_row().publish(length=2),
            "abandon": lambda: next_row().abandon(),
        },
        close=one.close,
        survives=frozenset({"index", "abandon"}),
        work=lambda: (one.row(), one.row()),
    )


@factory(gt.Rows, one_thread=ROWS_ONE_THREAD)
def several_rows(tools: Tools) -> Subject:
    one = new_store(tools)
    held = one.rows(3)
    given = [one.rows(2, zeros=FIELDS) for _ in range(16)]
    for each in given:
        each.lengths = STEPS

    def next_rows() -> gt.Rows:
        return given.pop() if len(given) > 1 else given[0]

    return Subject(
        calls={
            "len": lambda: len(held),
            "[]": lambda: held[0]["x"],
            "iter": lambda: [each["x"] for each in held],
            "commit": lambda: next_rows().commit(),
            "abandon": lambda: next_rows().abandon(),
        },
        close=one.close,
        survives=frozenset({"len", "abandon"}),
        work=lambda: one.rows(4),
    )


# --- replays ----------------------------------------------------------------------------------------------------------


def replay_subject(one: gt.Replay, stores: list[gt.Store], **options: Any) -> Subject:
    keys = stores[0].keys()[:2]

    def begin() -> object:
        one.sample()  # batches are prepared ahead from now on
        return iter(one)

    return Subject(
        **{
            "calls": {
                "sample": one.sample,
                "next": lambda: next(iter(one)),
                "update_priorities": lambda: one.update_priorities(keys, 1.5),
                "settle": one.settle,
                "state": lambda: one.load_state_dict(one.state_dict()),
                "stats": one.stats,
                "describe": one.describe,
                "repr": lambda: repr(one),
                "field_names": lambda: one.field_names,
            },
            "close": one.close,
            "survives": frozenset({"stats", "repr", "field_names", "describe"}),
            "work": begin,
            "in_child": frozenset({"sample"}),
            "owned": list(stores),
            **options,
        }
    )


@factory(gt.Replay, waits=True)
def replay(tools: Tools) -> Subject:
    there = tools.enter(new_store(tools))
    one = replay_of(there, Prioritized(seed=1), 8, output="numpy", threads=1, timeout_s=60)

    def wait_for_rows() -> object:
        there.limiter.set(min_size_to_sample=there.capacity)
        while True:
            one.sample()

    return replay_subject(one, [there], blocked={"sample": wait_for_rows})


@factory(gt.Replay, "nothing ahead", waits=True)
def replay_without_prefetch(tools: Tools) -> Subject:
    there = tools.enter(new_store(tools))
    one = replay_of(there, Uniform(seed=1), 8, output="numpy", threads=1, prefetch=0, timeout_s=60)

    def wait_for_rows() -> object:
        there.limiter.set(min_size_to_sample=there.capacity)
        while True:
            one.sample()

    return replay_subject(one, [there], blocked={"sample": wait_for_rows})


@factory(gt.Replay, "of a store that is closed", waits=True)
def replay_of_a_closed_store(tools: Tools) -> Subject:
    there = new_store(tools)
    one = replay_of(there, Prioritized(seed=1), 8, output="numpy", threads=1, timeout_s=60)

    def wait_for_rows() -> object:
        there.limiter.set(min_size_to_sample=there.capacity)
        while True:
            one.sample()

    made = replay_subject(one, [there], close=there.close, blocked={"sample": wait_for_rows}, owned=[one])
    made.either = frozenset({"sample", "next"})  # what was prepared ahead may be handed out
    made.survives |= {"settle", "state"}  # which are the replay's own
    return made


@factory(gt.Replay, "a mixture")
def replay_of_a_mixture(tools: Tools) -> Subject:
    stores = [tools.enter(new_store(tools)) for _ in range(2)]
    one = replay_of(stores, Mixture([0.5, 0.5], [Uniform(seed=1), Prioritized(seed=2)]), 8, output="numpy", threads=1)
    made = replay_subject(one, stores)
    del made.calls["update_priorities"]
    return made


@factory(gt.Replay, "on a device")
def replay_on_a_device(tools: Tools) -> Subject:
    there = tools.enter(new_store(tools))
    options = gt.DeviceOptions(SimulatedDevice(), path="staged")
    one = replay_of(there, Uniform(seed=1), 8, device=options, threads=1)
    return replay_subject(one, [there], in_child=frozenset())


@factory(gt.Replay, "of a group")
def replay_of_a_group(tools: Tools) -> Subject:
    # A file: segments stay where a rank is lost.
    there = tools.enter(gt.Store.create(tools.folder() / "rows", FIELDS, max_length=STEPS, capacity=CAPACITY))
    there.insert(rows(16), threads=1)
    (ranks,) = ThreadRankGroup.make(1)
    one = replay_of(there, Uniform(seed=1), 8, output="numpy", threads=1, group=ranks)
    made = replay_subject(one, [there])
    keys = one.sample().keys  # of this replay: they name its shard
    made.calls["update_priorities"] = lambda: one.update_priorities(keys, 1.5)
    made.in_child = frozenset()
    return made


@factory(gt.Replay, "of two ranks", waits=True)
def replay_over_ranks(tools: Tools) -> Subject:
    return of_two_ranks(tools, None)


@factory(gt.Replay, "of two ranks, lagged", waits=True)
def replay_with_rounds_in_flight(tools: Tools) -> Subject:
    return of_two_ranks(tools, 2)


def of_two_ranks(tools: Tools, update_lag: int | None) -> Subject:
    """One of two ranks; the other one, of this process too, makes the calls that all ranks make as it does."""
    stores, replays = [], {}
    for _ in range(2):  # files: segments stay where a rank is lost
        stores.append(
            tools.enter(gt.Store.create(tools.folder() / "rows", FIELDS, max_length=STEPS, capacity=CAPACITY))
        )
        stores[-1].insert(rows(16), threads=1)
    ranks = ThreadRankGroup.make(2, tools.patience(20))

    failed: list[BaseException] = []

    def join(rank: int) -> None:
        options: dict[str, Any] = {"output": "numpy", "threads": 1, "prefetch": 1, "update_lag": update_lag}
        replays[rank] = replay_of(stores[rank], Prioritized(seed=1), 8, group=ranks[rank], **options)

    def join_there() -> None:
        try:
            join(1)
        except BaseException as error:
            failed.append(error)

    joining = threading.Thread(target=join_there)
    joining.start()
    try:
        join(0)
    finally:
        joining.join()
    if failed:
        raise failed[0]
    one, other = replays[0], replays[1]
    lock = order_lock()  # calls are made in the same order on all ranks

    def also(call: Callable[[gt.Replay], object]) -> None:
        with contextlib.suppress(gt.errors.GeartrainError):  # the subject is closed
            call(other)

    def on_both(call: Callable[[gt.Replay], object]) -> Callable[[], object]:
        def run() -> None:
            with lock:
                there = threading.Thread(target=also, args=(call,), daemon=True)
                there.start()
                call(one)
                there.join()

        return run

    def close() -> None:
        one.close()
        ranks[0].abort("it has left")  # as the other rank of a group of processes would see

    def wait_for_the_other() -> object:
        while True:  # which does not ask
            one.sample()

    made = replay_subject(one, stores)
    collective: dict[str, Callable[[gt.Replay], object]] = {
        "sample": lambda each: each.sample(),
        "next": lambda each: next(iter(each)),
        "settle": lambda each: each.settle(),
        "state": lambda each: each.load_state_dict(each.state_dict()),
    }
    made.calls |= {name: on_both(call) for name, call in collective.items()}
    tools.stack.callback(ranks[1].abort, "it has left, too")
    keys = stores[0].keys()[:2]
    made.calls["update_priorities"] = lambda: one.update_priorities(keys, 1.5)
    made.calls["sample"]()  # rounds are in flight from the next batch on
    made.close, made.work, made.in_child = close, made.calls["sample"], frozenset()
    made.blocked = {"sample": wait_for_the_other}
    made.owned.append(other)
    return made


@factory("ReplayDataset")  # its module imports torch
def dataset(tools: Tools) -> Subject:
    there = tools.enter(new_store(tools))
    inside = replay_of(there, Uniform(seed=1), 8, threads=1, num_batches=3)
    one = gt.ReplayDataset(inside)
    return Subject(
        # Another thread's iteration may have ended this one before its first batch.
        calls={"iter": lambda: next(iter(one), None), "len": lambda: len(one)},
        close=inside.close,
        survives=frozenset({"len"}),
        work=lambda: next(iter(one)),
        owned=[there],
    )


@factory(gt.Batch)
def batch(tools: Tools) -> Subject:
    there = new_store(tools)
    inside = replay_of(there, Uniform(seed=1), 8, output="numpy", threads=1)
    one = inside.sample()

    def close() -> None:
        inside.close()
        there.close()

    return Subject(
        calls={"[]": one["x"].sum, "as_dict": one.as_dict, "repr": lambda: repr(one)},
        close=close,
        survives=frozenset({"[]", "as_dict", "repr"}),
        work=inside.sample,
    )


@factory(gt.Placement)
def placement(tools: Tools) -> Subject:
    there = tools.enter(new_store(tools))
    one = gt.Placement(there)
    return Subject(
        calls={
            "refresh": one.refresh,
            "report": lambda: one.report(batch_size=4),
            "rebalance": one.rebalance,
            "mine": lambda: one.mine(np.array([1.0, 2.0])),
        },
        close=one.close,
        survives=frozenset({"mine", "refresh", "report", "rebalance"}),  # of one rank: there is no group to leave
        owned=[there],
    )


@factory(ThreadRankGroup)
def thread_ranks(tools: Tools) -> Subject:
    (one,) = ThreadRankGroup.make(1)
    return Subject(
        calls={"all_gather": lambda: one.all_gather(np.zeros(4, np.uint8)), "rank": lambda: one.rank},
        close=lambda: one.abort("closed"),
        survives=frozenset({"all_gather", "rank"}),
    )
