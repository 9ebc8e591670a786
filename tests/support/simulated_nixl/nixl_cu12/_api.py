"""The part of NIXL's Python interface that geartrain calls, between processes of this host: `process_vm_writev` moves.

As strict as NIXL where geartrain relies on it: only registered memory is moved, only of agents that are known, and a
transfer is under way until it is asked for. It does not show NIXL's own behaviour: tests of that need the wheel.
"""
# ruff: noqa: N801

from __future__ import annotations

import ctypes
import enum
import errno
import json
import os
from dataclasses import dataclass, field
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)


class nixl_thread_sync_t(enum.Enum):
    NIXL_THREAD_SYNC_STRICT = 1


class nixlNotFoundError(Exception):
    pass


class nixlRemoteDisconnectError(Exception):
    pass


@dataclass
class nixl_agent_config:
    backends: list[str]
    sync_mode: nixl_thread_sync_t


class _Span(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


@dataclass
class _Peer:
    pid: int
    regions: list[tuple[int, int]] = field(default_factory=list)

    def holds(self, address: int, nbytes: int) -> bool:
        return any(at <= address and address + nbytes <= at + size for at, size in self.regions)


class nixl_agent:
    def __init__(self, name: str, config: nixl_agent_config) -> None:
        self.name, self.backends = name, {kind: object() for kind in config.backends}
        self._mine = _Peer(os.getpid())
        self._peers: dict[str, _Peer] = {}
        _libc.prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)  # where Yama allows a process's relatives only

    def register_memory(self, spans: list[tuple[int, int, int, str]], kind: str) -> list[tuple[int, int]]:
        assert kind == "DRAM"
        registered = [(address, nbytes) for address, nbytes, _, _ in spans]
        self._mine.regions += registered
        return registered

    def deregister_memory(self, registered: list[tuple[int, int]]) -> None:
        for span in registered:
            self._mine.regions.remove(span)

    def get_reg_descs(self, spans: list[Any], kind: str) -> list[Any]:
        return list(spans)

    def get_partial_agent_metadata(
        self, registered: list[tuple[int, int]], connection: bool, backends: list[Any]
    ) -> bytes:
        return json.dumps({"name": self.name, "pid": os.getpid(), "regions": list(registered)}).encode()

    def add_remote_agent(self, about: bytes) -> bytes:
        found = json.loads(about)
        peer = self._peers.setdefault(found["name"], _Peer(found["pid"]))
        peer.regions += [(address, nbytes) for address, nbytes in found["regions"]]
        return str(found["name"]).encode()

    def remove_remote_agent(self, name: str) -> None:
        del self._peers[name]

    def get_xfer_descs(self, spans: list[tuple[int, int, int]], kind: str) -> list[tuple[int, int]]:
        return [(address, nbytes) for address, nbytes, _ in spans]

    def initialize_xfer(self, verb: str, here: Any, there: Any, name: str, note: bytes) -> dict[str, Any]:
        peer = self._mine if name == self.name else self._peers.get(name)
        (mine,), (theirs,) = here, there
        if peer is None or not peer.holds(*theirs) or not self._mine.holds(*mine):
            raise nixlNotFoundError(f"{verb} of memory that is not registered, or of an agent that is not known")
        return {"verb": verb, "mine": mine, "theirs": theirs, "pid": peer.pid}

    def transfer(self, handle: dict[str, Any]) -> str:
        return "PROC"

    def check_xfer_state(self, handle: dict[str, Any]) -> str:
        call = _libc.process_vm_writev if handle["verb"] == "WRITE" else _libc.process_vm_readv
        mine, theirs = _Span(*handle["mine"]), _Span(*handle["theirs"])
        moved = call(handle["pid"], ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        if moved == mine.nbytes:
            return "DONE"
        if ctypes.get_errno() == errno.ESRCH:
            raise nixlRemoteDisconnectError(f"process {handle['pid']} is gone")
        return "ERR"

    def release_xfer_handle(self, handle: dict[str, Any]) -> None:
        pass
