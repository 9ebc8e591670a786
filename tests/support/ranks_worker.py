"""A rank of a real job, for tests/replay/test_ranks_processes.py: `python ranks_worker.py SCENARIO NAME`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpo
import numpy as np
import torch.distributed as dist
from replay_calls import replay_of
from torch.distributed.device_mesh import init_device_mesh

import geartrain as gt
import geartrain.replay.distributed.read_agreement as read_agreement
import geartrain.replay.distributed.sharded_sampler as sharded_sampler
from geartrain.errors import ArgumentError, PeerLostError
from geartrain.ranks.torch_rank_group import TorchRankGroup
from geartrain.replay.distributed.messages import flat_bytes
from geartrain.selection import Prioritized, Uniform

N, B = 96, 24
FIELDS = {"x": gt.Field((2,), "float32"), "number": gt.Field((), "int64", per_row=True)}


def store_of(name: str, first: int, last: int) -> gt.Store:
    store = gt.Store.create(name, FIELDS, max_length=6, capacity=N)
    store.native.advance_sequence(first + 1)
    numbers = np.arange(first, last)
    x = np.broadcast_to(numbers[:, None, None], (len(numbers), 6, 2)).astype(np.float32)
    store.insert({"x": x, "number": numbers}, priorities=numbers % 5)
    return store


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def batches(name: str) -> None:
    """Prints the rows of this rank's part of five batches."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = store_of(f"{name}-{rank}", N * rank // size, N * (rank + 1) // size)
    lag = int(os.environ.get("UPDATE_LAG", "2"))
    options: Any = {"window": 3, "num_batches": 5, "update_lag": lag}
    with store, replay_of(store, Prioritized(seed=3), B, group=dist.group.WORLD, **options) as replay:
        for batch in replay:
            assert (batch["x"][:, -1, 0] == batch["number"]).all()
            replay.update_priorities(batch.keys, batch["number"] % 7)
            say(rank=rank, draw=batch.draw.tolist(), number=batch["number"].tolist())
        say(rank=rank, stats=replay.stats())


def packed_store(name: str, first: int, last: int) -> gt.Store:
    """Rows of 0 to 9,604 tokens."""
    fields = {"number": gt.Field((), "int64"), "ids": gt.Field(("tokens",), "int32"), "text": gt.Text()}
    store = gt.Store.create(name, fields, capacity=N, span_bytes=1 << 22, reserve=False)
    store.native.advance_sequence(first + 1)
    numbers = list(range(first, last))
    ids = [np.full(4 * (number * 37 % 50) ** 2, number, np.int32) for number in numbers]
    store.insert({"number": numbers, "ids": ids, "text": [str(number) * (number % 9) for number in numbers]})
    return store


