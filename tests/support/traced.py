"""A program whose trace has everything: batches made here and ahead, calls of all kinds, and all-reduces of two ranks.

python traced.py FOLDER RANK: rank 0 answers, rank 1 calls.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import numpy as np

import geartrain as gt
from geartrain import collectives, rpc
from geartrain.errors import RemoteError


class FileStore:
    """A rendezvous in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, key: str) -> Path:
        return self.folder / key.replace("/", "%")

    def set(self, key: str, value: str | bytes) -> None:
        beside = self._path(key + "~")
        beside.write_bytes(value.encode() if isinstance(value, str) else value)
        beside.rename(self._path(key))

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def wait(self, keys: list[str], timeout: object = None) -> None:
        while not self.check(keys):
            time.sleep(0.005)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._path(key).read_bytes()


@rpc.function(name="traced.echo")
def echo(value):
    return value


@rpc.function(name="traced.fail")
def fail():
    raise ValueError("on purpose")


@rpc.batched(max_size=2, max_wait_us=100)
def double(values):
    return [2 * value for value in values]


def main(folder: Path, rank: int) -> None:
    store = FileStore(folder)
    fields = {"x": gt.Field((2,), "float32")}
    with gt.Store.create(f"traced-{rank}", fields, max_length=1, capacity=9) as rows:
        rows.insert({"x": np.zeros((9, 1, 2), np.float32)})
        for prefetch in (0, 2):
            with gt.Replay(rows, gt.selection.Uniform(seed=0), 4, output="numpy", prefetch=prefetch) as replay:
                for _ in range(3):
                    replay.sample()
    with rpc.Node(f"node-{rank}", store=store) as node:
        if rank == 1:
            assert node.call("node-0", "traced.echo", 1) == 1
            assert node.call_async("node-0", "traced.echo", 2).result() == 2
            assert node.call("node-0", "double", 3) == 6
            node.tell("node-0", "traced.echo", 3)
            with contextlib.suppress(RemoteError):
                node.call("node-0", "traced.fail")
        with collectives.Group(rank, 2, store=store, options=collectives.GroupOptions(host="127.0.0.1")) as group:
            for _ in range(3):
                group.all_reduce(np.ones(4, np.float32))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
