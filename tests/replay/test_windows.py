"""Windows: whole or padded, from the first or the last step, every k-th, where a function says; on every path alike."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay_calls import replay_of
from scipy import stats
from window_reference import CASES, MAX, anchors_of, check_batch, make_store, middle, steps_of

import geartrain as gt
import geartrain._native as _native
from geartrain.errors import ArgumentError, EmptyStoreError, NotEnoughRowsError
from geartrain.selection import Epochs, Fifo, GroupSampling, Lifo, Limits, Mixture, Prioritized, TopK, Uniform
from geartrain.store.recorder import recorded_fields

EXAMPLES = {"deadline": None, "suppress_health_check": list(HealthCheck)}


windows_of = st.builds(
    lambda length, place, anchor, stride, whole: gt.Windows(
        length,
        at=place,
        anchor="last" if place == "end" else anchor,
        stride=stride if place == "any" else 1,
        whole=whole,
    ),
    st.integers(1, MAX + 2),
    st.sampled_from(["any", "any", "start", "end"]),
    st.sampled_from(["first", "last"]),
    st.integers(1, MAX + 1),
    st.booleans(),
)
some_lengths = st.lists(st.integers(1, MAX), min_size=1, max_size=30)


drawn = {
    "lengths": some_lengths,
    "windows": windows_of,
    "pad": st.sampled_from(["left", "right"]),
    "strategy": st.sampled_from(
        [Uniform, Prioritized, Lifo, Epochs, lambda **seed: Uniform(replacement=False, **seed)]
    ),
    "seed": st.integers(0, 2**64 - 1),
}


@settings(max_examples=60, **EXAMPLES)
@given(**drawn)
def test_windows_are_those_of_a_slow_reference(lengths, windows, pad, strategy, seed):
    compare(lengths, windows, pad, strategy, seed)


@pytest.mark.slow
@settings(max_examples=1000, **EXAMPLES)
@given(**drawn)
def test_windows_of_thousands_of_episodes_are_those_of_a_slow_reference(lengths, windows, pad, strategy, seed):
    compare(lengths, windows, pad, strategy, seed)


def compare(lengths, windows, pad, strategy, seed):
    with make_store(lengths) as store:
        if windows.whole and windows.length > MAX:
            with pytest.raises(ArgumentError, match="whole windows need"):
                gt.Replay(store, strategy(seed=seed), 1, window=windows)
            return
        long = sum(length >= windows.length for length in lengths) if windows.whole else len(lengths)
        with replay_of(store, strategy(seed=seed), max(long, 1), window=windows, pad=pad, output="numpy") as replay:
            if not long:
                with pytest.raises((EmptyStoreError, NotEnoughRowsError)):
                    replay.sample()
                return
            for step in range(2):
                batch = replay.sample()
                rows = batch["row"] // 100
                chosen = [anchors_of(lengths[row], windows) for row in rows]
                if windows.at == "any":
                    counts = np.array([len(each) for each in chosen], np.int32)
                    numbers = np.arange(len(batch), dtype=np.uint32)
                    drawn = _native.window_ends(seed, step, 0, numbers, counts)
                    anchors = [each[number] for each, number in zip(chosen, drawn, strict=True)]
                    check_batch(batch, lengths, windows, pad, anchors=anchors)
                check_batch(batch, lengths, windows, pad)
            assert replay.stats()["path"] in ("native", "native, calls Epochs.take")


@settings(max_examples=60, **EXAMPLES)
@given(
    lengths=some_lengths,
    length=st.integers(1, MAX + 2),
    pad=st.sampled_from(["left", "right"]),
    seed=st.integers(0, 99),
)
def test_a_number_of_steps_is_the_windows_of_that_length(lengths, length, pad, seed):
    with make_store(lengths) as store:
        options = {"pad": pad, "output": "numpy", "num_batches": 2}
        with (
            replay_of(store, Uniform(seed=seed), 16, window=length, **options) as plain,
            replay_of(store, Uniform(seed=seed), 16, window=gt.Windows(length), **options) as spelled,
        ):
            for one, other in zip(plain, spelled, strict=True):
                assert one.keys == other.keys
                assert np.array_equal(one["t"], other["t"]) and np.array_equal(one.mask, other.mask)


@settings(max_examples=25, **EXAMPLES)
@given(lengths=some_lengths, windows=windows_of, size=st.integers(1, 20), seed=st.integers(0, 999))
def test_a_pass_over_steps_has_each_window_once(lengths, windows, size, seed):
    if windows.at != "any" or (windows.whole and windows.length > max(lengths)):
        windows = gt.Windows(min(windows.length, max(lengths)), stride=windows.stride, whole=windows.whole)
    with make_store(lengths) as store:
        wanted = sorted((row, t) for row, length in enumerate(lengths) for t in anchors_of(length, windows))
        strategy = Epochs(over="steps", seed=seed)
        with replay_of(store, strategy, size, window=windows, pad="right", output="numpy") as replay:
            for _ in range(2):
                seen = []
                for batch in replay:
                    check_batch(batch, lengths, windows, "right")
                    last = 0 if windows.from_first else batch.mask.sum(1) - 1
                    seen += zip((batch["row"] // 100).tolist(), (batch.start + last).tolist(), strict=True)
                assert sorted(seen) == wanted


@pytest.mark.parametrize(
    "windows",
    [
        gt.Windows(4, whole=True),
        gt.Windows(4, anchor="first", stride=3),
        gt.Windows(3, stride=2, whole=True),
        gt.Windows(5, stride=4),
    ],
    ids=["whole", "first-3", "whole-2", "last-4"],
)
def test_draws_over_steps_have_every_window_alike(windows):
    lengths = [1, 2, 3, 4, 5, 7, 10, 12, 12]
    with make_store(lengths) as store:
        with gt.Replay(store, Uniform(seed=3, over="steps"), 2000, window=windows, output="numpy") as replay:
            seen = Counter()
            for batch in itertools.islice(replay, 10):
                last = 0 if windows.from_first else batch.mask.sum(1) - 1
                seen.update(zip((batch["row"] // 100).tolist(), (batch.start + last).tolist(), strict=True))
        wanted = [(row, t) for row, length in enumerate(lengths) for t in anchors_of(length, windows)]
        assert set(seen) == set(wanted)
        assert stats.chisquare([seen[each] for each in wanted]).pvalue > 1e-4


@pytest.mark.parametrize("anchor", ["first", "last"])
@pytest.mark.parametrize("whole", [False, True])
def test_steps_drawn_by_priority_tell_the_windows_that_their_keys_name(anchor, whole):
    """In proportion to priorities, of those steps that a window is told by; also where hardly any draw is one."""
    lengths = [2, 3, 6, 12, 12]
    windows = gt.Windows(4, anchor=anchor, whole=whole)
    with make_store(lengths, priority_per="step") as store:
        rng = np.random.default_rng(0)
        keys = store.keys()
        mass = {}
        for key, length in zip(range(len(keys)), lengths, strict=True):
            priorities = rng.uniform(0.5, 2, length)
            if length < 4:
                priorities *= 20  # most of what is drawn is to be refused, where windows are whole
            steps = np.arange(length, dtype=np.uint32)
            one = gt.Keys(
                np.full(length, keys.row[key]), np.full(length, keys.generation[key]), store=store.id, step=steps
            )
            store.update_priorities(one, priorities)
            mass |= {(key, t): priorities[t] for t in anchors_of(length, windows)}
        with gt.Replay(store, Prioritized(alpha=1.0, seed=2), 4000, window=windows, output="numpy") as replay:
            batch = replay.sample()
            check_batch(batch, lengths, windows, "left")
            anchors = batch.start if anchor == "first" else batch.start + batch.mask.sum(1) - 1
            assert np.array_equal(batch.keys.step, anchors)
            again = gt.fetch(store, batch.keys, window=windows, output="numpy")
            assert np.array_equal(again["t"], batch["t"]) and np.array_equal(again.mask, batch.mask)
        seen = Counter(zip((batch["row"] // 100).tolist(), anchors.tolist(), strict=True))
        assert set(seen) <= set(mass)
        shares = np.array(list(mass.values())) / sum(mass.values())
        assert stats.chisquare([seen[each] for each in mass], shares * 4000).pvalue > 1e-4
        with pytest.raises(ArgumentError, match="drawn by their priorities"):
            gt.Replay(store, Prioritized(), 2, window=gt.Windows(2, stride=2))
        with pytest.raises(ArgumentError, match="draws the anchors of the windows"):
            gt.Replay(store, Prioritized(), 2, window=gt.Windows(2, at="start"))


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("strategy", [Uniform(seed=1), Fifo(), Epochs(seed=2), Prioritized(seed=3, beta=0.5)])
def test_a_function_places_windows_for_many_rows_at_once(strategy, prefetch):
    lengths = [1, 2, 3, 5, 8, 12]
    asked = []

    def place(keys, lengths, random):
        asked.append(lengths.copy())
        assert np.array_equal(gt.fetch(store, keys, output="numpy").length, lengths)
        return middle(keys, lengths, random)

    with make_store(lengths) as store:
        for windows in (gt.Windows(3, at=place), gt.Windows(3, at=place, whole=True)):
            asked.clear()
            made = [[], []]
            for record in made:
                with gt.Replay(store, strategy, 4, window=windows, prefetch=prefetch, output="numpy") as replay:
                    for batch in itertools.islice(replay, 1):
                        check_batch(batch, lengths, gt.Windows(3, whole=windows.whole), "left")
                        record.append((batch["t"].tolist(), batch.start.tolist(), batch.probability.tolist()))
                        assert (batch.importance_weights is None) == (not isinstance(strategy, Prioritized))
                    passes = "Epochs.take, " if isinstance(strategy, Epochs) else ""
                    assert replay.stats()["path"] == f"native, calls {passes}Windows.at"
            assert made[0] == made[1] and all(each.min() > 0 for each in asked)


def test_rows_that_are_replaced_while_a_function_places_their_windows_are_drawn_again():
    lengths = [8] * 20
    replaced = []

    def place(keys, found, random):
        if not replaced:
            replaced.append(len(store.keys()))
            store.delete(keys[:3])
        return found - 1

    with make_store(lengths) as store:
        with gt.Replay(store, Uniform(seed=0), 6, window=gt.Windows(3, at=place), output="numpy", prefetch=0) as replay:
            batch = replay.sample()
            check_batch(batch, lengths, gt.Windows(3, at="end"), "left")
            assert replay.stats()["redrawn"] >= 3 and replaced == [20]
            gt.fetch(store, batch.keys, output="numpy")


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (lambda keys, lengths, random: lengths, "returned step"),
        (lambda keys, lengths, random: -lengths, "returned step"),
        (lambda keys, lengths, random: lengths[:-1], "a step for each of"),
        (lambda keys, lengths, random: lengths / 2, "a step for each of"),
        (lambda keys, lengths, random: None, "a step for each of"),
        (lambda keys, lengths, random: 1 // 0, "division"),
    ],
)
def test_what_a_function_returns_is_checked_and_the_replay_goes_on(answer, match):
    answers = [answer, lambda keys, lengths, random: lengths - 1]

    def place(keys, lengths, random):
        return answers[0](keys, lengths, random)

    with make_store([4, 7, 9]) as store:
        windows = gt.Windows(3, at=place)
        with gt.Replay(store, Uniform(seed=0), 5, window=windows, output="numpy", prefetch=0) as replay:
            with pytest.raises((ArgumentError, ZeroDivisionError), match=match):
                replay.sample()
            answers.pop(0)
            check_batch(replay.sample(), [4, 7, 9], gt.Windows(3, at="end"), "left")


def test_whole_windows_of_a_function_are_checked():
    with make_store([9]) as store:
        for anchor, bad in (("last", 1), ("first", 7)):
            windows = gt.Windows(3, at=lambda k, n, r, bad=bad: np.full(len(n), bad), anchor=anchor, whole=True)
            with gt.Replay(store, Uniform(), 1, window=windows, prefetch=0, output="numpy") as replay:
                with pytest.raises(ArgumentError, match=f"step {bad} of a row that has 9 of whole windows"):
                    replay.sample()


@settings(max_examples=20, **EXAMPLES)
@given(lengths=some_lengths, length=st.integers(1, MAX + 2), whole=st.booleans(), data=st.data())
def test_fetched_windows_begin_or_end_at_given_steps(lengths, length, whole, data):
    with make_store(lengths) as store:
        keys = store.keys()
        of = (gt.fetch(store, keys, output="numpy")["row"] // 100).tolist()
        steps = [data.draw(st.integers(0, lengths[row] - 1)) for row in of]
        for windows, given_by in (
            (gt.Windows(length, anchor="first", whole=whole), "starts"),
            (gt.Windows(length, whole=whole), "ends"),
        ):
            missing = any(len(steps_of(t, lengths[row], windows)) < length for t, row in zip(steps, of, strict=True))
            if whole and missing:
                with pytest.raises(ArgumentError, match="of a whole one"):
                    gt.fetch(store, keys, window=windows, **{given_by: steps})
                continue
            batch = gt.fetch(store, keys, window=windows, output="numpy", **{given_by: steps})
            check_batch(batch, lengths, windows, "left", anchors=steps)
            named = gt.Keys(keys.row, keys.generation, store=store.id, step=np.array(steps, np.uint32))
            assert np.array_equal(gt.fetch(store, named, window=windows, output="numpy")["t"], batch["t"])
            plain = gt.fetch(store, keys, window=length, output="numpy", **{given_by: steps})
            assert np.array_equal(plain["t"], batch["t"])
        for place in ("start", "end"):
            windows = gt.Windows(length, at=place)
            check_batch(gt.fetch(store, keys, window=windows, output="numpy"), lengths, windows, "left")


def test_what_makes_no_windows_is_refused():
    for bad in (
        {"length": 0}, {"length": 2.5}, {"length": None}, {"length": 2, "at": "middle"}, {"length": 2, "at": 3},
        {"length": 2, "anchor": "end"}, {"length": 2, "stride": 0}, {"length": 2, "stride": True},
        {"length": 2, "whole": 1}, {"length": 2, "at": "start", "stride": 2},
        {"length": 2, "at": "end", "anchor": "first"},
    ):  # fmt: skip
        with pytest.raises(ArgumentError):
            gt.Windows(**bad)
    whole = gt.Windows(3, whole=True)
    with make_store([2, 5]) as store:
        keys = store.keys()
        for options, match in (
            ({"ends": [1, 1], "starts": [0, 0], "window": 2}, "ends and starts exclude each other"),
            ({"starts": [0, 0]}, "leave out starts"),
            ({"starts": [0, 0], "window": gt.Windows(2)}, "does not go with"),
            ({"ends": [0, 0], "window": gt.Windows(2, at="end")}, "does not go with"),
            ({"starts": [0, 2], "window": gt.Windows(2, anchor="first", stride=2)}, "leave out stride"),
            ({"window": gt.Windows(2, at=middle)}, "a fetch draws no windows: leave out at"),
            ({"starts": [0, 12], "window": 2}, "begins at step 12"),
            ({"starts": [3, 0], "window": 2}, "begins at step 3, its row has steps 0 to 1"),
            ({"starts": [0], "window": 2}, "`starts` must be 2 whole numbers"),
        ):
            with pytest.raises(ArgumentError, match=match):
                gt.fetch(store, keys, **options)
        for strategy in (GroupSampling("row", 1), Custom()):
            with pytest.raises(ArgumentError, match="has no limit on the length of rows"):
                gt.Replay(store, strategy, 2, window=whole)
        with pytest.raises(ArgumentError, match="draws the anchors of the windows"):
            gt.Replay(store, Uniform(over="steps"), 2, window=gt.Windows(2, at=middle))
        with pytest.raises(ArgumentError, match="leave out window"):
            gt.Replay(store, Uniform(), 2, window=whole, view=gt.Transitions())
        with gt.Replay(store, TopK(limits=Limits(min_length=1)), 1, window=whole, output="numpy") as replay:
            assert replay.selection.limits.min_length == 3 and replay.sample().length.tolist() == [5]


class Custom:
    """A strategy of a user's that chooses rows by code of its own."""

    seed = 0

    def select(self, candidates, n, step, *, state=None, redraw=None):
        raise AssertionError("never asked")


