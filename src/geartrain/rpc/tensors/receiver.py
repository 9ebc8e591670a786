"""The answering end of devices.py: takes tensors of calls, and holds those of results until they are asked for."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import geartrain.transport.nixl as nixl
from geartrain.errors import MessageError
from geartrain.rpc.protocol import BESIDE
from geartrain.rpc.registry import function
from geartrain.rpc.session import Caller
from geartrain.rpc.tensors.bundles import (
    NIXL_BYTES,
    REHEARSAL_BYTES,
    Group,
    as_tensor,
    by_host,
    checked,
    forms_of,
    found_in,
    leaves_at,
    moved,
)
from geartrain.rpc.tensors.device_map import CPU
from geartrain.rpc.tensors.paths import Held
from geartrain.rpc.tensors.pytree import put_back, take_out
from geartrain.transport.codec import native_codec

if TYPE_CHECKING:
    from geartrain.rpc.tensors.endpoint import Devices


class Inbound:
    """The answering end: takes tensors of calls, and holds those of results until they are asked for."""

    def __init__(self, devices: Devices, connection: Any) -> None:
        self.devices = devices
        self.ways = devices.ways()
        self.forced: str | None = None  # what the caller asked for
        self.handshake: nixl.Handshake | None = None
        self.back: dict[int, str] = {}  # GPU here -> way to the caller
        self._connection = connection
        self._codec = native_codec()
        self._held: dict[int, dict[int, tuple[str, int, list[Any]]]] = {}
        self._lock = threading.Lock()

    def arrived(self, value: Any) -> Any:
        """The call's value, complete."""
        tree, groups = checked(value)
        found: list[Any] = []
        for way, device, number, token, entries in groups:
            if way == "host":
                leaves = leaves_at(tree, [path for path, _ in entries])
                found += moved(self.devices.driver, device, entries, leaves)
            else:
                leaves = self.ways.take(number, token, [form for _, form in entries])
                found += [(path, leaf) for (path, _), leaf in zip(entries, leaves, strict=True)]
        return put_back(tree, found)

    def encode(self, value: Any, pickle: bool, tag: int) -> tuple[int, Any]:
        """The parcel of a result, and the bit of its kind. Leaves that are not in it are held under the call's tag."""
        over_nixl = self.forced == "nixl"
        try:
            parcel = self._codec.encode(value, pickle)
            if not (over_nixl and parcel.nbytes >= NIXL_BYTES):
                return 0, parcel
        except MessageError:
            tree, leaves = take_out(value, self.devices.wanted(over_nixl))
            if not leaves:
                raise
        else:
            tree, leaves = take_out(value, self.devices.wanted(over_nixl))
            if not leaves:
                return 0, parcel
        tree, groups = self._hold(tree, leaves, tag)
        return BESIDE, self._codec.encode((tree, groups), pickle)

    def _hold(self, tree: Any, leaves: list[Any], tag: int) -> tuple[Any, list[Group]]:
        driver, by_device = self.devices.driver, {}  # type: ignore[var-annotated]
        for path, leaf in leaves:
            here = driver.device_of(leaf)
            by_device.setdefault(CPU if here is None else here, []).append((path, leaf))
        groups: list[Group] = []
        held: dict[int, tuple[str, int, list[Any]]] = {}
        for here, entries in by_device.items():
            way = "nixl" if here == CPU else self.back.get(here, self.forced or "host")
            if way == "host":
                tree, group = by_host(driver, tree, here, entries)
                groups.append(group)
                continue
            leaves = [leaf for _, leaf in entries]
            forms, _ = forms_of(driver, leaves)
            # Copies: what the function returned may be changed before the caller asks for it.
            copies = self.ways.hold(leaves) if here == CPU else [driver.snapshot(leaf) for leaf in leaves]
            held[len(groups)] = way, here, copies
            groups.append((way, here, 0, b"", [(path, form) for (path, _), form in zip(entries, forms, strict=True)]))
        if held:
            with self._lock:
                self._held[tag] = held
        return tree, groups

    def push(self, tag: int, at: int, descriptor: Any, timeout_s: float) -> bytes:
        """Writes a group of held leaves into the caller's room."""
        way, here, leaves = self._release(tag, at)
        try:
            return self.ways.push(way, here, descriptor, leaves, timeout_s)
        finally:
            if isinstance(leaves, Held):
                leaves.drop()

    def hand_over(self, tag: int, at: int) -> list[Any]:
        """A group of held leaves, on the CPU."""
        _, here, leaves = self._release(tag, at)
        if here == CPU:
            raise MessageError("what is on the CPU is held for NIXL only")
        return self.devices.driver.to_host(leaves)

    def _release(self, tag: int, at: int) -> tuple[str, int, list[Any]]:
        with self._lock:
            groups = self._held.get(tag, {})
            if at not in groups:
                raise MessageError(f"nothing is held for call {tag}")
            group = groups.pop(at)
            if not groups:
                del self._held[tag]
            return group

    def forget_held(self, tag: int) -> None:
        """The caller does not want the rest of a result."""
        with self._lock:
            groups = self._held.pop(tag, {})
        for _, _, leaves in groups.values():
            if isinstance(leaves, Held):
                leaves.drop()

    def meet(self, forced: str | None, hello: bytes | None) -> tuple[int, str | None, bytes | None]:
        """How many GPUs are here, why their memory cannot be shared, and the answer to NIXL's hello."""
        self.forced = forced
        answer = None
        if hello is not None:
            self.handshake = nixl.Handshake()
            connection = self._connection
            self.ways.link = self.handshake.prove(hello, lambda: connection.lost)
            answer = self.handshake.hello
        driver = self.devices.driver
        return driver.count(), driver.why_no_ipc() if driver.count() else "there is no GPU", answer

    @property
    def held(self) -> int:
        """Results of which something is held."""
        return len(self._held)

    def close(self) -> None:
        """The caller is gone."""
        with self._lock:
            tags = list(self._held)
        for tag in tags:
            self.forget_held(tag)
        self.ways.close()


