"""Optional packages, imported on use. The error for a missing one has the line that installs it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import shlex
import sys
from types import ModuleType

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


def require(module: str, install: str, purpose: str) -> ModuleType:
    """An optional package, imported now.

    Args:
        module: name of the module.
        install: what `pip install` takes, such as "geartrain[parquet]".
        purpose: what needs it, for the error.

    Raises:
        MissingDependencyError: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{purpose} needs {module.partition('.')[0]} ({error}): pip install {shlex.quote(install)}"
        ) from error
