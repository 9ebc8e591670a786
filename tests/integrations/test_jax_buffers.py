"""Buffers for JAX in flashbax's manner: the same calls, inside jit and outside, over a store that processes share."""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import preloaded
import pytest
from deadlines import patience
from hostile.instants import Interruption

import geartrain as gt
from geartrain.errors import (
    ArgumentError,
    GeartrainError,
    IncompatibleStoreError,
    NotEnoughRowsError,
    SchemaError,
    StoreClosedError,
)

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'geartrain[jax]'")
jnp = jax.numpy
from geartrain.integrations.jax import (  # noqa: E402
    BufferState,
    TrajectoryBuffer,
    as_jax,
    make_flat_buffer,
    make_prioritised_flat_buffer,
    make_trajectory_buffer,
)
from geartrain.integrations.jax.streams import Streams  # noqa: E402


class Step(NamedTuple):
    obs: dict[str, Any]
    action: Any
    done: Any


def step(number: Any) -> Step:
    """A timestep that tells its number in every leaf."""
    numbers: Any = jnp if isinstance(number, jax.core.Tracer) else np  # which compiles nothing
    number = numbers.asarray(number, np.int32)
    return Step(
        {"state": numbers.stack([number] * 3, -1).astype(np.float32), "half": number.astype(jnp.bfloat16)},
        number,
        number % 5 == 4,
    )


def pairs(sample: Any) -> list[int]:
    """The numbers of a sample's first timesteps, once every leaf of both was checked."""
    first, second = sample.experience
    for each, number in ((first, first.action), (second, first.action + 1)):
        want = step(np.asarray(number))
        for leaf, expected in zip(jax.tree.leaves(each), jax.tree.leaves(want), strict=True):
            assert isinstance(leaf, jax.Array)
            assert leaf.dtype == expected.dtype
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected))
    return np.asarray(first.action).tolist()


@pytest.fixture
def flat() -> Iterator[TrajectoryBuffer]:
    with make_flat_buffer(200, 10, 64) as buffer:
        yield buffer


def filled(buffer: TrajectoryBuffer, n: int, first: int = 0) -> BufferState:
    state = buffer.init(step(0))
    for number in range(first, first + n):
        state = buffer.add(state, step(number))
    return state


def test_pairs_are_consecutive_and_all_of_them_are_drawn(flat: TrajectoryBuffer) -> None:
    state = flat.init(step(7))
    assert not flat.can_sample(state)
    for number in range(60):  # several rows of 17
        state = flat.add(state, step(number))
    assert flat.can_sample(state)
    assert int(state.added) == 60
    drawn = [number for seed in range(16) for number in pairs(flat.sample(state, jax.random.key(seed)))]
    counts = np.bincount(drawn, minlength=59)
    assert len(counts) == 59
    assert ((counts - len(drawn) / 59) ** 2 / (len(drawn) / 59)).sum() < 120  # chi-square, 58 degrees of freedom
    assert state.store.status()["length"].sum() == 60 + 3  # what rows repeat


def test_the_same_key_draws_the_same_inside_jit_and_outside(flat: TrajectoryBuffer) -> None:
    state = filled(flat, 50)
    sample = jax.jit(flat.sample)
    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        assert pairs(flat.sample(state, key)) == pairs(sample(state, key))
    assert pairs(flat.sample(state, jax.random.key(3))) == pairs(flat.sample(state, jax.random.PRNGKey(3)))
    assert pairs(flat.sample(state, jax.random.key(3))) != pairs(flat.sample(state, jax.random.key(4)))


def test_a_training_loop_is_one_program(flat: TrajectoryBuffer) -> None:
    def body(state: BufferState, number: Any) -> Any:
        state = flat.add(state, step(number))
        newest = jax.lax.cond(
            flat.can_sample(state),
            lambda key: flat.sample(state, key).experience.second.action.max(),
            lambda key: jnp.int32(-1),
            jax.random.fold_in(jax.random.key(0), number),
        )
        return state, newest

    state, newest = jax.jit(lambda state: jax.lax.scan(body, state, jnp.arange(40)))(flat.init(step(0)))
    assert newest[:10].tolist() == [-1] * 10  # min_length=10: ten pairs, as in flashbax
    assert all(8 < int(most) <= number for number, most in enumerate(newest.tolist()) if number >= 10)
    assert int(state.added) == 40
    assert sorted(set(pairs(flat.sample(state, jax.random.key(0)))))[0] >= 0


