"""Two workers of DI-engine's, started with the Python of its environment: `worker.py QUEUE SOCKET`.

The first worker connects to the socket, sends versions, and answers each line {"kind", "nbytes", "calls"} with the
times of so many round trips. With QUEUE "nng" geartrain is not even imported.
"""

from __future__ import annotations

import importlib.metadata
import json
import resource
import socket
import sys
import threading
import time
from typing import Any

if sys.argv[1:2] != ["nng"] and __name__ in ("__main__", "__mp_main__"):
    import geartrain.integrations.di_engine  # noqa: F401

TIMEOUT_S = 60.0


def value_of(kind: str, nbytes: int) -> Any:
    """The emitted value."""
    import torch

    if kind == "tensor":
        return torch.ones(nbytes // 4)
    if kind == "model":
        return torch.nn.ParameterDict(
            {f"layer{i}": torch.nn.Parameter(torch.ones(nbytes // 50 // 4), requires_grad=False) for i in range(50)}
        ).state_dict()
    import treetensor.torch as ttorch

    pixels = nbytes // 64 // 2
    return [
        ttorch.as_tensor(
            {
                "obs": torch.ones(pixels, dtype=torch.uint8),
                "next_obs": torch.ones(pixels, dtype=torch.uint8),
                "action": torch.tensor([i]),
                "reward": torch.tensor([1.0]),
                "done": torch.tensor(False),
            }
        )
        for i in range(64)
    ]


def emit_in_turn(control: str) -> None:
    """The first worker."""
    from ding.framework import Parallel

    parallel, back = Parallel(), threading.Event()
    parallel.on("pong", lambda _: back.set())
    until_s = time.monotonic() + TIMEOUT_S
    while not back.is_set():  # nng drops events for peers that are not connected yet
        if time.monotonic() > until_s:
            raise TimeoutError("the two workers do not find each other")
        parallel.emit("ping", 0)
        back.wait(0.5)
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(control)
        packages = ("DI-engine", "pynng", "torch", "numpy", "geartrain")
        versions = {f"{name} (di)": importlib.metadata.version(name) for name in packages if _is_installed(name)}
        stream.sendall(json.dumps({"versions": versions}).encode() + b"\n")
        values: dict[tuple[str, int], Any] = {}
        for line in stream.makefile():
            asked = json.loads(line)
            key = asked["kind"], asked["nbytes"]
            if key not in values:
                values = {key: value_of(*key)}
            try:
                answer = round_trips(parallel, back, values[key], asked["calls"])
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            stream.sendall(json.dumps(answer).encode() + b"\n")


def round_trips(parallel: Any, back: threading.Event, value: Any, calls: int) -> dict[str, Any]:
    """Seconds of each."""
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    cpu_s, began_s = time.process_time(), time.perf_counter()
    for _ in range(calls):
        back.clear()
        parallel.emit("ping", value)
        if not back.wait(TIMEOUT_S):
            raise TimeoutError(f"no acknowledgement within {TIMEOUT_S:g} s: the event was lost")
    seconds, cpu_seconds = time.perf_counter() - began_s, time.process_time() - cpu_s
    disturbed = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw != switches
    return {"seconds": seconds / calls, "cpu_seconds": cpu_seconds / calls, "disturbed": disturbed}


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def work(control: str) -> None:
    """Main function of each worker."""
    import torch
    from ding.framework import Parallel

    torch.set_num_threads(1)
    parallel = Parallel()
    if parallel.node_id == 0:
        emit_in_turn(control)
        return
    parallel.on("ping", lambda _: parallel.emit("pong", 1))
    threading.Event().wait()


def main() -> None:
    """Starts both."""
    from ding.framework import Parallel

    Parallel.runner(n_parallel_workers=2, mq_type=sys.argv[1], topology="mesh")(work, sys.argv[2])


if __name__ == "__main__":
    main()
