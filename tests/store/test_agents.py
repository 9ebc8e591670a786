"""Agents that come and go: each one's life is an episode, whoever else is there."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import geartrain as gt
from geartrain.errors import ArgumentError, FieldError, SchemaError, StoreFullError, WaitTimeoutError
from geartrain.store.recorder import recorded_fields

AGENTS = "abcd"


def make_store(capacity=60, max_length=6, **options):
    fields = {
        "obs.at": gt.Field((2,), "float32"), "obs.mine": gt.Field((), "int64"),
        "action": gt.Field((), "int64"), "reward": gt.Field((), "float32"),
    }  # fmt: skip
    truncated = gt.Field((), "bool")
    return gt.Store.create(
        recorded_fields(fields, truncated=truncated), max_length=max_length, capacity=capacity, **options
    )


class World:
    """A parallel environment as PettingZoo has them: agents are born, die, and vanish, by a seed. Its observations are
    unique numbers; `lives` are all episodes, the slow way."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.agents = []
        self.count = 0
        self.lives = []
        self.now = {}

    def observe(self):
        self.count += 1
        return {"at": np.array([self.count, -self.count], np.float64), "mine": self.count}

    def reset(self):
        for life in self.now.values():
            self.lives.append(life)
        self.agents = [agent for agent in AGENTS if self.random.random() < 0.6] or ["a"]
        seen = {agent: self.observe() for agent in self.agents}
        self.now = {agent: {"obs": [each["mine"]], "steps": []} for agent, each in seen.items()}
        return seen

    def step(self, actions):
        assert set(actions) == set(self.agents)
        seen, reward, ends, cuts = {}, {}, {}, {}
        for agent in self.agents:
            life = self.now[agent]
            fate = self.random.random()
            if fate < 0.08:  # no longer observed, without a word
                self.lives.append(self.now.pop(agent))
                continue
            seen[agent], reward[agent] = self.observe(), float(self.count) / 2
            ends[agent], cuts[agent] = bool(fate < 0.2), bool(0.15 < fate < 0.25)
            life["obs"].append(seen[agent]["mine"])
            life["steps"].append((actions[agent], reward[agent], ends[agent], cuts[agent]))
            if ends[agent] or cuts[agent]:
                self.lives.append(self.now.pop(agent))
        for agent in AGENTS:
            if agent not in self.agents and self.random.random() < 0.2:
                seen[agent] = self.observe()
                ends[agent] = cuts[agent] = False
                if self.random.random() < 0.1:  # over before it acts
                    ends[agent] = True
                else:
                    self.now[agent] = {"obs": [seen[agent]["mine"]], "steps": []}
        self.agents = list(self.now)
        return seen, reward, ends, cuts


def lives_of(world, max_length, overlap=0):
    """Rows as a recorder writes them: a life in pieces of so many actions."""
    rows = Counter()
    for life in [*world.lives, *world.now.values()]:
        at = 0
        while at < len(life["steps"]):
            some = life["steps"][at : at + max_length - 1]
            rows[tuple(life["obs"][at : at + len(some) + 1]), tuple(some)] += 1
            at += len(some)
    return rows


def rows_of(store):
    batch = gt.fetch(store, store.keys(), output="numpy")
    found = Counter()
    for i, length in enumerate(batch.length.tolist()):
        obs = batch["obs.mine"][i, :length].tolist()
        assert batch["obs.at"][i, :length].tolist() == [[each, -each] for each in obs]
        assert batch["last"][i, :length].tolist() == [False] * (length - 1) + [True]
        names = ("action", "reward", "terminated", "truncated")
        steps = zip(*(batch[name][i, : length - 1].tolist() for name in names), strict=True)
        found[tuple(obs), tuple(steps)] += 1
    return found


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    steps=st.integers(1, 25),
    resets=st.integers(0, 2),
    publish_every=st.sampled_from([None, 1, 3]),
)
def test_each_life_is_in_rows_of_its_own(seed, steps, resets, publish_every):
    world = World(seed)
    with make_store(400) as store:
        keys = []
        with store.agent_recorder(len(AGENTS), publish_every=publish_every) as recorder:
            for _ in range(resets + 1):
                keys.append(recorder.reset(world.reset()))
                for _ in range(steps):
                    actions = {agent: int(world.random.integers(5)) for agent in world.agents}
                    seen, reward, ends, cuts = world.step(actions)
                    if seen or recorder.agents:
                        keys.append(recorder.step(seen, action=actions, reward=reward, terminated=ends, truncated=cuts))
                    assert sorted(recorder.agents) == sorted(world.agents)
            keys.append(recorder.cut())
            rows = recorder.rows
        assert recorder.agents == [] and rows_of(store) == lives_of(world, store.max_length)
        told = gt.Keys.join([each for each in keys if each is not None])
        assert len(told) == rows == len(store) and set(told.row.tolist()) == set(store.keys().row.tolist())
        assert store.audit() == []


