"""Messages between two hosts by their size: a tensor one way with an acknowledgement, 20 KB to 2.5 GB.

    python -m geartrain_bench.messages.across_hosts                       # the columns of the torchrpc page
    python -m geartrain_bench.messages.across_hosts --mb 0.02,1.31,10.5   # sizes in 10^6 bytes
    python -m geartrain_bench.messages.across_hosts --rate-mbit 1000      # over links of that rate

Two hosts are network namespaces (geartrain.tools.testing.Hosts, which needs the right to create them), joined by a
link that is not shaped unless a rate is given. Over it go geartrain's RPC, TensorPipe (torch.distributed.rpc), nng
(pynng, where it is installed: tensors by pickle, as DI-engine's queue sends them), and as the floor a raw TCP socket
into 64 MB that are used again. Each system has a process on either host; laps alternate, a round of all systems is in a
rotating order, and the time is the client's, until the acknowledgement. What a system allocates for a message is in its
figure. nng, which copies a message five times, is left out where it would take more than 4 GB.

It would mislead where it is read as a network's: both hosts share the cores, so an unshaped link is as fast as two
cores copy. The page's figures are of a cluster with InfiniBand; its TCP columns are the ones to compare with, and only
the ratios of systems.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pickle
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from geartrain.tools.testing import Hosts
from geartrain_bench.messages.worker import acknowledge

SIZES = (20_480, 1_310_720, 10_485_760, 41_943_040, 671_088_640, 1_342_177_280, 2_684_354_560)
MOST_NNG_BYTES = 700_000_000
SECRET = b"across hosts"
PORT = 29_600
Send = Callable[[Any], Any]


def read_exactly(stream: socket.socket, view: memoryview) -> None:
    """Fills the view."""
    while view.nbytes:
        got = stream.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]


# --- the systems: a server on the second host, and what sends to it from the first ---


def serve_raw(host: str) -> None:
    """A bare socket: a length, so many bytes into recycled memory, 64 MB at most, and one byte back."""
    with socket.create_server((host, PORT)) as listener:
        print("ready", flush=True)
        stream = listener.accept()[0]
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer, head = memoryview(bytearray(64 << 20)), bytearray(8)
    while True:
        read_exactly(stream, memoryview(head))
        (size,) = struct.unpack("<q", head)
        while size:
            read_exactly(stream, buffer[: min(size, len(buffer))])
            size -= min(size, len(buffer))
        stream.sendall(b"k")


def send_raw(host: str) -> Send:
    """Over that socket."""
    stream = socket.create_connection((host, PORT))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(array: Any) -> None:
        head, data = struct.pack("<q", array.nbytes), memoryview(array).cast("B")
        sent = stream.sendmsg([head, data]) - len(head)
        stream.sendall(data[max(sent, 0) :])
        read_exactly(stream, memoryview(bytearray(1)))

    return send


def serve_geartrain(host: str) -> None:
    """A node of geartrain.rpc."""
    import geartrain.rpc as rpc

    rpc.function(acknowledge)
    with rpc.Node("server", host=host, port=PORT + 1, secret=SECRET, transport="tcp", tls=False) as node:
        print(node.address, flush=True)
        threading.Event().wait()


def send_geartrain(host: str, address: str) -> Send:
    """By a call."""
    import geartrain.rpc as rpc

    options: dict[str, Any] = {"peers": {"server": address}, "secret": SECRET, "transport": "tcp", "tls": False}
    node = rpc.Node("client", host=host, timeout_s=600, **options)
    return lambda array: node.call("server", "acknowledge", array)


def join_torch(name: str, rank: int, host: str) -> None:
    """torch.distributed.rpc of both; the server's host has the store."""
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(PORT + 2), TP_SOCKET_IFNAME="eth0", GLOO_SOCKET_IFNAME="eth0")
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        name,
        rank=rank,
        world_size=2,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(rpc_timeout=600, _transports=["uv"]),
    )


def serve_torch(host: str) -> None:
    """TensorPipe over TCP."""
    print("ready", flush=True)
    join_torch("server", 0, host)
    threading.Event().wait()


def send_torch(host: str) -> Send:
    """By a call."""
    import torch
    from torch.distributed import rpc

    join_torch("client", 1, host)
    return lambda array: rpc.rpc_sync("server", acknowledge, args=(torch.from_numpy(array),))


def serve_nng(host: str) -> None:
    """A pair of nng's, tensors by pickle."""
    import pynng

    with pynng.Pair0(listen=f"tcp://{host}:{PORT + 3}", recv_max_size=0) as pair:
        print("ready", flush=True)
        while True:
            pickle.loads(pair.recv())
            pair.send(b"k")


