"""Doctor tells whether processes here may read each other's memory, why not, and what collectives do then."""

from __future__ import annotations

import errno
import platform
import sys

import preloaded
import pytest
from deadlines import patience

import geartrain.tools.cross_memory as cross_memory
from geartrain.tools.doctor import collectives_within_host

# In a process of its own, whose children inherit the filter: as a container's seccomp profile would have it.
DENIED = """
import ctypes, struct, sys
from geartrain.tools.doctor import collectives_within_host
number, error = map(int, sys.argv[1:])
filters = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | error), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in filters))
class Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("code", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, *map(ctypes.c_ulong, (1, 0, 0, 0))) == 0
program = Program(len(filters), ctypes.addressof(code))
assert libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(program), ctypes.c_ulong(0), ctypes.c_ulong(0)) == 0
found = collectives_within_host()
print(found.state, found.because)
"""
CALL = {"x86_64": 310, "aarch64": 270}[platform.machine()]


def denied(error: int) -> str:
    command = [sys.executable, "-c", DENIED, str(CALL), str(error)]
    done = preloaded.run(command, timeout=patience(60))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_child_that_reads_this_process_makes_it_viable():
    # Native links try the same call: where this fails, tests of what is exposed have nothing to read either.
    assert cross_memory.why_not() is None
    found = collectives_within_host()
    assert found.state == "ok"
    assert "gathered, exchanged or broadcast from the owner's memory (process_vm_readv)" in found.because


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errno.EPERM, "Operation not permitted; "),
        (errno.ENOSYS, "Function not implemented; this kernel, or a container"),
    ],
    ids=["eperm", "enosys"],
)
def test_a_filter_that_denies_the_call_is_told_with_what_follows(error, said):
    found = denied(error)
    assert found.startswith("missing process_vm_readv: ") and said in found
    assert "all bytes between ranks of one host go through rings in shared memory" in found


def test_the_cause_names_yama_where_it_restricts(monkeypatch, tmp_path):
    scope = tmp_path / "ptrace_scope"
    monkeypatch.setattr(cross_memory, "_YAMA", scope)
    assert "seccomp" in cross_memory._cause(errno.EPERM)
    scope.write_text("1\n")
    assert f"{scope} is 1 (Yama)" in cross_memory._cause(errno.EPERM)
    assert cross_memory._cause(errno.ESRCH) == ""


def test_a_probe_that_does_not_run_is_not_viable(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert "the probe did not run: " in (cross_memory.why_not() or "")
    monkeypatch.undo()
    monkeypatch.setattr(cross_memory, "_PROBE", "raise SystemExit('broken')")
    assert cross_memory.why_not() == "the probe failed: broken"
