"""Batches by one native call: equal to what strategies and `gt.fetch` say, at a price independent of their fields."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import tagged
from deadlines import patience
from replay_calls import replay_of

import geartrain as gt
import geartrain._native as _native
from geartrain.errors import ArgumentError, EmptyStoreError, FieldError, NotEnoughRowsError
from geartrain.replay.prefetch import HAND_OVER_S, BuildPlacement
from geartrain.selection import Candidates, Draw, Fifo, Lifo, Limits, Mixture, Prioritized, TopK, Uniform

N, B = 300, 24


def filled(lengths: bool = True, seed: int = 0, fields: int = 1) -> gt.Store:
    random = np.random.default_rng(seed)
    schema = {f"x{i}": gt.Field((2,), "int64") for i in range(fields)} | {"id": gt.Field((), "int64", per_row=True)}
    store = gt.Store.create(schema, max_length=9, capacity=N)
    store.insert(
        {name: random.integers(0, 2**40, (N, 9, 2)) for name in schema if name != "id"} | {"id": np.arange(N)},
        lengths=random.integers(1, 10, N) if lengths else None,
        priorities=random.integers(0, 7, N).astype(float),
        versions=np.arange(N) // 10,
    )
    return store


STRATEGIES = {
    "uniform": Uniform(seed=1),
    "uniform stratified": Uniform(seed=1, stratified=True),
    "uniform distinct": Uniform(seed=1, replacement=False),
    "uniform limited": Uniform(seed=1, limits=Limits(min_version=12, min_length=4)),
    "prioritized": Prioritized(seed=1),
    "prioritized stratified": Prioritized(seed=1, stratified=True, beta=0.7),
    "prioritized distinct": Prioritized(seed=1, replacement=False),
    "prioritized scheduled": Prioritized(seed=1, beta=lambda step: 0.1 * step),
    "highest": TopK(),
    "newest": Lifo(),
    "oldest": Fifo(),
}


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_batch_is_what_the_strategy_chooses_and_fetch_copies(strategy: Any, window: int | None) -> None:
    store = filled()
    candidates = Candidates.of_store(store.native, store.column)
    state: dict[str, int] = {}
    with gt.Replay(store, strategy, B, window=window, prefetch=0, output="numpy") as replay:
        scheduled = isinstance(strategy, Prioritized) and callable(strategy.beta)
        assert replay.stats()["path"] == ("native, calls Prioritized.beta" if scheduled else "native")
        for step in range(4):
            batch = replay.sample()
            draw = strategy.select(candidates, B, step, state=state or None)
            state = draw.state
            np.testing.assert_array_equal(batch.keys.row, draw.rows)
            np.testing.assert_array_equal(batch.keys.generation, draw.generations)
            np.testing.assert_array_equal(batch.probability, draw.probability)
            weights = strategy.importance_weights(draw, N, step)
            assert (weights is None) == (batch.importance_weights is None)
            if weights is not None:
                np.testing.assert_allclose(batch.importance_weights, weights, rtol=1e-15)
                unscaled = (draw.probability * N) ** -(0.7 if strategy.stratified else 0.1 * step)
                np.testing.assert_allclose(weights, unscaled / unscaled.max(), rtol=1e-12)
            ends = None if window is None else batch.start + batch.mask.sum(1) - 1
            expected = gt.fetch(store, batch.keys, window=window, ends=ends, output="numpy")
            for name in store.fields:
                np.testing.assert_array_equal(batch[name], expected[name])
            for name in ("mask", "start", "length", "version"):
                np.testing.assert_array_equal(getattr(batch, name), getattr(expected, name))
            assert batch.nbytes == expected.nbytes


def test_the_ends_of_windows_are_spread_over_the_steps() -> None:
    store = filled(lengths=False)
    with gt.Replay(store, Uniform(seed=3), 256, window=2, prefetch=0, output="numpy") as replay:
        ends = np.concatenate([(batch.start + batch.mask.sum(1) - 1) for batch in (replay.sample() for _ in range(40))])
    counts = np.bincount(ends, minlength=9)
    assert ((counts - len(ends) / 9) ** 2 / (len(ends) / 9)).sum() < 35  # chi-square, 8 degrees of freedom: p < 3e-5


def test_a_mixture_fills_one_batch() -> None:
    stores = [filled(seed=1), filled(seed=2)]
    strategy = Mixture([0.75, 0.25], [Prioritized(seed=1, beta=0.5), Uniform(seed=2)], seed=0)
    with gt.Replay(stores, strategy, B, prefetch=0, output="numpy") as replay:
        batch = replay.sample()
        assert batch.keys.shard.tolist() == [0] * 18 + [1] * 6
        assert (batch.importance_weights[18:] == 1).all() and (batch.importance_weights[:18] < 1).any()
        for number, store in enumerate(stores):
            mine = batch.keys.shard == number
            np.testing.assert_array_equal(
                batch["x0"][mine], store.column("x0")[batch.keys.row[mine]] * batch.mask[mine, :, None]
            )


@pytest.mark.parametrize("order", [["a", "b"], ["b", "a"], ["c", "b", "a"]])
def test_stores_of_a_mixture_may_have_their_fields_in_another_order(order: list[str]) -> None:
    shapes = {"a": (64,), "b": (), "c": (3,)}
    stores = []
    for number, names in enumerate((["a", "b"], order)):
        schema = {name: gt.Field(shapes[name], "int32") for name in names}
        store = gt.Store.create(schema, max_length=5, capacity=40)
        values = {name: np.full((40, 5, *shapes[name]), 10 * ord(name) + number, np.int32) for name in names}
        store.insert(values, lengths=np.arange(40) % 5 + 1)
        stores.append(store)
    mixture = Mixture([1, 1], [Uniform(seed=1), Lifo()], seed=0)
    with gt.Replay(stores, mixture, 16, fields=["a", "b"], prefetch=0, output="numpy") as replay:
        for batch in (replay.sample(), gt.fetch(stores, replay.sample().keys, fields=["a", "b"], output="numpy")):
            for name in ("a", "b"):
                expected = 10 * ord(name) + batch.keys.shard
                found = batch[name].reshape(16, 5, -1)
                assert ((found == expected[:, None, None]) == batch.mask[:, :, None]).all()


def test_a_batch_is_placed_in_memory_that_is_large_enough_aligned_and_writeable() -> None:
    store = gt.Store.create({"x": gt.Field((3,), "float32")}, max_length=4, capacity=16)
    store.insert({"x": np.ones((16, 4, 3), np.float32)})
    first = gt.Replay(store, Uniform(seed=1), 8, prefetch=0)._builder.samplers[0].empty_batch(8)
    fields, metadata, nbytes = first.places()
    memory = np.zeros(nbytes + 128, np.uint8)
    at = -memory.ctypes.data % 64
    aligned = memory[at : at + nbytes]
    placed = first.placed_in(aligned)
    assert np.shares_memory(placed.rows(), aligned)
    assert placed.length().ctypes.data - aligned.ctypes.data == metadata["length"]
    assert placed.field(0).ctypes.data - aligned.ctypes.data == fields[0]
    rows = placed.rows()
    del placed, aligned
    rows[:] = 7  # the array keeps the memory
    for wrong in (memory[at : at + nbytes - 1], memory[at + 1 : at + 1 + nbytes], np.zeros(0, np.uint8)):
        with pytest.raises(gt.errors.ArgumentError):
            first.placed_in(wrong)
    unwriteable = memory[at : at + nbytes]
    unwriteable.flags.writeable = False
    for wrong in (unwriteable, None, 3, b"x" * (nbytes + 64)):
        with pytest.raises((TypeError, RuntimeError, gt.errors.ArgumentError)):
            first.placed_in(wrong)  # type: ignore[arg-type]


def test_rows_whose_last_samples_a_batch_has_used_take_no_place_among_the_others() -> None:
    store = gt.Store.create({"id": gt.Field((), "int64")}, max_length=1, capacity=16, max_times_sampled=1)
    store.insert({"id": np.arange(16)[:, None]})

    def take_before(rows: Any) -> None:  # another consumer, between this batch's draw and its copy
        store.native.count_samples(rows, np.ones(len(rows), np.uint32))
        store.native.release_exhausted(rows, np.ones(len(rows), np.uint32))

    drawn = Uniform(seed=1, replacement=False).select(Candidates.of_store(store.native, store.column), 8, 0)
    sampler = gt.Replay(store, Uniform(seed=1, replacement=False), 8, prefetch=0, output="numpy")._builder.samplers[0]
    batch = _native.SampledBatch(store.native, 8, [0], 0, False)
    others = np.setdiff1d(np.arange(16, dtype=np.uint32), drawn.rows)
    take_before(others[:4])
    chosen = (drawn.rows, drawn.generations, drawn.probability, None, False)
    rows = iter([chosen])  # asked for once
    made = sampler.batch_sampler.sample(8, 0, None, 0, False, None, lambda *_: next(rows), None, batch)
    assert made == (None, 0, 0, 12)
    assert len(store) == 4
    again = sampler.candidates.native.draw_distinct(False, 1, 0, 1, 4, drawn.rows, None)
    assert sorted(again[0].tolist()) == sorted(others[4:].tolist())


class Own:
    """Rows by a user's own code."""

    seed = 5

    def select(self, candidates: Candidates, n: int, step: int, *, state: Any = None, redraw: Any = None) -> Draw:
        count = n if redraw is None else len(redraw.numbers)
        rows = (np.arange(count) + step + 7 * (0 if redraw is None else redraw.attempt)) % N
        return Draw(rows.astype(np.uint32), np.ones(count, np.uint32), np.ones(count), np.full(count, 0.5))


