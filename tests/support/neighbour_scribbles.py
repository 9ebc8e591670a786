"""Ranks that read rows in each other's stores while a process writes anything over one: arguments SEED and SECONDS.

It writes where rows, words and sums are; the lock and the clients' records, which every process waits for, it leaves.
Whatever is not an error of geartrain ends the process. The last line of stdout counts batches and errors, as JSON.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import json
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from replay_calls import replay_of
from segment_images import STATUS

import geartrain as gt
import geartrain._native as _native
from geartrain.errors import GeartrainError
from geartrain.selection import Prioritized, Uniform
from geartrain.store.recorder import recorded_fields
from geartrain.tools.testing import ThreadRankGroup, run_ranks

ROWS, STEPS = 64, 12
TELLING = (0, 1, 2, 63, 64, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 32, 1 << 63, (1 << 64) - 1)
SHARED = recorded_fields({"obs": gt.Field((3,), "float32"), "reward": gt.Field((), "float32")}, share_rows=True)
PLAIN = {"obs": gt.Field((3,), "float32"), "id": gt.Field((), "int64", per_row=True)}


def filled(fields: dict[str, gt.Field], seed: int) -> gt.Store:
    """A full store."""
    store = gt.Store.create(None, fields, max_length=STEPS, capacity=ROWS, timeout_s=1)
    rng = np.random.default_rng(seed)
    values: dict[str, Any] = {}
    for name, field in fields.items():
        shape = (ROWS, *field.shape) if field.per_row else (ROWS, STEPS, *field.shape)
        values[name] = rng.integers(0, 2, shape).astype(field.dtype)
    store.insert(values, lengths=rng.integers(1, STEPS + 1, ROWS), priorities=rng.random(ROWS))
    return store


@contextlib.contextmanager
def scribbled(store: gt.Store, seed: int) -> Iterator[None]:
    """A process writes over the store's rows and sums in the meantime."""
    child = os.fork()
    if child == 0:
        chance = random.Random(seed)
        with Path(store.path).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        while os.getppid() != 1:
            at = chance.randrange(STATUS, len(memory) - 8) & ~3
            value = chance.choice(TELLING) if chance.random() < 0.6 else chance.getrandbits(64)
            width = chance.choice((4, 8))
            memory[at : at + width] = value.to_bytes(8, "little")[:width]
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def over_ranks(stores: list[gt.Store], until_s: float, seed: int, counts: collections.Counter[str]) -> None:
    """Two ranks draw global batches until one has an error."""
    strategy = Uniform(seed=seed) if seed % 2 else Prioritized(seed=seed, beta=0.5)
    window = None if seed % 3 == 0 else 4

    def body(rank: ThreadRankGroup) -> None:
        options: Any = {"output": "numpy", "prefetch": 0, "timeout_s": 2, "window": window}
        with replay_of(stores[rank.rank], strategy, 16, group=rank, **options) as replay:
            while time.monotonic() < until_s:
                replay.sample()
                counts["batches over ranks"] += 1

    counts["groups"] += 1
    try:
        run_ranks(ThreadRankGroup.make(2, one_host=True), body)
    except GeartrainError as error:
        counts[type(error).__name__] += 1


def calls_of(peeked: gt.Store, seed: int) -> list[Callable[[], object]]:
    """What may read a store that it has open to read."""
    rows = _native.Candidates(peeked.native)
    numbers, nothing = np.arange(32, dtype=np.uint32), np.empty(0, np.uint32)
    some = gt.Keys(np.arange(ROWS, dtype=np.uint32), np.ones(ROWS, np.uint32), store=peeked.id)
    return [
        peeked.keys,
        peeked.status,
        lambda: rows.draw(True, seed, 2, 0, numbers),
        lambda: rows.draw(False, seed, 2, 0, numbers),
        lambda: rows.draw_distinct(True, seed, 2, 0, 16, nothing),
        lambda: rows.draw_distinct(False, seed, 2, 0, 16, nothing),
        lambda: rows.first(0, 8, 0, nothing),
        lambda: gt.fetch(peeked, peeked.keys(), output="numpy", on_stale="drop"),
        lambda: gt.fetch(peeked, peeked.keys(), window=3, output="numpy", on_stale="drop"),
        lambda: gt.fetch(peeked, some, window=5, output="numpy", on_stale="drop"),
    ]


def main() -> None:
    """Runs for so many seconds."""
    seed, until_s = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
    faulthandler.enable()
    counts: collections.Counter[str] = collections.Counter()
    while time.monotonic() < until_s:
        seed += 1
        for fields in (PLAIN, SHARED):
            with filled(fields, 1) as mine, filled(fields, 2) as others:
                peeked = gt.Store.open(others.path, mode="r", adopt=True)
                with scribbled(others, seed):
                    if fields is PLAIN:
                        over_ranks([mine, others], min(until_s, time.monotonic() + 0.5), seed, counts)
                    for call in calls_of(peeked, seed) * 20:
                        try:
                            call()
                            counts["reads"] += 1
                        except GeartrainError as error:
                            counts[type(error).__name__] += 1
                peeked.close()
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
