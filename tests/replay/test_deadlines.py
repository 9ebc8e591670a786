"""`timeout_s` of a replay: one deadline for all that a batch waits for, on whichever thread it is built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest
from replay_calls import replay_of

import geartrain as gt
import geartrain.replay.prefetch as prefetch
import geartrain.replay.store_waits as waits_module
from geartrain.errors import WaitTimeoutError
from geartrain.selection import Mixture, Uniform
from geartrain.store.rate_limiter import RateLimiter

TIMEOUT_S = 1.0


@pytest.fixture
def stores() -> Iterator[list[gt.Store]]:
    """Three empty stores, each with another handle, so that rows may still come."""
    with ExitStack() as open_stores:
        fields = {"x": gt.Field((), "int64")}
        made = [open_stores.enter_context(gt.Store.create(None, fields, max_length=1, capacity=8)) for _ in range(3)]
        for store in made:
            open_stores.enter_context(gt.Store.open(store.path))
        yield made


class Clock:
    """The samplers' clock: a look at a store takes 0.1 s, and with one of them its first row comes."""

    def __init__(self, store: gt.Store, looks: int) -> None:
        self.now_s = 100.0
        self._store, self._looks = store, looks

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, _seconds: float) -> None:
        self.now_s += 0.1
        self._looks -= 1
        if self._looks == 0:
            self._store.insert({"x": np.zeros((1, 1), np.int64)})


@pytest.mark.parametrize("ahead", [0, 1], ids=["on the consumer's thread", "built here by its placement"])
def test_the_wait_for_rows_counts_against_the_wait_for_the_limiter(stores: list[gt.Store], ahead: int) -> None:
    waited: list[float] = []

    def admit(_self: RateLimiter, _n: int, timeout_s: float, *_stopping: object) -> None:
        waited.append(timeout_s)

    placement = mock.patch.object(prefetch.BuildPlacement, "note", lambda self, *_: setattr(self, "here", True))
    store = stores[0]
    with replay_of(
        store, Uniform(seed=0), 1, prefetch=ahead, min_rows=2, timeout_s=TIMEOUT_S, output="numpy"
    ) as replay:
        if ahead:
            store.insert({"x": np.zeros((2, 1), np.int64)})
            with placement:
                for _ in range(4):
                    replay.sample()
            assert not any(thread for thread in (replay._loader._ahead,) if thread is not None)
            store.delete(store.keys())
        store.insert({"x": np.zeros((1, 1), np.int64)})
        clock = mock.patch.object(waits_module, "time", Clock(store, 6))
        with clock, mock.patch.object(RateLimiter, "admit_samples", admit):
            replay.sample()
    assert waited == [pytest.approx(TIMEOUT_S - 0.6)]


def test_a_batch_of_several_stores_has_one_deadline(stores: list[gt.Store]) -> None:
    """The first store's rows come late, the others' never."""
    selection = Mixture([1, 1, 1], [Uniform(seed=0), Uniform(seed=1), Uniform(seed=2)])
    with replay_of(stores, selection, 6, prefetch=0, timeout_s=TIMEOUT_S, output="numpy") as replay:
        clock = Clock(stores[0], 7)
        with (
            mock.patch.object(waits_module, "time", clock),
            pytest.raises(WaitTimeoutError, match="too few rows within 1 s; meanwhile the store went from 0 to 0 rows"),
        ):
            replay.sample()
    assert clock.now_s - 100 <= TIMEOUT_S + 0.11