def send_nng(host: str) -> Send:
    """By the other end of it."""
    import pynng
    import torch

    pair = pynng.Pair0(dial=f"tcp://{host}:{PORT + 3}", recv_max_size=0, recv_timeout=600_000, send_timeout=600_000)

    def send(array: Any) -> None:
        pair.send(pickle.dumps(torch.from_numpy(array)))
        pair.recv()

    return send


SYSTEMS = ("raw TCP", "geartrain", "TensorPipe", "nng, pickled")
SERVERS = dict(zip(SYSTEMS, (serve_raw, serve_geartrain, serve_torch, serve_nng), strict=True))


def be_client(system: str, here: str, there: str, address: str) -> None:
    """Laps as they are asked for on standard input: [bytes, calls]."""
    senders: dict[str, Callable[[], Send]] = {
        "raw TCP": lambda: send_raw(there),
        "geartrain": lambda: send_geartrain(here, address),
        "TensorPipe": lambda: send_torch(there),
        "nng, pickled": lambda: send_nng(there),
    }
    send = senders[system]()
    print("ready", flush=True)
    array = np.ones(1, np.float32)
    for line in sys.stdin:
        nbytes, calls = json.loads(line)
        if array.nbytes != nbytes:
            array = np.ones(nbytes // 4, np.float32)
        began_s = time.perf_counter()
        for _ in range(calls):
            send(array)
        seconds = (time.perf_counter() - began_s) / calls
        if nbytes > 100_000_000:  # the others need the memory
            array = np.ones(1, np.float32)
        print(json.dumps(seconds), flush=True)
    os._exit(0)


# --- the benchmark ---


def measure(sizes: list[int], rounds: int, rate_mbit: float | None, budget_s: float) -> None:
    """Prints a table: milliseconds a message, median and fastest of the rounds, and the ratio to the raw socket."""
    systems = [system for system in SYSTEMS if system != "nng, pickled" or importlib.util.find_spec("pynng")]
    processes: list[subprocess.Popen[str]] = []
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with Hosts(2, rate_mbit=rate_mbit) as hosts:
        here, there = hosts.address(0), hosts.address(1)

        def start(host: int, *words: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "geartrain_bench.messages.across_hosts", *words]
            processes.append(hosts.popen(host, command, **pipes))
            return processes[-1]

        def said(process: subprocess.Popen[str]) -> str:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if not line:
                raise SystemExit(f"{process.args!r} ended with {process.wait()}")
            return line

        try:
            clients = {}
            for system in systems:
                address = said(start(1, "--serve", system, there))
                clients[system] = start(0, "--send", system, here, there, address)
                said(clients[system])

            def lap(system: str, size: int, calls: int) -> float:
                client = clients[system]
                assert client.stdin is not None
                client.stdin.write(json.dumps([size, calls]) + "\n")
                client.stdin.flush()
                return float(said(client))

            link = f"links of {rate_mbit:g} Mbit/s" if rate_mbit else "an unshaped link"
            print(f"two hosts, {link}; load {os.getloadavg()[0]:.1f}; ms: median (fastest), raw TCP's median over it")
            for size in sizes:
                calls = max(1, min(50, 20_000_000 // size))
                timed = [system for system in systems if system != "nng, pickled" or size <= MOST_NNG_BYTES]
                laps: dict[str, list[float]] = {system: [] for system in timed}
                for system in timed:
                    lap(system, size, 1)
                ends_s = time.monotonic() + budget_s
                for number in range(rounds):
                    if number > 2 and time.monotonic() > ends_s:
                        break
                    place = number % len(timed)
                    for system in timed[place:] + timed[:place]:
                        laps[system].append(lap(system, size, calls))
                floor_s = statistics.median(laps["raw TCP"])
                cells = []
                for system, found in laps.items():
                    middle = statistics.median(found)
                    cells.append(f"{system} {1e3 * middle:.4g} ({1e3 * min(found):.4g}) {floor_s / middle:.2f}")
                print(
                    f"  {size / 1e6:.6g} MB, {number + 1} rounds: {'; '.join(cells)}; load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--serve"]:
        return SERVERS[sys.argv[2]](sys.argv[3])
    if sys.argv[1:2] == ["--send"]:
        return be_client(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", help="10^6 bytes of each message; by default the columns of the torchrpc page")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rate-mbit", type=float)
    parser.add_argument("--budget-s", type=float, default=60.0, help="of a size, after which three rounds are enough")
    given = parser.parse_args()
    sizes = [4 * round(float(word) * 1e6 / 4) for word in given.mb.split(",")] if given.mb else list(SIZES)
    return measure(sizes, given.rounds, given.rate_mbit, given.budget_s)


if __name__ == "__main__":
    main()
