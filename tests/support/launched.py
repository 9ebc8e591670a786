"""A small job: actors that count, an agent that answers, learners whose rows check themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import tagged
from counting import Counting

import geartrain as gt
from geartrain import launch, rpc
from geartrain.actors import environments_of, recorded_fields

LENGTH = 10
FIELDS = {
    **recorded_fields(environments_of([Counting()]).fields()),
    "twice": gt.Field((), "float32"),
}


def environments(context):
    return [Counting() for _ in range(2)]


class Doubling:
    """Acts alone: the action is the step, and twice says so again."""

    version = 0

    def act(self, obs):
        action = obs[:, 1].astype(np.int64)
        return action, {"twice": 2.0 * action}


def local_policy(context):
    return Doubling()


def remote_policy(context):
    return context.job.policy("act")


def serve(context):
    """Answers with the step, and the version of the newest weights."""
    reader = context.reader()

    @rpc.batched(max_size=4, max_wait_us=2000, stack=True)
    def act(obs):
        time.sleep(0.005)  # or actors that are not what is tested would take a core each
        steps = obs[:, 1].astype(np.int64)
        version = reader.version or 0
        context.report(steps=rpc.batch_stats(act).calls, version=version)
        return {"action": steps, "twice": 2.0 * steps, "version": np.full(len(steps), version)}

    context.node()
    while not context.stopping:
        context.report()
        time.sleep(0.02)


def learn(context, steps=60, batch_size=8, pause_s=0.0, least=20, follow=None, until=None, rests=False):
    """Draws batches and checks each; publishes a version a step. Every rank does it alone.

    With a folder `follow` it goes on until actors of both hosts have acted by a published version, with a path `until`
    as long as there is no such file. With `rests` rows may be what is left of an episode.
    """
    store = context.store(FIELDS, max_length=LENGTH, capacity=400)
    publisher = context.publisher() if context.rank == 0 else None
    wait_for_rows(context, store, least)
    with context.watch(gt.Replay(store, gt.selection.Uniform(seed=context.rank), batch_size, output="numpy")) as replay:
        step = 0
        while not context.stopping and (step < steps or not followed(context, store, follow) or missing(until)):
            step += 1
            batch = replay.sample()
            check(batch, rests)
            if publisher is not None:
                publisher.publish(1000 * context.restart + step, {"w": np.full(3, step, np.float32)})
            context.report(steps=step, version=step, loss=1.0 / step)
            time.sleep(pause_s)
    print(f"learned {step} steps on {len(store)} rows, restart {context.restart}")


def missing(path):
    return path is not None and not Path(path).exists()


def followed(context, store, folder):
    if folder is None:
        return True
    if (store.status()["version"] > 0).any():
        (Path(folder) / f"acted-{context.rank}").touch()
    return len(list(Path(folder).glob("acted-*"))) == 2


def wait_for_rows(context, store, least):
    until_s = time.monotonic() + 60
    while len(store) < least and not context.stopping:
        assert time.monotonic() < until_s, "no rows came"
        context.report()
        time.sleep(0.01)


def check(batch, rests=False):
    """Counting's rows: steps count up, actions are the steps, twice is double, exactly one step is the last.

    They count from 0, but for `rests` of episodes whose beginnings were lost with a store's server.
    """
    steps = batch["obs"][:, :, 1]
    acted = batch.mask & ~batch["last"]
    count = np.arange(steps.shape[1])
    first = batch.mask.argmax(axis=1)
    began = np.take_along_axis(steps, first[:, None], 1)
    assert rests or not began.any(), steps
    assert (steps[batch.mask] == (began + count[None] - first[:, None])[batch.mask]).all(), steps
    assert (batch["last"] & batch.mask).sum(axis=1).tolist() == [1] * len(steps)
    assert (batch["action"][acted] == steps[acted]).all()
    assert (batch["twice"][acted] == 2 * steps[acted]).all()
    episode = batch["obs"][:, :, 0]
    assert (episode == np.take_along_axis(episode, first[:, None], 1))[batch.mask].all()


def insert(context, rows=None, pause_s=0.0):
    """An actor that inserts rows which check themselves: where it is not what is tested, with pauses for the others."""
    store = context.store()
    tags = np.random.default_rng([context.number, context.restart])
    done = 0
    while not context.stopping and (rows is None or done < rows):
        tagged.insert(store, tags.integers(0, 2**62, 4).astype(np.uint64))
        done += 4
        context.report(rows=done, steps=done)
        time.sleep(pause_s)


def learn_tagged(context, steps=200, batch_size=16, until=None):
    """A rank of a group: one global batch of self-checking rows, added up over the ranks each step.

    With a path `until` it goes on as long as there is no such file.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = context.store(tagged.FIELDS, max_length=tagged.STEPS, capacity=64)
    print(f"found {len(store)} rows", flush=True)
    wait_for_rows(context, store, 16)
    dist.init_process_group("gloo")
    replay = gt.Replay(store, gt.selection.Uniform(seed=1), batch_size, output="numpy", group=dist.group.WORLD)
    context.watch(replay)
    step, over = 0, torch.tensor(0)
    while not over:
        step += 1
        batch = replay.sample()
        assert tagged.mixed(batch) == [], "a half-written row was selected"
        over = torch.tensor(int(context.stopping or (step >= steps and not missing(until))))
        dist.all_reduce(over)
        context.report(steps=step, version=step)
    replay.close()
    dist.destroy_process_group()


