"""Small file systems in memory, which tests fill."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def file_system(path: Path, size: str, *options: str) -> Iterator[Path]:
    """A tmpfs of `size` ("4m"; "0" without a limit) on an empty directory; skips where this user may not mount one.

    Args:
        options: of the mount, further ones, such as "nr_inodes=2" or "ro".
    """
    if shutil.which("mount") is None:
        pytest.skip("no command `mount` on PATH")
    mount = ["mount", "-t", "tmpfs", "-o", ",".join((f"size={size}", *options)), "none", path]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)