def test_a_strategy_with_code_of_its_own_is_asked_and_its_rows_are_gathered() -> None:
    store = filled()
    with gt.Replay(store, Own(), B, prefetch=0, output="numpy") as replay:
        assert replay.stats()["path"] == "native, calls Own.select"
        replay.sample()
        batch = replay.sample()
        assert batch["id"].tolist() == list(range(1, B + 1))
        assert batch.importance_weights.tolist() == [0.5] * B
        store.delete(gt.Keys(np.arange(5, 9, dtype=np.uint32), np.ones(4, np.uint32)))
        batch = replay.sample()  # rows 5 to 8 are draws 3 to 6: drawn again as attempt 1 says, 9 to 12
        assert batch["id"].tolist() == [2, 3, 4, 9, 10, 11, 12, *range(9, B + 2)]
        assert replay.stats()["redrawn"] == 4


@pytest.mark.parametrize(
    "strategy", [Uniform(seed=1), Prioritized(seed=1, replacement=False), Lifo()], ids=["uniform", "distinct", "newest"]
)
def test_rows_that_are_overwritten_meanwhile_are_never_returned(strategy: Any) -> None:
    store = gt.Store.create(tagged.FIELDS, max_length=tagged.STEPS, capacity=64)
    random = np.random.default_rng(0)
    tagged.insert(store, random.integers(0, 2**62, 64).astype(np.uint64))
    stop = threading.Event()

    def overwrite() -> None:
        while not stop.is_set():
            tagged.insert(store, random.integers(0, 2**62, 8).astype(np.uint64))

    writer = threading.Thread(target=overwrite)
    writer.start()
    try:
        with replay_of(store, strategy, 16, prefetch=0, output="numpy", timeout_s=patience(30)) as replay:
            for _ in range(300):
                batch = replay.sample()
                assert tagged.mixed(batch) == []
    finally:
        stop.set()
        writer.join()
    assert store.audit() == []


