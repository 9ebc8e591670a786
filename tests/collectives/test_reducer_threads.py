"""Threads of a reducer: a share of a group on each, by one address; more groups than one; what is lost with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collectives_crew import MemoryStore, group_of, run_ranks
from deadlines import patience
from reductions import in_order

import geartrain.launch as launch
from geartrain.collectives import Group, Reducer
from geartrain.errors import ArgumentError, ReducerLostError


def numbers(rank: int, n: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=n).astype(np.float32)


def in_rank_order(world_size: int, n: int) -> np.ndarray:
    return in_order("sum", [numbers(rank, n) for rank in range(world_size)])


def all_fine(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def busy_s() -> list[float]:
    """Processor seconds of the two busiest reducer threads of this process; the listener's is none of them."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            name, stat = (task / "comm").read_text().strip(), (task / "stat").read_text()
        except FileNotFoundError:  # it has ended
            continue
        if name == "geartr. reducer":
            user, system = stat.rpartition(")")[2].split()[11:13]
            found.append((int(user) + int(system)) / os.sysconf("SC_CLK_TCK"))
    return sorted(found)[-2:]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("shares", ["auto", [0, 0, 0, 0.2, 0.3, 0.5], [0.2, 0.1, 0, 0.3, 0, 0.4]])
def test_threads_of_a_reducer_change_nothing_but_who_adds_up(shares: Any, transport: str) -> None:
    with Reducer(threads=3, transport=transport) as reducer:
        assert reducer.addresses == (reducer.address,) * 3

        def body(rank: int, group: Group) -> list[np.ndarray]:
            assert group.reducers == reducer.addresses
            return [group.all_reduce(numbers(rank, n)) for n in (0, 1, 4097, 300_001)]

        options: dict[str, Any] = {"reducers": reducer.addresses, "shares": shares, "transport": transport}
        for result in all_fine(run_ranks(3, body, **options)):
            for array in result:
                assert np.array_equal(array, in_rank_order(3, len(array)))
        found = reducer.metrics()
        assert found["reduced_bytes"] > 0
        assert found["groups_served"] == 1


def test_every_thread_of_a_reducer_has_its_part_of_a_group() -> None:
    with Reducer(threads=2, transport="tcp") as reducer:

        def body(rank: int, group: Group) -> None:
            array = np.ones(4 << 20, np.float32)
            until = time.monotonic() + patience(120)
            over = np.zeros(1)
            while not over[0]:
                group.all_reduce(array, op="avg")
                over[0] = sum(busy_s()) > 0.4 or time.monotonic() > until
                group.all_reduce(over, op="max")

        all_fine(run_ranks(2, body, reducers=reducer.addresses, shares=[0, 0, 0.5, 0.5], transport="tcp"))
        low, high = busy_s()
        assert low > 0.3 * high > 0, (low, high)


def test_groups_that_list_a_reducer_once_are_spread_over_its_threads() -> None:
    with Reducer(threads=2, transport="tcp") as reducer:
        array = np.ones(1 << 20, np.float32)
        groups: list[Group] = []
        until = time.monotonic() + patience(120)
        try:
            while len(groups) < 64 and min(busy_s()) < 0.05:
                assert time.monotonic() < until, busy_s()
                groups.append(group_of(0, 1, reducers=[reducer.address], shares=[0, 1], transport="tcp"))
                for _ in range(10):
                    groups[-1].all_reduce(array)
            assert min(busy_s()) >= 0.05, "all groups came to one thread"
            found = reducer.metrics()
            assert found["groups"] == found["ranks"] == len(groups)
        finally:
            for group in groups:
                group.close()


