"""Server process of `geartrain bench p2p`, over one of the measured systems.

Prints its address as one line, and serves until its standard input ends.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any


def echo(value: Any) -> Any:
    """The value back."""
    return value


def acknowledge(_: Any) -> None:
    """A big value one way, and an acknowledgement."""


def landed(tensor: Any) -> None:
    """A tensor one way, and an acknowledgement when its device has the bytes."""
    if tensor.is_cuda:
        import torch

        torch.cuda.current_stream(tensor.device).synchronize()


def serve_rpc(transport: str, spin_us: str, views: str, tls: str = "") -> None:
    """A node of geartrain.rpc; with the environment's certificates, if there are any, unless "plain" is requested."""
    import geartrain.rpc as rpc

    rpc.function(echo)
    rpc.function(acknowledge)
    rpc.function(landed)
    node = rpc.Node(
        "server",
        transport=transport,
        tls=False if tls == "plain" else None,
        options=rpc.NodeOptions(spin_us=float(spin_us), views=views == "views"),
    )
    print(node.address, flush=True)
    sys.stdin.read()
    node.close()


def serve_raw(family: str, most_bytes: str) -> None:
    """A bare socket: a length, so many bytes into a recycled buffer, and one byte back."""
    if family == "unix":
        listener, place = socket.socket(socket.AF_UNIX), f"geartrain-bench-{os.getpid()}"
        listener.bind("\0" + place)
    else:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        place = str(listener.getsockname()[1])
    listener.listen(1)
    print(place, flush=True)
    stream = listener.accept()[0]
    if family != "unix":
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(int(most_bytes)))
    while len(head := stream.recv(8, socket.MSG_WAITALL)) == 8:
        (size,) = struct.unpack("<q", head)
        got = 0
        while got < size:
            got += stream.recv_into(buffer[got:size])
        stream.sendall(b"k")


def serve_torch(port: str) -> None:
    """torch.distributed.rpc, on TensorPipe."""
    from torch.distributed import rpc

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    print("joining", flush=True)
    rpc.init_rpc("server", rank=1, world_size=2)  # type: ignore[no-untyped-call]
    threading.Event().wait()


def main() -> None:
    """`python -m geartrain_bench.messages.worker KIND ARGUMENTS...`."""
    try:
        import torch

        torch.set_num_threads(1)
    except ImportError:
        pass
    kinds: dict[str, Callable[..., None]] = {"rpc": serve_rpc, "raw": serve_raw, "torch": serve_torch}
    kinds[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    main()
