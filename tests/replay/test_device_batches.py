"""Batches on a device: those of the CPU, whatever the device is behind with; waits on streams, not on the host."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tagged
from crossed import crossed
from device_batches import check_same, filled_store
from recorded_shards import Episodes
from replay_calls import replay_of
from window_reference import CASE_IDS, CASES

import geartrain as gt
import geartrain.replay.device.target as target
from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError, PinError, StoreClosedError
from geartrain.replay.device import Convert, DeviceOptions
from geartrain.replay.device.copied_rows import CopyTransfer
from geartrain.replay.device.priority_mirror import CopyRule
from geartrain.replay.device.transfer import GatherTransfer
from geartrain.selection import Epochs, Fifo, GroupSampling, Lifo, Limits, Mixture, Prioritized, TopK, Uniform

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from geartrain.tools.testing import SimulatedDevice  # noqa: E402


@pytest.fixture
def store(store_name: Callable[[], str]) -> Iterator[gt.Store]:
    with filled_store(store_name(), rows=60, capacity=64, max_length=30) as made:
        yield made


STRATEGIES = [
    Uniform(seed=1), Uniform(seed=4, stratified=True), Prioritized(seed=2, beta=0.5),
    Prioritized(seed=3, replacement=False),
    TopK(), Lifo(), Fifo(), GroupSampling("group", 4, seed=1), Uniform(seed=5, limits=Limits(min_length=4)),
]  # fmt: skip


@pytest.mark.parametrize("path", ["gather", "copy", "staged"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: f"{type(s).__name__}{getattr(s, 'seed', '')}")
def test_every_strategy_gives_the_batches_of_the_host(store: gt.Store, strategy: Any, path: Any) -> None:
    for window, convert, packed in [
        (None, {}, False), (7, {"pixels": Convert("bfloat16", 1 / 255)}, False), (7, {"x": Convert("float16")}, True),
        (40, {}, True),
    ]:  # fmt: skip
        device = SimulatedDevice(window or 0)
        options = DeviceOptions(device, path=path, convert=convert, packed=packed)
        with (
            replay_of(store, strategy, 8, window=window, pad="right", num_batches=5) as slow,
            replay_of(store, strategy, 8, window=window, pad="right", num_batches=5, device=options) as fast,
        ):
            for host, landed in zip(slow, fast, strict=True):
                device.finish()
                check_same(host, landed, convert, packed)
            assert fast.describe()[0]["path"] == path
            host_calls = slow.stats()["path"].removeprefix("native").removeprefix(", calls ").split(", ")
            device_calls = {"gather": ["GatherTransfer.launch", "GatherTransfer.resolve"], "staged": []}
            device_calls["copy"] = ["CopyTransfer.launch", "CopyTransfer.resolve"]
            calls = [*filter(None, host_calls), *device_calls[path]]
            assert fast.stats()["path"] == (f"native, calls {', '.join(calls)}" if calls else "native")
        assert not device.registered


@pytest.mark.parametrize("path", ["gather", "copy", "staged"])
@pytest.mark.parametrize("per", ["row", "step"])
def test_draws_of_steps_give_the_batches_and_keys_of_the_host(
    store_name: Callable[[], str], per: Any, path: Any
) -> None:
    """Of stores with priorities of steps keys name the step that a window is told by, whatever drew the row."""
    strategies: list[Any] = [Uniform(seed=1, over="steps")]
    if per == "step":
        strategies += [Prioritized(seed=2, beta=0.5, limits=Limits(min_length=4)), Uniform(seed=3), Fifo()]
    with filled_store(store_name(), rows=60, capacity=64, max_length=30, priority_per=per) as store:
        if per == "step":
            keys = store.keys()
            keys = keys[store.status(keys)["length"] > 3]
            store.update_priorities(keys.of_steps(np.full(len(keys), 3)), np.full(len(keys), 9.0))
        for strategy, packed in itertools.product(strategies, [False, True]):
            device = SimulatedDevice(3)
            options: dict[str, Any] = {"window": 7, "pad": "right", "num_batches": 4, "prefetch": 0}
            on = DeviceOptions(device, path=path, packed=packed)
            with (
                replay_of(store, strategy, 8, **options) as slow,
                replay_of(store, strategy, 8, **options, device=on) as fast,
            ):
                for host, landed in zip(slow, fast, strict=True):
                    device.finish()
                    assert (landed.keys.step is None) == (per == "row")
                    check_same(host, landed, {}, packed)
                if per == "step" and packed is False:
                    assert fast.update_priorities(landed.keys, np.ones(8)) == 0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("marks", "per", "strategy", "window"),
    [
        *((0.0, "row", Prioritized(seed=1, beta=1.0), window) for window in CASES),
        (0.25, "row", Uniform(seed=1, over="steps"), 5),
        (0.25, "step", Prioritized(seed=2), 5),
        (0.25, "row", Uniform(seed=1, over="steps"), gt.Windows(8, at="episode")),
    ],
    ids=[*CASE_IDS, "several episodes", "by step", "whole episodes"],
)
def test_windows_that_the_cpu_places_are_staged(
    marks: float, per: Any, strategy: Any, window: Any, packed: bool
) -> None:
    settings = {"window": window, "pad": "right", "num_batches": 3, "fields": ["action", "obs.state"]}
    device = SimulatedDevice(3)
    with Episodes(40, marks=marks).stores(1, priority_per=per) as (store,):
        with (
            replay_of(store, strategy, 16, **settings) as slow,
            replay_of(store, strategy, 16, **settings, device=DeviceOptions(device, packed=packed)) as fast,
        ):
            for host, landed in zip(slow, fast, strict=True):
                device.finish()
                check_same(host, landed, {}, packed)
            assert fast.describe()[0]["path"] == "staged"
        with pytest.raises(ArgumentError, match=r"path='staged'|several episodes"):
            gt.Replay(store, strategy, 4, window=window, device=DeviceOptions(device, path="gather"))


@contextlib.contextmanager
def torn_at_first() -> Iterator[None]:
    """Every fourth row of the first copies that are waited for is torn."""
    calls = itertools.count()

    def patched(resolve: Callable[..., Any]) -> Callable[..., Any]:
        def torn_at_first(transfer: Any, launched: Any) -> Any:
            torn, *more = resolve(transfer, launched)
            lost = np.arange(len(torn)) % 4 == 0 if next(calls) == 0 else 0
            return (torn | lost).astype(np.uint8), *more

        return torn_at_first

    with pytest.MonkeyPatch.context() as patch:
        for kind in (GatherTransfer, CopyTransfer):
            patch.setattr(kind, "resolve", patched(kind.resolve))
        yield


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_torn_rows_are_drawn_again_with_their_steps(store_name: Callable[[], str], packed: bool) -> None:
    """Every fourth draw is torn at first: what is drawn instead has the keys of what was gathered."""
    with filled_store(store_name(), rows=60, capacity=64, max_length=30, priority_per="step") as store:
        device = SimulatedDevice(3)
        settings: dict[str, Any] = {"window": 7, "prefetch": 0, "pad": "right"}
        on = DeviceOptions(device, path="gather", packed=packed)
        for strategy in (Prioritized(seed=1), Uniform(seed=2), Uniform(seed=3, over="steps")):
            with replay_of(store, strategy, 16, **settings, device=on) as fast, torn_at_first():
                batch = fast.sample()
                device.finish()
                assert fast.stats()["redrawn"] == 4
            expected = gt.fetch(store, batch.keys, window=7, pad="right")
            assert batch.keys.step is not None
            values = expected["pixels"][expected.mask] if packed else expected["pixels"]
            assert torch.equal(values, batch["pixels"].cpu())


def test_rows_that_are_drawn_again_have_the_same_windows_however_they_come(store: gt.Store) -> None:
    device, made = SimulatedDevice(3), []
    for path, packed in (("gather", False), ("gather", True), ("copy", False), ("copy", True)):
        on = DeviceOptions(device, path=path, packed=packed)
        with gt.Replay(store, Uniform(seed=2), 16, window=7, prefetch=0, device=on) as fast, torn_at_first():
            batch = fast.sample()
            device.finish()
            assert fast.stats()["redrawn"] == 4
        made.append((batch.keys.row.tolist(), batch.start.tolist(), batch.length.tolist()))
    assert all(each == made[0] for each in made)


@pytest.mark.parametrize("path", ["gather", "copy", "staged"])
def test_passes_have_the_batches_of_the_host(store: gt.Store, store_name: Callable[[], str], path: Any) -> None:
    """The last batch of a pass may be smaller, and a mixture's passes go on within a batch."""
    device = SimulatedDevice(3)
    passes: list[tuple[Any, int]] = [
        (Epochs(seed=5), 25),
        (Epochs(seed=6, drop_last=True), 25),
        (Epochs(over="steps", seed=7), 300),
        (Mixture([0.7, 0.3], [Epochs(seed=8), Uniform(seed=9)]), 25),
    ]
    other = filled_store(store_name(), rows=9, capacity=16, max_length=30)
    for (strategy, size), packed in zip(passes, [True, False, False, False], strict=True):
        stores: Any = [store, other] if isinstance(strategy, Mixture) else store
        on = DeviceOptions(device, path=path, packed=packed)
        settings: dict[str, Any] = {"window": 7, "pad": "right", "prefetch": 2}
        with replay_of(stores, strategy, size, **settings) as slow:
            expected = [slow.sample() for _ in range(7)]
            figures = slow.stats()
        with replay_of(stores, strategy, size, **settings, device=on) as fast:
            for host in expected:
                landed = fast.sample()
                device.finish()
                check_same(host, landed, {}, packed)
            assert [fast.stats()[name] for name in ("epoch", "dropped")] == [figures["epoch"], figures["dropped"]]
        short = len({len(host) for host in expected}) > 1
        assert short == (isinstance(strategy, Epochs) and not strategy.drop_last)
    other.close()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("path", ["gather", "copy"])
