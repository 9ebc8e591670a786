"""Checks the arguments of a group before it connects to other ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from geartrain.collectives.bootstrap import secret_of, store_from
from geartrain.collectives.session import GroupConfig
from geartrain.core.arguments import (
    check_choice,
    check_flag,
    check_real,
    check_store,
    check_text,
    check_whole,
    shown,
    timeout,
    whole_number,
)
from geartrain.errors import ArgumentError

ALGORITHMS = ("shares", "ring")
TRANSPORTS = ("auto", "tcp")
ON_REDUCER_LOSS = ("raise", "continue")
MOST_SPIN_US = 1e9
REDUCER_SILENCE_S = (0.05, 1e6)


def checked_config(
    rank: int,
    world_size: int,
    *,
    store: Any,
    init_method: str | None,
    name: str,
    algorithm: str,
    timeout_s: float,
    secret: bytes | str | None,
    epoch: int,
    transport: str,
    cross_memory: bool,
    least_read_bytes: int | None,
    host: str | None,
    window_bytes: int | None,
    spin_us: float | None,
    on_reducer_loss: str,
    reducer_silence_s: float,
    hierarchical: bool,
    hosts: Sequence[Hashable] | None,
) -> GroupConfig:
    """The configuration of a `Group`. Rank, size and store may come from `init_method`.

    Raises:
        ArgumentError: what was given, and what is allowed.
        WaitTimeoutError: the store of `init_method` did not answer within `timeout_s`.
    """
    rank, world_size = check_whole("rank", rank), check_whole("world_size", world_size)
    timeout(timeout_s)
    whole_number("epoch", epoch, 2**63 - 1)
    check_text("a group's name", name)
    check_choice("algorithm", algorithm, ALGORITHMS)
    check_choice("transport", transport, TRANSPORTS)
    check_choice("on_reducer_loss", on_reducer_loss, ON_REDUCER_LOSS)
    least_s, most_s = REDUCER_SILENCE_S
    reducer_silence_s = check_real("reducer_silence_s", reducer_silence_s)
    if not least_s <= reducer_silence_s <= most_s:
        raise ArgumentError(f"reducer_silence_s is from {least_s:g} to {most_s:g}, found {reducer_silence_s}")
    check_flag("hierarchical", hierarchical)
    secret = secret_of(secret)
    if host is not None:
        check_text("host", host)
    cross_memory = check_flag("cross_memory", cross_memory)
    if least_read_bytes is not None:
        least_read_bytes = whole_number("least_read_bytes", least_read_bytes, 2**63 - 1)
        if algorithm == "ring" or transport == "tcp" or not cross_memory:
            raise ArgumentError(
                'least_read_bytes needs algorithm="shares", transport="auto" and cross_memory=True, found '
                f"algorithm={algorithm!r}, transport={transport!r}, cross_memory={cross_memory}"
            )
    if window_bytes is not None:
        whole_number("window_bytes", window_bytes, 2**63 - 1)
    if spin_us is not None and not 0 <= (spin_us := check_real("spin_us", spin_us)) <= MOST_SPIN_US:
        raise ArgumentError(f"spin_us is from 0 to {MOST_SPIN_US:g}, found {spin_us}")
    check_store(store)
    if store is None and init_method is not None:
        store, rank, world_size = store_from(init_method, rank, world_size, timeout_s)
    if not 0 <= rank < world_size:
        raise ArgumentError(f"rank is from 0 to world_size - 1, found rank={rank} of {world_size}")
    if store is None and world_size > 1:
        raise ArgumentError("a group of more than one rank needs a store or an init_method")
    if hosts is not None and not (hierarchical and _are_names(hosts) and len(hosts) == world_size):
        raise ArgumentError(
            f"hosts is a name for each of {world_size} ranks of a hierarchical group, found {shown(hosts)}"
        )
    if hierarchical and on_reducer_loss != "raise":
        raise ArgumentError(
            'on_reducer_loss="continue" needs connections between all ranks, which a hierarchical group has not: use '
            'on_reducer_loss="raise" or hierarchical=False'
        )
    options: dict[str, Any] = {
        "rank": rank,
        "world_size": world_size,
        "ring": algorithm == "ring",
        "outlives_reducers": on_reducer_loss == "continue",
        "reducer_silence_s": reducer_silence_s,
        "secret": secret,
        "shm": transport != "tcp",
        "cross_memory": cross_memory,
        **({} if least_read_bytes is None else {"least_exposed_bytes": least_read_bytes}),
        "host": host if host is not None else "127.0.0.1" if world_size == 1 else "0.0.0.0",
        "max_window_bytes": 16 << 20,
    }
    if spin_us is not None:
        options["spin_us"] = spin_us
    if window_bytes is not None:
        options["fixed_window_bytes"] = window_bytes
    return GroupConfig(name, rank, world_size, store, algorithm, options)


def _are_names(hosts: object) -> bool:
    """Whether these can be names of hosts: a sequence, of what has a hash."""
    return isinstance(hosts, Sequence) and not isinstance(hosts, str) and all(isinstance(h, Hashable) for h in hosts)
