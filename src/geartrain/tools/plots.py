"""Writes plots to files, with matplotlib and without a display."""

from __future__ import annotations

from typing import Any

from geartrain.errors import MissingDependencyError


def import_pyplot() -> Any:
    """`matplotlib.pyplot` with the backend that draws into files.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        raise MissingDependencyError("plots need matplotlib: pip install 'geartrain[plot]'") from None
    return pyplot
