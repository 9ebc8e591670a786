"""Rows that repeat steps of the row before: each step is drawn from one of its copies, with all that the view needs."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
from collections import Counter
from contextlib import ExitStack

import numpy as np
import pytest
from crossed import crossed
from recorded_shards import alone, over_ranks, same
from replay_calls import replay_of
from scipy import stats
from segments import Segment

import geartrain as gt
from geartrain.errors import ArgumentError, FieldError, SchemaError
from geartrain.integrations import export_store, import_dataset
from geartrain.selection import Epochs, Lifo, Prioritized, TopK, Uniform
from geartrain.store.recorder import REPEATS, recorded_fields
from geartrain.tools.testing import SimulatedDevice

FIELDS = {"obs": gt.Field((2,), "float32"), "reward": gt.Field((), "float32")}
GAMMA = 0.5


def make_store(max_length, capacity=3000, *, share_rows=False, truncated=True, n_step=1, **options):
    extras = {"truncated": gt.Field((), "bool")} if truncated else {}
    fields = recorded_fields(FIELDS, overlap=True, share_rows=share_rows, n_step=n_step, **extras)
    return gt.Store.create(fields, max_length=max_length, capacity=capacity, **options)


def record(store, lengths, overlap, seed=0, **options):
    """Episodes of so many actions each, by their number: rewards, and whether they end by their rules.

    The observation at step t of episode e is (e, t).
    """
    rng = np.random.default_rng(seed)
    episodes = []
    with store.recorder(1, autoreset="disabled", overlap=overlap, **options) as recorder:
        for number, length in enumerate(lengths):
            rewards, terminated = rng.normal(size=length).astype(np.float32), bool(rng.random() < 0.5)
            recorder.reset(np.array([number, 0]))
            for t, reward in enumerate(rewards):
                ends = t == length - 1
                recorder.step(
                    np.array([number, t + 1]),
                    reward=reward,
                    terminated=ends and terminated,
                    truncated=ends and not terminated,
                )
            episodes.append((rewards, terminated))
    return episodes


def check(batch, episodes, n_step, frames):
    """Each transition is its whole episode's, wherever rows end."""
    obs = batch["obs"].reshape(len(batch), frames, 2)
    after = batch["next_obs"].reshape(len(batch), frames, 2)
    for i, (number, t) in enumerate(obs[:, -1].astype(int)):
        rewards, terminated = episodes[number]
        m = min(n_step, len(rewards) - t)
        ends = t + m == len(rewards)

        def stack(at, number=number):
            return [(number, step) if step >= 0 else (0, 0) for step in range(at - frames + 1, at + 1)]

        np.testing.assert_array_equal(obs[i], stack(t))
        np.testing.assert_array_equal(after[i], stack(t + m))
        assert batch["reward"][i] == pytest.approx(sum(GAMMA**k * rewards[t + k] for k in range(m)), abs=1e-5)
        assert batch["discount"][i] == (0 if ends and terminated else GAMMA**m)
        assert batch["terminated"][i] == (ends and terminated)
        assert batch["truncated"][i] == (ends and not terminated)


def steps_of(batch, frames=1):
    return [tuple(each) for each in batch["obs"].reshape(len(batch), frames, 2)[:, -1].astype(int).tolist()]


def one_pass(store, **options):
    with replay_of(store, Epochs(seed=1, over="steps"), 64, output="numpy", **options) as replay:
        yield from replay


VIEWS = [(1, 1), (1, 3), (3, 1), (3, 4)]


@pytest.mark.parametrize(("n_step", "frames", "publish_every", "share_rows"), crossed(VIEWS, [None, 1], [False, True]))
def test_a_pass_has_each_step_once_with_its_whole_stack_and_sum(n_step, frames, publish_every, share_rows):
    rng = np.random.default_rng(n_step + 10 * frames)
    overlap = n_step - 1 + frames - 1 + int(rng.integers(3))
    view = gt.Transitions(n_step=n_step, frame_stack=frames, gamma=GAMMA)
    with make_store(overlap + int(rng.integers(4, 9)), share_rows=share_rows, truncated=publish_every is None) as store:
        options = {"publish_every": publish_every, "share_rows": share_rows}
        episodes = record(store, rng.integers(1, 40, 80), overlap, **options)
        found = Counter()
        for batch in one_pass(store, view=view):
            check(batch, episodes, n_step, frames)
            found.update(steps_of(batch, frames))
        assert found == {(e, t): 1 for e, (rewards, _) in enumerate(episodes) for t in range(len(rewards))}


