"""Ranks of jobs on the backend "geartrain", for tests/collectives/test_process_group_processes.py.

process_group_worker.py SCENARIO,SCENARIO      one rank, told by the environment which (under torchrun, say)
process_group_worker.py                        forks ranks as lines on stdin ask for, so that torch is imported once
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from deadlines import patience
from preloaded import end
from process_group_sharded import fsdp, hsdp, zero
from process_group_training import Net, batch, checksum, counters_of_world, reference, say, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import geartrain_autoload

warnings.filterwarnings("ignore", category=FutureWarning)


def ddp() -> None:
    """Every kind of DDP, on Gloo and on geartrain: the same weights, to the bit, where a sum has two terms."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    def bf16(state, bucket):  # DDP checks annotations, and refuses the hook by its name on CPUs, whatever the backend
        return bf16_compress_hook(state, bucket)

    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "unused": {"find_unused_parameters": True, "part": True},
        "view": {"gradient_as_bucket_view": True},
        "bf16": {"hook": bf16},
        "static": {"static_graph": True},
    }
    gloo = dist.new_group(backend="gloo")
    for name, options in kinds.items():
        before = counters_of_world()["operations"]
        ours = train(dist.group.WORLD, **options)
        say(kind=name, ours=ours, gloo=train(gloo, **options), operations=counters_of_world()["operations"] - before)
    say(counters=counters_of_world())


def hook_kinds(group: Any) -> dict[str, tuple[Any, Any]]:
    """torch's communication hooks, with the state of each; but for the quantization hooks, which fail on Gloo."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook

    def power(rank: int = 2) -> Any:
        return powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=2)

    local = post_localSGD_hook.PostLocalSGDState(group, group, start_localSGD_iter=3)
    return {
        "allreduce": (default_hooks.allreduce_hook, group),
        "fp16": (default_hooks.fp16_compress_hook, group),
        "bf16": (default_hooks.bf16_compress_hook, group),
        "power": (powerSGD_hook.powerSGD_hook, power()),
        "batched power": (powerSGD_hook.batched_powerSGD_hook, power()),
        "local": (post_localSGD_hook.post_localSGD_hook, local),
        "fp16 of power": (default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), power(1)),
        "bf16 of allreduce": (default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), group),
    }


def train_by_hook(group: Any, name: str, steps: int = 6) -> list[float]:
    """DDP of a small net in one bucket, with a hook; returns its losses."""
    hook, state = hook_kinds(group)[name]

    def called(state, bucket):  # DDP checks annotations, and refuses some hooks on CPUs by their name
        return hook(state, bucket)

    net = Net()
    model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=100)
    model.register_comm_hook(state, called)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        x, y = batch(step, group.rank())
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def hooks() -> None:
    """Every communication hook of torch's, on Gloo and on geartrain."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    # The batched hook of some versions of torch hands over a matrix, where this wants a batch of them.
    orthogonalize = powerSGD_hook._orthogonalize
    powerSGD_hook._orthogonalize = lambda m, epsilon=0: orthogonalize(m if m.dim() == 3 else m[None], epsilon)
    gloo = dist.new_group(backend="gloo")
    for name in hook_kinds(gloo):
        say(hook=name, gloo=train_by_hook(gloo, name), ours=train_by_hook(dist.group.WORLD, name))
    say(counters=counters_of_world())