@pytest.mark.slow
def test_a_full_buffer_keeps_as_many_timesteps_as_it_says(flat: TrajectoryBuffer) -> None:
    state = filled(flat, 1000)
    kept = set()
    for seed in range(60):
        kept |= set(pairs(flat.sample(state, jax.random.key(seed))))
    assert set(range(1000 - 200, 999)) <= kept
    assert min(kept) >= 1000 - 260


@pytest.mark.slow
def test_batches_and_sequences_continue_their_own_streams() -> None:
    streams = np.arange(3)[:, None] * 1000
    for add_sequences in (False, True):
        with make_flat_buffer(300, 4, 32, add_sequences, 3) as buffer:
            state, at = buffer.init(step(0)), 0
            for take in (1, 7, 30, 1, 25):
                if add_sequences:
                    state = buffer.add(state, step(streams + np.arange(at, at + take)))
                else:
                    for number in range(at, at + take):
                        state = buffer.add(state, step(streams[:, 0] + number))
                at += take
            assert int(state.added) == 3 * 64
            drawn = {n for seed in range(30) for n in pairs(buffer.sample(state, jax.random.key(seed)))}
            assert drawn == {stream * 1000 + number for stream in range(3) for number in range(63)}


def test_a_state_tells_its_place_and_shows_what_was_added_by_then() -> None:
    streams = np.arange(2, dtype=np.int32)[:, None] * 1000
    with make_flat_buffer(40, 4, 8, True, 2) as buffer:
        state, at, places = buffer.init(np.int32(0)), 0, []
        first = copy.deepcopy(state)
        for take in (1, 7, 12, 30, 5):  # rows of 17 timesteps, a ring of 20 of each stream
            older, state = state, buffer.add(state, streams + np.arange(at, at + take, dtype=np.int32))
            at += take
            places.append((int(state.current_index), bool(state.is_full)))
            newest = np.arange(max(0, at - 20), at)
            wanted = np.zeros((2, 20), np.int32)
            wanted[:, newest % 20] = streams + newest
            np.testing.assert_array_equal(state.experience, wanted)
        assert places == [(1, False), (8, False), (0, True), (10, True), (15, True)]
        assert not first.experience.any() and int(first.added) == 0 and first.store is state.store
        assert not buffer.can_sample(first) and buffer.can_sample(copy.deepcopy(state))
        older_newest = np.arange(30, 50)
        np.testing.assert_array_equal(older.experience[:, older_newest % 20], streams + older_newest)
        for number in (200, 300):  # what is gone is zeros, and nothing else
            state = buffer.add(state, streams + np.arange(at, number, dtype=np.int32))
            at = number
        assert set(older.experience[0].tolist()) <= {0, *older_newest.tolist()}
        inside = jax.jit(lambda state: (state.current_index, state.is_full))(state)
        assert [int(each) for each in inside] == [0, 1]
        with pytest.raises(ArgumentError, match="outside of jit"):
            jax.jit(lambda state: state.experience)(state)
    with pytest.raises(StoreClosedError):
        _ = state.experience


def test_trajectories_are_the_memory_that_was_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    import geartrain.integrations.jax.streams as streams

    gathered: list[list[np.ndarray]] = []
    draw = streams.Streams.draw

    def noted(self: Any, number: int) -> Any:
        found = draw(self, number)
        gathered.append(found[0])
        return found

    monkeypatch.setattr(streams.Streams, "draw", noted)
    with make_trajectory_buffer(2, 8, 5, 5, 64, period=1) as buffer:
        state = buffer.init({"x": jnp.zeros(3), "t": jnp.int32(0)})
        t = jnp.arange(40) + jnp.arange(2)[:, None] * 1000
        state = buffer.add(state, {"x": jnp.stack([t] * 3, -1).astype("f"), "t": t})
        batch = buffer.sample(state, jax.random.key(0)).experience
        for array, source in zip(jax.tree.leaves(batch), gathered[-1], strict=True):
            assert array.unsafe_buffer_pointer() == source.ctypes.data
        assert (jnp.diff(batch["t"], axis=1) == 1).all()
        np.testing.assert_array_equal(batch["x"][..., 1], batch["t"])
        kept = np.asarray(batch["t"]).copy()
        del source
        gathered.clear()
        for seed in range(20):  # the pool's memory goes round, but not what is held
            buffer.sample(state, jax.random.key(seed))
        np.testing.assert_array_equal(batch["t"], kept)


