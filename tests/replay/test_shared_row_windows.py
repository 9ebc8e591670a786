"""Windows and passes over rows of several episodes: those of a slow reference, and the same on any number of ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from replay_calls import replay_of
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
        with replay_of(store, Uniform(seed=3, over="steps"), 512, window=windows, pad=pad, output="numpy") as replay:
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
        episodes = record(store, "next_step", 80)
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


def known_episodes(lengths, marks, longest):
    """The values of every episode, its first `longest` steps, by its first one; and how many steps it has."""
    values, steps = {}, {}
    for row, length in enumerate(lengths):
        for first, last in episodes_of(length, marks[row]):
            values[100 * row + first] = [100 * row + step for step in range(first, min(last, first + longest - 1) + 1)]
            steps[100 * row + first] = last - first + 1
    return values, steps


WHOLE = {
    "rows": {},
    "longest": {"window": gt.Windows(MAX, at="episode")},
    "cut": {"window": gt.Windows(4, at="episode")},
}


@pytest.mark.parametrize("how", WHOLE)
@pytest.mark.parametrize("pad", ["left", "right"])
def test_episodes_are_drawn_whole_in_proportion_to_their_steps(how, pad):
    store, lengths, marks = marked_store(40, seed=8)
    with store:
        options = WHOLE[how] | ({"pad": pad} if how != "rows" else {})
        length = options["window"].length if how != "rows" else MAX
        known, steps = known_episodes(lengths, marks, length)
        counts = Counter()
        with replay_of(store, Uniform(seed=3, over="steps"), 512, output="numpy", **options) as replay:
            for _ in range(12):
                batch = replay.sample()
                assert batch["t"].shape == batch.mask.shape == (512, length)
                for told, real in told_by(batch, gt.Windows(length, anchor="first"), "right" if how == "rows" else pad):
                    assert real == known[told]
                    counts[told] += 1
            assert replay.stats()["redrawn"] == 0 and replay.stats()["path"] == "native"
        expected = np.array([steps[each] for each in known]) * 12 * 512 / sum(steps.values())
        assert stats.chisquare([counts[each] for each in known], expected).pvalue > 1e-4


@pytest.mark.parametrize("how", WHOLE)
def test_a_pass_has_every_episode_once(how):
    store, lengths, marks = marked_store(30, seed=7)
    with store:
        length = WHOLE[how]["window"].length if how != "rows" else MAX
        known, _ = known_episodes(lengths, marks, length)
        with replay_of(store, Epochs(seed=1, over="steps"), 32, output="numpy", **WHOLE[how]) as replay:
            for _ in range(2):
                told = []
                for batch in replay:
                    told += told_by(batch, gt.Windows(length, anchor="first"), "right" if how == "rows" else "left")
                assert sorted(told) == sorted(known.items())
            assert replay.stats()["skipped"] == replay.stats()["dropped"] == 0


def test_keys_of_whole_episodes_name_their_first_steps():
    store, _, _ = marked_store(30, seed=6, priority_per="step")
    whole = gt.Windows(6, at="episode")
    with store, gt.Replay(store, Uniform(seed=2, over="steps"), 64, window=whole, output="numpy") as replay:
        batch = replay.sample()
        assert (batch.keys.step == batch.start).all() and batch.start.any()
        again = gt.fetch(store, batch.keys, window=whole, output="numpy")
        assert (again["t"] == batch["t"]).all() and (again.mask == batch.mask).all()
        inside = batch.keys.of_steps(batch.start + np.maximum(batch.mask.sum(1) - 1, 0))
        again = gt.fetch(store, inside, window=whole, output="numpy")  # told by any step of theirs
        assert (again["t"] == batch["t"]).all() and (again.start == batch.start).all()


def test_episodes_of_rows_that_hold_one_are_the_rows():
    store = gt.Store.create({"t": gt.Field((), "int64")}, max_length=MAX, capacity=20)
    lengths, whole = np.random.default_rng(0).integers(1, MAX + 1, 20), gt.Windows(5, at="episode")
    with store:
        store.insert({"t": 100 * np.arange(20)[:, None] + np.arange(MAX)}, lengths=lengths)
        known = {100 * row: [100 * row + step for step in range(min(5, lengths[row]))] for row in range(20)}
        for selection in (Uniform(seed=1), Uniform(seed=1, over="steps"), Prioritized(seed=1)):
            with gt.Replay(store, selection, 256, window=whole, output="numpy") as replay:
                assert set(map(repr, told_by(replay.sample(), whole))) <= set(map(repr, known.items()))
        with gt.Replay(store, Epochs(seed=1, over="steps"), 7, window=whole, output="numpy") as replay:
            assert sorted(each for batch in replay for each in told_by(batch, whole)) == sorted(known.items())
        batch = gt.fetch(store, store.keys(), window=whole, output="numpy")
        assert told_by(batch, whole) == list(known.items())


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


def test_what_is_not_clear_is_refused():
    store, _, _ = marked_store(10)
    with store:
        with pytest.raises(ArgumentError, match="stride=2"):
            gt.Replay(store, Uniform(over="steps"), 4, window=gt.Windows(2, stride=2))
        with pytest.raises(ArgumentError, match="stride=2"):
            gt.Replay(store, Epochs(over="steps"), 4, window=gt.Windows(2, stride=2))
        for strategy in (Uniform(), Prioritized(), Epochs()):
            for window in (3, None, gt.Windows(3, at="episode")):
                with pytest.raises(ArgumentError, match=r"steps must be drawn.* give whole episodes"):
                    gt.Replay(store, strategy, 4, window=window)
        for at in ("start", "end"):
            with pytest.raises(ArgumentError, match=rf"leave out at='{at}'"):
                gt.Replay(store, Uniform(over="steps"), 4, window=gt.Windows(3, at=at))
    with pytest.raises(ArgumentError, match="leave out whole"):
        gt.Windows(3, at="episode", whole=True)
    with pytest.raises(ArgumentError, match="leave out at='episode'"):
        gt.Windows(3, at="episode", stride=2)
    store, _, _ = marked_store(10, priority_per="step")
    with store:
        with pytest.raises(ArgumentError, match="episodes have none"):
            gt.Replay(store, Prioritized(), 4, window=gt.Windows(3, at="episode"))
        with pytest.raises(ArgumentError, match="not whole rows"):
            gt.Replay(store, Prioritized(), 4)
        with pytest.raises(ArgumentError, match="does not go with"):
            gt.fetch(store, store.keys(), window=gt.Windows(3, at="episode"), starts=np.zeros(10, int))