def test_a_group_is_counted_once_whatever_the_threads() -> None:
    with Reducer(threads=2, max_groups=1) as reducer:
        options: dict[str, Any] = {"reducers": reducer.addresses, "shares": [0, 0.5, 0.5]}
        with group_of(0, 1, **options) as group:
            group.all_reduce(np.ones(100_000, np.float32))
            found = reducer.metrics()
            assert (found["groups"], found["ranks"], found["groups_served"]) == (1, 1, 1)
            with pytest.raises(Exception, match="limit of groups"):
                group_of(0, 1, **options, timeout_s=patience(5))
        until = time.monotonic() + patience(20)
        while reducer.metrics()["groups"] and time.monotonic() < until:
            time.sleep(0.01)
        found = reducer.metrics()
        assert (found["groups"], found["groups_failed"], found["memory_bytes"]) == (0, 0, 0)
        with group_of(0, 1, **options) as group:
            assert group.all_reduce(np.ones(100_000, np.float32))[7] == 1


def test_a_reducer_is_lost_with_all_its_threads_and_named_once() -> None:
    reducer = Reducer(threads=3)

    def body(rank: int, group: Group) -> None:
        group.all_reduce(np.ones(100_000, np.float32))
        group.all_reduce(np.ones(1, np.float32))
        if rank == 0:
            reducer.close(0.0)
        for _ in range(100):
            group.all_reduce(np.ones(100_000, np.float32))

    for result in run_ranks(2, body, reducers=reducer.addresses, shares=[0, 0, 0.3, 0.3, 0.4]):
        assert isinstance(result, ReducerLostError)
        assert result.reducers == (reducer.address,)


def test_training_goes_on_without_a_lost_reducer_of_several_threads() -> None:
    reducers = [Reducer(threads=2), Reducer()]

    def body(rank: int, group: Group) -> tuple[bool, int]:
        good = True
        for step in range(20):
            if step == 10 and rank == 0:
                reducers[0].close(0.0)
            array = group.all_reduce(numbers(rank, 50_000))
            good &= np.array_equal(array, in_rank_order(2, 50_000))
        return good, int(group.counters()["lost_reducers"])

    listed = [*reducers[0].addresses, *reducers[1].addresses]
    shares = [0, 0, 0.3, 0.3, 0.4]
    found = all_fine(run_ranks(2, body, reducers=listed, shares=shares, on_reducer_loss="continue"))
    assert found == [(True, 2)] * 2  # one for each thread
    reducers[1].close()


def test_an_address_that_stands_there_twice_has_one_link() -> None:
    """Without rates: a reducer that is listed for each of its threads owns as much as one of one thread."""

    def shares(rank: int, group: Group) -> tuple[float, ...]:
        return group.shares

    with Reducer() as one, Reducer(threads=2) as two:
        (of_one, _), (of_two, _) = (run_ranks(2, shares, reducers=each.addresses) for each in (one, two))
        assert of_two[2] == pytest.approx(of_two[3])
        assert of_two[2] + of_two[3] == pytest.approx(of_one[2])
        assert of_two[:2] == pytest.approx(of_one[:2])


def test_lists_of_threads_in_different_orders_are_refused() -> None:
    with Reducer(threads=2) as a, Reducer() as b:
        lists = ([a.address, b.address, a.address], [a.address, a.address, b.address])
        found: list[Any] = [None, None]
        store = MemoryStore()

        def join(rank: int) -> None:
            try:
                Group(rank, 2, store=store, reducers=lists[rank], timeout_s=patience(30)).close()
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all("reducers" in str(error) for error in found), found


@pytest.mark.parametrize("threads", [0, -1, 65, 1.5, "2", True])
def test_the_number_of_threads_is_checked(threads: Any) -> None:
    with pytest.raises(ArgumentError, match="threads"):
        Reducer(threads=threads)
    with pytest.raises(ArgumentError, match="threads"):
        launch.reducers(threads=threads)


def test_the_command_prints_the_address_for_each_thread() -> None:
    command = [sys.executable, "-m", "geartrain", "reducer", "--bind", "127.0.0.1:0", "--threads", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            listed = first.split(" on ")[1].split(", with")[0].split(",")
            assert len(listed) == 3, first
            with Group(0, 1, reducers=listed, shares=[0, 0.5, 0.25, 0.25]) as group:
                assert (group.all_reduce(np.ones(50_000, np.float32)) == 1).all()
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=patience(30))
    assert process.returncode == 0
