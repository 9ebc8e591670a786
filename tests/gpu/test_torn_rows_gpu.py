"""Rows that another process overwrites as fast as it can, while the GPU reads them: no batch holds a torn one.

GEARTRAIN_TEST_TORN_SECONDS=60 pytest tests/gpu/test_torn_rows_gpu.py -s
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from replay_calls import replay_of

import geartrain as gt
import geartrain.device.kernels as kernels
from geartrain.replay.device import DeviceOptions

reason = kernels.why_not_viable()
pytestmark = pytest.mark.skipif(
    reason is not None or kernels.interpreting(), reason=f"no GPU to run on: {reason or 'TRITON_INTERPRET is set'}"
)
SECONDS = float(os.environ.get("GEARTRAIN_TEST_TORN_SECONDS", "4"))
STEPS, WIDTH, CAPACITY = 250, 100, 2000  # rows of 100 KB, 200 MB of them

WRITER = """
import sys
import numpy as np
import geartrain as gt

store = gt.Store.open(sys.argv[1])
value = 1.0
print("writing", flush=True)
while True:
    rows = np.empty((10, 250, 100), np.float32)
    rows[:] = (value + np.arange(10, dtype=np.float32))[:, None, None]
    store.insert({"x": rows})
    value = (value + 10) % 2**20
"""


@pytest.mark.parametrize("path", ["gather", "copy", "staged"])
def test_no_batch_holds_a_torn_row(store_name: Callable[[], str], path: Any) -> None:
    import numpy as np

    name = store_name()
    with gt.Store.create(name, {"x": gt.Field((WIDTH,), "float32")}, max_length=STEPS, capacity=CAPACITY) as store:
        store.insert({"x": np.zeros((CAPACITY, STEPS, WIDTH), np.float32)})
        writer = subprocess.Popen([sys.executable, "-c", WRITER, name], stdout=subprocess.PIPE, text=True)
        try:
            assert writer.stdout is not None
            writer.stdout.readline()
            options = DeviceOptions("cuda", path=path)
            with replay_of(store, gt.selection.Uniform(seed=1), 64, device=options, timeout_s=60) as replay:
                until_s, batches, values = time.monotonic() + SECONDS, 0, set()
                while time.monotonic() < until_s:
                    x = replay.sample()["x"].view(64, -1)
                    low, high = x.amin(1), x.amax(1)
                    assert bool((low == high).all()), (low != high).nonzero().flatten().tolist()
                    values.update(low[:4].tolist())
                    batches += 1
                redrawn = replay.stats()["redrawn"]
        finally:
            writer.kill()
            writer.wait()
        inserted = store.stats()["inserted"]
    print(f"{path}: {batches} batches whole, {redrawn} rows redrawn, {inserted} rows inserted", file=sys.stderr)
    assert len(values) > 100, "the writer did not write"
    assert redrawn > 0, "no row was overwritten as it was copied: nothing was tested"
