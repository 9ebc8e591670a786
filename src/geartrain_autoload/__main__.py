"""Command `python -m geartrain_autoload`: runs a script, or a module with -m, whose default backend is geartrain's."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from geartrain_autoload import VARIABLE, wrap_init_process_group

USAGE = "usage: python -m geartrain_autoload SCRIPT [ARGUMENT ...], or python -m geartrain_autoload -m MODULE [...]"


def main() -> None:
    """Runs `sys.argv[1:]` as Python itself would, after `init_process_group` was wrapped."""
    is_module = sys.argv[1:2] == ["-m"]
    del sys.argv[: 2 if is_module else 1]
    if not sys.argv or not sys.argv[0]:
        _refuse(USAGE)
    if not is_module and not Path(sys.argv[0]).is_file():
        _refuse(f"there is no script {sys.argv[0]!r} (a module is run with -m); {USAGE}")
    if os.environ.setdefault(VARIABLE, "1") not in ("", "0"):
        try:
            wrap_init_process_group()
        except (ImportError, RuntimeError) as error:
            sys.exit(f"geartrain's all-reduce cannot be used: {error} ({VARIABLE}=0 goes on without it)")
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


def _refuse(text: str) -> None:
    print(text, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