def test_priorities_are_raised_once_to_a_new_alpha_however_many_threads_update() -> None:
    for _ in range(20):
        store = gt.Store.create({"x": gt.Field((), "int64")}, max_length=1, capacity=20_000)
        keys = store.insert({"x": np.zeros((20_000, 1), np.int64)}, priorities=np.full(20_000, 4.0))
        strategy = Prioritized(alpha=lambda step: 1.0 if step == 0 else 0.5, seed=0)
        with gt.Replay(store, strategy, 4, prefetch=0, output="numpy") as replay:
            replay.sample()
            start = threading.Barrier(2)

            def update(number: int, replay: gt.Replay = replay, start: threading.Barrier = start) -> None:
                start.wait(patience(20))
                replay.update_priorities(keys[number : number + 1], np.array([4.0]))  # noqa: B023

            threads = [threading.Thread(target=update, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            np.testing.assert_allclose(store.status()["priority"], 2.0)
        store.close()


def calls_of(fields: int, output: str) -> int:
    store = filled(fields=fields)
    with gt.Replay(store, Prioritized(seed=0, beta=0.4), B, window=3, prefetch=0, output=output) as replay:
        for _ in range(3):
            replay.sample()
        seen = 0

        def count(_frame: Any, event: str, _arg: Any) -> None:
            nonlocal seen
            seen += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            replay.sample()
        finally:
            sys.setprofile(None)
        return seen


@pytest.mark.parametrize("output", ["numpy", "torch"])
def test_calls_in_python_do_not_grow_with_fields(output: str) -> None:
    if output == "torch":
        pytest.importorskip("torch")
    assert calls_of(1, output) == calls_of(20, output) < 40


def test_a_batch_is_copied_pickled_and_referenced_like_any_object() -> None:
    store = filled()
    with gt.Replay(store, Prioritized(seed=0, beta=0.4), B, prefetch=0, output="numpy") as replay:
        batch = replay.sample()
    assert weakref.ref(batch)() is batch
    assert "x0" in batch and "y" not in batch and list(batch) == ["x0", "id"] and len(batch) == batch.batch_size == B
    with pytest.raises(KeyError):
        batch["y"]
    with pytest.raises(AttributeError, match="no attribute 'y'"):
        batch.y  # noqa: B018
    with pytest.raises(AttributeError):
        batch.step = 3
    for other in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert isinstance(other, gt.Batch) and other.step == batch.step and other.keys == batch.keys
        for name in batch:
            np.testing.assert_array_equal(other[name], batch[name])
        np.testing.assert_array_equal(other.importance_weights, batch.importance_weights)
    assert set(batch.as_dict()) == {
        "mask",
        "start",
        "length",
        "version",
        "probability",
        "importance_weights",
        "x0",
        "id",
    }


def test_arrays_outlive_the_batch_the_replay_and_the_store() -> None:
    store = filled()
    with gt.Replay(store, Uniform(seed=0), B, prefetch=0, output="numpy") as replay:
        first = replay.sample()
        kept, ids = first["x0"], first["id"].copy()
        expected = kept.copy()
        del first
        for _ in range(20):
            replay.sample()
    store.close()
    np.testing.assert_array_equal(kept, expected)
    assert ids.shape == (B,)


def test_tensors_are_the_arrays_and_hold_the_memory_until_the_last_is_dropped() -> None:
    torch = pytest.importorskip("torch")
    names = [
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "bfloat16",
    ]
    schema = {name: gt.Field((3,), name) for name in names} | {"uint32": gt.Field((), "uint32")}
    with gt.Store.create(schema, max_length=4, capacity=20) as store:
        bits = np.random.default_rng(0).integers(0, 2, (20, 4, 3))
        values = {name: torch.from_numpy(bits).to(getattr(torch, name)) for name in names}
        store.insert({**values, "uint32": bits[..., 0].astype(np.uint32)}, lengths=np.arange(20) % 4 + 1)
        options = {"window": 2, "prefetch": 0}
        strategy = Prioritized(seed=3, beta=0.5)
        with (
            replay_of(store, strategy, 16, **options) as replay,
            replay_of(store, strategy, 16, fields=names[:-1], output="numpy", **options) as other,
        ):
            batch, expected = replay.sample(), other.sample()
            for name in names:
                assert batch[name].dtype == getattr(torch, name) and batch[name].shape == (16, 2, 3)
                assert batch[name] is batch[name]
            for name in names[:-1]:
                np.testing.assert_array_equal(batch[name].numpy(), expected[name])
            assert torch.equal(batch["bfloat16"], batch["float32"].to(torch.bfloat16))
            for name in ("mask", "start", "length", "version", "probability", "importance_weights"):
                array = getattr(expected, name)
                assert torch.equal(getattr(batch, name), torch.from_numpy(array))
            assert batch.draw is None and batch.cu_seqlens is None

            del batch, expected, array
            before = _native.pool_counts()["bytes_in_use"]
            kept = replay.sample()["float32"]
            assert _native.pool_counts()["bytes_in_use"] > before
            text, part = kept.clone(), kept[3:5]
            del kept
            for _ in range(10):
                replay.sample()["float32"].zero_()
            assert torch.equal(part, text[3:5])
            dropped = threading.Thread(target=lambda tensors: tensors.clear(), args=([part],))
            del part
            dropped.start()
            dropped.join()
            assert replay.sample()._rows.field(0, type).__name__ == "PyCapsule"  # and nobody took the capsule
            with pytest.raises(ZeroDivisionError):
                replay.sample()._rows.field(0, lambda _capsule: 1 / 0)
            del dropped
            assert _native.pool_counts()["bytes_in_use"] == before


@pytest.mark.parametrize("megabytes", [2.1, 3.2, 4.1])
def test_a_batch_takes_up_at_most_a_third_more_memory_than_it_holds(megabytes: float) -> None:
    rows = int(megabytes * 2**20 / 65536)
    with gt.Store.create({"x": gt.Field((64, 256), "float32")}, max_length=1, capacity=4) as store:
        store.insert({"x": np.zeros((4, 1, 64, 256), np.float32)})
        with gt.Replay(store, Uniform(seed=0), rows, prefetch=0, output="numpy") as replay:
            batches, made = [], 0
            while made == 0:  # the pool may have some from before
                before = _native.pool_counts()
                batches.append(replay.sample())
                after = _native.pool_counts()
                made = after["buffers_made"] - before["buffers_made"]
                assert made or after["bytes_kept"] < before["bytes_kept"]
            assert made == 1
            assert after["bytes_in_use"] - before["bytes_in_use"] <= 4 / 3 * batches[-1].nbytes


def test_what_cannot_be_drawn_is_refused_by_name() -> None:
    with gt.Store.create({"x": gt.Field((), "int64")}, max_length=1, capacity=8) as store:
        with gt.Replay(store, Uniform(seed=0), 4, prefetch=0) as replay, pytest.raises(EmptyStoreError):
            replay.sample()
        store.insert({"x": np.zeros((3, 1), np.int64)})
        with gt.Replay(store, Uniform(seed=0, replacement=False), 4, prefetch=0) as replay:
            with pytest.raises(NotEnoughRowsError, match="4 different rows were asked for, 3"):
                replay.sample()
        with gt.Replay(store, Lifo(), 4, prefetch=0) as replay:
            with pytest.raises(NotEnoughRowsError, match="4 rows were asked for, 3 can be chosen"):
                replay.sample()
        with gt.Replay(store, Prioritized(seed=0, beta=lambda step: -1.0), 2, prefetch=0) as replay:
            with pytest.raises(ArgumentError, match="beta"):
                replay.sample()


def test_rows_admitted_by_the_rate_limiter_are_given_back_when_nothing_can_be_drawn() -> None:
    store = filled()
    store.limiter.set(samples_per_insert=2.0, min_size_to_sample=1, error_buffer=1_000)
    with gt.Replay(store, Prioritized(seed=0), 8, prefetch=0, output="numpy") as replay:
        replay.sample()
        assert store.limiter.state().samples == 8
        store.update_priorities(store.keys(), np.zeros(len(store)))
        with pytest.raises(EmptyStoreError, match="priority above zero"):
            replay.sample()
        assert store.limiter.state().samples == 8


def placed(placement: BuildPlacement, durations: list[float], pauses: list[float]) -> bool:
    """Whether items are made on the consumer's thread after these."""
    for duration, pause in zip(durations, pauses, strict=True):
        placement.note(duration, pause)
    return placement.here


def test_cheap_items_are_made_on_the_consumers_thread_and_dear_ones_ahead() -> None:
    placement = BuildPlacement()

    def after(durations: list[float]) -> bool:
        return placed(placement, durations, [1.0] * 8)

    assert not placement.here
    assert after([1.0] * 3 + [HAND_OVER_S / 2] + [1.0] * 4)  # busy, but cheap
    assert after([1.5 * HAND_OVER_S] * 8)  # not yet dear enough to go back
    assert not after([2.5 * HAND_OVER_S] * 8)
    assert not after([1.5 * HAND_OVER_S] * 8)


def test_items_are_made_ahead_only_while_the_consumer_does_something_else() -> None:
    placement, dear = BuildPlacement(2), [3 * HAND_OVER_S] * 8
    assert placed(placement, dear, [HAND_OVER_S / 10] * 8)
    assert placed(placement, dear, [HAND_OVER_S / 10] * 7 + [1.0])  # interrupted once
    assert not placed(placement, dear, [10 * HAND_OVER_S] * 8)
    assert not placed(placement, dear, [0, 0, 0, 1.0] * 2)  # in bursts, which the pauses between them are long for
    assert not placed(placement, [100 * HAND_OVER_S] * 8, [0.0] * 8)  # a handoff costs little beside that


def test_the_thread_ends_where_batches_are_cheap_and_none_is_skipped_or_repeated(monkeypatch: Any) -> None:
    store = filled()
    monkeypatch.setattr("geartrain.replay.prefetch.HAND_OVER_S", 100.0)
    steps, alive = [], []
    with gt.Replay(store, Uniform(seed=0), B, prefetch=3, output="numpy") as replay:
        with gt.Replay(store, Uniform(seed=0), B, prefetch=0, output="numpy") as reference:
            for number in range(40):
                if number == 25:
                    monkeypatch.setattr("geartrain.replay.prefetch.HAND_OVER_S", 0.0)
                batch = replay.sample()
                steps.append(batch.step)
                assert batch.keys == reference.sample().keys
                alive.append(any(thread.name == "geartrain-prefetch" for thread in threading.enumerate()))
    assert all(alive[:8]) and not any(alive[12:25]) and all(alive[33:])
    assert steps == list(range(40))


def test_what_a_batch_has_as_an_attribute_is_named_by_the_error_for_a_field() -> None:
    with filled() as store, gt.Replay(store, Uniform(seed=1), 2, output="numpy") as replay:
        batch = replay.sample()
        for name in ("importance_weights", "mask", "keys"):
            with pytest.raises(FieldError, match=f"has no field '{name}'.*; it is an attribute: batch.{name}$"):
                batch[name]
        with pytest.raises(FieldError, match="did you mean 'id'"):
            batch["ids"]


@pytest.mark.parametrize("update_lag", [None, 0])
def test_a_dropped_batch_is_recycled_though_its_priorities_were_updated(update_lag):
    """A second buffer is one that the caches do not hold."""
    with gt.Store.create({"x": gt.Field((256,), "float32", per_row=True)}, max_length=1, capacity=64) as store:
        store.insert({"x": np.zeros((64, 256), np.float32)})
        strategy = gt.selection.Prioritized(seed=0)
        with replay_of(store, strategy, 32, prefetch=0, output="numpy", update_lag=update_lag) as replay:
            places = set()
            for _ in range(6):
                batch = replay.sample()
                places.add(batch["x"].ctypes.data)
                replay.update_priorities(batch.keys, np.ones(32))
                del batch
    assert len(places) == 1
