"""Lock for draws from the global random generators of torch and NumPy, so that a fork does not interrupt a draw.

    with drawing:
        seed = int(torch.randint(2**31, ()))

A global generator holds a lock while it draws. If another thread forks at this moment, the lock stays taken in the
child for ever, and the child's first draw hangs. A fork therefore waits until no thread of geartrain draws. It does not
wait for draws by the program's own threads.
"""

from __future__ import annotations

import os
import threading

#: Held while a global generator draws, for microseconds. Reentrant, because a signal handler may draw or fork then.
drawing = threading.RLock()

os.register_at_fork(before=drawing.acquire, after_in_parent=drawing.release, after_in_child=drawing.release)

__all__ = ["drawing"]
