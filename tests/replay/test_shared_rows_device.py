"""Rows of several episodes on a device: windows are those of host memory, and the GPU is not asked to gather them."""

from __future__ import annotations

from typing import Any

import pytest
from device_batches import check_same
from replay_calls import replay_of
from test_shared_row_windows import B, marked_store

import geartrain as gt
from geartrain.errors import ArgumentError
from geartrain.replay.device import DeviceOptions
from geartrain.selection import Prioritized, Uniform
from geartrain.tools.testing import ThreadRankGroup, run_ranks

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from geartrain.tools.testing import SimulatedDevice  # noqa: E402


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("per", ["row", "step", "episode"])
def test_windows_on_a_device_are_those_of_host_memory(per: Any, packed: bool) -> None:
    store, _, _ = marked_store(40, priority_per="step" if per == "step" else "row")
    strategy = Prioritized(seed=2) if per == "step" else Uniform(seed=1, over="steps")
    with store:
        settings: dict[str, Any] = {"window": 5, "pad": "right", "num_batches": 4, "fields": ["t", "reward"]}
        settings["window"] = gt.Windows(8, at="episode") if per == "episode" else 5
        device = SimulatedDevice(3)
        with (
            replay_of(store, strategy, B, **settings) as slow,
            replay_of(store, strategy, B, **settings, device=DeviceOptions(device, packed=packed)) as fast,
        ):
            cut = 0
            for host, landed in zip(slow, fast, strict=True):
                device.finish()
                check_same(host, landed, {}, packed)
                cut += int(((host.start > 0) & (host.mask.sum(1) < 5)).sum())
            assert cut > 0, "some windows begin behind a mark"
            (about,) = fast.describe()
            assert about["path"] == "staged"
            assert ("at='episode'" if per == "episode" else "several episodes") in about["why"]


def test_windows_on_the_devices_of_ranks_are_those_of_host_memory() -> None:
    strategy, stores = Prioritized(seed=3), [marked_store(20, seed=seed, priority_per="step")[0] for seed in (1, 2)]
    others = ThreadRankGroup.make(2)

    def body(group: ThreadRankGroup) -> None:
        device, store = SimulatedDevice(group.rank), stores[group.rank]
        settings: dict[str, Any] = {"window": gt.Windows(4, whole=True), "num_batches": 3, "assignment": "ordered"}
        with (
            replay_of(store, strategy, B, group=group, **settings) as slow,
            replay_of(store, strategy, B, group=others[group.rank], device=DeviceOptions(device), **settings) as fast,
        ):
            for host, landed in zip(slow, fast, strict=True):
                device.finish()
                check_same(host, landed, {}, False)
            assert fast.describe()[0]["path"] == "staged"

    run_ranks(2, body)
    for store in stores:
        store.close()


def test_a_gpu_that_is_to_gather_them_is_refused() -> None:
    store, _, _ = marked_store(10)
    with store:
        gather = DeviceOptions(SimulatedDevice(0), path="gather")
        with pytest.raises(ArgumentError, match="several episodes"):
            gt.Replay(store, Uniform(over="steps"), 4, window=3, device=gather)
        with pytest.raises(ArgumentError, match="path='staged'"):
            gt.Replay(store, Uniform(over="steps"), 4, device=gather)
