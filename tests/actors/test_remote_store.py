"""Stores of a peer: rows written, recorded, fetched and updated there, and what happens when somebody is gone."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import preloaded
import pytest
from deadlines import killed, patience
from hostile.instants import Interruption
from replay_calls import replay_of

import geartrain as gt
from geartrain import rpc
from geartrain.actors import Actor, RandomPolicy, RemoteStore, StoreServer, environments_of, recorded_fields
from geartrain.errors import (
    ArgumentError,
    ConnectionClosedError,
    FieldError,
    NotEnoughRowsError,
    PeerLostError,
    RemoteError,
    SchemaError,
    StaleKeyError,
    StoreClosedError,
)

FIELDS = recorded_fields({"obs": gt.Field((3,), "float32"), "reward": gt.Field((), "float32")})


class World:
    """A learner with stores, and a host that reaches it by TCP."""

    def __init__(self, store: gt.Store) -> None:
        self.store = store
        self.learner = rpc.Node("learner", transport="tcp")
        self.host = rpc.Node("host", peers={"learner": self.learner.address}, transport="tcp")
        self.server = StoreServer(self.learner, store, "replay")
        self.remote = RemoteStore(self.host, "learner", "replay", timeout_s=patience(30))

    def close(self) -> None:
        self.host.close()
        self.learner.close()
        self.store.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World(gt.Store.create(FIELDS, max_length=6, capacity=64))
    yield made
    made.close()


def rows(n: int, first: int = 0) -> dict[str, Any]:
    obs = np.arange(first, first + n, dtype=np.float32)[:, None, None] + np.zeros((n, 6, 3), np.float32)
    flags = {name: np.zeros((n, 6), bool) for name in ("terminated", "last")}
    return {"obs": obs, "reward": obs[..., 0].copy(), **flags}


def test_rows_are_inserted_fetched_updated_and_removed_by_key(world: World) -> None:
    store, remote = world.store, world.remote
    assert (remote.id, remote.fields, remote.max_length, remote.capacity) == (store.id, store.fields, 6, 64)
    keys = remote.insert(rows(5), lengths=[1, 2, 3, 4, 5], priorities=np.full(5, 2.0), versions=7)
    assert keys == store.keys() and keys.store == store.id and len(remote) == 5
    assert store.status(keys)["length"].tolist() == [1, 2, 3, 4, 5] and set(store.status(keys)["version"]) == {7}
    for output in ("numpy", "torch"):
        if output == "torch":
            pytest.importorskip("torch")
        for asked in (
            {},
            {"window": 2},
            {"window": 2, "ends": [0, 1, 1, 2, 0], "pad": "right"},
            {"fields": ["reward"]},
        ):
            mine, theirs = gt.fetch(store, keys, output=output, **asked), remote.fetch(keys, output=output, **asked)
            assert list(mine.fields) == list(theirs.fields) and mine.keys == theirs.keys
            for name in mine.fields:
                assert type(mine[name]) is type(theirs[name]) and mine[name].dtype == theirs[name].dtype
                assert (np.asarray(mine[name]) == np.asarray(theirs[name])).all(), name
            for name in ("mask", "start", "length", "version"):
                assert (np.asarray(getattr(mine, name)) == np.asarray(getattr(theirs, name))).all(), name
    assert remote.update_priorities(keys[:2], [5.0, 6.0]) == 0
    assert store.status(keys)["priority"].tolist() == [5.0, 6.0, 2.0, 2.0, 2.0]
    assert remote.delete(keys[[0]]) == 0 and remote.keys() == keys[1:] == store.keys()
    assert remote.update_priorities(keys, np.ones(5)) == 1
    with pytest.raises(StaleKeyError, match="1 of 5 keys are stale"):
        remote.fetch(keys)
    assert len(remote.fetch(keys, on_stale="drop", output="numpy").keys) == 4
    assert remote.stats()["inserted"] == 5


def test_keys_of_a_learners_batch_come_back_to_it_with_steps() -> None:
    made = World(gt.Store.create(FIELDS, max_length=6, capacity=16, priority_per="step"))
    made.remote.insert(rows(4))
    with gt.Replay(made.store, gt.selection.Prioritized(seed=0), 8, window=2, prefetch=0, output="numpy") as replay:
        batch = replay.sample()
        assert batch.keys.step is not None
        assert made.remote.update_priorities(batch.keys, np.full(8, 3.0)) == 0
        fetched = made.remote.fetch(batch.keys, window=2, output="numpy")
        assert (fetched["obs"] == batch["obs"]).all() and fetched.keys.step.tolist() == batch.keys.step.tolist()
    made.close()


def test_what_a_peer_stores_has_the_largest_priority_of_the_store() -> None:
    made = World(gt.Store.create(FIELDS, max_length=6, capacity=64, new_priority="max"))
    assert made.remote.update_priorities(made.remote.insert(rows(2)), np.array([0.25, 0.5])) == 0
    assert made.store.status(made.remote.insert(rows(1)))["priority"].tolist() == [0.5]
    assert made.store.status(made.remote.insert(rows(1), priorities=[2.0]))["priority"].tolist() == [2.0]
    recorder = made.remote.recorder(2, autoreset="disabled", max_in_flight=0)
    recorded = gt.Keys.join(steps(recorder, 4))
    assert set(made.store.status(recorded)["priority"].tolist()) == {2.0}
    recorder.close()
    made.close()


def steps(recorder: Any, n: int, episode: int = 4) -> list[gt.Keys]:
    """Steps of two environments, whose episodes have `episode` actions; the keys of what is completed."""
    completed = []
    recorder.reset(np.zeros((2, 3), np.float32), version=3)
    for step in range(1, n + 1):
        ends = np.full(2, step % episode == 0)
        obs = np.full((2, 3), step, np.float32)
        completed.append(
            recorder.step(obs, reward=np.full(2, step), terminated=ends, truncated=~ends & False, version=3)
        )
        if ends[0]:
            completed.append(recorder.reset(obs, version=3))
    return [keys for keys in completed if keys is not None]


@pytest.mark.parametrize("max_in_flight", [0, 3])
def test_steps_are_recorded_there_as_here(world: World, max_in_flight: int) -> None:
    with gt.Store.create(FIELDS, max_length=6, capacity=64) as here:
        mine = here.recorder(2, autoreset="disabled", publish_every=2)
        theirs = world.remote.recorder(2, autoreset="disabled", publish_every=2, max_in_flight=max_in_flight)
        assert theirs.obs == mine.obs == ("obs",)
        known, found = steps(mine, 10), steps(theirs, 10)
        known.append(mine.cut())
        found.append(theirs.cut())
        assert gt.Keys.join(found) == gt.Keys.join(known) and theirs.rows == mine.rows == 6
        one = gt.fetch(here, here.keys(), output="numpy")
        other = world.remote.fetch(world.store.keys(), output="numpy")
        for name in one.fields:
            assert (one[name] == other[name]).all(), name
        assert (one.version == other.version).all() and (one.length == other.length).all()


@pytest.mark.parametrize("max_in_flight", [0, 3])
def test_episodes_are_taken_back_there_as_here(world: World, max_in_flight: int) -> None:
    with gt.Store.create(FIELDS, max_length=6, capacity=64) as here:
        mine = here.recorder(2, autoreset="disabled", publish_every=2)
        theirs = world.remote.recorder(2, autoreset="disabled", publish_every=2, max_in_flight=max_in_flight)
        known, found = steps(mine, 7, episode=20), steps(theirs, 7, episode=20)
        assert mine.discard(1) is None and theirs.discard(1) is None
        assert gt.Keys.join([*found, theirs.cut()]).env.tolist() == gt.Keys.join([*known, mine.cut()]).env.tolist()
        assert len(here) == len(world.store) == 2
        with pytest.raises(ArgumentError, match="env must be from 0 to 1"):
            theirs.discard(2)
        theirs.close()


def test_an_actor_acts_for_a_store_that_is_elsewhere(world: World) -> None:
    gym = pytest.importorskip("gymnasium")
    environments = environments_of([gym.make("CartPole-v1") for _ in range(2)])
    store = gt.Store.create(recorded_fields(environments.fields()), max_length=32, capacity=200)
    with StoreServer(world.learner, store):
        remote = RemoteStore(world.host, "learner", store.name)
        actor = Actor(environments, RandomPolicy(gym.make("CartPole-v1").action_space), remote, seed=0)
        stats = actor.run(steps=300)
        actor.close()
        assert len(store) == stats.rows > 10
        # As it is recorded here, from the same seeds.
        again = environments_of([gym.make("CartPole-v1") for _ in range(2)])
        here = gt.Store.create(recorded_fields(again.fields()), max_length=32, capacity=200)
        local = Actor(again, RandomPolicy(gym.make("CartPole-v1").action_space), here, seed=0)
        local.run(steps=300)
        local.close()
        lengths = [one.status()["length"].tolist() for one in (store, here)]
        assert lengths[0] == lengths[1]
        here.close()
    store.close()


def test_a_refused_step_is_no_lost_server(world: World) -> None:
    obs = np.zeros((1, 3), np.float32)
    flags = {name: np.zeros(1, bool) for name in ("terminated", "truncated")}
    recorder = world.remote.recorder(1, autoreset="disabled")
    recorder.reset(obs)
    with pytest.raises(FieldError, match="another"):
        for _ in range(50):
            recorder.step(obs, reward=np.zeros(1), another=np.zeros(1), **flags)
    assert not recorder.lost, "nobody may go on with another recorder as if the peer had gone"


def test_what_the_store_refuses_is_raised_with_its_type(world: World) -> None:
    remote = world.remote
    with pytest.raises(SchemaError, match="float64") as refused:
        remote.insert({**rows(1), "obs": np.zeros((1, 6, 3))})
    assert isinstance(refused.value, RemoteError)
    remote.insert({**rows(1), "obs": np.zeros((1, 6, 3))}, casting="same_kind")
    with pytest.raises(ArgumentError, match="to another store"):
        remote.delete(gt.Keys(np.zeros(1, np.uint32), np.ones(1, np.uint32), store=1))
    with pytest.raises(LookupError, match="serves no store 'other'; it serves 'replay'"):
        RemoteStore(world.host, "learner", "other")
    with pytest.raises(ArgumentError, match="serves a store 'replay' already"):
        StoreServer(world.learner, world.store, "replay")
    with pytest.raises(ArgumentError, match="at least 0"):
        remote.recorder(1, max_in_flight=-1)
    with pytest.raises(RemoteError):
        remote.recorder(0)
    for what, *given in (
        ("insert", (0, 1), rows(1), {"threads": 10**9}),
        ("insert", (0, 1), [rows(1)], {}),
        ("insert", (2**20, 1), rows(1), {}),
        ("insert", 1, rows(1), {}),
        ("delete", (0, 1), (np.zeros(1, np.uint32),)),
        ("end",),
        ("write", (0, 1)),
    ):
        with pytest.raises(RemoteError):
            remote._calls.ask(what, lambda given=given: given)
    for name, arguments in (
        ("fetch", ("replay", (np.zeros(1, np.uint32),), {})),
        ("fetch", ("replay", (np.zeros(1, np.uint32), np.ones(1, np.uint32), None, None), {"out": {}})),
        ("recorder", ("replay", 1, {"columns": 1})),
        ("describe", ({},)),
    ):
        with pytest.raises(RemoteError):
            world.host.call("learner", f"geartrain.store.{name}", *arguments)
    world.server.close()
    world.server.close()
    with pytest.raises(LookupError, match="serves none"):
        remote.keys()
    with StoreServer(world.learner, world.store, "replay"):
        assert len(remote) == 1


def test_a_step_that_is_refused_can_be_given_again_or_ends_the_recorder(world: World) -> None:
    obs, flags = np.zeros((2, 3), np.float32), {"terminated": np.zeros(2, bool), "truncated": np.zeros(2, bool)}
    recorder = world.remote.recorder(2, autoreset="disabled", max_in_flight=0)
    recorder.reset(obs)
    with pytest.raises(SchemaError):
        recorder.step(np.zeros((2, 4), np.float32), reward=np.zeros(2), **flags)
    recorder.step(obs, reward=np.zeros(2), **flags)
    assert len(recorder.cut()) == 2
    recorder = world.remote.recorder(2, autoreset="disabled", max_in_flight=4)
    recorder.reset(obs)
    recorder.step(obs, reward=np.zeros(2), **flags)
    with pytest.raises(SchemaError, match="shape"):
        recorder.step(np.zeros((2, 4), np.float32), reward=np.zeros(2), **flags)
        for _ in range(10):
            recorder.step(obs, reward=np.zeros(2), **flags)
    with pytest.raises(SchemaError, match="shape"):
        recorder.reset(obs)
    recorder.close()
    lengths = world.store.status()["length"].tolist()
    assert lengths == [2, 2, 2, 2], "the episodes end where they were, and nothing after it is recorded"


HOST = """
import sys, time
import numpy as np
from geartrain import rpc
from geartrain.actors import RemoteStore

