"""The store against a model of a dozen lines: any sequence of calls leaves both with the same rows."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import geartrain as gt
from geartrain.errors import SchemaError, StaleKeyError, StoreFullError

FIELDS = {"value": gt.Field((), "int64", per_row=True), "steps": gt.Field((2,), "int16")}
BITS = 16
NEVER_S, AT_ONCE_S = None, 1e-9  # an age limit that every row has passed by the next call
CLOCK_REALTIME_COARSE = 5
_numbers = itertools.count()

priorities_strategy = st.one_of(
    st.sampled_from([0.0, 1.0, 0.5, 1e-9, 3e5]), st.floats(0, 100, allow_nan=False, allow_infinity=False)
)
bad_priorities = st.sampled_from([-1.0, float("nan"), float("inf"), -1e-300])


def kept(priority: float) -> float:
    """A priority as the store keeps it."""
    fixed = min(round(priority * 2**BITS), 2**32 - 1)
    return (1 if fixed == 0 and priority > 0 else fixed) / 2**BITS


@dataclass
class Row:
    """What the model knows of a committed row."""

    value: int
    length: int
    version: int
    priority: float
    sampled: int = 0


class StoreModel(RuleBasedStateMachine):
    """Rows in the order of their commits, keyed as the store keys them."""

    @initialize(
        capacity=st.integers(1, 9),
        headroom=st.integers(0, 4),
        remover=st.sampled_from(["fifo", "lifo", "lowest_priority"]),
        max_times_sampled=st.sampled_from([None, None, 1, 2]),
        max_age_s=st.sampled_from([NEVER_S, NEVER_S, NEVER_S, AT_ONCE_S]),
    )
    def create(self, capacity, headroom, remover, max_times_sampled, max_age_s):
        self.name = f"test-{os.getpid()}-model-{next(_numbers)}"
        self.capacity, self.max_rows = capacity + headroom, capacity
        self.remover, self.limit, self.ages = remover, max_times_sampled, max_age_s is not None
        self.store = gt.Store.create(
            self.name,
            FIELDS,
            max_length=5,
            capacity=self.capacity,
            max_rows=self.max_rows,
            remover=remover,
            max_times_sampled=max_times_sampled,
            max_age_s=max_age_s,
        )
        self.rows: dict[tuple[int, int], Row] = {}
        self.held: list[gt.Rows] = []
        self.gone: list[tuple[int, int]] = []
        self.values = itertools.count()

    def teardown(self):
        if hasattr(self, "store"):
            self.held.clear()
            self.store.close()
            assert not os.path.exists(f"/dev/shm/geartrain.{self.name}")

    # --- what the model does ------------------------------------------------------------------------------------

    def blocks_held(self) -> int:
        return sum(len(rows) for rows in self.held)

    def remove(self, key: tuple[int, int]) -> None:
        del self.rows[key]
        self.gone.append(key)

    def grow_old(self) -> int:
        """Lets the clock that ages are measured by tick once, so that all rows are too old if there is a limit."""
        if not self.ages:
            return 0
        now = time.clock_gettime(CLOCK_REALTIME_COARSE)
        while time.clock_gettime(CLOCK_REALTIME_COARSE) == now:
            pass
        for key in (old := list(self.rows)):
            self.remove(key)
        return len(old)

    def evict(self) -> None:
        keys = list(self.rows)
        match self.remover:
            case "fifo":
                self.remove(keys[0])
            case "lifo":
                self.remove(keys[-1])
            case _:
                self.remove(min(keys, key=lambda key: self.rows[key].priority))  # the first, so the oldest, of equals

    def may_allocate(self, n: int) -> bool:
        """Makes room for n blocks as the store does; False when it must refuse."""
        if n > self.capacity:  # at the door, before anything is removed
            return False
        self.grow_old()
        free = self.capacity - self.blocks_held() - len(self.rows)
        if free + len(self.rows) < n:
            return False
        for _ in range(n - free):
            self.evict()
        return True

    def commit(self, keys: gt.Keys, rows: list[Row]) -> None:
        for row, index, generation in zip(rows, keys.row.tolist(), keys.generation.tolist(), strict=True):
            if len(self.rows) >= self.max_rows:
                self.evict()
            assert generation % 2 == 1
            assert (index, generation) not in self.rows
            assert (index, generation) not in self.gone
            self.rows[index, generation] = row

    def keys_of(self, keys: list[tuple[int, int]]) -> gt.Keys:
        return gt.Keys(np.array([row for row, _ in keys]), np.array([generation for _, generation in keys]))

    def some_keys(self, data, most: int = 4) -> list[tuple[int, int]]:
        """Some that are there, some that were, in any order and with repetitions."""
        known = list(self.rows) + self.gone[-6:]
        return data.draw(st.lists(st.sampled_from(known), max_size=most)) if known else []

    # --- what may be called -------------------------------------------------------------------------------------

    @rule(data=st.data(), n=st.integers(1, 4))
    def insert(self, data, n):
        n = min(n, max(1, self.max_rows // 2))  # in one piece
        lengths = data.draw(st.lists(st.integers(1, 5), min_size=n, max_size=n))
        priorities = data.draw(st.lists(priorities_strategy, min_size=n, max_size=n))
        new = [Row(next(self.values), lengths[i], i - 2, kept(priorities[i])) for i in range(n)]
        values = np.array([row.value for row in new])
        steps = (values[:, None, None] + np.arange(10).reshape(5, 2)).astype(np.int16)
        arguments = {"lengths": lengths, "priorities": priorities, "versions": [row.version for row in new]}
        allowed = self.may_allocate(n)
        if allowed:
            self.commit(self.store.insert({"value": values, "steps": steps}, **arguments), new)
        else:
            with pytest.raises(StoreFullError):
                self.store.insert({"value": values, "steps": steps}, **arguments)

    @rule(n=st.integers(1, 3), bad=bad_priorities)
    def insert_with_a_bad_priority(self, n, bad):
        with pytest.raises(SchemaError):
            self.store.insert(
                {"value": np.zeros(n, np.int64), "steps": np.zeros((n, 5, 2), np.int16)},
                priorities=[1.0] * (n - 1) + [bad],
            )

    @rule(n=st.integers(1, 3))
    def allocate(self, n):
        if self.may_allocate(n):
            self.held.append(self.store.rows(n))
        else:
            with pytest.raises(StoreFullError):
                self.store.rows(n)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def commit_held(self, data):
        rows = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        new = []
        for view in rows:
            value = next(self.values)
            view["value"] = value
            view["steps"] = value + np.arange(10).reshape(5, 2)
            new.append(Row(value, 1 + value % 5, value, kept(value % 7 / 3)))
        rows.lengths = [row.length for row in new]
        rows.versions = [row.version for row in new]
        rows.priorities = [row.value % 7 / 3 for row in new]
        self.commit(rows.commit(), new)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), forget=st.booleans())
    def abandon_held(self, data, forget):
        rows = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if forget:
            del rows
        else:
            rows.abandon()

    @rule(data=st.data())
    def update_priorities(self, data):
        keys = self.some_keys(data)
        priorities = data.draw(st.lists(priorities_strategy, min_size=len(keys), max_size=len(keys)))
        stale = self.store.update_priorities(self.keys_of(keys), priorities)
        assert stale == sum(key not in self.rows for key in keys)
        for key, priority in zip(keys, priorities, strict=True):
            if key in self.rows:
                self.rows[key].priority = kept(priority)

    @rule(data=st.data(), bad=bad_priorities)
    def update_with_a_bad_priority(self, data, bad):
        keys = self.some_keys(data)
        if keys:
            with pytest.raises(SchemaError):
                self.store.update_priorities(self.keys_of(keys), [7.0] * (len(keys) - 1) + [bad])

    @rule(data=st.data())
    def delete(self, data):
        keys = self.some_keys(data)
        stale = self.store.delete(self.keys_of(keys))
        there = {key for key in keys if key in self.rows}
        assert stale == len(keys) - len(there)
        for key in there:
            self.remove(key)

    @rule(data=st.data())
    def sample(self, data):
        keys = self.some_keys(data)
        asked = self.keys_of(keys)
        taken, _ = self.store.native.count_samples(asked.row, asked.generation)
        spent = []
        for key, was_taken in zip(keys, taken.tolist(), strict=True):
            assert was_taken == (key in self.rows)
            if key in self.rows:
                self.rows[key].sampled += 1
                if self.rows[key].sampled == self.limit:
                    spent.append((key, self.rows[key].value))
                    self.remove(key)
        for key, value in spent:  # its last sample can still be read
            assert gt.fetch(self.store, self.keys_of([key]), output="numpy")["value"].tolist() == [value]
        assert self.store.audit() == []
        self.store.native.release_exhausted(asked.row, asked.generation)

    @rule()
    def expire(self):
        expected = self.grow_old()
        assert self.store.expire() == expected

    @rule()
    def reap(self):
        assert self.store.reap() == 0

    @rule()
    def rebuild(self):
        self.store.native.rebuild()

    # --- what must hold -----------------------------------------------------------------------------------------

    @invariant()
    def the_books_agree(self):
        assert self.store.audit() == []
        stats = self.store.stats()
        assert stats["committed"] == len(self.store) == len(self.rows)
        assert stats["writing"] == self.blocks_held()
        assert stats["free"] == self.capacity - self.blocks_held() - len(self.rows)

    @invariant()
    def the_rows_are_the_models(self):
        keys = self.store.keys()
        assert list(zip(keys.row.tolist(), keys.generation.tolist(), strict=True)) == list(self.rows)
        expected = list(self.rows.values())
        status = self.store.status()
        assert status["priority"].tolist() == [row.priority for row in expected]
        assert status["times_sampled"].tolist() == [row.sampled for row in expected]
        assert self.store.native.total_priority() == sum(int(row.priority * 2**BITS) for row in expected)
        batch = gt.fetch(self.store, keys, output="numpy")
        assert batch["value"].tolist() == [row.value for row in expected]
        assert batch.length.tolist() == [row.length for row in expected]
        assert batch.version.tolist() == [row.version for row in expected]
        for steps, row in zip(batch["steps"], expected, strict=True):
            assert steps[: row.length].tolist() == (row.value + np.arange(10).reshape(5, 2))[: row.length].tolist()
            assert not steps[row.length :].any()

    @invariant()
    def a_key_of_a_row_that_went_is_stale_for_good(self):
        if self.gone:
            with pytest.raises(StaleKeyError):
                gt.fetch(self.store, self.keys_of(self.gone[-1:]), output="numpy")


StoreModel.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class TestTheStoreAgainstItsModel(StoreModel.TestCase):
    """A hundred and fifty sequences of up to thirty calls, always the same."""


@pytest.mark.slow
@pytest.mark.timeout(300)
class TestTheStoreAgainstItsModelAtLength(StoreModel.TestCase):
    """Many more, and new ones each time."""

    settings = settings(StoreModel.TestCase.settings, max_examples=400, stateful_step_count=60, derandomize=False)
