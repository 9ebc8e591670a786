"""Recorders: every environment's episodes are in the store as they happened, whatever its autoreset mode."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from crossed import crossed
from recorded_steps import flags, rows_of, store_of

import geartrain as gt
from geartrain.errors import (
    ArgumentError,
    CallCancelledError,
    FieldError,
    SchemaError,
    StoreClosedError,
    StoreFullError,
)
from geartrain.store.recorder import recorded_fields

gym = pytest.importorskip("gymnasium")
AutoresetMode, SyncVectorEnv = gym.vector.AutoresetMode, gym.vector.SyncVectorEnv

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


class Wander(gym.Env):
    """Episodes of random lengths, ended in either way; keeps what has really happened in `episodes`."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Discrete(1000)

    def __init__(self, longest, seed):
        self._rng = np.random.default_rng(seed)
        self._longest = longest
        self.episodes = []

    def reset(self, *, seed=None, options=None):
        self._left = int(self._rng.integers(1, self._longest + 1))
        self._now = {"obs": [self._rng.normal(size=3)], "action": [], "reward": [], "end": ""}
        self.episodes.append(self._now)
        return self._now["obs"][0].copy(), {}

    def step(self, action):
        assert not self._now["end"]
        self._left -= 1
        end = "" if self._left else self._rng.choice(["terminated", "truncated", "both"])
        self._now["action"].append(int(action))
        self._now["reward"].append(float(self._rng.normal()))
        self._now["obs"].append(self._rng.normal(size=3))
        self._now["end"] = end
        flags = end in ("terminated", "both"), end in ("truncated", "both")
        return self._now["obs"][-1].copy(), self._now["reward"][-1], *flags, {}


def expected_rows(episode, max_length, overlap):
    """The slow reference: an episode cut into rows of at most max_length - 1 actions."""
    total, first, rows = len(episode["action"]), 0, []
    while True:
        n = min(total - first, max_length - 1)
        fills = n == max_length - 1 and not (episode["end"] and first + n == total)
        if n:
            ends = first + n == total and episode["end"]
            rows.append(
                {
                    "obs": np.array(episode["obs"][first : first + n + 1], np.float32),
                    "action": [*episode["action"][first : first + n], 0],
                    "reward": np.array([*episode["reward"][first : first + n], 0], np.float32),
                    "terminated": [False] * (n - 1) + [ends in ("terminated", "both"), False],
                    "truncated": [False] * (n - 1) + [ends in ("truncated", "both"), False],
                    "last": [False] * n + [True],
                    "episode_return": sum(episode["reward"][first + (overlap if first else 0) : first + n]),
                }
            )
        if not fills:
            return rows
        first += n - overlap
        if first + overlap == total and overlap == 0:
            return rows


def record(envs, recorder, steps, rng, check=None):
    """Acts at random in a vector environment, as its mode wants it."""
    disabled = envs.metadata["autoreset_mode"] == AutoresetMode.DISABLED
    obs, _ = envs.reset()
    recorder.reset(obs)
    completed = []
    for number in range(steps):
        actions = rng.integers(0, 1000, envs.num_envs)
        obs, reward, terminated, truncated, info = envs.step(actions)
        keys = recorder.step(
            obs,
            action=actions,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            final_obs=info.get("final_obs"),
            version=number,
        )
        completed += [] if keys is None else list(keys)
        if check is not None:
            check()
        if disabled and (terminated | truncated).any():
            obs, _ = envs.reset(options={"reset_mask": terminated | truncated})
            recorder.reset(obs, mask=terminated | truncated, version=number)
    return completed