def test_rows_that_grow_have_windows_of_what_is_published():
    fields = recorded_fields({"obs": gt.Field((), "int64"), "reward": gt.Field((), "float32")})
    whole, drawn = gt.Windows(3, anchor="first", whole=True), 0
    with gt.Store.create(fields, max_length=MAX, capacity=4) as store:
        recorder = store.recorder(1, autoreset="disabled", publish_every=1)
        recorder.reset(np.array([0]))
        for t in range(1, 9):
            recorder.step(np.array([t]), reward=1.0, terminated=False, truncated=False)
            with gt.Replay(store, Uniform(seed=t), 8, window=whole, output="numpy", prefetch=0) as replay:
                if store.status()["length"].max(initial=0) < 3:
                    with pytest.raises(EmptyStoreError):
                        replay.sample()
                    continue
                batch = replay.sample()
                drawn += 1
                assert batch.mask.all() and (batch["obs"] - batch["obs"][:, :1]).tolist() == [[0, 1, 2]] * 8
                assert int(batch["obs"].max()) < int(batch.length.max())
        assert drawn >= 5
        recorder.close()


def test_whole_windows_of_a_strategy_that_selects_by_itself_are_refused():
    class Longest(Uniform):
        def select(self, *given, **options):
            return super().select(*given, **options)

    with make_store([2, 3, 9]) as store:
        with pytest.raises(ArgumentError, match="Longest has no limit"):
            gt.Replay(store, Longest(seed=0), 4, window=gt.Windows(3, whole=True))
        with gt.Replay(store, Longest(seed=0), 4, window=gt.Windows(3), output="numpy") as replay:
            assert len(replay.sample()) == 4


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