def everything_else() -> None:
    """All that torch.distributed offers beside all-reduce, as programs call it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    one = torch.full((3,), float(rank))
    others = [torch.full((3,), float(r)) for r in range(size)]

    def same(found: Any, wanted: Any) -> None:
        assert torch.equal(found, wanted), (found, wanted)

    dist.broadcast(t := one.clone(), src=1)
    same(t, others[1])
    dist.all_gather(found := [torch.empty(3) for _ in range(size)], one)
    same(torch.stack(found), torch.stack(others))
    dist.all_gather_into_tensor(t := torch.empty(3 * size), one)
    same(t, torch.cat(others))
    dist.reduce(t := one.clone(), dst=0)
    if rank == 0:
        same(t, sum(others))
    dist.gather(one, found := [torch.empty(3) for _ in range(size)] if rank == 0 else None, dst=0)
    if rank == 0:
        same(torch.stack(found), torch.stack(others))
    dist.scatter(t := torch.empty(3), [o + 10 for o in others] if rank == 0 else None, src=0)
    same(t, one + 10)
    dist.reduce_scatter(t := torch.empty(3), [one + r for r in range(size)])
    same(t, sum(others) + size * rank)
    dist.reduce_scatter_tensor(t := torch.empty(3), torch.cat([one + r for r in range(size)]))
    same(t, sum(others) + size * rank)
    dist.all_to_all(found := [torch.empty(3) for _ in range(size)], [one * 10 + r for r in range(size)])
    same(torch.stack(found), torch.stack([o * 10 + rank for o in others]))
    dist.all_to_all_single(t := torch.empty(size), torch.arange(size) + 10.0 * rank)
    same(t, torch.arange(size) * 10.0 + rank)
    if rank == 0:
        dist.send(one + 5, dst=1)
        dist.recv(t := torch.empty(3))
    elif rank == 1:
        dist.recv(t := torch.empty(3), src=0)
        same(t, others[0] + 5)
        dist.send(t, dst=0)
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.group.WORLD.monitored_barrier(timeout=timedelta(seconds=20))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    dist.broadcast_object_list(what := [rank, "x"], src=1)
    assert what == [1, "x"]
    before = counters_of_world()
    assert before["operations"] == 0

    for _ in range(100):  # temporary tensors, which Gloo's threads are the last to drop
        dist.reduce_scatter(torch.empty(3), [one + r for r in range(size)])
        dist.all_gather([torch.empty(3) for _ in range(size)], one + 1)
        dist.broadcast(one + 1, src=0)

    # And the ways to an all-reduce: as a function, as part of a graph, several as one.
    import torch.distributed._functional_collectives as functional

    same(functional.all_reduce(one, "sum", dist.group.WORLD) + 0, sum(others))
    with dist._coalescing_manager():
        dist.all_reduce(a := one.clone())
        dist.all_reduce(b := one * 2)
    same(a, sum(others))
    same(b, 2 * sum(others))
    with dist._coalescing_manager(async_ops=True) as several:
        dist.all_reduce(a := one.clone())
        dist.all_reduce(b := one * 2)
    several.wait()
    same(torch.stack([a, b]), torch.stack([sum(others), 2 * sum(others)]))
    dist.all_reduce_coalesced([a := one.clone(), b := one + 1])
    same(torch.stack([a, b]), torch.stack([sum(others), sum(others) + size]))
    z = torch.view_as_complex(torch.stack([one, one * 2], -1))
    dist.all_reduce(z)
    same(torch.view_as_real(z), torch.stack([sum(others), 2 * sum(others)], -1))
    after = counters_of_world()
    assert (after["operations"], after["inner_operations"]) == (5, 0), after
    dist.all_reduce(t := one + 1, op=dist.ReduceOp.PRODUCT)
    same(t, torch.full((3,), float(torch.arange(1, size + 1).prod())))
    assert (counters_of_world()["operations"], counters_of_world()["inner_operations"]) == (6, 0)
    assert dist.get_backend() == "geartrain" and dist.group.WORLD.name() == "geartrain"
    say(ok=True)


def mesh() -> None:
    """Four ranks: sums in the order of ranks; subgroups; a mesh; HSDP with a replicate dimension of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    say(weights=train(dist.group.WORLD), reference=reference(size))
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for name in ("a", "b"):
        group = grid[name].get_group()
        dist.all_reduce(t := torch.tensor([float(rank)]), group=group)
        say(dimension=name, ranks=dist.get_process_group_ranks(group), total=t.item(), kind=type(group).__name__)
    odd = dist.new_group([1, 3], timeout=timedelta(seconds=30))
    if rank in (1, 3):
        dist.all_reduce(t := torch.tensor([float(rank)]), group=odd)
        assert t.item() == 4 and odd.counters()["operations"] == 1
        dist.destroy_process_group(odd)
    never = dist.new_group([0, 2])  # made, and not used: no connections
    if rank in (0, 2):
        assert never.counters()["groups"] == {}


