"""A child process whose output is always read, so that it never waits for a reader; and what several tests start."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import preloaded
import pytest
from deadlines import patience

HERE = Path(__file__).parent


class Process:
    """A child, and the lines that it says.

    Threads read both pipes from the first moment on: a child that says a line a step fills a pipe of 64 KiB in a
    second or two, and would stand still from then on, and everybody with it who waits for it.
    """

    def __init__(self, *command: str, **environment: str) -> None:
        self.child = preloaded.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment}
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(pipe, put), daemon=True)
            for pipe, put in ((self.child.stdout, self._lines.put), (self.child.stderr, self._errors.append))
        ]
        for each in self._readers:
            each.start()

    @staticmethod
    def _read(pipe: IO[str], put: Any) -> None:
        with pipe:
            for line in pipe:
                put(line)
        put("")

    def errors(self) -> str:
        """What it has written to stderr."""
        return "".join(self._errors)

    def line(self) -> str:
        """The next line; fails if the child has ended, or says nothing for a minute."""
        try:
            line = self._lines.get(timeout=patience(60))
        except queue.Empty:
            raise AssertionError(f"it says nothing; {self.errors()}") from None
        if not line:
            self._lines.put("")
            raise AssertionError(f"it has ended; {self.errors()}")
        return line.strip()

    def say(self) -> dict[str, Any]:
        return json.loads(self.line())

    def end(self, timeout_s: float = 60.0) -> list[str]:
        """The lines that are left, once it has ended; kills it after `timeout_s`."""
        try:
            self.child.wait(patience(timeout_s))
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        for each in self._readers:
            each.join(patience(10))
        lines = []
        while not self._lines.empty():
            lines.append(self._lines.get())
        return [line.strip() for line in lines if line]

    def last(self) -> dict[str, Any]:
        """What it says last."""
        lines = self.end()
        assert lines, self.errors()
        return json.loads(lines[-1])

    def kill(self) -> None:
        self.child.kill()
        self.end()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.kill()


def reducer_process(processes: list[Process], *arguments: str, **environment: str) -> tuple[Process, str]:
    process = Process(sys.executable, "-m", "geartrain", "reducer", *arguments, **environment)
    processes.append(process)
    return process, process.line().split()[3].rstrip(",")
