"""One rank of `geartrain bench ranks`: executes the benchmark's requests, all ranks at the same time.

Reads one JSON object a line from stdin and answers each with one on stdout (client: harness/fleet.py):

    {"do": "listen", "host": "10.77.0.1"}                 -> {"port": 40123}: rank 0 hosts the job's key-value store
    {"do": "join", "host": ..., "port": ..., "rank": 1, "size": 4}                          -> {}
    {"do": "fill", "store": "bench", "rows": 3000, "row_bytes": 102400, "capacity": 3000}   -> {"rows": 3000}
    {"do": "floor", "store": ..., "rows": 64, "calls": 20, "threads": 2, "stream": false}
                                                          -> {"seconds": a call}: a C loop copies random rows
    {"do": "prepare", "store": ..., "strategy": "prioritized", "batch": 256, "assignment": "local_first"}   -> {}
                                                          ("learns": priorities are updated after every batch)
    {"do": "warm", "batches": 3}                          -> {}: takes batches that are not measured
    {"do": "go", "batches": 40, "train_ms": 100}          -> {"ends_s": [...], "wait_s": ..., "stats": {...}, ...}
    {"do": "finish"}                                      -> {}: the replay is closed
    {"do": "leave"}                                       -> {}: another group may be joined

"ends_s" are the times at which batches were ready (and trained on), from the start of the lap. Output of
libraries goes to stderr. An answer {"error": "..."} ends the rank; so does the end of stdin.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

import geartrain.selection as selection
import geartrain_bench.store.floors as floors
from geartrain.core.schema import Field
from geartrain.errors import ArgumentError
from geartrain.replay.batch import Batch
from geartrain.replay.distributed.assignment import Assignment
from geartrain.replay.options import RankOptions, ReplayOptions
from geartrain.replay.replay import Replay
from geartrain.store.store import Store

SEED = 20230723
TIMEOUT_S = 120.0
STRATEGIES: dict[str, Callable[[], Any]] = {
    "prioritized": lambda: selection.Prioritized(seed=SEED),
    "uniform": lambda: selection.Uniform(seed=SEED),
    "fifo": selection.Fifo,
    "top-k": selection.TopK,
}


class Rank:
    """State of a rank."""

    def __init__(self) -> None:
        self.stores: dict[str, Store] = {}
        self.keeper: Any = None
        self.replay: Replay | None = None
        self.learns = False
        self.random = np.random.default_rng(SEED)

    def listen(self, host: str) -> dict[str, Any]:
        """Hosts the key-value store of a later job."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.keeper = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return {"port": self.keeper.port}

    def join(self, host: str, port: int, rank: int, size: int) -> dict[str, Any]:
        """Joins the job."""
        import torch
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        torch.set_num_threads(1)
        timeout = timedelta(seconds=TIMEOUT_S)
        store = TCPStore(host, port, is_master=False, timeout=timeout) if self.keeper is None else self.keeper
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        return {}

    def leave(self) -> dict[str, Any]:
        """Leaves the job."""
        import torch.distributed as dist

        dist.destroy_process_group()
        self.keeper = None
        return {}

    def fill(self, store: str, rows: int, row_bytes: int, capacity: int) -> dict[str, Any]:
        """Opens or creates a store and fills it to so many rows of noise, with exponential priorities."""
        fields = {"x": Field((row_bytes // 4,), "float32", per_row=True)}
        if store not in self.stores:
            self.stores[store] = Store.open(store, fields, create="missing", capacity=capacity)
        one = self.stores[store]
        random = np.random.default_rng(SEED + len(one))
        noise = random.standard_normal((64, row_bytes // 4), np.float32)
        while len(one) < rows:
            n = min(64, rows - len(one))
            one.insert({"x": noise[:n]}, priorities=random.standard_exponential(n) + 0.05)
        return {"rows": len(one)}

    def floor(self, store: str, rows: int, calls: int, threads: int, stream: bool) -> dict[str, Any]:
        """Copies so many random rows out of the store into warm memory, in C."""
        one = self.stores[store]
        column = one.column("x")
        out = floors.aligned((rows, *column.shape[1:]), one.fields["x"])
        chosen = np.random.default_rng(SEED).integers(0, len(one), (calls + 1, rows), dtype=np.uint32)
        parts = min(threads, rows)

        def work(part: int, first: int, last: int) -> None:
            mine = slice(rows * part // parts, rows * (part + 1) // parts)
            for some in chosen[first:last]:
                floors.gather(column, out[mine], some[mine], stream)

        return {"seconds": floors.in_parts(calls, parts, work).seconds}

    def prepare(
        self,
        store: str,
        strategy: str,
        batch: int,
        assignment: Assignment,
        learns: bool = False,
        update_lag: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Creates a replay over all ranks. `learns`: its consumer updates priorities."""
        import torch.distributed as dist

        self.replay = Replay(
            self.stores[store],
            STRATEGIES[strategy](),
            batch,
            group=RankOptions(dist.group.WORLD, assignment=assignment),
            options=ReplayOptions(timeout_s=TIMEOUT_S, update_lag=update_lag),
            **options,
        )
        self.learns = learns
        return {}

    def warm(self, batches: int) -> dict[str, Any]:
        """Takes batches that are not measured."""
        replay = self.prepared()
        for _ in range(batches):
            self._learn(replay, replay.sample())
        return {}

    def prepared(self) -> Replay:
        """The replay; raises `ArgumentError` where there is none yet."""
        if self.replay is None:
            raise ArgumentError("batches before prepare")
        return self.replay

    def _learn(self, replay: Replay, batch: Batch) -> None:
        if self.learns:
            replay.update_priorities(batch.keys, self.random.standard_exponential(len(batch.keys)) + 0.05)

    def go(self, batches: int, train_ms: float) -> dict[str, Any]:
        """Takes batches and trains on each for `train_ms`: sleeps, as on a CPU while a GPU computes."""
        replay = self.prepared()
        before = replay.stats()
        cpu_s = time.process_time()
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        ends_s = []
        began_s = time.perf_counter()
        wait_s, rows = 0.0, 0
        for _ in range(batches):
            asked_s = time.perf_counter()
            batch = replay.sample()
            wait_s += time.perf_counter() - asked_s
            rows += len(batch.keys)
            if not self.learns:
                del batch  # its memory may be used again
            if train_ms:
                time.sleep(train_ms / 1e3)
            if self.learns:
                self._learn(replay, batch)
            ends_s.append(time.perf_counter() - began_s)
        after = replay.stats()
        return {
            "ends_s": ends_s,
            "wait_s": wait_s,
            "rows": rows,
            "cpu_s": time.process_time() - cpu_s,
            "switches": resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches,
            "stats": {key: now - before.get(key, 0) for key, now in after.items() if isinstance(now, int | float)},
        }

    def finish(self) -> dict[str, Any]:
        """Closes the replay."""
        if self.replay is not None:
            self.replay.close()
            self.replay = None
        return {}

    def end(self) -> None:
        """Releases all resources."""
        self.finish()
        for store in self.stores.values():
            store.close()


def answer_requests(make: Callable[[], Any]) -> None:
    """Answers requests with the methods of `make()`'s object until end of input; then calls its `end`."""
    # Libraries print to stdout; the real one is reserved for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(words: dict[str, Any]) -> None:
        answers.write(json.dumps(words) + "\n")
        answers.flush()

    rank = make()
    try:
        while line := sys.stdin.readline():
            request = json.loads(line)
            what = request.pop("do")
            try:
                answer(getattr(rank, what)(**request))
            except Exception as error:
                answer({"error": f"{type(error).__name__}: {error}"[:800]})
                return
    finally:
        rank.end()


def main() -> None:
    """Command line of `python -m geartrain_bench.distributed_replay.worker`."""
    answer_requests(Rank)


if __name__ == "__main__":
    main()