node = rpc.Node("victim", peers={"learner": sys.argv[1]})
recorder = RemoteStore(node, "learner", "replay").recorder(2, autoreset="disabled", publish_every=2, max_in_flight=2)
recorder.reset(np.zeros((2, 3), np.float32))
for step in range(1000):
    ends = np.zeros(2, bool)
    recorder.step(np.full((2, 3), step, np.float32), reward=np.zeros(2), terminated=ends, truncated=ends)
    if step == 20:
        print("recording", flush=True)
    time.sleep(0.001)
"""


def test_rows_of_a_killed_host_are_kept_as_far_as_published_and_given_back_otherwise(world: World) -> None:
    with killed(preloaded.Popen([sys.executable, "-c", HOST, world.learner.address], stdout=-1)) as victim:
        assert victim.stdout.readline() == "recording\n"
        victim.kill()
    until_s = time.monotonic() + patience(20)
    while world.store.stats()["writing"] or world.store.stats()["open"]:
        assert time.monotonic() < until_s, world.store.stats()
        time.sleep(0.01)
    assert len(world.store) >= 6 and world.store.audit() == []


def test_a_lost_learner_ends_recorders_by_name(world: World) -> None:
    recorder = world.remote.recorder(2, autoreset="disabled")
    recorder.reset(np.zeros((2, 3), np.float32))
    world.learner.close()
    ends = np.zeros(2, bool)
    with pytest.raises(PeerLostError, match="learner"):
        for _ in range(100):
            recorder.step(np.zeros((2, 3), np.float32), reward=np.zeros(2), terminated=ends, truncated=ends)
    with pytest.raises(PeerLostError, match="learner"):
        recorder.cut()
    with pytest.raises(PeerLostError, match="learner"):
        world.remote.keys()
    world.host.close()
    with pytest.raises(ConnectionClosedError):
        world.remote.keys()


def test_steps_wait_for_the_rate_limiter_and_other_calls_do_not(world: World) -> None:
    world.store.limiter.set(samples_per_insert=1, min_size_to_sample=1, error_buffer=2)
    done: list[Any] = []

    def record() -> None:
        done.append(steps(world.remote.recorder(2, autoreset="disabled", max_in_flight=2), 12))

    threads = [threading.Thread(target=record) for _ in range(3)]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + patience(10)
    while world.store.limiter.state().insert_wait_s == 0 and time.monotonic() < until_s:
        assert world.remote.stats()["inserted"] <= 4
        time.sleep(0.01)
    assert not done and world.store.limiter.state().insert_wait_s > 0
    world.store.limiter.off()
    for thread in threads:
        thread.join(patience(20))
    assert len(done) == 3


def test_a_replay_of_a_served_store_waits_for_the_rows_of_its_peers(world: World) -> None:
    with replay_of(world.store, gt.selection.Uniform(seed=0), 4, output="numpy", timeout_s=patience(30)) as replay:
        sent = threading.Timer(0.2, lambda: world.remote.insert(rows(3)))
        sent.start()
        assert len(replay.sample()) == 4
        sent.join()
        world.store.delete(world.store.keys())
        world.server.close()
        with pytest.raises(NotEnoughRowsError):
            while True:  # what was made ahead
                replay.sample()


def test_a_server_of_a_closed_store_is_refused(world: World) -> None:
    store = gt.Store.create(FIELDS, max_length=6, capacity=4)
    server = StoreServer(world.learner, store, "closing")
    store.close()
    with pytest.raises(StoreClosedError):
        RemoteStore(world.host, "learner", "closing").keys()
    server.close()
    with pytest.raises(StoreClosedError):
        StoreServer(world.learner, store, "closed")
    with pytest.raises(ArgumentError):
        StoreServer(world.learner, None, "none")  # type: ignore[arg-type]


def test_a_recorder_of_a_lost_connection_writes_into_no_other(world: World) -> None:
    obs, flags = np.zeros((1, 3), np.float32), {"terminated": np.zeros(1, bool), "truncated": np.zeros(1, bool)}
    older = [world.remote.recorder(1, autoreset="disabled", max_in_flight=most) for most in (0, 8)]
    for each in older:
        each.reset(obs)
    world.learner.hang_up("host")
    until_s = time.monotonic() + patience(10)
    while True:  # the next call that finds the connection lost makes another
        with contextlib.suppress(PeerLostError):
            world.remote.keys()
            break
        assert time.monotonic() < until_s
    newer = world.remote.recorder(1, autoreset="disabled", max_in_flight=0)
    newer.reset(obs + 100)
    for each in older:
        with pytest.raises(PeerLostError):
            for _ in range(20):
                each.step(obs + 1, reward=np.zeros(1), **flags)
    newer.step(obs + 101, reward=np.zeros(1), **flags)
    keys = newer.cut()
    assert world.remote.fetch(keys, window=2, output="numpy")["obs"][0, :, 0].tolist() == [100, 101]


def test_a_step_that_cannot_be_sent_or_read_ends_its_recorder_and_holds_up_nothing(world: World) -> None:
    obs, flags = np.zeros((1, 3), np.float32), {"terminated": np.zeros(1, bool), "truncated": np.zeros(1, bool)}
    with rpc.Node("stranger", peers={"learner": world.learner.address}) as stranger:
        number, _ = stranger.call("learner", "geartrain.store.recorder", "replay", 1, {"autoreset": "disabled"})
        waiting = [stranger.call_async("learner", "geartrain.rpc.method", number, "call", (10**9, "cut", {}), {})]
        with pytest.raises(RemoteError, match="whole numbers"):
            stranger.call("learner", "geartrain.rpc.method", number, "call", ("0", "cut", {}), {})
        assert stranger.call("learner", "geartrain.store.figures", "replay")[0] == 0
        stranger.call("learner", "geartrain.rpc.method", number, "give_up", (), {})
        with pytest.raises(RemoteError, match="gave it up"):
            waiting[0].result()
    recorder = world.remote.recorder(1, autoreset="disabled")
    recorder.reset(obs)
    recorder.step(obs, reward=np.zeros(1), **flags)
    assert len(world.remote) == 0  # a call after these: they are recorded
    world.server.close()
    with pytest.raises(LookupError, match="serves no store"):
        for _ in range(20):
            recorder.step(obs, reward=np.zeros(1), **flags)
    with StoreServer(world.learner, world.store, "replay"):
        until_s = time.monotonic() + patience(10)
        while len(world.remote) != 1:  # the episode ends where it was
            assert time.monotonic() < until_s
            time.sleep(0.01)


def test_recorders_that_are_dropped_or_closed_give_their_rows_back() -> None:
    made = World(gt.Store.create(FIELDS, max_length=6, capacity=4))
    obs, flags = np.zeros((2, 3), np.float32), {"terminated": np.zeros(2, bool), "truncated": np.zeros(2, bool)}
    for closes in (True, False, False, True, False):
        recorder = made.remote.recorder(2, autoreset="disabled", max_in_flight=0)
        recorder.reset(obs)
        recorder.step(obs, reward=np.zeros(2), **flags)
        if closes:
            recorder.close()
            with pytest.raises(ConnectionClosedError, match="was closed"):
                recorder.reset(obs)
        del recorder
        gc.collect()
    made.close()


def test_a_signals_handler_may_close_a_server_before_any_line_of_its_close(world: World) -> None:
    def lines_of_a_close(at: int | None) -> int:
        server = StoreServer(world.learner, world.store, "rows")
        closing = Interruption(at, server.close)
        closing.during(server.close)
        return closing.lines

    for line in range(lines_of_a_close(None)):
        lines_of_a_close(line)
    with StoreServer(world.learner, world.store, "rows"), pytest.raises(ArgumentError, match="serves a store 'rows'"):
        StoreServer(world.learner, world.store, "rows")


def test_writes_go_to_the_store_that_is_served_under_the_name_now(world: World) -> None:
    """The store may be served anew over a connection that lasts."""
    first = world.remote.insert(rows(1))
    world.server.close()
    with pytest.raises(LookupError, match="serves no store"):
        world.remote.insert(rows(1))
    StoreServer(world.learner, world.store, "replay").close()
    with gt.Store.create(FIELDS, max_length=6, capacity=64) as other:
        server = StoreServer(world.learner, world.store, "replay")
        keys = world.remote.insert(rows(1))
        assert keys.store == first.store and len(world.store) == 2
        assert world.remote.delete(keys) == 0
        server.close()
        StoreServer(world.learner, other, "replay")
        keys = world.remote.insert(rows(1))
        assert keys == other.keys() and keys.store == other.id == world.remote.id
