"""Whether a process has ended."""

from __future__ import annotations

from pathlib import Path


def has_ended(pid: int) -> bool:
    """Also of one that nobody has waited for (a zombie), and one that goes while its entry is read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
