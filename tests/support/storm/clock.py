"""A wall clock that jumps for the processes of the storm, and for nobody else."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

VARIABLE = "STORM_CLOCK"


def prepare(folder: Path) -> dict[str, str]:
    """Environment of processes whose clock jumps; empty where no compiler is at hand."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return {}
    library, offset = folder / "clock.so", folder / "clock"
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    offset.write_bytes(bytes(4096))
    return {"LD_PRELOAD": str(library), VARIABLE: str(offset)}


class Clock:
    """The storm's clock. `viable` says whether it can jump."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        path = os.environ.get(VARIABLE)
        if path is not None:
            with Path(path).open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), 4096)

    @property
    def viable(self) -> bool:
        """Whether the clock can jump here."""
        return self._memory is not None

    def set(self, offset_s: float) -> None:
        """Jumps to this many seconds from the true time."""
        if self._memory is not None:
            self._memory[:8] = struct.pack("<q", int(offset_s * 1e9))