def test_a_pass_that_loses_rows_has_those_that_are_left(store_name: Callable[[], str], path: Any, packed: bool) -> None:
    device = SimulatedDevice(3)
    with filled_store(store_name(), rows=18, capacity=20, max_length=30) as store:
        on = DeviceOptions(device, path=path, packed=packed)
        with gt.Replay(store, Epochs(seed=1), 16, prefetch=0, device=on) as fast, torn_at_first():
            batch = fast.sample()
            device.finish()
        assert len(batch) == len(set(batch.keys.row.tolist())) == 14, "2 rows in the place of 4, and then no more"
        check_same(gt.fetch(store, batch.keys), dataclasses.replace(batch, step=None, probability=None), {}, packed)


@pytest.mark.parametrize(("path", "packed"), crossed(["gather", "copy", "staged"], [False, True]))
def test_rows_whose_last_sample_another_draw_had_are_drawn_again(
    store_name: Callable[[], str], path: Any, packed: bool
) -> None:
    """With replacement and one sample a row, a row that is drawn twice is had once: as in host memory, to the bit."""
    options: dict[str, Any] = {"rows": 60, "capacity": 64, "max_length": 30, "max_times_sampled": 1}
    settings: dict[str, Any] = {"window": 7, "pad": "right", "prefetch": 2, "num_batches": 2}
    for strategy in (Uniform(seed=3), Prioritized(seed=2, beta=0.5)):
        device = SimulatedDevice(3)
        on = DeviceOptions(device, path=path, packed=packed)
        with filled_store(store_name(), **options) as one, filled_store(store_name(), **options) as other:
            with (
                replay_of(one, strategy, 16, **settings) as slow,
                replay_of(other, strategy, 16, **settings, device=on) as fast,
            ):
                for host, landed in zip(slow, fast, strict=True):
                    device.finish()
                    same = Keys(landed.keys.row, landed.keys.generation, store=one.id)
                    check_same(host, dataclasses.replace(landed, keys=same), {}, packed)
                assert fast.stats()["redrawn"] == slow.stats()["redrawn"] > 0
            assert len(one) == len(other) == 28, "no row is held as one on its last sample"
            for each in (one, other):
                each.audit()


