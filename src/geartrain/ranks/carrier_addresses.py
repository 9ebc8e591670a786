"""Opens the carrier of a rank group, from addresses in the job's key-value store.

Each rank publishes the address of its listener and the carrier it asks for, or the reason why it has no listener. All
ranks read the same entries, so they reach the same decision:

- the transports, in the usual case;
- Gloo, if a rank cannot use the transports and no rank asks for a feature that Gloo lacks;
- otherwise an error that names the rank whose settings cannot be used.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from geartrain.errors import ArgumentError, GeartrainError, WaitTimeoutError
from geartrain.ranks.transport_carrier import TransportCarrier
from geartrain.transport.connection import Listener, listen
from geartrain.transport.rendezvous import address_towards
from geartrain.transport.tls import VARIABLES

# Longest single wait for the store, whose own threads print a line about each that times out.
STORE_WAIT_S = 10.0

#: What is published in the place of an address by a rank that cannot use the transports, with the reason.
NOT_VIABLE = "not viable: "
#: The same of a rank with settings that no group may disregard: with these all ranks raise.
REFUSED = "refused: "
#: What the address of a rank that asks for TLS begins with: such a group has no other carrier.
WITH_TLS = "with TLS: "
#: The same of a rank that asks for a one-sided backend, as all others do then; the backend's name follows.
ONE_SIDED = "one-sided by "
# How long a rank that is about to raise waits until all have read why: the store may end with its process.
KNOWN_S = 5.0


def open_carrier(
    store: Any,
    rank: int,
    size: int,
    timeout_s: float,
    failed: Callable[[], bool],
    *,
    transport: str | None = None,
    refuse: str | None = None,
    backend: str | None = None,
) -> TransportCarrier | str:
    """The carrier of this rank, once all ranks have published their addresses; or why one cannot use it. Collective.

    Args:
        store: of `torch.distributed`, unique for the group.
        rank, size: in the group.
        timeout_s: for all ranks to get here.
        failed, transport: see `TransportCarrier`.
        refuse: why this rank does not want it; then no rank uses it.
        backend: this rank asks for large messages between hosts to be written by this one-sided backend, as all
            others must then.

    Raises:
        ArgumentError: on all ranks alike, and names the first rank whose settings cannot be followed: incomplete or
            unreadable certificates, TLS on a rank and no transports on some rank, an interface that is not there; a
            backend that does not work, or is asked for together with TLS, or not by all ranks.
        WaitTimeoutError: names the ranks that are missing.
        RuntimeError: the store does not answer.
    """
    until_s = time.monotonic() + timeout_s
    if rank == 0:
        store.set("key", secrets.token_hex(32))
    _wait_for(store, ["key"], until_s)
    key = bytes(store.get("key"))
    listener, published = _listener_of(store, key, refuse, backend)
    try:
        store.set(f"address/{rank}", published)
        names = [f"address/{other}" for other in range(size)]
        try:
            _wait_for(store, names, until_s)
        except WaitTimeoutError:
            missing = [other for other, name in enumerate(names) if not store.check([name])]
            raise WaitTimeoutError(f"{missing}") from None
        found = store.multi_get(names) if store.has_extended_api() else [store.get(name) for name in names]
        addresses = [bytes(each).decode() for each in found]
        why = _refusal(addresses)
        if why is not None:
            _until_all_know(store, rank, size)
            raise ArgumentError(why)
    except BaseException:
        if listener is not None:
            listener.close()
        raise
    for other, each in enumerate(addresses):
        if each.startswith(NOT_VIABLE):
            if listener is not None:
                listener.close()
            return f"rank {other}: {each.removeprefix(NOT_VIABLE)}"
    assert listener is not None  # or this rank would have said why not
    addresses = [each.removeprefix(WITH_TLS if backend is None else _asks_for(backend)) for each in addresses]
    if backend is not None:
        from geartrain.ranks.one_sided_carrier import OneSidedCarrier

        return OneSidedCarrier(backend, listener, addresses, rank, key, failed, transport)
    return TransportCarrier(listener, addresses, rank, key, failed, transport)


def _listener_of(store: Any, key: bytes, refuse: str | None, backend: str | None) -> tuple[Listener | None, str]:
    """This rank's listener, if it can have one, and its entry in the store: its address, or why there is none."""
    tls = any(os.environ.get(name) for name in VARIABLES)
    if backend is not None:
        from geartrain.transport import one_sided

        unencrypted = f"{backend} does not encrypt, and GEARTRAIN_TLS_* ask for TLS"
        why = unencrypted if tls else one_sided.backend(backend).why_not()
        if why is not None:
            return None, f"{REFUSED}{why}"
    if refuse is not None:
        # Gloo knows no TLS: who asks for both is told, instead of one of them being dropped.
        refused = f"{REFUSED}{refuse}, which has no TLS, and GEARTRAIN_TLS_* ask for it"
        return None, refused if tls else f"{NOT_VIABLE}{refuse}"
    try:
        listener = listen(_listening_host(store), secret=key, peer_timeout_s=0)
    except GeartrainError as error:
        return None, f"{REFUSED if tls or isinstance(error, ArgumentError) else NOT_VIABLE}{error}"
    asked = WITH_TLS if tls else "" if backend is None else _asks_for(backend)
    return listener, f"{asked}{listener.address}"