# --- what the other end asks for ------------------------------------------------------------------------------------


def _meet(caller: Caller, forced: str | None, hello: bytes | None) -> Any:
    return caller.tensors.meet(forced, hello)


def _linked(caller: Caller) -> None:
    if caller.tensors.handshake is not None:
        caller.tensors.handshake.confirm()


def _room(caller: Caller, way: str, device: int, nbytes: int) -> Any:
    return caller.tensors.ways.room(way, device, nbytes)


def _forget_room(caller: Caller, number: int) -> None:
    caller.tensors.ways.forget(number)


def _rehearsed(caller: Caller, number: int, token: bytes) -> bytes:
    return found_in(caller.tensors.devices.driver, caller.tensors.ways, number, token)


def _rehearse(caller: Caller, device: int, descriptor: Any) -> Any:
    tensors = caller.tensors
    sent = np.frombuffer(secrets.token_bytes(REHEARSAL_BYTES), np.uint8)
    (tensor,) = tensors.devices.driver.from_host(device, [as_tensor(sent)])
    return tensors.ways.push("cuda_ipc", device, descriptor, [tensor], 10.0), sent.tobytes()


def _agree(caller: Caller, device: int, way: str) -> None:
    caller.tensors.back[device] = way


def _push(caller: Caller, tag: int, at: int, descriptor: Any, timeout_s: float) -> bytes:
    return caller.tensors.push(tag, at, descriptor, timeout_s)


def _hand_over(caller: Caller, tag: int, at: int) -> list[Any]:
    return caller.tensors.hand_over(tag, at)


def _forget_held(caller: Caller, tag: int) -> None:
    caller.tensors.forget_held(tag)


_OWN: dict[str, Callable[..., Any]] = {
    "meet": _meet,
    "linked": _linked,
    "room": _room,
    "forget_room": _forget_room,
    "rehearsed": _rehearsed,
    "rehearse": _rehearse,
    "agree": _agree,
    "push": _push,
    "hand_over": _hand_over,
    "forget_held": _forget_held,
}
for _name, _function in _OWN.items():
    # Concurrent: a call that the peer runs meanwhile may wait for them.
    function(name=f"geartrain.rpc.{_name}", concurrent=True, with_caller=True)(_function)
