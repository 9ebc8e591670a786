"""Rows chosen on a device and gathered there, by Triton's interpreter: the batches of the CPU. Prints how many.

TRITON_INTERPRET=1 python tests/support/device_selection_cases.py
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from replay_calls import replay_of

import geartrain as gt
import geartrain.replay.device.priority_mirror as priority_mirror
from geartrain.replay.device import DeviceOptions
from geartrain.selection import DeclaredStrategy, Draw, Lifo, Mixture, Prioritized, TopK, Traits, Uniform
from geartrain.tools.testing import SimulatedDevice


@dataclass(frozen=True)
class Eldest(DeclaredStrategy):
    """A user's strategy, by its traits alone: the oldest rows."""

    seed: int | None = 10
    traits = Traits("oldest")


@dataclass(frozen=True)
class Tempered(DeclaredStrategy):
    """Another: by priority, with importance weights of its own."""

    seed: int | None = 11
    traits = Traits("random", by_priority=True, importance=True)

    def importance_weights(self, draw: Draw, count: int, step: int) -> Any:
        return np.sqrt(draw.probability) * (count + step)


def make_store(name: str) -> gt.Store:
    rng = np.random.default_rng(3)
    store = gt.Store.create(
        name, {"x": gt.Field((3,), "float32"), "y": gt.Field((), "int32", per_row=True)}, max_length=9, capacity=300
    )
    values = {"x": rng.normal(size=(320, 9, 3)).astype("f"), "y": np.arange(320, dtype=np.int32)}
    store.insert(values, lengths=rng.integers(1, 10, 320), priorities=rng.random(320))  # the oldest are evicted
    store.delete(store.keys()[::7])
    return store


def same_batches(store: Any, strategy: Any, device: Any, *, packed: bool = False, select: str = "device") -> int:
    """Compares batches of both with the same seed, while priorities change and rows come; returns how many."""
    on_device = DeviceOptions(device, path="gather", select=select, packed=packed)
    first = store[0] if isinstance(store, list) else store
    with (
        gt.Replay(store, strategy, 6, window=4, prefetch=0) as slow,
        gt.Replay(store, strategy, 6, window=4, prefetch=0, device=on_device) as fast,
    ):
        for i in range(3):
            a, b = slow.sample(), fast.sample()
            assert a.keys == b.keys, (strategy, i)
            for name in a:
                expected = a[name][a.mask] if packed and name == "x" else a[name]
                assert torch.equal(expected, b[name].cpu()), (strategy, i, name)
            for name in ("start", "length", "version", "probability", "importance_weights"):
                mine, theirs = getattr(a, name), getattr(b, name)
                assert (mine is None) == (theirs is None) and (mine is None or torch.equal(mine, theirs.cpu()))
            if not isinstance(store, list):
                slow.update_priorities(a.keys, np.arange(1, 7) / 7)
                first.insert(
                    {"x": np.full((5, 9, 3), i, "f"), "y": np.full(5, i, np.int32)}, priorities=np.full(5, 2.0)
                )
        assert all(part["select"] == select for part in fast.describe()) or select != "device"
    return 3


