"""TLS on several cores: a big tensor one way with an acknowledgement, by how many threads encrypt and decrypt it.

    python -m geartrain_bench.messages.tls_threads                             # under a minute
    python -m geartrain_bench.messages.tls_threads --mb 41.9 --threads 1,2,4
    python -m geartrain_bench.messages.tls_threads --slow client               # parallel work, seen on two cores

Systems take turns over loopback, in a rotating order, each with a client and a server process of its own: a raw TCP
socket into memory that is used again, geartrain's RPC without TLS, and with it on each number of threads a side
(`TLS(threads=)`, and as many lanes), and on as many as without that option ("by default"). Two floors are measured
in the same run: the raw socket, and AES-128-GCM of OpenSSL's on so many threads, nothing sent.

Certificates are those that the environment names (GEARTRAIN_TLS_CERT and the others), else the openssl command makes
some. Printed: ms and GB/s, median and best; how many cores either process kept busy meanwhile, and how they are spread
over its threads.

It misleads where client and server share the cores with each other: on two cores one thread a side keeps both busy, and
more gain nothing. `--slow` takes the AES and carry-less multiplication instructions from one side's OpenSSL
(OPENSSL_ia32cap), which makes its work many times the other's: its threads are then seen to work at once, on two cores
as well. What it prints then is no figure of TLS.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from geartrain import _native
from geartrain.transport.tls import TLS, VARIABLES
from geartrain_bench.messages.across_hosts import read_exactly
from geartrain_bench.messages.worker import acknowledge

#: 10^6 bytes.
SIZES = (10.48576, 41.94304, 335.54432)
#: OpenSSL's mask of processor features without AES, PCLMULQDQ and the vector forms of both.
NO_AES = "~0x200000200000000:~0x0000060000000000"
RAW, PLAIN, DEFAULT = "raw TCP", "geartrain, no TLS", "TLS, by default"


def tls_system(threads: int) -> str:
    """The name of TLS on so many threads a side."""
    return f"TLS, {threads} thread{'s' if threads > 1 else ''}"


# --- the processes of a system ---


def options_of(system: str) -> dict[str, Any]:
    """Of either node."""
    if system == PLAIN:
        return {"transport": "tcp", "tls": False}
    tls = TLS.of_environment()
    assert tls is not None
    threads = None if system == DEFAULT else int(system.split()[1])
    return {"transport": "tcp", "tls": TLS(tls.certificate, tls.key, tls.ca, tls.name, threads=threads)}


def serve(system: str) -> None:
    """Prints its address; the process is killed."""
    if system == RAW:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            print(listener.getsockname()[1], flush=True)
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
    import geartrain.rpc as rpc

    rpc.function(acknowledge)
    with rpc.Node("server", **options_of(system)) as node:
        print(node.address, flush=True)
        threading.Event().wait()


def send_by(system: str, address: str) -> tuple[Callable[[Any], Any], Callable[[], str]]:
    """How to send a tensor and wait for its acknowledgement, and a line about the connection."""
    if system == RAW:
        stream = socket.create_connection(("127.0.0.1", int(address)))
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def send(array: Any) -> None:
            stream.sendall(struct.pack("<q", array.nbytes))
            stream.sendall(memoryview(array).cast("B"))
            read_exactly(stream, memoryview(bytearray(1)))

        return send, lambda: ""
    import geartrain.rpc as rpc

    node = rpc.Node("client", peers={"server": address}, timeout_s=120, **options_of(system))
    return lambda array: node.call("server", "acknowledge", array), lambda: str(node.connections().get("server", ""))


def be_client(system: str, address: str) -> None:
    """Laps as they are asked for on standard input: [bytes, calls]; or a line about the connection: null."""
    send, about = send_by(system, address)
    print("ready", flush=True)
    array = np.ones(1, np.float32)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked is None:
            print(json.dumps(about()), flush=True)
            continue
        nbytes, calls = asked
        if array.nbytes != nbytes:
            array = np.ones(nbytes // 4, np.float32)
        began_s = time.perf_counter()
        for _ in range(calls):
            send(array)
        print(json.dumps((time.perf_counter() - began_s) / calls), flush=True)
    os._exit(0)


# --- floors ---


def aes_gcm_gb_s(threads: int, seconds: float = 0.3) -> float:
    """Of AES-128-GCM over a megabyte each that stays in the cache, as `openssl speed -multi` has it."""
    crypto = ctypes.CDLL("libssl.so.3")  # libcrypto's are found through it
    for name in ("EVP_CIPHER_CTX_new", "EVP_aes_128_gcm"):
        getattr(crypto, name).restype = ctypes.c_void_p
    bytes_each = 1 << 20
    done = [0] * threads
    barrier = threading.Barrier(threads)

    def work(number: int) -> None:
        context = ctypes.c_void_p(crypto.EVP_CIPHER_CTX_new())
        cipher = ctypes.c_void_p(crypto.EVP_aes_128_gcm())
        memory, written = ctypes.create_string_buffer(bytes_each), ctypes.c_int(0)
        crypto.EVP_EncryptInit_ex(context, cipher, None, b"k" * 16, b"n" * 12)
        barrier.wait()
        ends_s = time.perf_counter() + seconds
        while time.perf_counter() < ends_s:
            crypto.EVP_EncryptUpdate(context, memory, ctypes.byref(written), memory, bytes_each)
            done[number] += 1
        crypto.EVP_CIPHER_CTX_free(context)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) * bytes_each / seconds / 1e9


# --- the benchmark ---


class Processes:
    """A system's client and server."""

    def __init__(self, system: str, environments: dict[str, dict[str, str]]) -> None:
        self.started: list[subprocess.Popen[str]] = []
        self._server = self._start("server", environments, "--serve", system)
        address = self._said(self._server)
        self._client = self._start("client", environments, "--send", system, address)
        self._said(self._client)

    def lap(self, nbytes: int, calls: int) -> float:
        """Seconds a call."""
        return float(self._ask([nbytes, calls]))

    def about(self) -> str:
        """The connection, as it describes itself."""
        return str(self._ask(None))

    def cpu_s(self) -> tuple[dict[int, float], dict[int, float]]:
        """Processor time so far of the client's threads, and of the server's."""
        return _cpu_s(self._client.pid), _cpu_s(self._server.pid)

    def close(self) -> None:
        """Ends both."""
        for process in self.started:
            process.kill()
            process.communicate()

    def _ask(self, what: Any) -> Any:
        assert self._client.stdin is not None
        self._client.stdin.write(json.dumps(what) + "\n")
        self._client.stdin.flush()
        return json.loads(self._said(self._client))

    def _start(self, side: str, environments: dict[str, dict[str, str]], *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "geartrain_bench.messages.tls_threads", *words]
        process = subprocess.Popen(
            command, env=environments[side], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.started.append(process)
        return process

    @staticmethod
    def _said(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"{process.args!r} ended with {process.wait()}")
        return line


def _cpu_s(pid: int) -> dict[int, float]:
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        found[int(task.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def _busy(before: dict[int, float], after: dict[int, float], wall_s: float) -> str:
    """Cores that the threads kept busy, all together and the busiest ones."""
    each = sorted(((after[task] - before.get(task, 0.0)) / wall_s for task in after), reverse=True)
    shown = [f"{share:.2f}" for share in each if share >= 0.03]
    return f"{sum(each):.2f} ({' + '.join(shown)})"


def environment(folder: Path) -> dict[str, str]:
    """This process's, with certificates."""
    if TLS.of_environment() is not None:
        return dict(os.environ)
    if shutil.which("openssl") is None:
        raise SystemExit(f"name certificates in the environment ({VARIABLES[0]}, ...): there is no openssl command")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-days", "2")

    def make(name: str, *more: str) -> None:
        out = ("-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem"))
        command = ["openssl", "req", "-x509", "-config", "/dev/null", "-subj", f"/CN={name}", *key, *out, *more]
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    make("ca", "-addext", "basicConstraints=critical,CA:TRUE")
    signed = ("-CA", str(folder / "ca.pem"), "-CAkey", str(folder / "ca.key"))
    make("node", *signed, "-addext", "basicConstraints=critical,CA:FALSE", "-addext", "subjectAltName=IP:127.0.0.1")
    files = (str(folder / "node.pem"), str(folder / "node.key"), str(folder / "ca.pem"))
    return {**os.environ, **dict(zip(VARIABLES, files, strict=False))}


def measure(sizes: list[int], threads: list[int], rounds: int, budget_s: float, slow: str | None) -> None:
    """Prints the tables."""
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.machine()}, {cores} cores, load {os.getloadavg()[0]:.1f}" + (f", slow {slow}" if slow else ""))
    floors = "; ".join(f"{n} thread{'s' if n > 1 else ''} {aes_gcm_gb_s(n):.2f}" for n in threads if n <= cores)
    print(f"AES-128-GCM, nothing sent, GB/s: {floors}", flush=True)
    systems = [RAW, PLAIN, *(tls_system(n) for n in threads), DEFAULT]
    if slow:
        systems = [system for system in systems if system not in (RAW, PLAIN)]
    running: dict[str, Processes] = {}
    with tempfile.TemporaryDirectory() as folder:
        of_all = environment(Path(folder))
        environments = dict.fromkeys(("client", "server"), of_all)
        if slow:
            environments[slow] = {**of_all, "OPENSSL_ia32cap": NO_AES}
        try:
            for system in systems:
                running[system] = Processes(system, environments)
            for size in sizes:
                _one_size(size, running, rounds, budget_s / len(sizes))
            print("connections at the end:")
            for system, processes in running.items():
                if about := processes.about():
                    print(f"  {system}: {about}")
        finally:
            for processes in running.values():
                processes.close()


def _one_size(size: int, running: dict[str, Processes], rounds: int, budget_s: float) -> None:
    systems, calls = list(running), max(1, 40_000_000 // size)
    seconds: dict[str, list[float]] = {system: [] for system in systems}
    wall_s = dict.fromkeys(systems, 0.0)
    ends_s = time.monotonic() + budget_s
    for processes in running.values():  # memory
        for _ in range(3):
            processes.lap(size, 1)
    before = {system: processes.cpu_s() for system, processes in running.items()}
    number = 0
    while number < rounds and (number < 3 or time.monotonic() < ends_s):
        place = number % len(systems)
        for system in systems[place:] + systems[:place]:
            seconds[system].append(running[system].lap(size, calls))
            wall_s[system] += seconds[system][-1] * calls
        number += 1
    print(f"{size / 1e6:.4g} MB, {number} rounds of {calls}, load {os.getloadavg()[0]:.1f}")
    print(f"  {'':20} {'ms':>8} {'best':>8} {'GB/s':>6}  busy cores of client, and server (by thread)")
    for system, found in seconds.items():
        middle_s = statistics.median(found)
        after = running[system].cpu_s()
        busy = [_busy(b, a, wall_s[system]) for b, a in zip(before[system], after, strict=True)]
        times = f"{1e3 * middle_s:8.2f} {1e3 * min(found):8.2f} {size / 1e9 / middle_s:6.2f}"
        print(f"  {system:20} {times}  {'; '.join(busy)}", flush=True)


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--serve"]:
        return serve(sys.argv[2])
    if sys.argv[1:2] == ["--send"]:
        return be_client(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", help="10^6 bytes of each message, separated by commas")
    parser.add_argument("--threads", help="numbers of threads a side, separated by commas; by default 1, 2, 4, 8")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--budget-s", type=float, default=30.0, help="of all sizes together, after three rounds each")
    parser.add_argument("--slow", choices=("client", "server"), help="that side without AES instructions")
    given = parser.parse_args()
    if reason := _native.tls_not_viable():
        raise SystemExit(reason)
    sizes = (
        [4 * round(float(word) * 1e6 / 4) for word in given.mb.split(",")]
        if given.mb
        else [int(s * 1e6) for s in SIZES]
    )
    cores = len(os.sched_getaffinity(0))
    threads = (
        [int(word) for word in given.threads.split(",")] if given.threads else [1, 2, *(n for n in (4, 8) if n < cores)]
    )
    return measure(sizes, threads, given.rounds, given.budget_s, given.slow)


if __name__ == "__main__":
    main()
