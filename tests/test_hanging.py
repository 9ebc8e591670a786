"""What is said of a process that hangs: where it waits in the kernel, and which native function it is in."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import deadlines
import hanging
import pytest


@contextmanager
def forked(work: Callable[[], object], state: str) -> Iterator[int]:
    """A forked child at some work, once its main thread is in a state."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    try:
        deadlines.until(lambda: hanging.describe(child, debugger_s=0)[0].find(f": {state}") >= 0)
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_thread_that_waits_is_told_with_its_place_in_the_kernel():
    with forked(signal.pause, "S") as child:
        line, at_length = hanging.describe(child, debugger_s=0)
        assert ": S" in line, line
        assert "ran 0 ticks" in line, line
        assert f"process {child}" in at_length
        assert "gdb: not asked" in at_length


def test_uninterruptible_sleep_is_told_from_a_hang_of_ours_and_no_debugger_waits_for_it(tmp_path):
    fifo = tmp_path / "nobody writes it"
    os.mkfifo(fifo)
    # It waits by vfork until its child has opened the pipe. An interpreter without torch, whose symbols take a debugger
    # of that child ten seconds.
    opening = f"[(os.POSIX_SPAWN_OPEN, 0, {str(fifo)!r}, os.O_RDONLY, 0)]"
    code = f"import os; os.posix_spawn('/bin/true', ['true'], {{}}, file_actions={opening})"
    process = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
    try:
        deadlines.until(lambda: hanging.describe(process.pid, debugger_s=0)[0].find(": D") >= 0)
        line, at_length = hanging.describe(process.pid)
        assert ": D" in line, line
        assert f"process {process.pid}" in at_length
        began = at_length.index(f"process {process.pid}")
        mine = at_length[began : at_length.find("process ", began + 1)]
        assert "gdb" not in mine, mine
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_thread_that_runs_is_told_by_its_ticks():
    def spin() -> None:
        while True:
            pass

    with forked(spin, "R") as child:
        assert ": R" in hanging.describe(child, debugger_s=0)[0]


@pytest.mark.skipif(shutil.which("gdb") is None, reason="no gdb")
def test_a_debugger_names_the_native_function_of_a_process_whose_interpreter_has_ended():
    code = (
        "import ctypes, faulthandler, signal\n"
        "faulthandler.register(signal.SIGUSR1)\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.__cxa_atexit(ctypes.cast(libc.pause, ctypes.c_void_p), None, None)\n"
        "print('ends', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with deadlines.killed(process):
        assert process.stdout is not None
        process.stdout.readline()
        deadlines.until(lambda: not hanging.show_python_stacks(process.pid))
        _, at_length = hanging.describe(process.pid, deadlines.patience(30))
        assert "pause" in at_length, at_length
        assert "exit" in at_length, at_length
        assert process.poll() is None, "it was ended by the signal that shows stacks"
