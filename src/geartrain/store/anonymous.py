"""Anonymous stores: random names, cleanup after killed processes, and refusals to pickle.

The last process that closes a store removes its segment, whether the store has a name or not. Killed processes cannot
do that. Nobody knows the random name of an anonymous store, so nobody can adopt or remove its segment by hand. The next
process on the host that creates an anonymous store removes such segments.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import geartrain._native as _native
from geartrain.core.shared_files import leftovers
from geartrain.errors import ArgumentError, GeartrainError

PREFIX = "anonymous-"


def new_name() -> str:
    """Returns an unused name. Also removes anonymous stores of killed processes."""
    remove_dead()
    return PREFIX + os.urandom(8).hex()


def is_anonymous(name: str) -> bool:
    """Whether a store was created without a name."""
    return name.startswith(PREFIX)


def remove_dead() -> int:
    """Removes the anonymous segments that no living process uses; returns how many.

    A segment is published with its creator attached, so that one without a living process is never a new one.
    """
    removed = 0
    first = Path(_native.segment_path(PREFIX))
    for path in leftovers(f"{first.name}*", first.parent):
        with suppress(GeartrainError, OSError):  # another user's, another build's, or removed meanwhile
            peeked = _native.Store.attach(str(path), False, True, 1.0)
            if path.stat().st_uid == os.getuid() and peeked.live_clients() == 0:
                removed += peeked.unlink()
    return removed


def check_may_pickle() -> None:
    """Refuses to send an anonymous store to Ray's workers, which come and go, and run on other hosts.

    Raises:
        ArgumentError: Ray is in use; a store for its workers needs a name.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        raise ArgumentError(
            "a store without a name cannot be sent to Ray's workers: its last process removes it, and workers come "
            "and go. Create it with a name, and call Store.open in each worker"
        )
