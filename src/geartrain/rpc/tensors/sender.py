"""The calling end of devices.py: sends tensors to a peer, finds out how, and fetches those of its results."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import geartrain.transport.nixl as nixl
from geartrain.errors import (
    BusyError,
    ConnectionClosedError,
    GeartrainError,
    MessageError,
    PeerLostError,
    TransportError,
    WaitTimeoutError,
)
from geartrain.rpc.protocol import BESIDE
from geartrain.rpc.tensors.bundles import (
    NIXL_BYTES,
    REHEARSAL_BYTES,
    Group,
    as_tensor,
    by_host,
    checked,
    extents,
    forms_of,
    found_in,
    is_on_host,
    leaves_at,
    moved,
)
from geartrain.rpc.tensors.device_map import CPU, DeviceMap
from geartrain.rpc.tensors.paths import Ways
from geartrain.rpc.tensors.pytree import put_back, take_out
from geartrain.transport.codec import native_codec

if TYPE_CHECKING:
    from geartrain.rpc.client import Peer
    from geartrain.rpc.tensors.endpoint import Devices

_log = logging.getLogger(__name__)


class Outbound:
    """The calling end: sends tensors to a peer, and fetches those of its results."""

    def __init__(self, devices: Devices, peer: Peer, device_map: Callable[[], DeviceMap]) -> None:
        self._devices, self._peer = devices, peer
        self._codec = native_codec()
        self._find_map = device_map
        self._map: DeviceMap | None = None
        self._ways: Ways | None = None  # once there was need
        self._their_count = 0
        self._lock = threading.Lock()
        self._chosen: dict[tuple[int, int], str] = {}  # (GPU here, GPU there) -> way
        self._back: dict[int, str] = {}  # GPU there -> way that the peer was told of
        self.notes: dict[str, str] = {}  # for people
        self.bytes_by_way: dict[str, int] = {}

    # --- arguments --------------------------------------------------------------------------------------------------

    def encode(self, value: Any, pickle: bool, timeout_s: float) -> tuple[int, Any]:
        """The parcel of a value, and the bit of its kind."""
        over_nixl = self._devices.forced == "nixl"
        if self._devices.forced is not None:
            self._meet(timeout_s)
        try:
            parcel = self._codec.encode(value, pickle)
            if not (over_nixl and parcel.nbytes >= NIXL_BYTES):
                return 0, parcel
        except MessageError:
            tree, leaves = take_out(value, self._devices.wanted(over_nixl))
            if not leaves:
                raise
        else:
            tree, leaves = take_out(value, self._devices.wanted(over_nixl))
            if not leaves:
                return 0, parcel
        until_s = time.monotonic() + timeout_s
        self._meet(timeout_s)
        tree, groups = self._send(tree, leaves, until_s)
        return BESIDE, self._codec.encode((tree, groups), pickle)

    def _send(self, tree: Any, leaves: list[Any], until_s: float) -> tuple[Any, list[Group]]:
        """Pushes leaves, by the pairs of devices that they go from and to."""
        driver, pairs = self._devices.driver, {}  # type: ignore[var-annotated]
        for path, leaf in leaves:
            here = driver.device_of(leaf)
            if here is None:
                pairs.setdefault(("nixl", CPU, CPU), []).append((path, leaf))
                continue
            there = self.map.there(here, self._their_count)
            way = "host" if there == CPU else self.way(here, there, until_s)
            pairs.setdefault((way, here, there), []).append((path, leaf))
        groups: list[Group] = []
        for (way, here, there), entries in pairs.items():
            if way != "host":
                group = self._push(way, here, there, entries, until_s)
                if group is not None:
                    groups.append(group)
                    continue
            tree, group = by_host(driver, tree, there, entries)
            self._count("host", [leaf for _, leaf in entries])
            groups.append(group)
        return tree, groups

    def _push(self, way: str, here: int, there: int, entries: list[Any], until_s: float) -> Group | None:
        """The group; or None when the peer has no room now, and the host may do it."""
        assert self._ways is not None
        leaves = [leaf for _, leaf in entries]
        forms, nbytes = forms_of(self._devices.driver, leaves)
        try:
            number, descriptor = self._ask("room", way, there, nbytes, until_s=until_s)
        except (BusyError, TransportError) as error:
            if self._devices.forced is not None:
                raise
            self._note(f"cuda:{here} -> its cuda:{there}", "through host memory for now", str(error))
            return None
        try:
            token = self._ways.push(way, here, descriptor, leaves, _left(until_s))
        except BaseException:
            with contextlib.suppress(GeartrainError):
                self._ask("forget_room", number, until_s=until_s)
            raise
        self._count(way, leaves)
        return way, there, number, token, [(path, form) for (path, _), form in zip(entries, forms, strict=True)]

    # --- results ----------------------------------------------------------------------------------------------------

    def fetch(self, value: Any, tag: int, timeout_s: float, elsewhere: bool) -> Any:
        """The result of which the peer holds leaves, complete.

        `elsewhere`: another thread will use it, whose current stream may be another one, so it waits for the copies.
        """
        until_s = time.monotonic() + timeout_s
        tree, groups = checked(value)
        self._meet(timeout_s)
        found, held = [], False
        try:
            for at, (way, source, _, _, entries) in enumerate(groups):
                if way == "host":
                    leaves = leaves_at(tree, [path for path, _ in entries])
                    target = self.map.back(source, self._devices.driver.count())
                    found += moved(self._devices.driver, target, entries, leaves)
                    self._count("host", leaves)
                    self._learn_way_back(source, target, until_s)
                else:
                    held = True
                    found += self._pull(way, source, tag, at, entries, until_s)
        except BaseException:
            if held:
                with contextlib.suppress(GeartrainError):
                    self._ask("forget_held", tag, until_s=until_s)
            raise
        if elsewhere:
            self._finish({device for _, leaf in found if (device := self._devices.driver.device_of(leaf)) is not None})
        return put_back(tree, found)

    def _finish(self, devices: set[int]) -> None:
        driver = self._devices.driver
        for device in devices:
            one = driver.device(device)
            one.sync(one.record())

    def _pull(self, way: str, source: int, tag: int, at: int, entries: list[Any], until_s: float) -> list[Any]:
        assert self._ways is not None
        target = CPU if source == CPU else self.map.back(source, self._devices.driver.count())
        if target == CPU and source != CPU:
            raise TransportError(f"a result is on cuda:{source} of {self._peer.name!r}, and here is no GPU for {way}")
        if source != CPU and way == "cuda_ipc":
            self._prove_back(source, target, until_s)
        forms = [form for _, form in entries]
        end = max((offset + size for offset, size in extents(forms)), default=0)
        try:
            number, descriptor = self._ways.room(way, target, end)
        except (BusyError, TransportError) as error:
            if self._devices.forced is not None:
                raise
            self._note(f"its cuda:{source} -> cuda:{target}", "through host memory for now", str(error))
            leaves = self._devices.driver.from_host(target, self._ask("hand_over", tag, at, until_s=until_s))
            self._count("host", leaves)
            return [(path, leaf) for (path, _), leaf in zip(entries, leaves, strict=True)]
        try:
            token = self._ask("push", tag, at, descriptor, _left(until_s), until_s=until_s)
        except BaseException:
            self._ways.forget(number)
            raise
        leaves = self._ways.take(number, token, forms)
        self._count(way, leaves)
        return [(path, leaf) for (path, _), leaf in zip(entries, leaves, strict=True)]

    # --- choosing a way ---------------------------------------------------------------------------------------------

    @property
    def map(self) -> DeviceMap:
        """Of this peer."""
        if self._map is None:
            self._map = self._find_map()
        return self._map

    def way(self, here: int, there: int, until_s: float) -> str:
        """How a tensor goes from a GPU here to one there: found out once, by sending something.

        Raises:
            TransportError: a way was asked for, and does not work.
        """
        if self._devices.forced == "nixl":
            return "nixl"
        with self._lock:
            if (here, there) not in self._chosen:
                pair = f"cuda:{here} -> its cuda:{there}"
                try:
                    self._rehearse(here, there, until_s)
                    self._chosen[here, there] = "cuda_ipc"
                    self._note(pair, "cuda_ipc")
                except GeartrainError as error:
                    if self._devices.forced is not None:
                        raise TransportError(f"cuda_ipc to {self._peer.name!r}, {pair}: {error}") from error
                    if _passes(error):
                        raise
                    self._chosen[here, there] = "host"
                    self._note(pair, "through host memory", f"no cuda_ipc: {error}")
            return self._chosen[here, there]

    def _rehearse(self, here: int, there: int, until_s: float) -> None:
        """Pushes random bytes, and asks the peer what came."""
        assert self._ways is not None
        driver = self._devices.driver
        for why, where in ((driver.why_no_ipc(), "here"), (self._theirs[1], "there")):
            if why is not None:
                raise TransportError(f"it is not viable {where}: {why}")
        sent = np.frombuffer(secrets.token_bytes(REHEARSAL_BYTES), np.uint8)
        (tensor,) = driver.from_host(here, [as_tensor(sent)])
        number, descriptor = self._ask("room", "cuda_ipc", there, sent.nbytes, until_s=until_s)
        try:
            token = self._ways.push("cuda_ipc", here, descriptor, [tensor], _left(until_s))
        except BaseException:
            self._ask("forget_room", number, until_s=until_s)
            raise
        if self._ask("rehearsed", number, token, until_s=until_s) != sent.tobytes():
            raise TransportError("other bytes came than were sent")

    def _prove_back(self, there: int, here: int, until_s: float) -> None:
        """Has the peer push random bytes from its GPU to one here. Raises `TransportError`."""
        assert self._ways is not None
        with self._lock:
            if self._back.get(there) == "cuda_ipc":
                return
            for why, where in ((self._devices.driver.why_no_ipc(), "here"), (self._theirs[1], "there")):
                if why is not None:
                    raise TransportError(f"cuda_ipc is not viable {where}: {why}")
            number, descriptor = self._ways.room("cuda_ipc", here, REHEARSAL_BYTES)
            try:
                token, sent = self._ask("rehearse", there, descriptor, until_s=until_s)
            except BaseException:
                self._ways.forget(number)
                raise
            if found_in(self._devices.driver, self._ways, number, token) != sent:
                raise TransportError("other bytes came than the peer sent")
            self._ask("agree", there, "cuda_ipc", until_s=until_s)
            self._back[there] = "cuda_ipc"
            self._note(f"its cuda:{there} -> cuda:{here}", "cuda_ipc")

    def _learn_way_back(self, there: int, here: int, until_s: float) -> None:
        """After the first result that came through the host."""
        if here == CPU or there in self._back:
            return
        try:
            self._prove_back(there, here, until_s)
        except GeartrainError as error:
            if _passes(error):
                raise
            self._back[there] = "host"
            self._note(f"its cuda:{there} -> cuda:{here}", "through host memory", f"no cuda_ipc: {error}")

    def _meet(self, timeout_s: float) -> None:
        """Tells the peer what was asked for here, and learns what it has; links the two by NIXL if that was it."""
        with self._lock:
            linked = self._devices.forced != "nixl" or (self._ways is not None and _is_up(self._ways.link))
            if self._ways is not None and linked:
                return
            until_s = time.monotonic() + timeout_s
            ways = self._ways or self._devices.ways()
            try:
                handshake = nixl.Handshake() if self._devices.forced == "nixl" else None
                hello = None if handshake is None else handshake.hello
                self._theirs = self._ask("meet", self._devices.forced, hello, until_s=until_s)
                self._their_count = int(self._theirs[0])
                if handshake is not None:
                    connection = self._peer.connection
                    ways.link = handshake.prove(self._theirs[2], lambda: connection.lost, _left(until_s))
                    self._ask("linked", until_s=until_s)
                    handshake.confirm()
                    self._note("big tensors", nixl.describe())
            except GeartrainError as error:
                if _passes(error) or self._devices.forced is None:
                    raise
                raise TransportError(f"{self._devices.forced} to {self._peer.name!r}: {error}") from error
            self._ways = ways

    # --- the rest ---------------------------------------------------------------------------------------------------

    def _ask(self, what: str, *args: Any, until_s: float) -> Any:
        return self._peer.ask(f"geartrain.rpc.{what}", args, _left(until_s))

    def _note(self, pair: str, way: str, because: str = "") -> None:
        text = f"{way} ({because})" if because else way
        if self.notes.get(pair) != text:
            self.notes[pair] = text
            level = logging.WARNING if because else logging.INFO
            _log.log(level, "tensors to and from %r, %s: %s", self._peer.name, pair, text)

    def _count(self, way: str, leaves: list[Any]) -> None:
        size = self._devices.driver.form
        nbytes = sum(leaf.nbytes if is_on_host(leaf) else size(leaf)[2] for leaf in leaves)
        self.bytes_by_way[way] = self.bytes_by_way.get(way, 0) + nbytes

    def describe(self) -> str:
        """The ways that were chosen so far, and why not better ones."""
        return "; ".join(f"{pair}: {way}" for pair, way in self.notes.items())

    def close(self) -> None:
        """The peer is gone, or this node hangs up on it."""
        if self._ways is not None:
            self._ways.close()


def _is_up(link: nixl.Link | None) -> bool:
    return link is not None and not link.ended


def _passes(error: GeartrainError) -> bool:
    """Errors of the call, not of a way."""
    return isinstance(error, (PeerLostError, WaitTimeoutError, ConnectionClosedError))


def _left(until_s: float) -> float:
    return max(0.0, until_s - time.monotonic())
