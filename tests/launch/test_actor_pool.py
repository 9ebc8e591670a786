"""Actors in processes: they act, they die and come back, and they end with whoever made them."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import preloaded
import pytest
from counting import Counting, Numbers
from deadlines import patience
from ended import has_ended
from launch_jobs import wait_for
from replay_calls import replay_of

import geartrain as gt
import geartrain.core.counters as counters
from geartrain.actors import environments_of, recorded_fields
from geartrain.core.counters import SharedCounters
from geartrain.errors import (
    ActorDiedError,
    ArgumentError,
    GeartrainError,
    NotEnoughRowsError,
    StoreExistsError,
    StoreMissingError,
)
from geartrain.launch import ActorPool
from geartrain.launch.actor_process import last_error

pytestmark = pytest.mark.usefixtures("preloaded_children")


class Quiet(Numbers):
    def act(self, obs):
        time.sleep(0.002)  # actors are not to take a core each
        return super().act(obs)[0], {}


def environments(context):
    return [Counting(), Counting(40)]


def policy(context):
    assert context.environments is not None
    return Quiet()


def broken_policy(context):
    raise RuntimeError(f"no policy for actor {context.number}")


@pytest.fixture
def store(store_name):
    fields = recorded_fields(environments_of([Counting()]).fields())
    with gt.Store.create(store_name(), fields, max_length=48, capacity=60) as made:
        yield made


def test_a_pool_acts_until_it_is_stopped(store, real_interpreters):
    with ActorPool(store, environments, policy, 2, publish_every=10) as pool:
        wait_for(lambda: pool.stats()["rows"] > 20)
        stats = pool.stats()
        assert stats["alive"] == 2
        assert stats["restarts"] == 0
        assert stats["oldest_version"] == stats["newest_version"] == 3
        assert stats["policy_share"] + stats["environment_share"] + stats["store_share"] == pytest.approx(1.0)
        path = pool.counters.path
        assert path.exists()
    assert not path.exists()
    counts = store.stats()
    assert counts["writing"] == counts["open"] == 0
    assert counts["inserted"] == pool.counters.column("rows").sum()  # what was going on was kept, and counted
    assert store.audit() == []


def test_actors_that_the_limiter_holds_up_stop_with_the_pool(store):
    store.limiter.set(samples_per_insert=4, min_size_to_sample=8, error_buffer=8)
    with ActorPool(store, environments, policy, 2) as pool:
        wait_for(lambda: store.limiter.state().insert_wait_s > 0 or pool.stats()["rows"] >= 8)
        time.sleep(0.3)  # every stream has come to a row that is not let in
        began_s = time.monotonic()
    assert time.monotonic() - began_s < patience(10)
    state, counts = store.limiter.state(), store.stats()
    assert state.inserts == counts["inserted"] == len(store)  # what waited was given back, and not counted
    assert counts["writing"] == 0
    assert store.audit() == []


def test_an_actor_that_is_killed_is_started_again_and_its_rows_come_back(store):
    with ActorPool(store, environments, policy, 2, max_restarts=3) as pool:
        for round_ in range(2):
            wait_for(lambda: (pool.counters.column("beat_s") > 0).all() and pool.stats()["alive"] == 2)
            victim = int(pool.counters.column("pid")[round_ % 2])
            os.kill(victim, signal.SIGKILL)
            wait_for(lambda round_=round_, victim=victim: pool.stats()["restarts"] == round_ + 1)
            wait_for(lambda victim=victim: victim not in pool.counters.column("pid"))
        before = pool.stats()["steps"]
        wait_for(lambda: pool.stats()["steps"] > before + 100)
        pool.check()
    assert store.stats()["writing"] == 0
    assert store.audit() == []


def test_one_death_too_many_is_an_error_that_says_what_it_was(store):
    pool = ActorPool(store, environments, policy, 1, max_restarts=0)
    wait_for(lambda: pool.stats()["steps"] > 0)
    os.kill(int(pool.counters.column("pid")[0]), signal.SIGKILL)
    wait_for(lambda: pool._failed is not None)
    with pytest.raises(ActorDiedError, match="actor 0 was killed by SIGKILL"):
        pool.check()
    pool.close()
    with pytest.raises(ActorDiedError, match="RuntimeError: no policy for actor 0"):
        with ActorPool(store, environments, broken_policy, 1, max_restarts=1) as pool:
            wait_for(lambda: pool._failed is not None)
    with pytest.raises(ArgumentError, match="actors must be from 1 to 255, found 0"):
        ActorPool(store, environments, policy, 0)


@pytest.mark.timeout(60)
def test_a_handler_stops_the_pool_that_its_thread_is_stopping(store):
    pool = ActorPool(store, environments, policy, 1)
    wait_for(lambda: pool.stats()["steps"] > 0)
    os.kill(int(pool.counters.column("pid")[0]), signal.SIGSTOP)  # it is waited for, and then killed
    stopped = []
    before = signal.signal(signal.SIGUSR2, lambda *_: stopped.append(pool.close()))
    threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR2)).start()
    try:
        pool.close(1.0)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert stopped == [None] and pool.stats()["alive"] == 0
    assert not pool.counters.path.exists() and store.audit() == []


def marker(what, context):
    return Path(os.environ["MARKERS"]) / f"{what}-{context.number}"


def slow_environments(context):
    try:
        marker("begun", context).touch()
        time.sleep(100)
    finally:
        marker("cleaned", context).touch()


def slow_policy(context):
    class Slow(Quiet):
        def act(self, obs):
            return slow_environments(context)

    return Slow()


def deaf_environments(context):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    marker("begun", context).touch()
    time.sleep(100)


@pytest.mark.parametrize(
    ("stuck_environments", "stuck_policy"), [(slow_environments, policy), (environments, slow_policy)]
)
def test_an_actor_in_a_constructor_or_a_long_step_ends_by_sigterm(
    store, monkeypatch, tmp_path, stuck_environments, stuck_policy
):
    monkeypatch.setenv("MARKERS", str(tmp_path))
    pool = ActorPool(store, stuck_environments, stuck_policy, 2)
    wait_for(lambda: len(os.listdir(tmp_path)) == 2)
    pool.close(patience(6))
    assert [each.returncode for each in pool._supervisor.processes] == [1, 1]
    assert sorted(os.listdir(tmp_path)) == ["begun-0", "begun-1", "cleaned-0", "cleaned-1"]
    assert store.audit() == [] and store.reap() == 0


def test_an_actor_that_ignores_sigterm_is_killed_in_seconds(store, monkeypatch, tmp_path):
    monkeypatch.setenv("MARKERS", str(tmp_path))
    pool = ActorPool(store, deaf_environments, policy, 1)
    wait_for(lambda: os.listdir(tmp_path))
    began_s = time.monotonic()
    pool.close()
    assert pool._stop_at_s - began_s < 7
    assert pool._supervisor.processes[0].returncode == -signal.SIGKILL


def test_an_actor_that_someone_else_terminates_was_killed_by_sigterm(store):
    pool = ActorPool(store, environments, policy, 1, max_restarts=0)
    wait_for(lambda: pool.stats()["steps"] > 0)
    os.kill(int(pool.counters.column("pid")[0]), signal.SIGTERM)
    wait_for(lambda: pool.stats()["alive"] == 0)
    with pytest.raises(ActorDiedError, match="actor 0 was killed by SIGTERM"):
        wait_for(pool.check)
    pool.close()


def test_a_pool_that_is_stopped_while_it_starts_its_actors_starts_no_more(store, monkeypatch):
    starts = []
    start = ActorPool._start

    def slow_start(pool, process):
        starts.append(process.number)
        if len(starts) == 3:
            signal.pthread_kill(main, signal.SIGUSR2)
            time.sleep(patience(0.5))
        start(pool, process)

    main = threading.get_ident()
    monkeypatch.setattr(ActorPool, "_start", slow_start)
    before = signal.signal(signal.SIGUSR2, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            ActorPool(store, environments, policy, 20)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert starts == [0, 1, 2]


def test_an_exit_status_that_something_else_has_taken_does_not_end_the_supervision(store):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children by itself, and nobody learns how
    try:
        with ActorPool(store, environments, policy, 1, max_restarts=1) as pool:
            for restarts in (1, 2):
                wait_for(lambda: pool.stats()["alive"] == 1 and pool.stats()["steps"] > 0)
                victim = int(pool.counters.column("pid")[0])
                os.kill(victim, signal.SIGKILL)
                wait_for(lambda restarts=restarts: pool.stats()["restarts"] == restarts)
            with pytest.raises(ActorDiedError, match="actor 0 ended, with an exit code that something else"):
                pool.check()
            pool.close()
            pool._failed = None  # told
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert store.audit() == []


def test_functions_of_a_script_act_in_its_pool(store_name, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import functools
import geartrain as gt
import geartrain.core.counters as counters
from counting import Counting
from geartrain.actors import RandomPolicy, environments_of, recorded_fields
from geartrain.launch import ActorPool
from geartrain.launch.actor_process import last_error

def environments(length, context):
    return [Counting(length)]

def policy(context):
    return RandomPolicy(Counting.action_space, seed=context.seed)

if __name__ == "__main__":
    fields = recorded_fields(environments_of([Counting()]).fields())
    with gt.Store.create({store_name()!r}, fields, max_length=8, capacity=9) as store:
        with ActorPool(store, functools.partial(environments, 5), policy, 1) as pool:
            while pool.stats()["rows"] < 2:
                pool.check()
        print(store.status()["length"][:2].tolist())
"""
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    made = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, timeout=120, check=False)
    assert (made.stdout, made.stderr) == ("[6, 6]\n", "")