@pytest.mark.parametrize(
    ("n_step", "frames", "per_step", "share_rows"), crossed([(1, 2), (3, 2)], [False, True], [False, True], times=2)
)
def test_steps_are_drawn_alike_whether_rows_repeat_them_or_not(n_step, frames, per_step, share_rows):
    options = {"priority_per": "step"} if per_step else {}
    view = gt.Transitions(n_step=n_step, frame_stack=frames, gamma=GAMMA)
    selection = Prioritized(seed=3) if per_step else Uniform(seed=3, over="steps")
    with make_store(9, share_rows=share_rows, n_step=n_step if per_step else 1, **options) as store:
        episodes = record(store, [40, 13, 2, 7, 8, 9, 21], overlap=4, share_rows=share_rows)
        with gt.Replay(store, selection, 2000, view=view, output="numpy") as replay:
            batches = [replay.sample() for _ in range(10)]
        for batch in batches[:2]:
            check(batch, episodes, n_step, frames)
        found = Counter(step for batch in batches for step in steps_of(batch, frames))
        known = [(e, t) for e, (rewards, _) in enumerate(episodes) for t in range(len(rewards))]
        assert set(found) == set(known)
        assert stats.chisquare([found[step] for step in known]).pvalue > 1e-4


@pytest.mark.parametrize(("n_step", "frames"), [(1, 1), (3, 2)])
def test_draws_of_rows_leave_the_steps_of_neighbours_to_them(n_step, frames):
    view = gt.Transitions(n_step=n_step, frame_stack=frames, gamma=GAMMA)
    with make_store(9) as store:
        episodes = record(store, [40, 13, 2, 7, 8, 9, 21], overlap=4)
        with gt.Replay(store, Uniform(seed=3), 500, view=view, output="numpy") as replay:
            batch = replay.sample()
        check(batch, episodes, n_step, frames)
        places = {}
        for step, row in zip(steps_of(batch, frames), batch.keys.row.tolist(), strict=True):
            assert places.setdefault(step, row) == row


@pytest.mark.parametrize(
    "windows",
    [gt.Windows(4), gt.Windows(4, whole=True), gt.Windows(4, anchor="first", whole=True), gt.Windows(1)],
    ids=["padded", "whole", "first", "single"],
)
def test_windows_that_two_rows_have_are_drawn_once(windows):
    with make_store(9) as store:
        episodes = record(store, [40, 13, 2, 7, 8, 9, 21], overlap=3)
        found = Counter()
        for batch in one_pass(store, window=windows):
            for mask, obs in zip(batch.mask, batch["obs"].astype(int), strict=True):
                steps = [tuple(step) for step in obs[mask].tolist()]
                number, last = steps[-1]
                assert steps == [(number, t) for t in range(last - len(steps) + 1, last + 1)]
                assert windows.whole or len(steps) == min(windows.length, last + 1)
                found[steps[0] if windows.anchor == "first" else steps[-1]] += 1
        least, most = (0, windows.length - 1) if windows.anchor == "first" else (windows.need, 0)
        assert found == {
            (e, t): 1 for e, (rewards, _) in enumerate(episodes) for t in range(least, len(rewards) + 1 - most)
        }


def test_a_view_that_needs_more_overlap_is_refused_and_told_how_much():
    with make_store(9) as store:
        record(store, [40], overlap=4)
        for options in ({"view": gt.Transitions(n_step=4, frame_stack=3)}, {"window": 7}):
            with pytest.raises(SchemaError, match=r"overlap=(5|6)"):
                list(one_pass(store, **options))
            with (
                replay_of(store, Uniform(seed=0, over="steps"), 64, output="numpy", **options) as replay,
                pytest.raises(SchemaError, match=r"repeats 4 of its steps.*overlap=(5|6)"),
            ):
                replay.sample()


@pytest.mark.parametrize("publish_every", [None, 1])
@pytest.mark.parametrize("n_step", [1, 3])
def test_copies_that_are_not_drawn_have_no_priority(n_step, publish_every):
    with make_store(9, priority_per="step", n_step=n_step) as store:
        record(store, [20], 4, publish_every=publish_every)
        keys, lengths = store.keys(), store.status()["length"]
        found = [
            store.status(key[[0] * length].of_steps(np.arange(length)))["priority"].astype(int).tolist()
            for key, length in zip(keys, lengths.tolist(), strict=True)
        ]
        drawn = {1: (8, 4), 3: (6, 2)}[n_step]  # until the first one, and from the first of the row after on
        assert found[0] == [1] * drawn[0] + [0] * (9 - drawn[0])
        assert found[1] == [0] * drawn[1] + [1] * (drawn[0] - drawn[1]) + [0] * (9 - drawn[0])
        assert store.audit() == []
        other = gt.Transitions(n_step=2)
        with pytest.raises(ArgumentError, match=r"overlap=True, n_step=2"):
            gt.Replay(store, Prioritized(seed=0), 8, view=other)


