"""Keeps one `Group` for the tensors of each device of a torch process group. The first operation connects it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from geartrain.collectives.buffers import buffer_of
from geartrain.collectives.torch_backend.options import BackendOptions
from geartrain.collectives.torch_backend.polled_store import PolledStore
from geartrain.collectives.torch_backend.staging import Staging
from geartrain.core.threads import refuse_within
from geartrain.device.device import open_device
from geartrain.errors import ConnectionClosedError, GeartrainError

CLOSE_TIMEOUT_S = 10.0


class DeviceGroups:
    """The Groups of one process group, one for each device. Calls are ordered only among the tensors of one device.

    Any thread may call. `close` and `disconnect` may also be called while another thread makes a Group. They then end
    this.

    Args:
        store: of torch's kind, used by this process group alone.
        rank, size: within the process group.
        name: of the process group.
        timeout_s: of every wait, unless an operation has its own; can be set.
        options: of the Groups that are made.

    Raises:
        ConnectionClosedError: by every method that needs a Group, after `close`.
    """

    def __init__(self, store: Any, rank: int, size: int, name: str, timeout_s: float, options: BackendOptions) -> None:
        self.options = options
        self.timeout_s = timeout_s
        self._store = store
        self._rank = rank
        self._size = size
        self._name = name
        self._lock = threading.RLock()  # a signal's handler may come in between
        self._opening = threading.RLock()  # held while a Group is made: not by who closes, which ends that
        self._groups: dict[str, Any] = {}
        self._stagings: dict[torch.device, Staging] = {}
        self._places: dict[torch.device, str] = {}
        self._tried: set[str] = set()  # Groups that were opened, or could not be
        self._closed = False

    # --- operations ---------------------------------------------------------------------------------------------------

    def start(self, where: str, flat: torch.Tensor, op: str, timeout_s: float, soon: bool = False) -> Any:
        """Begins an all-reduce in the Group of that name. `soon`: this thread waits for it next."""
        wire = self.options.wire_dtype_of(flat.dtype)
        return self._group(where).all_reduce_memory(
            *buffer_of(flat), op=op, wire_dtype=wire, timeout_s=timeout_s, keep=flat, soon=soon
        )

    def of_ranks(self) -> Any:
        """The Group whose ranks all own a share, for every other collective."""
        o = self.options
        plain = not o.reducers and isinstance(o.shares, str) and o.rates is None and not o.hierarchical
        return self._group("cpu" if plain else "cpu/ranks")

    def staging(self, device: torch.device) -> Staging:
        """The pinned memory through which tensors of a device are reduced."""
        place = self.place(device)
        with self._lock:
            staging = self._stagings.get(device)
            if staging is None:
                staging = Staging(open_device(device), lambda reason: self._abort(place, reason))
                self._stagings[device] = staging
            return staging

    def place(self, device: torch.device) -> str:
        """The name of a device's Group: the first that each rank uses is the same one, whatever its index there."""
        with self._lock:
            return self._places.setdefault(device, f"cuda/{len(self._places)}")

    # --- connections --------------------------------------------------------------------------------------------------

    def _group(self, where: str) -> Any:
        group = self._opened(where)
        if group is not None:
            return group
        refuse_within(self._opening, f"the opening of process group {self._name!r}")
        with self._opening:
            group = self._opened(where)
            if group is not None:
                return group
            self._tried.add(where)
            group = self._open(where)
            with self._lock:
                if not self._closed:
                    self._groups[where] = group
                    return group
        group.close(0.0)
        raise self._refusal()

    def _opened(self, where: str) -> Any:
        with self._lock:
            if self._closed:
                raise self._refusal()
            return self._groups.get(where)

    def _refusal(self) -> ConnectionClosedError:
        return ConnectionClosedError(f"the process group {self._name!r} was closed")

    def _open(self, where: str) -> Any:
        from geartrain.collectives import Group, GroupOptions

        o = self.options
        if where == "cpu/ranks":
            o = replace(o, reducers=(), shares="equal", rates=None, hierarchical=False)
        try:
            return Group(
                self._rank,
                self._size,
                store=PolledStore(f"allreduce/{where}/{o.epoch}/", self._store, lambda: self._closed),
                name=f"{self._name}/{where}",
                reducers=o.reducers,
                shares=o.shares,
                hierarchical=o.hierarchical,
                timeout_s=self.timeout_s,
                secret=o.secret,
                epoch=o.epoch,
                options=GroupOptions(
                    algorithm=o.algorithm,
                    rates=o.rates,
                    spin_us=o.spin_us,
                    on_reducer_loss=o.on_reducer_loss,
                    reducer_silence_s=o.reducer_silence_s,
                ),
            )
        except GeartrainError as error:
            if self._closed:
                raise self._refusal() from error
            raise

    def _abort(self, where: str, reason: str) -> None:
        with self._lock:
            group, tried = self._groups.get(where), where in self._tried
        with suppress(Exception):  # closed; or the others do not come
            if group is not None or not tried:  # the others may wait for this rank to connect
                (group or self._group(where)).abort(reason)

    def counters(self) -> dict[str, dict[str, Any]]:
        """Of each Group, its counters."""
        with self._lock:
            groups = dict(self._groups)
        return {where: group.counters() for where, group in groups.items()}

    # --- lifecycle ----------------------------------------------------------------------------------------------------

    def close(self) -> bool:
        """Makes no further Group. `disconnect` ends the existing ones. False if it was closed before."""
        with self._lock:
            first, self._closed = not self._closed, True
        return first

    def disconnect(self, reason: str | None, drain: Callable[[], object]) -> None:
        """Ends all connections: with a reason on every rank, or after the other ranks have the data that they need.

        `drain` is called when nothing is staged any more, before the Groups are closed.
        """
        with self._lock:
            groups, self._groups = self._groups, {}
            stagings, self._stagings = self._stagings, {}
        for group in groups.values() if reason is not None else ():
            group.abort(reason)
        for staging in stagings.values():
            staging.close(CLOSE_TIMEOUT_S)
        drain()
        for group in groups.values():
            group.close()
