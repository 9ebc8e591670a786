"""Discarded episodes: no step of them is left, all others are whole, and the rate limiter has its inserts back."""

from __future__ import annotations

import os
import random
import signal
import struct
import time
from collections import defaultdict

import numpy as np
import pytest
from crossed import crossed
from segments import Segment

import geartrain as gt
from geartrain.actors.recorder import EpisodeRecorder
from geartrain.errors import ArgumentError, LockTimeoutError, SchemaError
from geartrain.store.recorder import recorded_fields

#: An observation is (environment, episode, step), and an action repeats the one that it was chosen for.
OBS = {"obs": gt.Field((3,), "int64"), "action": gt.Field((3,), "int64"), "reward": gt.Field((), "float32")}
ROW, ENVS = 6, 3
ZEROS = np.zeros((1, 3), np.int64)


def store_of(*, share_rows=False, overlap=0, capacity=400, **options):
    fields = recorded_fields(OBS, share_rows=share_rows, overlap=overlap > 0)
    return gt.Store.create(fields, max_length=ROW, capacity=capacity, **options)


class Episodes:
    """Environments whose episodes end at random, given to a recorder in any autoreset mode.

    Attributes:
        actions: of each episode (environment, number) that has not been taken back, how many were recorded.
        newest: of each environment, the episode of its newest step; None if that was taken back.
    """

    def __init__(self, recorder, mode, seed, n=ENVS):
        self.recorder, self.mode, self.n = recorder, mode, n
        self.random = random.Random(seed)
        self.at = [[0, 0] for _ in range(n)]
        self.inside = [True] * n
        self.waits = [False] * n  # next_step: the next call begins an episode
        self.actions = defaultdict(int)
        self.newest = [None] * n
        self.completed = []
        self.recorder.reset(self.seen())

    def seen(self):
        return np.array([[e, *self.at[e]] for e in range(self.n)])

    def begin(self, e):
        self.at[e] = [self.at[e][0] + 1, 0]
        self.inside[e] = True

    def step(self):
        mask = np.array([inside or waits for inside, waits in zip(self.inside, self.waits, strict=True)])
        if not mask.any():
            return
        acted, final = self.seen(), self.seen()
        ends = np.zeros(self.n, bool)
        for e in np.flatnonzero(mask):
            if self.waits[e]:
                self.waits[e] = False
                self.begin(e)
                self.newest[e] = None
                continue
            self.at[e][1] += 1
            self.newest[e] = (int(e), self.at[e][0])
            self.actions[self.newest[e]] += 1
            ends[e] = self.random.random() < 0.25
            if ends[e]:
                final[e] = [e, *self.at[e]]
                self.inside[e], self.waits[e] = False, self.mode == "next_step"
                if self.mode == "same_step":
                    self.begin(e)
        keys = self.recorder.step(
            self.seen(),
            action=acted,
            reward=np.ones(self.n, np.float32),
            terminated=ends,
            truncated=np.zeros(self.n, bool),
            final_obs=final if self.mode == "same_step" else None,
            mask=mask,
        )
        self.completed += [] if keys is None else [keys]

    def reset(self, e):
        mask = np.arange(self.n) == e
        self.begin(e)
        self.newest[e], self.waits[e] = None, False
        keys = self.recorder.reset(self.seen(), mask=mask)
        self.completed += [] if keys is None else [keys]

    def discard(self, e):
        """The episode that is taken back, and the keys of rows that stay."""
        taken, kept = self.newest[e], self.recorder.discard(e)
        if taken is None:
            return None, kept
        ended = not self.inside[e] or (self.mode == "same_step" and self.at[e][1] == 0)
        if not ended:  # in the middle
            self.inside[e] = False
        self.newest[e] = None
        return taken, kept


def steps_of(store):
    """Of each episode, the rows that each of its actions is in."""
    found = defaultdict(lambda: defaultdict(list))
    keys = store.keys()
    lengths = store.status(keys)["length"]
    batch = gt.fetch(store, keys, output="numpy")
    for i, row in enumerate(keys.row.tolist()):
        for t in range(lengths[i]):
            if not batch["last"][i, t]:
                env, episode, step = batch["action"][i, t].tolist()
                assert batch["obs"][i, t].tolist() == [env, episode, step]
                found[env, episode][step].append(row)
    return found


