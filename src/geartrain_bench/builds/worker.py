"""A process of one build: makes batches or calls in laps, as its stdin asks for them.

Run as a file by the interpreter of either build, so it uses only what both of them have.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

import geartrain.rpc as rpc
from geartrain.core.schema import Field
from geartrain.ranks.rank_group import SingleRank
from geartrain.replay.replay import Replay
from geartrain.replay.transitions import Transitions
from geartrain.selection.random import Prioritized, Uniform
from geartrain.store.recorder import recorded_fields
from geartrain.store.store import Store
from geartrain_bench.distributed_replay.worker import Rank, answer_requests

SEED = 5
#: Bytes of the rows of a store, whatever their size.
STORE_BYTES = 150_000_000
EPISODES, STEPS = 60, 1001


@rpc.function
def echo(data: bytes) -> bytes:
    """What it was given."""
    return data


class Worker(Rank):
    """What one process measures; joins a group as a rank of the other benchmarks does."""

    def __init__(self) -> None:
        super().__init__()
        self.case = contextlib.ExitStack()
        self.one: Callable[[], object] = lambda: None

    def pin(self, number: int) -> dict[str, Any]:
        """Stays on one core, the `number`th one of those that there are, and all over again."""
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})
        return {}

    def rows(self, row_bytes: int, batch: int, strategy: str, group: str | None) -> dict[str, Any]:
        """Batches of whole rows, read as NumPy arrays; "prioritized" with importance weights and updates.

        `group`: None, "single" for a group of one, or "world" for all that have joined.
        """
        fields = {"x": Field((row_bytes // 4,), "float32", per_row=True)}
        capacity = STORE_BYTES // row_bytes
        store = self._store(fields, max_length=1, capacity=capacity)
        random = np.random.default_rng(SEED)
        while (left := capacity - len(store)) > 0:
            n = min(256, left)
            rows = random.standard_normal((n, row_bytes // 4), np.float32)
            store.insert({"x": rows}, priorities=random.standard_exponential(n) + 0.05)
        learns = strategy == "prioritized"
        selection = Prioritized(seed=SEED, beta=0.4) if learns else Uniform(seed=SEED)
        of: Any = {"group": _group(group)} if group else {}
        replay = self.case.enter_context(Replay(store, selection, batch, prefetch=0, output="numpy", **of))
        priorities = random.standard_exponential(batch) + 0.05

        def one() -> None:
            made = replay.sample()
            _ = made["x"]
            if learns:
                replay.update_priorities(made.keys, priorities[: len(made.keys)])

        self.one = one
        return {}

    def transitions(self, batch: int, shape: list[int], dtype: str, frame_stack: int) -> dict[str, Any]:
        """Batches of transitions of recorded episodes, with five arrays read as NumPy arrays."""
        parts = {"obs": Field(tuple(shape), dtype), "action": Field((6,), "float32"), "reward": Field((), "float32")}
        episodes = EPISODES if len(shape) == 1 else 3
        store = self._store(recorded_fields(parts), max_length=STEPS, capacity=episodes)
        random = np.random.default_rng(SEED)
        made: dict[str, Any] = {}
        for name, field in store.fields.items():
            noise = random.integers(0, 256, (1, STEPS, *field.shape), np.uint8)
            made[name] = np.zeros(noise.shape, bool) if field.dtype == "bool" else noise.astype(field.dtype)
        for _ in range(episodes):
            store.insert(made, lengths=[STEPS])
        view = Transitions(gamma=0.99, frame_stack=frame_stack)
        selection = Uniform(seed=SEED, over="steps")
        replay = self.case.enter_context(Replay(store, selection, batch, view=view, prefetch=0, output="numpy"))

        def one() -> None:
            found = replay.sample()
            for name in ("obs", "next_obs", "action", "reward", "discount"):
                _ = found[name]

        self.one = one
        return {}

    def calls(self, payload_bytes: int) -> dict[str, Any]:
        """Calls of a function of this process's own node by another one of its nodes."""
        server = self.case.enter_context(rpc.Node("server", secret=b"of the benchmark"))
        peers = {"server": server.address}
        client = self.case.enter_context(rpc.Node("client", peers=peers, secret=b"of the benchmark"))
        data = bytes(payload_bytes)
        self.one = lambda: client.call("server", "echo", data)
        return {}

    def lap(self, calls: int) -> dict[str, Any]:
        """Seconds of so many calls, by the wall clock and of all threads."""
        one = self.one
        cpu_s, began_s = time.process_time(), time.perf_counter()
        for _ in range(calls):
            one()
        return {"wall_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - cpu_s}

    def clear(self) -> dict[str, Any]:
        """Ends the case."""
        self.one = lambda: None
        self.case.close()
        return {}

    def end(self) -> None:
        """Releases all resources."""
        self.clear()
        super().end()

    def _store(self, fields: Any, **sizes: Any) -> Store:
        return self.case.enter_context(Store.create(f"builds-{uuid.uuid4().hex[:12]}", fields, **sizes))


def _group(name: str) -> Any:
    if name == "single":
        return SingleRank()
    import torch.distributed as dist

    return dist.group.WORLD


if __name__ == "__main__":
    answer_requests(Worker)
