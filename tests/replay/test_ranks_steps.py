"""Steps as the unit over ranks: the batches of one process to the bit, of views too, and only windows travel."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from recorded_shards import STEPS, Episodes, SlowDraws, alone, as_record, joined, over_ranks, same
from replay_calls import replay_of

import geartrain as gt
import geartrain._native as _native
from geartrain.errors import (
    ArgumentError,
    EmptyStoreError,
    RanksDisagreeError,
    SchemaError,
    StoreClosedError,
)
from geartrain.replay.distributed.rank_reader import RankReader
from geartrain.replay.distributed.sharded_sampler import ShardedSampler
from geartrain.selection import Epochs, Fifo, Lifo, Limits, Prioritized, Uniform
from geartrain.tools.testing import ThreadRankGroup, run_ranks

B = 30
RANKS = [1, 2, 3, 5]


def goal_reward(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    return np.abs(achieved - desired).sum(-1) + 0.25


VIEWS: dict[str, dict[str, Any]] = {
    "n-step": {"view": gt.Transitions(n_step=3, gamma=0.9)},
    "stack": {"view": gt.Transitions(frame_stack=3, obs=["obs.state"])},
    "both": {"view": gt.Transitions(n_step=2, frame_stack=2, obs=["obs.state"]), "fields": ["obs.state"]},
    "goals": {"view": gt.Transitions(hindsight=gt.Hindsight(k=2, reward=goal_reward))},
    "stacked goals": {"view": gt.Transitions(frame_stack=2, hindsight=gt.Hindsight("episode", reward=goal_reward))},
    "window": {"window": 4},
    "whole": {"window": gt.Windows(4, whole=True)},
    "first": {"window": gt.Windows(4, whole=True, anchor="first")},
}
FEW = Limits(min_version=57)  # 3 of 60 rows: most draws are refused 63 times
STRATEGIES: dict[str, tuple[str, Any]] = {
    "over steps": ("row", Uniform(seed=1, over="steps")),
    "by step": ("step", Prioritized(seed=2, beta=0.5)),
    "strata": ("step", Prioritized(seed=3, stratified=True, limits=Limits(min_version=20, min_length=4))),
    "few": ("step", Prioritized(seed=4, limits=FEW)),
    "rows": ("row", Uniform(seed=5)),
    "few rows": ("row", Uniform(seed=6, limits=FEW)),
    "distinct": ("row", Uniform(seed=7, replacement=False, limits=Limits(min_length=3))),
    "uniform of steps": ("step", Uniform(seed=8, over="steps")),
    "oldest": ("row", Fifo()),
    "newest": ("step", Lifo()),
    "passes": ("row", Epochs(seed=9, over="steps")),
}


def check_against_the_slow_loop(episodes: Episodes, n: int, ranks: int, *, by_priority: bool, need: int) -> None:
    slow = SlowDraws(episodes, 7, need, by_priority=by_priority)
    selection = Prioritized(seed=7) if by_priority else Uniform(seed=7, over="steps")
    options = {"view": gt.Transitions(n_step=3, gamma=0.5)} if need else {"window": 1}
    with episodes.stores(ranks, priority_per="step" if by_priority else "row") as stores:
        batches, _ = over_ranks(stores, selection, n, 2, **options)
    for step, batch in enumerate(batches):
        wanted = slow.draw(step, n)
        action = batch["action"] if need else batch["action"][:, 0]
        assert action.tolist() == [row * STEPS + t for row, t in wanted]
        if not need:
            continue
        for i, (row, t) in enumerate(wanted):
            arrays, last = {name: array[row] for name, array in episodes.arrays.items()}, episodes.lengths[row] - 1
            m = min(3, last - t)
            ended = [k for k in range(m) if arrays["terminated"][t + k]]
            assert np.array_equal(batch["obs.state"][i], arrays["obs.state"][t])
            assert np.array_equal(batch["next_obs.state"][i], arrays["obs.state"][t + m])
            rewards = arrays["reward"][t : t + m].astype(np.float64)
            assert batch["reward"][i] == np.float32((0.5 ** np.arange(m) * rewards).sum())
            assert batch["discount"][i] == (0 if m - 1 in ended else 0.5**m)


@pytest.mark.parametrize("by_priority", [False, True], ids=["over steps", "by priority"])
def test_draws_of_steps_over_ranks_are_those_of_the_slow_loop(by_priority: bool) -> None:
    check_against_the_slow_loop(Episodes(200, seed=3), 90, 3, by_priority=by_priority, need=1)


@pytest.mark.slow
@pytest.mark.parametrize("need", [0, 1], ids=["windows", "transitions"])
@pytest.mark.parametrize("by_priority", [False, True], ids=["over steps", "by priority"])
def test_thousands_of_episodes_over_ranks_against_the_slow_loop(by_priority: bool, need: int) -> None:
    for seed in range(3):
        for ranks in RANKS:
            check_against_the_slow_loop(Episodes(3000, seed), 600, ranks, by_priority=by_priority, need=need)


def updated(stores: list[Any], ranks: int, selection: Any, **options: Any) -> list[dict[str, np.ndarray]]:
    """Batches whose priorities are given back, by the numbers of their steps."""

    def body(rank: ThreadRankGroup) -> list[gt.Batch]:
        made = []
        settings = {"output": "numpy", "prefetch": 0, "group": rank, **options}
        with replay_of(stores[rank.rank % len(stores)], selection, B, **settings) as replay:
            for _ in range(6):
                batch = replay.sample()
                assert replay.update_priorities(batch.keys, batch["action"] % 13 + batch.step) == 0
                made.append(batch)
            replay.settle()
            return made

    results = run_ranks(ranks, body)
    return [joined([result[step] for result in results]) for step in range(6)]


def test_priorities_of_steps_are_set_over_ranks_as_by_one_process() -> None:
    episodes, selection = Episodes(60), Prioritized(seed=2, alpha=0.6, beta=0.4)
    options = VIEWS["n-step"]
    with episodes.stores(1, priority_per="step") as (store,):
        expected = []
        with replay_of(store, selection, B, output="numpy", prefetch=0, **options) as replay:
            for _ in range(6):
                batch = replay.sample()
                replay.update_priorities(batch.keys, batch["action"] % 13 + batch.step)
                expected.append(as_record(batch))
    assert len(np.unique(expected[-1]["importance_weights"])) > 5
    for shards, ranks in ((1, 3), (2, 2), (3, 3), (5, 5)):
        with episodes.stores(shards, priority_per="step") as stores:
            batches = updated(stores, ranks, selection, **options)
            assert all(map(same, batches, expected)), (shards, ranks)
            assert all(store.audit() == [] for store in stores)


def test_stale_keys_of_steps_are_counted_and_others_refused() -> None:
    episodes = Episodes(40)
    with episodes.stores(2, priority_per="step") as stores, Episodes(4).stores(1) as (rows,):
        before = [store.stats()["stale_keys"] for store in stores]

        def body(rank: ThreadRankGroup) -> int:
            with gt.Replay(
                stores[rank.rank], Prioritized(seed=0), B, window=2, group=rank, output="numpy", prefetch=0
            ) as replay:
                batch = replay.sample()
                with pytest.raises(ArgumentError, match="these keys name rows"):
                    replay.update_priorities(batch.keys.without_steps(), np.ones(B // 2))
                with pytest.raises(ArgumentError, match="not finite"):
                    replay.update_priorities(batch.keys, np.full(B // 2, np.nan))
                rank.all_gather(np.zeros(1, np.uint8))
                if rank.rank == 0:
                    for store in stores:
                        store.delete(store.keys())
                rank.all_gather(np.zeros(1, np.uint8))
                replay.update_priorities(batch.keys, np.ones(B // 2))
                beyond = batch.keys.of_steps(np.full(B // 2, 2**32 - 1))
                replay.update_priorities(beyond, np.ones(B // 2))
                replay.settle()
            return len(batch)

        assert sum(run_ranks(2, body)) == B
        gone = [store.stats()["stale_keys"] - old for store, old in zip(stores, before, strict=True)]
        assert sum(gone) == 2 * B

        def of_rows(rank: ThreadRankGroup) -> None:
            with gt.Replay(rows, Uniform(seed=0), 2, window=2, group=rank, output="numpy") as replay:
                keys = replay.sample().keys
                with pytest.raises(ArgumentError, match="priorities of rows"):
                    replay.update_priorities(keys.of_steps(np.zeros(2, int)), np.ones(2))

        run_ranks(1, of_rows)


def record_and_sample(store: gt.Store | None, sample: Any, turn: Any) -> list[Any]:
    """Samples after each step of an episode that is recorded into the store, where there is one."""
    made = []
    recorder = None if store is None else store.recorder(autoreset="disabled", publish_every=1)
    for t in range(STEPS):
        if recorder is not None:
            goals = {name: np.full((1, 2), t) for name in ("achieved_goal", "desired_goal")}
            observation = {"state": np.full((1, 3), t), **goals}
            if t == 0:
                recorder.reset(observation)
            else:
                recorder.step(observation, action=-t, reward=1.0, terminated=t == STEPS - 1, truncated=False)
        turn()
        made.append(sample())
        turn()
    return made


@pytest.mark.parametrize("per", ["row", "step"])
def test_new_steps_of_growing_rows_are_drawn_over_ranks_as_they_are_published(per: str) -> None:
    episodes = Episodes(6, seed=4)
    selection = Prioritized(seed=1) if per == "step" else Uniform(seed=1, over="steps")
    options: dict[str, Any] = {"view": gt.Transitions(n_step=2), "output": "numpy", "prefetch": 0}
    with episodes.stores(1, priority_per=per) as (store,), replay_of(store, selection, B, **options) as replay:
        expected = [as_record(each) for each in record_and_sample(store, replay.sample, lambda: None)]
    for ranks in RANKS[1:]:
        with episodes.stores(ranks, priority_per=per) as stores:

            def body(rank: ThreadRankGroup, stores: Any = stores) -> list[gt.Batch]:
                store = stores[rank.rank]
                with replay_of(store, selection, B, group=rank, **options) as replay:
                    mine = store if rank.rank == rank.size - 1 else None
                    return record_and_sample(mine, replay.sample, lambda: rank.all_gather(np.zeros(1, np.uint8)))

            results = run_ranks(ranks, body)
        batches = [joined([result[t] for result in results]) for t in range(STEPS)]
        assert all(map(same, batches, expected)), ranks
    grown = [set(batch["action"][batch["action"] < 0].tolist()) for batch in expected]
    assert grown[1] == set() and all(min(some, default=0) >= -t for t, some in enumerate(grown))
    assert len(set.union(*grown)) >= 3


def test_only_what_a_view_needs_travels() -> None:
    episodes = Episodes(60)
    view = gt.Transitions(n_step=3, obs=["obs.state"])
    options = {"view": view, "fields": ["obs.state", "action"], "assignment": "ordered", "prefetch": 0}
    with episodes.stores(2) as stores:
        batches, stats = over_ranks(stores, Uniform(seed=0, over="steps"), B, 10, **options)
    # Two observations, action, reward, discount, terminated and truncated.
    row_bytes = 2 * 12 + 8 + 4 + 4 + 1 + 1
    assert {"obs.state", "next_obs.state", "action"} <= batches[0].keys()
    assert stats[0]["received_bytes"] == stats[1]["sent_bytes"]
    for each in stats:
        assert each["received_bytes"] % row_bytes == 0
        assert each["received_bytes"] + each["local_bytes"] == row_bytes * B // 2 * 10
        # 57 bytes and a bit for each draw and attempt of a round, most often two of 4 and of 12 attempts.
        assert 10 * (57 + B // 2) <= each["selection_bytes"] <= 10 * (57 + B // 2 + B + 8)


def test_samples_of_rows_are_counted_and_limited_over_ranks() -> None:
    episodes = Episodes(60, least=2)
    for shards, ranks in ((1, 2), (2, 2), (3, 3)):
        with episodes.stores(shards, max_times_sampled=2) as stores:
            selection, options = Uniform(seed=1, over="steps"), {"view": gt.Transitions(), "prefetch": 0}
            batches, _ = over_ranks(stores, selection, B, 4, ranks=ranks, min_rows=1, **options)
            drawn = np.concatenate([batch["version"] for batch in batches])
            assert np.bincount(drawn).max() == 2
            left = sum(len(store) for store in stores)
            assert left == 60 - (np.bincount(drawn) == 2).sum()


@pytest.mark.parametrize(
    ("selection", "view"),
    [
        (Uniform(seed=1, over="steps"), "window"),
        (Uniform(seed=1, over="steps"), "goals"),
        (Prioritized(seed=1, stratified=True), "window"),
    ],
    ids=["window", "goals", "strata"],
)
def test_draws_made_again_for_want_of_samples_show_what_one_process_shows(selection: Any, view: str) -> None:
    options = {"prefetch": 0, **VIEWS[view]}
    episodes = Episodes(60, least=6)
    with episodes.stores(1, max_times_sampled=1) as (store,):
        (expected,) = alone(store, selection, 40, 1, **VIEWS[view])
    assert len(np.unique(expected["version"])) == 40
    for shards, ranks in ((1, 1), (1, 2), (2, 2), (4, 4)):
        with episodes.stores(shards, max_times_sampled=1) as stores:
            (batch,), _ = over_ranks(stores, selection, 40, 1, ranks=ranks, **options)
        for name in {*batch, "start"} - {"probability"}:
            assert np.array_equal(batch[name], expected[name]), (name, shards, ranks)


def test_lost_rows_are_drawn_again_from_their_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    episodes, draw_all = Episodes(60), ShardedSampler.draw_all

    def stale_at_first(self: ShardedSampler, *given: Any) -> Any:
        drawn = draw_all(self, *given)
        (found,) = drawn.found
        assert found is not None
        stale = np.arange(len(found.rows)) % 3 == 0
        generations = np.where(stale, found.generations + 2, found.generations).astype(np.uint32)
        return drawn._replace(found=[dataclasses.replace(found, generations=generations)])

    lost = np.arange(B) % 3 == 0
    for shards, per, selection in (
        (2, "row", Uniform(seed=1, over="steps")),
        (1, "row", Uniform(seed=1, over="steps")),  # of two ranks
        (2, "step", Prioritized(seed=1, beta=0.5)),
        (2, "row", Uniform(seed=1, replacement=False)),
    ):
        with episodes.stores(shards, priority_per=per) as stores:
            settings: dict[str, Any] = {"ranks": 2, "view": gt.Transitions(), "prefetch": 0}
            (whole, *_), _ = over_ranks(stores, selection, B, 3, **settings)
            with monkeypatch.context() as patched:
                patched.setattr(ShardedSampler, "draw_all", stale_at_first)
                (batch, *others), stats = over_ranks(stores, selection, B, 3, **settings)
        assert sum(each["redrawn"] for each in stats) == B
        row, t = np.divmod(batch["action"], STEPS)
        assert np.array_equal(row, batch["version"]) and np.array_equal(t, batch["start"])
        assert np.array_equal(batch["obs.state"], episodes.arrays["obs.state"][row, t])
        assert np.array_equal(batch["action"][~lost], whole["action"][~lost]), "what is kept stays"
        assert (row[lost] != whole["version"][lost]).mean() > 0.6, "under other random bits"
        if not selection.replacement:
            assert all(len(np.unique(each["version"])) == B for each in (batch, *others))
        if per == "step":
            assert np.array_equal(batch["step"], t)
            total = np.rint(episodes.priorities * 2**16)[episodes.steps()].sum()
            units = np.rint(episodes.priorities[row, t] * 2**16)
            assert np.allclose(batch["probability"], units / total, rtol=1e-12)


@pytest.mark.parametrize(
    ("per", "selection", "options"),
    [
        ("row", Uniform(seed=1, over="steps"), {"window": gt.Windows(2, whole=True)}),
        ("step", Prioritized(seed=1), {"view": gt.Transitions()}),
        ("row", Uniform(seed=1), {"view": gt.Transitions()}),
        ("row", Prioritized(seed=1, limits=Limits(min_length=2)), {"window": 2}),
    ],
    ids=["over steps", "by step", "need of a view", "limits"],
)
def test_a_shard_that_loses_its_last_row_to_draw_before_the_read_fails_that_batch_alone(
    monkeypatch: pytest.MonkeyPatch, per: str, selection: Any, options: dict[str, Any]
) -> None:
    episodes, read = Episodes(60), RankReader.read
    episodes.lengths[-1] = 1

    with episodes.stores(2, priority_per=per) as stores:

        def loses_rows(self: RankReader, step: int, *rest: Any, **options: Any) -> Any:
            store = self.samplers[0].plan.store
            if step == 1 and store is stores[1]:
                store.delete(store.keys()[store.status(store.keys())["length"] > 1])
                assert len(store)  # rows that no draw may choose are left
            return read(self, step, *rest, **options)

        monkeypatch.setattr(RankReader, "read", loses_rows)

        def body(rank: ThreadRankGroup) -> None:
            settings = {"group": rank, "prefetch": 0, "output": "numpy", **options}
            with replay_of(stores[rank.rank], selection, B, **settings) as replay:
                replay.sample()
                words = "more than 1 step|meets the limits" if rank.rank == 1 else "rank 1 found no other rows"
                with pytest.raises(EmptyStoreError, match=words):
                    replay.sample()
                for _ in range(2):
                    assert (replay.sample().keys.shard == 0).all()

        run_ranks(2, body)


def test_a_store_without_a_step_to_draw_is_an_error_on_all_ranks_that_they_survive() -> None:
    episodes = Episodes(20)
    view = gt.Transitions()
    for per, selection in (("row", Uniform(seed=1, over="steps")), ("step", Prioritized(seed=1))):
        with episodes.stores(3, priority_per=per) as stores:

            def body(rank: ThreadRankGroup, stores: Any = stores, selection: Any = selection) -> None:
                store = stores[rank.rank]
                with gt.Replay(store, selection, B, view=view, group=rank, prefetch=0, output="numpy") as replay:
                    replay.sample()
                    short = store.keys()[store.status(store.keys())["length"] > 1]
                    rank.all_gather(np.zeros(1, np.uint8))
                    store.delete(short)
                    rank.all_gather(np.zeros(1, np.uint8))
                    with pytest.raises(EmptyStoreError, match="more than 1 step"):
                        replay.sample()
                    rank.all_gather(np.zeros(1, np.uint8))
                    if rank.rank == 2:
                        episodes.insert(store, 0, 5)
                    rank.all_gather(np.zeros(1, np.uint8))
                    assert (replay.sample().version < 5).all()

            run_ranks(3, body)


def test_ranks_with_other_views_or_priorities_disagree() -> None:
    episodes = Episodes(10)
    others: list[dict[str, Any]] = [{"view": gt.Transitions(n_step=2)}, {"window": 3}]
    for other in others:
        with episodes.stores(2) as stores:

            def body(rank: ThreadRankGroup, stores: Any = stores, other: Any = other) -> None:
                options: dict[str, Any] = other if rank.rank else {"view": gt.Transitions(n_step=3)}
                with pytest.raises(RanksDisagreeError):
                    replay_of(stores[rank.rank], Uniform(seed=0), 4, group=rank, output="numpy", **options)

            run_ranks(2, body)
    with episodes.stores(1) as (one,), episodes.stores(1, priority_per="step") as (two,):

        def mixed(rank: ThreadRankGroup) -> None:
            with pytest.raises(RanksDisagreeError, match="priority_per"):
                gt.Replay([one, two][rank.rank], Uniform(seed=0), 4, window=2, group=rank, output="numpy")

        run_ranks(2, mixed)


def test_rows_with_a_priority_for_every_step_are_not_moved() -> None:
    with Episodes(10).stores(2, priority_per="step") as stores:

        def body(rank: ThreadRankGroup) -> None:
            with (
                gt.Placement(stores[rank.rank], group=rank) as placement,
                pytest.raises(ArgumentError, match="has priority_per='step'"),
            ):
                placement.rebalance()

        run_ranks(2, body)


def test_native_calls_with_arrays_that_do_not_fit_are_refused() -> None:
    episodes = Episodes(4)
    one, target = np.zeros(1, np.uint32), np.zeros(1, np.uint64)
    bare = _native.Candidates(np.ones(3, np.uint32))
    with episodes.stores(1) as (rows,), episodes.stores(1, priority_per="step") as (steps,):
        of_rows, of_steps = _native.Candidates(rows.native), _native.Candidates(steps.native)
        refused: list[Any] = [
            lambda: bare.draw_steps(True, 0, 0, 0, one, 0, None, (0, 1, 0, 1, 0, 0, 0)),
            lambda: bare.find_drawn(True, 0, 0, 0, one, target, (0, 0, 3), None),
            lambda: of_steps.find_drawn(True, 0, 0, 0, one, target[:0], None, None),
            lambda: of_steps.draw_steps(True, 0, 0, 0, one, 0, None, (0, 1, 0, 0, 0, 0, 0)),
            lambda: of_steps.draw_steps(True, 0, 0, 0, one + 5, 5, None, (0, 1, 0, 1, 0, 0, 0)),
            lambda: _native.AllowedSteps(of_rows, None, (0, 1, 0, 1, 0, 0, 0)),
            lambda: _native.AllowedSteps(bare, None, (0, 1, 0, 1, 0, 0, 0)),
        ]
        for call in refused:
            with pytest.raises(SchemaError):
                call()
        found = of_steps.find_drawn(
            True, 0, 0, 70, one, target + np.uint64(2**63), None, (0, 2**32 - 1, 2**32 - 1, 1, 0, 0, 0)
        )
        assert found[0].tolist() == [2**32 - 1]  # beyond the total, and of no step that counts
        allowed = _native.AllowedSteps(of_steps, None, (0, 1, 0, 1, 0, 0, 0))
        assert allowed.find(target + np.uint64(2**63))[0].tolist() == [2**32 - 1]
        steps.close()
        with pytest.raises(StoreClosedError):
            allowed.find(target)
