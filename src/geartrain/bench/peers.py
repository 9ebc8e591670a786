"""The bench's end of peer_worker.py: another replay buffer in a process and an environment of its own."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from geartrain.bench.harness import Lap
from geartrain.errors import GeartrainError
from geartrain.schema import Field

WORKER = Path(__file__).with_name("peer_worker.py")
#: Environment variables that make a variant of a peer.
VARIANTS = {"torchrl-thp": {"THP_MEM_ALLOC_ENABLE": "1"}}


class PeerError(GeartrainError):
    """A peer that did not start, failed, or did not answer in time; says why."""


class PeerProcess:
    """A peer that is set up and waits to be timed. A context manager; leaving it kills the peer.

    `kind` is "rows" for a buffer of rows with these fields, "weights" for the peer's sampler of so many priorities.
    Raises `PeerError` from everything that asks the peer something. Every wait has a deadline.
    """

    def __init__(
        self, name: str, python: str, rows: int, fields: Mapping[str, Field], setup_s: float = 240.0, kind: str = "rows"
    ) -> None:
        self.name = name
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        environment = {**os.environ, "OMP_NUM_THREADS": "2", **VARIANTS.get(name, {})}
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
            raise PeerError(f"{python} does not start: {error}") from None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._unread = b""
        shapes = {name: [list(field.shape), field.dtype] for name, field in fields.items()}
        try:
            about = self._ask({"do": "setup", "kind": kind, "peer": name, "rows": rows, "fields": shapes}, setup_s)
        except BaseException:
            self.close()
            raise
        self.versions: dict[str, str] = about["versions"]
        self.rows = int(about["rows"])

    def threads(self, n: int) -> int:
        """Sets how many threads the peer may use; returns how many it can."""
        return int(self._ask({"do": "threads", "n": n}, 30)["n"])

    def lap(self, what: str, batch: int, calls: int, timeout_s: float = 120.0) -> Lap:
        """One lap of what the peer can do: `laps` names it."""
        got = self._ask({"do": what, "batch": batch, "calls": calls}, timeout_s)
        return Lap(got["seconds"], got["cpu_seconds"], got["disturbed"])

    def laps(self) -> list[str]:
        """What it can be timed at."""
        return [str(what) for what in self._ask({"do": "laps"}, 30)["laps"]]

    def counts(self, draws: int, timeout_s: float = 300.0) -> list[int]:
        """Draws with equal weights and counts the upper half's row numbers mod 8. It keeps equal weights."""
        return [int(count) for count in self._ask({"do": "counts", "draws": draws}, timeout_s)["counts"]]

    def close(self) -> None:
        """Kills the peer and whatever it started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=30)
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                stream.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"{self.name} ended: {self._last_words()}") from None
        answer: dict[str, Any] = json.loads(self._read_line(timeout_s))
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _read_line(self, timeout_s: float) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        ends_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left_s = ends_s - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    raise PeerError(f"{self.name} gave no answer within {timeout_s:g} s")
                more = os.read(stdout.fileno(), 65536)
                if not more:
                    raise PeerError(f"{self.name} ended: {self._last_words()}")
                self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
