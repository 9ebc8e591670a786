"""`Reducer`: owns shares of a group's arrays without being a rank. It runs in the process that makes it.

`geartrain reducer` runs a reducer as a process (reducer_main.py).
"""

from __future__ import annotations

from typing import Any

import geartrain._native as _native
from geartrain.collectives.bootstrap import secret_of
from geartrain.core.arguments import check_choice, check_text, check_whole, shown, timeout
from geartrain.core.lifetime import Closing, on_error
from geartrain.core.process_report import register
from geartrain.errors import ArgumentError


class Reducer(Closing, elsewhere="send its addresses, which groups are given"):
    """A dedicated reducer: it owns shares of the ranks' arrays, sums them in rank order, and returns the results.

    A reducer serves any number of groups, on `threads` threads of its own. It never buffers whole arrays, only a window
    of at most `max_window_bytes` for each rank and thread.

    Examples:
        >>> import numpy as np
        >>> from geartrain.collectives import Group
        >>> reducer = Reducer("127.0.0.1:0")  # any free port
        >>> group = Group(0, 1, reducers=[reducer.address])
        >>> group.all_reduce(np.ones(2)).tolist()
        [1.0, 1.0]
        >>> group.close(); reducer.close()
    """

    #: The most that `threads` may be.
    MOST_THREADS = 64

    def __init__(
        self,
        bind: str = "127.0.0.1:0",
        *,
        secret: bytes | str | None = None,
        transport: str = "auto",
        max_window_bytes: int = 16 << 20,
        max_groups: int = 1024,
        threads: int = 1,
    ) -> None:
        """Listens at once.

        Args:
            bind: "host:port"; port 0 is any free one. Any host but loopback needs a secret.
            secret: ranks must prove that they know it. Nothing is encrypted.
            transport: "auto" shares memory with ranks of this host, "tcp" does not.
            max_window_bytes: how far a rank may run ahead of its results.
            max_groups: most groups at once; further ones are refused.
            threads: threads that receive, sum and send, 1 to 64. Each serves different groups, or another share of a
                group that lists the address more than once: see `addresses`.

        Raises:
            UntrustedPeerError: `bind` is not loopback, and there is no secret.
            ArgumentError: an argument is out of range.
            GeartrainError: the port is taken, or the address is not of this host.
        """
        check_choice("transport", transport, ("auto", "tcp"))
        threads = check_whole("threads", threads, 1, self.MOST_THREADS)
        host, colon, port = check_text("bind", bind).rpartition(":")
        if not colon or not (port.isascii() and port.isdigit() and len(port) <= 5) or int(port) > 65535:
            raise ArgumentError(f"bind is host:port, found {shown(bind)}")
        self._native = _native.CollectiveReducer.make(
            {
                "host": host.strip("[]"),
                "port": int(port),
                "secret": secret_of(secret),
                "shm": transport != "tcp",
                "max_window_bytes": check_whole("max_window_bytes", max_window_bytes, 0, 2**63 - 1),
                "max_groups": check_whole("max_groups", max_groups, 0, 2**63 - 1),
                "threads": threads,
            }
        )
        self._threads = threads
        with on_error(self.close, 0.0):  # a setting that cannot be used
            register(self, "reducer", lambda reducer: {"name": reducer.address, **reducer.metrics()})

    @property
    def address(self) -> str:
        """Address of the reducer ("host:port"), for `Group(reducers=...)`."""
        return self._native.address

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address, once for each thread. A group that is given all of them has a share on each thread."""
        return (self.address,) * self._threads

    def metrics(self) -> dict[str, Any]:
        """Counters of the reducer.

        Groups and ranks now; groups served and failed; operations, counted once for each share that a group has here;
        bytes each way; bytes of memory in use for chunks; connections refused.
        """
        return self._native.counts()

    def close(self, timeout_s: float = 10.0) -> None:
        """Refuses new groups, waits for current groups to leave, then ends the remaining ones with an error.

        Args:
            timeout_s: longest wait, in seconds.
        """
        self._native.close(timeout(timeout_s))

    def __exit__(self, kind: object = None, *_: object) -> None:
        self.close(0.0 if kind else 10.0)
