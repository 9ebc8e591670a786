"""Rows of several episodes: transitions are to the bit those of the episodes that were given, and no other."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from crossed import crossed

import geartrain as gt
from geartrain.errors import ArgumentError, FieldError, SchemaError, SourceError
from geartrain.integrations import export_store
from geartrain.integrations.datasets.stored_rows import StoredRows
from geartrain.selection import Epochs, Prioritized, Uniform
from geartrain.store.recorder import recorded_fields

GAMMA = 0.9
SCALARS = {"reward": gt.Field((), "float32"), "action": gt.Field((), "int64")}
OBS = {"obs": gt.Field((2,), "float32")}
GOALS = {f"obs.{name}": gt.Field((1,), "float32") for name in ("achieved_goal", "desired_goal")}


def make_store(fields=OBS, *, name=(), max_length=17, capacity=400, **options):
    made = recorded_fields({**fields, **SCALARS}, share_rows=True, truncated=gt.Field((), "bool"))
    return gt.Store.create(*name, made, max_length=max_length, capacity=capacity, **options)


def record(store, mode, steps, n_envs=3, seed=0, publish_every=None):
    """Random episodes of every environment; returns them: observations, actions, rewards, terminated, truncated."""
    rng = np.random.default_rng(seed)
    goals = "obs" not in store.fields
    number = np.zeros(n_envs)
    episodes, current = [], [None] * n_envs

    def observe():
        nonlocal number
        number = number + 1
        return np.stack([1000 * number + np.arange(n_envs), np.full(n_envs, 7)], 1).astype(np.float32)

    def given(obs):
        return {"achieved_goal": obs[:, :1], "desired_goal": obs[:, 1:]} if goals else obs

    def begin(env, obs):
        current[env] = {"obs": [obs[env]], "action": [], "reward": [], "terminated": [], "truncated": []}

    def end(env):
        if current[env]["action"]:
            episodes.append({name: np.array(values) for name, values in current[env].items()})
        current[env] = None

    options = {"autoreset": mode, "publish_every": publish_every, "share_rows": True}
    with store.recorder(n_envs, **options) as recorder:
        first = observe()
        recorder.reset(given(first))
        for env in range(n_envs):
            begin(env, first)
        for _ in range(steps):
            ends = rng.random((2, n_envs)) < rng.choice([0.02, 0.2, 0.5])
            action, reward = rng.integers(99, size=n_envs), rng.normal(size=n_envs).astype(np.float32)
            obs, final = observe(), observe()
            finals = given(final) if mode == "same_step" else None
            live = np.array([each is not None for each in current])
            recorder.step(
                given(obs),
                action=action,
                reward=reward,
                terminated=ends[0],
                truncated=ends[1],
                final_obs=finals,
            )
            done = ends.any(0) & live
            for env in range(n_envs):
                if not live[env]:
                    begin(env, obs)
                    continue
                values = (final if mode == "same_step" and done[env] else obs)[env]
                for name, value in zip(
                    ("obs", "action", "reward", "terminated", "truncated"),
                    (values, action[env], reward[env], *ends[:, env]),
                    strict=True,
                ):
                    current[env][name].append(value)
                if done[env]:
                    end(env)
                    if mode == "same_step":
                        begin(env, obs)
            if mode == "disabled" and done.any():
                obs = observe()
                recorder.reset(given(obs), mask=done)
                for env in np.flatnonzero(done):
                    begin(env, obs)
        for env in range(n_envs):
            if current[env] is not None:
                end(env)
    return episodes


def by_observation(episodes):
    """Every transition's episode and step, by the first number of its observation, which is nowhere else."""
    return {episode["obs"][t, 0]: (episode, t) for episode in episodes for t in range(len(episode["action"]))}


