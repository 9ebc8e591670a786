"""Network namespaces of emulated hosts: creates names, runs calls inside, and removes them with their processes.

All namespaces and links of some hosts carry one name. Their creator locks a directory of that name in /dev/shm. The
kernel releases the lock when the creator dies. The next creator on the machine then removes the leftovers.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from geartrain.core.threads import DaemonThread
from geartrain.errors import GeartrainError

COMMANDS = ("ip", "tc", "unshare", "mount", "sh")
#: Longest wait for a command, for killed processes to be gone, and for the first connection.
DEADLINE_S = 20.0
SHM = Path("/dev/shm")
#: Where `ip netns` keeps the namespaces that it has named.
NETWORKS = Path("/run/netns")
_NAME = re.compile(r"gt[0-9a-f]{1,8}-\d{1,3}")
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()
T = TypeVar("T")


class HostsError(GeartrainError):
    """Hosts cannot be created here, or one of their parts failed; carries the command's output."""


def remove_stale() -> list[str]:
    """Removes what creators that were killed left, with their processes; returns the names."""
    removed = []
    for directory in sorted(SHM.glob("gt*-*")):
        if not _NAME.fullmatch(directory.name):
            continue
        with contextlib.suppress(OSError):  # locked by its living creator, or removed meanwhile
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(directory.name)
                removed.append(directory.name)
            finally:
                os.close(lock)
    return removed


def call_in(space: str, host: str, make: Callable[[], T]) -> T:
    """Calls `make` on a thread that is in a network namespace; a thread may be, its process need not."""
    made: list[T] = []
    failed: list[OSError] = []

    def enter_and_make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            descriptor = os.open(NETWORKS / space, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if libc.setns(descriptor, _CLONE_NEWNET) != 0:
                    code = ctypes.get_errno()
                    raise OSError(code, os.strerror(code))
            finally:
                os.close(descriptor)
            made.append(make())
        except OSError as error:
            failed.append(error)

    thread = DaemonThread(enter_and_make, "geartrain-namespace")
    thread.start()
    thread.join(DEADLINE_S)
    if not made:
        raise HostsError(f"{host} cannot be entered: {failed[0] if failed else 'no answer'}")
    return made[0]


def missing_tools(switched: bool = False) -> str | None:
    """Why hosts cannot be created here; None where nothing is missing."""
    if sys.platform != "linux":
        return "emulated hosts need Linux's network namespaces"
    if os.geteuid() != 0:
        return "emulated hosts need root, to make network namespaces"
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if missing:
        return f"emulated hosts need {', '.join(missing)} (iproute2 and util-linux)"
    if switched and not Path("/dev/net/tun").exists():
        return "emulated hosts with delay or losses need TAP devices: /dev/net/tun"
    return None


def new_name() -> tuple[str, int]:
    """A name that nobody uses, of 12 letters at most, and the descriptor that keeps its directory locked."""
    while True:
        name = f"gt{os.getpid():x}-{next(_numbers)}"
        fresh = SHM / f".{name}"
        try:
            fresh.mkdir(mode=0o755)
        except FileExistsError:
            continue
        lock = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            fresh.rename(SHM / name)  # under its real name it is locked from the beginning
        except OSError:
            os.close(lock)
            fresh.rmdir()
            continue
        return name, lock


def remove(name: str) -> None:
    """Kills the processes in the hosts of that name, and removes every resource of that name. Idempotent."""
    spaces = [path.name for path in Path("/run/netns").glob(f"{name}-*")]
    ends_s = time.monotonic() + DEADLINE_S
    for space in spaces:
        _empty(space, ends_s)
    for space in spaces:
        _quietly(["ip", "netns", "delete", space])
    # A deleted namespace removes its veths asynchronously; the next creator of this name must not find them.
    for link in Path("/sys/class/net").glob(f"{name}-*"):
        _quietly(["ip", "link", "delete", "dev", link.name])
    if (Path("/sys/class/net") / name).exists():
        _quietly(["ip", "link", "delete", "dev", name])
    shutil.rmtree(SHM / name, ignore_errors=True)


def _empty(space: str, ends_s: float) -> None:
    """Kills all processes of a namespace and waits until they are gone."""
    while True:
        pids = [int(pid) for pid in _quietly(["ip", "netns", "pids", space]).split()]
        pids = [pid for pid in pids if pid != os.getpid()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids or time.monotonic() > ends_s:
            return
        for pid in pids:
            _wait_for_end(pid, ends_s)


def _wait_for_end(pid: int, ends_s: float) -> None:
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        select.select([handle], [], [], max(0.0, ends_s - time.monotonic()))
    finally:
        os.close(handle)


def _quietly(argv: Sequence[str]) -> str:
    """Output of a command, regardless of its exit code."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return done.stdout


def run(
    argv: Sequence[str],
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = DEADLINE_S,
    shown: Sequence[str] | None = None,
) -> str:
    """Runs a command to its end and returns what it printed; `shown` is the command in errors.

    Raises:
        HostsError: it failed, or did not end in time; carries its output.
    """
    what = " ".join(shown or argv)
    try:
        done = subprocess.run(
            argv, input=stdin, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise HostsError(f"`{what}` did not end within {timeout_s:g} s") from None
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise HostsError(f"`{what}` failed with {done.returncode}: {'; '.join(words[:3]) or 'it said nothing'}")
    return done.stdout
