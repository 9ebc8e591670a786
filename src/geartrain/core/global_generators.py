"""Draws from the global random generators of torch and NumPy, which a fork must not interrupt.

    with drawing:
        seed = int(torch.randint(2**31, ()))

Such a generator has a lock that is held while it draws, and that stays held for ever in a child that was forked then by
another thread: its first draw would hang. So a fork waits until no thread of geartrain's draws. Draws of the program's
own threads are the program's.
"""

from __future__ import annotations

import os
import threading

#: Held while a global generator draws, which takes microseconds; a signal's handler may draw, and fork, in between.
drawing = threading.RLock()

os.register_at_fork(before=drawing.acquire, after_in_parent=drawing.release, after_in_child=drawing.release)

__all__ = ["drawing"]
