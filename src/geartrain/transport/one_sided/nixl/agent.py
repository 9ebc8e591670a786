"""Finds the NIXL package, starts this process's one NIXL agent, and translates NIXL's exceptions to geartrain's."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import os
import secrets
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from geartrain.core.threads import DaemonThread
from geartrain.errors import ConnectionClosedError, GeartrainError, MessageError, PeerLostError, TransportError

_log = logging.getLogger(__name__)

INSTALL = "pip install 'geartrain[nixl]', or nixl-cu12 with CUDA 12"
#: NIXL's wheels bring UCX, built for one version of CUDA each; the package `nixl` would bring both, and torch.
WHEELS = ("nixl_cu13", "nixl_cu12")
#: Longest start of UCX, which loads some 50 libraries at first.
BRING_UP_S = 90.0


def why_not() -> str | None:
    """None where NIXL works in this process, else the reason. The first call brings it up, which takes seconds."""
    try:
        this_agent()
    except GeartrainError as error:
        return str(error)
    return None


def installed() -> bool:
    """Whether there is a wheel of NIXL's at all."""
    return any(importlib.util.find_spec(name) is not None for name in WHEELS)


def describe() -> str:
    """The transports that a link may use, as far as the environment decides. UCX chooses for each peer and size."""
    chosen = [f"{name}={os.environ[name]}" for name in ("UCX_TLS", "UCX_NET_DEVICES") if name in os.environ]
    return "nixl over UCX" + (f" ({', '.join(chosen)})" if chosen else "")


class Agent:
    """This process's NIXL agent, and how many links it has to each other agent."""

    def __init__(self, native: Any, name: str) -> None:
        self.native, self.name, self.pid = native, name, os.getpid()
        self._links: dict[str, int] = {}
        self._lock = threading.Lock()

    def usable(self) -> bool:
        """Whether this process made it, and is not a fork of the one that did."""
        return self.pid == os.getpid()

    def check(self) -> None:
        """Raises `ConnectionClosedError` in a forked child."""
        if not self.usable():
            raise ConnectionClosedError(_FORKED)

    def hello(self) -> bytes:
        """Its name and its connection metadata, without that of its memory."""
        with nixl_errors("describing this agent"):
            nothing = self.native.get_reg_descs([(0, 0, 0, "")], "DRAM")
            nothing.clear()
            return self.name.encode() + b"\0" + bytes(self.native.get_partial_agent_metadata(nothing, True, []))

    def join(self, hello: bytes) -> str:
        """Connects to the agent of a hello, once more; its name."""
        name, _, about = hello.partition(b"\0")
        peer = name.decode(errors="replace")
        with self._lock:
            if peer != self.name:  # an agent knows itself
                with nixl_errors("reading the peer's hello"):
                    found = text_of(self.native.add_remote_agent(about))
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
_made: Agent | str | None = None  # a text: why it cannot be made


def this_agent() -> Agent:
    """This process's agent, brought up by the first call. Raises `TransportError` where NIXL is not viable."""
    global _made
    with _lock:
        if _made is None:
            _made = _bring_up()
        made = _made
    if isinstance(made, str):
        raise TransportError(f"nixl is not viable: {made}")
    made.check()
    return made


def _bring_up() -> Agent | str:
    """The agent, or the reason why there is none. Runs in a thread, because UCX is known to hang when it starts."""
    # Without this UCX leaves shared memory for TCP over loopback as soon as it is to notice dead peers, as it is here.
    if "UCX_MM_ERROR_HANDLING" not in os.environ and _ucx_is_loaded():
        _log.warning(
            "UCX was loaded before geartrain could set UCX_MM_ERROR_HANDLING=y, so it will not use "
            "shared memory: import geartrain first, or set the variable"
        )
    for name, value in (("UCX_MM_ERROR_HANDLING", "y"), ("UCX_WARN_UNUSED_ENV_VARS", "n"), ("NIXL_LOG_LEVEL", "ERROR")):
        os.environ.setdefault(name, value)
    outcome: list[Any] = []

    def make() -> None:
        try:
            api = importlib.import_module(f"{_wheel()}._api")
            config = api.nixl_agent_config(backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
            name = f"geartrain-{os.getpid()}-{secrets.token_hex(8)}"
            agent = api.nixl_agent(name, config)
            outcome.append(Agent(agent, name) if "UCX" in agent.backends else "it has no UCX plugin")
        except ImportError as error:
            outcome.append(f"{error}; {INSTALL}")
        except Exception as error:
            outcome.append(f"{type(error).__name__}: {error}")

    thread = DaemonThread(make, "geartrain brings up nixl")
    try:
        thread.start()
    except GeartrainError as error:  # no more threads
        return str(error)
    thread.join(BRING_UP_S)
    if not outcome:
        return f"UCX did not come up within {BRING_UP_S:.0f} s"
    made: Agent | str = outcome[0]
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


def text_of(name: bytes | str) -> str:
    """The name of an agent, which NIXL gives as either."""
    return name.decode() if isinstance(name, bytes) else name


@contextlib.contextmanager
def nixl_errors(what: str) -> Iterator[None]:
    """Raises NIXL's exceptions as geartrain's."""
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
    """The child keeps its copy for ever: destroying it would use threads that the child does not have."""
    global _lock
    _lock = threading.Lock()
    if isinstance(_made, Agent):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_made))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_made.native))


os.register_at_fork(after_in_child=_in_child)
