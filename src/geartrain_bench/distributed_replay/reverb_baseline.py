"""A central Reverb server, or one of its readers, for `geartrain bench ranks`: runs with Reverb's own Python.

Needs dm-reverb and TensorFlow, not geartrain. Reads one JSON object a line and answers each with one:

    {"do": "serve", "rows": 4000, "row_bytes": 102400}                   -> {"port": ..., "versions": {...}}
    {"do": "prepare", "address": "host0:1234", "row_bytes": ..., "batch": 64, "warm": 3}    -> {}
    {"do": "go", "batches": 40, "train_ms": 100}                         -> as worker.py's
    {"do": "finish"}                                                     -> {}

A reader takes whole rows from one TrajectoryDataset, the fastest way in its documentation, with two
batches prefetched, as in geartrain's replay. Rows are noise, which Reverb's compression cannot shrink.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

AHEAD = 2


class Reverb:
    """The server, or a reader."""

    def __init__(self) -> None:
        self.server: Any = None
        self.batches: Any = None

    def serve(self, rows: int, row_bytes: int) -> dict[str, Any]:
        """Starts a server with one table and fills it."""
        from importlib.metadata import version

        import reverb

        table = reverb.Table(
            "rows",
            sampler=reverb.selectors.Prioritized(1.0),
            remover=reverb.selectors.Fifo(),
            max_size=rows,
            rate_limiter=reverb.rate_limiters.MinSize(1),
        )
        self.server = reverb.Server([table], port=None)
        random = np.random.default_rng(1)
        noise = random.standard_normal((64, row_bytes // 4), dtype=np.float32)
        writer = reverb.Client(f"localhost:{self.server.port}").trajectory_writer(num_keep_alive_refs=1)
        for i in range(rows):
            writer.append({"x": noise[i % 64]})
            writer.create_item("rows", float(random.standard_exponential() + 0.05), {"x": writer.history["x"][-1]})
            if i % 64 == 63:
                writer.flush()
        writer.close()
        return {"port": self.server.port, "versions": {n: version(n) for n in ("dm-reverb", "tensorflow")}}

    def prepare(self, address: str, row_bytes: int, batch: int, warm: int) -> dict[str, Any]:
        """Connects and takes the first batches."""
        import reverb
        import tensorflow as tf  # type: ignore[import-untyped, unused-ignore]

        dataset = reverb.TrajectoryDataset(
            address,
            "rows",
            dtypes={"x": tf.float32},
            shapes={"x": tf.TensorShape((row_bytes // 4,))},
            max_in_flight_samples_per_worker=AHEAD * batch,
            num_workers_per_iterator=1,
        )
        self.batches = iter(dataset.batch(batch).prefetch(AHEAD))
        for _ in range(warm):
            next(self.batches)
        return {}

    def go(self, batches: int, train_ms: float) -> dict[str, Any]:
        """Takes batches and trains on each for `train_ms`: sleeps, as on a CPU while a GPU computes."""
        ends_s = []
        cpu_s = time.process_time()
        began_s = time.perf_counter()
        wait_s, rows = 0.0, 0
        for _ in range(batches):
            asked_s = time.perf_counter()
            batch = next(self.batches)
            wait_s += time.perf_counter() - asked_s
            rows += int(batch.data["x"].shape[0])
            if train_ms:
                time.sleep(train_ms / 1e3)
            ends_s.append(time.perf_counter() - began_s)
        return {
            "ends_s": ends_s,
            "wait_s": wait_s,
            "rows": rows,
            "cpu_s": time.process_time() - cpu_s,
            "switches": 0,
            "stats": {},
        }

    def finish(self) -> dict[str, Any]:
        """Drops the dataset."""
        self.batches = None
        return {}


def main() -> None:
    """Answers requests until end of input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    one = Reverb()
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        try:
            words = getattr(one, what)(**request)
        except Exception as error:
            words = {"error": f"{type(error).__name__}: {error}"[:800]}
        answers.write(json.dumps(words) + "\n")
        answers.flush()
        if "error" in words:
            break
    os._exit(0)  # a server that is asked to stop waits for its readers


if __name__ == "__main__":
    main()
