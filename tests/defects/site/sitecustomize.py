"""Start-up hook of interpreters under test: geartrain is the package below the folder GEARTRAIN_TEST_TREE.

`make defects` (tests/defects/plant.py) puts this folder on PYTHONPATH, so that every interpreter that a test starts has
the copy with the defect, and not the tree that is installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

PACKAGES = ("geartrain", "geartrain_bench", "geartrain_autoload")


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        return PathFinder.find_spec(name, [os.environ["GEARTRAIN_TEST_TREE"]] if path is None else path)


if "GEARTRAIN_TEST_TREE" in os.environ:
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]  # before that of an editable install