def test_the_script_of_the_page_runs_as_it_is_written(tmp_path):
    pytest.importorskip("torch")
    page = Path(__file__).parents[2] / "docs" / "actors.md"
    (text,) = re.findall(r"^```py\n# learn\.py\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    script = tmp_path / "learn.py"
    script.write_text(text)
    with tempfile.TemporaryDirectory(prefix="geartrain-docs-", dir="/dev/shm") as segments:
        env = {**os.environ, "GEARTRAIN_DIR": segments}
        made = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, env=env, timeout=120, check=False
        )
    assert (made.returncode, made.stderr) == (0, "")
    assert "'restarts': 0" in made.stdout and "'alive': 2" in made.stdout


def test_what_cannot_be_pickled_is_refused_by_the_constructor(store, monkeypatch, tmp_path):
    monkeypatch.setenv("GEARTRAIN_DIR", str(tmp_path))  # other jobs of this user have counters, too
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        ActorPool(store, lambda context: [Counting()], policy, 1)
    assert [name for name in counters.names() if name.startswith("actors-")] == []


@pytest.mark.skipif(os.cpu_count() == 1, reason="torch has one thread anyway")
def test_torch_has_the_threads_it_was_given_in_every_actor(store, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    import torch_policy

    with ActorPool(store, environments, torch_policy.policy, 1, threads=1) as pool:
        wait_for(lambda: pool.stats()["rows"] > 2)
    batch = gt.fetch(store, store.keys(), fields=["action", "last"], output="numpy")
    assert set(batch["action"][batch.mask & ~batch["last"]].tolist()) == {1}


def test_actors_die_with_the_process_that_made_them(store):
    code = f"""
import time
import geartrain as gt
import geartrain.core.counters as counters
from geartrain.launch import ActorPool
from geartrain.launch.actor_process import last_error
from test_actor_pool import environments, policy, wait_for
if __name__ == "__main__":
    store = gt.Store.open({store.name!r})
    pool = ActorPool(store, environments, policy, 2)
    wait_for(lambda: (pool.counters.column("beat_s") > 0).all())
    print(pool.counters.path, *(int(pid) for pid in pool.counters.column("pid")), flush=True)
    time.sleep(100)
"""
    env = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[1] / 'support'}"}
    made = preloaded.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env)
    assert made.stdout is not None
    path, *words = made.stdout.readline().split()
    pids = [int(word) for word in words]
    assert len(pids) == 2
    made.kill()
    made.wait()
    wait_for(lambda: all(has_ended(pid) for pid in pids), 20)
    wait_for(lambda: store.reap() >= 0 and store.stats()["writing"] == 0, 20)  # once their last threads are gone
    assert Path(path).exists()  # nobody was left to remove it
    with SharedCounters.create(f"{store.name}-next", 1, ("steps",)):
        assert not Path(path).exists()  # the next one did


