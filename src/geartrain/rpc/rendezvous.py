"""Where names become addresses: a store that all can reach, of the kind that torch has."""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

from geartrain.errors import GeartrainError, UnknownPeerError, WaitTimeoutError


class Directory:
    """Addresses of peers: those given, and those that others have put into the store."""

    def __init__(self, store: Any, known: dict[str, str]) -> None:
        self.store = store
        self.known = known

    def put(self, name: str, value: str) -> None:
        """Lets others find it."""
        if self.store is not None:
            self.store.set(_key(name), value)

    def find(self, name: str, until_s: float) -> str:
        """Waits for somebody to put it. Raises `UnknownPeerError`."""
        if name in self.known:
            return self.known[name]
        if self.store is None:
            raise UnknownPeerError(f"no peer {name!r}: there is no store to find it in, and its address was not given")
        while not self.store.check([_key(name)]):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise UnknownPeerError(f"no peer {name!r} has joined before the deadline")
            # In slices: a c10d store answers nobody else in this process while it waits, and takes 0 ms for no limit.
            with contextlib.suppress(RuntimeError):
                self.store.wait([_key(name)], timedelta(seconds=min(max(left_s, 0.01), 0.1)))
        return self._get(name)

    def _get(self, name: str) -> str:
        value: bytes | str = self.store.get(_key(name))
        return value.decode() if isinstance(value, bytes) else value

    def remove(self, name: str, value: str) -> None:
        """Takes it out, if it is still this one, from a store that can."""
        if self.store is None or not hasattr(self.store, "delete_key"):
            return
        with contextlib.suppress(RuntimeError):  # the store went first
            if self.store.check([_key(name)]) and self._get(name) == value:
                self.store.delete_key(_key(name))

    def join(self, name: str, rank: int | None, world_size: int | None, timeout_s: float) -> None:
        """Tells one's rank, and waits until all have. Raises `WaitTimeoutError`, with the ranks that are missing."""
        if rank is not None:
            self.put(f"rank/{rank}", name)
        if self.store is None or world_size is None:
            return
        until_s = time.monotonic() + timeout_s
        try:
            for other in range(world_size):
                self.find(f"rank/{other}", until_s)
        except UnknownPeerError:
            missing = [other for other in range(world_size) if not self.store.check([_key(f"rank/{other}")])]
            raise WaitTimeoutError(
                f"{len(missing)} of {world_size} did not join within {timeout_s} s: ranks {missing}"
            ) from None


def store_of(
    init_method: str, rank: int | None, world_size: int | None, timeout_s: float
) -> tuple[Any, int | None, int | None]:
    """The store of an init_method, and what it says of rank and world size."""
    from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

    url = urlparse(init_method)
    if url.scheme == "file":
        return FileStore(url.path, world_size or -1), rank, world_size
    host, port = url.hostname, url.port
    if url.scheme == "env":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        rank = int(os.environ["RANK"]) if rank is None else rank
        world_size = int(os.environ["WORLD_SIZE"]) if world_size is None else world_size
    elif url.scheme != "tcp" or host is None or port is None:
        raise GeartrainError(f"init_method is tcp://host:port, env:// or file:///path, found {init_method!r}")
    store = TCPStore(
        host, port, is_master=rank == 0, timeout=timedelta(seconds=timeout_s), wait_for_workers=False, multi_tenant=True
    )
    return store, rank, world_size


def _key(name: str) -> str:
    return f"geartrain/rpc/{name}"
