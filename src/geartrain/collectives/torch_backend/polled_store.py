"""Wraps a torch store so that waits for a key become polls. The rendezvous of a process group uses it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class PolledStore:
    """A prefix of a torch store. It polls instead of waiting, because TCPStore logs every wait that times out.

    Once `closed()` is true, calls raise `RuntimeError`, as a lost store does.
    """

    def __init__(self, prefix: str, store: Any, closed: Callable[[], bool] = lambda: False) -> None:
        self._store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        self._closed = closed
        self.set, self.get = self._store.set, self._store.get

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        if self._closed():
            raise RuntimeError("the process group was closed")
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Raises `RuntimeError` at the deadline, as torch's do."""
        until_s = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > until_s:
                raise RuntimeError(f"{keys} were not set in time")
            time.sleep(0.005)
