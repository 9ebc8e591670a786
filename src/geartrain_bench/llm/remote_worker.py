"""One process of the part "remote": a server of a store with tasks, or workers that claim and put rows over a link.

Requests and answers are lines of JSON (`geartrain_bench.harness.fleet`).
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack
from typing import Any

import numpy as np

from geartrain.actors.remote_store import RemoteStore
from geartrain.actors.store_server import StoreServer
from geartrain.core.tasks import Task
from geartrain.rpc.node import Node
from geartrain_bench.distributed_replay.worker import answer_requests
from geartrain_bench.llm.samples import (
    USUAL,
    answer_fields,
    in_rows,
    insert_prompts,
    make_answers,
    nbytes,
    store_of_tasks,
)

SECRET = b"bench"
TASKS = {"answer": Task(answer_fields()), "train": Task(after="answer")}
TIMEOUT_S = 60.0


class Remote:
    """State of a process."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    def end(self) -> None:
        """Closes what it has open."""
        self.stack.close()

    # --- the server -----------------------------------------------------------------------------------------

    def serve(self, host: str, store: str, rows: int, row_bytes: int) -> dict[str, Any]:
        """Serves a store with so many rows that are due."""
        self.store = self.stack.enter_context(store_of_tasks(store, TASKS, rows, rows * row_bytes))
        self.node = self.stack.enter_context(Node("server", host=host, secret=SECRET, transport="tcp"))
        self.stack.enter_context(StoreServer(self.node, self.store, "answers"))
        return {"address": self.node.address}

    def refill(self, rows: int) -> dict[str, Any]:
        """Removes all rows, and inserts so many: CPU time of this process so far."""
        self.store.delete(self.store.keys())
        insert_prompts(self.store, rows)
        return {"cpu_s": time.process_time()}

    def cpu(self) -> dict[str, Any]:
        """CPU time of this process, and rows that are done."""
        return {"cpu_s": time.process_time(), "done": len(self.store)}

    def listen(self, host: str) -> dict[str, Any]:
        """A bare socket that swallows what comes, and says how much."""
        listener = self.stack.enter_context(socket.create_server((host, 0)))

        def swallow() -> None:
            while True:
                stream = listener.accept()[0]
                buffer = bytearray(4 << 20)
                while stream.recv_into(buffer):
                    pass
                stream.sendall(b"k")
                stream.close()

        threading.Thread(target=swallow, daemon=True).start()
        return {"port": listener.getsockname()[1]}

    # --- the workers ----------------------------------------------------------------------------------------

    def connect(self, address: str, seed: int, rows: int, per_row: int) -> dict[str, Any]:
        """Reaches the server; makes the values of so many rows."""
        random = np.random.default_rng(seed)
        made = in_rows(make_answers(USUAL.draw(rows * per_row, random), random), per_row)
        self.values = [{name: values[i] for name, values in made.items()} for i in range(rows)]
        node = self.stack.enter_context(
            Node(f"worker-{seed}", peers={"server": address}, secret=SECRET, transport="tcp")
        )
        self.remote = RemoteStore(node, "server", "answers", timeout_s=TIMEOUT_S)
        return {"row_bytes": nbytes(made) / rows}

    def work(self, rows: int, threads: int) -> dict[str, Any]:
        """Claims a row and puts its answers, so many times in several threads: seconds and bytes that were put."""
        sent = [0] * threads

        def loop(which: int) -> None:
            for i in range(which, rows, threads):
                with self.remote.claim("answer", 1, timeout_s=TIMEOUT_S) as claim:
                    (row,) = claim
                    values = self.values[i % len(self.values)]
                    row.put(values)
                    sent[which] += sum(each.nbytes for each in values.values())

        workers = [threading.Thread(target=loop, args=(which,)) for which in range(threads)]
        began_s = time.perf_counter()
        for each in workers:
            each.start()
        for each in workers:
            each.join()
        return {"seconds": time.perf_counter() - began_s, "bytes": sum(sent)}

    def send(self, host: str, port: int, nbytes: int) -> dict[str, Any]:
        """Seconds of so many bytes over a bare socket."""
        block = memoryview(bytearray(4 << 20))
        began_s = time.perf_counter()
        with socket.create_connection((host, port)) as stream:
            left = nbytes
            while left:
                left -= stream.send(block[: min(left, len(block))])
            stream.shutdown(socket.SHUT_WR)
            stream.recv(1)
        return {"seconds": time.perf_counter() - began_s}


if __name__ == "__main__":
    answer_requests(Remote)