def test_transitions_never_go_from_one_agent_to_another():
    world = World(3)
    with make_store(400, max_length=30) as store, store.agent_recorder(4) as recorder:
        for _ in range(12):
            recorder.reset(world.reset())
            for _ in range(15):
                actions = dict.fromkeys(world.agents, 1)
                seen, reward, ends, cuts = world.step(actions)
                recorder.step(seen, action=actions, reward=reward, terminated=ends, truncated=cuts)
        recorder.cut()
        following = {}
        for life in [*world.lives, *world.now.values()]:
            following |= dict(zip(life["obs"], life["obs"][1:], strict=False))
        strategy = gt.selection.Epochs(over="steps")
        with gt.Replay(store, strategy, 32, view=gt.Transitions(), output="numpy") as replay:
            pairs = [
                pair
                for batch in replay
                for pair in zip(batch["obs.mine"].tolist(), batch["next_obs.mine"].tolist(), strict=True)
            ]
        assert dict(pairs) == following and len(pairs) == len(following) > 100


def test_a_step_that_is_refused_can_be_given_again():
    with make_store(6, max_length=9) as store, store.agent_recorder(3) as recorder:
        one = {"at": np.zeros(2), "mine": 0}
        recorder.reset({"a": one, "b": one})
        held = [store.row() for _ in range(4)]
        more = {"a": {"at": np.array([1, -1]), "mine": 1}, "b": {"at": np.array([1, -1]), "mine": 1}, "c": one}
        flags = {"terminated": dict.fromkeys("ab", False), "truncated": dict.fromkeys("ab", False)}
        values = {"action": {"a": 1, "b": 2}, "reward": {"a": 1.0, "b": 2.0}}
        for _ in range(3):
            with pytest.raises(StoreFullError):
                recorder.step(more, **flags, **values)
            assert recorder.agents == ["a", "b"]
        held.pop().abandon()
        gone = {agent: more[agent] for agent in "bc"}
        keys = recorder.step(gone, **flags, **values)
        assert recorder.agents == ["b", "c"] and keys is None  # the one that is gone had no action yet
        for row in held:
            row.abandon()
        recorder.cut()
        assert rows_of(store) == Counter({((0, 1), ((2, 2.0, False, False),)): 1})


def test_rows_of_agents_that_are_gone_are_admitted_or_all_are_given_back(monkeypatch):
    with make_store() as store, store.agent_recorder(2) as recorder:
        one = {"at": np.zeros(2), "mine": 0}
        recorder.reset({"a": one, "b": one})
        no = dict.fromkeys("ab", False)
        values = {"action": dict.fromkeys("ab", 0), "reward": dict.fromkeys("ab", 0.0)}
        recorder.step({"a": one, "b": one}, terminated=no, truncated=no, **values)
        store.limiter.set(min_size_to_sample=1, samples_per_insert=1.0, error_buffer=1.0)
        admit = gt.RateLimiter.admit_inserts
        monkeypatch.setattr(gt.RateLimiter, "admit_inserts", lambda self, n: admit(self, n, 0.01))
        with pytest.raises(WaitTimeoutError):
            for _ in range(3):
                admit(store.limiter, 1, 0.01)
        with pytest.raises(WaitTimeoutError):
            recorder.step({"a": one}, terminated=no, truncated=no, **values)
        assert recorder.agents == [] and len(store) == 0


def test_what_is_no_step_of_agents_is_refused():
    one = {"at": np.zeros(2), "mine": 0}
    flags = {"terminated": {"a": False}, "truncated": {"a": False}}
    values = {"action": {"a": 1}, "reward": {"a": 1.0}}
    with make_store() as store:
        with pytest.raises(ArgumentError, match="leave out autoreset"):
            store.agent_recorder(2, autoreset="next_step")
        with pytest.raises(ArgumentError, match="agents must be at least 1"):
            store.agent_recorder(0)
        with store.agent_recorder(2) as recorder:
            with pytest.raises(ArgumentError, match="the observation of at least one agent, found none"):
                recorder.reset({})
            recorder.reset({"a": one})
            for observations, changed, error, match in (
                ([one], {}, ArgumentError, "obs must be a dict by agent, found \\["),
                ({"a": one}, {"reward": 1.0}, ArgumentError, "reward must be a dict by agent, found 1.0"),
                ({"a": one}, {"reward": {"b": 1.0}}, FieldError, "agent 'a' acted but has no 'reward'"),
                ({"a": one}, {"terminated": {}}, FieldError, "acted but has no 'terminated'"),
                *(
                    ({"a": one}, {"terminated": {"a": flag}}, SchemaError, "'terminated' of agent 'a' must be a bool")
                    for flag in ([True, False], "False", b"", 0, 1.0, float("nan"), np.datetime64("now"), {})
                ),
                ({"a": one}, {"speed": {"a": 1}}, FieldError, "speed"),
                ({"a": {"at": np.zeros(2)}}, {}, FieldError, "mine"),
                ({"a": {"at": np.zeros(3), "mine": 0}}, {}, SchemaError, "at"),
                ({"a": one}, {"action": {"a": 1.5}}, SchemaError, "action"),
                ({"a": one, "b": {"at": np.zeros(3), "mine": 0}}, {}, SchemaError, "at"),
                ({"a": one, "b": one, "c": one}, {}, ArgumentError, "3 agents are in an episode at once"),
            ):
                with pytest.raises(error, match=match):
                    recorder.step(observations, **{**flags, **values, **changed})
                assert recorder.agents == ["a"]
            recorder.step({"a": one}, **flags, **values)
        assert rows_of(store) == Counter({((0, 0), ((1, 1.0, False, False),)): 1})