@pytest.mark.parametrize("path", ["gather", "copy", "staged"])
def test_a_mixture_lands_in_one_batch(store: gt.Store, store_name: Callable[[], str], path: Any) -> None:
    device = SimulatedDevice(3)
    with gt.Store.create(store_name(), store.fields, max_length=store.max_length, capacity=9) as other:
        other.insert({name: store.column(name)[:9] for name in store.fields}, priorities=np.arange(1, 10))
        mixture = Mixture([0.6, 0.4], [Uniform(seed=1), Prioritized(seed=2, beta=1.0)])
        both = [store, other]
        with (
            gt.Replay(both, mixture, 8, window=5, num_batches=4) as slow,
            gt.Replay(both, mixture, 8, window=5, num_batches=4, device=DeviceOptions(device, path=path)) as fast,
        ):
            for host, landed in zip(slow, fast, strict=True):
                device.finish()
                check_same(host, landed, {}, False)
            assert len(fast.describe()) == 2


@pytest.mark.parametrize("path", ["gather", "copy", "staged"])
def test_the_consumers_stream_waits_and_its_host_does_not(store: gt.Store, path: Any) -> None:
    """What the consumer gives its stream runs after the batch has landed, though nobody waited for that on the host.

    Small staged batches may be built on its thread, which then waits where it is too far ahead of its stream.
    """
    for seed in range(5):
        device = SimulatedDevice(seed)
        options = DeviceOptions(device, path=path)
        with (
            gt.Replay(store, Uniform(seed=1), 8, window=7, num_batches=12) as slow,
            gt.Replay(store, Uniform(seed=1), 8, window=7, num_batches=12, device=options) as fast,
        ):
            sums: list[Any] = []
            for batch in fast:
                total = torch.zeros(())
                device.run(lambda x=batch["x"], total=total: total.add_(x.sum()))
                sums.append(total)
                del batch
            waits = set(device.syncs)
            assert waits == {"geartrain-prefetch"} or (
                path == "staged" and waits <= {"geartrain-prefetch", "MainThread"}
            )
            device.finish()
            assert [float(total) for total in sums] == [float(batch["x"].sum()) for batch in slow]


