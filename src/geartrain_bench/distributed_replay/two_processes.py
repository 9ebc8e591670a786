"""Commands that measure two processes of this host: this one is rank 0 and starts the other."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from geartrain.errors import ArgumentError

T = TypeVar("T")


def run(
    module: str, measure: Callable[[int, str, int], T], arguments: Sequence[str], default_blocks: int
) -> tuple[T, int] | None:
    """What rank 0 measured, and the number of blocks; None in the process of the other rank.

    Args:
        module: started with `python -m` for the other rank.
        measure: called with the rank, a file by which the ranks meet, and the number of blocks.
        arguments: of the command: none, the number of blocks, or the three that `measure` is called with.
        default_blocks: where no number is given.

    Raises:
        ArgumentError: no number of blocks.
    """
    if len(arguments) == 3:  # the other rank
        measure(int(arguments[0]), arguments[1], int(arguments[2]))
        return None
    if len(arguments) > 1 or not all(each.isdigit() and int(each) > 0 for each in arguments):
        raise ArgumentError(f"usage: python -m {module} [BLOCKS], found {arguments}")
    blocks = int(arguments[0]) if arguments else default_blocks
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        other = subprocess.Popen([sys.executable, "-m", module, "1", meeting, str(blocks)])
        try:
            found = measure(0, meeting, blocks)
            other.wait(60)
        finally:
            other.kill()
            other.wait()
    return found, blocks
