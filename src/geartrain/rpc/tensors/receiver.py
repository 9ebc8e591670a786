"""Server side of tensor transfers.

Receives the tensors of calls, and holds the tensors of results until the client fetches them.
"""

from __future__ import annotations

import threading
from typing import Any

import geartrain._native as _native
from geartrain.errors import MessageError
from geartrain.rpc.protocol import OUT_OF_BAND
from geartrain.rpc.tensors.bundles import TensorBundle, checked, leaves_at, moved, specs_of, through_host
from geartrain.rpc.tensors.channels import HeldLeaves
from geartrain.rpc.tensors.device_map import CPU
from geartrain.rpc.tensors.endpoint import DeviceTensors
from geartrain.rpc.tensors.pytree import put_back
from geartrain.transport.one_sided import Handshake


class TensorReceiver:
    """The server's end of tensor transfers on one connection. tensors/calls.py has the functions that clients call."""

    def __init__(self, devices: DeviceTensors, connection: _native.Connection) -> None:
        self.devices = devices
        self.channels = devices.channels()
        self.forced: str | None = None  # the channel that the client asked for
        self.handshake: Handshake | None = None
        self.result_channels: dict[int, str] = {}  # GPU here -> channel to the client
        self._connection = connection
        self._held: dict[int, dict[int, tuple[str, int, list[Any]]]] = {}  # tag -> bundle -> channel, device, leaves
        self._lock = threading.RLock()  # a signal's handler may call in between

    def received(self, value: Any) -> Any:
        """A call's value with its tensors."""
        tree, bundles = checked(value)
        found: list[Any] = []
        for channel, device, number, token, entries in bundles:
            if channel == "host":
                leaves = leaves_at(tree, [key_path for key_path, _ in entries])
                found += moved(self.devices.driver, device, entries, leaves)
            else:
                leaves = self.channels.take(number, token, [spec for _, spec in entries])
                found += [(key_path, leaf) for (key_path, _), leaf in zip(entries, leaves, strict=True)]
        return put_back(tree, found)

    def out_of_band(self, value: Any, encodable: bool, tag: int, _: float) -> tuple[int, Any] | None:
        """The bit of a result's kind, and the value to send instead. Leaves that are not in it are held for the call.

        None if the whole result goes in the message.
        """
        taken = self.devices.take_out(value, encodable, self.channels.memory is not None)
        return None if taken is None else (OUT_OF_BAND, self._hold(*taken, tag))

    def _hold(self, tree: Any, leaves: list[Any], tag: int) -> tuple[Any, list[TensorBundle]]:
        driver = self.devices.driver
        by_device: dict[int, list[Any]] = {}
        for key_path, leaf in leaves:
            here = driver.device_of(leaf)
            by_device.setdefault(CPU if here is None else here, []).append((key_path, leaf))
        bundles: list[TensorBundle] = []
        held: dict[int, tuple[str, int, list[Any]]] = {}
        for here, entries in by_device.items():
            channel = self.result_channels.get(here, self.forced or "host")
            if channel == "host":
                tree, bundle = through_host(driver, tree, here, entries)
                bundles.append(bundle)
                continue
            leaves = [leaf for _, leaf in entries]
            specs, _ = specs_of(driver, leaves)
            # Copies: what the function returned may be changed before the client asks for it.
            copies = self.channels.hold(leaves) if here == CPU else [driver.snapshot(leaf) for leaf in leaves]
            held[len(bundles)] = channel, here, copies
            described = [(key_path, spec) for (key_path, _), spec in zip(entries, specs, strict=True)]
            bundles.append((channel, here, 0, b"", described))
        if held:
            with self._lock:
                self._held[tag] = held
        return tree, bundles

    def push(self, tag: int, bundle: int, descriptor: Any, timeout_s: float) -> bytes:
        """Writes a bundle of held leaves into the client's buffer; the token with which the client takes them."""
        channel, here, leaves = self._release(tag, bundle)
        try:
            return self.channels.push(channel, here, descriptor, leaves, timeout_s)
        finally:
            if isinstance(leaves, HeldLeaves):
                leaves.release()

    def copy_to_host(self, tag: int, bundle: int) -> list[Any]:
        """A bundle of held leaves, on the CPU."""
        _, here, leaves = self._release(tag, bundle)
        if here == CPU:
            raise MessageError(f"what is on the CPU is held for {self.forced} only")
        return self.devices.driver.to_host(leaves)

    def _release(self, tag: int, bundle: int) -> tuple[str, int, list[Any]]:
        with self._lock:
            bundles = self._held.get(tag, {})
            if bundle not in bundles:
                raise MessageError(f"nothing is held for call {tag}")
            found = bundles.pop(bundle)
            if not bundles:
                del self._held[tag]
            return found

    def discard(self, tag: int) -> None:
        """The client does not fetch the rest of a result."""
        with self._lock:
            bundles = self._held.pop(tag, {})
        for _, _, leaves in bundles.values():
            if isinstance(leaves, HeldLeaves):
                leaves.release()

    def negotiate(self, forced: str | None, hello: bytes | None) -> tuple[int, str | None, bytes | None]:
        """Takes what the client asked for.

        Args:
            forced: a channel, or None.
            hello: of the client's handshake, if the channel is a one-sided one.

        Returns:
            How many GPUs are here, why their memory cannot be shared or None, and the reply to the hello.
        """
        self.forced = forced
        reply = None
        if forced is not None and hello is not None:
            self.channels.memory = self.devices.memory_of(forced)
            self.handshake = self.channels.memory.backend.start_handshake()
            connection = self._connection
            self.channels.link = self.handshake.prove(hello, lambda: connection.lost)
            reply = self.handshake.hello
        driver = self.devices.driver
        return driver.count(), driver.why_no_ipc() if driver.count() else "there is no GPU", reply

    @property
    def held(self) -> int:
        """Results whose tensors are held."""
        return len(self._held)

    def close(self) -> None:
        """The client is gone."""
        with self._lock:
            tags = list(self._held)
        for tag in tags:
            self.discard(tag)
        self.channels.close()
