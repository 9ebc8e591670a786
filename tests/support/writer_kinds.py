"""What a `WriterProcess` of the tests holds: an object whose methods fail in every way."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any


class Kind:
    """Told where to leave its process id."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        (self.folder / "pid").write_text(str(os.getpid()))

    def echo(self, value: Any) -> Any:
        return value

    def sleep(self, seconds: float) -> str:
        (self.folder / "asleep").touch()
        time.sleep(seconds)
        (self.folder / "awake").touch()
        return "late"

    def die(self, code: int) -> None:
        print("its last words", file=sys.stderr, flush=True)
        os._exit(code)

    def raise_what_does_not_travel(self) -> None:
        class LocalError(Exception):
            pass

        raise LocalError("from within")
