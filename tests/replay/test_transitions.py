"""Transitions: every one is what its episode says, and every step is as likely as any other."""

from __future__ import annotations

import numpy as np
import pytest
from crossed import crossed
from replay_calls import replay_of
from scipy import stats
from selection_reference import ROW_STREAM, WINDOW_STREAM, below, random_bits

import geartrain as gt
from geartrain.errors import ArgumentError, EmptyStoreError, FieldError
from geartrain.selection import Fifo, GroupSampling, Mixture, Prioritized, Uniform
from geartrain.store.recorder import recorded_fields


def make_store(max_length, capacity=4000, *, truncated=True, obs_shape=(2,), **options):
    fields = recorded_fields(
        {
            "obs": gt.Field(obs_shape, "float32"),
            "action": gt.Field((), "int64"),
            "reward": gt.Field((), "float32"),
            "task": gt.Field((), "uint8", per_row=True),
        }
    )
    if truncated:
        fields["truncated"] = gt.Field((), "bool")
    return gt.Store.create(fields, max_length=max_length, capacity=capacity, **options)


def record_episodes(store, lengths, seed=0, **options):
    """Episodes of those many actions; the first number of an observation is nowhere else."""
    rng = np.random.default_rng(seed)
    recorder = store.recorder(1, autoreset="disabled", zeros=["task"], **options)
    number = int(rng.integers(1000)) * 10_000

    def observation():
        nonlocal number
        number += 1
        return np.array([number, rng.normal()], np.float32)

    for length in lengths:
        recorder.reset(observation())
        end = rng.choice(["terminated", "truncated", "both", "cut"])
        for t in range(length):
            ends = t == length - 1
            recorder.step(
                observation(),
                action=int(rng.integers(1000)),
                reward=float(rng.normal()),
                terminated=bool(ends and end in ("terminated", "both")),
                truncated=bool(ends and end in ("truncated", "both")),
            )
        recorder.cut()


def rows_of(store, shard=0):
    """The steps of every row, by (shard, row number)."""
    keys = store.keys()
    batch, lengths = gt.fetch(store, keys, output="numpy"), store.status(keys)["length"]
    timed = [name for name, field in store.fields.items() if not field.per_row]
    return {(shard, int(row)): {name: batch[name][i, : lengths[i]] for name in timed} for i, row in enumerate(keys.row)}


def reference(row, t, n_step, gamma, frame_stack):
    """The slow loop over one transition."""
    last = len(row["reward"]) - 1
    reward, m = 0.0, 0
    while m < n_step and t + m < last:
        reward += gamma**m * float(row["reward"][t + m])
        m += 1
        if row["terminated"][t + m - 1]:
            break

    def stack(at):
        frames = [
            row["obs"][s] if s >= 0 else np.zeros_like(row["obs"][0]) for s in range(at - frame_stack + 1, at + 1)
        ]
        return frames[0] if frame_stack == 1 else np.stack(frames)

    terminated = bool(row["terminated"][t + m - 1])
    flag = row["truncated"][t + m - 1] if "truncated" in row else row["last"][t + m] and not terminated
    return {
        "obs": stack(t),
        "next_obs": stack(t + m),
        "action": row["action"][t],
        "reward": reward,
        "discount": 0.0 if terminated else gamma**m,
        "terminated": terminated,
        "truncated": bool(flag),
        "mask": [s >= 0 for s in range(t - frame_stack + 1, t + 1)],
    }


def check(batch, rows, n_step, gamma, frame_stack):
    shards = np.zeros(len(batch), int) if batch.keys.shard is None else batch.keys.shard
    for i in range(len(batch)):
        row, t = rows[int(shards[i]), int(batch.keys.row[i])], int(batch.start[i])
        wanted = reference(row, t, n_step, gamma, frame_stack)
        for name in ("obs", "next_obs", "action", "terminated", "truncated"):
            assert np.array_equal(batch[name][i], wanted[name]), name
        assert batch["reward"][i] == pytest.approx(wanted["reward"], rel=1e-5, abs=1e-5)
        assert batch["discount"][i] == pytest.approx(wanted["discount"], rel=1e-6)
        assert np.array_equal(batch.mask[i], wanted["mask"])


