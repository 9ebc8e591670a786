"""One-sided writes and reads between processes through NIXL: RDMA, RoCE, EFA, GPUDirect; without them, shared memory
or TCP. Optional: `pip install 'geartrain[nixl]'` (with CUDA 12 `nixl-cu12`), see docs/devices.md.

    with nixl.attach(connection) as link:                    # both sides, over a connection they have
        region = nixl.expose(array)                          # here: peers may write and read it
        connection.send(region.descriptor)
        ...
        link.write(mine, descriptor, timeout_s=10)           # there: into the other's array
        connection.send(b"written")                          # the other side is not told by NIXL

A link is proved before it is handed out: each side reads a nonce from the other's memory and writes it back there, all
through NIXL. NIXL completes by polling only, so the side that moves nothing sleeps on the connection.

Threads: everything here may be called by any thread. Fork: UCX does not survive one; a child that uses this is refused
with `ConnectionClosedError`. Death: a lost peer is `PeerLostError`, a stopped one `WaitTimeoutError`, which ends the
link. Trust: whoever has a region's descriptor may write it while it is exposed, and over shared memory even after.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import os
import secrets
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from geartrain.errors import (
    ConnectionClosedError,
    GeartrainError,
    MessageError,
    PeerLostError,
    TransportError,
    WaitTimeoutError,
)
from geartrain.transport.connection import Connection

_log = logging.getLogger(__name__)

INSTALL = "pip install 'geartrain[nixl]', or nixl-cu12 with CUDA 12"
#: NIXL's wheels bring UCX, built for one version of CUDA each; the package `nixl` would bring both, and torch.
WHEELS = ("nixl_cu13", "nixl_cu12")
#: UCX, brought up for the first time, loads some 50 libraries.
BRING_UP_S = 90.0
_SPIN_S = 50e-6
_NONCE = 32
_DESCRIPTOR = struct.Struct("<QQiB3x")  # address, bytes, device (-1: the host), version
_VERSION = 1
_Span = tuple[int, int, int]  # address, bytes, device as NIXL counts them


def why_not() -> str | None:
    """None where NIXL works in this process, else the reason. The first call brings it up, which takes seconds."""
    try:
        _agent()
    except GeartrainError as error:
        return str(error)
    return None


class Region:
    """Memory that peers may write and read with its `descriptor`, until it is closed."""

    def __init__(self, agent: _Agent, memory: Any) -> None:
        self._agent, self._registered = agent, None
        self.address, self.nbytes, self.device, self._owner = _span_of(memory)
        with _named("registering memory"):
            self._registered = agent.native.register_memory([(*self.span, "")], self.kind)
            about = agent.native.get_partial_agent_metadata(self._registered, False, [])
        #: For peers: bytes to send them.
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
        """Takes the memory back. A peer that writes at this moment may still be writing."""
        if self._registered is not None and self._agent.usable():
            self._agent.native.deregister_memory(self._registered)
        self._registered = self._owner = None

    def __enter__(self) -> Region:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def expose(memory: Any) -> Region:
    """Registers a C-contiguous NumPy array or a contiguous tensor, on the CPU or a GPU; it is kept alive meanwhile.

    Raises:
        TransportError: NIXL is not viable here; says why.
        MessageError: the memory is not contiguous.
    """
    return Region(_agent(), memory)


class Link:
    """The way to one peer's exposed memory. Made by `attach`, or by a `Handshake`."""

    def __init__(self, agent: _Agent, name: str, lost: Callable[[], bool]) -> None:
        self._agent, self.peer, self._lost = agent, name, lost
        self._known: set[bytes] = set()
        self._lock = threading.Lock()
        self._ended = ""

    def write(
        self, memory: Any, descriptor: bytes, *, offset: int = 0, nbytes: int | None = None, timeout_s: float = 30.0
    ) -> None:
        """Writes memory (as for `expose`, or a `Region`) into a peer's region; when this returns it is there.

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
        region = memory if isinstance(memory, Region) else None
        there_are = region.nbytes if region is not None else _span_of(memory)[1]
        nbytes = there_are if nbytes is None else nbytes
        if offset < 0 or offset + nbytes > room or nbytes > there_are:
            raise MessageError(f"{nbytes} bytes at offset {offset} do not fit a region of {room} bytes")
        if nbytes == 0:
            return
        mine = region or Region(self._agent, memory)
        try:
            here = (mine.address, nbytes, max(mine.device, 0))
            self._transfer(verb, here, mine.kind, (address + offset, nbytes, max(device, 0)), device, until_s)
        finally:
            if region is None:
                mine.close()

    def _transfer(self, verb: str, mine: _Span, kind: str, theirs: _Span, device: int, until_s: float) -> None:
        native, handle = self._agent.native, None
        try:
            with _named(f"a {verb} to {self.peer!r}"):
                here = native.get_xfer_descs([mine], kind)
                there = native.get_xfer_descs([theirs], "DRAM" if device < 0 else "VRAM")
                handle = native.initialize_xfer(verb, here, there, self.peer, b"")
                state = native.transfer(handle)
            self._finish(verb, handle, state, until_s)
        except (PeerLostError, WaitTimeoutError, TransportError) as error:
            self._end(str(error))  # and with it what is still on its way
            raise
        finally:
            if handle is not None:
                with _named(f"releasing a {verb}"):
                    native.release_xfer_handle(handle)

    def _finish(self, verb: str, handle: Any, state: str, until_s: float) -> None:
        began_s = time.monotonic()
        while state == "PROC":
            now_s = time.monotonic()
            if self._lost():
                raise PeerLostError(f"{self.peer!r} was lost in the middle of a {verb}")
            if now_s > until_s:
                raise WaitTimeoutError(f"a {verb} to {self.peer!r} met its deadline; the link has ended")
            # Nothing can be waited for. Sleeping a sixteenth of what it took so far costs that much at most.
            taken_s = now_s - began_s
            time.sleep(0.0 if taken_s < _SPIN_S else min(taken_s / 16, 500e-6))
            with _named(f"a {verb} to {self.peer!r}"):
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
                with _named("reading a descriptor"):
                    name = self._agent.native.add_remote_agent(descriptor[_DESCRIPTOR.size :])
                if _text(name) != self.peer:
                    raise MessageError(
                        f"the descriptor belongs to {_text(name)!r}, and the link leads to {self.peer!r}"
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
        """Why it has, or nothing."""
        return self._ended

    def close(self) -> None:
        """Ends it; the connection goes on."""
        if self._agent.usable():
            self._end("it was closed")

    def __enter__(self) -> Link:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Link {describe()} to {self.peer}{' ended' if self._ended else ''}>"


class Handshake:
    """What two sides show each other before they believe that NIXL works between them.

    Each sends its `hello` over a way of its own, calls `prove` with the other's, tells the other that it has, and
    then calls `confirm`. `attach` does that over a connection, `geartrain.rpc` by calls.
    """

    def __init__(self) -> None:
        self._agent = _agent()
        self._nonce = secrets.token_bytes(_NONCE)
        self._scratch = np.zeros(2 * _NONCE, np.uint8)  # the nonce, and where the peer writes what it read
        self._scratch[:_NONCE] = np.frombuffer(self._nonce, np.uint8)
        self._region = Region(self._agent, self._scratch)
        about = self._agent.hello()
        self.hello: bytes = struct.pack("<I", len(about)) + about + self._region.descriptor

    def prove(self, hello: bytes, lost: Callable[[], bool], timeout_s: float = 10.0) -> Link:
        """Reads the peer's nonce and writes it back, through NIXL. Raises `TransportError` when that does not work."""
        try:
            size = struct.unpack_from("<I", hello)[0]
            about, descriptor = hello[4 : 4 + size], hello[4 + size :]
        except struct.error:
            raise MessageError("this is no hello of NIXL's") from None
        link = Link(self._agent, self._agent.join(about), lost)
        read = np.empty(_NONCE, np.uint8)
        try:
            link.read(read, descriptor, timeout_s=timeout_s)
            link.write(read, descriptor, offset=_NONCE, timeout_s=timeout_s)
        except GeartrainError as error:
            link.close()
            raise TransportError(f"nixl: the peer's memory cannot be read and written: {error}") from error
        return link

    def confirm(self) -> None:
        """Raises `TransportError` unless the peer has written this side's nonce back."""
        written = self._scratch[_NONCE:].tobytes()
        self._region.close()
        if written != self._nonce:
            raise TransportError("nixl: what the peer has read and written back is not this side's nonce")


