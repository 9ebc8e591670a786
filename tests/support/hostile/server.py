"""Fork server of the scenarios: `python -m hostile.server MODULES` reads orders from stdin, a line of JSON each.

A scenario runs in a fork, which has NumPy, geartrain and the modules of the command line imported already, and ends as
an interpreter does: all its objects are finalised, in whatever order that comes to. So what a program leaves alive is
tested for what it costs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hanging

#: What an interpreter or the C++ runtime writes when a process ends the wrong way.
LAST_WORDS = ("Fatal Python error", "terminate called", "Exception ignored", "Segmentation fault", "nanobind: leaked")
SHM = Path("/dev/shm")
_TEXT = 20_000  # characters of output that a finding shows
FACTORY_MODULES = tuple(
    f"hostile.{name}" for name in ("groups", "jobs", "lerobot", "peers", "rlinf", "sb3", "stores", "tasks")
)
#: What factories import of others: no collection in a fork goes through it.
FOREIGN = ("asyncio", "gymnasium", "http.client", "multiprocessing.context", "numpy", "urllib.request")


class Server:
    """The client's side."""

    def __init__(self, *modules: str, factories: Sequence[str] = FACTORY_MODULES) -> None:
        """Starts it.

        Args:
            modules: imported there before any scenario runs, where they are installed.
            factories: modules of those that it can be asked for. A fork costs what it has imported.
        """
        here = Path(__file__).resolve().parent.parent
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("GEARTRAIN_SECRET", None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hostile.server", *factories, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def run(self, subject: str, scenario: str, **options: Any) -> dict[str, Any]:
        """Runs a scenario. Returns findings (a list), skipped (a reason or None), output and seconds.

        Args:
            subject: name of a factory.
            scenario: name of a scenario.
            options: factor (of deadlines), limit_s, seed, rounds.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"subject": subject, "scenario": scenario, **options}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the server of hostile callers ended with {self._process.wait()}"
        return dict(json.loads(answer))

    def close(self) -> None:
        """Ends the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve() -> dict[str, Any] | None:
    """Forks a process an order; returns the order in that process, and None at the end."""

    def load(names: Sequence[str]) -> None:
        for name in names:
            with contextlib.nullcontext() if name in FACTORY_MODULES else contextlib.suppress(ImportError):
                importlib.import_module(name)  # factories say what is missing
        gc.collect()

    foreign = [name for name in sys.argv[1:] if not name.startswith(("geartrain.", "hostile."))]
    load([*FOREIGN, *foreign])
    gc.freeze()  # a collection in a fork is not to touch, and so copy, what is here
    load([name for name in sys.argv[1:] if name not in foreign])
    import hostile.scenarios

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        order = json.loads(line)
        prefix = f"hostile-{os.getpid()}"
        order["prefix"] = prefix
        read, write = os.pipe()
        order["write"] = write
        with tempfile.TemporaryFile() as output:
            began_s = time.monotonic()
            child = os.fork()
            if child == 0:
                os.setsid()
                for number in (1, 2):
                    os.dup2(output.fileno(), number)
                os.close(read)
                sys.stdin.close()
                answers.detach()
                if order["scenario"] not in hostile.scenarios.AT_EXIT:  # whose last collection is to reach geartrain
                    gc.freeze()
                return order
            os.close(write)
            code, hung = _wait(child, order["limit_s"])
            seconds = time.monotonic() - began_s
            found = b""
            while select.select([read], [], [], 0)[0] and (more := os.read(read, 1 << 16)):
                found += more
            os.close(read)
            output.seek(0)
            text = output.read().decode(errors="replace")
        said = json.loads(found) if found else {"findings": [], "skipped": None}
        findings = said["findings"]
        if hung is not None:
            done = f", and was done after {said['done_s'] - began_s:.1f} s" if found else ""
            findings.append(f"the process did not end within {order['limit_s']:.0f} s{done} ({hung[0]})")
            text = text[-_TEXT:] + "\n" + hung[1]
        elif code < 0:
            findings.append(f"the process was ended by {signal.Signals(-code).name}")
        elif code > 0 or not found:
            findings.append(f"the process ended with {code}")
        findings += [f"its output has {words!r}" for words in LAST_WORDS if words in text]
        left = _remove(prefix)
        if left and hung is None and code == 0:
            findings.append(f"it left {', '.join(left)} in /dev/shm")
        answer = {**said, "findings": findings, "output": text[-2 * _TEXT :], "seconds": seconds}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return None


def _wait(child: int, limit_s: float) -> tuple[int, tuple[str, str] | None]:
    """The exit code; and what it did, in a line and at length, where it did not end in time."""
    handle = os.pidfd_open(child)
    hung = None
    if not select.select([handle], [], [], limit_s)[0]:
        hung = hanging.describe(child)
        if hanging.show_python_stacks(child):
            select.select([handle], [], [], 0.3)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # with what it has forked
    os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), hung


def _remove(prefix: str) -> list[str]:
    left = [path for path in SHM.iterdir() if prefix in path.name]
    for path in left:
        with contextlib.suppress(OSError):
            path.unlink()
    return sorted(path.name for path in left)


def execute(order: dict[str, Any]) -> None:
    """Runs a scenario in this process, and tells the server what it found."""
    from hostile.scenarios import SCENARIOS, Run
    from hostile.subject import FACTORIES, NotViableError, Tools

    run = Run(FACTORIES[order["subject"]], Tools(order["prefix"], order["factor"]), order["seed"], order["rounds"])
    skipped = None
    try:
        SCENARIOS[order["scenario"]](run)
    except NotViableError as error:
        skipped = str(error)
    said = {"findings": run.findings, "skipped": skipped, "done_s": time.monotonic()}
    os.write(order["write"], json.dumps(said).encode())


if __name__ == "__main__":
    mine = serve()
    if mine is not None:
        execute(mine)