def packed(name: str) -> None:
    """Prints the rows of this rank's part of five packed batches; rank 1 kills itself at step KILL_AT."""
    rank, size = dist.get_rank(), dist.get_world_size()
    at = int(os.environ.get("KILL_AT", "-1"))
    options: Any = {"balance": "tokens", "num_batches": 5, "group": dist.group.WORLD, "prefetch": 0, "timeout_s": 10}
    store = packed_store(f"{name}-{rank}", N * rank // size, N * (rank + 1) // size)
    replay = replay_of(store, Uniform(seed=3), B, **options)
    try:
        for batch in replay:
            numbers, lengths = batch["number"].tolist(), batch.lengths("tokens").tolist()
            assert lengths == [4 * (number * 37 % 50) ** 2 for number in numbers]
            assert batch["ids"].tolist() == np.repeat(numbers, lengths).tolist()
            assert batch["text"] == [str(number) * (number % 9) for number in numbers]
            say(draw=batch.draw.tolist(), number=numbers)
            if rank == 1 and replay.step == at:
                os.kill(os.getpid(), signal.SIGKILL)
    except PeerLostError as error:
        say(error=str(error))
        store.close()
        sys.stdout.flush()
        os._exit(0)  # torch's own shutdown would wait for the dead rank
    say(stats=replay.stats())
    replay.close()
    store.close()


def kept(name: str) -> None:
    """Prints the rows of this rank's part of each batch; saves every third step, and is killed after step KILL_AT."""
    rank, at, state = dist.get_rank(), int(os.environ["KILL_AT"]), Path(os.environ["STATE"])
    store = grpo.new_store(f"{name}-{rank % 2}")
    options: Any = {"group": dist.group.WORLD, "keep": "saved", "balance": "tokens", "timeout_s": 20}
    try:
        with replay_of(store, Uniform(seed=3, replacement=False), 8, **options) as replay:
            if state.exists():
                replay.load_state_dict(json.loads(state.read_text()))
            for batch in replay:
                say(step=batch.step, draw=batch.draw.tolist(), number=grpo.check(batch))
                if batch.step % 3 == 2:
                    if rank == 0:
                        state.write_text(json.dumps(replay.state_dict()))
                    dist.barrier()  # the checkpoint is complete
                    replay.saved(batch.step)
                if batch.step == at:
                    os.kill(os.getpid(), signal.SIGKILL)
            replay.settle()
            say(kept=store.stats()["kept"], left=len(store), wrong=store.audit())
    except PeerLostError:
        os.kill(os.getpid(), signal.SIGKILL)


def steps(name: str) -> None:
    """Prints the steps of this rank's part of six batches of transitions, whose priorities are given back."""
    from recorded_shards import FIELDS as EPISODE_FIELDS
    from recorded_shards import Episodes

    rank, size = dist.get_rank(), dist.get_world_size()
    episodes, view = Episodes(200), gt.Transitions(n_step=2, obs=["obs.state"])
    selection = Prioritized(seed=3, beta=0.5)
    with gt.Store.create(f"{name}-{rank}", EPISODE_FIELDS, max_length=12, capacity=201, priority_per="step") as store:
        episodes.insert(store, 200 * rank // size, 200 * (rank + 1) // size)
        with gt.Replay(store, selection, 48, view=view, output="numpy", prefetch=0, group=dist.group.WORLD) as replay:
            for _ in range(6):
                batch = replay.sample()
                row, t = np.divmod(batch["action"], 12)
                assert (batch["obs.state"] == episodes.arrays["obs.state"][row, t]).all()
                replay.update_priorities(batch.keys, batch["action"] % 7)
                weights = batch.importance_weights
                assert weights is not None
                say(draw=batch.draw.tolist(), action=batch["action"].tolist(), weights=weights.tolist())
            say(stats=replay.stats(), wrong=store.audit())


def opens(name: str) -> None:
    """Opens a group for each of the settings in CASES, a list of each rank's variables, and prints what that led to."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for case in json.loads(os.environ["CASES"]):
        os.environ.update(case[rank])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                group = TorchRankGroup(range(size), 60.0)
                say(peers=group.peers(), warned=[str(each.message) for each in warned])
                group.close()
            except ArgumentError as error:
                say(error=str(error), warned=[str(each.message) for each in warned])
        for variable in case[rank]:
            del os.environ[variable]


def mesh(name: str) -> None:
    """A pipeline of two stages by two replicas, by the names of a mesh's dimensions; and its slice of one."""
    rank = dist.get_rank()
    dims = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    store = store_of(f"{name}-{rank}", N * rank // 4, N * (rank + 1) // 4)
    with store:
        with replay_of(store, Uniform(seed=1), B, mesh=dims, inputs=["x"], targets=["number"], num_batches=2) as replay:
            for batch in replay:
                say(rank=rank, fields=sorted(batch), draw=batch.draw.tolist(), rows=batch.keys.row.tolist())
        with replay_of(store, Uniform(seed=1), B, mesh=dims["dp"], num_batches=1) as replay:
            say(rank=rank, slice=replay.sample().draw.tolist())


def again(name: str) -> None:
    """One replay after the other, and two at once, on ranks that have made different groups before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.new_group([0])
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    store = store_of(f"{name}-{rank}", N * rank // size, N * (rank + 1) // size)
    with store:
        for seed in range(3):
            with replay_of(store, Uniform(seed=seed), B, group=dist.group.WORLD, num_batches=2, timeout_s=20) as replay:
                drawn = [batch.keys.row.tolist() for batch in replay]
        one = gt.Replay(store, Uniform(seed=2), B, group=dist.group.WORLD)
        other = gt.Replay(store, Uniform(seed=2), B, group=dist.group.WORLD)
        assert [one.sample().keys.row.tolist(), one.sample().keys.row.tolist()] == drawn
        assert other.sample().keys.row.tolist() == drawn[0]
        one.close()
        assert other.sample().keys.row.tolist() == drawn[1]
        other.close()
    say(rank=rank, drawn=drawn)


def leaves(name: str) -> None:
    """Ends like a script that closes nothing."""
    rank = dist.get_rank()
    store = store_of(f"{name}-{rank}", N * rank // 2, N * (rank + 1) // 2)
    replay = gt.Replay(store, Uniform(), B, group=dist.group.WORLD)
    for _ in range(5):
        replay.sample()
    sys.exit(0)


def interrupted(name: str) -> None:
    """Rank 1 stops answering; rank 0 is interrupted while it waits for a batch, and says how long that took."""
    rank = dist.get_rank()
    with store_of(f"{name}-{rank}", N * rank // 2, N * (rank + 1) // 2) as store:
        replay = gt.Replay(store, Uniform(), B, group=dist.group.WORLD, prefetch=int(os.environ["PREFETCH"]))
        replay.sample()
        if rank == 1:
            time.sleep(1000)
        threading.Timer(0.3, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
        began_s = time.monotonic()
        try:
            while True:
                replay.sample()
        except KeyboardInterrupt:
            say(waited_s=time.monotonic() - began_s)
    sys.stdout.flush()
    os._exit(0)


def forks(name: str) -> None:
    """Rank 0 forks, and its child uses the group; both ranks draw on."""
    rank = dist.get_rank()
    with store_of(f"{name}-{rank}", N * rank // 2, N * (rank + 1) // 2) as store:
        ranks = TorchRankGroup([0, 1], timeout_s=20)
        replay = gt.Replay(store, Uniform(), B, group=ranks, prefetch=0)
        replay.sample()
        if rank == 0:
            child = os.fork()
            if child == 0:
                try:
                    ranks.all_gather(np.zeros(1, np.uint8))
                except PeerLostError as error:
                    say(child=str(error))
                ranks.abort("the child's own affair")
                os._exit(0)
            os.waitpid(child, 0)
        say(rank=rank, drawn=replay.sample().draw.tolist())
        replay.close()


def killed(name: str) -> None:
    """Rank 1 kills itself (or stops) in the middle; the others say what they see, and when."""
    rank, how = dist.get_rank(), os.environ["HOW"]
    store = store_of(f"{name}-{rank}", N * rank // 3, N * (rank + 1) // 3)
    prefetch = int(os.environ["PREFETCH"])
    lag = prefetch + int(os.environ.get("EXTRA_LAG", "0"))
    options: Any = {"prefetch": prefetch, "update_lag": lag, "timeout_s": 3}
    replay = replay_of(store, Uniform(seed=1), B, group=dist.group.WORLD, **options)
    for step in range(1000):
        if rank == 1 and step == 5:
            os.kill(os.getpid(), 9 if how == "kill" else 19)
        began_s = time.monotonic()
        try:
            replay.sample()
        except PeerLostError as error:
            say(rank=rank, step=step, error=str(error), waited_s=time.monotonic() - began_s)
            break
    replay.close()
    store.close()
    # Leave at once: torch's own shutdown would wait for the dead rank.
    sys.stdout.flush()
    os._exit(0)


def dies_in_the_agreement(name: str) -> None:
    """Rank 1 ends or stops at a place of the exchange of a read; the others say what they see, and when.

    WHERE: "before" it; "told one": rank 0 has what it tells, rank 2 has not; "between" the all-gather and the rows,
    where there are both; "after" it. DIRECT=0 for groups so large that what is told goes by an all-gather.
    """
    rank, how, where = dist.get_rank(), os.environ["HOW"], os.environ["WHERE"]
    if os.environ["DIRECT"] == "0":
        read_agreement.DIRECT_RANKS = 0
    exchange, calls = read_agreement.ReadAgreement.exchange, 0

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    def exchange_and_end(self: Any, sends: Any, receives: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls < 4:
            exchange(self, sends, receives, **options)
            return
        told = np.zeros(1, bool)
        if where == "told one":
            self.members.group.exchange([(0, flat_bytes(told)), *(each for each in sends if each[0] == 0)], [])
        elif where == "between":
            self.members.all_gather(told)
        elif where == "after":
            exchange(self, sends, receives, **options)
        end()

    if rank == 1:  # it takes in Python the steps that the others take natively
        read_agreement.ReadAgreement.exchange = exchange_and_end
        sharded_sampler.RADIX = 0
    store = store_of(f"{name}-{rank}", N * rank // 3, N * (rank + 1) // 3)
    replay = replay_of(store, Uniform(seed=1), B, group=dist.group.WORLD, prefetch=0, timeout_s=3)
    seen = []
    for step in range(1000):
        began_s = time.monotonic()
        try:
            replay.sample()
        except PeerLostError as error:
            seen.append(str(error))
            if len(seen) == 2:  # it stays an error
                break
            say(rank=rank, step=step, error=str(error), waited_s=time.monotonic() - began_s)
    began_s = time.monotonic()
    replay.close()
    store.close()
    say(again=seen[1], closed_s=time.monotonic() - began_s)
    os._exit(0)  # torch's own shutdown would wait for the dead rank


if __name__ == "__main__":
    scenario, name = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", os.environ["MEET"], timedelta(seconds=30), size, rank)
    scenarios = (
        batches,
        packed,
        kept,
        steps,
        mesh,
        killed,
        again,
        leaves,
        interrupted,
        forks,
        opens,
        dies_in_the_agreement,
    )
    {each.__name__: each for each in scenarios}[scenario](name)
    dist.destroy_process_group()
