"""The `geartrain` command; `python -m geartrain` is the same."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Runs the command line, or says how to install what it needs."""
    if sys.stdout is None:  # the caller closed it
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    try:
        from geartrain.tools.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        sys.exit(f"the geartrain command needs {error.name}: pip install 'geartrain[cli]'")
    except KeyboardInterrupt:  # while its parts are imported; the command itself handles what comes later
        print("error: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    app()


if __name__ == "__main__":
    main()
