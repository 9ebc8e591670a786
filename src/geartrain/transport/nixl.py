"""One-sided transfers (RDMA) between processes through NIXL: InfiniBand, RoCE, EFA, GPUDirect; without them, shared
memory or TCP. Optional: `pip install 'geartrain[nixl]'` (with CUDA 12 `nixl-cu12`), see docs/devices.md.

    with nixl.attach(connection) as link:                    # both sides, over a connection they have
        region = nixl.expose(array)                          # here: peers may write and read it
        connection.send(region.descriptor)
        ...
        link.write(mine, descriptor, timeout_s=10)           # there: into the other's array
        connection.send(b"written")                          # NIXL does not notify the other side

A link is verified before it is returned: each side reads a nonce from the other's memory and writes it back there, all
through NIXL. NIXL completes by polling only, so the passive side waits on the connection.

Threads: everything here may be called by any thread. Fork: UCX does not survive one; a child that uses this is refused
with `ConnectionClosedError`. Lost peers: a dead one is `PeerLostError`, a stopped one `WaitTimeoutError`, which ends
the link. Trust: a process with a region's descriptor may write it while it is exposed, and over shared memory even
after.
"""

from geartrain.transport.nixl_agent import INSTALL, WHEELS, describe, installed, why_not
from geartrain.transport.nixl_handshake import Handshake, attach
from geartrain.transport.nixl_link import NixlLink, RegisteredRegion, expose

__all__ = [
    "INSTALL",
    "WHEELS",
    "Handshake",
    "NixlLink",
    "RegisteredRegion",
    "attach",
    "describe",
    "expose",
    "installed",
    "why_not",
]