def check_batch(batch, known, n_step, stack, max_length):
    """Each transition is its episode's; of one that goes on in another row, up to that row's end."""
    obs = batch["obs"] if stack > 1 else batch["obs"][:, None]
    after = batch["next_obs"] if stack > 1 else batch["next_obs"][:, None]
    mask = np.asarray(batch.mask).reshape(len(obs), stack)
    for i in range(len(obs)):
        episode, t = known[obs[i, -1, 0]]
        length = len(episode["action"])
        m = int(np.flatnonzero(episode["obs"][:, 0] == after[i, -1, 0])[0]) - t
        room = int(batch.length[i]) - 1 - int(batch.start[i])
        assert m == min(n_step, length - t, room)
        rewards = episode["reward"][t : t + m].astype(np.float64)
        assert batch["reward"][i] == np.float32(sum(GAMMA**k * reward for k, reward in enumerate(rewards)))
        assert batch["action"][i] == episode["action"][t]
        assert batch["terminated"][i] == episode["terminated"][t + m - 1]
        assert batch["truncated"][i] == episode["truncated"][t + m - 1]
        assert batch["discount"][i] == np.float32(0 if episode["terminated"][t + m - 1] else GAMMA**m)
        real = int(mask[i].sum())
        assert real <= t + 1
        assert real == min(stack, t + 1) or real == int(batch.start[i]) + 1  # what the row has of the episode
        assert mask[i, stack - real :].all()
        assert not obs[i, : stack - real].any()
        np.testing.assert_array_equal(obs[i, stack - real :], episode["obs"][t + 1 - real : t + 1])
        ahead = min(stack, real + m)
        np.testing.assert_array_equal(after[i, stack - ahead :], episode["obs"][t + m + 1 - ahead : t + m + 1])
        assert not after[i, : stack - ahead].any()


@pytest.mark.parametrize(
    ("n_step", "stack", "mode"), crossed([(1, 1), (1, 3), (3, 1), (5, 4)], ["next_step", "same_step", "disabled"])
)
def test_transitions_are_those_of_a_slow_reference(mode, n_step, stack):
    with make_store() as store:
        episodes = record(store, mode, 120, seed=n_step, publish_every=(None, 2)[stack > 1])
        assert len(episodes) > 25
        assert len(store) < len(episodes) / 2
        assert int(store.column("geartrain.episodes").max()) > 2
        known, seen = by_observation(episodes), set()
        view = gt.Transitions(n_step=n_step, gamma=GAMMA, frame_stack=stack)
        with gt.Replay(store, Uniform(seed=0, over="steps"), 512, view=view, output="numpy") as replay:
            for _ in range(5):
                batch = replay.sample()
                check_batch(batch, known, n_step, stack, store.max_length)
                seen.update(np.asarray(batch["obs"]).reshape(512, stack, 2)[:, -1, 0].tolist())
        assert len(seen) > 0.9 * len(known)
        assert store.stats()["torn"] == 0
        assert store.audit() == []


def test_steps_that_end_an_episode_have_no_priority():
    with make_store(priority_per="step", max_length=40) as store:
        episodes = record(store, "next_step", 400)
        known = by_observation(episodes)
        view = gt.Transitions(n_step=2, gamma=GAMMA)
        with gt.Replay(store, Prioritized(seed=0, beta=0.4), 256, view=view, output="numpy") as replay:
            for _ in range(8):
                batch = replay.sample()
                check_batch(batch, known, 2, 1, store.max_length)
                replay.update_priorities(batch.keys, np.full(256, 0.01))
            assert replay.stats()["redrawn"] == 0
        assert store.audit() == []


def test_a_step_is_one_call_to_the_store_marks_included():
    """A call after the one that records could fail, and the step would be there although it raised."""
    with make_store(priority_per="step", max_length=40) as store:
        record(store, "same_step", 100)
        assert store.stats()["priorities_updated"] == 0
        assert store.audit() == []


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_goals_are_of_the_same_episode(strategy):
    with make_store(GOALS) as store:
        episodes = record(store, "next_step", 300)
        known = by_observation(episodes)
        hindsight = gt.Hindsight(strategy, k=4, reward=lambda achieved, desired: (achieved == desired)[:, 0] - 1.0)
        view = gt.Transitions(hindsight=hindsight)
        with gt.Replay(store, Uniform(seed=0, over="steps"), 1024, view=view, output="numpy") as replay:
            batch = replay.sample()
        taken = 0
        for i in np.flatnonzero(batch["relabelled"]):
            episode, t = known[batch["obs.achieved_goal"][i, 0]]
            (at,) = np.flatnonzero(episode["obs"][:, 0] == batch["obs.desired_goal"][i, 0])
            last = min(len(episode["action"]), t + int(batch.length[i]) - 1 - int(batch.start[i]))
            assert {"future": t < at <= last, "final": at == last, "episode": 0 < at <= last}[strategy]
            taken += 1
        assert taken > 700


