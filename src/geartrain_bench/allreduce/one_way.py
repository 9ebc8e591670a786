"""One-way TCP: the floor of what a link carries, by a transfer between two processes within the run."""

from __future__ import annotations

import socket
import time

DEADLINE_S = 60.0


class OneWayTransfer:
    """One end of a connection, over which the other gets so many bytes and acknowledges them.

    Args:
        place: address of the sender's host.
        port: which it listens on.
        sends: whether this is the sender's end.
    """

    def __init__(self, place: str, port: int, sends: bool) -> None:
        self._sends = sends
        self._socket = _accepted(place, port) if sends else _connected(place, port)

    def seconds(self, nbytes: int) -> float:
        """Called on both ends: seconds until the receiver has the bytes and, on the sender, it knows of that."""
        data = bytes(nbytes) if self._sends else b""
        room, left = memoryview(bytearray(1 << 20)), nbytes
        began_s = time.perf_counter()
        if self._sends:
            self._socket.sendall(data)
            assert self._socket.recv(1), "the receiver is gone"
        else:
            while left:
                got = self._socket.recv_into(room, min(left, len(room)))
                assert got, "the sender is gone"
                left -= got
            self._socket.sendall(b".")
        return time.perf_counter() - began_s

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()


def _accepted(place: str, port: int) -> socket.socket:
    with socket.create_server((place, port)) as server:
        server.settimeout(DEADLINE_S)
        found = server.accept()[0]
        found.settimeout(DEADLINE_S)
        return found


def _connected(place: str, port: int) -> socket.socket:
    ends_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            return socket.create_connection((place, port), DEADLINE_S)
        except ConnectionRefusedError:
            if time.monotonic() > ends_s:
                raise
            time.sleep(0.05)