def attach(connection: Connection, *, timeout_s: float = 30.0) -> Link:
    """A link to the other side of a connection, which attaches as well; nothing else is sent on it meanwhile.

    Raises:
        TransportError: NIXL does not work between the two; with the reason, also when it is the peer's.
        WaitTimeoutError, PeerLostError: the peer did not attach.
    """
    until_s = time.monotonic() + timeout_s

    def left_s() -> float:
        return max(0.0, until_s - time.monotonic())

    def told(work: Callable[[], Any]) -> Any:
        """The work's result; if it fails the peer is told why, and does not wait for its deadline."""
        try:
            return work()
        except GeartrainError as error:
            connection.send(b"!" + str(error).encode(), timeout_s=left_s())
            raise

    def heard() -> bytes:
        said = connection.receive(timeout_s=left_s()).header
        if said[:1] == b"!":
            raise TransportError(f"nixl does not work for the peer: {said[1:].decode(errors='replace')}")
        return said[1:]

    handshake = told(Handshake)
    connection.send(b"." + handshake.hello, timeout_s=left_s())
    hello = heard()
    link: Link = told(lambda: handshake.prove(hello, lambda: connection.native.lost, left_s()))
    try:
        connection.send(b".proved", timeout_s=left_s())
        heard()
        handshake.confirm()
    except BaseException:
        link.close()
        raise
    return link


