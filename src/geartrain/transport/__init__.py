"""Transports: ordered messages with large buffers out of band, within a process, within a host, and over TCP.

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
    "MessageLimits",
    "Listener",
    "MemoryRegion",
    "connect",
    "listen",
    "viable",
]
