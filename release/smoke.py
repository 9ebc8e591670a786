"""The smoke test of an installed wheel: NumPy alone, no torch, no compiler, any processor."""

from __future__ import annotations

import shutil
import sys
import time

import numpy as np

import geartrain as gt


def main() -> None:
    """A store, a prioritized replay, a call and a collective; what needs torch says which extra to install."""
    began = time.process_time()
    for tool in ("cmake", "cc", "g++"):
        if shutil.which(tool):
            print(f"note: {tool} is on PATH")
    fields = {"obs": gt.Field((11,), "float32"), "action": gt.Field((), "int64")}
    with gt.Store.create(fields, max_length=20, capacity=64) as store:
        for i in range(32):
            with store.row(version=i) as row:
                row["obs"][:20], row["action"][:20], row.length = i, i, 20
        strategy = gt.selection.Prioritized(alpha=0.6, beta=0.4, seed=0)
        with gt.Replay(store, strategy, batch_size=16, window=5, num_batches=4, output="numpy") as replay:
            for batch in replay:
                assert isinstance(batch["obs"], np.ndarray) and batch["obs"].shape == (16, 5, 11)
                assert (batch["obs"][..., 0] == batch["action"]).all()
                replay.update_priorities(batch.keys, np.ones(16))
        try:
            import torch  # noqa: F401
        except ImportError:
            try:
                gt.Replay(store, strategy, batch_size=16, output="torch")
            except ImportError as error:
                assert "geartrain[torch]" in str(error), error
            else:
                raise AssertionError("a replay of tensors without torch")
    print(f"geartrain {gt.__version__} works on Python {sys.version.split()[0]}: {time.process_time() - began:.1f} s")


if __name__ == "__main__":
    main()
