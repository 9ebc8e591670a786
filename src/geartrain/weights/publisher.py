"""`Publisher`: the trainer's side of the distribution of weights."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

import geartrain._native as _native
from geartrain.core.arguments import check_whole, timeout
from geartrain.core.lifetime import Closing
from geartrain.core.shared_files import Trust, check_trust
from geartrain.errors import ArgumentError
from geartrain.weights.format import directory_of
from geartrain.weights.layout import Schema, leaves_of
from geartrain.weights.server import check_node, serve, stop_serving
from geartrain.weights.writer import Writer

if TYPE_CHECKING:
    from geartrain.rpc import Node


def _warn_of_clock(name: str, version: int, clock: int) -> None:
    import logging

    logging.getLogger(__name__).warning(
        "version %d of the weights %r is below the store's clock, which stays at %d: rows made with it look %d "
        "versions old at once, and max_stale may remove them. Load the replay's state first, or publish from version "
        "%d on",
        version,
        name,
        clock,
        clock - version,
        clock + 1,
    )


class Clock(Protocol):
    """What follows the versions that are published: a store with tasks."""

    @property
    def clock(self) -> int:
        """Its newest version."""
        ...

    def advance(self, version: int, /) -> int:
        """Takes a newer version, and returns the newest."""
        ...


def check_clock(clock: Clock) -> None:
    """Raises `ArgumentError` for what is no clock."""
    if not hasattr(type(clock), "advance") or not hasattr(type(clock), "clock"):
        raise ArgumentError(f"clock= is a store with tasks, found {type(clock).__name__}")
    _ = clock.clock  # which a store without tasks refuses


class Publisher(Closing, elsewhere="weights have one publisher a host"):
    """Publishes versions of weights under a name. A host has one publisher of each name.

    Any thread may publish. Versions must increase, whichever thread publishes them.

    Any thread and any signal handler may call `close`, more than once and during a `publish`. A `publish` that waits
    for a buffer then ends with `StoreClosedError`. `close` waits for a `publish` that copies. Later calls of `publish`
    are refused. In a forked child, `publish` raises `StoreClosedError`. The interpreter closes the publisher at exit.

    Examples:
        >>> with Publisher("doctest-policy") as publisher:
        ...     publisher.publish(1, {"w": np.ones(3, "float32")})
        ...     publisher.version
        1
    """

    def __init__(
        self,
        name: str,
        *,
        node: Node | None = None,
        buffers: int = 3,
        timeout_s: float = 30.0,
        directory: str | Path | None = None,
        trust: Trust = "user",
        clock: Clock | None = None,
    ) -> None:
        """Continues with the file of an earlier publisher of that name, if there is one.

        Args:
            name: name of the weights.
            node: the `geartrain.rpc` node through which other hosts follow: `Reader(name, node=..., source=<this node's
                name>)`.
            buffers: versions that fit, including the one being written. The publisher waits only if readers hold all
                but two. A buffer's memory is allocated at its first use. Two are enough for fast readers.
            timeout_s: default of `publish`, 0 (does not wait) to 1e9 seconds.
            directory: another directory than /dev/shm or GEARTRAIN_DIR; the same in all processes of the host.
            trust: who may publish and read besides this user: nobody ("user"), a group of this user ("group"), or
                everybody on the host ("any"). They could also truncate or overwrite the file.
            clock: a store with tasks, whose clock each published version advances (`Store.advance`).

        Raises:
            ArgumentError: `clock` is not a store with tasks.
            GeartrainError: another publisher of that name is alive on this host.
            IncompatibleStoreError: the file of that name is not one of weights.
            UntrustedStoreError: more users may write to the file than `trust` says, or it is a symbolic link.
        """
        if node is not None:
            check_node(node)
        if clock is not None:
            check_clock(clock)
        self.name, self.timeout_s = name, timeout(timeout_s)
        self._clock = clock
        self._writer = Writer(name, buffers, directory_of(directory), check_trust(trust))
        self._version: int | None = None
        self._node = node
        if node is not None:
            serve(node, name, self._writer)

    @property
    def version(self) -> int | None:
        """Newest version that this publisher published."""
        return self._version

    def publish(self, version: int, weights: Mapping[str, Any], *, timeout_s: float | None = None) -> None:
        """Publishes weights as the newest version, for readers on all hosts. They are copied once, into shared memory.

        Args:
            version: a number larger than the one before and below 2**63, such as the training step. With `clock`
                take `store.clock + 1`: then the versions of a restarted trainer go on where they ended. A version
                below the clock is published with a warning, because rows made with it look too old.
                `store.row(version=...)` takes it.
            weights: a state_dict, or any nesting of mappings with tensors (of any dtype, on any device) and NumPy
                arrays. Do not change them until this returns.
            timeout_s: longest wait for other threads that publish, and for a buffer, in seconds.

        Raises:
            ArgumentError: the version does not increase, or names, dtypes or shapes differ from the first version.
            BuffersHeldError: readers held all buffers until the deadline. Nothing was published.
            WaitTimeoutError: another thread published until the deadline. Nothing was published.
            NoSpaceError: /dev/shm, or GEARTRAIN_DIR, is full.
            StoreClosedError: this publisher was closed, or the store of `clock` after the version was published.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout(timeout_s)
        _native.sleep_at_finalization()
        number = check_whole("version", version, 0, 2**63 - 1)
        leaves = leaves_of(weights)
        schema = Schema.of(leaves)
        until_s = time.monotonic() + limit_s
        with self._writer.turn(limit_s):
            if self._version is not None and number <= self._version:
                raise ArgumentError(f"versions must increase: {number} cannot follow {self._version}")
            if self._version is None:
                self._writer.lay_out(schema)
            elif self._writer.schema is not None:
                self._writer.schema.check(schema)
            with self._writer.writing(number, max(until_s - time.monotonic(), 0.0)) as views:
                _copy(list(leaves.values()), views)
            self._version = number
            if self._clock is not None and (now := self._clock.advance(number)) > number:
                _warn_of_clock(self.name, number, now)

    def close(self) -> None:
        """Detaches. Attached readers keep the newest version; the last of them removes the segment."""
        if self._node is not None:
            stop_serving(self._node, self.name, self._writer)
        self._writer.close()

    def __repr__(self) -> str:
        return f"<Publisher of {self.name!r}, version {self._version}>"


def _copy(leaves: list[Any], views: Any) -> None:
    """Copies leaves into shared memory; from a device, this is the copy to the host."""
    arrays = [(view, leaf) for view, leaf in zip(views, leaves, strict=True) if isinstance(view, np.ndarray)]
    tensors = [(view, leaf) for view, leaf in zip(views, leaves, strict=True) if not isinstance(view, np.ndarray)]
    for view, leaf in arrays:
        np.copyto(view, leaf)
    if tensors:
        torch = importlib.import_module("torch")
        with torch.no_grad():
            for view, leaf in tensors:
                view.copy_(leaf)