def installed() -> bool:
    """Whether there is a wheel of NIXL's at all."""
    return any(importlib.util.find_spec(name) is not None for name in WHEELS)


def describe() -> str:
    """What a link goes over, as far as the environment decides: UCX chooses itself, per peer and size."""
    chosen = [f"{name}={os.environ[name]}" for name in ("UCX_TLS", "UCX_NET_DEVICES") if name in os.environ]
    return "nixl over UCX" + (f" ({', '.join(chosen)})" if chosen else "")


# --- the agent: NIXL's word for a process ---------------------------------------------------------------------------


class _Agent:
    """This process's agent, and how many links lead to each other one."""

    def __init__(self, native: Any, name: str) -> None:
        self.native, self.name, self.pid = native, name, os.getpid()
        self._links: dict[str, int] = {}
        self._lock = threading.Lock()

    def usable(self) -> bool:
        return self.pid == os.getpid()

    def check(self) -> None:
        if not self.usable():
            raise ConnectionClosedError(_FORKED)

    def hello(self) -> bytes:
        """Its name, and how to reach it; nothing of its memory."""
        with _named("describing this agent"):
            nothing = self.native.get_reg_descs([(0, 0, 0, "")], "DRAM")
            nothing.clear()
            return self.name.encode() + b"\0" + bytes(self.native.get_partial_agent_metadata(nothing, True, []))

    def join(self, hello: bytes) -> str:
        name, _, about = hello.partition(b"\0")
        peer = name.decode(errors="replace")
        with self._lock:
            if peer != self.name:  # an agent knows itself
                with _named("reading the peer's hello"):
                    found = _text(self.native.add_remote_agent(about))
                if found != peer:
                    raise MessageError(f"the hello of {peer!r} holds that of {found!r}")
            self._links[peer] = self._links.get(peer, 0) + 1
            return peer

    def leave(self, name: str) -> None:
        """Disconnects from another agent with the last link to it."""
        with self._lock:
            self._links[name] -= 1
            if self._links[name] == 0:
                del self._links[name]
                if name == self.name:
                    return
                try:
                    self.native.remove_remote_agent(name)
                except Exception as error:  # it is gone, and NIXL has noticed first
                    _log.debug("removing %s: %s", name, error)


