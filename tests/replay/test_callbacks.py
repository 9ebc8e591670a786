"""What native code asks of Python while it makes a batch: named in `stats`, and free to raise or to use the store."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from deadlines import patience
from recorded_shards import Episodes
from replay_calls import replay_of

import geartrain as gt
import geartrain.core.trace as trace
from geartrain.errors import ArgumentError, StoreClosedError
from geartrain.selection import Candidates, Draw, Epochs, GroupSampling, Limits, Mixture, Prioritized, Uniform

B = 8
FIELDS = {"t": gt.Field((), "int64"), "group": gt.Field((), "int64", per_row=True)}


@pytest.fixture
def store() -> Iterator[gt.Store]:
    with gt.Store.create(FIELDS, max_length=4, capacity=64) as made:
        made.insert({"t": np.zeros((48, 4), np.int64), "group": np.arange(48) // 4})
        made.limiter.set(samples_per_insert=100, min_size_to_sample=1, error_buffer=10_000, afresh=True)
        yield made


def middle(keys: gt.Keys, lengths: Any, random: Any) -> Any:
    return lengths // 2


class Own:
    """Rows by code of the user's; `at_work` is called before."""

    seed = 1

    def __init__(self, at_work: Callable[[], object] = lambda: None, more: int = 0) -> None:
        self._at_work = at_work
        self._more = more

    def select(self, candidates: Candidates, n: int, step: int, **_: Any) -> Draw:
        self._at_work()
        rows = np.arange(n + self._more, dtype=np.uint32)
        return Draw(rows, np.ones(len(rows), np.uint32), np.ones(len(rows)))


class Weighed(Uniform):
    def importance_weights(self, draw: Draw, count: int, step: int) -> Any:
        return np.ones(len(draw.rows))


PATHS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "none": (Uniform(seed=1), {}, "native"),
    "select": (Own(), {}, "native, calls Own.select"),
    "groups": (GroupSampling("group", 4, seed=1), {}, "native, calls GroupSampling.select"),
    "passes": (Epochs(seed=1), {}, "native, calls Epochs.take"),
    "windows": (Epochs(seed=1), {"window": gt.Windows(2, at=middle)}, "native, calls Epochs.take, Windows.at"),
    "beta": (Prioritized(seed=1, beta=lambda step: 0.5), {}, "native, calls Prioritized.beta"),
    "limits": (Uniform(seed=1, limits=Limits(lambda: 0)), {}, "native, calls Limits.min_version"),
    "weights": (Weighed(seed=1), {}, "native, calls Weighed.importance_weights"),
    "transform": (Own(), {"transform": len}, "native, calls Own.select, transform"),
    "mixture": (Mixture([0.5, 0.5], [Own(), Uniform(seed=1)]), {}, "native, calls Own.select"),
}


@pytest.mark.parametrize(("selection", "options", "path"), PATHS.values(), ids=PATHS)
def test_the_path_names_each_callback(store: gt.Store, selection: Any, options: dict[str, Any], path: str) -> None:
    stores: Any = [store, store] if isinstance(selection, Mixture) else store
    with replay_of(stores, selection, B, output="numpy", prefetch=0, **options) as replay:
        replay.sample()
        assert replay.stats()["path"] == path


def test_the_path_names_a_reward() -> None:
    hindsight = gt.Hindsight(reward=lambda achieved, desired: np.zeros(len(achieved)))
    with Episodes(20, least=4).stores(1) as (store,):
        view = gt.Transitions(hindsight=hindsight)
        with gt.Replay(store, Uniform(seed=1), B, view=view, output="numpy", prefetch=0) as replay:
            assert replay.stats()["path"] == "native, calls Hindsight.reward"


def test_what_a_callback_raises_is_raised_and_nothing_stays_admitted(store: gt.Store) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("of the user's")

    for selection, window in ((Own(fails), None), (Uniform(seed=1), gt.Windows(2, at=fails))):
        with gt.Replay(store, selection, B, window=window, output="numpy", prefetch=0) as replay:
            for _ in range(2):
                with pytest.raises(KeyError, match="of the user's"):
                    replay.sample()
                assert store.limiter.state().samples == 0


@pytest.mark.parametrize("thread", [False, True], ids=["itself", "another thread"])
@pytest.mark.parametrize("place", [False, True], ids=["select", "windows"])
def test_a_store_may_be_closed_while_a_callback_runs(store: gt.Store, thread: bool, place: bool) -> None:
    def close() -> None:
        if not thread:
            store.close()
            return
        other = threading.Thread(target=store.close)
        other.start()
        other.join(patience(20))
        assert not other.is_alive()  # the call that asks is none that a close waits for

    def closes(keys: gt.Keys, lengths: Any, random: Any) -> Any:
        close()
        return lengths // 2

    selection = Uniform(seed=1) if place else Own(close)
    window = gt.Windows(2, at=closes) if place else None
    with gt.Replay(store, selection, B, window=window, output="numpy", prefetch=0) as replay:
        with pytest.raises(StoreClosedError):
            replay.sample()


@pytest.mark.parametrize("more", [-1, 1])
def test_another_number_of_rows_than_was_asked_for_is_refused(store: gt.Store, more: int) -> None:
    with gt.Replay(store, Own(more=more), B, output="numpy", prefetch=0) as replay:
        with pytest.raises(ArgumentError, match=f"{B} rows were asked for, {B + more} were drawn"):
            replay.sample()
    assert store.limiter.state().samples == 0


@pytest.mark.parametrize("transform", [None, len], ids=["batches", "transformed"])
def test_tracing_changes_none_of_the_code_that_makes_a_batch(
    store: gt.Store, transform: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "slice_of", lambda *_, **__: None)

    def called() -> list[str]:
        names: list[str] = []

        def note(frame: Any, event: str, _: Any) -> None:
            module = frame.f_globals.get("__name__", "")
            if event == "call" and module.startswith("geartrain.replay"):
                names.append(f"{module}.{frame.f_code.co_qualname}")

        with replay_of(store, Uniform(seed=1), B, transform=transform, output="numpy", prefetch=0) as replay:
            replay.sample()
            sys.setprofile(note)
            try:
                replay.sample()
            finally:
                sys.setprofile(None)
        return names

    without = called()
    monkeypatch.setattr(trace, "on", True)
    told = {"geartrain.replay.native_batch.NativeBatch.__len__", "geartrain.replay.replay.Replay.step"}  # by the trace
    assert [name for name in called() if name not in told] == [name for name in without if name not in told]


def test_one_row_that_goes_between_its_draw_and_its_copy_is_drawn_again() -> None:
    fields = {"t": gt.Field((), "int64"), "id": gt.Field((), "int64", per_row=True)}
    with gt.Store.create(fields, max_length=3, capacity=20) as store:
        store.insert({"t": np.zeros((20, 3), np.int64), "id": np.arange(20)})
        gone: list[gt.Keys] = []

        def at(keys: gt.Keys, lengths: Any, random: Any) -> Any:
            if not gone:
                gone.append(keys[2:3])
                store.delete(gone[0])
            return lengths - 1

        selection = gt.selection.Uniform(seed=1, replacement=False)
        with gt.Replay(store, selection, 8, window=gt.Windows(1, at=at), output="numpy", prefetch=0) as replay:
            batch = replay.sample()
            assert replay.stats()["redrawn"] == 1
        assert gone[0].row[0] not in batch.keys.row
        assert np.array_equal(batch["id"], np.arange(20)[batch.keys.row])
