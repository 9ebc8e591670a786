"""Factories of groups, their reducers and their operations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from collectives_crew import MemoryStore, group_of

from geartrain.collectives import Group, Reducer, Work
from hostile.subject import Subject, Tools, factory, order_lock


def groups(tools: Tools, **options: Any) -> list[Group]:
    store = MemoryStore()
    made: dict[int, Group] = {}
    failed: list[BaseException] = []

    def join(rank: int) -> None:
        try:
            made[rank] = group_of(rank, 2, store=store, timeout_s=tools.patience(20), host="127.0.0.1", **options)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        for group in made.values():
            group.close(0.0)
        raise failed[0]
    tools.stack.callback(made[1].close, 0.0)
    return [made[0], made[1]]


def reduce_on_both(one: Group, other: Group) -> Callable[[], object]:
    lock = order_lock()  # calls are made in the same order on all ranks

    def reduce() -> None:
        arrays = [np.ones(1000, np.float32) for _ in range(2)]
        with lock:
            works = [one.all_reduce_async(arrays[0]), other.all_reduce_async(arrays[1])]
        for work in works:
            work.wait()

    return reduce


def reduce_without_waiting(one: Group, other: Group) -> list[Work]:
    return [each.all_reduce_async(np.ones(1 << 21, np.float32)) for each in (one, other)]


def group_with(tools: Tools, **options: Any) -> Subject:
    one, other = groups(tools, **options)
    return Subject(
        calls={
            "all_reduce": reduce_on_both(one, other),
            "counters": one.counters,
            "error": one.error,
            "about": lambda: (one.epoch, one.reducers, one.shares),
        },
        close=lambda: one.close(0.0),
        survives=frozenset({"error", "about"}),
        blocked={"all_reduce": lambda: one.all_reduce(np.ones(1000, np.float32))},
        work=lambda: reduce_without_waiting(one, other),
        owned=[other],
    )


@factory(Group, waits=True)
def group(tools: Tools) -> Subject:
    return group_with(tools)


@factory(Group, "over TCP", waits=True)
def group_over_tcp(tools: Tools) -> Subject:
    return group_with(tools, transport="tcp")


@factory(Group, "hierarchical", waits=True)
def group_by_host(tools: Tools) -> Subject:
    return group_with(tools, hierarchical=True)


@factory(Group, "hierarchical, of hosts", waits=True)
def group_across_hosts(tools: Tools) -> Subject:
    return group_with(tools, hierarchical=True, hosts=["a", "b"])


@factory(Group, "with a reducer", waits=True)
def group_with_a_reducer(tools: Tools) -> Subject:
    reducer = Reducer()
    tools.stack.callback(reducer.close, 0.0)
    made = group_with(tools, reducers=[reducer.address])
    made.owned.append(reducer)
    return made


@factory(Group, "of one rank")
def group_of_one(tools: Tools) -> Subject:
    one = Group(0, 1)
    return Subject(
        calls={"all_reduce": lambda: one.all_reduce(np.ones(1000, np.float32)), "error": one.error},
        close=lambda: one.close(0.0),
        survives=frozenset({"error"}),
    )


@factory(Reducer, waits=True)
def reducer(tools: Tools) -> Subject:
    one = Reducer()
    first, second = groups(tools, reducers=[one.address])
    tools.stack.callback(first.close, 0.0)
    return Subject(
        calls={
            "all_reduce": reduce_on_both(first, second),
            "metrics": one.metrics,
            "address": lambda: one.address,
        },
        close=lambda: one.close(0.0),
        survives=frozenset({"address"}),
        blocked={"all_reduce": lambda: first.all_reduce(np.ones(1000, np.float32))},
        work=lambda: reduce_without_waiting(first, second),
        owned=[first, second],
    )


@factory(Work, waits=True)
def work(tools: Tools) -> Subject:
    one, other = groups(tools)
    arrays = [np.ones(1000, np.float32) for _ in range(2)]
    done, theirs = one.all_reduce_async(arrays[0]), other.all_reduce_async(arrays[1])
    theirs.wait()
    done.wait()
    going = one.all_reduce_async(np.ones(1000, np.float32))
    return Subject(
        calls={
            "wait": done.wait,
            "done": lambda: (done.done(), going.done()),
            "error": lambda: (done.error(), going.error()),
            "nbytes": lambda: going.nbytes,
        },
        close=lambda: one.close(0.0),
        survives=frozenset({"wait", "done", "error", "nbytes"}),
        blocked={"wait": going.wait},
        work=lambda: going,
        owned=[other, theirs],
    )
