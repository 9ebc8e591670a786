"""Copied rows: which rows are copied, what happens to those that change under the copies, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tagged
from device_batches import check_same, filled_store
from replay_calls import replay_of

import geartrain as gt
import geartrain.replay.device.target as target
from geartrain.errors import ArgumentError, PinError
from geartrain.replay.device import Convert, DeviceOptions
from geartrain.replay.device.copied_rows import FEW_GAPS
from geartrain.selection import Mixture, Prioritized, Uniform

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from geartrain.tools.testing import SimulatedDevice, ThreadRankGroup  # noqa: E402


@pytest.fixture
def store(store_name: Callable[[], str]) -> Iterator[gt.Store]:
    with filled_store(store_name(), rows=60, capacity=64, max_length=30) as made:
        yield made


def late(seed: int = 1) -> SimulatedDevice:
    """A device that does nothing before the host waits for it."""
    return SimulatedDevice(seed, chance=0)


def before_waiting(device: SimulatedDevice, call: Callable[[], None], share: float = 0.0) -> None:
    """`call` when the host first waits for copies of which the device has made a share."""
    sync, called = device.sync, [False]

    def sync_late(event: Any, timeout_s: float | None = None) -> None:
        if not called[0]:
            called[0] = True
            waiting = max(device._streams, key=lambda stream: len(stream.work))
            for _ in range(int(share * len(waiting.work))):
                waiting.run_one()
            call()
        sync(event, timeout_s)

    device.sync = sync_late  # type: ignore[method-assign]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_rows_that_are_overwritten_under_their_copies_are_drawn_again(
    store_name: Callable[[], str], share: float, packed: bool
) -> None:
    device = late()
    with tagged.create(store_name(), capacity=12) as store:
        tagged.insert(store, np.arange(1, 13))
        before_waiting(device, lambda: tagged.insert(store, np.arange(101, 107)), share)
        options = DeviceOptions(device, path="copy", packed=packed)
        with gt.Replay(store, Uniform(seed=1), 16, window=9, prefetch=0, device=options) as fast:
            batch = fast.sample()
            device.finish()
            assert fast.stats()["redrawn"] > 0
            tagged.check_steps(batch)
            assert not set(batch["tag"].tolist()) & set(range(1, 7)), "the oldest rows are gone"
            host = gt.fetch(store, batch.keys, window=9)
            assert torch.equal(host["tag"].view(torch.int64), batch["tag"].view(torch.int64))


def test_rows_that_are_written_in_place_under_their_copies_are_drawn_again(store: gt.Store) -> None:
    device = late()
    keys = store.keys()[:20]

    def write() -> None:
        assert store.write(keys, {"group": np.full(20, 777)}) == 0

    before_waiting(device, write)
    with gt.Replay(store, Uniform(seed=1), 32, prefetch=0, device=DeviceOptions(device, path="copy")) as fast:
        batch = fast.sample()
        device.finish()
        assert fast.stats()["redrawn"] > 0
    host = gt.fetch(store, batch.keys)
    assert torch.equal(host["group"], batch["group"])


def test_padding_is_zero_wherever_it_is(store: gt.Store) -> None:
    """Few paddings are set one by one and many together; memory that is used again is full of other bytes."""
    for batch_size in (2, 40):
        assert (2 * batch_size > FEW_GAPS) == (batch_size == 40)
        for pad in ("left", "right"):
            device = SimulatedDevice(batch_size)
            options: dict[str, Any] = {"window": 25, "pad": pad, "num_batches": 6}
            with (
                replay_of(store, Uniform(seed=1), batch_size, **options) as slow,
                replay_of(
                    store, Uniform(seed=1), batch_size, **options, device=DeviceOptions(device, path="copy")
                ) as fast,
            ):
                for host, landed in zip(slow, fast, strict=True):
                    device.finish()
                    check_same(host, landed, {}, False)
                    del landed


@pytest.mark.parametrize("packed", [False, True])
def test_mixtures_are_copied(store_name: Callable[[], str], packed: bool) -> None:
    device = SimulatedDevice(3)
    fields = {"x": gt.Field((8000,), "float32")}
    rng = np.random.default_rng(0)
    with (
        gt.Store.create(store_name(), fields, max_length=9, capacity=20) as one,
        gt.Store.create(store_name(), fields, max_length=5, capacity=8) as other,
    ):
        for each in (one, other):
            n, steps = each.capacity, each.max_length
            each.insert({"x": rng.random((n, steps, 8000), dtype="f")}, lengths=rng.integers(1, steps + 1, n))
        mixture = Mixture([0.6, 0.4], [Uniform(seed=1), Prioritized(seed=2, beta=1.0)])
        convert = {"x": Convert("bfloat16")} if packed else {}
        options = DeviceOptions(device, convert=convert, packed=packed, path="copy")
        asked: dict[str, Any] = {"window": 5, "num_batches": 4}
        with (
            replay_of([one, other], mixture, 50, **asked) as slow,
            replay_of([one, other], mixture, 50, **asked, device=options) as fast,
        ):
            for host, landed in zip(slow, fast, strict=True):
                device.finish()
                check_same(host, landed, convert, packed)
            assert [about["path"] for about in fast.describe()] == ["copy", "copy"]


def test_large_rows_are_copied_where_they_can_be_pinned_and_have_large_pieces(
    store_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"x": gt.Field((4000,), "float32")}
    with gt.Store.create(store_name(), fields, max_length=10, capacity=4) as large:
        large.insert({"x": np.zeros((4, 10, 4000), "f")})

        def chosen(device: SimulatedDevice, **options: Any) -> tuple[str, str]:
            asked = DeviceOptions(device, **options)
            with gt.Replay(large, Uniform(seed=1), 8, device=asked) as fast:
                fast.sample()
                (about,) = fast.describe()
                return about["path"], about["why"]

        assert chosen(SimulatedDevice(1))[0] == "copy"
        assert (
            f"160000 bytes are larger than the crossover of {target.CROSSOVER_BYTES}" in chosen(SimulatedDevice(1))[1]
        )
        monkeypatch.setattr(target, "SMALL_BATCH_BYTES", 1_280_000)  # a batch has as many
        assert chosen(SimulatedDevice(1), crossover_bytes=200_000)[0] == "gather"
        assert chosen(SimulatedDevice(1), path="copy", crossover_bytes=200_000) == ("copy", "it was asked for")
        with caplog.at_level(logging.WARNING, "geartrain.replay.device"):
            assert chosen(SimulatedDevice(1, most_pinned=1000))[0] == "staged"
        assert "staged through the CPU" in caplog.text
        with pytest.raises(PinError, match="cannot be pinned"):
            chosen(SimulatedDevice(1, most_pinned=1000), path="copy")
        monkeypatch.setattr(target, "SMALLEST_PIECE", 160_001)
        path, why = chosen(SimulatedDevice(1))
        assert path == "gather"
        assert "too small to be copied one by one" in why


def test_what_copies_do_not_do_is_refused_at_the_door(store: gt.Store) -> None:
    device = SimulatedDevice(1)
    refused: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"select": "device"}, {}, "copies of rows are given to the device by the host"),
        ({}, {"window": gt.Windows(5, at="start")}, "use path='staged'"),
    ]
    for options, settings, message in refused:
        with pytest.raises(ArgumentError, match=message):
            replay_of(store, Uniform(seed=1), 8, device=DeviceOptions(device, path="copy", **options), **settings)
    (rank,) = ThreadRankGroup.make(1)
    with pytest.raises(ArgumentError, match="path='copy' is for one rank: over several ranks"):
        gt.Replay(store, Uniform(seed=1), 8, group=rank, device=DeviceOptions(device, path="copy"))
    assert not device.registered


def test_large_rows_are_gathered_over_several_ranks(store: gt.Store) -> None:
    device = SimulatedDevice(1)
    (rank,) = ThreadRankGroup.make(1)
    options = DeviceOptions(device, crossover_bytes=100)
    with gt.Replay(store, Uniform(seed=1), 8, group=rank, device=options) as fast:
        fast.sample()
        (about,) = fast.describe()
        assert about["path"] == "gather"
        assert "ranks do not copy rows one by one" in about["why"]


def test_a_replay_that_is_closed_while_rows_are_copied_waits_for_them(store: gt.Store) -> None:
    """The device refuses to unpin what its work still reads."""
    device = late()
    fast = gt.Replay(store, Uniform(seed=1), 8, prefetch=2, device=DeviceOptions(device, path="copy"))
    fast.sample()
    assert len(device.registered) == 1
    fast.close()
    assert not device.registered