def test_batches_of_a_replay_are_pytrees_over_its_memory(store_name: Callable[[], str]) -> None:
    fields = {"obs.a": gt.Field((3,), "float32"), "obs.b.c": gt.Field((), "int8"), "z": gt.Field((), "bool")}
    with gt.Store.create(store_name(), fields, max_length=4, capacity=3) as store:
        rng = np.random.default_rng(0)
        store.insert({"obs.a": rng.normal(size=(3, 4, 3)).astype("f"), "obs.b.c": np.ones((3, 4), "i1"),
                      "z": np.ones((3, 4), bool)})  # fmt: skip
        with gt.Replay(store, gt.selection.Uniform(seed=0), 5, output="numpy") as replay:
            batch = replay.sample()
            arrays = as_jax(batch, nested=True)
            assert arrays["obs"]["a"].unsafe_buffer_pointer() == np.asarray(batch["obs.a"]).ctypes.data
            assert arrays["obs"]["b"]["c"].unsafe_buffer_pointer() == np.asarray(batch["obs.b.c"]).ctypes.data
            assert arrays["z"].dtype == bool
            total = jax.jit(lambda tree: jax.tree.map(jnp.sum, tree))(arrays)
            assert int(total["obs"]["b"]["c"]) == 20
    both = {"obs.a": gt.Field((), "int8"), "obs.a.b": gt.Field((), "int8")}
    with gt.Store.create(store_name(), both, max_length=1, capacity=1) as store:
        store.insert({"obs.a": np.ones((1, 1), "i1"), "obs.a.b": np.ones((1, 1), "i1")})
        with pytest.raises(ArgumentError, match=r"'obs\.a\.b' would be nested in the field 'obs\.a'"):
            as_jax(gt.fetch(store, store.keys(), output="numpy"), nested=True)


def test_priorities_are_exact_and_follow_their_transitions() -> None:
    with make_prioritised_flat_buffer(400, 4, 512, priority_exponent=0.5) as buffer:
        state = filled(buffer, 50)
        sample = buffer.sample(state, jax.random.key(0))
        first = np.asarray(pairs(sample))
        np.testing.assert_allclose(sample.probabilities, 1 / 49, rtol=1e-4)
        state = buffer.set_priorities(state, sample.indices, np.where(first == 7, 16.0, np.where(first < 30, 1.0, 0.0)))
        again = buffer.sample(state, jax.random.key(1))
        drawn = np.asarray(pairs(again))
        left = set(range(49)) - (set(first.tolist()) & set(range(30, 49)))
        assert set(drawn.tolist()) <= left
        share = 4 / (4 + len(left) - 1)
        assert abs((drawn == 7).mean() - share) < 5 * np.sqrt(share / 512)
        np.testing.assert_allclose(np.asarray(again.probabilities)[drawn == 7], share, rtol=1e-3)
        state = buffer.add(state, step(50))
        assert (np.asarray(pairs(buffer.sample(state, jax.random.key(2)))) == 49).any()  # enters with the greatest
        before = state.store.stats()["stale_keys"]
        for number in range(51, 600):
            state = buffer.add(state, step(number))
        buffer.set_priorities(state, sample.indices, np.ones(512))  # all of them are gone
        assert state.store.stats()["stale_keys"] - before == 512
        with pytest.raises(ArgumentError, match="finite"):
            buffer.set_priorities(state, again.indices, np.full(512, np.nan))


@pytest.mark.slow
def test_priorities_are_set_in_a_compiled_program() -> None:
    with make_prioritised_flat_buffer(400, 4, 256) as buffer:
        state = filled(buffer, 50)

        @jax.jit
        def only(state: BufferState, number: Any) -> Any:
            sample = buffer.sample(state, jax.random.key(0))
            first = sample.experience.first.action
            state = buffer.set_priorities(state, sample.indices, jnp.where(first == number, 1e6, 1e-6))
            return state, buffer.sample(state, jax.random.key(1))

        state, after = only(state, 7)
        assert (np.asarray(pairs(after)) == 7).mean() > 0.9


