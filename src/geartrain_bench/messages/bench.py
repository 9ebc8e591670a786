"""Messages between two processes on one host: calls with small values, big tensors one way with an acknowledgement.

The systems of this environment (geartrain, torch.distributed.rpc, raw sockets, memcpy) are interleaved. ZeroMQ, gRPC
and Ray follow, one at a time, each in its own environment (`--baseline-python zmq=/path/to/python`), because their
idle processes would take time from the others. `geartrain tcp, TLS`
is measured where the environment names certificates
(GEARTRAIN_TLS_CERT and the others, docs/transport.md); no other system then uses them.

Threats to validity. Both processes share the cores with all other processes: on two cores a third process
shows at once, as context switches. Which core the other process is woken on decides more about a blocking call than
what is measured, so calls are measured with both processes on one core, and on a core each, as well as where the
scheduler puts them. `geartrain shm` delivers big tensors in place, and so does ZeroMQ; `geartrain shm,
copied`, torch, gRPC and the raw sockets fill memory, the raw sockets the same every time. The floor of a call is a raw
Unix socket's round trip with no Python values in it; the floor of a transfer is one warm copy of its bytes in one
process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

import geartrain_bench.harness.report as report
import geartrain_bench.harness.timing as harness
import geartrain_bench.messages.report as p2p_report
from geartrain.transport.tls import TLS, VARIABLES
from geartrain_bench.harness.child_process import BaselineError
from geartrain_bench.harness.timing import BenchResult, Clock, System, lap, take_turns
from geartrain_bench.messages.baseline_client import MODULES, SYSTEMS, Foreign
from geartrain_bench.messages.worker import acknowledge, echo

#: The columns of the torchrpc page: float32 tensors of so many bytes.
SIZES = (1_280, 20_480, 1_310_720, 10_485_760, 41_943_040, 671_088_640, 1_342_177_280)
IN_FLIGHT = 64


@dataclass(frozen=True)
class Plan:
    """Cases to measure, and their time limits."""

    sizes: tuple[int, ...]
    repeats: int
    budget_s: float  # of all interleaved systems
    foreign_s: float  # of each that is measured alone


FULL = Plan(SIZES, 12, 170.0, 30.0)
QUICK = Plan(SIZES[:5], 7, 40.0, 6.0)
#: Systems that differ from another only for big tensors are not timed with small calls, and spinning makes no
#: difference to big ones.
ONLY_TRANSFERS = ("geartrain shm, copied",)
ONLY_CALLS = ("geartrain shm, spinning",)
ONE_WAY = "one way, acknowledged"


@dataclass
class Client:
    """One system: how to call `echo` and `acknowledge` over it, and to have several calls in flight."""

    name: str
    echo: Callable[[Any], Any]
    acknowledge: Callable[[Any], Any]
    start: Callable[[Any], Any] | None = None
    wait: Callable[[Any], Any] | None = None


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    baselines: dict[str, str] | None = None,
) -> BenchResult:
    """Measures, prints the tables, writes the requested files, and returns the result.

    torch.distributed.rpc is measured where torch is installed, and `zmq`, `grpc` and `ray` where they are installed
    here or an interpreter is given in `baselines`.
    """
    result = run(QUICK if quick else FULL, baselines or {}, quick=quick)
    p2p_report.show(result, json_path, plot_path)
    return result


def run(plan: Plan, baselines: dict[str, str], *, quick: bool = False) -> BenchResult:
    """All the plan's cases."""
    began_s = time.monotonic()
    result = harness.new_result("p2p", quick=quick, baselines=baselines, packages=("numpy", "torch"))
    for name in set(baselines) - set(SYSTEMS):
        result.baselines_missing[name] = f"unknown to this benchmark, which has {', '.join(SYSTEMS)}"
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(opened) for opened in _clients(plan)]
        if importlib.util.find_spec("torch") is not None:
            clients.append(stack.enter_context(_torch()))
        else:
            result.baselines_missing["TensorPipe"] = "torch is not installed here"
        if TLS.of_environment() is None:
            result.baselines_missing["geartrain tcp, TLS"] = (
                f"the environment names no certificates ({VARIABLES[0]}, ...)"
            )
        clock = Clock(plan.budget_s, 1 + len(CALLS) * len(PLACES) + len(plan.sizes))
        _calls(plan, clients, clock, result)
        _transfers(plan, clients, clock, result)
    for package in SYSTEMS:
        python = baselines.get(package) or (sys.executable if importlib.util.find_spec(MODULES[package]) else None)
        if python is None:
            result.baselines_missing[package] = f"not installed here (--baseline-python {package}=/path/to/python)"
        else:
            _foreign(package, python, plan, result)
    metrics = list(dict.fromkeys(row.metric for row in result.rows))
    cases = list(dict.fromkeys(row.case for row in result.rows))
    result.rows.sort(key=lambda row: (metrics.index(row.metric), cases.index(row.case)))
    return harness.finish(result, began_s)


