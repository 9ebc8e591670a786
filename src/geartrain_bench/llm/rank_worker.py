"""One rank of the part "ranks over links" of `geartrain bench llm`, whose training takes its time by tokens.

Requests and answers are those of geartrain_bench/distributed_replay/worker.py, but for:

    {"do": "fill", "store": "text", "rows": 200, "per_row": 16, "seed": 1}          -> {"rows": 200, "tokens": 3600000}
    {"do": "prepare", "store": "text", "batch": 32, "balance": "tokens"}            -> {}: null for as many rows a rank
    {"do": "go", "batches": 12, "train_ms": 5}            -> "train_ms" are those of 1,000 tokens; "stats" has "tokens"
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import geartrain.selection as selection
from geartrain.replay.options import RankOptions, ReplayOptions
from geartrain.replay.replay import Replay
from geartrain_bench.distributed_replay.worker import TIMEOUT_S, Rank, answer_requests
from geartrain_bench.llm.samples import USUAL, in_rows, make_answers, nbytes, store_of_answers


class TextRank(Rank):
    """State of a rank."""

    def fill(self, store: str, rows: int, per_row: int, seed: int) -> dict[str, Any]:  # type: ignore[override]
        """A store of this host with so many rows of answers."""
        random = np.random.default_rng(seed)
        lengths = USUAL.draw(rows * per_row, random)
        made = in_rows(make_answers(lengths, random), per_row)
        self.stores[store] = store_of_answers(store, rows, int(1.1 * nbytes(made)) + (1 << 20))
        self.stores[store].insert(made)
        return {"rows": rows, "tokens": int(lengths.sum())}

    def prepare(self, store: str, batch: int, balance: str | None) -> dict[str, Any]:  # type: ignore[override]
        """A replay over all ranks of the job, from the oldest rows on."""
        import torch.distributed as dist

        self.replay = Replay(
            self.stores[store],
            selection.Fifo(),
            batch,
            group=RankOptions(dist.group.WORLD, balance=balance),
            options=ReplayOptions(timeout_s=TIMEOUT_S),
        )
        return {}

    def go(self, batches: int, train_ms: float) -> dict[str, Any]:
        """Takes batches, and sleeps for `train_ms` a thousand tokens of each."""
        replay = self.prepared()
        before = replay.stats()
        ends_s, wait_s, tokens = [], 0.0, 0
        began_s = time.perf_counter()
        for _ in range(batches):
            asked_s = time.perf_counter()
            batch: Any = replay.sample()
            wait_s += time.perf_counter() - asked_s
            mine = len(batch["ids"])
            tokens += mine
            time.sleep(mine * train_ms / 1e6)
            ends_s.append(time.perf_counter() - began_s)
        after = replay.stats()
        moved = {name: after.get(name, 0) - before.get(name, 0) for name in ("received_bytes", "local_bytes")}
        stats = {"tokens": tokens, "balance": after.get("balance", 1.0), **moved}
        return {"ends_s": ends_s, "wait_s": wait_s, "cpu_s": 0.0, "switches": 0, "stats": stats}


if __name__ == "__main__":
    answer_requests(TextRank)
