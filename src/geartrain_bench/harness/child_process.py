"""Child process in an environment of its own: requests and answers as lines of JSON, every wait with a deadline."""

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
from types import TracebackType
from typing import TYPE_CHECKING, Any

from geartrain.errors import GeartrainError

if TYPE_CHECKING:
    from typing_extensions import Self


class BaselineError(GeartrainError):
    """A baseline that did not start, failed, or did not answer in time; carries the reason."""


class AnsweringProcess:
    """A worker that reads requests from its standard input. A context manager; leaving it ends all its processes.

    It leads a session of its own, so that its children end with it. PYTHONPATH is not inherited.
    """

    def __init__(self, name: str, python: str, worker: Path, environment: Mapping[str, str]) -> None:
        """Starts `python worker`, with these variables added. Raises `BaselineError`."""
        self.name = name
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        try:
            self._process = subprocess.Popen(
                [python, str(worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env={**inherited, **environment},
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise BaselineError(f"{python} does not start: {error}") from None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._unread = b""

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer. Raises `BaselineError`: the process ended, was late, or answered with an error."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise BaselineError(f"{self.name}: it has ended; {self._last_words()}") from None
        answer: dict[str, Any] = json.loads(self._line(timeout_s))
        if "error" in answer:
            raise BaselineError(answer["error"])
        return answer

    def _line(self, timeout_s: float) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        ends_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left_s = ends_s - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    raise BaselineError(f"{self.name}: no answer within {timeout_s:g} s; {self._last_words()}")
                more = os.read(stdout.fileno(), 1 << 16)
                if not more:
                    raise BaselineError(f"{self.name}: it has ended; {self._last_words()}")
                self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return "its last words: " + (" | ".join(lines[-3:])[-400:] or "none")

    def close(self) -> None:
        """Kills it and its children."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=30)
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()
