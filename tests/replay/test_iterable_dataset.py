"""A replay through a torch DataLoader: what arrives names its rows, whatever the loader did to it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from replay_calls import replay_of

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, IterableDataset, get_worker_info  # noqa: E402
from torch.utils.data._utils.pin_memory import pin_memory  # noqa: E402

import geartrain as gt  # noqa: E402
from geartrain.errors import ArgumentError  # noqa: E402
from geartrain.selection import Prioritized, Uniform  # noqa: E402

N = 40


@pytest.fixture
def store() -> Iterator[gt.Store]:
    fields = {"x": gt.Field((2,), "float32"), "id": gt.Field((), "int64", per_row=True)}
    with gt.Store.create(fields, max_length=6, capacity=N) as made:
        made.insert({"x": np.ones((N, 6, 2), np.float32), "id": np.arange(N)}, priorities=np.ones(N))
        yield made


def check(store: gt.Store, given: dict[int, float]) -> None:
    """The rows that were drawn have the priorities that were given for them, the others those from before."""
    keys = store.keys()
    ids = gt.fetch(store, keys, output="numpy")["id"]
    assert 0 < len(given) < N
    assert store.status(keys)["priority"].tolist() == [given.get(int(number), 1.0) for number in ids]


@pytest.mark.parametrize("through", ["replay", "store"])
@pytest.mark.parametrize(
    "options",
    [{"batch_size": None}, {}, {"batch_size": 3}, {"batch_size": None, "pin_memory": True}],
    ids=["as they are", "default", "collated", "pinned"],
)
def test_prioritized_replay_goes_through_a_loader(store: gt.Store, options: dict[str, Any], through: str) -> None:
    given: dict[int, float] = {}
    with gt.Replay(store, Prioritized(seed=1, beta=0.4), 4, prefetch=0, num_batches=3) as replay:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nothing is pinned where no accelerator is
            items = list(DataLoader(gt.ReplayDataset(replay), **options))
        for item in items:
            assert {"importance_weights", "mask", "length"} < set(item)
            ids = item["id"].flatten()
            known = store if through == "store" else replay
            assert known.update_priorities(item["keys"], ids + 2.0) == 0
            given |= {number: number + 2.0 for number in ids.tolist()}
            assert gt.fetch(store, item["keys"])["id"].tolist() == ids.tolist()
    check(store, given)


@pytest.mark.parametrize("output", ["torch", "numpy"])
@pytest.mark.parametrize("update_lag", [None, 2])
def test_each_value_of_an_item_is_a_tensor_or_array_of_its_rows(
    store: gt.Store, output: Any, update_lag: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So Lightning, Accelerate and the like move, slice and send items, and tell how many rows there are."""
    with replay_of(store, Prioritized(seed=1), 4, output=output, num_batches=4, update_lag=update_lag) as replay:
        items = list(gt.ReplayDataset(replay))
        for item in items:
            assert type(item) is dict
            assert all(hasattr(value, "shape") and len(value) == 4 for value in item.values())
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
        for item in map(pin_memory, DataLoader(items, batch_size=None)):
            assert all(isinstance(value, torch.Tensor) for value in item.values())
            half = {name: value[:2] for name, value in item.items()}
            assert replay.update_priorities(half["keys"], torch.full((2,), 5.0)) == 0
        replay.settle()
    drawn = np.concatenate([np.asarray(item["id"])[:2] for item in items])
    check(store, {int(number): 5.0 for number in drawn})


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_a_transform_returns_goes_through_a_loader(store: gt.Store, prefetch: int) -> None:
    def loaded(transform: Callable[[gt.Batch], Any]) -> list[Any]:
        with replay_of(store, Uniform(seed=1), 4, num_batches=2, prefetch=prefetch, transform=transform) as replay:
            return list(DataLoader(gt.ReplayDataset(replay), batch_size=None))

    for item in loaded(lambda batch: {"sum": batch["x"].sum((1, 2)), "keys": batch.keys}):
        assert set(item) == {"sum", "keys"}
        assert item["sum"].shape == (4,)
        assert store.update_priorities(item["keys"], [1.0] * 4) == 0
    assert [set(item) for item in loaded(lambda batch: {"id": batch["id"]})] == [{"id"}] * 2
    assert [set(item) for item in loaded(lambda batch: batch)] == [
        {"x", "id", "mask", "start", "length", "version", "probability", "keys"}
    ] * 2
    for ids, numbers in loaded(lambda batch: (batch["id"], batch["id"].numpy())):
        assert torch.equal(ids, numbers)


class OfWorkers(IterableDataset[Any]):
    """A replay in each worker, with a seed of its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        assert worker is not None
        with (
            gt.Store.open(self.name) as store,
            gt.Replay(store, Prioritized(seed=worker.id), 4, num_batches=2) as replay,
        ):
            yield from gt.ReplayDataset(replay)


def test_workers_with_replays_of_their_own_send_keys_to_the_process_that_trains(name: str) -> None:
    fields = {"id": gt.Field((), "int64", per_row=True)}
    with gt.Store.create(name, fields, capacity=N) as store:
        store.insert({"id": np.arange(N)}, priorities=np.ones(N))
        items = list(DataLoader(OfWorkers(name), batch_size=None, num_workers=2))
        given: dict[int, float] = {}
        for item in items:
            assert store.update_priorities(item["keys"], item["id"] + 2.0) == 0
            given |= {number: number + 2.0 for number in item["id"].tolist()}
        assert len(items) == 4
        assert len({tuple(item["id"].tolist()) for item in items}) == 4, "each worker draws batches of its own"
        check(store, given)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_replay_from_before_the_workers_is_refused_in_them(store: gt.Store, start: str) -> None:
    with gt.Replay(store, Uniform(seed=5), 4, num_batches=3) as replay:
        with pytest.raises(ArgumentError, match=r"would yield the same batches.*num_workers=0"):
            list(DataLoader(gt.ReplayDataset(replay), batch_size=None, num_workers=1, multiprocessing_context=start))