def victim() -> None:
    """Trains until VICTIM does what FATE says in the backward pass of step 3; the others say how it ended."""
    rank, fate, victim = dist.get_rank(), os.environ["FATE"], int(os.environ["VICTIM"])
    options = json.loads(os.environ.get("DDP", "{}"))
    model = DistributedDataParallel(Net(bool(options)), bucket_cap_mb=0.3, **options)
    say(pid=os.getpid())
    if "LIMIT_S" in os.environ:
        dist.group.WORLD.set_timeout(timedelta(seconds=float(os.environ["LIMIT_S"])))

    def die(_: Any) -> None:
        if fate == "size":
            dist.all_reduce(torch.ones(77))
        os.kill(os.getpid(), signal.SIGKILL if fate == "kill" else signal.SIGSTOP)

    began = time.monotonic()
    try:
        for step in range(40):
            if step == 3 and rank == victim:
                model.module.second.weight.register_hook(die)
            began = time.monotonic()
            x, y = batch(step, rank)
            nn.functional.mse_loss(model(x), y).backward()
    except RuntimeError as error:
        say(error=str(error), kind=type(error).__name__, step=step, took_s=time.monotonic() - began)
    with suppress(RuntimeError):
        dist.all_reduce(torch.ones(3))
        say(error="an operation after the failure went on")
    began = time.monotonic()
    dist.destroy_process_group()
    say(destroyed_s=time.monotonic() - began)


def leave() -> None:
    """All-reduces and leaves at once: whoever is last still gets what it is owed."""
    for i in range(3):
        dist.all_reduce(t := torch.full((200_000,), 1.0 + i))
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(0.05)
        assert t[0] == dist.get_world_size() * (1 + i)
    dist.destroy_process_group()
    say(left=True)


def forget() -> None:
    """Ends without `destroy_process_group`, with a future on its way."""
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    work.get_future().wait()
    dist.all_reduce(torch.ones(1000), async_op=True).get_future()
    say(forgot=True)


