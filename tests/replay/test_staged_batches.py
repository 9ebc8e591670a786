"""Staged batches on a device: sampled into pinned memory that is used again, their tensors made when asked for."""

from __future__ import annotations

import copy as copy_module
import dataclasses
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from device_batches import check_same, filled_store
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import FieldError
from geartrain.replay.device import DeviceOptions
from geartrain.selection import Mixture, Prioritized, Uniform

pytest.importorskip("torch")
pytest.importorskip("triton")
from geartrain.tools.testing import SimulatedDevice


@pytest.fixture
def store(store_name: Callable[[], str]) -> Iterator[gt.Store]:
    with filled_store(store_name(), rows=60, capacity=64, max_length=30) as made:
        yield made


def test_pinned_batches_that_are_used_again_keep_no_importance_weights(store_name: Callable[[], str]) -> None:
    """Of a mixture whose quotas change from batch to batch: one store's rows have weights and the other's none."""
    device = SimulatedDevice(3)
    shape = {"rows": 60, "capacity": 64, "max_length": 30}
    with filled_store(store_name(), **shape) as one, filled_store(store_name(), **shape) as two:
        mixture = Mixture([0.3, 0.7], [Prioritized(seed=1, beta=0.7), Uniform(seed=2)], seed=3)
        kinds: dict[str, Any] = {"window": 5, "num_batches": 24, "prefetch": 0}
        with (
            replay_of([one, two], mixture, 7, **kinds) as slow,
            replay_of([one, two], mixture, 7, **kinds, device=DeviceOptions(device, path="staged")) as fast,
        ):
            for host, landed in zip(slow, fast, strict=True):
                device.finish()
                check_same(host, landed, {}, False)
            assert fast.describe()[0]["pinned_pool_bytes"] > 0


def test_tensors_of_a_batch_on_a_device_are_made_when_they_are_asked_for(store: gt.Store) -> None:
    device = SimulatedDevice(5)
    for path in ("staged", "gather"):
        with (
            gt.Replay(store, Prioritized(seed=1, beta=0.5), 8, window=7) as slow,
            gt.Replay(
                store, Prioritized(seed=1, beta=0.5), 8, window=7, device=DeviceOptions(device, path=path)
            ) as fast,  # type: ignore[arg-type]
        ):
            host, batch = slow.sample(), fast.sample()
            device.finish()
            assert list(batch) == list(host) == list(batch.fields)
            assert "x" in batch and "y" not in batch and 3 not in batch and [] not in batch
            assert len(batch) == batch.batch_size == 8 and batch.nbytes == host.nbytes
            assert batch["x"] is batch["x"] is batch.fields["x"]
            assert batch.draw is None and batch.cu_seqlens is None
            for name in ("y", 3, [], None):
                with pytest.raises(FieldError):
                    batch[name]  # type: ignore[index]
            with pytest.raises(AttributeError):
                getattr(batch, "rows")  # noqa: B009
            check_same(host, pickle.loads(pickle.dumps(batch)), {}, False)
            check_same(host, dataclasses.replace(batch, step=batch.step), {}, False)
            check_same(host, copy_module.copy(batch), {}, False)


def test_small_batches_are_staged_on_the_thread_that_asks_for_them_at_once(store: gt.Store) -> None:
    device = SimulatedDevice(5)
    with gt.Replay(store, Uniform(seed=1), 8, window=7, device=DeviceOptions(device)) as replay:
        for _ in range(200):
            replay.sample()
            device.finish()
        assert replay._loader._placement is not None
        if replay._loader._placement.here:  # a busy machine may have seen batches that took long
            assert "geartrain-prefetch" not in {thread.name for thread in threading.enumerate()}
    with gt.Replay(store, Uniform(seed=1), 8, window=7, device=DeviceOptions(device, path="gather")) as replay:
        replay.sample()
        assert replay._loader._placement is None