def test_a_program_that_ends_with_its_pool_open_leaves_nothing(store_name):
    """Actors that were killed in an open store would leave its segment."""
    name = store_name()
    code = f"""
import geartrain as gt
from geartrain.actors import environments_of, recorded_fields
from test_actor_pool import Counting, environments, policy, wait_for
fields = recorded_fields(environments_of([Counting()]).fields())
store = gt.Store.create({name!r}, fields, max_length=48, capacity=60)
pool = gt.ActorPool(store, environments, policy, 1)
wait_for(lambda: pool.stats()["rows"] > 0)
print(pool.counters.path)
"""
    env = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[1] / 'support'}"}
    made = preloaded.run([sys.executable, "-c", code], env=env, timeout=patience(60))
    assert made.returncode == 0
    assert not Path(made.stdout.strip()).exists()
    with pytest.raises(StoreMissingError):
        gt.Store.open(name, timeout_s=0)


def test_a_board_is_seen_by_all_and_refuses_what_is_none(store_name, tmp_path):
    name = store_name()
    with SharedCounters.create(name, 3, ("steps", "loss")) as made:
        made.slot(2)["loss"] = 0.5
        other = SharedCounters.open(name)
        other.slot(0)["steps"] += 7
        assert made.column("steps").tolist() == [7, 0, 0]
        assert dict(other.slot(2)) == {"steps": 0.0, "loss": 0.5}
        with pytest.raises(StoreExistsError):
            SharedCounters.create(name, 1, ("a",))
        with pytest.raises(ArgumentError, match="the slot of counters must be from 0 to 2, found 3"):
            made.slot(3)
        made.path.write_bytes(b"garbage" * 1000)
        with pytest.raises(GeartrainError, match="does not have the counter format of this build"):
            SharedCounters.open(name)
    with pytest.raises(StoreMissingError):
        SharedCounters.open(name)
    for wrong in ("", "a/b", ".hidden"):
        with pytest.raises(ArgumentError):
            SharedCounters.create(wrong, 1, ("a",))
    with pytest.raises(ArgumentError):
        SharedCounters.create(name, 1, ("a", "a"))
    assert np.isfinite(made.column("steps")).all()