def again() -> None:
    """Destroys its groups and makes them again, over the same store and by the same names."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.FileStore(os.environ["MEET"] + "-again", size)
    sums = []
    dist.barrier()  # a rank that destroys its group while another one still connects ends that one's Gloo
    for _ in range(3):
        dist.destroy_process_group()
        limit = timedelta(seconds=patience(20))
        dist.init_process_group("geartrain", store=store, rank=rank, world_size=size, timeout=limit)
        for group in (dist.group.WORLD, dist.new_group()):
            dist.all_reduce(t := torch.ones(10), group=group)
            sums.append(t[0].item())
    say(sums=sums)


def outlives() -> None:
    """Trains, loses a reducer in the middle of a step, and ends where it would have."""
    rank, steps = dist.get_rank(), 8
    net = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    fate, how = int(os.environ["REDUCER_PID"]), int(os.environ["SIGNAL"])
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        kills = net.second.weight.register_hook(lambda _: os.kill(fate, how)) if step == 3 and rank == 0 else None
        loss.backward()
        if kills is not None:
            kills.remove()
        optimizer.step()
    lost = counters_of_world()["groups"]["cpu"]["lost_reducers"]
    say(weights=checksum(net.parameters()), reference=reference(dist.get_world_size(), steps), lost_reducers=lost)


def restart() -> None:
    """Under torchrun: the last rank dies in the middle of the job's first life."""
    rank, size, life = dist.get_rank(), dist.get_world_size(), os.environ["TORCHELASTIC_RESTART_COUNT"]

    def die(_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    model = DistributedDataParallel(Net(), bucket_cap_mb=0.3)
    if life == "0" and rank == size - 1:
        model.module.second.weight.register_hook(die)
    for step in range(3):
        x, y = batch(step, rank)
        nn.functional.mse_loss(model(x), y).backward()
    say(rank=rank, life=life, operations=counters_of_world()["operations"], epoch=dist.group.WORLD.options.epoch)


def compiled() -> None:
    """DDP of a compiled module, and a compiled DDP: the weights of the plain one."""
    weights = [train(dist.group.WORLD)]
    weights.append(train(dist.group.WORLD, compile="ddp"))
    weights.append(train(dist.group.WORLD, compile="module"))
    say(weights=weights)


def example() -> None:
    """One of examples/, as torchrun would start it, with the variable that makes geartrain its default."""
    geartrain_autoload.autoload()
    script, *arguments = json.loads(os.environ["EXAMPLE"])
    sys.argv = [script, *arguments]
    with socket.socket() as probe:  # rank 0's choice of a port, told through a file
        probe.bind(("127.0.0.1", 0))
        mine = str(probe.getsockname()[1])
    port = dist.FileStore(os.environ["MEET"] + ".port", int(os.environ["WORLD_SIZE"]))
    if os.environ["RANK"] == "0":
        port.set("port", mine)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port.get("port").decode())
    # torch's deadlock (its issue 56297): a DDP module that is dropped after its group frees the group with the GIL
    # held, and waits for a thread of Gloo's that wants the GIL to drop the last operation. So it is not freed here.
    kept, destroy = [], dist.destroy_process_group
    dist.destroy_process_group = lambda: (kept.append(dist.group.WORLD), destroy())
    runpy.run_path(script, run_name="__main__")


SCENARIOS = (
    everything_else,
    ddp,
    hooks,
    mesh,
    hsdp,
    fsdp,
    zero,
    victim,
    leave,
    again,
    outlives,
    restart,
    compiled,
    example,
    forget,
)


def launch() -> None:
    """Forks ranks: {"scenarios", "size", "folder", "env"} a line; tells pids, and how each has ended."""
    importlib.import_module("torch._dynamo")  # an optimizer imports it: more than a second of every rank
    gc.freeze()
    print(json.dumps({"ready": True}), flush=True)
    while True:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                print(json.dumps({"pid": ended[0], "code": os.waitstatus_to_exitcode(ended[1])}), flush=True)
        if not select.select([sys.stdin], [], [], 0.02)[0]:
            continue
        line = os.read(0, 1 << 16)  # one request: the tests wait for the answer
        if not line:
            return
        job = json.loads(line)
        pids = []
        for rank in range(job["size"]):
            pid = os.fork()
            if pid == 0:
                for name, to in (("out", 1), ("err", 2)):
                    os.dup2(os.open(f"{job['folder']}/{rank}.{name}", os.O_WRONLY | os.O_CREAT, 0o600), to)
                os.environ.update(job["env"], RANK=str(rank), WORLD_SIZE=str(job["size"]), MEET=f"{job['folder']}/meet")
                try:
                    main(job["scenarios"])
                except BaseException:
                    traceback.print_exc()
                    end(1)
                if "forget" in job["scenarios"]:
                    return  # how an interpreter ends with a group that nobody has destroyed is part of that one
                end(0)
            pids.append(pid)
        print(json.dumps({"pids": pids}), flush=True)


def main(scenarios: str) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=float(os.environ.get("TIMEOUT_S", patience(60))))
    names = scenarios.split(",")
    if names == ["example"]:
        pass  # it starts a group of its own
    elif "MEET" in os.environ:
        store = dist.FileStore(os.environ["MEET"], size)
        dist.init_process_group("geartrain", store=store, rank=rank, world_size=size, timeout=timeout)
    else:
        dist.init_process_group("geartrain", timeout=timeout)
    for scenario in SCENARIOS:
        if scenario.__name__ in names:
            scenario()
    if dist.is_initialized() and "forget" not in names:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1]) if len(sys.argv) > 1 else launch()
