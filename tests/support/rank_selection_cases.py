"""Batches over several ranks whose rows devices draw: those of the same ranks on the host. Prints how many.

TRITON_INTERPRET=1 python tests/support/rank_selection_cases.py        # every case
TRITON_INTERPRET=1 python tests/support/rank_selection_cases.py some   # two strategies, one of them with updates
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import numpy as np
import torch
from replay_calls import replay_of

import geartrain as gt
from geartrain.replay.device import DeviceOptions
from geartrain.selection import Prioritized, Uniform
from geartrain.tools.testing import SimulatedDevice, ThreadRankGroup, run_ranks

FIELDS = {"x": gt.Field((3,), "float32"), "y": gt.Field((), "int32", per_row=True)}
RANKS, BATCH, STEPS = 3, 18, 4


def make_shards(name: str) -> list[gt.Store]:
    """Of different sizes, with holes."""
    rng = np.random.default_rng(3)
    shards = []
    for number, rows in enumerate((300, 90)):
        store = gt.Store.create(f"{name}-{number}", FIELDS, max_length=9, capacity=rows)
        store.native.advance_sequence(1000 * number + 1)
        values = {"x": rng.normal(size=(rows, 9, 3)).astype("f"), "y": np.arange(rows, dtype=np.int32)}
        store.insert(values, lengths=rng.integers(1, 10, rows), priorities=rng.random(rows))
        store.delete(store.keys()[::7])
        shards.append(store)
    return shards


def same_batches(name: str, strategy: Any, updates: bool, devices: list[Any] | None = None) -> int:
    """Three ranks, two of which share a shard. Device and host draw in turn, so that each finds the other's updates."""
    shards = make_shards(name)
    others = ThreadRankGroup.make(RANKS)
    settings: dict[str, Any] = {"window": 4, "prefetch": 0, "assignment": "ordered"}
    copied = [0] * RANKS

    def body(group: ThreadRankGroup) -> int:
        rank = group.rank
        device = SimulatedDevice(kernels=True) if devices is None else devices[rank]
        options = DeviceOptions(device, path="gather", select="device")
        with (
            gt.Store.open(f"{name}-{rank % 2}") as store,
            replay_of(store, strategy, BATCH, group=group, **settings) as slow,
            replay_of(store, strategy, BATCH, group=others[rank], device=options, **settings) as fast,
        ):
            for step in range(STEPS):
                host, found = slow.sample(), fast.sample()
                assert host.keys == found.keys, (strategy, step)
                assert torch.equal(host["x"], found["x"].cpu())
                for of_row in ("probability", "importance_weights", "draw"):
                    mine, theirs = getattr(host, of_row), getattr(found, of_row)
                    assert (mine is None) == (theirs is None)
                    assert mine is None or torch.equal(mine, theirs.cpu()), of_row
                if updates:
                    # Both replays apply the same: the second finds what it sets already set.
                    priorities = np.arange(1, 1 + len(host.keys)) / (2 + rank + step)
                    slow.update_priorities(host.keys, priorities)
                    fast.update_priorities(found.keys, priorities)
            assert [part["select"] for part in fast.describe()] == ["device"]
            (copy,) = fast._builder.source.sharded.mirrors
            copied[rank] = copy.refreshed
        return STEPS

    try:
        made = sum(run_ranks(RANKS, body))
    finally:
        for store in shards:
            store.close()
    if not updates:
        assert copied == [2] * RANKS, "the store did not change: one copy, and one that nothing can have escaped"
    return made


def only_this_replay_updates(name: str, devices: list[Any] | None = None) -> int:
    """Each rank its own shard: after the first batches updates reach the copies, which are not made again."""
    shards = make_shards(name)

    def body(group: ThreadRankGroup) -> int:
        device = SimulatedDevice(kernels=True) if devices is None else devices[group.rank]
        options = DeviceOptions(device, path="gather", select="device")
        with (
            gt.Store.open(f"{name}-{group.rank}") as store,
            replay_of(
                store, Prioritized(seed=1), 12, window=4, prefetch=0, group=group, device=options, assignment="ordered"
            ) as fast,
        ):
            (copy,) = fast._builder.source.sharded.mirrors
            for step in range(6):
                batch = fast.sample()
                fast.update_priorities(batch.keys, np.arange(1.0, 1 + len(batch.keys)) * (step + 1))
            assert copy.refreshed == 2
            fast.sample()
            assert copy.total_priority() == store.native.total_priority()
        return 7

    try:
        return sum(run_ranks(2, body))
    finally:
        for store in shards:
            store.close()


def nothing_torn(name: str, pause_s: float, devices: list[Any] | None = None) -> int:
    """Rows of one value each, overwritten while two ranks draw from copies of their priorities."""
    fields = {"x": gt.Field((7,), "float32")}
    stores = [gt.Store.create(f"{name}-{number}", fields, max_length=50, capacity=30) for number in range(2)]
    for store in stores:
        store.insert({"x": np.zeros((30, 50, 7), "f")})
    done = threading.Event()
    redrawn = [0.0, 0.0]

    def write() -> None:
        value = 1.0
        while not done.wait(pause_s):
            for store in stores:
                store.insert({"x": np.full((3, 50, 7), value, "f")})
            value += 1

    def body(group: ThreadRankGroup) -> int:
        device = SimulatedDevice(kernels=True) if devices is None else devices[group.rank]
        options = DeviceOptions(device, path="gather", select="device")
        with (
            gt.Store.open(f"{name}-{group.rank}") as store,
            replay_of(store, Prioritized(seed=1), 12, prefetch=0, group=group, device=options, timeout_s=300) as fast,
        ):
            for _ in range(12):
                x = fast.sample()["x"].cpu()
                assert (x == x[:, :1, :1]).all()
            redrawn[group.rank] = fast.stats()["redrawn"]
        return 12

    writer = threading.Thread(target=write)
    writer.start()
    try:
        return sum(run_ranks(2, body))
    finally:
        done.set()
        writer.join()
        sys.stderr.write(f"redrawn {redrawn}\n")
        for store in stores:
            store.close()


def main(devices: list[Any] | None = None, pause_s: float = 0.1, some: bool = False) -> int:
    name = f"test-rank-select-{os.getpid()}"
    plain, stratified, prioritized = Uniform(seed=1), Uniform(seed=2, stratified=True), Prioritized(seed=3, beta=0.5)
    cases: list[tuple[Any, bool]] = [(prioritized, True)]
    if not some:
        cases += [(stratified, False), (plain, False), (plain, True), (stratified, True), (prioritized, False)]
    made = sum(same_batches(name, strategy, updates, devices) for strategy, updates in cases)
    made += only_this_replay_updates(name, devices)
    return made if some else made + nothing_torn(name, pause_s, devices)


def one_launch_at_a_time() -> None:
    """Triton's interpreter patches its own language during a launch, for all threads."""
    from triton.runtime.interpreter import GridExecutor

    lock, launch = threading.RLock(), GridExecutor.__call__

    def locked(self: Any, *args: Any, **named: Any) -> Any:
        with lock:
            return launch(self, *args, **named)

    GridExecutor.__call__ = locked


if __name__ == "__main__":
    one_launch_at_a_time()
    print(main(some=sys.argv[1:] == ["some"]))
