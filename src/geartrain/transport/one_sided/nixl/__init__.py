"""One-sided reads and writes (RDMA) of another process's memory through NIXL.

NIXL uses InfiniBand, RoCE, EFA or GPUDirect, and otherwise shared memory or TCP. It is optional: install it with
`pip install 'geartrain[nixl]'`, or `nixl-cu12` for CUDA 12. See docs/devices.md.

    with nixl.attach(connection) as link:                    # on both sides of an open connection
        region = nixl.expose(array)                          # here: peers may write and read it
        connection.send(region.descriptor)
        ...
        link.write(mine, descriptor, timeout_s=10)           # there: into the other's array
        connection.send(b"written")                          # NIXL does not notify the other side

`attach` verifies a link before it returns it. Each side reads a nonce from the other side's memory and writes it back,
both through NIXL. NIXL reports completion only by polling, so the passive side must wait on the connection.

Details:

- Threads: any thread may call any function of this module.
- Fork: UCX does not survive a fork. In a forked child, every use raises `ConnectionClosedError`.
- Lost peers: a dead peer raises `PeerLostError`. A stopped peer raises `WaitTimeoutError`, which ends the link.
- Trust: a process that has a region's descriptor may write to the region while it is exposed. Over shared memory it can
  write even afterwards.
"""

from geartrain.transport.one_sided.nixl.agent import INSTALL, WHEELS, describe, installed, why_not
from geartrain.transport.one_sided.nixl.handshake import NixlHandshake, attach
from geartrain.transport.one_sided.nixl.link import NixlLink, RegisteredRegion, expose

start_handshake = NixlHandshake

__all__ = [
    "INSTALL",
    "WHEELS",
    "NixlHandshake",
    "NixlLink",
    "RegisteredRegion",
    "attach",
    "describe",
    "expose",
    "installed",
    "start_handshake",
    "why_not",
]
