"""Client of baselines.py: ZeroMQ, gRPC or Ray, in an environment of its own."""

from __future__ import annotations

import contextlib
from pathlib import Path

from geartrain.core.lifetime import on_error
from geartrain_bench.harness.child_process import AnsweringProcess, BaselineError
from geartrain_bench.harness.timing import Lap

WORKER = Path(__file__).with_name("baselines.py")
#: What `--baseline-python NAME=` may name -> the systems of that package, as the table names them, and as the worker
#: does.
SYSTEMS = {
    "zmq": {"ZeroMQ ipc": "zmq ipc", "ZeroMQ tcp": "zmq tcp"},
    "grpc": {"gRPC unix": "grpc unix", "gRPC tcp": "grpc tcp"},
    "ray": {"Ray actor": "ray"},
}
#: The module whose presence says that a package is installed.
MODULES = {"zmq": "zmq", "grpc": "grpc", "ray": "ray"}


class Foreign(AnsweringProcess):
    """One system that is set up and ready to be timed. A context manager; leaving it ends its processes."""

    def __init__(self, python: str, system: str, setup_s: float = 90.0) -> None:
        super().__init__(system, python, WORKER, {"OMP_NUM_THREADS": "1"})
        with on_error(super().close):
            self.versions: dict[str, str] = self.ask({"do": "setup", "system": system}, setup_s)["versions"]

    def lap(self, what: str, calls: int, *, nbytes: int = 0, open_calls: int = 1, timeout_s: float = 120.0) -> Lap:
        """Seconds of a call, by its own clock. Raises `BaselineError`."""
        request = {"do": "lap", "what": what, "calls": calls, "bytes": nbytes, "open": open_calls}
        answer = self.ask(request, timeout_s)
        return Lap(answer["seconds"], answer["seconds"], answer["disturbed"])

    def close(self) -> None:
        """Asks it to end its own processes, then kills the rest."""
        with contextlib.suppress(BaselineError):
            self.ask({"do": "finish"}, 20.0)
        super().close()