def _asks_for(backend: str) -> str:
    return f"{ONE_SIDED}{backend}: "


def _refusal(addresses: Sequence[str]) -> str | None:
    """Why the group cannot be, by what its ranks have published; None where it can."""
    for rank, each in enumerate(addresses):
        if each.startswith(REFUSED):
            return f"rank {rank} of the group cannot take part: {each.removeprefix(REFUSED)}"
    asking = next((rank for rank, each in enumerate(addresses) if each.startswith(ONE_SIDED)), None)
    if asking is not None:
        backend = addresses[asking].removeprefix(ONE_SIDED).partition(": ")[0]
        for rank, each in enumerate(addresses):
            if not each.startswith(_asks_for(backend)):
                why = each.removeprefix(NOT_VIABLE) if each.startswith(NOT_VIABLE) else "it does not ask for it"
                return f"rank {asking} of the group asks for {backend}, and rank {rank} cannot take part: {why}"
    tls = [rank for rank, each in enumerate(addresses) if each.startswith(WITH_TLS)]
    for rank, each in enumerate(addresses):
        if tls and each.startswith(NOT_VIABLE):
            return (
                f"rank {tls[0]} of the group asks for TLS (GEARTRAIN_TLS_*), which Gloo does not have, and rank {rank} "
                f"cannot use the transports: {each.removeprefix(NOT_VIABLE)}"
            )
    return None


def _until_all_know(store: Any, rank: int, size: int) -> None:
    with contextlib.suppress(RuntimeError, WaitTimeoutError):  # the store is gone, or a rank
        store.set(f"known/{rank}", "")
        _wait_for(store, [f"known/{other}" for other in range(size)], time.monotonic() + KNOWN_S)


def _wait_for(store: Any, names: list[str], until_s: float) -> None:
    """Raises `WaitTimeoutError` unless all names are in the store in time."""
    while True:
        left_s = max(until_s - time.monotonic(), 0.01)  # 0 would be for ever
        try:
            store.wait(names, timedelta(seconds=min(left_s, STORE_WAIT_S)))
            return
        except RuntimeError as error:
            if "time" not in str(error).lower():
                raise
            if left_s <= STORE_WAIT_S:
                raise WaitTimeoutError("the deadline of the key-value store") from None


def _listening_host(store: Any) -> str:
    """The address to listen on.

    It is the address of the interface that Gloo is configured to use, or of the interface that leads to the job's
    store. If neither is known, it is every interface. Raises `ArgumentError` if the interface has no IPv4 address.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if name:
        try:
            return interface_address(name)
        except OSError as error:
            raise ArgumentError(
                f"GLOO_SOCKET_IFNAME names {name!r}, which is no interface with an IPv4 address here: {error.strerror}"
            ) from error
    with contextlib.suppress(OSError):
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        address = address_towards(store.host) if isinstance(getattr(store, "host", None), str) else ""
        # A host's own name often stands for its loopback, where no other host reaches it.
        if address and not address.startswith(("127.", "::1")):
            return address
    return "0.0.0.0"


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface. Raises `OSError` where it has none, or there is none of that name."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        SIOCGIFADDR = 0x8915
        encoded = os.fsencode(name)
        if len(encoded) > 15:  # IFNAMSIZ: the kernel would look for another, shorter name
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", encoded))
        return socket.inet_ntoa(answer[20:24])


__all__ = ["interface_address", "open_carrier"]
