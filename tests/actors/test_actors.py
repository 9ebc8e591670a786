"""Actors: every episode is in the store as it happened, whatever kind of environment it came from."""

from __future__ import annotations

import itertools
import multiprocessing
import time

import gymnasium as gym
import numpy as np
import pytest
from counting import LENGTH, Counting, Numbers
from deadlines import patience
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import geartrain as gt
from geartrain import actors, rpc, weights
from geartrain.actors import Actor, EpisodeRecorder, LocalPolicy, RemotePolicy, environments_of, recorded_fields
from geartrain.errors import ArgumentError, FieldError
from geartrain.selection import Uniform


class Together:
    """A PettingZoo-style environment of two agents around two of the above; the second leaves early."""

    possible_agents = ("a", "b")

    def __init__(self):
        self._one = {"a": Counting(LENGTH), "b": Counting(4)}
        self.agents = []

    def observation_space(self, agent):
        return Counting.observation_space

    def action_space(self, agent):
        return Counting.action_space

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        return {agent: self._one[agent].reset(seed=seed)[0] for agent in self.agents}, {}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        found = {agent: self._one[agent].step(actions[agent]) for agent in self.agents}
        self.agents = [agent for agent, each in found.items() if not (each[2] or each[3])]
        return tuple({agent: each[part] for agent, each in found.items()} for part in range(5))

    def close(self):
        pass


def make_store(store_name, environments, max_steps=32, **options):
    fields = recorded_fields(
        environments.fields(),
        overlap=True,
        twice=gt.Field((), "float32"),
        step_version=gt.Field((), "int64"),
        episode_return=gt.Field((), "float32", per_row=True),
    )
    return gt.Store.create(store_name(), fields, max_length=max_steps, **{"capacity": 200, **options})


def rows_of(store):
    keys = store.keys()
    batch = gt.fetch(store, keys, output="numpy")
    lengths = store.status(keys)["length"]
    return [{name: batch[name][i] for name in store.fields} | {"length": int(lengths[i])} for i in range(len(keys))]


def vector(mode):
    return SyncVectorEnv([Counting, Counting], autoreset_mode=mode)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [Counting(), Counting()],
        lambda: vector(AutoresetMode.SAME_STEP),
        lambda: vector(AutoresetMode.NEXT_STEP),
        lambda: vector(AutoresetMode.DISABLED),
    ],
    ids=["list", "same_step", "next_step", "disabled"],
)
def test_every_kind_of_environment_leaves_whole_episodes(store_name, make):
    environments = environments_of(make())
    with make_store(store_name, environments) as store:
        actor = Actor(environments, Numbers(), store, seed=0)
        stats = actor.run(episodes=8)
        assert stats.episodes == len(store) == stats.rows == 8
        assert stats.steps == 8 * LENGTH
        seen = set()
        for row in rows_of(store):
            assert row["length"] == LENGTH + 1
            episode = int(row["obs"][0, 0])
            seen.add(episode)
            assert row["obs"][: LENGTH + 1, 0].tolist() == [episode] * (LENGTH + 1)
            assert row["obs"][: LENGTH + 1, 1].tolist() == list(range(LENGTH + 1))
            assert row["last"][: LENGTH + 1].tolist() == [False] * LENGTH + [True]
            ends = [False] * (LENGTH - 1) + [episode % 3 != 2, False]
            assert row["terminated"][: LENGTH + 1].tolist() == ends
            actions = row["action"][:LENGTH]
            assert (np.diff(actions) == 1).all()
            assert row["reward"][:LENGTH].tolist() == actions.tolist()
            assert row["twice"][:LENGTH].tolist() == (2 * actions).tolist()
            assert row["step_version"][:LENGTH].tolist() == [3] * LENGTH
            assert row["episode_return"] == pytest.approx(actions.sum())
        assert seen == {0, 1, 2, 3}
        assert set(store.status()["version"].tolist()) == {3}
        actor.close()
        assert store.audit() == []


def test_agents_become_an_axis_and_the_episode_ends_with_the_last_of_them(store_name):
    environments = environments_of([Together(), Together()])
    with make_store(store_name, environments) as store:
        actor = Actor(environments, Numbers((2,)), store, seed=0)
        actor.run(episodes=4)
        for row in rows_of(store):
            assert row["length"] == LENGTH + 1
            assert row["obs"].shape == (32, 2, 2)
            assert row["obs"][5:8, 1].tolist() == [[0, 0]] * 3  # it left after four steps
            assert row["reward"][4:LENGTH, 1].tolist() == [0, 0, 0]
            assert row["reward"][:LENGTH, 0].tolist() == row["action"][:LENGTH, 0].tolist()
        actor.close()


