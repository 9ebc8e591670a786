"""Epochs: every row, or step, once a pass, whatever comes and goes meanwhile, on any number of ranks."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from replay_calls import replay_of
from scipy import stats

import geartrain as gt
import geartrain._native as _native
from geartrain.errors import ArgumentError, EmptyStoreError, NotEnoughRowsError
from geartrain.selection import Epochs, Mixture, Uniform
from geartrain.store.recorder import recorded_fields
from geartrain.tools.testing.thread_ranks import ThreadRankGroup, run_ranks


def make_store(rows, capacity=None, lengths=None, max_length=6, first=0):
    fields = {"tag": gt.Field((), "int64", per_row=True), "t": gt.Field((), "int64")}
    store = gt.Store.create(fields, max_length=max_length, capacity=capacity or max(rows, 1))
    if rows:
        insert(store, range(first, first + rows), lengths)
    return store


def insert(store, tags, lengths=None):
    tags = np.array(tags)
    lengths = np.full(len(tags), store.max_length) if lengths is None else np.array(lengths)
    steps = np.tile(np.arange(store.max_length), (len(tags), 1))
    return store.insert({"tag": tags, "t": steps}, lengths=lengths)


def epochs_of(store, strategy, size, **options):
    return replay_of(store, strategy, size, output="numpy", **{"prefetch": 0, **options})


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.integers(1, 70),
    spare=st.integers(0, 300),
    size=st.integers(1, 20),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    prefetch=st.sampled_from([0, 2]),
    seed=st.integers(0, 2**64 - 1),
)
def test_every_row_is_in_each_pass_once(rows, spare, size, drop_last, shuffle, prefetch, seed):
    with make_store(rows, rows + spare) as store:
        strategy = Epochs(shuffle=shuffle, drop_last=drop_last, seed=seed)
        with epochs_of(store, strategy, size, prefetch=prefetch) as replay:
            if drop_last and rows < size:
                with pytest.raises(NotEnoughRowsError):
                    next(iter(replay))
                return
            for epoch in range(2):
                batches = [batch["tag"].tolist() for batch in replay]
                seen = list(itertools.chain(*batches))
                full, rest = divmod(rows, size)
                assert [len(batch) for batch in batches] == [size] * full + [rest] * (rest > 0 and not drop_last)
                assert len(set(seen)) == len(seen) == (full * size if drop_last else rows)
                if not shuffle:
                    assert seen == sorted(seen)
                figures = replay.stats()
                assert (figures["epoch"], figures["skipped"]) == (epoch + 1, 0)
                assert figures["dropped"] == (rest * (epoch + 1) if drop_last else 0)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=25), size=st.integers(1, 30), seed=st.integers(0, 999))
def test_every_step_is_in_each_pass_once(lengths, size, seed):
    with make_store(len(lengths), 40, lengths) as store:
        wanted = {(tag, t) for tag, length in enumerate(lengths) for t in range(length)}
        with epochs_of(store, Epochs(over="steps", seed=seed), size, window=2) as replay:
            for _ in range(2):
                seen = []
                for batch in replay:
                    last = batch.mask.sum(1) - 1  # padded on the left: the window ends with its last step
                    assert (last >= 0).all()
                    seen += zip(batch["tag"].tolist(), batch["t"][:, -1].tolist(), strict=True)
                assert len(seen) == len(wanted) and set(seen) == wanted


def test_transitions_of_a_pass_begin_at_every_step_that_has_a_later_one():
    from geartrain.store.recorder import recorded_fields

    fields = recorded_fields({"obs": gt.Field((), "float32"), "reward": gt.Field((), "float32")})
    with gt.Store.create(fields, max_length=8, capacity=30) as store:
        rng = np.random.default_rng(0)
        recorder = store.recorder(1, autoreset="disabled")
        wanted = []
        for number, length in enumerate(rng.integers(1, 7, 20)):
            recorder.reset(np.array([number * 100.0]))
            for t in range(1, length + 1):
                recorder.step(np.array([number * 100.0 + t]), reward=1.0, terminated=t == length, truncated=False)
                wanted.append(number * 100.0 + t - 1)
        with epochs_of(store, Epochs(over="steps", seed=1), 16, view=gt.Transitions(n_step=2)) as replay:
            seen = [value for batch in replay for value in batch["obs"].tolist()]
        assert sorted(seen) == sorted(wanted) and seen != wanted


@pytest.mark.parametrize("size", [2, 3, 5, 37, 257, 300])
def test_each_row_is_at_each_place_alike(size):
    """Chi-square over places of rows, and over what comes next, of some thousand passes."""
    native = _native.Candidates(np.ones(size, np.uint32))
    passes = 4000
    orders = np.array(
        [native.find_in_pass(7, number, True, 0, size, size, 0, 0, 0, size)[1] for number in range(passes)]
    )
    assert (np.sort(orders, axis=1) == np.arange(size)).all()
    places = np.zeros((size, size), int)
    for place in range(size):
        np.add.at(places[place], orders[:, place], 1)
    expected = passes / size
    value = ((places - expected) ** 2 / expected).sum()
    assert stats.chi2.sf(value, (size - 1) ** 2) > 1e-4
    if size > 2:
        follows = np.zeros((size, size), int)
        np.add.at(follows, (orders[:, :-1].ravel(), orders[:, 1:].ravel()), 1)
        off = follows[~np.eye(size, dtype=bool)]
        assert (np.diag(follows) == 0).all() and stats.chisquare(off).pvalue > 1e-4


def test_rows_that_come_later_are_of_the_next_pass_and_rows_that_go_are_counted():
    with make_store(40, 60) as store, epochs_of(store, Epochs(seed=3), 8) as replay:
        one = iter(replay)
        seen = [*next(one)["tag"].tolist(), *next(one)["tag"].tolist()]
        keys = store.keys()
        tags = gt.fetch(store, keys, output="numpy")["tag"]
        gone = [tag for tag in tags.tolist() if tag not in seen][:5]
        store.delete(keys[np.isin(tags, gone)])
        insert(store, range(100, 115))  # some of them in the places of those that went
        seen += [tag for batch in one for tag in batch["tag"].tolist()]
        assert sorted(seen) == sorted(set(range(40)) - set(gone))
        assert replay.stats()["skipped"] == 5
        following = [tag for batch in replay for tag in batch["tag"].tolist()]
        assert sorted(following) == sorted((set(range(40)) - set(gone)) | set(range(100, 115)))
        assert replay.stats()["skipped"] == 5


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_pass_is_resumed_where_it_was(drop_last):
    with make_store(50, 80) as store:
        strategy = Epochs(seed=4, drop_last=drop_last)
        with epochs_of(store, strategy, 6, prefetch=2) as one:
            for _ in range(3):
                one.sample()
            state = json.loads(json.dumps(one.state_dict()))
            wanted = [one.sample()["tag"].tolist() for _ in range(10)]
        with epochs_of(store, strategy, 6) as other:
            other.load_state_dict(state)
            assert [other.sample()["tag"].tolist() for _ in range(10)] == wanted
        with make_store(10, 11) as small, epochs_of(small, strategy, 6) as wrong:
            wrong.load_state_dict(state)
            with pytest.raises(ArgumentError, match="pass over other stores"):
                wrong.sample()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_over_ranks_every_row_of_all_shards_is_in_a_pass_once(ranks):
    def one(group):
        with make_store(20 + group.rank, 30, first=1000 * group.rank) as store:
            with gt.Replay(
                store, Epochs(seed=5, drop_last=True), 2 * ranks, group=group, output="numpy", prefetch=group.size % 2
            ) as replay:
                passes = [[batch["tag"].tolist() for batch in replay] for _ in range(2)]
                return passes, replay.stats()["dropped"]

    results = run_ranks(ranks, one)
    rows = {1000 * rank + tag for rank in range(ranks) for tag in range(20 + rank)}
    for number in range(2):
        seen = [tag for passes, _ in results for batch in passes[number] for tag in batch]
        assert len(seen) == len(set(seen)) == len(rows) // (2 * ranks) * 2 * ranks and set(seen) <= rows
    assert all(dropped == 2 * (len(rows) % (2 * ranks)) for _, dropped in results)
    assert results[0][0][0] != results[0][0][1]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shards=st.lists(st.lists(st.integers(1, 6), min_size=0, max_size=9), min_size=1, max_size=3),
    over=st.sampled_from(["rows", "steps"]),
    each=st.integers(1, 4),
    prefetch=st.sampled_from([0, 2]),
    windows=st.sampled_from([gt.Windows(2), gt.Windows(2, whole=True), gt.Windows(3, anchor="first", stride=2)]),
    seed=st.integers(0, 999),
)
def test_over_ranks_the_last_batch_is_kept_and_rows_or_steps_are_in_a_pass_once(
    shards, over, each, prefetch, windows, seed
):
    """Against a slow count: of every rank's windows each once, in batches that differ by a row at most."""
    if windows.whole and not any(length > 1 for lengths in shards for length in lengths):
        shards = [[2], *shards[1:]]
    if not any(shards):
        shards = [[1], *shards[1:]]
    ranks = len(shards)
    wanted = Counter()
    for rank, lengths in enumerate(shards):
        for row, length in enumerate(lengths):
            tag, told = 1000 * rank + row, 1 if over == "rows" else windows.stride
            every = range(0, length, told) if windows.from_first else range(length - 1, -1, -told)
            every = [t for t in every if t >= 1 or not windows.whole]
            if every:
                wanted.update([tag] if over == "rows" else [(tag, t) for t in every])

    def one(group):
        lengths = shards[group.rank]
        with make_store(len(lengths), 12, lengths or None, first=1000 * group.rank) as store:
            options = {"group": group, "output": "numpy", "prefetch": prefetch, "window": windows}
            with replay_of(store, Epochs(over=over, seed=seed), each * ranks, **options) as replay:
                passes = []
                for _ in range(2):
                    passes.append([])
                    for batch in replay:
                        tags, last = batch["tag"].tolist(), batch.start + batch.mask.sum(1) - 1
                        assert np.array_equal(np.where(batch.mask, batch["t"], 0).max(1, initial=0), last)
                        told = (batch.start if windows.from_first else last).tolist()
                        passes[-1].append(tags if over == "rows" else [*zip(tags, told, strict=True)])
                return passes, replay.stats()["rows"]

    results = run_ranks(ranks, one)
    for number in range(2):
        batches = [[passes[number][i] for passes, _ in results] for i in range(len(results[0][0][number]))]
        assert Counter(itertools.chain(*itertools.chain(*batches))) == wanted and set(wanted.values()) == {1}
        assert all(len(part) == each for parts in batches[:-1] for part in parts)
        sizes = [len(part) for part in batches[-1]]
        assert max(sizes) - min(sizes) <= 1 and 0 < sum(sizes) <= each * ranks
        assert len(batches) == -(-len(wanted) // (each * ranks))
    assert sum(rows for _, rows in results) == 2 * len(wanted)


@pytest.mark.parametrize("over", ["rows", "steps"])
def test_a_pass_over_ranks_is_resumed_where_it_was(over):
    strategy = Epochs(over=over, seed=4)

    def one(group):
        with make_store(11 + group.rank, 15, first=1000 * group.rank) as store:
            options = {"group": group, "output": "numpy", "window": 2}
            made = []
            state = None
            for number in range(2):
                with replay_of(store, strategy, 6, prefetch=2 - number, **options) as replay:
                    if state is not None:
                        replay.load_state_dict(json.loads(json.dumps(state)))
                    else:
                        for _ in range(2):
                            replay.sample()
                        state = replay.state_dict()
                    made.append([(batch["tag"].tolist(), batch["t"].tolist()) for batch in itertools.islice(replay, 2)])
            return made

    for first, again in run_ranks(2, one):
        assert first == again and len(first) == 2


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@example(rows=[2, 7, 1], size=7, drop_last=True, over="steps", ranks=2, seed=233)  # the next batch takes fewer
@given(
    rows=st.lists(st.integers(1, 20), min_size=2, max_size=3),
    size=st.integers(1, 12),
    drop_last=st.booleans(),
    over=st.sampled_from(["rows", "steps"]),
    ranks=st.integers(0, 2),
    seed=st.integers(0, 999),
)
def test_in_a_mixture_every_store_goes_on_from_pass_to_pass_by_itself(rows, size, drop_last, over, ranks, seed):
    """0 ranks: without a group. What store i gives is, one after the other, its passes; a slow count of each."""
    strategies = [Epochs(over=over, drop_last=drop_last, seed=seed + i) for i in range(len(rows) - 1)]
    mixture = Mixture([1.0] * len(rows), [*strategies, Uniform(seed=seed)], seed=seed)
    batch_size = size * max(ranks, 1)
    quotas = [mixture.quotas(batch_size, step) for step in range(6)]

    def one(group):
        part = 0 if group is None else group.rank
        # every rank has a shard of each store
        stores = [make_store(n, n + 3, [2] * n, first=10000 * i + 1000 * part) for i, n in enumerate(rows)]
        options = {"output": "numpy", "window": 2, "num_batches": 6, "prefetch": seed % 2}
        if group is not None:
            options["group"] = group
        try:
            with replay_of(stores, mixture, batch_size, **options) as replay:
                made = []
                for batch in replay:
                    draw = np.arange(len(batch)) if group is None else batch.draw
                    told = batch["tag"] * 10 + batch.mask.sum(1)
                    made.append((draw, told if over == "steps" else batch["tag"]))
                figures = replay.stats()
        except NotEnoughRowsError:
            return None
        finally:
            for store in stores:
                store.close()
        assert len(figures["epoch"]) == len(rows) and figures["epoch"][-1] == 0
        return made, figures

    results = run_ranks(ranks, one) if ranks else [one(None)]
    elements = [n * max(ranks, 1) * (2 if over == "steps" else 1) for n in rows]
    if any(result is None for result in results):
        assert drop_last and all(result is None for result in results)
        assert any(each[i] > elements[i] for each in quotas for i in range(len(rows) - 1))
        return
    for number in range(len(rows) - 1):
        seen = []
        for step in range(6):
            draws = np.concatenate([made[step][0] for made, _ in results])
            values = np.concatenate([made[step][1] for made, _ in results])[np.argsort(draws)]
            first = sum(quotas[step][:number])
            mine = values[first : first + quotas[step][number]].tolist()
            assert len(mine) == quotas[step][number]
            if (drop_last and seen and len(seen[-1]) + len(mine) > elements[number]) or not seen:
                seen.append([])
            for value in mine:
                if not drop_last and len(seen[-1]) == elements[number]:
                    seen.append([])
                seen[-1].append(value)
        for one_pass in seen:
            assert len(set(one_pass)) == len(one_pass) <= elements[number]
        if not drop_last:
            assert all(len(one_pass) == elements[number] for one_pass in seen[:-1])
            assert all(figures["dropped"][number] == 0 for _, figures in results)


def test_in_a_mixture_rows_that_are_lost_are_skipped_and_the_next_one_takes_their_place():
    store, other = make_store(24, 30), make_store(5, 6, first=500)
    gone = []

    class Losing(Epochs):
        def take(self, shard, n, state, **options):
            taken = super().take(shard, n, state, **options)
            if not gone and n > 1:
                keys = store.keys()
                lost = keys[np.isin(keys.row, taken.rows[:2])]
                gone.extend(gt.fetch(store, lost, output="numpy")["tag"].tolist())
                store.delete(lost)
            return taken

    mixture = Mixture([0.5, 0.5], [Losing(seed=2), Uniform(seed=0)])
    with store, other, epochs_of([store, other], mixture, 10) as replay:
        seen = [tag for _ in range(4) for tag in replay.sample()["tag"][:5].tolist()]
        assert len(gone) == 2 and len(set(seen)) == len(seen) == 20 and not set(seen) & set(gone)
        assert replay.stats()["skipped"][0] == 2
        seen += replay.sample()["tag"][:2].tolist()
        assert set(seen) == set(range(24)) - set(gone) and replay.stats()["epoch"] == [1, 0]


@pytest.mark.parametrize("over", ["rows", "steps"])
def test_a_pass_goes_on_from_a_jobs_checkpoint_and_begins_anew_where_rows_are_cut_otherwise(over, store_name, tmp_path):
    strategy, windows = Epochs(over=over, seed=3), gt.Windows(2, stride=2)

    def seen_of(batches):
        return [told for batch in batches for told in zip(batch["tag"].tolist(), batch.start.tolist(), strict=True)]

    def replay_over(store, group):
        return gt.Replay(store, strategy, 6, group=group, output="numpy", window=windows, prefetch=0)

    def save(group):
        with make_store(15, 20, first=1000 * group.rank) as store:
            store.delete(store.keys()[3:7])  # rows are no longer in the order of their commits
            insert(store, range(1000 * group.rank + 500, 1000 * group.rank + 503))
            with replay_over(store, group) as replay:
                first = seen_of(itertools.islice(iter(replay), 2))
                gt.save_checkpoint(store, tmp_path, group, state=replay.state_dict())
                return first, seen_of(iter(replay))

    saved = run_ranks(2, save)

    def load(group, **options):
        store, state, _ = gt.load_checkpoint(tmp_path, store_name(), group, shard=(group.rank, group.size), **options)
        with store, replay_over(store, group) as replay:
            replay.load_state_dict(state)
            return seen_of(iter(replay))

    if over == "rows":  # a pass over rows draws its windows
        assert [[tag for tag, _ in rest] for _, rest in saved] == [
            [tag for tag, _ in rest] for rest in run_ranks(2, load)
        ]
    else:
        assert [rest for _, rest in saved] == run_ranks(2, load)
    cut = [told for rest in run_ranks(3, lambda group: load(group, reshard=True)) for told in rest]
    every = [told for first, rest in saved for told in first + rest]
    assert len(every) == len(cut) == len({tag for tag, _ in every}) * (3 if over == "steps" else 1)
    assert {tag for tag, _ in every} == {tag for tag, _ in cut}
    if over == "steps":
        assert len(set(every)) == len(every) and set(every) == set(cut)


def test_what_makes_no_passes_is_refused():
    for bad in ({"shuffle": 1}, {"drop_last": None}, {"over": "episodes"}, {"seed": -1}):
        with pytest.raises(ArgumentError):
            Epochs(**bad)
    with make_store(0, 4) as store, epochs_of(store, Epochs(), 2) as replay, pytest.raises(EmptyStoreError):
        replay.sample()
    with make_store(4) as store, make_store(4) as other:
        with pytest.raises(ArgumentError, match="give window= or view="):
            gt.Replay([store, other], Mixture([1, 1], [Uniform(), Epochs(over="steps")]), 2)
        with pytest.raises(ArgumentError, match="give window= or view="):
            gt.Replay(store, Epochs(over="steps"), 2)
        (rank,) = ThreadRankGroup.make(1)
        with pytest.raises(ArgumentError, match="leave out device"):
            gt.Replay(store, Epochs(), 2, device="cuda", group=rank)
        candidates = gt.selection.Candidates(np.ones(9, np.uint32))
        draw = Epochs(seed=1).select(candidates, 9, 0)
        assert sorted(draw.rows.tolist()) == list(range(9)) and draw.state["epoch"] == 1
    fields = {"x": gt.Field((), "int64", per_row=True)}
    with (
        gt.Store.create(fields, max_length=1, capacity=2, max_times_sampled=1) as store,
        pytest.raises(ArgumentError, match="use Fifo"),
    ):
        gt.Replay(store, Epochs(), 1)


@pytest.mark.parametrize(("drop_last", "at"), [(False, 0), (False, 3), (False, 4), (True, 1), (True, 3)])
def test_rows_that_go_between_being_taken_and_being_copied_are_replaced_or_left_out(drop_last, at):
    """24 rows in batches of 5; of one batch two rows go under the hand of the sampler."""
    store = make_store(24, 30)
    gone = []

    class Losing(Epochs):
        def take(self, shard, n, state, **options):
            taken = super().take(shard, n, state, **options)
            if not gone and len(calls) == at:
                rows = taken.rows[:2]
                keys = store.keys()
                lost = keys[np.isin(keys.row, rows)]
                gone.extend(gt.fetch(store, lost, output="numpy")["tag"].tolist())
                store.delete(lost)
            calls.append(n)
            return taken

    calls = []
    with store, epochs_of(store, Losing(seed=2, drop_last=drop_last), 5) as replay:
        batches = [batch["tag"].tolist() for batch in replay]
        seen = list(itertools.chain(*batches))
        assert len(gone) == 2 and len(set(seen)) == len(seen) and not set(seen) & set(gone)
        figures = replay.stats()
        assert figures["skipped"] == 2 and figures["dropped"] == (2 if drop_last else 0)
        assert figures["rows"] == len(seen) == 20 + (0 if drop_last else 2)
        assert figures["epoch"] == 1
        following = [tag for batch in replay for tag in batch["tag"].tolist()]
        assert len(following) == (20 if drop_last else 22) and not set(following) & set(gone)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_pass_whose_rest_has_gone_ends_and_the_next_one_is_whole(drop_last, prefetch):
    with make_store(12) as store:
        with epochs_of(store, Epochs(seed=0, drop_last=drop_last), 4, prefetch=prefetch) as replay:
            seen = []
            for batch in replay:
                seen += batch["tag"].tolist()
                if len(seen) == 4:
                    store.delete(store.keys()[~np.isin(store.column("tag")[store.keys().row], seen)])
            assert len(set(seen)) == len(seen) <= 12
            following = [batch["tag"].tolist() for batch in replay]
            assert sorted(itertools.chain(*following)) == sorted(seen[:4])


def test_rows_that_are_extended_are_of_a_pass_after_their_end():
    fields = recorded_fields({"obs": gt.Field((1,), "float32"), "reward": gt.Field((), "float32")})
    with gt.Store.create(fields, max_length=20, capacity=16) as store:
        recorder, other = (store.recorder(4, autoreset="disabled", publish_every=1) for _ in range(2))

        def steps(recorder, n, *, ends):
            for i in range(n):
                over = np.full(4, ends and i == n - 1)
                recorder.step(np.zeros((4, 1)), reward=np.zeros(4), terminated=over, truncated=~over & False)

        recorder.reset(np.zeros((4, 1)))
        steps(recorder, 5, ends=True)  # four rows of 5 transitions, complete
        recorder.reset(np.zeros((4, 1)))
        steps(recorder, 3, ends=False)  # four that are extended
        other.reset(np.zeros((4, 1)))
        steps(other, 2, ends=True)  # and four that were begun later, and are complete
        view = gt.Transitions()
        with epochs_of(store, Epochs(seed=0, over="steps"), 4, view=view) as replay:
            given = 0
            for number, batch in enumerate(replay):
                given += len(batch)
                if number == 1:
                    steps(recorder, 2, ends=True)
            assert given == 4 * 5 + 4 * 2 and replay.stats()["skipped"] == 0
            assert sum(len(batch) for batch in replay) == 4 * 5 + 4 * 2 + 4 * 5


@pytest.mark.parametrize(
    "broken",
    [
        {"count": -85},
        {"position": -1},
        {"epoch": -1},
        {"upto/0": -1},
        {"places/0": 3},
        {"count": None},
        {"upto/0": None},
    ],
    ids=str,
)
def test_a_state_that_is_none_is_refused(broken):
    with make_store(12) as store, epochs_of(store, Epochs(seed=0), 4) as replay:
        replay.sample()
        state = json.loads(json.dumps(replay.state_dict()))
        of_pass = state["state"][0]
        of_pass.update({name: value for name, value in broken.items() if value is not None})
        for name in [name for name, value in broken.items() if value is None]:
            del of_pass[name]
        with pytest.raises(ArgumentError):
            replay.load_state_dict(state)
            replay.sample()
