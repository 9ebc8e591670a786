"""Cross-memory attach: finds out whether a process may read another's memory here (process_vm_readv)."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

#: A new interpreter takes a tenth of a second; a loaded machine takes its time.
PROBE_TIMEOUT_S = 30.0

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")

# The child reads its parent, as ranks read each other: Yama lets a parent read its children in any case.
_PROBE = """
import ctypes, sys
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]
owner, address, size = map(int, sys.argv[1:])
into = ctypes.create_string_buffer(size)
libc = ctypes.CDLL(None, use_errno=True)
read = libc.process_vm_readv
read.restype = ctypes.c_ssize_t
some, size_of = ctypes.POINTER(Part), ctypes.c_ulong
read.argtypes = [ctypes.c_int, some, size_of, some, size_of, size_of]
mine, theirs = Part(ctypes.addressof(into), size), Part(address, size)
got = read(owner, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
print(got, ctypes.get_errno() if got < 0 else 0, into.raw.hex())
"""


def why_not() -> str | None:
    """Why processes of this user cannot read each other's memory; None if they can. Tries it in a child process.

    Costs a process, about 0.1 s.
    """
    secret = os.urandom(16)
    memory = ctypes.create_string_buffer(secret, len(secret))
    arguments = [str(os.getpid()), str(ctypes.addressof(memory)), str(len(secret))]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROBE, *arguments],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the probe did not run: {error}"
    if done.returncode != 0:
        return f"the probe failed: {done.stderr.strip()[-200:] or f'exit status {done.returncode}'}"
    got, number, found = [*done.stdout.split(), ""][:3]
    if int(got) == len(secret) and bytes.fromhex(found) == secret:
        return None
    if int(number) == 0:
        return f"process_vm_readv read {got} of {len(secret)} bytes, or others than those that are there"
    return f"process_vm_readv: {os.strerror(int(number))}{_cause(int(number))}"


def _cause(number: int) -> str:
    """The probable cause of a refusal, and the remedy. The kernel itself only gives an errno."""
    scope = _yama_scope()
    if number == errno.ENOSYS:
        return "; this kernel, or a container's seccomp profile, does not have the call"
    if number != errno.EPERM:
        return ""
    if scope:
        return f"; {_YAMA} is {scope} (Yama): 0 (root) allows it to processes of one user"
    return "; a container's seccomp profile (docker run --cap-add=SYS_PTRACE), or a process that cannot be dumped"


def _yama_scope() -> int:
    """Yama's ptrace_scope; 0 where there is no Yama."""
    try:
        return int(_YAMA.read_text())
    except (OSError, ValueError):
        return 0
