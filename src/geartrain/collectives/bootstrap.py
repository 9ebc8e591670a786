"""Bootstrap: ranks exchange addresses and settings through a store."""

from __future__ import annotations

import json
from typing import Any

from geartrain.errors import RanksDisagreeError, UnknownPeerError, WaitTimeoutError
from geartrain.transport.rendezvous import Directory, store_of


def store_from(init_method: str, rank: int, world_size: int, timeout_s: float) -> tuple[Any, int, int]:
    """The store of an `init_method`, with rank and world size."""
    store, found_rank, found_size = store_of(init_method, rank, world_size, timeout_s)
    assert found_rank is not None
    assert found_size is not None
    return store, found_rank, found_size


def exchange_addresses(
    store: Any,
    name: str,
    epoch: int,
    rank: int,
    world_size: int,
    address: str,
    settings: dict[str, Any],
    until_s: float,
) -> list[str]:
    """All-gathers addresses; returns them in rank order.

    Raises:
        WaitTimeoutError: names the ranks that are missing.
        RanksDisagreeError: names a rank whose settings differ.
    """
    mine = json.loads(json.dumps(settings))
    texts = all_gather_text(
        store, name, str(epoch), rank, world_size, json.dumps({"address": address, "settings": mine}), until_s
    )
    addresses = []
    for other, text in enumerate(texts):
        found = json.loads(text)
        for key, value in mine.items():
            if found["settings"].get(key) != value:
                raise RanksDisagreeError(
                    f"group {name!r}: rank {rank} was given {key}={value}, rank {other} {found['settings'].get(key)}"
                )
        addresses.append(found["address"])
    return addresses


def all_gather_text(
    store: Any, name: str, key: str, rank: int, world_size: int, text: str, until_s: float
) -> list[str]:
    """One text from each rank, in rank order. Raises `WaitTimeoutError`, which names the ranks that are missing."""
    if world_size == 1:
        return [text]
    directory = Directory(store, {}, prefix=f"geartrain/collectives/{name}/{key}")
    directory.put(str(rank), text)
    texts = []
    for other in range(world_size):
        try:
            texts.append(directory.find(str(other), until_s))
        except UnknownPeerError:
            missing = [r for r in range(other, world_size) if not directory.has(str(r))]
            raise WaitTimeoutError(
                f"group {name!r}: {len(missing)} of {world_size} ranks did not join before the deadline: {missing}"
            ) from None
    return texts