@pytest.mark.parametrize(
    ("n_step", "gamma", "frame_stack", "truncated", "over"),
    crossed(
        [(1, 0.99, 1, True), (3, 0.9, 1, False), (5, 0.99, 4, True), (1, 1.0, 3, False), (9, 0.5, 2, True)],
        ["rows", "steps"],
    ),
)
def test_every_transition_is_what_its_episode_says(over, n_step, gamma, frame_stack, truncated):
    rng = np.random.default_rng(n_step)
    with make_store(12, truncated=truncated) as store:
        record_episodes(store, rng.integers(1, 30, 1200))
        rows = rows_of(store)
        view = gt.Transitions(n_step=n_step, gamma=gamma, frame_stack=frame_stack)
        with gt.Replay(store, Uniform(seed=1, over=over), 256, view=view, output="numpy", prefetch=0) as replay:
            ends = 0
            for _ in range(4):
                batch = replay.sample()
                check(batch, rows, n_step, gamma, frame_stack)
                ends += int(batch["terminated"].sum())
                assert set(batch) >= {"obs", "next_obs", "action", "reward", "discount", "terminated", "truncated"}
                assert "last" not in batch
                assert batch["task"].shape == (256,)
            assert ends > 0
            assert replay.stats()["path"] == "native"


def test_views_of_one_window_where_no_row_ended_within_it():
    with make_store(200, 4) as store:
        record_episodes(store, [199])
        view = gt.Transitions(n_step=1, frame_stack=3)
        with gt.Replay(store, Uniform(seed=0), 4, view=view, output="numpy", prefetch=0) as replay:
            batch = replay.sample()
            assert batch["obs"].shape == batch["next_obs"].shape == (4, 3, 2)
            assert np.shares_memory(batch["obs"], batch["next_obs"])
            check(batch, rows_of(store), 1, 0.99, 3)


def test_rewards_before_a_transition_do_not_reach_it_whatever_they_are():
    with make_store(12) as store:
        recorder = store.recorder(1, autoreset="disabled", zeros=["task"])
        recorder.reset(np.zeros(2))
        for t in range(6):
            recorder.step(
                np.full(2, t + 1), action=0, reward=np.inf if t == 2 else 1.0, terminated=t == 5, truncated=False
            )
        with gt.Replay(
            store,
            gt.selection.Uniform(seed=0, over="steps"),
            256,
            view=gt.Transitions(n_step=3, gamma=0.5),
            prefetch=0,
            output="numpy",
        ) as replay:
            batch = replay.sample()
        expected = np.array([np.inf, np.inf, np.inf, 1.75, 1.5, 1.0])
        assert (batch["reward"] == expected[batch.start]).all() and set(batch.start) == set(range(6))


def test_tensors_and_chosen_fields():
    torch = pytest.importorskip("torch")
    with make_store(20) as store:
        record_episodes(store, [19] * 50)
        with gt.Replay(store, Uniform(seed=0), 32, fields=["obs"], view=gt.Transitions()) as replay:
            batch = replay.sample()
            assert set(batch) == {"obs", "next_obs", "reward", "discount", "terminated", "truncated"}
            assert all(isinstance(batch[name], torch.Tensor) for name in batch)
            assert batch["reward"].dtype == batch["discount"].dtype == torch.float32
            assert batch["terminated"].dtype == batch["truncated"].dtype == torch.bool


def frequencies(store, strategy, batches, size, view):
    counts = {}
    with gt.Replay(store, strategy, size, view=view, output="numpy", prefetch=0) as replay:
        for _ in range(batches):
            batch = replay.sample()
            for value in np.asarray(batch["obs"])[:, 0]:
                counts[float(value)] = counts.get(float(value), 0) + 1
            assert np.isnan(batch.probability).all()
    return counts


@pytest.mark.parametrize("max_length", [101, 1000], ids=["by refusal", "from a copy of the lengths"])
def test_over_steps_every_step_is_as_likely_as_any_other(max_length):
    """Half of the rows have 2 steps and half 30; in blocks of 1,000 steps nearly all draws are refused 63 times."""
    with make_store(max_length, 100) as store:
        record_episodes(store, [2, 30] * 20)
        counts = frequencies(store, Uniform(seed=3, over="steps"), 60, 1000, gt.Transitions(n_step=3))
        assert len(counts) == 20 * 32
        assert stats.chisquare(list(counts.values())).pvalue > 1e-4


