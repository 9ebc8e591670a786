"""Subjects that are made where one thread cannot be started: `python -m hostile.thread_limit MODULE [NAME...]`.

Each of the threads that geartrain starts for a subject, Python's and native ones, is in turn the one that the system
refuses. Then the constructor raises an error of geartrain's, or goes on without the thread; nobody waits for whoever
gave up, and no thread, descriptor or segment is left. A line of output is a finding.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import geartrain
from geartrain.errors import GeartrainError
from hostile.subject import FACTORIES, NotViableError, Tools

_PACKAGE = str(Path(geartrain.__file__).parent)
#: Nobody waits for longer than this, on an idle machine; the deadlines of the subjects are 20 s and more.
AT_ONCE_S = 3.0
#: Threads and descriptors that are about to end do so within this.
SETTLED_S = 3.0
HUNG_S = 120.0


def library(folder: Path) -> Path | None:
    """Compiles what LD_PRELOAD needs; None where no compiler is at hand."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    made = folder / "thread_limit.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True)
    return made


class _Limit:
    """Which of geartrain's threads cannot be started; a factory's own always can."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        start = threading.Thread.start

        def start_or_not(thread: threading.Thread) -> None:
            if sys._getframe(1).f_code.co_filename.startswith(_PACKAGE):
                start(thread)
                return
            self._library.exempt_threads(1)
            try:
                start(thread)
            finally:
                self._library.exempt_threads(0)

        threading.Thread.start = start_or_not  # type: ignore[method-assign]

    def set(self, number: int | None) -> None:
        self._library.fail_thread(-1 if number is None else number)

    @property
    def made(self) -> int:
        return int(self._library.threads_made())


def _descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[re.sub(r"\d+|/tmp/.*", "N", str(path.readlink()))] += 1
    return found


def _threads() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found[(path / "comm").read_text().strip()] += 1
    return found


def _settled(look: Callable[[], Counter[str]], before: Counter[str], factor: float) -> Counter[str]:
    """What there is more than before, once it no longer goes away."""
    until_s = time.monotonic() + SETTLED_S * factor
    while (more := look() - before) and time.monotonic() < until_s:
        time.sleep(0.02)
        gc.collect()  # what a thread has held until now
    return more


def _make(name: str, tools: Tools) -> None:
    """Makes a subject, closes it and cleans up."""
    try:
        subject = FACTORIES[name].make(tools)
        with contextlib.suppress(GeartrainError):
            subject.close()
    finally:
        tools.clean()


def check(name: str, limit: _Limit, factor: float) -> list[str]:
    """What is wrong with a subject whose threads cannot be started, one after the other."""
    prefix = f"thread-limit-{os.getpid()}"
    uncaught: list[str] = []
    threading.excepthook = lambda about: uncaught.append(f"{about.exc_type.__name__}: {about.exc_value}")
    for _ in range(2):  # the first one has started what all share
        limit.set(None)
        before_s = time.monotonic()
        _make(name, Tools(prefix, factor))
        took_s = time.monotonic() - before_s
        gc.collect()
    findings = []
    for number in range(limit.made):
        descriptors, threads = _descriptors(), _threads()
        limit.set(number)
        before_s, said = time.monotonic(), ""
        try:
            _make(name, Tools(prefix, factor))
        except GeartrainError:
            pass
        except Exception:
            said = traceback.format_exc()
        limit.set(None)
        late_s = time.monotonic() - before_s - took_s
        gc.collect()
        about = f"{name}, without thread {number}"
        if said:
            findings.append(f"{about}: {said}")
        if uncaught:
            findings.append(f"{about}: a thread ended with {uncaught}")
            uncaught.clear()
        if late_s > AT_ONCE_S * factor:
            findings.append(f"{about}: somebody waited, for {late_s:.1f} s")
        if more := _settled(_threads, threads, factor):
            findings.append(f"{about}: threads are left: {dict(more)}")
        if more := _settled(_descriptors, descriptors, factor):
            findings.append(f"{about}: descriptors are left: {dict(more)}")
        if left := [path.name for path in Path("/dev/shm").glob(f"*{prefix}*")]:
            findings.append(f"{about}: segments are left: {left}")
    return findings


def _run(name: str, limit: _Limit, factor: float) -> None:
    """In a process of its own."""
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(HUNG_S * factor, exit=True)
        findings: list[Any] = []
        with contextlib.suppress(NotViableError):
            findings = check(name, limit, factor)
        for finding in findings:
            print(finding, flush=True)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 0:
        print(f"{name}: the process ended with {code}", flush=True)


def main() -> None:
    """Tries the subjects of a module of factories, or those whose names are given."""
    module, *names = sys.argv[1:]
    importlib.import_module(f"hostile.{module}")
    limit = _Limit()
    factor = float(os.environ.get("THREAD_LIMIT_FACTOR", "1"))
    for name in names or FACTORIES:
        _run(name, limit, factor)


if __name__ == "__main__":
    main()
