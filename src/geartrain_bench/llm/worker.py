"""One process of the parts that have several: claims rows, waits, or runs a loop of the example.

Requests and answers are lines of JSON (`geartrain_bench.harness.fleet`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.replay.options import ReplayOptions
from geartrain.replay.replay import Replay
from geartrain.selection.ordered import Fifo
from geartrain.store.store import Store
from geartrain_bench.distributed_replay.worker import answer_requests
from geartrain_bench.llm.samples import prompts

#: No loop of the example waits longer.
TIMEOUT_S = 60.0
#: Rows of a batch of the learner, and of a claim of rewards; tokens of a claim for the reference; rows of a rollout.
BATCH, REWARD_ROWS, REF_TOKENS, ANSWER_ROWS = 32, 32, 65_536, 4


class Worker:
    """State of a process."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    def end(self) -> None:
        """Closes what it has open."""
        self.stack.close()

    def open(self, store: str, core: int | None = None) -> dict[str, Any]:
        """Opens a store, in place of the one before; stays on one core if it is given."""
        self.stack.close()
        self.store = self.stack.enter_context(Store.open(store))
        if core is not None:
            usable = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {usable[core % len(usable)]})
        return {}

    def claim(self, task: str, n: int, calls: int) -> dict[str, Any]:
        """Claims n rows and releases them, so many times; thread's CPU nanoseconds of the claims alone."""
        cpu_ns = 0
        began_s = time.perf_counter()
        for _ in range(calls):
            before_ns = time.thread_time_ns()
            claim = self.store.claim(task, n, timeout_s=TIMEOUT_S)
            cpu_ns += time.thread_time_ns() - before_ns
            if len(claim) != n:
                raise ValueError(f"{len(claim)} of {n} rows were due")
            claim.release()
        return {"cpu_s": cpu_ns / 1e9, "seconds": time.perf_counter() - began_s}

    # --- wakes ----------------------------------------------------------------------------------------------

    def wake(self, task: str, wakes: int, pause_s: float) -> dict[str, Any]:
        """Puts a row of a task so many times; when each put began, ns."""
        began_ns = []
        one = np.array(1, np.int32)
        for _ in range(wakes):
            (row,) = self.store.claim(task, 1, timeout_s=TIMEOUT_S)
            time.sleep(pause_s)
            began_ns.append(time.monotonic_ns())
            row.put(x=one)
        return {"ns": began_ns}

    def wait(self, task: str, wakes: int) -> dict[str, Any]:
        """Claims a row of a task so many times; when each claim came, ns."""
        came_ns = []
        for _ in range(wakes):
            claim = self.store.claim(task, 1, timeout_s=TIMEOUT_S)
            came_ns.append(time.monotonic_ns())
            claim.drop()
        return {"ns": came_ns}

    def wake_pipe(self, path: str, wakes: int, pause_s: float) -> dict[str, Any]:
        """Writes a byte to a named pipe so many times; when each write began, ns."""
        began_ns = []
        with Path(path).open("wb", buffering=0) as pipe:
            for _ in range(wakes):
                time.sleep(pause_s)
                began_ns.append(time.monotonic_ns())
                pipe.write(b"x")
        return {"ns": began_ns}

    def wait_pipe(self, path: str, wakes: int) -> dict[str, Any]:
        """Reads a byte from a named pipe so many times; when each came, ns."""
        came_ns = []
        with Path(path).open("rb", buffering=0) as pipe:
            for _ in range(wakes):
                pipe.read(1)
                came_ns.append(time.monotonic_ns())
        return {"ns": came_ns}

    # --- the example's loops --------------------------------------------------------------------------------

    def loop(self, name: str, **how: Any) -> dict[str, Any]:
        """One loop of the example until its end: when it began and ended, and its CPU time."""
        began_s, cpu_s = time.monotonic(), time.process_time()
        loop: Callable[..., None] = getattr(self, f"_{name}")
        loop(**how)
        return {"began_s": began_s, "ended_s": time.monotonic(), "cpu_s": time.process_time() - cpu_s}

    def _load(self, rows: int) -> None:
        for prompt in prompts(rows):
            self.store.insert({"prompt": [prompt]}, timeout_s=TIMEOUT_S)
        self.store.finish()

    def _answer(self, answers: int, tokens: int, appends: bool) -> None:
        ids, log_prob = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32)
        mask, length = np.ones(tokens, bool), np.full(answers, tokens, np.int32)
        row_values = {"ids": ids, "log_prob": log_prob, "mask": mask}
        whole = {name: np.tile(values, answers) for name, values in row_values.items()}
        for claim in self.store.claims("answer", ANSWER_ROWS, timeout_s=TIMEOUT_S):
            if not appends:
                claim.put({name: [values] * len(claim) for name, values in whole.items()}, length=[length] * len(claim))
                continue
            for row in claim:
                for item in range(answers):
                    row.append(item=item, ids=ids, log_prob=log_prob, mask=mask)
                row.put()

    def _reward(self) -> None:
        for claim in self.store.claims("reward", REWARD_ROWS, timeout_s=TIMEOUT_S):
            ids, ends = claim["ids"], claim.cu_seqlens
            claim.put(reward=np.asarray(ids[ends[1:] - 1], np.float32))

    def _ref(self) -> None:
        for claim in self.store.claims("ref", max_items=REF_TOKENS, of="tokens", timeout_s=TIMEOUT_S):
            both = claim.joined("prompt", "ids")
            claim.put(ref=both.part("ids", np.asarray(both.values, np.float32)))

    def _advantage(self) -> None:
        for claim in self.store.claims("advantage", 1, timeout_s=TIMEOUT_S):
            reward = np.asarray(claim["reward"])
            claim.put(advantage=reward - reward.mean())

    def _train(self, rows: int) -> None:
        names = ("prompt", "ids", "log_prob", "mask", "ref", "advantage")
        with Replay(self.store, Fifo(), BATCH, options=ReplayOptions(min_rows=BATCH, timeout_s=TIMEOUT_S)) as replay:
            for _ in range(rows // BATCH):
                batch = replay.sample()
                for name in names:
                    _ = batch[name]
                _ = batch.cu_seqlens


def main() -> None:
    """Command line of `python -m geartrain_bench.llm.worker`."""
    answer_requests(Worker)


if __name__ == "__main__":
    main()