_FORKED = (
    "NIXL belongs to the process that this one was forked from, and UCX does not survive a fork; "
    "start workers with the spawn method"
)
_lock = threading.Lock()
_made: _Agent | str | None = None  # a text: why it cannot be made


def _agent() -> _Agent:
    global _made
    with _lock:
        if _made is None:
            _made = _bring_up()
        made = _made
    if isinstance(made, str):
        raise TransportError(f"nixl is not viable: {made}")
    made.check()
    return made


def _bring_up() -> _Agent | str:
    """The agent, or why there is none. In a thread, because UCX is known to hang when it starts."""
    # Without this UCX leaves shared memory for TCP over loopback as soon as it is to notice dead peers, as it is here.
    if "UCX_MM_ERROR_HANDLING" not in os.environ and _ucx_is_loaded():
        _log.warning("UCX was loaded before geartrain could set UCX_MM_ERROR_HANDLING=y: it will not use shared memory")
    for name, value in (("UCX_MM_ERROR_HANDLING", "y"), ("UCX_WARN_UNUSED_ENV_VARS", "n"), ("NIXL_LOG_LEVEL", "ERROR")):
        os.environ.setdefault(name, value)
    outcome: list[Any] = []

    def make() -> None:
        try:
            api = importlib.import_module(f"{_wheel()}._api")
            config = api.nixl_agent_config(backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
            name = f"geartrain-{os.getpid()}-{secrets.token_hex(8)}"
            agent = api.nixl_agent(name, config)
            outcome.append(_Agent(agent, name) if "UCX" in agent.backends else "it has no UCX plugin")
        except ImportError as error:
            outcome.append(f"{error}; {INSTALL}")
        except Exception as error:
            outcome.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=make, name="geartrain brings up nixl", daemon=True)
    thread.start()
    thread.join(BRING_UP_S)
    if not outcome:
        return f"UCX did not come up within {BRING_UP_S:.0f} s"
    made: _Agent | str = outcome[0]
    return made


def _wheel() -> str:
    """The one that fits torch's CUDA, where torch is loaded, else any."""
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None) or ""
    for name in sorted(WHEELS, key=lambda one: not one.endswith(cuda.split(".")[0])):
        if importlib.util.find_spec(name) is not None:
            return name
    raise ImportError("no wheel of NIXL's is installed")


def _ucx_is_loaded() -> bool:
    try:
        return "/libucp" in Path("/proc/self/maps").read_text()
    except OSError:
        return False


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


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


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """NIXL's exceptions by our names."""
    try:
        yield
    except Exception as error:
        name = type(error).__name__
        if not name.startswith("nixl"):
            raise
        if name in ("nixlRemoteDisconnectError", "nixlCancelledError"):
            raise PeerLostError(f"{what}: {error}") from error
        if name in ("nixlInvalidParamError", "nixlMismatchError", "nixlNotAllowedError", "nixlNotFoundError"):
            raise MessageError(f"{what}: {error}") from error
        raise TransportError(f"{what}: {error}") from error


def _in_child() -> None:
    """The child keeps its copy for ever: what destroys it would talk to threads that are not there."""
    global _lock
    _lock = threading.Lock()
    if isinstance(_made, _Agent):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_made))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_made.native))


os.register_at_fork(after_in_child=_in_child)
