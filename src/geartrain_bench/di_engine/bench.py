"""DI-engine's events over its own message queue and over geartrain's: a value emitted, and an acknowledgement.

Both are driven through DI-engine's `Parallel`, between two of its workers on this host: `emit(value)` in one, whose
listener in the other emits an acknowledgement. Timed: from the first emit until the acknowledgement's listener runs, so
the threads of DI-engine's event loops are in all figures. It needs an environment with DI-engine and geartrain in it:

    geartrain bench di-engine --baseline-python di=/path/to/python

Threats to validity. nng's workers are linked by its `ipc`, as DI-engine links the workers of one command; geartrain
chooses shared memory. Across hosts both use TCP, and differ less. nng does not know whether an event was taken, and
drops it when there is no room: geartrain acknowledges each, and that is in its figures. The floor is one warm copy of
the bytes in one process, without any message; for the values that are not one tensor, of the bytes of their tensors.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import geartrain_bench.harness.report as report
import geartrain_bench.harness.timing as harness
from geartrain.core.lifetime import on_error
from geartrain.errors import GeartrainError
from geartrain_bench.harness.baselines import BaselineError
from geartrain_bench.harness.timing import BenchResult, Clock, Lap, System, lap, take_turns

WORKER = Path(__file__).with_name("worker.py")
SYSTEMS = {"geartrain": "geartrain", "nng": "nng (DI-engine's default)"}
SIZES = (1_280, 1_310_720, 41_943_040)
LARGE = 335_544_320


@dataclass(frozen=True)
class Case:
    """The emitted value: one tensor of so many bytes, or a value that the worker identifies by its kind."""

    name: str
    kind: str
    nbytes: int
    calls: int


CASES = [
    *(
        Case(
            f"{size / 1e6:,.4g} MB" if size > 1e6 else f"{size / 1e3:,.4g} KB",
            "tensor",
            size,
            max(1, min(50, 10_000_000 // size)),
        )
        for size in SIZES
    ),
    Case("64 transitions of 96 KB", "transitions", 64 * 98_304, 2),
    Case("a model of 50 tensors, 10 MB", "model", 50 * 204_800, 2),
]


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    baselines: dict[str, str] | None = None,
    full: bool = False,
) -> BenchResult:
    """Measures, prints the tables, writes the requested files, and returns the result.

    Args:
        quick: fewer laps.
        full: 320 MB as well.
        baselines: {"di": the Python of an environment with DI-engine and geartrain}.

    Raises:
        GeartrainError: there is no such environment, or no worker starts in it.
    """
    baselines = baselines or {}
    if "di" not in baselines:
        raise GeartrainError(
            "this benchmark needs --baseline-python di=/path/to/python of an environment with DI-engine in it"
        )
    began_s = time.monotonic()
    result = harness.new_result("di-engine", quick=quick, baselines=["di"], packages=("numpy",))
    if full:
        result.command += " --full"
    for name in baselines.keys() - {"di"}:
        result.baselines_missing[name] = "unknown to this benchmark"
    cases = CASES + [Case(f"{LARGE / 1e6:,.4g} MB", "tensor", LARGE, 1)] * full
    clock = Clock(40.0 if quick else 150.0, len(cases))
    with contextlib.ExitStack() as stack:
        pairs = {system: stack.enter_context(Pair(system, baselines["di"])) for system in SYSTEMS}
        result.versions.update(pairs["geartrain"].versions)
        for case in cases:
            if not result.deadline.allows(case.name):
                continue
            harness.say(f"emitting {case.name}")
            _measure(case, pairs, 7 if quick else 15, clock, result)
    harness.finish(result, began_s)
    report.report(result, json_path, plot_path)
    return result


def _measure(case: Case, pairs: dict[str, Pair], repeats: int, clock: Clock, result: BenchResult) -> None:
    source = np.ones(case.nbytes // 4, np.float32)
    copy = source.copy()

    def copies() -> None:
        for _ in range(case.calls):
            np.copyto(copy, source)

    floor = System("memcpy", lambda: lap(case.calls, copies))
    systems = [System(SYSTEMS[name], lambda pair=pair: pair.lap(case)) for name, pair in pairs.items()]  # type: ignore[misc]
    laps = take_turns([*systems, floor], repeats=repeats, budget_s=clock.next_case_s(60.0), warmups=2)
    medians = {name: float(np.median([one.seconds for one in of_one])) for name, of_one in laps.items()}
    floor_s = medians["memcpy"]
    for name, of_one in laps.items():
        seconds = [one.seconds for one in of_one]
        result.rows.append(harness.time_row(case.name, name, "emit, acknowledged", "ms", seconds, floor_s))
        result.rows.append(harness.rate_row(case.name, name, "throughput", "GB/s", seconds, case.nbytes / 1e9, floor_s))
    ratio = medians[SYSTEMS["nng"]] / medians[SYSTEMS["geartrain"]]
    result.notes.append(f"{case.name}: geartrain takes 1/{ratio:.1f} of the time of nng")


class Pair:
    """Two workers of DI-engine, linked by one kind of queue; the first receives requests over a socket."""

    def __init__(self, system: str, python: str, setup_s: float = 180.0) -> None:
        self.system = system
        self._directory = tempfile.TemporaryDirectory(prefix="geartrain-bench-")
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        place = str(Path(self._directory.name) / "control")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(place)
        listener.listen(1)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [python, str(WORKER), system, place],
            stdin=subprocess.DEVNULL,
            stdout=self._stderr,
            stderr=self._stderr,
            env=environment,
            start_new_session=True,
        )
        self._stream: socket.socket | None = None
        self._unread = b""
        with on_error(self.close):
            with listener:
                self._stream = self._accept(listener, time.monotonic() + setup_s)
            self.versions: dict[str, str] = self._answer(setup_s)["versions"]

    def lap(self, case: Case) -> Lap:
        """One lap: so many emits, one after the other."""
        assert self._stream is not None
        asked = {"kind": case.kind, "nbytes": case.nbytes, "calls": case.calls}
        self._stream.sendall(json.dumps(asked).encode() + b"\n")
        got = self._answer(120.0)
        return Lap(got["seconds"], got["cpu_seconds"], got["disturbed"])

    def close(self) -> None:
        """Kills the workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=30)
        if self._stream is not None:
            self._stream.close()
        self._stderr.close()
        self._directory.cleanup()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _accept(self, listener: socket.socket, until_s: float) -> socket.socket:
        listener.settimeout(0.5)
        while time.monotonic() < until_s:
            if self._process.poll() is not None:
                raise BaselineError(f"DI-engine over {self.system} did not start: {self._last_words()}")
            with contextlib.suppress(TimeoutError):
                return listener.accept()[0]
        raise BaselineError(f"DI-engine over {self.system} did not start in time: {self._last_words()}")

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._stream is not None
        until_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._stream, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, until_s - time.monotonic())):
                    raise BaselineError(f"DI-engine over {self.system} gave no answer within {timeout_s:g} s")
                more = self._stream.recv(65536)
                if not more:
                    raise BaselineError(f"DI-engine over {self.system} ended: {self._last_words()}")
                self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BaselineError(f"DI-engine over {self.system}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines: Iterator[str] = reversed(self._stderr.read().decode(errors="replace").strip().splitlines())
        return next(lines, "no output")


if __name__ == "__main__":
    report.main_of("di_engine", main)