def learn_reduced(context):
    """A rank whose all-reduces go by the job's reducers; waits until host 0 has read a row of each store."""
    import torch
    import torch.distributed as dist

    import geartrain.collectives.torch_backend.process_group  # noqa: F401  # the backend's name

    torch.set_num_threads(1)
    store = context.store(FIELDS, max_length=LENGTH, capacity=8)
    store.limiter.off()
    rows = {name: np.zeros((2, LENGTH, *field.shape), field.dtype) for name, field in store.fields.items()}
    store.insert(rows, lengths=[context.rank + 1] * 2)
    listed = os.environ["GEARTRAIN_REDUCERS"].split(",")
    assert len(listed) == 4 and len(set(listed)) == 2, "two reducers, each as often as it has threads"
    dist.init_process_group("geartrain")
    for _ in range(5):
        total = torch.full((1 << 16,), float(context.rank + 1))
        dist.all_reduce(total)
    over = torch.zeros(1)
    until_s = time.monotonic() + 60
    while not over and time.monotonic() < until_s:
        over += (store.status()["priority"] == 5.0).any() or context.rank > 0
        dist.all_reduce(over, dist.ReduceOp.MIN)
        context.report(total=total[0].item())
        time.sleep(0.05)
    dist.destroy_process_group()


def read_lengths(context):
    """Of a store elsewhere: reads rows by their keys, and says so by their priorities."""
    assert not context.has_store
    store = context.store()
    until_s = time.monotonic() + 60
    while len(store) < 2 and time.monotonic() < until_s:
        time.sleep(0.02)
    keys = store.keys()
    batch = store.fetch(keys, output="numpy")
    assert batch.length.tolist() == [1, 1]
    assert store.update_priorities(keys, np.full(len(keys), 5.0)) == 0
    context.report(rows=len(keys))


def learn_keyed(context, folder):
    """A rank that fetches a batch of all hosts' rows by key, and updates the other host's; they wait for each other."""
    own = context.store(FIELDS, max_length=LENGTH, capacity=8)
    rows = {name: np.zeros((2, LENGTH, *field.shape), field.dtype) for name, field in own.fields.items()}
    own.insert(rows, lengths=[context.rank + 1] * 2)
    stores = context.stores(own)
    until_s = time.monotonic() + 60
    while min(map(len, stores.values())) < 2 and time.monotonic() < until_s:
        time.sleep(0.02)
    keys = gt.Keys.join([store.keys() for store in stores.values()])[[2, 0, 3, 1]]
    batch = gt.fetch(stores, keys, window=3, output="numpy")
    assert batch.length.tolist() == [2, 1, 2, 1] and list(stores) == ["store-0", "store-1"]
    theirs = stores[f"store-{1 - context.rank}"]
    assert stores.update_priorities(theirs.keys(), [5.0, 5.0]) == 0
    while not (changed := (own.status(own.keys())["priority"] == 5.0).all()) and time.monotonic() < until_s:
        time.sleep(0.02)
    (Path(folder) / f"done-{context.rank}").touch()
    while len(list(Path(folder).glob("done-*"))) < 2 and time.monotonic() < until_s:
        time.sleep(0.02)  # the servers end with the job
    context.report(rows=len(batch.keys), theirs=float(changed))


def fail(context, after_s=0.0):
    print(f"I am {context.name}, and I fail")
    time.sleep(after_s)
    raise ValueError("on purpose")


def die_together(context, folder):
    """The first time rank 0 kills rank 1 and itself."""
    (Path(folder) / f"pid-{context.rank}-{context.restart}").write_text(str(os.getpid()))
    until_s = time.monotonic() + 60
    while not context.restart and time.monotonic() < until_s:
        with contextlib.suppress(OSError, ValueError):
            other = int((Path(folder) / "pid-1-0").read_text())
            if context.rank == 0:
                os.kill(other, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    context.report(steps=1)


def linger(context, deaf=False):
    """Stays until it is told to go, or longer."""
    context.report(steps=1)
    while deaf or not context.stopping:
        time.sleep(0.02)
    print("told to go")


def told_twice():
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    print("told twice")


def stuck(context):
    context.report(steps=1)
    time.sleep(600)


def tell_environment(context):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    print(context.name, {name: os.environ.get(name) for name in names}, context.rank, context.world_size)


job = launch.Job(
    "launched",
    [launch.learners(learn, 2), launch.agents(serve), launch.actors(environments, remote_policy, 2)],
    timeout_s=60,
)

if __name__ == "__main__":
    try:
        launch.run(job, folder=sys.argv[1])
    except launch.ProcessDiedError as error:
        sys.exit(str(error))