@pytest.mark.parametrize(
    "selection",
    [Lifo(), TopK(), Uniform(seed=1, replacement=False), Epochs(seed=1)],
    ids=lambda each: type(each).__name__,
)
def test_a_row_of_repeated_steps_alone_is_drawn_where_rows_are(selection):
    """Its episode was cut when it had filled the row before."""
    with make_store(9) as store, store.recorder(1, autoreset="disabled", overlap=3) as recorder:
        recorder.reset(np.zeros((1, 2)))
        for t in range(8):
            recorder.step(np.full((1, 2), t + 1), reward=[0.0], terminated=[False], truncated=[False])
        recorder.cut()
        assert store.status()["length"].tolist() == [9, 4]
        with gt.Replay(store, selection, 2, view=gt.Transitions(), output="numpy") as replay:
            assert sorted(replay.sample().keys.row.tolist()) == [0, 1]
            assert replay.stats()["redrawn"] == 0


def test_an_episode_that_is_reset_when_it_fills_its_row_does_not_go_on():
    with make_store(5) as store, store.recorder(1, autoreset="disabled") as recorder:
        for number in range(3):
            recorder.reset(np.array([[number, 0]]))
            for t in range(4):
                recorder.step(np.array([[number, t + 1]]), reward=[0.0], terminated=[False], truncated=[False])
        recorder.cut()
        view = gt.Transitions(frame_stack=2)
        found = Counter(step for batch in one_pass(store, view=view) for step in steps_of(batch, 2))
        assert found == {(number, t): 1 for number in range(3) for t in range(4)}


@pytest.mark.parametrize("within_the_lock", [False, True])
def test_a_row_whose_writer_was_killed_when_it_had_noted_that_it_goes_on_does_not(store_name, within_the_lock):
    name = store_name()
    with gt.Store.create(name, recorded_fields(FIELDS, overlap=True), max_length=9, capacity=10) as store:
        child = os.fork()
        if child == 0:
            with gt.Store.open(name) as mine:
                recorder = mine.recorder(1, autoreset="disabled", overlap=4, publish_every=1)
                recorder.reset(np.zeros((1, 2)))
                for t in range(7):
                    recorder.step(np.full((1, 2), t + 1), reward=[0.0], terminated=[False], truncated=[False])
                repeats = mine.column(REPEATS)
                at = repeats.ctypes.data + int(mine.keys().row[0]) * repeats.strides[0]
                segment = Segment(mine)  # its mapping has to be there when the kernel looks at the lock
                if within_the_lock:
                    segment.lock()
                ctypes.c_int32.from_address(at + 4).value = 4
                ctypes.c_int32.from_address(at + 8).value = 2
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        row = store.keys().row  # where it died in the lock, this repairs what it left
        store.reap()
        assert store.column(REPEATS)[row].tolist() == [[0, 0, 0]]
        view = gt.Transitions(n_step=3, frame_stack=2)
        assert sum(len(batch) for batch in one_pass(store, view=view)) == 6


def test_a_device_leaves_windows_of_rows_that_repeat_steps_to_the_host():
    """Its kernel places windows anywhere in a row."""
    pytest.importorskip("triton")
    options = {"device": gt.DeviceOptions(SimulatedDevice(kernels=True), path="gather", select="device")}
    with make_store(9) as store:
        with pytest.raises(ArgumentError, match="rows repeat steps"):
            replay_of(store, Uniform(seed=1), 8, window=4, **options)
        with replay_of(store, Uniform(seed=1), 8, **options) as replay:  # whole rows have no windows
            assert replay.describe()[0]["select"] == "device"


def test_a_recorder_with_an_overlap_needs_the_field_that_notes_it():
    with (
        gt.Store.create(recorded_fields(FIELDS), max_length=9, capacity=4) as store,
        pytest.raises(
            FieldError, match=r"overlap=2 needs a store with the fields of recorded_fields\(..., overlap=True"
        ),
    ):
        store.recorder(overlap=2)
    with pytest.raises(FieldError, match=REPEATS):
        recorded_fields({**FIELDS, REPEATS: gt.Field((3,), "int32", per_row=True)})