def test_windows_over_steps_end_at_every_step_alike():
    with make_store(40, 100) as store:
        record_episodes(store, [1, 29] * 10)
        ends = {}
        with gt.Replay(store, Uniform(seed=0, over="steps"), 1000, window=1, output="numpy", prefetch=0) as replay:
            for _ in range(20):
                for value in replay.sample()["obs"][:, 0, 0]:
                    ends[float(value)] = ends.get(float(value), 0) + 1
        assert len(ends) == 10 * (2 + 30)
        assert stats.chisquare(list(ends.values())).pvalue > 1e-4


@pytest.mark.parametrize("max_length", [30, 2000], ids=["by refusal", "from a copy of the lengths"])
def test_draws_over_steps_are_those_of_the_slow_reference_to_the_bit(max_length):
    with make_store(max_length, 64) as store:
        record_episodes(store, np.random.default_rng(0).integers(1, 29, 60))
        keys = store.keys()
        order = np.argsort(keys.row)
        rows, steps = keys.row[order], store.status(keys)["length"].astype(int)[order] - 1

        def reference(number, seed, step):
            def bits(stream, attempt):
                return random_bits(seed, step, stream, np.array([number], np.uint32), attempt)[0]

            for attempt in range(63):
                at = below(bits(ROW_STREAM, attempt), len(rows))
                if below(bits(3, attempt), max_length - 1) < steps[at]:
                    break
            else:
                at = np.searchsorted(np.cumsum(steps), below(bits(ROW_STREAM, 63), int(steps.sum())), side="right")
            return int(rows[at]), below(bits(WINDOW_STREAM, 0), int(steps[at]))

        with gt.Replay(store, Uniform(seed=9, over="steps"), 40, view=gt.Transitions(), prefetch=0) as replay:
            for step in range(3):
                batch = replay.sample()
                found = list(zip(batch.keys.row.tolist(), batch.start.tolist(), strict=True))
                assert found == [reference(number, 9, step) for number in range(40)]


def test_the_same_seed_gives_the_same_transitions_and_resumes():
    with make_store(30) as store:
        record_episodes(store, [3, 20] * 40)
        view = gt.Transitions(n_step=4, frame_stack=2)

        def batches(replay, n):
            return [
                (b.start.tolist(), b.keys.row.tolist(), b["reward"].tolist())
                for b in (replay.sample() for _ in range(n))
            ]

        with replay_of(store, Uniform(over="steps"), 64, view=view, seed=5, output="numpy") as one:
            wanted = batches(one, 3)
            state = one.state_dict()
            later = batches(one, 2)
        with replay_of(store, Uniform(over="steps"), 64, view=view, seed=5, output="numpy", prefetch=0) as other:
            assert batches(other, 3) == wanted
        with replay_of(store, Uniform(over="steps"), 64, view=view, seed=5, output="numpy") as resumed:
            resumed.load_state_dict(state)
            assert batches(resumed, 2) == later


def test_only_published_steps_of_a_growing_row_are_seen():
    with make_store(50, 8) as store:
        recorder = store.recorder(1, autoreset="disabled", publish_every=5, zeros=["task"])
        recorder.reset(np.zeros(2))
        for t in range(1, 13):
            recorder.step(np.full(2, t), action=t, reward=1.0, terminated=False, truncated=False)
        view = gt.Transitions(n_step=3, gamma=1.0)
        with gt.Replay(store, Uniform(seed=0, over="steps"), 200, view=view, output="numpy", prefetch=0) as replay:
            batch = replay.sample()
            assert set(batch["obs"][:, 0].astype(int)) == set(range(9))
            assert batch["next_obs"].max() == 9
            assert np.array_equal(batch["reward"], np.minimum(3, 9 - batch.start))
            assert not batch["truncated"].any()