# --- replays that wait for a pool's actors ---------------------------------------------------------------------------


def slow_start(context):
    time.sleep(0.5)
    return environments(context)


@pytest.mark.parametrize(
    ("prefetch", "limited"),
    [(0, False), (2, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(2, False), (0, True)])],
)
def test_a_replay_waits_for_the_rows_of_actors_that_are_starting(store, prefetch, limited):
    if limited:
        store.limiter.set(min_size_to_sample=3)
    replay = gt.Replay(store, gt.selection.Uniform(seed=0), 8, num_batches=3, prefetch=prefetch, output="numpy")
    with replay, ActorPool(store, slow_start, policy, 1) as pool:
        for _ in range(2):
            assert sum(len(batch) for batch in replay) == 24
        os.kill(int(pool.counters.column("pid")[0]), signal.SIGKILL)  # and for those that are started again
        store.delete(store.keys())
        assert sum(len(batch) for batch in replay) == 24
    store.delete(store.keys())
    with gt.Replay(store, gt.selection.Uniform(seed=0), 8, prefetch=0) as replay:
        if not limited:
            with pytest.raises(NotEnoughRowsError, match="no other process has it open"):
                replay.sample()


class Tiring(Quiet):
    """Fails at its twentieth step."""

    def act(self, obs):
        if self._next == 20:
            raise RuntimeError("tired")
        return super().act(obs)