@pytest.mark.parametrize("output", ["numpy", "torch"])
def test_whole_rows_keep_repeated_steps_and_say_how_many(output):
    with make_store(9) as store:
        record(store, [20], overlap=3)
        with gt.Replay(store, Epochs(shuffle=False), 8, output=output) as replay:
            batch = next(iter(replay))
        assert batch.context.tolist() == [0, 3, 3, 3]
        assert np.asarray(batch["obs"])[1, :4, 1].tolist() == [5, 6, 7, 8]
        with gt.Replay(store, Epochs(shuffle=False), 8, window=gt.Windows(4, at="start"), output=output) as replay:
            assert next(iter(replay)).context.tolist() == [0, 3, 3, 3]
        with gt.Replay(store, Epochs(shuffle=False), 8, window=gt.Windows(4, at="end"), output=output) as replay:
            assert next(iter(replay)).context.tolist() == [0, 0, 0, 1]


def test_a_neighbour_that_is_evicted_takes_its_steps_along_and_no_others():
    view = gt.Transitions(n_step=3, frame_stack=2, gamma=GAMMA)
    with make_store(9) as store:
        record(store, [20], overlap=4)
        keys = store.keys()
        before = next(set(steps_of(batch, 2)) for batch in one_pass(store, view=view))
        store.delete(keys[1:2])
        left = next(set(steps_of(batch, 2)) for batch in one_pass(store, view=view))
        assert before - left == {(0, t) for t in range(6, 10)}


def test_repeats_survive_a_checkpoint(tmp_path):
    view = gt.Transitions(n_step=3, frame_stack=2, gamma=GAMMA)
    with make_store(9) as store:
        record(store, [40, 5, 12], overlap=4)
        expected = sorted(step for batch in one_pass(store, view=view) for step in steps_of(batch, 2))
        store.save(tmp_path / "saved")
    with gt.Store.load(tmp_path / "saved", None) as store:
        assert expected == sorted(step for batch in one_pass(store, view=view) for step in steps_of(batch, 2))


@pytest.mark.parametrize("share_rows", [False, True])
def test_repeats_survive_an_export(tmp_path, share_rows):
    """Of rows that hold several episodes each of these is a row of the data set."""
    view = gt.Transitions(n_step=3, frame_stack=2, gamma=GAMMA)
    with make_store(9, share_rows=share_rows) as store:
        record(store, [20, 2, 2, 17, 3, 8, 5], overlap=4, share_rows=share_rows)
        expected = sorted(step for batch in one_pass(store, view=view) for step in steps_of(batch, 2))
        export_store(store, tmp_path / "rows", format="npy", progress=False)
    with import_dataset(tmp_path / "rows", str(tmp_path / "store"), progress=False) as store:
        assert expected == sorted(step for batch in one_pass(store, view=view) for step in steps_of(batch, 2))


@pytest.mark.parametrize(
    ("selection", "options"),
    [
        (Uniform(seed=1, over="steps"), {"view": gt.Transitions(n_step=3, frame_stack=2)}),
        (Uniform(seed=1), {"view": gt.Transitions(n_step=3, frame_stack=2)}),
        (Uniform(seed=1), {"window": 4}),
        (Uniform(seed=1, over="steps"), {"window": gt.Windows(3, whole=True)}),
        (Epochs(seed=1, over="steps"), {"window": gt.Windows(3, whole=True)}),
        (Prioritized(seed=1, beta=0.5), {"view": gt.Transitions(n_step=3, frame_stack=2)}),
    ],
    ids=["over-steps", "rows", "windows", "whole-windows", "pass", "priorities"],
)
def test_ranks_draw_what_one_process_draws(selection, options):
    per_step = {"priority_per": "step", "n_step": 3} if isinstance(selection, Prioritized) else {}
    with make_store(9, capacity=50, **per_step) as store, ExitStack() as stack:
        record(store, [40, 13, 2, 7, 8, 9, 21], overlap=4)
        keys = store.keys()
        rows = {name: store.column(name)[keys.row] for name in store.fields}
        lengths = store.status(keys)["length"]
        for n in (1, 2, 3):
            shards = []
            for first, last in itertools.pairwise([*np.linspace(0, len(keys), n + 1).astype(int)]):
                shard = stack.enter_context(make_store(9, capacity=len(keys) + 1, **per_step))
                shard.native.advance_sequence(int(first) + 1)
                shard.insert({name: array[first:last] for name, array in rows.items()}, lengths=lengths[first:last])
                shards.append(shard)
            batches, _ = over_ranks(shards, selection, 48, 3, **options)
            if n == 1:
                expected = alone(shards[0], selection, 48, 3, **options)
            if not isinstance(selection, Epochs):  # whose order is of places
                assert all(map(same, batches, expected)), f"{n} ranks"
            elif n == 1:
                assert all(map(same, batches, expected))
