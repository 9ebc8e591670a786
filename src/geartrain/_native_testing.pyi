"""Types of what benchmarks and tests use natively (native/python/testing_module.cc)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

def gather_floor(
    source: Any, destination: Any, rows: NDArray[np.uint32], row_bytes: int, stride: int, stream: bool, /
) -> None: ...
def time_single_inserts(name: str, n: int, /) -> float: ...
def run_switch(
    ports: Sequence[int],
    rates: Sequence[float],
    sites: Sequence[int],
    delay_s: float,
    loss: float,
    queue_s: float,
    burst_bytes: int,
    seed: int,
    control: int,
    answers: int,
    /,
) -> None: ...
