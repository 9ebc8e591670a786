"""Checks for optional packages. The error names the extra of geartrain that installs the missing package."""

from __future__ import annotations

import functools
import importlib.util
import sys

from geartrain.errors import MissingDependencyError


@functools.cache
def _is_installed(module: str) -> bool:
    """A look at the disk, some 40 us."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def require_torch(what: str, instead: str = "") -> None:
    """Raises `MissingDependencyError` if torch is not installed.

    The error names the feature, the extra, and an alternative.

    Looks for torch without importing it, which takes a second or more.
    """
    found = sys.modules["torch"] is not None if "torch" in sys.modules else _is_installed("torch")
    if not found:
        raise MissingDependencyError(f"{what} needs torch: pip install 'geartrain[torch]'{instead}")