def test_dict_observations_become_fields_of_their_own(store_name):
    class Goal(gym.Env):
        observation_space = gym.spaces.Dict(
            {"pixels": gym.spaces.Box(0, 255, (4, 4), np.uint8), "goal": gym.spaces.Box(-1, 1, (3,), np.float64)}
        )
        action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self._t = 0
            return self._observe(), {}

        def step(self, action):
            self._t += 1
            return self._observe(), 0.0, self._t == 3, False, {}

        def _observe(self):
            return {"pixels": np.full((4, 4), self._t, np.uint8), "goal": np.full(3, self._t / 10)}

    for made in ([Goal(), Goal()], SyncVectorEnv([Goal, Goal], autoreset_mode=AutoresetMode.SAME_STEP)):
        environments = environments_of(made)
        fields = recorded_fields(environments.fields())
        assert fields["obs.pixels"] == gt.Field((4, 4), "uint8")
        with gt.Store.create(store_name(), fields, max_length=8, capacity=10) as store:

            class Zero:
                version = 0

                def act(self, obs):
                    assert obs["goal"].shape == (2, 3)
                    return np.zeros((2, 2), np.float32), {}

            actor = Actor(environments, Zero(), store)
            actor.run(episodes=2)
            for row in rows_of(store):
                assert row["obs.pixels"][:4, 0, 0].tolist() == [0, 1, 2, 3]
                assert row["obs.goal"][3].tolist() == [0.3] * 3
            actor.close()


def test_a_long_episode_goes_on_in_the_next_row_with_its_overlap(store_name):
    environments = environments_of([Counting(50)])
    with make_store(store_name, environments, max_steps=16) as store:
        Actor(environments, Numbers(), store, overlap=4).run(episodes=1)
        rows = rows_of(store)
        steps = [row["obs"][: row["length"], 1].astype(int).tolist() for row in rows]
        assert steps[0] == list(range(16))
        assert steps[1] == list(range(11, 27))
        assert all(later[:5] == earlier[-5:] for earlier, later in itertools.pairwise(steps))
        assert steps[-1][-1] == 50
        actions = [row["action"][: row["length"] - 1].tolist() for row in rows]
        assert actions[1] == list(range(11, 26))
        assert [bool(row["terminated"][: row["length"]].any()) for row in rows] == [False] * (len(rows) - 1) + [True]


def test_an_episode_can_be_drawn_while_it_goes_on(store_name):
    environments = environments_of([Counting(30)])
    with make_store(store_name, environments) as store:
        actor = Actor(environments, Numbers(), store, publish_every=5)
        actor.run(steps=4)
        assert len(store) == 0
        actor.run(steps=8)
        assert len(store) == 1
        assert store.status()["length"].tolist() == [10]
        with gt.Replay(store, Uniform(seed=0), batch_size=50, window=3, prefetch=0, output="numpy") as replay:
            batch = replay.sample()
            assert not batch["last"].any()
            assert batch["action"].max() == 9
        actor.run(episodes=1)
        assert store.status()["length"].tolist() == [31]
        actor.close()
        assert store.audit() == []


def test_closing_keeps_the_steps_of_an_episode_that_was_going_on(store_name):
    environments = environments_of([Counting(), Counting()])
    with make_store(store_name, environments) as store:
        actor = Actor(environments, Numbers(), store)
        actor.run(steps=6)
        actor.close()
        assert sorted(store.status()["length"].tolist()) == [4, 4]
        recorder = EpisodeRecorder(store)
        recorder.begin({"obs": np.zeros(2)})
        assert recorder.cut() is None  # nothing was done yet
        assert store.stats()["writing"] == 0


def test_what_does_not_fit_is_said_at_the_first_step(store_name):
    environments = environments_of([Counting()])
    fields = recorded_fields(environments.fields())
    with gt.Store.create(store_name(), fields, max_length=10, capacity=4) as store:
        with pytest.raises(FieldError, match="returns 'twice'"):
            Actor(environments, Numbers(), store).run(steps=1)
        with pytest.raises(FieldError, match=r"shape \(1, 2\)"):
            Actor(environments, Numbers((2,)), store).run(steps=1)
        with pytest.raises(ArgumentError, match="run needs an end"):
            Actor(environments, Numbers(), store).run()
        with pytest.raises(ArgumentError, match="overlap"):
            EpisodeRecorder(store, overlap=9)
    with gt.Store.create(store_name(), {"reward": gt.Field((), "float32")}, max_length=3, capacity=4) as store:
        with pytest.raises(FieldError, match="lacks terminated, last"):
            EpisodeRecorder(store)
    with pytest.raises(ArgumentError, match="found int"):
        environments_of(7)