def long_episodes(context):
    return [Counting(40)]


def tiring(context):
    return Tiring() if context.number == 1 else Quiet()


@pytest.mark.parametrize(
    ("made", "publish_every"),
    [pytest.param(environments, None, marks=pytest.mark.slow), (long_episodes, 10)],
)
def test_actors_that_die_after_an_insert_are_started_again(store, made, publish_every):
    pool = ActorPool(store, made, tiring, 2, publish_every=publish_every, max_restarts=2)
    with pytest.raises(ActorDiedError, match=r"(?s)RuntimeError: tired.*3 deaths are more than max_restarts=2"):
        wait_for(pool.check)
    wait_for(lambda: pool.stats()["alive"] == 0)  # the other one, too, before the pool is stopped
    pool.close()
    assert store.stats()["inserted"] >= 3


@pytest.mark.parametrize("limited", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_actors_that_never_insert_end_the_pool_and_the_waits_for_them(store, limited, caplog):
    if limited:
        store.limiter.set(min_size_to_sample=3)
    replay = replay_of(store, gt.selection.Uniform(seed=0), 8, output="numpy", timeout_s=patience(60))
    began_s = time.monotonic()
    with pytest.raises(NotEnoughRowsError) as caught:
        with replay, ActorPool(store, environments, broken_policy, 2) as pool:
            for _ in replay:
                pass
    assert time.monotonic() - began_s < patience(30)
    for said in ("actor pool has given up", "RuntimeError: no policy for actor", "failed with exit code 1", "check()"):
        assert said in str(caught.value)
    assert pool.restarts <= 5 and pool.stats()["alive"] == 0
    assert isinstance(caught.value.__cause__, ActorDiedError)
    with pytest.raises(ActorDiedError, match=r"(?s)Traceback.*RuntimeError: no policy for actor.*died 3 times"):
        pool.check()
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == 1
    for said in ("actor ", "failed with exit code 1", "RuntimeError: no policy for actor", "pool.check()"):
        assert said in warnings[0]


UNGUARDED = """
import geartrain as gt
from counting import Counting, Numbers
from geartrain.actors import recorded_fields
from geartrain.launch import ActorPool

def environments(context):
    return [Counting()]

def policy(context):
    return Numbers()

fields = recorded_fields({"obs": gt.Field((1,), "float32"), "action": gt.Field((), "int64")})
with gt.Store.create(fields, max_length=4, capacity=4) as store:
    with ActorPool(store, environments, policy, 1) as pool:
        for batch in gt.Replay(store, gt.selection.Uniform(), 1, output="numpy", num_batches=1):
            print(batch)
"""


def test_a_script_without_the_main_guard_is_told_what_it_lacks(tmp_path, real_interpreters):
    script = tmp_path / "train.py"
    script.write_text(UNGUARDED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    done = subprocess.run(
        [sys.executable, str(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=patience(60),
        env=environment,
    )
    assert done.returncode == 1
    assert "an actor cannot make a pool" in done.stderr
    assert "put what that runs under `if __name__ == '__main__':`" in done.stderr


@pytest.mark.parametrize(
    ("trace", "told"),
    [
        ('Traceback (most recent call last):\n  File "a.py"\n    f()\nValueError: one\ntwo\n', "ValueError: one"),
        ('Traceback (most recent call last):\n  File "a.py"\n    f()\nKeyError: 3\n', "KeyError: 3"),
        ("", ""),
    ],
)
def test_a_death_is_told_by_its_error_and_not_by_the_last_line_of_its_message(trace, told):
    assert last_error(trace) == told
