"""Windows of batches over ranks, on a device and of mixtures: those of one store in host memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import rank_batches
from replay_calls import replay_of
from window_reference import CASE_IDS, CASES, anchors_of, check_batch, make_store, steps_of

import geartrain as gt
from geartrain.errors import ArgumentError, RanksDisagreeError
from geartrain.selection import Mixture, Prioritized, Uniform
from geartrain.tools.testing import run_ranks


@pytest.mark.parametrize("windows", CASES, ids=CASE_IDS)
def test_global_batches_over_any_number_of_ranks_have_the_same_windows(windows):
    selection = Prioritized(seed=3, beta=0.5)
    made = []
    for cuts in ([0, 240], [0, 90, 240], [0, 20, 120, 240]):
        stores = []
        for first, last in itertools.pairwise(cuts):
            stores.append(gt.Store.create(rank_batches.FIELDS, max_length=rank_batches.STEPS, capacity=240))
            rank_batches.insert(stores[-1], first, last)
        made.append(rank_batches.over_ranks(stores, selection, window=windows, prefetch=len(cuts) % 2)[0])
        for store in stores:
            store.close()
    assert rank_batches.same(made[0], made[1]) and rank_batches.same(made[0], made[2])
    with gt.Store.create(rank_batches.FIELDS, max_length=rank_batches.STEPS, capacity=240) as store:
        rank_batches.insert(store, 0, 240)
        lengths = {number * 100: number % rank_batches.STEPS + 1 for number in range(240)}
        plain = gt.Windows(4, anchor=windows.anchor, stride=windows.stride, whole=windows.whole)
        for batch in made[0]:  # each window is one that its row has
            for i, number in enumerate(batch["number"].tolist()):
                steps = np.flatnonzero(batch["mask"][i]) * 0 + batch["start"][i] + np.arange(batch["mask"][i].sum())
                length = lengths[number * 100]
                told = anchors_of(length, plain)
                if windows.at == "start":
                    told = [0]
                elif windows.at == "end":
                    told = [length - 1]
                assert steps.tolist() in [steps_of(t, length, windows) for t in told]
        if not windows.whole:  # limits are drawn under otherwise over ranks (geartrain.selection.sharded)
            options = {"window": windows, "output": "numpy", "num_batches": 3}
            with replay_of(store, selection, rank_batches.B, **options) as replay:
                alone = [rank_batches.as_record(batch) for batch in replay]
            assert rank_batches.same(alone, made[0])


def test_ranks_that_disagree_on_windows_are_told():
    def body(rank):
        with make_store([5, 6]) as store:
            windows = gt.Windows(3, at="start" if rank.rank else "end")
            with pytest.raises(RanksDisagreeError, match="windows"):
                gt.Replay(store, Uniform(seed=0), 2, window=windows, group=rank)

    run_ranks(2, body)


@pytest.mark.parametrize("windows", CASES, ids=CASE_IDS)
def test_batches_on_a_device_have_the_same_windows(windows):
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from device_batches import check_same

    from geartrain.replay.device import DeviceOptions
    from geartrain.tools.testing import SimulatedDevice

    with make_store([1, 3, 4, 5, 9, 12, 12, 7]) as store:
        for packed in (False, True):
            device = SimulatedDevice(packed)
            options = DeviceOptions(device, packed=packed)
            with (
                gt.Replay(store, Prioritized(seed=1, beta=1.0), 6, window=windows, num_batches=3) as slow,
                gt.Replay(
                    store, Prioritized(seed=1, beta=1.0), 6, window=windows, num_batches=3, device=options
                ) as fast,
            ):
                assert fast.describe()[0]["path"] == "staged"
                for host, landed in zip(slow, fast, strict=True):
                    device.finish()
                    check_same_fields(check_same, host, landed, packed)
        with pytest.raises(ArgumentError, match="path='staged'"):
            gt.Replay(store, Uniform(), 2, window=windows, device=DeviceOptions(SimulatedDevice(0), path="gather"))


def check_same_fields(check_same, host, landed, packed):
    if not packed:
        check_same(host, landed, {}, packed)
        return
    assert landed.mask is None and host.keys == landed.keys
    assert landed["t"].cpu().tolist() == host["t"][host.mask].tolist()


def test_mixtures_have_windows_of_each_of_their_stores():
    with make_store([3, 8, 12]) as one, make_store([1, 2, 5, 9]) as other:
        mixture = Mixture([0.5, 0.5], [Uniform(seed=0), Prioritized(seed=1)])
        for windows in CASES:
            with gt.Replay([one, other], mixture, 12, window=windows, output="numpy") as replay:
                for batch in itertools.islice(replay, 3):
                    for number, lengths in enumerate(([3, 8, 12], [1, 2, 5, 9])):
                        here = np.flatnonzero(batch.keys.shard == number)
                        assert len(here) == 6
                        plain = windows if windows.function is None else gt.Windows(4)
                        part = gt.Batch(
                            {name: batch[name][here] for name in batch},
                            batch.keys[here],
                            batch.mask[here],
                            batch.start[here],
                            batch.length[here],
                            batch.version[here],
                        )
                        check_batch(part, lengths, plain, "left")
