"""A rank in a process of its own: `collectives_worker.py DIRECTORY RANK SIZE OPTIONS`."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from collectives_crew import group_of

from geartrain.errors import GeartrainError


class DirectoryStore:
    """What a torch store does, in files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, key: str) -> Path:
        return self.root / key.replace("/", "_")

    def set(self, key: str, value: str) -> None:
        beside = self.path(key).with_suffix(".new")
        beside.write_text(value)
        beside.rename(self.path(key))

    def get(self, key: str) -> str:
        return self.path(key).read_text()

    def check(self, keys: list[str]) -> bool:
        return all(self.path(key).exists() for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        until = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > until:
                raise RuntimeError("timed out")
            time.sleep(0.005)


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def main() -> None:
    root, rank, size, options = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    exchanges = options.pop("exchanges", False)
    steps, op_timeout_s, n = options.pop("steps"), options.pop("op_timeout_s", 20.0), options.pop("n", 200_000)
    group = group_of(rank, size, store=DirectoryStore(root), **{"timeout_s": 30.0, **options})
    try:
        for step in range(steps):
            array = np.full(n, rank + step, np.float32)
            if exchanges:  # an all-reduce in two halves
                parts = np.array_split(array, size)
                group.reduce_scatter(parts, parts[rank], timeout_s=op_timeout_s)
                group.all_gather(parts[rank], parts, timeout_s=op_timeout_s)
            else:
                group.all_reduce(array, timeout_s=op_timeout_s)
            assert (array == size * (size - 1) / 2 + size * step).all(), step
            say(step=step)
        say(done=True, reducers=list(group.reducers), links=group.counters()["links"], epoch=group.epoch)
    except GeartrainError as error:
        say(error=type(error).__name__, text=str(error), ranks=error.ranks, reducers=error.reducers, at=time.time())  # type: ignore[attr-defined]
    group.close(2.0)


if __name__ == "__main__":
    main()