def test_rows_without_a_transition_are_never_drawn():
    with make_store(10) as store:
        lonely = {name: np.zeros((5, 10, *field.shape), field.numpy_dtype) for name, field in store.fields.items()}
        lonely["task"] = np.zeros(5, np.uint8)
        store.insert(lonely, lengths=np.ones(5, int))
        for strategy in (Uniform(seed=0), Uniform(seed=0, over="steps"), Prioritized(seed=0)):
            with (
                gt.Replay(store, strategy, 4, view=gt.Transitions(), prefetch=0) as replay,
                pytest.raises(EmptyStoreError),
            ):
                replay.sample()
        record_episodes(store, [1, 4])
        for strategy in (Uniform(seed=0), Uniform(seed=0, over="steps"), Prioritized(seed=0, beta=1.0)):
            with gt.Replay(store, strategy, 50, view=gt.Transitions(), output="numpy", prefetch=0) as replay:
                batch = replay.sample()
                check(batch, rows_of(store), 1, 0.99, 1)
                assert replay.update_priorities(batch.keys, np.ones(50)) == 0


def test_transitions_of_a_mixture_of_stores():
    with make_store(8) as one, make_store(8) as other:
        record_episodes(one, [7] * 30, seed=1)
        record_episodes(other, [2, 5] * 30, seed=2)
        mixture = Mixture([3, 1], [Uniform(seed=0, over="steps"), Prioritized(seed=1)])
        view = gt.Transitions(n_step=3)
        with gt.Replay([one, other], mixture, 64, view=view, output="numpy") as replay:
            batch = replay.sample()
            check(batch, {**rows_of(one), **rows_of(other, 1)}, 3, 0.99, 1)


def test_what_makes_no_transitions_is_refused():
    plain = {"obs": gt.Field((2,), "float32"), "reward": gt.Field((), "float32")}
    view = gt.Transitions()
    with gt.Store.create(plain, max_length=5, capacity=2) as store:
        with pytest.raises(FieldError, match="need 'terminated', but the store"):
            gt.Replay(store, Uniform(), 2, view=view)
        with pytest.raises(FieldError, match="'pixels'"):
            gt.Replay(store, Uniform(), 2, view=gt.Transitions(obs="pixels"))
    with make_store(5) as store:
        with pytest.raises(ArgumentError, match="n_step=5 needs rows of at least 6 steps"):
            gt.Replay(store, Uniform(), 2, view=gt.Transitions(n_step=5))
        with pytest.raises(FieldError, match="'speed'"):
            gt.Replay(store, Uniform(), 2, view=view, fields=["speed"])
        for bad in ({"window": 3}, {"pad": "right"}, {"inputs": ["obs"]}, {"device": "cuda"}):
            with pytest.raises(ArgumentError, match="view"):
                replay_of(store, Uniform(), 2, view=view, **bad)
        with pytest.raises(ArgumentError, match=r"geartrain\.Transitions"):
            gt.Replay(store, Uniform(), 2, view="transitions")
        with pytest.raises(ArgumentError, match="knows nothing of transitions"):
            gt.Replay(store, GroupSampling("task", 2), 2, view=view)
        with pytest.raises(ArgumentError, match="leave out device"):
            gt.Replay(store, Uniform(over="steps"), 2, view=view, device="cuda")
        gt.Replay(store, Fifo(), 2, view=view).close()
    for bad in ({"n_step": 0}, {"gamma": 1.5}, {"gamma": float("nan")}, {"frame_stack": 0}, {"n_step": 2.5}):
        with pytest.raises(ArgumentError):
            gt.Transitions(**bad)
    for bad in ({"over": "episodes"}, {"over": "steps", "replacement": False}, {"over": "steps", "stratified": True}):
        with pytest.raises(ArgumentError):
            Uniform(**bad)
    with pytest.raises(ArgumentError, match="only a Replay"):
        Uniform(over="steps").select(gt.selection.Candidates(np.ones(3, np.uint32)), 2, 0)


@pytest.mark.parametrize("name", ["truncated", "last"])
def test_ends_that_are_no_bools_are_refused(name):
    fields = recorded_fields({"obs": gt.Field((), "float32"), "reward": gt.Field((), "float32")})
    with gt.Store.create({**fields, name: gt.Field((), "uint8")}, max_length=4, capacity=8) as store:
        with pytest.raises(FieldError, match=f"'{name}' must be a bool a step"):
            gt.Replay(store, Uniform(), 2, view=gt.Transitions())