def test_fields_of_a_user_are_not_taken_for_it(tmp_path):
    mine = {"episodes": gt.Field((), "int32", per_row=True)}
    with gt.Store.create(recorded_fields({**OBS, **SCALARS, **mine}), max_length=9, capacity=9) as store:
        rows = {name: np.zeros((4, 9, *field.shape), field.dtype) for name, field in store.fields.items()}
        rows["episodes"] = np.arange(4, dtype=np.int32)
        rows["last"][:, ::4] = True  # which means what the user likes
        keys = store.insert(rows)
        assert gt.fetch(store, keys, window=3, ends=np.full(4, 5), output="numpy")["obs"].shape == (4, 3, 2)
        with gt.Replay(store, Uniform(seed=0), 8, window=4, output="numpy") as replay:
            assert set(replay.sample()["episodes"].tolist()) <= {0, 1, 2, 3}
        with gt.Replay(store, Uniform(seed=0, over="steps"), 64, view=gt.Transitions(), output="numpy") as replay:
            assert {0, 4} < set(replay.sample().start.tolist())
            assert replay.stats()["redrawn"] == 0
        assert export_store(store, tmp_path / "rows.npz", progress=False).rows == 4
    both = recorded_fields({**OBS, **SCALARS, **mine}, share_rows=True)
    assert recorded_fields(both, share_rows=True) == both
    assert {"episodes", "geartrain.episodes"} < set(both)
    with pytest.raises(FieldError, match="another name"):
        recorded_fields(both)
    with pytest.raises(FieldError, match="another name"):
        recorded_fields({"geartrain.episodes": gt.Field((), "int64")}, share_rows=True)


def pieces_of(rows, lengths):
    """Every episode of rows, or what of a longer one is in its row: field by field, slow and obvious."""
    found = []
    for row, length in enumerate(lengths.tolist()):
        first = 0
        for step in range(length):
            if rows["last"][row, step] or step == length - 1:
                piece = {name: values[row, first : step + 1] for name, values in rows.items() if values.ndim > 1}
                found.append({**piece, "row": row})
                first = step + 1
    return found


def test_exports_part_rows_where_episodes_end(tmp_path):
    with make_store() as store:
        episodes = record(store, "next_step", 60)
        keys = store.keys()
        rows, lengths = gt.fetch(store, keys, output="numpy"), store.status(keys)["length"]
        pieces = pieces_of(rows.fields, lengths)
        assert len(keys) < len(pieces)
        whole = rows["geartrain.episodes"] - rows["last"].sum(1)  # of which the recorder's end left nothing
        assert set(whole.tolist()) <= {0, 1}
        store.save(tmp_path / "kept")
        live = export_store(store, tmp_path / "live.npz", metadata=True, progress=False)
        folder = export_store(store, tmp_path / "folder", format="npy", progress=False)
        parquet = export_store(store, tmp_path / "rows.parquet", progress=False)
        sequences = store.status(keys)["sequence"]
        with contextlib.closing(StoredRows(store)) as stored, contextlib.closing(StoredRows(tmp_path / "kept")) as kept:
            assert stored.episodes() == kept.episodes() == rows["geartrain.episodes"].sum()
    saved = export_store(tmp_path / "kept", tmp_path / "saved.npz", progress=False)
    for report in (live, folder, parquet, saved):
        assert (report.rows, report.steps) == (len(pieces), int(lengths.sum()))
        assert report.left_out == {"geartrain.episodes": "each episode is a trajectory"}
    for name in ("live", "saved"):
        with np.load(tmp_path / f"{name}.npz") as found:
            assert found["ends"].tolist() == np.cumsum([len(piece["obs"]) for piece in pieces]).tolist()
            for field in ("obs", "action", "reward", "last", "terminated", "truncated"):
                np.testing.assert_array_equal(found[field], np.concatenate([piece[field] for piece in pieces]))
            if name == "live":
                assert found["row.sequence"].tolist() == [sequences[piece["row"]] for piece in pieces]
    known, seen = by_observation(episodes), []
    for piece in pieces:
        for t in range(len(piece["obs"]) - 1):
            episode, at = known[piece["obs"][t, 0]]
            assert piece["action"][t] == episode["action"][at]
            np.testing.assert_array_equal(piece["obs"][t + 1], episode["obs"][at + 1])
            seen.append(piece["obs"][t, 0])
    assert sorted(seen) == sorted(known)
    with make_store(capacity=2) as store:
        record(store, "same_step", 5, n_envs=1)
        with pytest.raises(SourceError, match=r"geartrain\.episodes"):
            export_store(store, tmp_path / "out.npz", fields=["geartrain.episodes"], progress=False)


