"""Registered memory regions, and the links that write and read a peer's regions through NIXL."""

from __future__ import annotations

import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from geartrain.core.lifetime import Closing
from geartrain.errors import ConnectionClosedError, MessageError, PeerLostError, TransportError, WaitTimeoutError
from geartrain.transport.one_sided.nixl.agent import Agent, describe, nixl_errors, text_of, this_agent

_SPIN_S = 50e-6
_DESCRIPTOR = struct.Struct("<QQiB3x")  # address, bytes, device (-1: the host), version
_VERSION = 1
_Span = tuple[int, int, int]  # address, bytes, device as NIXL counts them


class RegisteredRegion(Closing, elsewhere="send its descriptor"):
    """Registered memory that peers may write and read. They need its `descriptor`. Closing the region ends access."""

    def __init__(self, agent: Agent, memory: Any) -> None:
        self._agent, self._registered = agent, None
        self.address, self.nbytes, self.device, self._owner = _span_of(memory)
        with nixl_errors("registering memory"):
            self._registered = agent.native.register_memory([(*self.span, "")], self.kind)
            about = agent.native.get_partial_agent_metadata(self._registered, False, [])
        #: Bytes to send to peers, with which they access the region.
        self.descriptor: bytes = _DESCRIPTOR.pack(self.address, self.nbytes, self.device, _VERSION) + about

    @property
    def kind(self) -> str:
        """NIXL's name for where it lies."""
        return "DRAM" if self.device < 0 else "VRAM"

    @property
    def span(self) -> tuple[int, int, int]:
        """Address, bytes, and device as NIXL counts them."""
        return self.address, self.nbytes, max(self.device, 0)

    def close(self) -> None:
        """Deregisters the memory. A peer's write that is under way may continue."""
        if self._registered is not None and self._agent.usable():
            self._agent.native.deregister_memory(self._registered)
        self._registered = self._owner = None


def expose(memory: Any) -> RegisteredRegion:
    """Registers a C-contiguous NumPy array or a contiguous tensor, on the CPU or a GPU. The region keeps it alive.

    Raises:
        TransportError: NIXL is not viable here; says why.
        MessageError: the memory is not contiguous.
    """
    return RegisteredRegion(this_agent(), memory)