def copied_once_it_pays(name: str, device: Any) -> int:
    """With select="auto": on the host until the store has not changed for five batches, then by one copy of it."""
    kept = priority_mirror.CPU_DRAW_NS, priority_mirror.LINK_GB_PER_S
    with make_store(name) as store:
        copied_bytes = 8 * store.capacity + 8 * -(-store.capacity // 64)
        priority_mirror.CPU_DRAW_NS = (60_000 + priority_mirror.LAUNCHES_US) * 1e3 / 2  # two draws save 60 ms
        priority_mirror.LINK_GB_PER_S = copied_bytes / 260e3 / 1e3  # and a copy takes 260
        try:
            settings: dict[str, Any] = {"window": 4, "prefetch": 0}
            on_device = DeviceOptions(device, path="gather")
            with (
                replay_of(store, Prioritized(seed=1), 2, **settings) as slow,
                replay_of(store, Prioritized(seed=1), 2, **settings, device=on_device) as fast,
            ):

                def drawn(batches: int) -> list[bool]:
                    found = []
                    for _ in range(batches):
                        assert slow.sample().keys == fast.sample().keys
                        (part,) = fast.describe()
                        found.append(part["select"] == "device")
                        assert found[-1] or "has not changed for 5 batches" in part["select"]
                    return found

                assert drawn(8) == [False] * 4 + [True] * 4
                (mirror,) = fast._builder.source._mirrors.copies
                assert mirror.refreshed == 1
                for changes in range(1, 4):
                    store.update_priorities(store.keys()[:3], np.full(3, changes))
                    assert drawn(3) == [False] * 3
                assert drawn(3) == [False, True, True]
                assert mirror.refreshed == 2
                for changes in range(4):  # by this replay: they reach the copy, and cost no other one
                    keys = store.keys()[[3 * changes, 3 * changes, 7]]
                    fast.update_priorities(keys, np.array([5.0, 9.0, changes]))
                    assert drawn(2) == [True] * 2
                assert mirror.refreshed == 2
                fast.update_priorities(store.keys(), np.arange(1, len(store) + 1.0))  # so many are copied as fast
                assert drawn(2) == [True] * 2
                assert mirror.refreshed == 3
                store.update_priorities(store.keys()[:1], [50.0])  # somebody else's
                fast.update_priorities(store.keys()[1:2], [60.0])
                assert drawn(6) == [False] * 4 + [True] * 2
                assert mirror.refreshed == 4
                priority_mirror.LINK_GB_PER_S *= 100  # a copy is paid for by a batch
                with replay_of(store, Prioritized(seed=1), 2, **settings, device=on_device) as changing:
                    changing.sample()
                    assert changing.describe()[0]["select"] == "device"
                    changing.update_priorities(store.keys()[:3], np.full(3, 9.0))
                    changing.sample()
                    assert changing.describe()[0]["select"] == "device"
                with replay_of(store, Prioritized(seed=1), 2, **settings, device=on_device) as full:
                    empty = full._builder.source.device.empty

                    def without_room(shape: Any, dtype: Any, empty: Any = empty) -> Any:
                        if shape == (8 * store.capacity,):
                            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
                        return empty(shape, dtype)

                    full._builder.source.device.empty = without_room
                    full.sample()
                    full._builder.source.device.empty = empty
                    assert "no memory for a copy of 300 priorities" in full.describe()[0]["select"], full.describe()
        finally:
            priority_mirror.CPU_DRAW_NS, priority_mirror.LINK_GB_PER_S = kept
    return 38


def followed_while_batches_are_drawn(name: str, device: Any) -> int:
    """Updates by the consumer's thread, while the replay's own draws ahead: the copy ends up as the store."""
    rng = np.random.default_rng(1)
    with (
        make_store(name) as store,
        gt.Replay(store, Prioritized(seed=1), 2, window=4, device=DeviceOptions(device, select="device")) as fast,
    ):
        (mirror,) = fast._builder.source._mirrors.copies
        for _ in range(30):
            fast.update_priorities(fast.sample().keys, rng.random(2))
        for _ in range(6):  # more than are drawn ahead
            fast.sample()
        assert not mirror._updated
        copies = mirror.refreshed
        assert copies < 10, "one by one they are cheaper than a copy each"
        values = mirror._candidates.values.cpu().numpy()
        selectable = mirror._candidates.selectable.cpu().numpy()
        words = store.native.layout()["words"]
        expected = store.native.segment()[words : words + 8 * store.capacity].view(np.uint32)[::2]
        assert np.array_equal(values[selectable], expected[selectable])
        assert mirror._candidates.total_priority() == store.native.total_priority()
    return 1


def nothing_torn(name: str, device: Any, select: str, pause_s: float) -> int:
    """Rows of one value each, overwritten as fast as a writer can; returns how many batches were whole."""
    fields = {"x": gt.Field((7,), "float32")}
    done = threading.Event()
    with gt.Store.create(name, fields, max_length=50, capacity=30) as store:
        store.insert({"x": np.zeros((30, 50, 7), "f")})

        def write() -> None:
            value = 1.0
            while not done.wait(pause_s):
                store.insert({"x": np.full((3, 50, 7), value, "f")})
                value += 1

        writer = threading.Thread(target=write)
        options = DeviceOptions(device, path="gather", select=select)
        batches = 0
        with replay_of(store, Uniform(seed=1), 6, device=options, timeout_s=300) as replay:
            writer.start()
            try:
                while batches < 8 or replay.stats()["redrawn"] == 0:
                    x = replay.sample()["x"].cpu()
                    assert (x == x[:, :1, :1]).all()
                    batches += 1
            finally:
                done.set()
                writer.join()
            sys.stderr.write(f"redrawn {replay.stats()['redrawn']}\n")
    return batches


def main(device: Any = None, pause_s: float = 0.5) -> int:
    device = device or SimulatedDevice(kernels=True)
    name = f"test-select-{os.getpid()}"
    made = 0
    strategies = [
        Uniform(seed=1), Uniform(seed=2, replacement=False), Uniform(seed=3, stratified=True),
        Prioritized(seed=4, beta=0.5), Prioritized(seed=5, replacement=False), Prioritized(seed=6, stratified=True),
        TopK(), Lifo(), Eldest(), Tempered(),
    ]  # fmt: skip
    for strategy in strategies:
        sys.stderr.write(f"{strategy}\n")
        with make_store(name) as store:
            made += same_batches(store, strategy, device)
    with make_store(name) as store:
        made += same_batches(store, Prioritized(seed=7), device, packed=True)
    with make_store(name) as store, make_store(name + "b") as other:
        mixture = Mixture([0.7, 0.3], [Prioritized(seed=8, beta=1.0), Uniform(seed=9)])
        made += same_batches([store, other], mixture, device)
    made += copied_once_it_pays(name, device)
    made += followed_while_batches_are_drawn(name, device)
    for select in ("device", "host"):
        made += nothing_torn(name, device, select, pause_s)
    return made


if __name__ == "__main__":
    if sys.argv[1:] == ["rule"]:
        interpreted = SimulatedDevice(kernels=True)
        made = copied_once_it_pays(f"test-rule-{os.getpid()}", interpreted)
        print(made + followed_while_batches_are_drawn(f"test-follow-{os.getpid()}", interpreted))
    else:
        print(main())
