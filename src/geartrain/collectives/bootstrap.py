"""Bootstrap of a group: ranks exchange addresses and settings through a store.

If one rank cannot join, it publishes the cause, and the other ranks raise it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import geartrain.errors as errors
from geartrain.collectives.faults import renumbered
from geartrain.collectives.host_map import host_identity
from geartrain.core.arguments import check_secret, check_text
from geartrain.core.threads import DaemonThread, ReentrantEvent
from geartrain.errors import (
    GeartrainError,
    PeerLostError,
    RanksDisagreeError,
    UnknownPeerError,
    WaitTimeoutError,
)
from geartrain.transport.rendezvous import Directory, store_of

_FAILURE = "failure"
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05  # between looks into the store


def store_from(init_method: str, rank: int, world_size: int, timeout_s: float) -> tuple[Any, int, int]:
    """The store of an `init_method`, with rank and world size."""
    store, found_rank, found_size = store_of(init_method, rank, world_size, timeout_s)
    assert found_rank is not None
    assert found_size is not None
    return store, found_rank, found_size


def secret_of(given: bytes | str | None) -> bytes:
    """The cluster's secret in bytes; none of it is b""."""
    if isinstance(given, str):
        return check_text("a secret", given, empty=True).encode()
    return b"" if given is None else check_secret(given)


class Bootstrap:
    """One rank's part in the bootstrap of one epoch of a group.

    A rank that cannot join publishes the cause (`fail`). The waits of all other ranks then end at once with this cause,
    before their deadlines.

    Args:
        store: of torch's kind; None for a group of one.
        name, epoch: of the group, never the same twice on one store.
        until_s: deadline (`time.monotonic`) of every wait.

    Attributes:
        hosts: `host_identity` of each rank, once addresses were exchanged.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        epoch: int,
        rank: int,
        world_size: int,
        until_s: float,
    ) -> None:
        self.until_s = until_s
        self.hosts: list[str] = []
        self._store = store
        self._name = name
        self._epoch = epoch
        self._rank = rank
        self._world_size = world_size
        self._whole: Bootstrap | None = None
        self._numbers: Sequence[int] = range(world_size)  # of the ranks, as all ranks are numbered
        self._directory = Directory(store, {}, prefix=f"geartrain/collectives/{name}/{epoch}")

    def part(self, name: str, ranks: Sequence[int]) -> Bootstrap:
        """The bootstrap of some of the ranks, including this one.

        Its failures become failures of all ranks, and name these ranks.

        Args:
            name: of the part, the same on all its ranks and no other part's.
            ranks: in the part's order.
        """
        part = Bootstrap(
            self._store,
            f"{self._name}/{name}",
            self._epoch,
            list(ranks).index(self._rank),
            len(ranks),
            self.until_s,
        )
        part._whole = self
        part._numbers = ranks
        return part

    @property
    def whole(self) -> Bootstrap:
        """The bootstrap of all ranks, of which this may be a part."""
        return self if self._whole is None else self._whole

    def exchange_addresses(self, address: str, settings: dict[str, Any]) -> list[str]:
        """All-gathers addresses; returns them in rank order, and sets `hosts`.

        Raises:
            WaitTimeoutError: names the ranks that are missing.
            RanksDisagreeError: names a rank whose settings differ.
        """
        mine = json.loads(json.dumps(settings))
        record = {"address": address, "settings": mine, "host": host_identity()}
        texts = self.all_gather("address", json.dumps(record))
        addresses = []
        self.hosts = []
        for other, text in enumerate(texts):
            found = json.loads(text)
            for key, value in mine.items():
                if found["settings"].get(key) != value:
                    raise RanksDisagreeError(
                        f"group {self._name!r}: rank {self._rank} was given {key}={value}, rank {other} "
                        f"{found['settings'].get(key)}"
                    )
            addresses.append(found["address"])
            self.hosts.append(found["host"])
        return addresses

    def all_gather(self, what: str, text: str) -> list[str]:
        """One text from each rank, in rank order.

        Raises:
            WaitTimeoutError: names the ranks that are missing. A failure that another rank has published is raised too.
        """
        if self._world_size == 1:
            return [text]
        self._directory.put(f"{what}/{self._rank}", text)
        texts: list[str] = []
        pause_s = _SHORTEST_PAUSE_S
        while len(texts) < self._world_size:
            try:
                texts.append(self._directory.find(f"{what}/{len(texts)}", 0.0))
                continue
            except UnknownPeerError:
                pass
            self.raise_failure()
            if time.monotonic() > self.until_s:
                missing = [
                    self._numbers[r]
                    for r in range(len(texts), self._world_size)
                    if not self._directory.has(f"{what}/{r}")
                ]
                raise WaitTimeoutError(
                    f"group {self._name!r}: {len(missing)} of {self._world_size} ranks did not join before the "
                    f"deadline: {missing}"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return texts

    # --- failures -----------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> BaseException:
        """Publishes why this rank cannot join, unless another rank's failure is there already.

        Returns the error; of a part, as all ranks are numbered.
        """
        if self._whole is not None:
            return self._whole.fail(renumbered(error, self._numbers))
        if self._world_size == 1:
            return error
        known = isinstance(error, GeartrainError)
        record = {
            "kind": type(error).__name__ if known else PeerLostError.__name__,
            "text": str(error) if known else f"it gave up with {type(error).__name__}: {error}",
            "rank": self._rank,
            "reducers": list(getattr(error, "reducers", ())),
            "ranks": list(getattr(error, "ranks", ())),
        }
        with suppress(Exception):  # the store is gone, or whatever else: the cause itself is what counts here
            if not self._directory.has(_FAILURE):
                self._directory.put(_FAILURE, json.dumps(record))
        return error

    def failure(self) -> GeartrainError | None:
        """The failure that another rank has published."""
        if self._whole is not None:
            return self._whole.failure()
        if self._world_size == 1 or not self._directory.has(_FAILURE):
            return None
        record = json.loads(self._directory.find(_FAILURE, 0.0))
        if record["rank"] == self._rank:
            return None
        kind = getattr(errors, record["kind"], PeerLostError)
        error: GeartrainError = kind(f"{record['text']} [told by rank {record['rank']}]")
        for attribute in ("ranks", "reducers"):
            setattr(error, attribute, tuple(record[attribute]))
        return error

    def is_to_blame(self) -> bool:
        """Whether no other rank has published a failure, as far as the store tells."""
        with suppress(Exception):  # the store is gone
            return self.failure() is None
        return True

    def raise_failure(self) -> None:
        """Raises the failure that another rank has published, if any."""
        error = self.failure()
        if error is not None:
            raise error

    @contextmanager
    def watching(self, give_up: Callable[[str], None]) -> Iterator[None]:
        """Calls `give_up` when another rank publishes a failure during the body."""
        if self._world_size == 1:
            yield
            return
        over = ReentrantEvent()

        def watch() -> None:
            while not over.wait(_LONGEST_PAUSE_S):
                try:
                    self.raise_failure()
                except GeartrainError as error:
                    give_up(str(error))
                    return

        thread = DaemonThread(watch, "geartrain-bootstrap")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