class NixlLink(Closing, elsewhere="make another one there"):
    """One-sided access to one peer's registered regions. Made by `attach`, or by a `Handshake`."""

    def __init__(self, agent: Agent, name: str, lost: Callable[[], bool]) -> None:
        self._agent, self.peer, self._lost = agent, name, lost
        self._known: set[bytes] = set()
        self._lock = threading.Lock()
        self._ended = ""

    def write(
        self, memory: Any, descriptor: bytes, *, offset: int = 0, nbytes: int | None = None, timeout_s: float = 30.0
    ) -> None:
        """Writes memory (as for `expose`, or a `RegisteredRegion`) into a peer's region; complete when this returns.

        Only the first `nbytes` bytes of it, if that is given.

        Raises:
            MessageError: it does not fit, or this is no descriptor. Nothing was written.
            WaitTimeoutError: not done in time; the link has ended, and the region's contents are arbitrary.
            PeerLostError: the peer is gone. ConnectionClosedError: the link has ended, or belongs to another process.
        """
        self._move("WRITE", memory, descriptor, offset, nbytes, timeout_s)

    def read(self, memory: Any, descriptor: bytes, *, offset: int = 0, timeout_s: float = 30.0) -> None:
        """Reads from a peer's region into memory. Over TCP much slower than the peer's write. Raises as `write`."""
        self._move("READ", memory, descriptor, offset, None, timeout_s)

    def _move(
        self, verb: str, memory: Any, descriptor: bytes, offset: int, nbytes: int | None, timeout_s: float
    ) -> None:
        until_s = time.monotonic() + timeout_s
        self._check_open()
        address, room, device = self._learn(descriptor)
        region = memory if isinstance(memory, RegisteredRegion) else None
        there_are = region.nbytes if region is not None else _span_of(memory)[1]
        nbytes = there_are if nbytes is None else nbytes
        if offset < 0 or offset + nbytes > room or nbytes > there_are:
            raise MessageError(f"{nbytes} bytes at offset {offset} do not fit a region of {room} bytes")
        if nbytes == 0:
            return
        mine = region or RegisteredRegion(self._agent, memory)
        try:
            here = (mine.address, nbytes, max(mine.device, 0))
            self._transfer(verb, here, mine.kind, (address + offset, nbytes, max(device, 0)), device, until_s)
        finally:
            if region is None:
                mine.close()

    def _transfer(self, verb: str, mine: _Span, kind: str, theirs: _Span, device: int, until_s: float) -> None:
        native, handle = self._agent.native, None
        try:
            with nixl_errors(f"a {verb} to {self.peer!r}"):
                here = native.get_xfer_descs([mine], kind)
                there = native.get_xfer_descs([theirs], "DRAM" if device < 0 else "VRAM")
                handle = native.initialize_xfer(verb, here, there, self.peer, b"")
                state = native.transfer(handle)
            self._finish(verb, handle, state, until_s)
        except (PeerLostError, WaitTimeoutError, TransportError) as error:
            self._end(str(error))  # and with it transfers in flight
            raise
        finally:
            if handle is not None:
                with nixl_errors(f"releasing a {verb}"):
                    native.release_xfer_handle(handle)

    def _finish(self, verb: str, handle: Any, state: str, until_s: float) -> None:
        began_s = time.monotonic()
        while state == "PROC":
            now_s = time.monotonic()
            if self._lost():
                raise PeerLostError(f"{self.peer!r} was lost during a {verb}")
            if now_s > until_s:
                raise WaitTimeoutError(f"a {verb} to {self.peer!r} did not end in time; the link is closed")
            # Nothing can be waited for. Sleeping a sixteenth of what it took so far costs that much at most.
            taken_s = now_s - began_s
            time.sleep(0.0 if taken_s < _SPIN_S else min(taken_s / 16, 500e-6))
            with nixl_errors(f"a {verb} to {self.peer!r}"):
                state = self._agent.native.check_xfer_state(handle)
        if state != "DONE":
            raise PeerLostError(f"a {verb} to {self.peer!r} failed")

    def _learn(self, descriptor: bytes) -> tuple[int, int, int]:
        if len(descriptor) <= _DESCRIPTOR.size:
            raise MessageError(f"{len(descriptor)} bytes are no descriptor of a region")
        address, nbytes, device, version = _DESCRIPTOR.unpack_from(descriptor)
        if version != _VERSION:
            raise MessageError(f"the descriptor has version {version}, and this is version {_VERSION}")
        with self._lock:
            if self.peer != self._agent.name and descriptor not in self._known:
                with nixl_errors("reading a descriptor"):
                    name = self._agent.native.add_remote_agent(descriptor[_DESCRIPTOR.size :])
                if text_of(name) != self.peer:
                    raise MessageError(
                        f"the descriptor belongs to {text_of(name)!r}, and the link leads to {self.peer!r}"
                    )
                self._known.add(descriptor)
        return address, nbytes, device

    def _check_open(self) -> None:
        self._agent.check()
        if self._ended:
            raise ConnectionClosedError(f"the link has ended: {self._ended}")

    def _end(self, why: str) -> None:
        with self._lock:
            first, self._ended = not self._ended, self._ended or why
        if first:
            self._agent.leave(self.peer)

    @property
    def ended(self) -> str:
        """Why it has ended; "" while it is open."""
        return self._ended

    def close(self) -> None:
        """Ends the link; the connection that it was made over stays open."""
        if self._agent.usable():
            self._end("it was closed")

    def __repr__(self) -> str:
        return f"<NixlLink {describe()} to {self.peer}{' ended' if self._ended else ''}>"


def _span_of(memory: Any) -> tuple[int, int, int, Any]:
    """Address, bytes, device (-1: the host), and what keeps it alive."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(memory, torch.Tensor):
        if not memory.is_contiguous():
            raise MessageError(f"a tensor of strides {tuple(memory.stride())} is not contiguous: `.contiguous()` first")
        if memory.device.type not in ("cpu", "cuda"):
            raise MessageError(f"nixl moves memory of the CPU and of CUDA devices, found a tensor on {memory.device}")
        device = memory.get_device() if memory.is_cuda else -1
        return memory.data_ptr(), memory.numel() * memory.element_size(), device, memory
    if not isinstance(memory, np.ndarray) or memory.dtype.hasobject:
        raise MessageError(f"nixl moves NumPy arrays and tensors, found a {type(memory).__name__}")
    if not memory.flags.c_contiguous:
        raise MessageError(f"an array of strides {memory.strides} is not C-contiguous: `np.ascontiguousarray` first")
    return memory.ctypes.data, memory.nbytes, -1, memory