@pytest.mark.parametrize(
    ("mode", "publish_every", "share_rows", "overlap", "unit"),
    crossed(
        ["next_step", "same_step", "disabled"],
        [None, 1, 2],
        [(False, 0), (False, 2), (True, 0)],
        ["rows", "steps"],
        times=3,
    ),
)
def test_no_step_of_a_discarded_episode_is_left_and_every_other_is_whole(
    mode, publish_every, share_rows, overlap, unit
):
    store = store_of(share_rows=share_rows, overlap=overlap)
    store.limiter.set(samples_per_insert=1, error_buffer=1e6, unit=unit)
    recorder = store.recorder(ENVS, autoreset=mode, publish_every=publish_every, overlap=overlap, share_rows=share_rows)
    envs, gone, stayed = Episodes(recorder, mode, seed=7), {}, 0
    for _ in range(150):
        envs.step()
        for e in range(ENVS):
            if envs.random.random() < 0.08:
                taken, kept = envs.discard(e)
                if taken is not None:
                    gone[taken] = set() if kept is None else set(kept.row.tolist())
                    stayed += kept is not None
                assert kept is None or (share_rows and set(kept.env) == {e})
                assert recorder.discard(e) is None or share_rows  # a second time there is nothing left
                assert not recorder.in_episode(e) or envs.inside[e]
            if not envs.inside[e] and not envs.waits[e] and envs.random.random() < 0.5:
                envs.reset(e)
        inserts = store.limiter.state().inserts
        assert inserts == (len(store) if unit == "rows" else store.num_steps)
    keys = recorder.cut()
    found = steps_of(store)
    assert len(gone) > 10
    assert (stayed > 0) == share_rows
    for episode, actions in envs.actions.items():
        if episode not in gone:
            assert sorted(found[episode]) == list(range(actions))
        else:
            assert {row for rows in found[episode].values() for row in rows} <= gone[episode]
    assert store.audit() == []
    assert store.stats()["writing"] == store.stats()["open"] == 0
    envs_of = {row: env for env, _ in found for rows in found[env, _].values() for row in rows}
    for part in (*envs.completed, *([] if keys is None else [keys])):
        fresh = store.status(part)["generation"] == part.generation
        assert [envs_of[row] for row in part.row[fresh].tolist()] == part.env[fresh].tolist()
    store.close()


def test_an_episode_in_progress_and_one_that_has_ended_are_taken_back_until_the_next_begins():
    store = store_of()
    recorder = store.recorder(1, autoreset="disabled", publish_every=1)

    def act(n, ends=False):
        for step in range(n):
            recorder.step(
                ZEROS, action=ZEROS, reward=[0], truncated=[False],
                terminated=[ends and step == n - 1],
            )  # fmt: skip

    assert recorder.discard(0) is None  # nothing was recorded
    recorder.reset(ZEROS)
    act(13)  # rows of five actions
    assert len(store) == 3
    recorder.discard(0)
    assert len(store) == 0
    with pytest.raises(SchemaError, match="environment 0 is in no episode"):
        act(1)
    recorder.reset(ZEROS)
    act(7, ends=True)
    assert len(store) == 2
    recorder.discard(0)
    assert len(store) == 0
    recorder.reset(ZEROS)
    act(7, ends=True)
    recorder.reset(ZEROS)
    recorder.discard(0)  # one that has just begun has nothing to take back
    assert len(store) == 2
    act(3)
    recorder.cut()
    recorder.discard(0)
    assert len(store) == 2
    assert store.stats()["deleted"] == 6
    for env in (-1, 1, 2**40):
        with pytest.raises(ArgumentError, match="env must be from 0 to 0"):
            recorder.discard(env)
    store.close()


def test_rows_that_others_have_evicted_or_deleted_give_no_inserts_back():
    store = store_of(capacity=4)
    store.limiter.set(samples_per_insert=1, error_buffer=1e6)
    recorder = store.recorder(1, autoreset="disabled")
    recorder.reset(ZEROS)
    for _ in range(5 * 400):  # 400 rows, of which the store keeps a few and the recorder does not name the rest
        recorder.step(ZEROS, action=ZEROS, reward=[0], terminated=[False], truncated=[False])
    kept = len(store)
    store.delete(store.keys()[:1])
    recorder.discard(0)
    assert len(store) == 0
    assert store.limiter.state().inserts == 400 - (kept - 1)
    store.close()


