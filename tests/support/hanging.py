"""Stacks of a process that hangs, in the kernel and in native code: whether it waits there, runs or gets no core.

Python's own stacks (faulthandler's, by SIGUSR1) say nothing of a process in uninterruptible sleep, and nothing of one
that hangs after the interpreter has ended, in a destructor of C++ for one: faulthandler has gone by then, and the
signal would end the process. So the kernel is asked first, and a debugger where there is one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

#: Between two looks at a thread's processor time.
_LOOK_S = 0.2
#: Of a debugger: torch's symbols take it seconds, a busy machine many.
_DEBUGGER_S = 60.0
_KEPT = 12_000  # characters of what a debugger says


def describe(pid: int, debugger_s: float = _DEBUGGER_S) -> tuple[str, str]:
    """What a process and its descendants do: in one line, and at length. It never raises, and ends no process.

    Args:
        pid: of the process, which may have ended.
        debugger_s: how long gdb or py-spy may take, each; 0 asks neither.

    Returns:
        Of each thread of `pid` its state and where in the kernel it waits; and all that is known of all of them.
    """
    pids = [pid, *_descendants(pid)]
    first = {each: _ticks(thread) for each in pids for each, thread in _threads(each)}
    time.sleep(_LOOK_S)
    line = []
    text = [f"machine: load {_read('/proc/loadavg')}", *_pressure()]
    for each in pids:
        text.append(f"process {each}: {_read(f'/proc/{each}/cmdline').replace(chr(0), ' ')[:200]}")
        text.append("  " + "; ".join(_status(each)))
        for name, thread in _threads(each):
            ran = _ticks(thread) - first.get(name, 0)
            where = _read(thread / "wchan")
            state = _state(thread)
            said = f"{_read(thread / 'comm')}: {state}" + (f" in {where}" if where not in ("", "0") else "")
            said += f", ran {ran} ticks in {_LOOK_S:g} s" + _scheduled(thread)
            if each == pid:
                line.append(said)
            text.append(f"  thread {thread.name} {said}, syscall {_read(thread / 'syscall')}")
            text += [f"    {frame}" for frame in _read(thread / "stack").splitlines()]
        if not any(_state(thread).startswith("D") for _, thread in _threads(each)):  # else a debugger waits as well
            text += _debugged(each, debugger_s)
    return "; ".join(line) or "it has ended", "\n".join(text)


def show_python_stacks(pid: int) -> bool:
    """Has faulthandler show its stacks by SIGUSR1, where it is there to catch it; returns whether it is."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith("SigCgt:") and int(line.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
                return True
    return False


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError as error:
        return "" if isinstance(error, (FileNotFoundError, ProcessLookupError)) else f"({error.strerror})"


def _threads(pid: int) -> Iterator[tuple[str, Path]]:
    with contextlib.suppress(OSError):
        for thread in sorted(Path(f"/proc/{pid}/task").iterdir()):
            yield f"{pid}/{thread.name}", thread


def _state(thread: Path) -> str:
    return _read(thread / "stat").rpartition(")")[2][1:2]


def _ticks(thread: Path) -> int:
    numbers = _read(thread / "stat").rpartition(")")[2].split()
    return sum(map(int, numbers[11:13]))


def _scheduled(thread: Path) -> str:
    numbers = _read(thread / "schedstat").split()
    if len(numbers) != 3:
        return ""
    ran_s, waited_s = (int(number) / 1e9 for number in numbers[:2])
    return f" (in all {ran_s:.2f} s, waited {waited_s:.2f} s for a core)"


def _status(pid: int) -> list[str]:
    wanted = ("State", "PPid", "Threads", "VmRSS", "SigPnd", "ShdPnd", "SigBlk", "SigCgt", "voluntary", "nonvoluntary")
    return [line.replace("\t", " ") for line in _read(f"/proc/{pid}/status").splitlines() if line.startswith(wanted)]


def _pressure() -> list[str]:
    said = [
        f"pressure of {name}: {line}"
        for name in ("cpu", "io", "memory")
        for line in _read(f"/proc/pressure/{name}").splitlines()
    ]
    said += [line for line in _read("/proc/meminfo").splitlines() if line.startswith(("MemAvailable", "Dirty"))]
    for entry in Path("/proc").iterdir():  # it holds the address spaces that it scans
        if entry.name.isdigit() and _read(entry / "comm") == "khugepaged":
            said.append(f"khugepaged: {_state(entry)}, " + " < ".join(_read(entry / "stack").split("\n")))
    return said


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _read(entry / "stat").rpartition(")")[2].split()):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, new = [], [pid]
    while new:
        new = [child for each in new for child in children.get(each, [])]
        found += new
    return found


def _debugged(pid: int, limit_s: float) -> list[str]:
    commands = {
        "gdb": ["-p", str(pid), "-batch", "-nx", "-ex", "set pagination off", "-ex", "thread apply all backtrace 60"],
        "py-spy": ["dump", "--native", "--pid", str(pid)],
    }
    said = []
    for name, arguments in commands.items():
        if limit_s <= 0 or shutil.which(name) is None:
            said.append(f"  {name}: " + ("not asked" if limit_s <= 0 else "not installed"))
            continue
        try:
            done = subprocess.run(
                [name, *arguments], capture_output=True, text=True, errors="replace", timeout=limit_s, check=False,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
            lines = [each for each in done.stdout.splitlines() if not each.startswith("[New LWP")]
            said.append(f"  {name}: " + "\n    ".join(lines)[-_KEPT:])
        except (OSError, subprocess.TimeoutExpired) as error:
            said.append(f"  {name}: {type(error).__name__}")
    return said
