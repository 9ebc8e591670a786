"""Start-up hook of interpreters under test: geartrain's native module is the file GEARTRAIN_TEST_NATIVE.

`make races SANITIZE=address` puts this folder on PYTHONPATH, so that every interpreter that a test starts has the build
under the sanitizer.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec


class _Finder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "geartrain._native":
            return None
        return importlib.util.spec_from_file_location(name, os.environ["GEARTRAIN_TEST_NATIVE"])


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]  # before that of an editable install