def test_rows_carry_the_version_of_the_model_that_acted(store_name):
    class Model:
        def load_state_dict(self, state):
            self.number = int(state["number"][0])

    environments = environments_of([Counting()])
    name = store_name()
    with weights.Publisher(name) as publisher, make_store(store_name, environments) as store:
        publisher.publish(5, {"number": np.array([50])})
        policy = LocalPolicy(
            lambda model, seen: (np.full(len(seen), model.number), {"twice": np.zeros(len(seen))}),
            Model(),
            weights.Reader(name),
        )
        actor = Actor(environments, policy, store)
        actor.run(episodes=1)
        publisher.publish(6, {"number": np.array([60])})
        actor.run(episodes=1)
        assert store.status()["version"].tolist() == [5, 6]
        assert [row["action"][0] for row in rows_of(store)] == [50, 60]
        actor.close()


def test_an_agent_elsewhere_answers_many_environments_at_once(store_name):
    @rpc.batched(max_size=4, max_wait_us=20_000, stack=True)
    def act(states):
        calls.append(len(states))
        return [{"action": int(state[1]), "twice": 0.0, "version": 9} for state in states]

    calls: list[int] = []
    agent, node = rpc.Node("agent"), None
    try:
        node = rpc.Node("actor", peers={"agent": agent.address})
        environments = environments_of([Counting() for _ in range(4)])
        with make_store(store_name, environments) as store:
            actor = Actor(environments, RemotePolicy(node, "agent", "act"), store)
            actor.run(episodes=4)
            assert max(calls) > 1
            assert sum(calls) == 4 * LENGTH
            for row in rows_of(store):
                assert row["action"][:LENGTH].tolist() == list(range(LENGTH))
            assert set(store.status()["version"].tolist()) == {9}
            actor.close()
    finally:
        if node is not None:
            node.close()
        agent.close()


# --- answers of policies: one contract --------------------------------------------------------------------------------

FEW, ACTIONS, EXTRA = np.zeros((2, 3), np.float32), np.arange(2), np.full(2, 0.5, np.float32)
GOOD = {
    "actions": (ACTIONS, {}),
    "tuple": ((ACTIONS, {"twice": EXTRA}), {"twice": EXTRA}),
    "dict": ({"action": ACTIONS, "twice": EXTRA}, {"twice": EXTRA}),
    "version": ({"action": ACTIONS, "version": np.full(2, 9)}, {}),
    "tuple with a version": ((ACTIONS, {"version": 9}), {}),
}
WRONG = {
    "too few": (np.zeros(1), r"action float64 \(1,\) for 2 environments; expected \(2, ...\)"),
    "an extra of another length": ((ACTIONS, {"twice": np.zeros(3)}), r"twice float64 \(3,\) for 2 environments"),
    "ragged": ([[1.0], [1.0, 2.0]], r"action as \[\[1.0\], \[1.0, 2.0\]\]"),
    "nothing": (None, "action as None"),
    "text": (np.array(["left", "right"]), "action as .*; expected numbers"),
    "no action": ({"actions": ACTIONS}, "a dict of actions for .*; expected .* 'action' among them"),
    "three": (
        (ACTIONS, {"twice": EXTRA}, 1),
        r"action as \(.*; expected numbers. An answer is the actions, \(actions, extras\)",
    ),
    "a version that is none": ((ACTIONS, {"version": 0.5}), r"version float64 .*; expected a whole number"),
}


class Answering:
    """A policy of the user's own."""

    version = 3

    def __init__(self, answer):
        self.act = lambda obs: answer


@pytest.fixture
def ask():
    """What the policy of a kind gives for two environments, where its function returns an answer; and its version.

    An agent's function answers for one environment each, and has its part of the answer.
    """
    agent = rpc.Node("agent")
    actor = rpc.Node("actor", peers={"agent": agent.address})
    answers = []

    def part(value, at):
        if isinstance(value, dict | tuple):
            parts = [part(each, at) for each in (value.values() if isinstance(value, dict) else value)]
            return dict(zip(value, parts, strict=True)) if isinstance(value, dict) else tuple(parts)
        return value[at] if getattr(value, "ndim", 0) else value

    @rpc.function
    def answer_for(obs):
        return answers.pop(0)

    def ask(kind, answer):
        if kind == "local":
            policy = LocalPolicy(lambda model, obs: answer, None)
        else:
            answers[:] = answer if isinstance(answer, list) else [part(answer, at) for at in range(2)]
            policy = RemotePolicy(actor, "agent", "answer_for")
        return *policy.act(FEW), policy.version

    yield ask
    actor.close()
    agent.close()


