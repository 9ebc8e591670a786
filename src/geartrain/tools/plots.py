"""Writes plots to files, with matplotlib and without a display."""

from __future__ import annotations

import importlib
from typing import Any

from geartrain.core.extras import require


def import_pyplot() -> Any:
    """`matplotlib.pyplot` with the backend that draws into files.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    require("matplotlib", "geartrain[plot]", "A plot").use("agg")
    return importlib.import_module("matplotlib.pyplot")