def _foreign(package: str, python: str, plan: Plan, result: BenchResult) -> None:
    for name, system in SYSTEMS[package].items():
        if not result.deadline.allows(name):
            continue
        harness.say(f"{name}, alone")
        try:
            with Foreign(python, system) as peer:
                result.versions.update(peer.versions)
                _one_foreign(name, peer, plan, result)
        except BaselineError as error:
            result.baselines_missing[name] = str(error)


def _one_foreign(name: str, peer: Foreign, plan: Plan, result: BenchResult) -> None:
    floors = {(row.case, row.metric): row.p50 for row in result.rows if row.ratio_to_floor == 1.0}
    clock = Clock(plan.foreign_s, 3 + len(plan.sizes))

    def seconds(calls: int, most: int, what: str, **how: int) -> list[float]:
        """Seconds of laps within its share of the time: two at least, the first one not counted."""
        ends_s = time.monotonic() + clock.next_case_s(15.0)
        found: list[float] = []
        while len(found) < 2 or (len(found) <= most and time.monotonic() < ends_s):
            found.append(peer.lap(what, calls, **how).seconds)
        return found[1:]

    for case, nbytes in CALLS.items():
        if (case, "call") not in floors:
            continue
        floor_s = floors[case, "call"] * 1e-6
        found = seconds(100, plan.repeats, "echo", nbytes=nbytes)
        result.rows.append(harness.time_row(case, name, "call", "us", found, floor_s))
        if not nbytes:
            best_s = 1 / floors["1 in flight", "calls"]
            result.rows.append(harness.rate_row("1 in flight", name, "calls", "1/s", found, 1.0, best_s))
    case = f"{IN_FLIGHT} in flight"
    if (case, "calls") in floors:
        found = seconds(500, plan.repeats, "in flight", open_calls=IN_FLIGHT)
        result.rows.append(harness.rate_row(case, name, "calls", "1/s", found, 1.0, 1 / floors[case, "calls"]))
    for size in plan.sizes:
        if (size_name(size), ONE_WAY) not in floors:
            continue
        found = seconds(max(1, min(50, 20_000_000 // size)), plan.repeats, "acknowledge", nbytes=size)
        add_transfer(result, name, size, found, floors[size_name(size), ONE_WAY] * 1e-3)


#: Echo calls: case -> bytes of a tensor, or 0 for a number.
CALLS = {"an integer": 0, "a tensor of 8 KB": 8_000}
#: Where the two processes run: added to the case's name -> the client's core and the servers', of those that there are;
#: None where the scheduler says.
PLACES: dict[str, tuple[int, int] | None] = {"": None, ", on one core": (0, 0), ", on a core each": (0, 1)}


def _calls(plan: Plan, clients: list[Client], clock: Clock, result: BenchResult) -> None:
    clients = [client for client in clients if client.name not in ONLY_TRANSFERS]
    for (plain, nbytes), (place, cores) in itertools.product(CALLS.items(), PLACES.items()):
        case = plain + place
        if not result.deadline.allows(f"calls with {case}"):
            continue
        harness.say(f"calls with {case}")
        value = _tensor(nbytes) if nbytes else 7

        def one_lap(client: Client, value: Any = value) -> harness.Lap:
            return lap(100, lambda: [client.echo(value) for _ in range(100)])

        systems = [System(c.name, lambda c=c: one_lap(c), floor=c.name == "raw unix") for c in clients]  # type: ignore[misc]
        with placed(cores) as is_placed:
            if not is_placed:
                result.notes.append(f"calls with {case}: there is one core")
                continue
            laps = take_turns(systems, repeats=plan.repeats, budget_s=clock.next_case_s(30.0), warmups=2)
        floor_s = median_s(laps["raw unix"])
        for name, of_one in laps.items():
            seconds = [one.seconds for one in of_one]
            result.rows.append(harness.time_row(case, name, "call", "us", seconds, floor_s))
            if not nbytes and cores is None:
                result.rows.append(harness.rate_row("1 in flight", name, "calls", "1/s", seconds, 1.0, floor_s))
    if not result.deadline.allows(f"{IN_FLIGHT} calls in flight"):
        return
    harness.say(f"{IN_FLIGHT} calls in flight")

    def many(client: Client) -> harness.Lap:
        assert client.start is not None
        assert client.wait is not None
        start, wait = client.start, client.wait

        def body() -> None:
            open_calls: list[Any] = []
            for _ in range(500):
                open_calls.append(start(7))
                if len(open_calls) == IN_FLIGHT:
                    wait(open_calls.pop(0))
            for call in open_calls:
                wait(call)

        return lap(500, body)

    systems = [System(c.name, lambda c=c: many(c)) for c in clients if c.start is not None]  # type: ignore[misc]
    laps = take_turns(systems, repeats=plan.repeats, budget_s=clock.next_case_s(30.0))
    best_s = min(median_s(of_one) for of_one in laps.values())
    for name, of_one in laps.items():
        seconds = [one.seconds for one in of_one]
        result.rows.append(harness.rate_row(f"{IN_FLIGHT} in flight", name, "calls", "1/s", seconds, 1.0, best_s))
    result.notes.append(
        f"calls with {IN_FLIGHT} in flight have no floor: the ratio is to the fastest interleaved system"
    )


def _transfers(plan: Plan, clients: list[Client], clock: Clock, result: BenchResult) -> None:
    clients = [client for client in clients if client.name not in ONLY_CALLS]
    for size in plan.sizes:
        if not result.deadline.allows(f"tensors of {size_name(size)}"):
            continue
        harness.say(f"tensors of {size_name(size)}")
        value, copy = _tensor(size), _tensor(size)
        calls = max(1, min(50, 20_000_000 // size))

        def one_lap(body: Callable[[Any], Any], calls: int = calls, value: Any = value) -> harness.Lap:
            return lap(calls, lambda: [body(value) for _ in range(calls)])

        systems = [System(c.name, lambda c=c: one_lap(c.acknowledge)) for c in clients]  # type: ignore[misc]
        systems.append(System("memcpy", lambda copy=copy: one_lap(lambda v: np.copyto(copy, v)), floor=True))  # type: ignore[misc]
        most = plan.repeats if size < 500_000_000 else 4
        laps = take_turns(systems, repeats=most, budget_s=clock.next_case_s(40.0), warmups=2)
        floor_s = median_s(laps["memcpy"])
        for name, of_one in laps.items():
            add_transfer(result, name, size, [one.seconds for one in of_one], floor_s)


def add_transfer(result: BenchResult, name: str, size: int, seconds: list[float], floor_s: float) -> None:
    """The two rows of a system for messages of so many bytes: milliseconds and GB/s."""
    case = size_name(size)
    result.rows.append(harness.time_row(case, name, ONE_WAY, "ms", seconds, floor_s))
    result.rows.append(harness.rate_row(case, name, "throughput", "GB/s", seconds, size / 1e9, floor_s))


def median_s(laps: list[harness.Lap]) -> float:
    """Seconds of a call in these laps."""
    return float(np.median([one.seconds for one in laps]))


def size_name(nbytes: int) -> str:
    """A case's."""
    return f"{nbytes / 1e6:,.4g} MB"


# --- the systems ------------------------------------------------------------------------------------------------------


_servers: list[int] = []  # processes of `worker`


@contextlib.contextmanager
def placed(cores: tuple[int, int] | None) -> Iterator[bool]:
    """This process and all workers on these of the cores that there are; False where there are too few of them."""
    usable = sorted(os.sched_getaffinity(0))
    if cores is not None and max(cores) >= len(usable):
        yield False
        return
    for pid, core in [(os.getpid(), 0), *((server, 1) for server in _servers)]:
        _pin(pid, set(usable) if cores is None else {usable[cores[core]]})
    try:
        yield True
    finally:
        for pid in [os.getpid(), *_servers]:
            _pin(pid, set(usable))


def _pin(pid: int, cores: set[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)


@contextlib.contextmanager
def worker(*arguments: str) -> Iterator[str]:
    """A `worker.py` process with these arguments; the first line that it printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "geartrain_bench.messages.worker", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if arguments[0] != "torch" else subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    _servers.append(process.pid)
    try:
        line = process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the process of {' '.join(arguments)} ended at its start: {process.wait()}")
        yield line
    finally:
        _servers.remove(process.pid)
        process.kill()
        process.communicate()


def _clients(plan: Plan) -> Iterator[contextlib.AbstractContextManager[Client]]:
    yield _rpc("geartrain shm", "shm", 0.0)
    yield _rpc("geartrain shm, spinning", "shm", 100.0)
    yield _rpc("geartrain shm, copied", "shm", 50.0, views=False)  # as nodes are by default
    yield _rpc("geartrain tcp", "tcp", 0.0)
    if TLS.of_environment() is not None:
        yield _rpc("geartrain tcp, TLS", "tcp", 0.0, tls=True)
    yield _raw("unix", max(plan.sizes))
    yield _raw("tcp", max(plan.sizes))


@contextlib.contextmanager
def _rpc(name: str, transport: str, spin_us: float, views: bool = True, tls: bool = False) -> Iterator[Client]:
    import geartrain.rpc as rpc

    shown: TLS | Literal[False] | None = TLS.of_environment() if tls else False
    with worker("rpc", transport, str(spin_us), "views" if views else "copies", "" if tls else "plain") as address:
        peers = {"server": address}
        options = rpc.NodeOptions(spin_us=spin_us)
        with rpc.Node("client", peers=peers, transport=transport, timeout_s=120, tls=shown, options=options) as node:
            yield Client(
                name,
                lambda value: node.call("server", "echo", value),
                lambda value: node.call("server", "acknowledge", value),
                lambda value: node.call_async("server", "echo", value),
                lambda future: future.result(),
            )


@contextlib.contextmanager
def _raw(family: str, most_bytes: int) -> Iterator[Client]:
    with worker("raw", family, str(most_bytes)) as place:
        if family == "unix":
            stream = socket.socket(socket.AF_UNIX)
            stream.connect("\0" + place)
        else:
            stream = socket.create_connection(("127.0.0.1", int(place)))
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def call(value: Any) -> None:
            data = b"" if isinstance(value, int) else memoryview(value).cast("B")
            stream.sendall(struct.pack("<q", len(data)))
            if data:
                stream.sendall(data)
            stream.recv(1)

        with stream:
            yield Client(f"raw {family}", call, call)


@contextlib.contextmanager
def joined_torch(device_maps: dict[str, dict[Any, Any]] | None = None) -> Iterator[None]:
    """torch.distributed.rpc between this process, `client`, and another, `server`, with the GPUs' map if given."""
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    options = rpc.TensorPipeRpcBackendOptions(device_maps=device_maps)
    with worker("torch", port):
        rpc.init_rpc("client", rank=0, world_size=2, rpc_backend_options=options)  # type: ignore[no-untyped-call]
        yield
        rpc.shutdown(graceful=False)


@contextlib.contextmanager
def _torch() -> Iterator[Client]:
    import torch
    from torch.distributed import rpc

    def tensor(value: Any) -> Any:
        return value if isinstance(value, int) else torch.from_numpy(value)

    with joined_torch():
        yield Client(
            "TensorPipe",
            lambda value: rpc.rpc_sync("server", echo, args=(tensor(value),)),
            lambda value: rpc.rpc_sync("server", acknowledge, args=(tensor(value),)),
            lambda value: rpc.rpc_async("server", echo, args=(value,)),
            lambda future: future.wait(),
        )


def _tensor(nbytes: int) -> Any:
    return np.ones(nbytes // 4, np.float32)


if __name__ == "__main__":
    report.main_of("messages", main)