@pytest.mark.parametrize("path", ["gather", "staged"])
def test_memory_is_used_again_only_when_the_consumers_stream_is_done(store: gt.Store, path: Any) -> None:
    """The consumer reads a batch it has already dropped: as CUDA does with work that is still queued."""
    device = SimulatedDevice(11)
    addresses = set()
    with (
        gt.Replay(store, Uniform(seed=1), 8, window=7, num_batches=30) as slow,
        gt.Replay(store, Uniform(seed=1), 8, window=7, num_batches=30, device=DeviceOptions(device, path=path)) as fast,
    ):
        copies: list[np.ndarray] = []
        for batch in fast:
            x = batch["x"]
            copy = np.zeros(tuple(x.shape), np.float32)
            copies.append(copy)
            addresses.add(x.data_ptr())
            # A queued kernel holds an address and no tensor.
            device.run(functools.partial(ctypes.memmove, copy.ctypes.data, x.data_ptr(), x.nbytes))
            del x, batch
        device.finish()
        for copy, batch in zip(copies, slow, strict=True):
            np.testing.assert_array_equal(copy, batch["x"].numpy())
    assert len(addresses) < 20, "memory was not recycled"


def test_a_batch_that_is_kept_is_never_overwritten(store: gt.Store) -> None:
    device = SimulatedDevice(5)
    with (
        gt.Replay(store, Uniform(seed=1), 8, num_batches=20) as slow,
        gt.Replay(store, Uniform(seed=1), 8, num_batches=20, device=DeviceOptions(device)) as fast,
    ):
        kept = list(fast)
        device.finish()
        for host, landed in zip(slow, kept, strict=True):
            check_same(host, landed, {}, False)


