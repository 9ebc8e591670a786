"""Many clients of one server: calls a second of geartrain.rpc and of pyzmq's bare ROUTER loop, in turns.

    python -m geartrain_bench.messages.many_clients --clients 64 --processes 4 --rounds 3

A server process, and clients evenly in some processes, each with a connection of its own. A process sends a number on
all of its connections and then waits for all answers, for --seconds. The ROUTER loop sends back what it received: no
names of functions, no encoding, no deadlines, no order to keep. Printed: calls/s of all clients together, and the
server's processor time a call, which tells more where clients and server share the cores.

pyzmq runs in this interpreter, and is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: System and transport of each row.
SYSTEMS = (("geartrain", "shm"), ("geartrain", "tcp"), ("pyzmq ROUTER", "ipc"), ("pyzmq ROUTER", "tcp"))


def serve_geartrain(transport: str) -> None:
    """A node with one function."""
    import geartrain.rpc as rpc
    from geartrain_bench.messages.worker import echo

    rpc.function(echo)
    node = rpc.Node("server", transport=transport)
    print(node.address, flush=True)
    sys.stdin.read()
    node.close()


def serve_pyzmq(transport: str) -> None:
    """What arrives goes back to whoever sent it."""
    import zmq  # type: ignore[import-not-found, import-untyped, unused-ignore]

    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(f"ipc://{tempfile.mkdtemp()}/router" if transport == "ipc" else "tcp://127.0.0.1:*")
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    print(endpoint.decode().rstrip("\0"), flush=True)
    while True:
        socket.send_multipart(socket.recv_multipart())


def geartrain_round(address: str, transport: str, connections: int) -> Callable[[], None]:
    """A call on each of so many new connections, and all of the answers."""
    import geartrain.rpc as rpc

    names = [f"client-{os.getpid()}-{i}" for i in range(connections)]
    nodes = [rpc.Node(name, peers={"server": address}, transport=transport) for name in names]

    def call_all() -> None:
        for future in [node.call_async("server", "echo", 7) for node in nodes]:
            future.result()

    return call_all


def pyzmq_round(address: str, transport: str, connections: int) -> Callable[[], None]:
    """The same by DEALER sockets."""
    import zmq  # type: ignore[import-not-found, import-untyped, unused-ignore]

    context = zmq.Context()
    sockets: list[Any] = [context.socket(zmq.DEALER) for _ in range(connections)]
    for socket in sockets:
        socket.connect(address)

    def call_all() -> None:
        for socket in sockets:
            socket.send(b"7")
        for socket in sockets:
            socket.recv()

    return call_all


SERVERS = {"geartrain": serve_geartrain, "pyzmq ROUTER": serve_pyzmq}
ROUNDS = {"geartrain": geartrain_round, "pyzmq ROUTER": pyzmq_round}


def be_client(system: str, transport: str, address: str, connections: str, seconds: str) -> None:
    """A process of clients; prints how many calls it made."""
    call_all = ROUNDS[system](address, transport, int(connections))
    call_all()
    print("ready", flush=True)
    sys.stdin.readline()
    made, until_s = 0, time.perf_counter() + float(seconds)
    while time.perf_counter() < until_s:
        call_all()
        made += int(connections)
    print(made, flush=True)
    sys.stdin.read()  # the connections stay until all have ended
    os._exit(0)  # without hanging up one by one


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(system: str, transport: str, clients: int, processes: int, seconds: float) -> tuple[float, float]:
    """Calls a second, and the server's processor time a call in us."""
    command = [sys.executable, "-m", "geartrain_bench.messages.many_clients"]
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [*command, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
        )
        return started[-1]

    def said(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"a process of {system} over {transport} ended before its time")
        return line

    try:
        server = start("--serve", system, transport)
        address = said(server)
        share = clients // processes
        waiting = [start("--call", system, transport, address, share, seconds) for _ in range(processes)]
        for client in waiting:
            said(client)
        before_s = cpu_s(server.pid)
        for client in waiting:
            assert client.stdin is not None
            client.stdin.write("go\n")
        made = sum(int(said(client)) for client in waiting)
        return made / seconds, (cpu_s(server.pid) - before_s) / made * 1e6
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.communicate()


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--serve"]:
        SERVERS[sys.argv[2]](sys.argv[3])
        return
    if sys.argv[1:2] == ["--call"]:
        be_client(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    if not 1 <= given.processes <= given.clients or given.clients % given.processes:
        parser.error(f"{given.clients} clients are not dealt evenly to {given.processes} processes")
    here = [one for one in SYSTEMS if one[0] == "geartrain" or importlib.util.find_spec("zmq") is not None]
    found: dict[tuple[str, str], list[tuple[float, float]]] = {one: [] for one in here}
    for turn in range(given.rounds):
        for one in here[turn % len(here) :] + here[: turn % len(here)]:
            found[one].append(measure(*one, given.clients, given.processes, given.seconds))
    print(f"{given.clients} clients in {given.processes} processes; calls/s of each round; server's us of CPU a call")
    for (system, transport), rounds in found.items():
        rates = ", ".join(f"{rate:,.0f}" for rate, _ in rounds)
        print(f"{system:13} {transport:4} {rates}; {statistics.median(us for _, us in rounds):.1f}")


if __name__ == "__main__":
    main()
