"""Ranks of one process that exchange messages by a carrier, and a NIXL that is simulated."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from deadlines import patience

from geartrain.ranks.carrier_addresses import open_carrier
from geartrain.ranks.transport_carrier import TransportCarrier
from geartrain.transport.one_sided.nixl import agent

dist = pytest.importorskip("torch.distributed")
T = TypeVar("T")
#: Of what stands for NIXL's wheel.
SIMULATED_NIXL = Path(__file__).resolve().parent / "simulated_nixl"


def simulated_nixl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where NIXL is asked for: simulated, in an agent that no other test has."""
    monkeypatch.syspath_prepend(str(SIMULATED_NIXL))
    monkeypatch.setattr(agent, "WHEELS", ("nixl_cu12",))
    monkeypatch.setattr(agent, "_made", None)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "nixl_cu12"]:
        del sys.modules[name]


def on_threads(size: int, body: Callable[[int], T]) -> list[T | BaseException]:
    """What `body(rank)` returns or raises on each of so many threads."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = body(rank)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(60))
        assert not thread.is_alive()
    return found


class Ranks:
    """Ranks of one process."""

    def __init__(self, size: int, transport: str | None = None) -> None:
        """Transport "nixl": TCP, and large messages by NIXL."""
        self.store = dist.HashStore()
        self.failed = threading.Event()
        way = {"transport": "tcp", "backend": "nixl"} if transport == "nixl" else {"transport": transport}
        opened = on_threads(
            size, lambda rank: open_carrier(self.store, rank, size, patience(20), self.failed.is_set, **way)
        )
        self.carriers: list[TransportCarrier] = []
        for each in opened:
            assert isinstance(each, TransportCarrier), each
            self.carriers.append(each)

    def exchange(self, body: Callable[[int], tuple[Any, Any]], number: int = 1) -> list[BaseException | None]:
        """One exchange: `body` says what a rank sends and receives."""
        return on_threads(
            len(self.carriers),
            lambda rank: self.carriers[rank].exchange(number, *body(rank), time.monotonic() + patience(20)),
        )
