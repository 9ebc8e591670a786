"""Defects that are known and not mended: (subject, scenario) and why. This table only shrinks.

`tests/test_hostile_callers.py` expects each of these to fail; one that does not fails the tests, and is taken out here.
"""

from __future__ import annotations

_STORE_CALLS = "len, stats, status, expire and the limiter change or read the segment after the handle was closed"
_STORE_WAITS = "a commit, or a draw, that waits for the rate limiter does not end when the store is closed"
_READ_ONLY = "a write through a read-only handle is SIGSEGV"
_ABORTS = (
    "a daemon thread that waits in a native call at the interpreter's end: exception through a noexcept destructor"
)
_LEFT = "a store whose handle a daemon thread holds at the interpreter's end leaves its segment"
_FORK_LOCK = "a child forked while another thread holds a lock hangs"

OPEN: dict[tuple[str, str], str] = {
    ("Store", "use_after_close"): _STORE_CALLS,
    ("Store: a file that stays", "use_after_close"): _STORE_CALLS,
    ("Store: unnamed", "use_after_close"): _STORE_CALLS,
    ("RateLimiter", "use_after_close"): _STORE_CALLS,
    ("Store", "close_beside_a_blocked_call"): _STORE_WAITS,
    ("RateLimiter", "close_beside_a_blocked_call"): _STORE_WAITS,
    ("Replay: of a store that is closed", "close_beside_a_blocked_call"): _STORE_WAITS,
    ("Store: read-only", "use_after_close"): _READ_ONLY,
    ("Store: read-only", "close_beside_calls"): _READ_ONLY,
    ("Store: read-only", "use_after_fork"): _READ_ONLY,
    ("Store: read-only", "fork_beside_calls"): _READ_ONLY,
    ("Store: read-only", "alive_at_exit"): _READ_ONLY,
    ("Store: read-only", "daemon_thread_at_exit"): _READ_ONLY,
    ("Store", "daemon_thread_at_exit"): _ABORTS,
    ("Store: a file that stays", "daemon_thread_at_exit"): _ABORTS,
    ("Store: unnamed", "daemon_thread_at_exit"): _ABORTS,
    ("RateLimiter", "daemon_thread_at_exit"): _ABORTS,
    ("Replay: nothing ahead", "daemon_thread_at_exit"): _ABORTS,
    ("Replay", "daemon_thread_at_exit"): _LEFT,
    ("Replay: of a store that is closed", "daemon_thread_at_exit"): _LEFT,
    ("Replay: a mixture", "daemon_thread_at_exit"): _LEFT,
    ("Replay: on a device", "daemon_thread_at_exit"): _LEFT,
    ("Replay: of a group", "daemon_thread_at_exit"): _LEFT,
    ("ReplayDataset", "daemon_thread_at_exit"): _LEFT,
    ("Batch", "daemon_thread_at_exit"): _LEFT,
    ("Placement", "daemon_thread_at_exit"): _LEFT,
    ("Connection: in process", "daemon_thread_at_exit"): _ABORTS,
    ("Connection: shared memory", "daemon_thread_at_exit"): _ABORTS,
    ("Connection", "daemon_thread_at_exit"): _ABORTS,
    ("Listener", "daemon_thread_at_exit"): _ABORTS,
    ("MemoryRegion", "daemon_thread_at_exit"): _ABORTS,
    ("Remote", "daemon_thread_at_exit"): _ABORTS,
    ("RemotePolicy", "daemon_thread_at_exit"): _ABORTS,
    ("Node", "use_after_close"): "a topic can be made on a closed node",
    ("Node", "fork_beside_calls"): _FORK_LOCK,
    ("Topic", "fork_beside_calls"): _FORK_LOCK,
    ("Publisher", "close_beside_a_blocked_call"): "close waits for a publish that waits for a buffer",
}
