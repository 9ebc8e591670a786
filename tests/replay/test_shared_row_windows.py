"""Windows and passes over rows of several episodes: those of a slow reference, and the same on any number of ranks."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from recorded_shards import alone, over_ranks, same
from scipy import stats
from test_shared_rows import GAMMA, by_observation, check_batch, make_store, record

import geartrain as gt
from geartrain.errors import ArgumentError, EmptyStoreError
from geartrain.selection import Epochs, Prioritized, Uniform
from geartrain.store.recorder import recorded_fields

MAX, B = 12, 48
CASES = [
    gt.Windows(4),
    gt.Windows(4, anchor="first"),
    gt.Windows(3, whole=True),
    gt.Windows(3, anchor="first", whole=True),
    gt.Windows(1, whole=True),
]
IDS = ["last", "first", "whole-last", "whole-first", "one"]


def marked_store(rows, seed=0, chance=0.25, lengths=None, **options):
    """Row i has the values 100 i + step, and random marks; returns the lengths and the marks, too."""
    rng = np.random.default_rng(seed)
    fields = recorded_fields({"t": gt.Field((), "int64"), "reward": gt.Field((), "float32")}, share_rows=True)
    store = gt.Store.create(fields, max_length=MAX, capacity=rows + 1, **options)
    lengths = rng.integers(1, MAX + 1, rows) if lengths is None else np.asarray(lengths)
    values = {name: np.zeros((rows, *field.block_shape(MAX)), field.dtype) for name, field in fields.items()}
    values["t"][:] = 100 * np.arange(rows)[:, None] + np.arange(MAX)
    values["last"][:] = rng.random((rows, MAX)) < chance
    store.insert(values, lengths=lengths)
    return store, lengths, values["last"]


def episodes_of(length, marks):
    """First and last step of each episode of a row."""
    found, first = [], 0
    for step in range(length):
        if marks[step] or step == length - 1:
            found.append((first, step))
            first = step + 1
    return found


def windows_of(lengths, marks, windows):
    """Every window that there is, as the values of its steps by the value of the step that it is told by."""
    found = {}
    for row, length in enumerate(lengths):
        for first, last in episodes_of(length, marks[row]):
            for step in range(first, last + 1):
                begin, end = step, min(last, step + windows.length - 1)
                if not windows.from_first:
                    begin, end = max(first, step - windows.length + 1), step
                if not windows.whole or end - begin + 1 == windows.length:
                    found[100 * row + step] = [100 * row + each for each in range(begin, end + 1)]
    return found


def told_by(batch, windows, pad="left"):
    """What each window of a batch is told by, once it is known that it lies where it should."""
    told = []
    for values, mask, start in zip(batch["t"], batch.mask, batch.start, strict=True):
        real = values[mask].tolist()
        assert len(real) > 0 and not values[~mask].any()
        assert mask[len(mask) - len(real) :].all() if pad == "left" else mask[: len(real)].all()
        assert real[0] % 100 == start
        told.append((real[0] if windows.from_first else real[-1], real))
    return told


@pytest.mark.parametrize("windows", CASES, ids=IDS)
@pytest.mark.parametrize("pad", ["left", "right"])
def test_drawn_windows_are_those_of_a_slow_reference(windows, pad):
    store, lengths, marks = marked_store(40, seed=windows.length)
    with store:
        known = windows_of(lengths, marks, windows)
        counts = Counter()
        with gt.Replay(store, Uniform(seed=3, over="steps"), 512, window=windows, pad=pad, output="numpy") as replay:
            for _ in range(12):
                for told, real in told_by(replay.sample(), windows, pad):
                    assert real == known[told]
                    counts[told] += 1
            assert replay.stats()["redrawn"] == 0  # what is refused is refused by the draw
            assert replay.stats()["path"] == "native"
        assert stats.chisquare([counts[each] for each in known]).pvalue > 1e-4


@pytest.mark.parametrize("windows", CASES, ids=IDS)
def test_a_pass_has_every_window_once(windows):
    store, lengths, marks = marked_store(30, seed=windows.length)
    with store:
        known = windows_of(lengths, marks, windows)
        selection = Epochs(seed=1, over="steps")
        with gt.Replay(store, selection, 32, window=windows, output="numpy") as replay:
            for _ in range(2):
                seen = []
                for batch in replay:
                    for told, real in told_by(batch, windows):
                        assert real == known[told]
                        seen.append(told)
                assert sorted(seen) == sorted(known)
            assert replay.stats()["skipped"] == 0


def test_a_pass_over_transitions_has_every_transition_once():
    with make_store() as store:
        episodes = record(store, "next_step", 80, overlap=0)
        known, seen = by_observation(episodes), []
        view = gt.Transitions(n_step=3, gamma=GAMMA, frame_stack=2)
        with gt.Replay(store, Epochs(seed=2, over="steps"), 64, view=view, output="numpy") as replay:
            for batch in replay:
                check_batch(batch, known, 3, 2, store.max_length)
                seen += batch["obs"][:, -1, 0].tolist()
        assert sorted(seen) == sorted(known)


@pytest.mark.parametrize("windows", CASES, ids=IDS)
def test_windows_of_steps_by_priority_stay_within_episodes(windows):
    store, lengths, marks = marked_store(40, priority_per="step", seed=5)
    with store:
        known = windows_of(lengths, marks, windows)
        with gt.Replay(store, Prioritized(seed=3), 512, window=windows, output="numpy") as replay:
            seen = set()
            for _ in range(4):
                for told, real in told_by(replay.sample(), windows):
                    assert real == known[told]
                    seen.add(told)
        assert seen == set(known)


@pytest.mark.parametrize("from_first", [False, True])
def test_fetched_windows_stay_within_episodes(from_first):
    store, lengths, marks = marked_store(20)
    with store:
        windows = gt.Windows(5, anchor="first" if from_first else "last")
        known = windows_of(lengths, marks, windows)
        asked = np.array([(told // 100, told % 100) for told in known])
        keys = store.keys()[asked[:, 0]]
        told = {"starts" if from_first else "ends": asked[:, 1]}
        batch = gt.fetch(store, keys, window=5, output="numpy", **told)
        assert [real for _, real in told_by(batch, windows)] == list(known.values())
        whole = np.array([len(each) == 5 for each in known.values()])
        options = {"window": gt.Windows(5, anchor=windows.anchor, whole=True), "output": "numpy"}
        some = {name: steps[whole] for name, steps in told.items()}
        assert len(gt.fetch(store, keys[whole], **options, **some)) == whole.sum()
        with pytest.raises(ArgumentError, match="of the 5 steps of a whole one"):
            gt.fetch(store, keys, **options, **told)


def test_few_steps_that_can_be_drawn_are_drawn_alike():
    """Attempts run out, so that draws are made from a list of the steps."""
    store, _, _ = marked_store(60, lengths=[3] + [1] * 59, chance=0)
    with store:
        windows = gt.Windows(2, whole=True)
        with gt.Replay(store, Uniform(seed=0, over="steps"), 400, window=windows, output="numpy") as replay:
            counts = Counter(told for told, _ in told_by(replay.sample(), windows))
        assert set(counts) == {1, 2} and min(counts.values()) > 140
    store, _, _ = marked_store(5, chance=1.1)
    with store, gt.Replay(store, Uniform(over="steps"), 4, window=gt.Windows(2, whole=True)) as replay:
        with pytest.raises(EmptyStoreError):
            replay.sample()


@pytest.mark.parametrize(
    ("selection", "options"),
    [
        (Uniform(seed=4, over="steps"), {"window": gt.Windows(3, whole=True)}),
        (Uniform(seed=4, over="steps"), {"window": gt.Windows(3, anchor="first", whole=True)}),
        (Uniform(seed=5, over="steps"), {"window": 3}),
        (Uniform(seed=6, over="steps"), {"view": gt.Transitions(observations=["t"])}),
        (Epochs(seed=4, over="steps"), {"window": gt.Windows(3, whole=True)}),
    ],
)
@pytest.mark.parametrize("few", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_draw_what_one_process_draws(selection, options, few):
    lengths = np.where(np.arange(24) % 8, 2, 5) if few else np.random.default_rng(0).integers(2, MAX + 1, 24)
    store, _, marks = marked_store(24, seed=9, lengths=lengths)
    with store:
        expected = alone(store, selection, B, 3, **options)
        values = {name: store.column(name)[store.keys().row] for name in store.fields}
    for bounds in ([0, 24], [0, 5, 24], [0, 9, 10, 24]):
        stores = []
        try:
            for first, last in itertools.pairwise(bounds):
                made = gt.Store.create(store.fields, max_length=MAX, capacity=last - first + 1)
                stores.append(made)
                made.native.advance_sequence(first + 1)
                some = {name: array[first:last] for name, array in values.items()}
                made.insert(some, lengths=lengths[first:last])
            batches, figures = over_ranks(stores, selection, B, 3, **options)
            if isinstance(selection, Epochs):  # whose order is one of places, which capacities shift
                seen = [each for batch in batches for each in batch["t"][:, -1].tolist()]
                known = windows_of(lengths, marks, options["window"])
                passes = [seen[at : at + len(known)] for at in range(0, len(seen), len(known))]
                assert sorted(passes[0]) == sorted(known)
                assert all(len(set(each)) == len(each) and set(each) <= set(known) for each in passes)
            else:
                assert all(map(same, batches, expected)), f"{len(stores)} ranks"
            assert sum(each["redrawn"] for each in figures) == 0
        finally:
            for made in stores:
                made.close()


def test_what_is_not_clear_is_refused():
    store, _, _ = marked_store(10)
    with store:
        with pytest.raises(ArgumentError, match="stride=2"):
            gt.Replay(store, Uniform(over="steps"), 4, window=gt.Windows(2, stride=2))
        with pytest.raises(ArgumentError, match="stride=2"):
            gt.Replay(store, Epochs(over="steps"), 4, window=gt.Windows(2, stride=2))
        for strategy in (Uniform(), Prioritized(), Epochs()):
            with pytest.raises(ArgumentError, match="their steps are drawn"):
                gt.Replay(store, strategy, 4, window=3)
        with pytest.raises(ArgumentError, match="whole rows are none"):
            gt.Replay(store, Epochs(), 4)
