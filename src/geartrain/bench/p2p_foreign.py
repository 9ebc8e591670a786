"""The bench's end of p2p_peer.py: ZeroMQ, gRPC or Ray, in an environment of its own."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from geartrain.bench.harness import Lap
from geartrain.errors import GeartrainError

WORKER = Path(__file__).with_name("p2p_peer.py")
#: What `--peer-python NAME=` may name -> the systems of that package, as the table names them, and as the worker does.
SYSTEMS = {
    "zmq": {"ZeroMQ ipc": "zmq ipc", "ZeroMQ tcp": "zmq tcp"},
    "grpc": {"gRPC unix": "grpc unix", "gRPC tcp": "grpc tcp"},
    "ray": {"Ray actor": "ray"},
}
#: The module whose presence says that a package is installed.
MODULES = {"zmq": "zmq", "grpc": "grpc", "ray": "ray"}


class ForeignError(GeartrainError):
    """A peer that did not start, failed, or did not answer in time; says why."""


class Foreign:
    """One system that is set up and waits to be timed. A context manager; leaving it ends its processes."""

    def __init__(self, python: str, system: str, setup_s: float = 90.0) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        try:
            self._process = subprocess.Popen(
                [python, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise ForeignError(f"{python} does not start: {error}") from None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._unread = b""
        try:
            self.versions: dict[str, str] = self._ask({"do": "setup", "system": system}, setup_s)["versions"]
        except BaseException:
            self.close()
            raise

    def lap(self, what: str, calls: int, *, nbytes: int = 0, open_calls: int = 1, timeout_s: float = 120.0) -> Lap:
        """Seconds of a call, by its own clock. Raises `ForeignError`."""
        request = {"do": "lap", "what": what, "calls": calls, "bytes": nbytes, "open": open_calls}
        told = self._ask(request, timeout_s)
        return Lap(told["seconds"], told["seconds"], told["disturbed"])

    def _ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ForeignError(f"it has ended: {error}; {self._said()}") from None
        told: dict[str, Any] = json.loads(self._line(timeout_s))
        if "error" in told:
            raise ForeignError(told["error"])
        return told

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        until_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left_s = until_s - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    raise ForeignError(f"no answer within {timeout_s:.0f} s; {self._said()}")
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise ForeignError(f"it has ended; {self._said()}")
                self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _said(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return "its last words: " + (" | ".join(lines[-3:])[:400] or "none")

    def close(self) -> None:
        """Ends its processes."""
        with contextlib.suppress(GeartrainError, OSError):
            self._ask({"do": "finish"}, 20.0)
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def __enter__(self) -> Foreign:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