@pytest.mark.parametrize(("path", "packed"), crossed(["gather", "copy", "staged"], [False, True]))
def test_a_torn_row_is_drawn_again_and_never_returned(store_name: Callable[[], str], path: Any, packed: bool) -> None:
    device = SimulatedDevice(2)
    done = threading.Event()
    with tagged.create(store_name(), capacity=40) as store:
        tagged.insert(store, np.arange(1, 41))

        pause_s = 0.0

        def write() -> None:
            tag = 100
            while not done.wait(pause_s):
                tagged.insert(store, np.arange(tag, tag + 4))
                tag += 4

        writer = threading.Thread(target=write)
        batches = 0
        with gt.Replay(
            store, Uniform(seed=1), 6, window=9, device=DeviceOptions(device, path=path, packed=packed)
        ) as fast:
            try:
                while batches < 15 or (path != "staged" and fast.stats()["redrawn"] == 0 and batches < 300):
                    began_s = time.monotonic()
                    batch = fast.sample()
                    device.finish()
                    # the store is written anew about once a batch, however slow the interpreter is here
                    pause_s = (time.monotonic() - began_s) / 10
                    if batches == 0:
                        writer.start()
                    tagged.check_steps(batch)
                    batches += 1
            finally:
                done.set()
                if writer.is_alive():
                    writer.join()
            assert path == "staged" or fast.stats()["redrawn"] > 0


def test_with_limited_samples_each_row_is_seen_so_often(store_name: Callable[[], str]) -> None:
    device = SimulatedDevice(2)
    with gt.Store.create(
        store_name(), {"x": gt.Field((), "int64")}, max_length=4, capacity=40, max_times_sampled=2
    ) as store:
        store.insert({"x": np.repeat(np.arange(40)[:, None], 4, 1)})
        seen = np.zeros(40, int)
        with gt.Replay(store, Uniform(seed=1, replacement=False), 8, prefetch=2, device=DeviceOptions(device)) as fast:
            for _ in range(8):
                batch = fast.sample()
                device.finish()
                np.add.at(seen, batch["x"][:, 0].numpy(), 1)
        assert seen.max() <= 2
        assert seen.sum() == 64


def test_small_batches_are_staged(store: gt.Store) -> None:
    """Unless a path, or a draw on the device, was asked for."""

    def chosen(rows: int, **options: Any) -> tuple[str, str]:
        with gt.Replay(store, Uniform(seed=1), rows, device=DeviceOptions(SimulatedDevice(1), **options)) as fast:
            (about,) = fast.describe()
            return about["path"], about["why"]

    rows = target.SMALL_BATCH_BYTES // 1778
    assert chosen(rows)[0] == "staged"
    assert "which the CPU copies before kernels are launched" in chosen(8)[1]
    assert chosen(rows + 1)[0] == chosen(8, path="gather")[0] == "gather"