def test_wrong_calls_are_told_before_anything_is_written(flat: TrajectoryBuffer) -> None:
    for sizes in ((0, 1, 1), (10, 0, 1), (10, 1, 0), (1, 1, 1), (10, 11, 1), (10.5, 1, 1), (10, 1, True)):
        with pytest.raises(ArgumentError):
            make_flat_buffer(*sizes)  # type: ignore[arg-type]
    for options in ({"add_batch_size": 0}, {"writers": 0}, {"add_batch_size": 8}):
        with pytest.raises(ArgumentError):
            make_flat_buffer(10, 1, 1, **options)  # type: ignore[arg-type]
    for period in (0, 2, 1.5):
        with pytest.raises(ArgumentError, match="period"):
            make_trajectory_buffer(2, 8, 5, 5, 64, period=period)  # type: ignore[arg-type]
    for exponent in (-0.1, 1.1, float("nan"), "x", True):
        with pytest.raises(ArgumentError, match="priority_exponent"):
            make_prioritised_flat_buffer(10, 1, 1, priority_exponent=exponent)  # type: ignore[arg-type]
    for example, error in ((None, ArgumentError), ({}, ArgumentError), ("text", SchemaError), (object(), SchemaError),
                           (jax.random.key(0), SchemaError)):  # fmt: skip
        with pytest.raises(error):
            flat.init(example)
    with pytest.raises(ArgumentError, match="call it outside of jit"):
        jax.jit(lambda x: flat.init(x).added)(jnp.zeros(3))
    state = filled(flat, 3)
    for wrong, message in (
        (step(0)._replace(action=jnp.zeros((), jnp.float32)), "is int32 as in init, found float32"),
        (step(0)._replace(action=jnp.zeros(2, jnp.int32)), "arrays of shape"),
        (step(0)._asdict(), "as in init, found"),
        (None, "as in init"),
    ):
        with pytest.raises(ArgumentError, match=message):
            flat.add(state, wrong)
        with pytest.raises(ArgumentError, match=message):  # while the program is made
            jax.jit(flat.add)(state, wrong)
    for key in (None, 3, jnp.zeros(2), jnp.zeros((2, 2), jnp.uint32), jax.random.split(jax.random.key(0), 2)):
        with pytest.raises(ArgumentError, match="one random key"):
            flat.sample(state, key)
    with pytest.raises(ArgumentError, match="what init returned"):
        flat.sample(None, jax.random.key(0))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="has no priorities"):
        flat.set_priorities(state, jnp.zeros((1, 3), jnp.uint32), jnp.ones(1))
    with pytest.raises(ValueError, match="vmap"):
        jax.vmap(lambda key: flat.sample(state, key).experience.first.action)(jax.random.split(jax.random.key(0), 2))
    assert int(state.added) == 3
    assert state.store.status()["length"].tolist() == [3]


def test_a_failure_inside_jit_is_told_and_the_next_call_works(flat: TrajectoryBuffer) -> None:
    state = flat.init(step(0))
    with pytest.raises(NotEnoughRowsError):
        flat.sample(state, jax.random.key(0))
    sample = jax.jit(lambda state: flat.sample(state, jax.random.key(0)).experience.first.action)
    with pytest.raises(jax.errors.JaxRuntimeError, match="NotEnoughRowsError"):
        jax.block_until_ready(sample(state))
    for number in range(2):
        state = jax.jit(flat.add)(state, step(number))
    assert sample(state).tolist() == [0] * 64


def test_a_closed_buffer_refuses_and_leaves_nothing(store_name: Callable[[], str]) -> None:
    buffer = make_flat_buffer(100, 2, 4, store=store_name())
    state = filled(buffer, 5)
    add = jax.jit(buffer.add)
    add(state, step(5))
    path = state.store.path
    buffer.close()
    buffer.close()
    assert not path.exists()
    for call in (lambda: buffer.add(state, step(0)), lambda: buffer.sample(state, jax.random.key(0)),
                 lambda: buffer.set_priorities(state, None, None), lambda: buffer.can_sample(state)):  # fmt: skip
        with pytest.raises(StoreClosedError):
            call()
    with pytest.raises((StoreClosedError, jax.errors.JaxRuntimeError), match="closed"):
        jax.block_until_ready(add(state, step(0)).added)
    dropped = make_flat_buffer(100, 2, 4, store=store_name())
    path = filled(dropped, 3).store.path
    del dropped
    assert not path.exists()


