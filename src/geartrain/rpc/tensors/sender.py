"""Client side of tensor transfers.

Sends the tensors of calls, fetches the tensors of results, and chooses the channels.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import geartrain._native as _native
from geartrain.core.lifetime import on_error
from geartrain.errors import (
    BusyError,
    ConnectionClosedError,
    GeartrainError,
    PeerLostError,
    TransportError,
    WaitTimeoutError,
)
from geartrain.rpc.protocol import OUT_OF_BAND
from geartrain.rpc.tensors.bundles import (
    NONCE_BYTES,
    TensorBundle,
    as_tensor,
    checked,
    extents,
    is_on_host,
    leaves_at,
    moved,
    specs_of,
    take_nonce,
    through_host,
)
from geartrain.rpc.tensors.channels import TensorChannels
from geartrain.rpc.tensors.device_map import CPU, DeviceMap
from geartrain.rpc.tensors.endpoint import DeviceTensors
from geartrain.rpc.tensors.pytree import put_back
from geartrain.transport.one_sided import Link

_log = logging.getLogger(__name__)


class TensorSender:
    """The client's end of tensor transfers on one connection.

    Args:
        devices: this node's.
        peer: the server's name, for errors and logs.
        connection: to it.
        ask: `ask(function, args, timeout_s)` calls one of the functions of tensors/calls.py there.
        device_map: finds the map to this peer, when a tensor on a GPU is first sent.
    """

    def __init__(
        self,
        devices: DeviceTensors,
        peer: str,
        connection: _native.Connection,
        ask: Callable[[str, tuple[Any, ...], float], Any],
        device_map: Callable[[], DeviceMap],
    ) -> None:
        self._devices, self._peer, self._connection, self._call = devices, peer, connection, ask
        self._find_map = device_map
        self._map: DeviceMap | None = None
        self._channels: TensorChannels | None = None  # once negotiated
        self._their_count = 0  # GPUs of the server's
        self._their_no_ipc: str | None = None  # why their memory cannot be shared
        self._lock = threading.RLock()  # a signal's handler may call in between
        self._chosen: dict[tuple[int, int], str] = {}  # (GPU here, GPU there) -> channel
        self._result_channels: dict[int, str] = {}  # GPU there -> channel of results
        self.forced = devices.forced is not None  # a channel was asked for, which is negotiated before the first call
        self.notes: dict[str, str] = {}  # pair of devices -> channel and why, for people
        self.bytes_by_channel: dict[str, int] = {}

    @property
    def negotiated(self) -> bool:
        """Whether the server was asked for its GPUs: when a tensor first had to be transferred out of band."""
        return self._channels is not None

    # --- arguments --------------------------------------------------------------------------------------------------

    def out_of_band(self, value: Any, encodable: bool, _: int, until_s: float) -> tuple[int, Any] | None:
        """The bit of a call's kind, and the value to send instead. Tensors not in the value are sent now, or queued.

        None if the whole value goes in the message.
        """
        taken = self._devices.take_out(value, encodable, self._devices.memory is not None)
        if taken is None:
            return None
        self.negotiate(_left(until_s))
        return OUT_OF_BAND, self._send(*taken, until_s)

    def _send(self, tree: Any, leaves: list[Any], until_s: float) -> tuple[Any, list[TensorBundle]]:
        """Sends leaves in bundles, one per pair of devices that they go from and to."""
        driver = self._devices.driver
        pairs: dict[tuple[str, int, int], list[Any]] = {}
        for key_path, leaf in leaves:
            here = driver.device_of(leaf)
            if here is None:
                pairs.setdefault((self._devices.forced or "host", CPU, CPU), []).append((key_path, leaf))
                continue
            there = self.map.there(here, self._their_count)
            channel = "host" if there == CPU else self.channel(here, there, until_s)
            pairs.setdefault((channel, here, there), []).append((key_path, leaf))
        bundles: list[TensorBundle] = []
        for (channel, here, there), entries in pairs.items():
            if channel != "host":
                bundle = self._push(channel, here, there, entries, until_s)
                if bundle is not None:
                    bundles.append(bundle)
                    continue
            tree, bundle = through_host(driver, tree, there, entries)
            self._count("host", [leaf for _, leaf in entries])
            bundles.append(bundle)
        return tree, bundles

    def _push(self, channel: str, here: int, there: int, entries: list[Any], until_s: float) -> TensorBundle | None:
        """The bundle of leaves that were written to the server; None when it leases no buffer now."""
        assert self._channels is not None
        leaves = [leaf for _, leaf in entries]
        specs, nbytes = specs_of(self._devices.driver, leaves)
        try:
            number, descriptor = self.ask("lease", channel, there, nbytes, until_s=until_s)
        except (BusyError, TransportError) as error:
            if self._devices.forced is not None:
                raise
            self._note(f"cuda:{here} -> its cuda:{there}", "through host memory for now", str(error))
            return None
        try:
            token = self._channels.push(channel, here, descriptor, leaves, _left(until_s))
        except BaseException:
            with contextlib.suppress(GeartrainError):
                self.ask("revoke", number, until_s=until_s)
            raise
        self._count(channel, leaves)
        described = [(key_path, spec) for (key_path, _), spec in zip(entries, specs, strict=True)]
        return channel, there, number, token, described

    # --- results ----------------------------------------------------------------------------------------------------

    def fetch(self, value: Any, tag: int, timeout_s: float, elsewhere: bool) -> Any:
        """A result with the leaves that the server holds.

        `elsewhere`: another thread will use the result, perhaps on another stream, so this call waits for the copies.
        """
        until_s = time.monotonic() + timeout_s
        tree, bundles = checked(value)
        self.negotiate(timeout_s)
        found, held = [], False
        try:
            for i, (channel, source, _, _, entries) in enumerate(bundles):
                if channel == "host":
                    leaves = leaves_at(tree, [key_path for key_path, _ in entries])
                    target = self.map.back(source, self._devices.driver.count())
                    found += moved(self._devices.driver, target, entries, leaves)
                    self._count("host", leaves)
                    self._try_result_channel(source, target, until_s)
                else:
                    held = True
                    found += self._pull(channel, source, tag, i, entries, until_s)
        except BaseException:
            if held:
                with contextlib.suppress(GeartrainError):
                    self.ask("discard", tag, until_s=until_s)
            raise
        if elsewhere:
            self._finish({device for _, leaf in found if (device := self._devices.driver.device_of(leaf)) is not None})
        return put_back(tree, found)

    def _finish(self, devices: set[int]) -> None:
        driver = self._devices.driver
        for device in devices:
            one = driver.device(device)
            one.sync(one.record())

    def _pull(self, channel: str, source: int, tag: int, bundle: int, entries: list[Any], until_s: float) -> list[Any]:
        assert self._channels is not None
        target = CPU if source == CPU else self.map.back(source, self._devices.driver.count())
        if target == CPU and source != CPU:
            raise TransportError(f"a result is on cuda:{source} of {self._peer!r}, and here is no GPU for {channel}")
        if source != CPU and channel == "cuda_ipc":
            self._verify_result_channel(source, target, until_s)
        specs = [spec for _, spec in entries]
        end = max((offset + size for offset, size in extents(specs)), default=0)
        try:
            number, descriptor = self._channels.lease(channel, target, end)
        except (BusyError, TransportError) as error:
            if self._devices.forced is not None:
                raise
            self._note(f"its cuda:{source} -> cuda:{target}", "through host memory for now", str(error))
            leaves = self._devices.driver.from_host(target, self.ask("copy_to_host", tag, bundle, until_s=until_s))
            self._count("host", leaves)
            return [(key_path, leaf) for (key_path, _), leaf in zip(entries, leaves, strict=True)]
        with on_error(self._channels.revoke, number):
            token = self.ask("push", tag, bundle, descriptor, _left(until_s), until_s=until_s)
        leaves = self._channels.take(number, token, specs)
        self._count(channel, leaves)
        return [(key_path, leaf) for (key_path, _), leaf in zip(entries, leaves, strict=True)]

    # --- choosing a channel -----------------------------------------------------------------------------------------

    @property
    def map(self) -> DeviceMap:
        """Of this peer."""
        if self._map is None:
            self._map = self._find_map()
        return self._map

    def channel(self, here: int, there: int, until_s: float) -> str:
        """The channel from a GPU here to one there: found out once, by sending a nonce.

        Raises:
            TransportError: a channel was asked for, and does not work.
        """
        if self._devices.memory is not None:
            return self._devices.memory.name
        with self._lock:
            if (here, there) not in self._chosen:
                pair = f"cuda:{here} -> its cuda:{there}"
                try:
                    self._verify_channel(here, there, until_s)
                    self._chosen[here, there] = "cuda_ipc"
                    self._note(pair, "cuda_ipc")
                except GeartrainError as error:
                    if self._devices.forced is not None:
                        raise TransportError(f"cuda_ipc to {self._peer!r}, {pair}: {error}") from error
                    if _is_of_call(error):
                        raise
                    self._chosen[here, there] = "host"
                    self._note(pair, "through host memory", f"no cuda_ipc: {error}")
            return self._chosen[here, there]

    def _verify_channel(self, here: int, there: int, until_s: float) -> None:
        """Sends a nonce over cuda_ipc, and has the server return what arrived. Raises `TransportError`."""
        assert self._channels is not None
        driver = self._devices.driver
        for why, where in ((driver.why_no_ipc(), "here"), (self._their_no_ipc, "there")):
            if why is not None:
                raise TransportError(f"it is not viable {where}: {why}")
        nonce = np.frombuffer(secrets.token_bytes(NONCE_BYTES), np.uint8)
        (tensor,) = driver.from_host(here, [as_tensor(nonce)])
        number, descriptor = self.ask("lease", "cuda_ipc", there, nonce.nbytes, until_s=until_s)
        with on_error(self.ask, "revoke", number, until_s=until_s):
            token = self._channels.push("cuda_ipc", here, descriptor, [tensor], _left(until_s))
        if self.ask("nonce_received", number, token, until_s=until_s) != nonce.tobytes():
            raise TransportError("other bytes came than were sent")

    def _verify_result_channel(self, there: int, here: int, until_s: float) -> None:
        """Has the server send a nonce from its GPU to one here over cuda_ipc. Raises `TransportError`."""
        assert self._channels is not None
        with self._lock:
            if self._result_channels.get(there) == "cuda_ipc":
                return
            for why, where in ((self._devices.driver.why_no_ipc(), "here"), (self._their_no_ipc, "there")):
                if why is not None:
                    raise TransportError(f"cuda_ipc is not viable {where}: {why}")
            number, descriptor = self._channels.lease("cuda_ipc", here, NONCE_BYTES)
            with on_error(self._channels.revoke, number):
                token, sent = self.ask("send_nonce", there, descriptor, until_s=until_s)
            if take_nonce(self._devices.driver, self._channels, number, token) != sent:
                raise TransportError("other bytes came than the peer sent")
            self.ask("use_channel", there, "cuda_ipc", until_s=until_s)
            self._result_channels[there] = "cuda_ipc"
            self._note(f"its cuda:{there} -> cuda:{here}", "cuda_ipc")

    def _try_result_channel(self, there: int, here: int, until_s: float) -> None:
        """After the first result that came through the host."""
        if here == CPU or there in self._result_channels:
            return
        try:
            self._verify_result_channel(there, here, until_s)
        except GeartrainError as error:
            if _is_of_call(error):
                raise
            self._result_channels[there] = "host"
            self._note(f"its cuda:{there} -> cuda:{here}", "through host memory", f"no cuda_ipc: {error}")

    def negotiate(self, timeout_s: float) -> None:
        """Tells the server which channel is asked for, and learns of its GPUs; links both if it is a one-sided one."""
        with self._lock:
            memory = self._devices.memory
            if self._channels is not None and (memory is None or _is_up(self._channels.link)):
                return
            until_s = time.monotonic() + timeout_s
            channels = self._channels or self._devices.channels()
            try:
                handshake = None if memory is None else memory.backend.start_handshake()
                hello = None if handshake is None else handshake.hello
                theirs = self.ask("negotiate", self._devices.forced, hello, until_s=until_s)
                self._their_count, self._their_no_ipc = int(theirs[0]), theirs[1]
                if memory is not None and handshake is not None:
                    connection = self._connection
                    channels.memory = memory
                    channels.link = handshake.prove(theirs[2], lambda: connection.lost, _left(until_s))
                    self.ask("confirm_link", until_s=until_s)
                    handshake.confirm()
                    self._note("big tensors", memory.backend.describe())
            except GeartrainError as error:
                if _is_of_call(error) or self._devices.forced is None:
                    raise
                raise TransportError(f"{self._devices.forced} to {self._peer!r}: {error}") from error
            self._channels = channels

    # --- the rest ---------------------------------------------------------------------------------------------------

    def ask(self, what: str, *args: Any, until_s: float) -> Any:
        """The result of one of the functions of tensors/calls.py."""
        return self._call(f"geartrain.rpc.{what}", args, _left(until_s))

    def _note(self, pair: str, channel: str, because: str = "") -> None:
        text = f"{channel} ({because})" if because else channel
        if self.notes.get(pair) != text:
            self.notes[pair] = text
            level = logging.WARNING if because else logging.INFO
            _log.log(level, "tensors to and from %r, %s: %s", self._peer, pair, text)

    def _count(self, channel: str, leaves: list[Any]) -> None:
        size = self._devices.driver.form
        nbytes = sum(leaf.nbytes if is_on_host(leaf) else size(leaf)[2] for leaf in leaves)
        self.bytes_by_channel[channel] = self.bytes_by_channel.get(channel, 0) + nbytes

    def describe(self) -> str:
        """The channels that were chosen so far, and why not better ones."""
        return "; ".join(f"{pair}: {channel}" for pair, channel in self.notes.items())

    def close(self) -> None:
        """The server is gone, or this node closes the connection."""
        if self._channels is not None:
            self._channels.close()


def _is_up(link: Link | None) -> bool:
    return link is not None and not link.ended


def _is_of_call(error: GeartrainError) -> bool:
    """Errors of the call, not of a channel."""
    return isinstance(error, (PeerLostError, WaitTimeoutError, ConnectionClosedError))


def _left(until_s: float) -> float:
    return max(0.0, until_s - time.monotonic())
