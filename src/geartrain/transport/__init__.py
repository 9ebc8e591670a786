"""Message transports between processes: in one process, in shared memory, and over TCP.

A connection delivers messages in order. Large buffers travel next to the message header and are not copied into it.

    listener = transport.listen("0.0.0.0", 7000, secret=secret)
    connection = transport.connect(listener.address, secret=secret, timeout_s=10)
"""

from geartrain.transport.connection import (
    TRANSPORTS,
    Connection,
    Listener,
    MemoryRegion,
    MessageLimits,
    connect,
    listen,
    viable,
)
from geartrain.transport.tls import TLS

__all__ = [
    "TLS",
    "TRANSPORTS",
    "Connection",
    "Listener",
    "MemoryRegion",
    "MessageLimits",
    "connect",
    "listen",
    "viable",
]