def test_a_discard_that_does_not_get_the_lock_can_be_made_again():
    store = store_of(timeout_s=0.1)
    recorder = store.recorder(1, autoreset="disabled", publish_every=1)
    recorder.reset(ZEROS)
    for _ in range(8):
        recorder.step(ZEROS, action=ZEROS, reward=[0], terminated=[False], truncated=[False])
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        segment = Segment(store)  # its mapping has to be there when the kernel looks at the lock
        segment.lock()
        os.write(tell, b"1")
        time.sleep(60)
        os._exit(0)
    os.read(hear, 1)
    with pytest.raises(LockTimeoutError):
        recorder.discard(0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert recorder.in_episode(0)
    recorder.discard(0)
    assert len(store) == 0
    assert store.audit() == []
    store.close()


def test_episode_recorders_discard_too():
    store = store_of()
    recorder = EpisodeRecorder(store, publish_every=1)
    assert recorder.discard() is None
    recorder.begin({"obs": [0, 0, 0]})
    for _ in range(7):
        recorder.step({"reward": 1.0}, {"obs": [0, 0, 1]}, terminated=False, truncated=False)
    assert len(store) == 2
    assert recorder.discard() is None
    assert len(store) == 0
    store.close()


def test_agents_are_named_by_keys_and_discarded_by_name():
    store = store_of()
    recorder = store.agent_recorder(2, publish_every=1)

    def step(agents, ended=()):
        every = {agent: [0, 0, 0] for agent in agents}
        return recorder.step(
            every,
            action=every,
            reward=dict.fromkeys(agents, 0.0),
            terminated={agent: agent in ended for agent in agents},
            truncated=dict.fromkeys(agents, False),
        )

    recorder.reset({"ann": [0, 0, 0], "bob": [0, 0, 0]})
    assert step(["ann", "bob"]) is None
    keys = step(["ann", "bob"], ended=["bob"])
    assert keys.env.tolist() == ["bob"]
    keys = step(["bob"])  # ann has left; the next episode of bob begins
    assert keys.env.tolist() == ["ann"]
    assert len(store) == 2
    recorder.discard("ann")
    assert len(store) == 1
    with pytest.raises(ArgumentError, match="agent 'ann' has no episode to take back"):
        recorder.discard("ann")
    step(["bob"])
    recorder.discard("bob")  # of which the first one stays
    assert len(store) == 1
    assert recorder.agents == []
    with pytest.raises(ArgumentError, match="'cleo'"):
        recorder.discard("cleo")
    store.close()


# --- kills ---------------------------------------------------------------------------------------------------------

_NOTE = struct.Struct("<4I")
ENDED, BEGINS, DISCARDED = range(3)


def record_and_discard(name, number, told, share_rows):
    with gt.Store.open(name) as store:
        recorder = store.recorder(ENVS, autoreset="disabled", publish_every=2, share_rows=share_rows)
        envs = Episodes(recorder, "disabled", number)
        envs.at = [[1000 * number, 0] for _ in range(ENVS)]
        recorder.reset(envs.seen())
        while True:
            envs.step()
            for e in range(ENVS):
                newest = envs.newest[e]
                if newest is not None and envs.random.random() < 0.2:
                    os.write(told, _NOTE.pack(BEGINS, *newest, 0))
                    _, kept = envs.discard(e)
                    os.write(told, _NOTE.pack(DISCARDED, *newest, kept is not None))
                elif newest is not None and not envs.inside[e]:
                    os.write(told, _NOTE.pack(ENDED, *newest, envs.actions[newest]))
                if not envs.inside[e]:
                    envs.reset(e)


def survive(store, kills, share_rows):
    choose, ended, gone, doubtful = random.Random(3), {}, set(), set()
    for number in range(1, kills + 1):
        hear, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(hear)
                record_and_discard(store.name, number, tell, share_rows)
            finally:
                os._exit(7)
        os.close(tell)
        chunks = [os.read(hear, 1 << 16)]
        time.sleep(choose.random() ** 2 * 0.05)
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        while chunk := os.read(hear, 1 << 16):
            chunks.append(chunk)
        os.close(hear)
        for what, env, episode, told in _NOTE.iter_unpack(b"".join(chunks)):
            if what == ENDED:
                ended[env, episode] = told
            elif what == BEGINS:
                doubtful.add((env, episode))
            elif not told:
                gone.add((env, episode))
        store.reap()
        assert store.audit() == []
        assert store.stats()["writing"] == store.stats()["open"] == 0
        found = steps_of(store)
        assert not gone & found.keys()
        for each, actions in ended.items():
            assert each in doubtful or sorted(found[each]) == list(range(actions))
    assert gone
    assert ended


@pytest.mark.parametrize("share_rows", [False, True])
@pytest.mark.parametrize("kills", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_a_store_whose_recorder_was_killed_within_discards_is_consistent(kills, share_rows):
    with store_of(share_rows=share_rows, capacity=100_000) as store:
        survive(store, kills, share_rows)
        assert len(store) < store.capacity  # else the first episodes were evicted
