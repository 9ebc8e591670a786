"""Checks for optional packages. The error names the extra of geartrain that installs the missing package."""

from __future__ import annotations

import importlib.util
import sys

from geartrain.errors import MissingDependencyError


def require_torch(what: str, instead: str = "") -> None:
    """Raises `MissingDependencyError` if torch is not installed.

    The error names the feature, the extra, and an alternative.

    Looks for torch without importing it, which takes a second or more.
    """
    if sys.modules.get("torch") is not None:
        return
    try:
        found = importlib.util.find_spec("torch") is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise MissingDependencyError(f"{what} needs torch: pip install 'geartrain[torch]'{instead}")
