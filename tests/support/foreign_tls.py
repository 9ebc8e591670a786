"""A relay that speaks TLS on both sides by OpenSSL's own functions: what a peer of another make may do to a connection.

It changes keys at will (KeyUpdate, which Python's ssl cannot send), and ends what goes to the listener in the ways that
TLS knows: with and without close_notify, in the middle of a record, by a reset.
"""

from __future__ import annotations

import ctypes
import select
import socket
import struct
import threading
from typing import Any

from geartrain.transport.tls import TLS

_MOVING_PARTIAL_WRITES, _MODE, _PEM, _WANT_READ, _WANT_WRITE = 0x1 | 0x2, 33, 1, 2, 3
_REQUESTED, _NOT_REQUESTED = 1, 0
_HALF_A_RECORD = struct.pack(">BHH", 23, 0x0303, 16401) + bytes(100)
ENDS = ("close_notify", "no close_notify", "half a record", "reset within a record")


def _library() -> Any:
    ssl = ctypes.CDLL("libssl.so.3")
    for name in ("TLS_method", "SSL_CTX_new", "SSL_new"):
        getattr(ssl, name).restype = ctypes.c_void_p
    return ssl


class _End:
    """One side of a relayed connection."""

    def __init__(self, relay: ForeignTls, own: socket.socket, dials: bool) -> None:
        self.relay, self.socket = relay, own
        own.setblocking(False)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.ssl = ctypes.c_void_p(relay.library.SSL_new(relay.context))
        relay.library.SSL_set_fd(self.ssl, own.fileno())
        (relay.library.SSL_set_connect_state if dials else relay.library.SSL_set_accept_state)(self.ssl)
        self.pending, self.sent, self.next_rekey = b"", 0, relay.rekey_bytes
        self.over = False

    def _again(self, result: int) -> bool:
        return self.relay.library.SSL_get_error(self.ssl, result) in (_WANT_READ, _WANT_WRITE)

    def read(self) -> bytes:
        room = ctypes.create_string_buffer(16384)
        self.relay.crypto.ERR_clear_error()
        got = self.relay.library.SSL_read(self.ssl, room, len(room))
        if got <= 0 and not self._again(got):
            self.over = True
        return room.raw[: max(got, 0)]

    def write(self) -> bool:
        """Whether something went."""
        relay = self.relay
        if relay.rekey_bytes and self.sent >= self.next_rekey:
            self.next_rekey = self.sent + relay.rekey_bytes
            relay.rekeys += relay.library.SSL_key_update(self.ssl, (_REQUESTED, _NOT_REQUESTED)[relay.rekeys % 2])
        relay.crypto.ERR_clear_error()
        put = relay.library.SSL_write(self.ssl, self.pending, len(self.pending))
        if put <= 0:
            self.over = self.over or not self._again(put)
            return False
        self.pending, self.sent = self.pending[put:], self.sent + put
        return True

    def finish(self, how: str) -> None:
        if how == "close_notify":
            self.relay.library.SSL_shutdown(self.ssl)
        elif how in ("half a record", "reset within a record"):
            self.socket.setblocking(True)
            self.socket.sendall(_HALF_A_RECORD)
        if how == "reset within a record":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self.over = True
        if self.socket.fileno() >= 0:
            self.relay.library.SSL_free(self.ssl)
            self.socket.close()


class ForeignTls:
    """Between a dialer, which is given `address`, and a listener. With `tls` it shows a certificate for both.

    Args:
        rekey_bytes: sent under one key, each way of each connection.
        end: one of ENDS, for the connection that has brought the listener `after_bytes` first; or at `end_now`.
    """

    def __init__(
        self, tls: TLS, listener: str, rekey_bytes: int = 0, end: str = "", after_bytes: int = 1 << 60
    ) -> None:
        self.library, self.crypto = _library(), ctypes.CDLL("libcrypto.so.3")
        self.context = ctypes.c_void_p(self.library.SSL_CTX_new(ctypes.c_void_p(self.library.TLS_method())))
        for call, file in (
            ("SSL_CTX_use_certificate_chain_file", tls.certificate),
            ("SSL_CTX_use_PrivateKey_file", tls.key),
        ):
            more = (_PEM,) if call.endswith("PrivateKey_file") else ()
            assert getattr(self.library, call)(self.context, str(file).encode(), *more) == 1
        self.library.SSL_CTX_ctrl(self.context, _MODE, ctypes.c_long(_MOVING_PARTIAL_WRITES), None)
        self.rekey_bytes, self.end, self.after_bytes = rekey_bytes, end, after_bytes
        self.rekeys, self.ended, self.end_now = 0, False, threading.Event()
        self._port = int(listener.rpartition(":")[2])
        self._door = socket.create_server(("127.0.0.1", 0), backlog=32)
        self.address = f"id=any;tcp=127.0.0.1:{self._door.getsockname()[1]}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> ForeignTls:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._door.close()

    def _serve(self) -> None:
        pairs: list[tuple[_End, _End]] = []
        while not self._stop.is_set():
            moved = False
            for mine, theirs in pairs:
                for source, sink in ((mine, theirs), (theirs, mine)):
                    if not source.over and not sink.pending:
                        sink.pending = source.read()
                    if sink.pending and not sink.over:
                        moved |= sink.write()
                if self.end and not self.ended and (theirs.sent >= self.after_bytes or self.end_now.is_set()):
                    self.ended = True
                    theirs.finish(self.end)
                if (mine.over and not theirs.pending) or theirs.over:
                    mine.close()
                    theirs.close()
            pairs = [pair for pair in pairs if not (pair[0].over and pair[1].over)]
            if moved:
                continue
            waits = [end.socket for pair in pairs for end in pair if not end.over]
            ready, _, _ = select.select([self._door, *waits], [], [], 0.005)
            if self._door in ready:
                accepted = self._door.accept()[0]
                pairs.append(
                    (_End(self, accepted, False), _End(self, socket.create_connection(("127.0.0.1", self._port)), True))
                )
        for mine, theirs in pairs:
            mine.close()
            theirs.close()
        self.library.SSL_CTX_free(self.context)
