"""torchrl's replay buffers over a storage in shared memory, and items whose values are their numbers."""

from __future__ import annotations

import os
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer

from geartrain.integrations.torchrl import RoundRobinWriter, SharedStorage, UniformSampler


def items(first: int, n: int) -> TensorDict:
    t = torch.arange(first, first + n)
    return TensorDict({"obs": t[:, None].repeat(1, 3).float(), "next": {"reward": t, "done": t % 7 == 6}}, [n])


def make(size: int = 1000, sampler: Any = None, batch_size: int = 64, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=SharedStorage(size, **options),
        sampler=UniformSampler() if sampler is None else sampler,
        writer=RoundRobinWriter(),
        batch_size=batch_size,
    )


def in_child(work: Any) -> int:
    """The exit status of a forked child that does this."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