@pytest.mark.parametrize(
    ("n", "longest", "max_length", "overlap", "publish_every", "mode"),
    crossed(
        [
            (1, 6, 20, 0, None),
            (3, 9, 5, 0, None),
            (4, 12, 6, 3, 2),
            (16, 5, 4, 1, 1),
            (2, 1, 2, 0, 1),
            (5, 30, 8, 6, 3),
        ],
        MODES,
    ),
)
def test_every_episode_is_recorded_as_it_happened(mode, n, longest, max_length, overlap, publish_every):
    made = [Wander(longest, seed) for seed in range(n)]
    envs = SyncVectorEnv([lambda one=one: one for one in made], autoreset_mode=mode)
    for one in made:
        one.episodes.clear()
    with store_of(max_length, overlap=overlap > 0) as store:
        recorder = store.recorder(n, autoreset=mode, overlap=overlap, publish_every=publish_every)
        completed = record(envs, recorder, 150, np.random.default_rng(0))
        assert len(completed) == recorder.rows
        recorder.close()
        expected = [
            row for one in made for episode in one.episodes for row in expected_rows(episode, max_length, overlap)
        ]
        found = {row["obs"][0].tobytes(): row for row in rows_of(store)}
        assert len(found) == len(store) == len(expected) == recorder.rows
        for row in expected:
            got = found[row["obs"][0].tobytes()]
            for name in ("obs", "action", "reward", "terminated", "truncated", "last"):
                assert np.array_equal(got[name], row[name]), name
            if publish_every is None:  # a published row's value was fixed before it was known
                assert got["episode_return"] == pytest.approx(row["episode_return"], rel=1e-5, abs=1e-5)
            versions = got["step_version"][:-1]
            assert (np.diff(versions) == 1).all()
        assert store.audit() == []
        assert store.stats()["writing"] == store.stats()["open"] == 0
    envs.close()


