"""`GroupOptions`, and checks of the arguments of a group before it connects to other ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from geartrain.collectives.bootstrap import secret_of, store_from
from geartrain.collectives.session import GroupConfig
from geartrain.core.arguments import (
    FLAG,
    Options,
    check_choice,
    check_flag,
    check_real,
    check_store,
    check_text,
    check_type,
    check_whole,
    checked,
    shown,
    timeout,
)
from geartrain.errors import ArgumentError

ALGORITHMS = ("shares", "ring")
TRANSPORTS = ("auto", "tcp")
ON_REDUCER_LOSS = ("raise", "continue")
MOST_SPIN_US = 1e9
REDUCER_SILENCE_S = (0.05, 1e6)


@dataclass(frozen=True)
class GroupOptions(Options):
    """Rare options of a `Group`: `Group(..., options=GroupOptions(on_reducer_loss="continue"))`.

    All ranks give the same, except where an option says otherwise.

    Args:
        on_reducer_loss: what happens if a reducer dies or is silent. "raise" ends the group. "continue": the ranks do
            its work until it is back, and log that. Each keeps up to 16 MB of results per reducer for this, and has a
            connection to every other rank. A hierarchical group takes "raise" only.
        reducer_silence_s: with "continue", a reducer that is waited for and sends nothing for this many seconds counts
            as lost.
        rates: bytes/s of each rank's and then each reducer's link, for shares="auto"; equal by default.
        algorithm: "shares", or "ring" for networks where a rank reaches only its neighbours.
        hosts: with `hierarchical`, the name of each rank's host; found by default.
        host: address to listen on; by default every interface, or loopback for a group of one. Ranks differ.
        transport: "auto" uses shared memory within a host and TCP between hosts; "tcp" uses TCP everywhere.
        cross_memory: let ranks of one host read arrays out of each other's memory if the kernel allows it. False copies
            everything through rings. Ranks may differ.
        least_read_bytes: smallest all-reduce or reduce-scatter that is read out of the ranks' memory. By default 4 MB
            with four or more ranks a core, otherwise never. Needs algorithm="shares", transport="auto" and
            cross_memory. It has no effect with reducers, several hosts or a `wire_dtype` (docs/collectives.md). If such
            an operation fails, its array is undefined. Ranks may differ.
        window_bytes: how far a rank may run ahead of its results; by default it adapts to the network.
        spin_us: how long a wait spins before it sleeps, if all ranks share memory, in microseconds. By default 50, or
            less if others need the cores. Use 1e6 for ranks that own their cores, and 0 to never spin. Ranks may
            differ.

    Raises:
        ArgumentError: an option is out of range, or two exclude each other.

    Examples:
        >>> GroupOptions(on_reducer_loss="continue").reducer_silence_s
        3.0
    """

    on_reducer_loss: str = field(default="raise", metadata=checked(check_choice, ON_REDUCER_LOSS))
    reducer_silence_s: float = field(default=3.0, metadata=checked(check_real, *REDUCER_SILENCE_S))
    rates: Sequence[float] | None = None
    algorithm: str = field(default="shares", metadata=checked(check_choice, ALGORITHMS))
    hosts: Sequence[Hashable] | None = None
    host: str | None = field(default=None, metadata=checked(check_text))
    transport: str = field(default="auto", metadata=checked(check_choice, TRANSPORTS))
    cross_memory: bool = field(default=True, metadata=FLAG)
    least_read_bytes: int | None = field(default=None, metadata=checked(check_whole, 0, 2**63 - 1))
    window_bytes: int | None = field(default=None, metadata=checked(check_whole, 0, 2**63 - 1))
    spin_us: float | None = field(default=None, metadata=checked(check_real, 0, MOST_SPIN_US))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least_read_bytes is not None and (
            self.algorithm == "ring" or self.transport == "tcp" or not self.cross_memory
        ):
            raise ArgumentError(
                'least_read_bytes needs algorithm="shares", transport="auto" and cross_memory=True, found '
                f"algorithm={self.algorithm!r}, transport={self.transport!r}, cross_memory={self.cross_memory}"
            )

    @property
    def native(self) -> dict[str, Any]:
        """Internal: those of the native group."""
        options: dict[str, Any] = {
            "ring": self.algorithm == "ring",
            "outlives_reducers": self.on_reducer_loss == "continue",
            "reducer_silence_s": self.reducer_silence_s,
            "shm": self.transport != "tcp",
            "cross_memory": self.cross_memory,
        }
        rare = {
            "least_exposed_bytes": self.least_read_bytes,
            "spin_us": self.spin_us,
            "fixed_window_bytes": self.window_bytes,
        }
        return options | {name: value for name, value in rare.items() if value is not None}


def checked_config(
    rank: int,
    world_size: int,
    *,
    store: Any,
    init_method: str | None,
    name: str,
    timeout_s: float,
    secret: bytes | str | None,
    epoch: int,
    hierarchical: bool,
    options: GroupOptions,
) -> GroupConfig:
    """The configuration of a `Group`. Rank, size and store may come from `init_method`.

    Raises:
        ArgumentError: what was given, and what is allowed.
        WaitTimeoutError: the store of `init_method` did not answer within `timeout_s`.
    """
    check_type("options are geartrain.collectives.GroupOptions", options, GroupOptions)
    rank, world_size = check_whole("rank", rank), check_whole("world_size", world_size)
    timeout(timeout_s)
    check_whole("epoch", epoch, 0, 2**63 - 1)
    check_text("a group's name", name)
    check_flag("hierarchical", hierarchical)
    secret = secret_of(secret)
    check_store(store)
    if store is None and init_method is not None:
        store, rank, world_size = store_from(init_method, rank, world_size, timeout_s)
    if not 0 <= rank < world_size:
        raise ArgumentError(f"rank is from 0 to world_size - 1, found rank={rank} of {world_size}")
    if store is None and world_size > 1:
        raise ArgumentError("a group of more than one rank needs a store or an init_method")
    hosts = options.hosts
    if hosts is not None and not (hierarchical and _are_names(hosts) and len(hosts) == world_size):
        raise ArgumentError(
            f"hosts is a name for each of {world_size} ranks of a hierarchical group, found {shown(hosts)}"
        )
    if hierarchical and options.on_reducer_loss != "raise":
        raise ArgumentError(
            'on_reducer_loss="continue" needs connections between all ranks, which a hierarchical group has not: use '
            'on_reducer_loss="raise" or hierarchical=False'
        )
    native = {
        **options.native,
        "rank": rank,
        "world_size": world_size,
        "secret": secret,
        "host": options.host or ("127.0.0.1" if world_size == 1 else "0.0.0.0"),
        "max_window_bytes": 16 << 20,
    }
    return GroupConfig(name, rank, world_size, store, options.algorithm, native)


def _are_names(hosts: object) -> bool:
    """Whether these can be names of hosts: a sequence, of what has a hash."""
    return isinstance(hosts, Sequence) and not isinstance(hosts, str) and all(isinstance(h, Hashable) for h in hosts)