@pytest.mark.parametrize("kind", ["local", "remote"])
@pytest.mark.parametrize("name", GOOD)
def test_an_answer_means_the_same_in_every_policy(ask, kind, name):
    answer, expected = GOOD[name]
    actions, extras, version = ask(kind, answer)
    assert actions.tolist() == ACTIONS.tolist() and version == (9 if "version" in name else 0)
    assert {each: array.tolist() for each, array in extras.items()} == {
        each: array.tolist() for each, array in expected.items()
    }


@pytest.mark.parametrize("kind", ["local", "actor"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_told_with_what_it_was_and_what_was_expected(store_name, ask, kind, name):
    answer, message = WRONG[name]
    if kind == "local":
        with pytest.raises(ArgumentError, match=message):
            ask(kind, answer)
        return
    environments = environments_of([Counting(), Counting()])
    with make_store(store_name, environments) as store:
        with pytest.raises(ArgumentError, match=f"the policy returned .*{message}"):
            Actor(environments, Answering(answer), store).run(steps=2)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([np.zeros(3), np.zeros(2)], r"action float64 \(3,\) for environment 0, and action float64 \(2,\) for"),
        ([1, (1, {"twice": 2.0})], r"action int64 \(\) for environment 0, and action int64 \(\), twice float64 \(\)"),
        ([[[1.0], [1.0, 2.0]], 1], r"'answer_for' of 'agent' returned action as .* for environment 0"),
        ([None, None], "action as None for environment 0"),
        ([{"move": 1}, {"move": 1}], "a dict of move for environment 0"),
    ],
    ids=["shapes", "extras of one", "ragged", "nothing", "no action"],
)
def test_a_wrong_answer_of_an_agent_is_told_likewise(ask, answers, message):
    with pytest.raises(ArgumentError, match=message):
        ask("remote", answers)


def test_actions_of_a_dict_space_are_a_dict_by_name(ask):
    move, look = np.arange(2), np.ones((2, 3), np.float32)
    for kind in ("local", "remote"):
        for answer in (({"move": move, "look": look}, {}), {"action": {"move": move, "look": look}}):
            actions, extras, _ = ask(kind, answer)
            assert (list(actions), extras) == (["move", "look"], {})
            assert actions["move"].tolist() == move.tolist() and actions["look"].shape == (2, 3)
    space = gym.spaces.Dict({"move": gym.spaces.Discrete(4), "look": gym.spaces.Box(-1, 1, (3,), np.float32)})
    actions, _ = actors.RandomPolicy(space).act(FEW)
    assert {name: array.shape for name, array in actions.items()} == {"move": (2,), "look": (2, 3)}


def test_an_answer_of_another_kind_than_the_field_is_told_before_the_environment_gets_it(store_name):
    environments = environments_of([Counting(), Counting()])
    with make_store(store_name, environments) as store:
        with pytest.raises(FieldError, match=r"'action' as float64 of shape \(2,\) .* takes int64 of shape \(2,\)"):
            Actor(environments, Answering((np.zeros(2), {"twice": EXTRA})), store).run(steps=2)


def _act_forever(name):
    environments = environments_of([Counting(), Counting(40)])
    with gt.Store.open(name) as store:
        Actor(environments, Numbers(), store, publish_every=3).run(until=lambda: False)


def test_a_killed_actor_leaves_only_whole_steps_and_no_block_is_lost(store_name):
    environments = environments_of([Counting(), Counting(40)])
    with make_store(store_name, environments, max_steps=48, capacity=30) as store:
        context = multiprocessing.get_context("spawn")
        for _ in range(3):
            process = context.Process(target=_act_forever, args=(store.name,))
            process.start()
            inserted = store.stats()["inserted"]
            until_s = time.monotonic() + patience(60)
            while store.stats()["inserted"] < inserted + 5 and time.monotonic() < until_s:
                time.sleep(0.01)
            process.kill()
            process.join()
            store.reap()
            assert store.audit() == []
            stats = store.stats()
            assert stats["writing"] == stats["open"] == 0
            assert stats["free"] + stats["committed"] == 30
            for row in rows_of(store):
                n = row["length"]
                assert row["obs"][:n, 1].tolist() == list(range(n))
                acted = n - 1 if row["last"][n - 1] else n
                assert row["reward"][:acted].tolist() == row["action"][:acted].tolist()


def test_public_names_are_documented():
    for name in actors.__all__:
        assert getattr(actors, name).__doc__