def test_what_cannot_be_pinned_is_staged_and_says_so(
    store: gt.Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimulatedDevice(1, most_pinned=1000)
    monkeypatch.setattr(target, "SMALL_BATCH_BYTES", 0)
    with (
        caplog.at_level(logging.WARNING, "geartrain.replay.device"),
        gt.Replay(store, Uniform(seed=1), 8, device=DeviceOptions(device)) as fast,
    ):
        fast.sample()
        (about,) = fast.describe()
    assert about["path"] == "staged"
    assert "RLIMIT_MEMLOCK" in about["why"] or "cannot be pinned" in about["why"]
    assert "staged through the CPU" in caplog.text
    with pytest.raises(PinError, match="cannot be pinned"):
        gt.Replay(store, Uniform(seed=1), 8, device=DeviceOptions(device, path="gather"))


def test_the_chooser_goes_by_bytes_of_a_row(store: gt.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(1)
    monkeypatch.setattr(target, "SMALL_BATCH_BYTES", 0)

    def chosen(asked: int | None = None) -> tuple[str, str]:
        with gt.Replay(store, Uniform(seed=1), 8, device=DeviceOptions(device, crossover_bytes=asked)) as fast:
            (about,) = fast.describe()
            return about["path"], about["why"]

    assert chosen()[0] == "gather"
    assert f"larger than the crossover of {target.CROSSOVER_BYTES}" not in chosen()[1]
    assert chosen(100)[0] == "gather", "fields of these rows are too small to be copied one by one"
    assert "larger than the crossover of 100, and their 3 fields too small" in chosen(100)[1]
    monkeypatch.setattr(target, "SMALLEST_PIECE", 1)
    assert chosen(100)[0] == "copy"


def test_a_copy_is_made_once_batches_on_the_host_have_lost_what_it_takes() -> None:
    large = CopyRule(round(8.125 * 10**9))  # 325 ms by the rates assumed, a batch of 1e6 saves 60
    assert [large.on_device(10**6, True) for _ in range(8)] == [False] * 5 + [True] * 3
    assert large.batches(10**6) == 6
    assert not large.on_device(10**6, False)
    assert [large.on_device(10**6, True) for _ in range(5)] == [False] * 4 + [True]
    assert [large.on_device(10**6, False) for _ in range(20)] == [False] * 20, "a store that changes is not copied"
    small = CopyRule(round(8.125 * 10**6))
    assert small.on_device(10**4, False), "a batch that pays for a copy by itself waits for nothing"
    assert not any(small.on_device(100, True) for _ in range(1000)), "launches take longer than so few draws"


def test_draws_take_at_most_twice_what_the_better_choice_in_hindsight_takes() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        rule = CopyRule(int(rng.integers(10**5, 10**9)))
        draws = int(rng.integers(2000, 10**6))
        saved_us = rule.saved_us(draws)
        spent_us = best_us = 0.0
        copied = False
        for stays in rng.geometric(rng.random(), 30):  # batches from one change to the next
            best_us += min(stays * saved_us, rule.copy_us)
            copied = False
            for i in range(stays):
                if rule.on_device(draws, i > 0):
                    spent_us += 0.0 if copied else rule.copy_us
                    copied = True
                else:
                    spent_us += saved_us
        assert spent_us <= 2 * best_us + 1e-6 * spent_us


def test_the_state_of_a_replay_resumes_on_the_device(store: gt.Store) -> None:
    device = SimulatedDevice(1)
    with gt.Replay(store, Fifo(), 4, device=DeviceOptions(device)) as fast:
        for _ in range(3):
            fast.sample()
        state = fast.state_dict()
        expected = [fast.sample().keys for _ in range(3)]
    with gt.Replay(store, Fifo(), 4, device=DeviceOptions(device)) as again:
        again.load_state_dict(state)
        assert [again.sample().keys for _ in range(3)] == expected


def test_a_closed_replay_lets_go_of_the_segment_and_a_dropped_one_too(store: gt.Store) -> None:
    device = SimulatedDevice(1)
    replay = gt.Replay(store, Uniform(seed=1), 8, device=DeviceOptions(device, path="gather"))
    other = gt.Replay(store, Uniform(seed=2), 8, device=DeviceOptions(device, path="gather"))
    replay.sample()
    assert len(device.registered) == 1, "a segment is registered once a process"
    replay.close()
    assert len(device.registered) == 1
    with pytest.raises(StoreClosedError):
        replay.sample()
    other.sample()
    del other
    gc.collect()
    assert not device.registered


def test_what_does_not_fit_is_refused_at_the_door(store: gt.Store) -> None:
    device = SimulatedDevice(1)
    with pytest.raises(ArgumentError, match="dtype is one of 'bfloat16', 'float16', 'float32', found 'int8'"):
        Convert("int8")
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        (
            {"device": DeviceOptions(device, convert={"group": Convert("float32")})},
            ArgumentError,
            "int64 cannot become",
        ),
        (
            {"device": DeviceOptions(device, convert={"no": Convert("float32")})},
            ArgumentError,
            r"convert takes no no; it takes",
        ),
        ({"device": DeviceOptions(device, select="device")}, ArgumentError, "runs no kernels"),
        ({"device": DeviceOptions(device, path="staged", select="device")}, ArgumentError, "batches are staged"),
        ({"device": DeviceOptions(device), "output": "numpy"}, ArgumentError, "torch tensors"),
        ({"device": "cpu"}, ArgumentError, "leave device out"),
        ({"device": "gpu7"}, ArgumentError, "there is no device"),
        ({"device": DeviceOptions(device, path="gather", pin_limit_bytes=1000)}, PinError, "the limit is 0.00 GB"),
    ]
    for arguments, error, message in refused:
        with pytest.raises(error, match=message):
            replay_of(store, Uniform(seed=1), 8, **arguments)
    with pytest.raises(ArgumentError, match="path is"):
        DeviceOptions(path="dma")  # type: ignore[arg-type]
    assert not device.registered
    if not torch.cuda.is_available():
        with pytest.raises(ArgumentError, match="finds no CUDA device"):
            gt.Replay(store, Uniform(seed=1), 8, device="cuda")


def test_one_batch_serves_as_static_memory_for_the_next(store: gt.Store) -> None:
    with gt.Replay(store, Prioritized(seed=1, beta=0.4), 8, window=5, num_batches=3) as replay:
        batches = list(replay)
        static = batches[0].clone()
        address = static["x"].data_ptr()
        static.copy_(batches[2])
        assert static["x"].data_ptr() == address != batches[0]["x"].data_ptr()
        for name in batches[2]:
            assert torch.equal(static[name], batches[2][name])
        assert torch.equal(static.importance_weights, batches[2].importance_weights)


@pytest.mark.parametrize("path", ["gather", "copy", "staged"])
def test_a_row_that_grows_has_one_length_in_a_batch(store_name: Callable[[], str], path: Any) -> None:
    """Fields, mask and books of a growing row speak of the same steps, whenever the device gets to read them."""
    fields = {"a": gt.Field((3,), "int64"), "b": gt.Field((500,), "uint8")}
    device = SimulatedDevice(4)
    done = threading.Event()
    with gt.Store.create(store_name(), fields, max_length=400, capacity=4) as store:
        row = store.row()
        row["a"][0], row["b"][0] = 1, 1
        row.publish(length=1)

        def grow() -> None:
            for step in range(1, 400):
                if done.wait(0.001):
                    return
                row["a"][step], row["b"][step] = step + 1, 1
                row.extend(step + 1)

        writer = threading.Thread(target=grow)
        writer.start()
        try:
            with gt.Replay(store, Uniform(seed=1), 3, window=30, device=DeviceOptions(device, path=path)) as fast:
                for _ in range(20):
                    batch = fast.sample()
                    device.finish()
                    at = batch.start[:, None] + torch.cumsum(batch.mask, 1)
                    assert torch.equal(batch["a"][..., 0], torch.where(batch.mask, at, 0))
                    assert torch.equal(batch["b"][..., 0] == 1, batch.mask)
        finally:
            done.set()
            writer.join()
            row.commit()


def test_a_rate_limiter_holds_batches_on_a_device_back(store_name: Callable[[], str]) -> None:
    from geartrain.errors import WaitTimeoutError

    device = SimulatedDevice(4)
    with gt.Store.create(store_name(), {"x": gt.Field((), "int64")}, max_length=4, capacity=64) as store:
        store.limiter.set(samples_per_insert=1.0, min_size_to_sample=8, error_buffer=8.0)
        store.insert({"x": np.zeros((8, 4), np.int64)})
        with replay_of(store, Uniform(seed=1), 8, prefetch=0, device=DeviceOptions(device), timeout_s=0.3) as fast:
            fast.sample()
            with pytest.raises(WaitTimeoutError):
                for _ in range(20):
                    fast.sample()
