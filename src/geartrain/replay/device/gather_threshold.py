"""The largest rows that a GPU gathers by itself, measured on this machine or a default.

`geartrain bench fetch --device cuda` times all paths for several row sizes. It stores the result under the GPU's name:

    ~/.cache/geartrain/crossover.json        (under XDG_CACHE_HOME if it is set)
    {"NVIDIA H200": {"crossover_bytes": 1048576, "command": "...", "when": "..."}}

The first of these values applies:

1. `DeviceOptions(crossover_bytes=...)`,
2. the file,
3. `CROSSOVER_BYTES`, measured on an H100.

`replay.describe()` reports which one is in use.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from geartrain.core.json_values import read_object, whole_entry

# On an H100 (PCIe 5) copy engines move pieces of 20 KB at a tenth of the link's rate, of 100 KB at 0.98 of it, of 1 MB
# at all of it; the gather reaches 0.77 for 4 KB, 0.89 and 0.91, and takes some of the multiprocessors' time.
CROSSOVER_BYTES = 96 << 10


def measured_path() -> Path:
    """Path of the file with measured values."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "geartrain" / "crossover.json"


def crossover(asked: int | None, device: str) -> tuple[int, str]:
    """Bytes of a row up to which a device gathers, and where the number is from.

    Args:
        asked: by the program; None for what is known of the device.
        device: its name, as the vendor gives it.
    """
    if asked is not None:
        return asked, "as asked for"
    found = _measured().get(device)
    if isinstance(found, dict):
        with contextlib.suppress(ValueError):
            return whole_entry(found, "crossover_bytes", 0, 2**63 - 1), "as measured on this machine"
    return CROSSOVER_BYTES, "as an H100 has it; `geartrain bench fetch --device cuda` measures it"


def remember(device: str, crossover_bytes: int, **about: Any) -> Path:
    """Writes a measured value down for a device, beside those of others, and returns where."""
    path = measured_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    known = _measured() | {device: {"crossover_bytes": crossover_bytes, **about}}
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(known, indent=1) + "\n")
    beside.replace(path)
    return path


def found_from(seconds: Mapping[int, Mapping[str, float]]) -> int:
    """The crossover, from the median seconds of "gather" and of other paths by bytes of a row.

    Between the largest row up to which the gather was never slower and the next one that was measured: their geometric
    mean. Slower is slower than the fastest of the others. Where the gather was never slower, the largest row; where it
    always was, 0. Measured again, a size may fall on the other side, so no path counts as slower by less than 2 %.

    Example:
        >>> found_from({1000: {"gather": 1.0, "copy": 2.0}, 4000: {"gather": 3.0, "copy": 2.0, "staged": 4.0}})
        2000
    """
    last = 0
    for size in sorted(seconds):
        if seconds[size]["gather"] > 1.02 * min(seconds[size].values()):
            return round(math.sqrt(last * size))
        last = size
    return last


def _measured() -> dict[str, Any]:
    try:
        return read_object(measured_path())
    except (OSError, ValueError):  # nothing was measured, or somebody wrote something else there
        return {}


__all__ = ["CROSSOVER_BYTES", "crossover", "found_from", "measured_path", "remember"]
