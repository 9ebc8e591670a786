"""A node of tests/rpc/test_rpc_soak.py: calls the hub, is called by it, and looks at everything that comes.

`python soak_worker.py NAME HUB_ADDRESS WEIGHTS`: prints its address and works until it is killed.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from typing import Any

import numpy as np

from geartrain import rpc, weights
from geartrain.errors import GeartrainError


@rpc.function(name="soak.triple")
def triple(array: Any) -> Any:
    return 3 * array


class Work:
    def __init__(self, node: rpc.Node) -> None:
        self.node, self.me = node, f"{node.name}-{os.getpid()}"
        self.newest = -1
        self.random = random.Random(os.getpid())

    def wrong(self, what: str) -> None:
        while True:
            try:
                return self.node.tell("hub", "soak.wrong", f"{self.me}: {what}")
            except GeartrainError:
                time.sleep(0.1)

    def take(self, number: int, value: dict[str, Any]) -> None:
        if number <= self.newest or value["number"] != number or not (value["body"] == number % 251).all():
            self.wrong(f"topic: {number} after {self.newest}, {value['number']}")
        self.newest = number

    def calls(self) -> None:
        sequence = 0
        while True:
            burst = []
            for _ in range(self.random.randrange(1, 60)):
                burst.append((sequence, self.node.call_async("hub", "soak.note", self.me, sequence)))
                sequence += 1
            for number, future in burst:
                if future.result() != number:
                    self.wrong(f"note {number} was answered with another's")
            size = self.random.choice((10, 3_000, 400_000))
            array = np.full(size, sequence % 1000, np.float64)
            if not (self.node.call("hub", "soak.triple", array) == 3 * array).all():
                self.wrong("an array came back wrong")
            if self.node.call("hub", "soak_batched", sequence) != sequence + 1:
                self.wrong("a batch's answer is another's")

    def read(self, name: str) -> None:
        with weights.Reader(name, node=self.node, source="hub", timeout_s=60) as reader:
            seen = -1
            while True:
                snapshot = reader.latest(at_least=seen + 1)
                if any(not (part == snapshot.version).all() for part in snapshot.values()) or snapshot.version <= seen:
                    self.wrong(f"weights {snapshot.version} after {seen} are mixed")
                seen = snapshot.version
                del snapshot


def again(work: Any, *args: Any) -> None:
    """For ever: the hub may take this process for lost when it was stopped."""
    while True:
        try:
            work(*args)
        except GeartrainError:
            time.sleep(0.05)


def main() -> None:
    name, hub, weights_name = sys.argv[1:]
    node = rpc.Node(name, peers={"hub": hub}, timeout_s=8)
    print(node.address, flush=True)
    work = Work(node)
    node.subscribe("hub", "news", work.take)
    for thread in (work.calls, work.read):
        args = (weights_name,) if thread == work.read else ()
        threading.Thread(target=again, args=(thread, *args), daemon=True).start()
    while os.getppid() != 1:
        time.sleep(0.5)


if __name__ == "__main__":
    main()
