"""A TCP relay between a client and a node, which cuts the connection at a chosen point of a call."""

from __future__ import annotations

import contextlib
import socket
import threading

#: What comes at once and has fewer bytes is no request of a test: greetings, handshakes and pings.
REQUEST_BYTES = 2_000

#: Where a connection is cut: the request does not arrive, or half of it does; the reply does not, or half of it does.
#: "late": the client's side is cut and the server's stays; the request arrives when `release` is called.
CUTS = ("before the request", "within the request", "before the reply", "within the reply")


class Relay:
    """Forwards connections to an address, and cuts one when it is told to.

    Attributes:
        address: for the client, in place of the node's own.
        cuts: connections that were cut at the point that was asked for.
    """

    def __init__(self, address: str) -> None:
        rest, _, port = address.rpartition(":")
        self._to = ("127.0.0.1", int(port))
        self._port = 0
        self._listen()
        self.address = f"{rest}:{self._port}"
        self.cuts = 0
        self._lock = threading.Lock()
        self._next = ""  # where the next call is cut
        self._stays = False
        self._late: list[tuple[socket.socket, bytes]] = []
        self._kept: list[socket.socket] = []  # the server's side of what was cut with "late"
        self._open: list[socket.socket] = []

    def cut_next(self, where: str, *, stays: bool = False) -> None:
        """Cuts the connection of the next call.

        Args:
            where: one of `CUTS`, or "late".
            stays: connections are refused from then on, until `restore`.
        """
        self._stays = stays
        self._next = where

    def restore(self) -> None:
        """Accepts connections again."""
        self._listen()

    def hang(self) -> None:
        """Ends all connections. Later ones get no answer, like those to a host that lost its network."""
        self.close()
        self._listener = socket.create_server(("127.0.0.1", self._port))

    def release(self) -> None:
        """Lets requests arrive whose connection was cut with "late"."""
        for server, held in self._late:
            server.sendall(held)

    def close(self) -> None:
        """Ends all connections."""
        _shut(self._listener)
        with self._lock:
            _shut(*self._open)

    def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(self._to)
                with self._lock:
                    self._open += [client, server]
                asked = threading.Event()
                threading.Thread(target=self._forward, args=(client, server, asked), daemon=True).start()
                threading.Thread(target=self._return, args=(server, client, asked), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket, asked: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                where = self._next if len(data) >= REQUEST_BYTES else ""
                if where == "before the request":
                    self._cut(client, server)
                elif where == "within the request":
                    server.sendall(data[: len(data) // 2])
                    self._cut(client, server)
                elif where == "late":
                    self._next = ""
                    self.cuts += 1
                    with self._lock:
                        self._kept += self._open
                    self._late.append((server, data))
                    client.shutdown(socket.SHUT_RDWR)
                    return
                elif where:
                    asked.set()
                server.sendall(data)
        if server not in self._kept:
            _shut(client, server)

    def _return(self, server: socket.socket, client: socket.socket, asked: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                if asked.is_set():
                    if self._next == "within the reply":
                        client.sendall(data[: len(data) // 2])
                    self._cut(client, server)
                client.sendall(data)
        if server not in self._kept:
            _shut(client, server)

    def _cut(self, *both: socket.socket) -> None:
        self._next = ""
        if self._stays:
            _shut(self._listener)
        self.cuts += 1
        _shut(*both)
        raise ConnectionResetError


def _shut(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