def test_short_episodes_fill_their_rows():
    with make_store(max_length=101, capacity=60) as store:
        episodes = record(store, "same_step", 1500, n_envs=2)
        steps = sum(len(episode["action"]) for episode in episodes)
        used = len(store) * 101
        assert int(store.status()["length"].sum()) > 0.95 * used
        assert int(store.status()["length"].sum()) >= steps + len(
            episodes
        )  # each has one step more, and is there whole


def test_a_checkpoint_keeps_the_episodes(tmp_path):
    with make_store() as store:
        known = by_observation(record(store, "next_step", 200))
        store.save(tmp_path / "kept")
    with gt.Store.load(tmp_path / "kept") as store:
        view = gt.Transitions(n_step=3, gamma=GAMMA)
        with gt.Replay(store, Uniform(seed=0, over="steps"), 256, view=view, output="numpy") as replay:
            check_batch(replay.sample(), known, 3, 1, store.max_length)


def test_a_journal_keeps_the_episodes(tmp_path, store_name):
    kept = {"name": [store_name()], "journal": tmp_path / "journal"}
    with make_store(**kept) as store:
        known = by_observation(record(store, "next_step", 200))
        store.sync_journal()
        rows = len(store)
    with make_store(**kept) as store:
        assert len(store) == rows
        view = gt.Transitions(n_step=3, gamma=GAMMA)
        with gt.Replay(store, Uniform(seed=0, over="steps"), 256, view=view, output="numpy") as replay:
            check_batch(replay.sample(), known, 3, 1, store.max_length)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_thousands_of_episodes_are_those_of_a_slow_reference(mode):
    with make_store(max_length=31, capacity=4000) as store:
        episodes = record(store, mode, 4000)
        assert len(episodes) > 1500
        known = by_observation(episodes)
        for n_step, stack in ((1, 1), (4, 3)):
            view = gt.Transitions(n_step=n_step, gamma=GAMMA, frame_stack=stack)
            with gt.Replay(store, Uniform(seed=1, over="steps"), 512, view=view, output="numpy") as replay:
                for _ in range(20):
                    check_batch(replay.sample(), known, n_step, stack, store.max_length)
        assert store.audit() == []


def test_what_would_cross_episodes_is_refused():
    with make_store() as store:
        record(store, "next_step", 50)
        with pytest.raises(ArgumentError, match="several episodes"):
            gt.Replay(store, Uniform(), 4)
        for strategy in (Uniform(), Prioritized(), Epochs()):
            with pytest.raises(ArgumentError, match="several episodes"):
                gt.Replay(store, strategy, 4, view=gt.Transitions())
        with pytest.raises(ArgumentError, match="share_rows is"):
            store.recorder(1, share_rows=1)
    with gt.Store.create(recorded_fields({**OBS, **SCALARS}), max_length=9, capacity=9) as store:
        with pytest.raises(FieldError, match=r"geartrain\.episodes"):
            store.recorder(1, share_rows=True)
    with make_store(max_times_sampled=1) as store, pytest.raises(SchemaError, match="share_rows"):
        store.recorder(1, share_rows=True)
