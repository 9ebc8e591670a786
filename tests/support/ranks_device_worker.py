"""A rank of a real job whose batches land on a device: `python ranks_device_worker.py SCENARIO NAME`.

On a simulated device, whose collectives are Gloo's; with DEVICE=cuda on this rank's GPU, over NCCL.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from device_batches import check_same
from ranks_worker import say
from replay_calls import replay_of
from test_ranks_device import FIELDS, STEPS, B, N, values

import geartrain as gt
from geartrain.device.nccl import DeviceGroup
from geartrain.errors import PeerLostError
from geartrain.replay.device import Convert, DeviceOptions
from geartrain.selection import Fifo, GroupSampling, Prioritized, Uniform
from geartrain.tools.testing import SimulatedDevice


def device_of(rank: int) -> Any:
    if os.environ.get("DEVICE") != "cuda":
        return SimulatedDevice(rank)
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def finish(device: Any) -> None:
    torch.cuda.synchronize() if isinstance(device, str) else device.finish()


def store_of(name: str, rank: int, size: int) -> gt.Store:
    first, last = N * rank // size // 4 * 4, N * (rank + 1) // size // 4 * 4
    store = gt.Store.create(name, FIELDS, max_length=STEPS, capacity=N)
    store.native.advance_sequence(first + 1)
    lengths = [number % STEPS + 1 for number in range(first, last)]
    store.insert(values(first, last), lengths=lengths, priorities=[1 + number % 5 for number in range(first, last)])
    return store


def batches(name: str) -> None:
    """Every batch twice, in host memory and on the device; says how many bytes came from other ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = device_of(rank)
    convert = {"pixels": Convert("bfloat16", 1 / 255, 0.5)}
    received = []
    with store_of(f"{name}-{rank}", rank, size) as store:
        cases: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
            (Prioritized(seed=3, beta=0.5), {"window": 7, "assignment": "ordered"}, {}),
            (Uniform(seed=2, stratified=True), {"window": None, "assignment": "ordered"}, {"convert": convert}),
            (Fifo(), {"window": 9, "pad": "right", "assignment": "ordered"}, {"packed": True, "convert": convert}),
            (GroupSampling("group", 4, seed=1), {"window": 5}, {}),
        ]
        for strategy, settings, options in cases:
            replay = functools.partial(replay_of, store, strategy, B, num_batches=4, group=dist.group.WORLD, **settings)
            on_device = DeviceOptions(device, exchange=os.environ["EXCHANGE"], **options)  # type: ignore[arg-type]
            with replay() as slow, replay(device=on_device) as fast:
                for host, landed in zip(slow, fast, strict=True):
                    finish(device)
                    check_same(host, landed.to("cpu"), dict(on_device.convert), on_device.packed)
                received.append(fast.stats()["received_bytes"])
                (about,) = fast.describe()
    say(rank=rank, received=received, path=about["path"], exchange=about["exchange"])


def stages(name: str) -> None:
    """A pipeline: rows for the last stage come from the GPU of a rank that reads nothing itself."""
    from torch.distributed.device_mesh import init_device_mesh

    rank, size = dist.get_rank(), dist.get_world_size()
    mesh, device = init_device_mesh("cpu", (size, 1), mesh_dim_names=("pp", "dp")), device_of(rank)
    settings: dict[str, Any] = {
        "mesh": mesh,
        "inputs": ["pixels"],
        "targets": ["x", "group"],
        "num_batches": 3,
        "window": 6,
    }
    with store_of(f"{name}-{rank}", rank, size) as store:
        options = DeviceOptions(device, exchange="nccl")
        with (
            replay_of(store, Uniform(seed=1), B, **settings) as slow,
            replay_of(store, Uniform(seed=1), B, device=options, **settings) as fast,
        ):
            for host, landed in zip(slow, fast, strict=True):
                finish(device)
                check_same(host, landed.to("cpu"), {}, False)
            say(rank=rank, fields=sorted(landed), received=fast.stats()["received_bytes"])


def shared(name: str) -> None:
    """Ranks of one store: the batches of the last one are on a device, those of the others in host memory."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        store = store_of(name, 0, 1)
    dist.barrier()
    if rank:
        store = gt.Store.open(name)
    device = SimulatedDevice(rank) if rank == size - 1 else None
    options = None if device is None else DeviceOptions(device, path="staged")
    numbers = []
    with store:
        for strategy in (Uniform(seed=1), Prioritized(seed=3, beta=0.5)):
            settings: dict[str, Any] = {"window": 4, "num_batches": 4, "group": dist.group.WORLD, "timeout_s": 20}
            with replay_of(store, strategy, B, device=options, **settings) as replay:
                for batch in replay:
                    if device is not None:
                        device.finish()
                    numbers.append([batch.draw.tolist(), batch.keys.row.tolist()])
        dist.barrier()
    say(rank=rank, numbers=numbers)


def killed_in_all_to_all(name: str) -> None:
    """As `killed`, where the others are in the all-to-all, or will be, and have agreed on the batch."""
    if dist.get_rank() == 1:
        exchange, calls = DeviceGroup.all_to_all, itertools.count()

        def all_to_all(*args: Any) -> None:
            if next(calls) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            exchange(*args)

        DeviceGroup.all_to_all = all_to_all  # type: ignore[method-assign]
    killed(name, at=-1)


def killed(name: str, at: int = 5) -> None:
    """Rank 1 kills itself in the middle; the others say what they see, and when."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = device_of(rank)
    store = store_of(f"{name}-{rank}", rank, size)
    options = DeviceOptions(device, exchange="nccl")
    replay = replay_of(
        store, Uniform(seed=1), B, window=5, assignment="ordered", group=dist.group.WORLD, device=options, timeout_s=3
    )
    for step in range(1000):
        if rank == 1 and step == at:
            os.kill(os.getpid(), signal.SIGKILL)
        began_s = time.monotonic()
        try:
            replay.sample()
            finish(device)
        except PeerLostError as error:
            say(rank=rank, step=step, error=str(error), waited_s=time.monotonic() - began_s)
            break
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    scenario, name = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", os.environ["MEET"], timedelta(seconds=30), size, rank)
    {
        "batches": batches,
        "stages": stages,
        "shared": shared,
        "killed": killed,
        "killed_in_all_to_all": killed_in_all_to_all,
    }[scenario](name)
    dist.destroy_process_group()