def test_unfinished_rows_are_published_every_few_steps():
    with store_of(20) as store:
        recorder = store.recorder(2, publish_every=3, autoreset="disabled")
        recorder.reset(np.zeros((2, 3), np.float32))
        for step in range(1, 11):
            recorder.step(np.full((2, 3), step), action=[step] * 2, reward=[0.5] * 2, **flags(2))
            status = store.status()
            assert status["length"].tolist() == [step // 3 * 3] * (2 if step >= 3 else 0)
            assert [row["action"].tolist() for row in rows_of(store)] == [list(range(1, step // 3 * 3 + 1))] * len(
                store
            )
        del recorder  # published steps stay
        assert store.status()["length"].tolist() == [9, 9]
        assert store.stats()["open"] == 0


def test_a_cut_of_a_wrong_mask_loses_no_episode():
    with store_of(6) as store:
        recorder = store.recorder(2, autoreset="disabled")
        recorder.reset(np.zeros((2, 3)))
        recorder.step(np.ones((2, 3)), action=np.zeros(2, np.int32), reward=np.ones(2), **flags(2))
        with pytest.raises(SchemaError, match="mask"):
            recorder.cut(np.zeros(3, bool))
        assert len(recorder.cut()) == 2


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"reward": np.ones(3)}, SchemaError, r"'reward' of 2 environments has shape \(3,\); the store takes \(2,\)"),
        ({"action": np.ones(2)}, SchemaError, "'action' holds int32, found float64"),
        ({"obs": np.ones((2, 4))}, SchemaError, r"has shape \(2, 4\); the store takes \(2, 3\)"),
        ({"terminated": np.zeros(2)}, SchemaError, r"`terminated` must be bool \(2,\)"),
        ({"truncated": np.zeros(3, bool)}, SchemaError, r"found bool \(3,\)"),
        ({"mask": np.zeros(1, bool)}, SchemaError, r"`mask` must be bool \(2,\)"),
        ({"speed": np.zeros(2)}, FieldError, r"missing \[\], unknown \['speed'\]"),
        ({"final_obs": np.zeros((2, 3))}, ArgumentError, "for autoreset='same_step'"),
        ({"obs": {"obs": np.zeros((2, 3)), "x": 0}}, FieldError, "the observation has obs, x"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_recorded(change, error, words):
    with store_of(4) as store:
        recorder = store.recorder(2)
        recorder.reset(np.zeros((2, 3)))
        good = {"obs": np.ones((2, 3)), "action": np.ones(2, int), "reward": np.ones(2), **flags(2)}
        with pytest.raises(error, match=words):
            recorder.step(**{**good, **change})
        with pytest.raises(FieldError, match=r"missing \['action'\]"):
            recorder.step(**{name: value for name, value in good.items() if name != "action"})
        with pytest.raises(FieldError, match=r"missing \['action'\], unknown \['act'\]"):
            recorder.step(**{"act" if name == "action" else name: value for name, value in good.items()})
        recorder.step(**{**good, **flags(2, [0, 1])})
        assert [row["obs"].tolist() for row in rows_of(store)] == [[[0] * 3, [1] * 3]] * 2


def test_a_recorder_that_does_not_fit_its_store_is_refused():
    plain = {"obs": gt.Field((3,), "float32")}
    with gt.Store.create(plain, max_length=4, capacity=8) as store, pytest.raises(FieldError, match="lacks terminated"):
        store.recorder(2)
    with (
        gt.Store.create(recorded_fields({"x": gt.Field((), "float32")}), max_length=4, capacity=8) as store,
        pytest.raises(FieldError, match="say which are observations"),
    ):
        store.recorder(2)
    wrong = recorded_fields(plain, truncated=gt.Field((), "uint8"))
    with gt.Store.create(wrong, max_length=4, capacity=8) as store, pytest.raises(FieldError, match="'truncated'"):
        store.recorder(2)
    with gt.Store.create(recorded_fields(plain), max_length=4, capacity=8, max_times_sampled=1) as store:
        with pytest.raises(SchemaError, match="leave out publish_every"):
            store.recorder(2, publish_every=1)
        with pytest.raises(SchemaError, match="need at least 10 rows, the store has 8"):
            store.recorder(5)
        for bad in ({"overlap": 3}, {"publish_every": 0}, {"n_envs": 0}, {"autoreset": "always"}, {"overlap": -1}):
            with pytest.raises(ArgumentError):
                store.recorder(**bad)
        with pytest.raises(FieldError, match="no field 'y'"):
            store.recorder(2, obs=["y"])


def test_an_environment_without_an_episode_is_named():
    with store_of(4) as store:
        recorder = store.recorder(2, autoreset="disabled")
        step = {"obs": np.ones((2, 3)), "action": np.ones(2, int), "reward": np.ones(2)}
        recorder.reset(np.zeros((2, 3)), mask=np.array([True, False]))
        assert recorder.in_episode(0)
        assert not recorder.in_episode(1)
        with pytest.raises(SchemaError, match="environment 1 is in no episode"):
            recorder.step(**step, **flags(2))
        recorder.step(**step, **flags(2, [0]), mask=np.array([True, False]))
        with pytest.raises(SchemaError, match="environment 0 is in no episode"):
            recorder.step(**step, **flags(2))
        same = store.recorder(1, autoreset="same_step")
        same.reset(np.zeros(3))
        with pytest.raises(SchemaError, match="final_obs"):
            same.step(np.ones(3), action=1, reward=1.0, terminated=True, truncated=False)
        with pytest.raises(SchemaError, match="no final observation"):
            same.step(np.ones(3), action=1, reward=1.0, terminated=True, truncated=False, final_obs=[None])


def test_a_full_store_leaves_the_step_to_be_given_again():
    with store_of(4, capacity=4) as store:
        recorder = store.recorder(2)
        recorder.reset(np.zeros((2, 3)))
        step = {"obs": np.ones((2, 3)), "action": np.ones(2, int), "reward": np.ones(2)}
        recorder.step(**step, **flags(2, [0, 1]))
        others = store.rows(4)
        with pytest.raises(StoreFullError):
            recorder.step(**step, **flags(2))  # begins two episodes
        others.abandon()
        recorder.step(**step, **flags(2))
        recorder.step(**step, **flags(2, [0, 1]))
        assert recorder.rows == 4
        assert store.audit() == []


def test_the_rate_limiter_holds_back_rows_and_the_step_can_be_given_again():
    with store_of(4) as store:
        store.limiter.set(samples_per_insert=1, min_size_to_sample=1, error_buffer=2)
        recorder = store.recorder(1, autoreset="disabled")
        step = {"obs": np.ones(3), "action": 1, "reward": 1.0, "terminated": True, "truncated": False}
        store.limiter.stopping = lambda: True
        rows = 0
        with pytest.raises(CallCancelledError):
            while True:
                recorder.reset(np.zeros(3))
                recorder.step(**step)
                rows += 1
        assert rows == recorder.rows == store.limiter.state().inserts == len(store)
        store.limiter.off()
        recorder.step(**step)
        assert len(store) == rows + 1
        recorder.reset(np.zeros(3))
        recorder.step(**{**step, "terminated": False})
        store.limiter.set(samples_per_insert=1, min_size_to_sample=1, error_buffer=1, afresh=True)
        store.limiter.admit_inserts(1, timeout_s=0)
        store.limiter.admit_inserts(1, timeout_s=0)
        with pytest.raises(CallCancelledError):
            recorder.cut()
        assert store.stats()["writing"] == 0


def test_rows_of_a_recorder_that_is_gone_come_back():
    with store_of(4) as store:
        recorder = store.recorder(2)
        recorder.reset(np.zeros((2, 3)))
        assert store.stats()["writing"] == 2
        with pytest.raises(ZeroDivisionError), recorder:
            recorder.step(np.ones((2, 3)), action=[1, 2], reward=np.ones(2), **flags(2))
            _ = 1 / 0
        assert len(store) == 2  # the steps that were made are kept
        recorder = store.recorder(2)
        recorder.reset(np.zeros((2, 3)))
        del recorder
        assert store.stats()["writing"] == 0
        late = store.recorder(2)
        late.reset(np.zeros((2, 3)))
    with pytest.raises(StoreClosedError):
        late.step(np.ones((2, 3)), action=[1, 2], reward=np.ones(2), **flags(2))


def test_a_forked_child_does_not_write_into_its_parents_rows():
    with store_of(4) as store:
        recorder = store.recorder(1, autoreset="disabled")
        recorder.reset(np.zeros(3))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                recorder.step(np.ones(3), action=1, reward=1.0, terminated=True, truncated=False)
            except StoreClosedError:
                del recorder
                with store.recorder(1, autoreset="disabled") as own:
                    own.reset(np.zeros(3))
                    own.step(np.ones(3), action=2, reward=1.0, terminated=True, truncated=False)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        recorder.step(np.ones(3), action=3, reward=1.0, terminated=True, truncated=False)
        assert sorted(int(row["action"][0]) for row in rows_of(store)) == [2, 3]
        store.reap()
        assert store.audit() == []


def test_two_threads_at_once_are_refused_or_one_after_the_other():
    with store_of(50, capacity=64) as store:
        recorder = store.recorder(2, autoreset="disabled")
        recorder.reset(np.zeros((2, 3)))
        failures = []

        def act():
            for _ in range(300):
                try:
                    recorder.step(np.ones((2, 3)), action=[1, 1], reward=[1, 1], **flags(2))
                except SchemaError as error:
                    if "two threads" not in str(error):
                        failures.append(error)

        threads = [threading.Thread(target=act) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        recorder.close()
        assert not failures
        assert store.audit() == []


def test_rows_of_64_steps_take_at_most_1_1_times_the_data(store_name):
    """Episodes of 1 to 1,000 steps alike, SAC's shapes, metadata and all: a full store's bytes by its data."""
    fields = recorded_fields(
        {"obs": gt.Field((17,), "float32"), "action": gt.Field((6,), "float32"), "reward": gt.Field((), "float32")},
        truncated=gt.Field((), "bool"),
    )
    n, rng = 100, np.random.default_rng(0)
    data = 17 * 4 + 6 * 4 + 4 + 1 + 1
    with gt.Store.create(store_name(), fields, max_length=64, capacity_steps=320_000) as store:
        recorder = store.recorder(n, autoreset="same_step")
        zeros = np.zeros((n, 17), np.float32)
        recorder.reset(zeros)
        action, reward, no = np.zeros((n, 6), np.float32), np.zeros(n, np.float32), np.zeros(n, bool)
        ends = rng.integers(1, 1001, n)
        for _ in range(5000):
            ends -= 1
            over = ends == 0
            recorder.step(zeros, action=action, reward=reward, terminated=over, truncated=no, final_obs=zeros)
            ends[over] = rng.integers(1, 1001, int(over.sum()))
            if store.stats()["evicted"]:
                break
        assert store.stats()["evicted"]
        per_row = store.nbytes / store.capacity  # those being written are not counted
        steps = store.status()["length"].astype(np.int64) - 1
        found = per_row * len(steps) / (steps.sum() * data)
    assert found <= 1.1


def test_steps_of_nothing_and_priorities_beyond_a_double_are_refused():
    fields = recorded_fields({"obs": gt.Field((1,), "float32"), "reward": gt.Field((), "float32")})
    with gt.Store.create(fields, max_length=4, capacity=4) as store, store.recorder(1) as recorder:
        obs, flags = np.zeros((1, 1), np.float32), {"terminated": False, "truncated": False}
        with pytest.raises(ArgumentError, match="begins with an observation"):
            recorder.reset(None)
        recorder.reset(obs)
        for refused in (
            lambda: recorder.step(None, reward=0.0, **flags),
            lambda: recorder.step(obs, reward=0.0, terminated=None, truncated=False),
            lambda: recorder.record(obs, 5, False, False),
            lambda: recorder.record(obs, None, False, False),
            lambda: setattr(recorder, "priority", 10**400),
        ):
            with pytest.raises(ArgumentError):
                refused()
        recorder.step(obs, reward=0.0, **flags)
