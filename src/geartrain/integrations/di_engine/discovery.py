"""Discovery of nodes: by address, by files on this host, or through a c10d store."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from geartrain.errors import ArgumentError, WaitTimeoutError
from geartrain.transport.rendezvous import store_of


@dataclass
class Contact:
    """Address of a node, or the place where the node will publish it. `name` is set once the node has joined."""

    text: str
    store: Any = None
    key: str = ""
    # It had joined when the store was read: it is not waited for when it is gone, for a restarted node joins by itself.
    seen: bool = False
    name: str | None = field(default=None, compare=False)
    failures: int = field(default=0, compare=False)

    def address(self) -> str | None:
        """Address to dial; None while there is none. Does not wait."""
        if self.store is not None:
            return _text(self.store.get(self.key)) if self.store.check([self.key]) else None
        url = urlparse(self.text)
        if url.scheme == "ipc":
            try:
                return Path(url.path).read_text().strip() or None
            except OSError:
                return None
        if url.scheme == "tcp":
            return f"id=any;tcp={url.hostname}:{url.port}"
        return self.text


def parse_contact(text: str) -> Contact:
    """Parses "tcp://host:port", "ipc:///path" or the `address` of a node.

    Raises:
        ArgumentError: none of these; for a node id the message names the init_method that it needs.
    """
    text = text.strip()
    url = urlparse(text)
    with contextlib.suppress(ValueError):  # the port is no number
        places = (url.scheme == "ipc" and url.path, url.scheme == "tcp" and url.hostname and url.port)
        if text.startswith("id=") or any(places):
            return Contact(text)
    if re.fullmatch(r"\d+(_\d+_\d+)?", text):
        raise ArgumentError(f"attach_to={text!r} is a node id, and they are found through a store: give --init-method")
    raise ArgumentError(
        f"attach_to takes tcp://host:port, ipc:///path or, with an init_method, node ids; found {text!r}"
    )


class Publication:
    """File with the address of a node of this host, for "ipc:///path". `close` removes it."""

    def __init__(self, path: Path, address: str) -> None:
        self._path = path
        # Renamed when it is complete, so that a reader finds all of it or nothing.
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
        with os.fdopen(handle, "w") as file:
            file.write(address)
        Path(beside).replace(path)

    def close(self) -> None:
        """Removes the file."""
        self._path.unlink(missing_ok=True)


class StoreRegister:
    """Register of nodes in a c10d store, in the order in which they joined."""

    def __init__(self, init_method: str, node_id: int, timeout_s: float) -> None:
        """Node 0 starts the store of a tcp:// method; the others wait for it. Raises `WaitTimeoutError`."""
        try:
            self._store, _, _ = store_of(init_method, node_id, None, timeout_s)
        except (RuntimeError, OSError, ValueError) as error:  # torch's error classes differ by version
            who = "cannot start" if node_id == 0 else "cannot reach"
            raise WaitTimeoutError(
                f"node {node_id} {who} the store at {init_method} within {timeout_s:g} s; node 0 starts it. "
                f"torch says: {str(error).splitlines()[0]}"
            ) from error

    def join(self, node_id: int, address: str) -> list[Contact]:
        """Adds a node; returns those that joined before it."""
        number = int(self._store.add(f"{_PREFIX}joined", 1))
        self._store.set(f"{_PREFIX}node/{node_id}", address)
        self._store.set(f"{_PREFIX}member/{number}", address)
        return [self._contact(f"member {n}", f"member/{n}", seen=True) for n in range(1, number)]

    def node(self, node_id: int) -> Contact:
        """The node of that id, which may join later."""
        return self._contact(f"node {node_id}", f"node/{node_id}")

    def _contact(self, text: str, key: str, seen: bool = False) -> Contact:
        return Contact(text, self._store, _PREFIX + key, seen)


def contacts_of(
    attach_to: Sequence[str], topology: str, node_id: int, address: str, register: StoreRegister | None
) -> list[Contact]:
    """Contacts that a node joins: earlier nodes, as its topology says, and `attach_to`."""
    if register is None:
        return [parse_contact(text) for text in attach_to]
    before = register.join(node_id, address)
    found = before if topology == "mesh" else [register.node(0)] if topology == "star" and node_id != 0 else []
    for text in attach_to:
        # DI-engine's page of torchrpc writes 0_0_0 for node 0; the devices belong into the map.
        number = re.fullmatch(r"(\d+)(_\d+_\d+)?", text.strip())
        found.append(parse_contact(text) if number is None else register.node(int(number.group(1))))
    return found


_PREFIX = "geartrain/di-engine/"


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