@pytest.mark.slow
def test_threads_that_add_and_sample_get_whole_timesteps(flat: TrajectoryBuffer) -> None:
    state = filled(flat, 20)
    sample, failed = jax.jit(flat.sample), []

    def read(seed: int) -> None:
        try:
            for each in range(5):
                pairs(sample(state, jax.random.key(seed * 100 + each)))
                pairs(flat.sample(state, jax.random.key(seed * 100 + each)))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for number in range(20, 400):
        state = flat.add(state, step(number))
    for thread in threads:
        thread.join(patience(60))
        assert not thread.is_alive()
    assert failed == []


WRITER = """
import sys
import numpy as np
from geartrain.integrations.jax import make_flat_buffer
buffer = make_flat_buffer(200, 10, 8, store=sys.argv[1], writers=2)
state = buffer.init({"t": np.int32(0)})
for number in range(1000, 1050):
    state = buffer.add(state, {"t": np.int32(number)})
print("added", flush=True)
sys.stdin.readline()
buffer.close()
"""


def test_processes_share_a_buffer_by_its_name(store_name: Callable[[], str]) -> None:
    name = store_name()
    with make_flat_buffer(200, 10, 256, store=name, writers=2) as buffer:
        state = buffer.init({"t": np.int32(0)})
        assert not buffer.can_sample(state)
        with preloaded.Popen([sys.executable, "-c", WRITER, name], stdin=-1, stdout=-1) as writer:
            assert writer.stdout.readline() == "added\n"
            assert buffer.can_sample(state)
            assert jax.jit(buffer.can_sample)(state)
            for number in range(20):
                state = buffer.add(state, {"t": np.int32(number)})
            drawn = np.asarray(buffer.sample(state, jax.random.key(0)).experience.first["t"])
            writer.stdin.close()
            assert writer.wait(patience(30)) == 0
        assert (drawn >= 1000).any()
        assert (drawn < 20).any()
        other = make_flat_buffer(200, 10, 8, store=name)
        with pytest.raises(IncompatibleStoreError):
            other.init({"t": np.float32(0)})
        with pytest.raises((ArgumentError, IncompatibleStoreError)):
            make_prioritised_flat_buffer(200, 10, 8, store=name).init({"t": np.int32(0)})


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_forked_child_is_refused(flat: TrajectoryBuffer) -> None:
    state = filled(flat, 20)
    pid = os.fork()
    if pid == 0:
        try:
            flat.add(state, step(0))
        except ArgumentError as error:
            os._exit(0 if "forked" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pairs(flat.sample(filled_more(flat, state), jax.random.key(0)))


def filled_more(buffer: TrajectoryBuffer, state: BufferState) -> BufferState:
    for number in range(20, 30):
        state = buffer.add(state, step(number))
    return state


@pytest.mark.parametrize("other", ["add", "draw", "close"])
@pytest.mark.parametrize("name", ["add", "draw"])
def test_a_handler_within_a_call_is_refused_or_closes_at_its_end(name: str, other: str) -> None:
    fields = {"x": gt.Field((), "float32")}

    def made() -> tuple[gt.Store, Streams, dict[str, Callable[[], object]]]:
        store = gt.Store.create(fields, max_length=17, capacity=12)
        one = Streams(store, fields, 1, 64, 2, 4, None)
        one.add([np.zeros((1, 20), np.float32)])
        calls = {"add": lambda: one.add([np.ones((1, 20), np.float32)]), "draw": lambda: one.draw(1)}
        return store, one, {**calls, "close": one.close}

    def trial(line: int | None) -> int:
        store, one, calls = made()

        def handler() -> None:
            with suppress(GeartrainError):
                calls[other]()

        within = Interruption(line, handler)
        with suppress(GeartrainError):
            within.during(calls[name])
        one.close()
        assert store.audit() == []
        if other == "close":
            assert not (store.status()["length"] > 17).any()
        store.close()
        return within.lines

    ended: list[BaseException | None] = []

    def all_lines() -> None:
        try:
            for line in range(trial(None)):
                trial(line)
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=all_lines, daemon=True)
    thread.start()
    thread.join(patience(60))
    assert ended == [None]
