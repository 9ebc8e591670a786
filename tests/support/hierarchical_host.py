"""A host's ranks, forked from one process: `hierarchical_host.py DIRECTORY HOST RANKS HOSTS OPTIONS`, JSON lines."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from collectives_crew import group_of
from collectives_worker import DirectoryStore

from geartrain.errors import GeartrainError


def say(**words: Any) -> None:
    os.write(1, (json.dumps(words) + "\n").encode())  # one write: ranks share the pipe


def train(root: Path, rank: int, size: int, options: dict[str, Any]) -> None:
    steps, count, gate = options.pop("steps"), options.pop("count"), options.pop("gate", None)
    group = group_of(rank, size, store=DirectoryStore(root), **{"timeout_s": 60.0, **options})
    try:
        digest = hashlib.sha256()
        for step in range(steps):
            array = np.random.default_rng(1000 * step + rank).standard_normal(count).astype(np.float32)
            group.all_reduce(array)
            digest.update(array.tobytes())
            if step == 0:
                links = group.counters()["links"]  # before any rank leaves
                say(rank=rank, pid=os.getpid(), ready=True)
                while gate is not None and not Path(gate).exists():
                    time.sleep(0.01)
        say(rank=rank, digest=digest.hexdigest(), links=links)
    except GeartrainError as error:
        say(rank=rank, error=type(error).__name__, ranks=error.ranks, text=str(error))  # type: ignore[attr-defined]
    group.close(5.0)


def main() -> None:
    root, host, ranks, hosts = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    children = []
    for place in range(ranks):
        pid = os.fork()  # before anything starts a thread
        if pid == 0:
            try:
                train(root, host * ranks + place, hosts * ranks, json.loads(sys.argv[5]))
                os._exit(0)
            finally:
                os._exit(1)
        children.append(pid)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
