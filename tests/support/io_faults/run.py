"""One call on a file fails, at each place where one can: `python -m io_faults.run WAY... [--all]`.

shim.c is preloaded. It counts the calls of each door (open, write, ...) on paths below one folder, and has one of
them fail. A way is a generator that prepares something, yields what may fail, and gets the error, or None, back. Then
it looks whether anything was lost. A first run without a fault counts the calls of each door. Every later run has
another call fail, with another error. A line of output is a finding.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import importlib
import logging
import mmap
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from geartrain.errors import GeartrainError
from io_faults.ways import DEAR, OS_ERRORS, SLOW, WAYS

VARIABLE = "IO_FAULTS"
#: By door: the errors that its calls have. Their order is that of shim.c.
DOORS: dict[str, tuple[int, ...]] = {
    "open": (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EMFILE, errno.EDQUOT),
    "write": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "sync": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "size": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "rename": (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT),
    "unlink": (errno.EIO, errno.EROFS, errno.EACCES),
    "mkdir": (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT),
    "mmap": (errno.EACCES, errno.ENOMEM),
    "read": (errno.EIO,),
    "list": (errno.EIO, errno.EACCES, errno.EMFILE),
    "close": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
}
#: Where these fail, an unfinished file may stay. The next call of the same kind removes it.
REMOVING = ("unlink", "list", "open")
#: A run without a fault takes milliseconds.
HUNG_S = 60.0


def library(folder: Path) -> Path | None:
    """Compiles what LD_PRELOAD needs; None where no compiler is at hand."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    made = folder / "io_faults.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True)
    return made


class Faults:
    """The state that shim.c reads."""

    _INTS = struct.Struct("<4i")
    _COUNTS = struct.Struct("<16i")
    _ROOT_AT, _FAILED_AT, _END = 80, 592, 1616

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 4096)

    @contextlib.contextmanager
    def armed(self, root: Path, fault: tuple[str, int, int] | None) -> Iterator[None]:
        """A block in which calls below `root` are counted, and the one of `fault` (door, number, error) fails."""
        door, number, error = fault or ("", -1, 0)
        memory = self._memory
        memory[self._ROOT_AT : self._END] = bytes(self._END - self._ROOT_AT)
        memory[self._ROOT_AT : self._ROOT_AT + len(str(root))] = str(root).encode()
        self._COUNTS.pack_into(memory, self._INTS.size, *[0] * 16)
        self._INTS.pack_into(memory, 0, 1, list(DOORS).index(door) if door else -1, number, error)
        try:
            yield
        finally:
            memory[0:4] = bytes(4)

    @property
    def counts(self) -> dict[str, int]:
        """Calls of each door in the last block."""
        return dict(zip(DOORS, self._COUNTS.unpack_from(self._memory, self._INTS.size), strict=False))

    @property
    def failed(self) -> str:
        """The path of the call that failed in the last block; empty where none did."""
        return self._memory[self._FAILED_AT : self._END].split(b"\0")[0].decode()


def _descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[re.sub(r"\d{2,}|[0-9a-f]{8,}", "N", os.readlink(path))] += 1
    return found


def _names(root: Path) -> set[str]:
    """What is below a folder, with numbers and random names alike."""
    return {re.sub(r"[0-9a-f]{8,}|\d+", "N", str(path.relative_to(root))) for path in root.rglob("*")}


class _Run:
    """One way, in a folder of its own on the memory's file system."""

    def __init__(self, faults: Faults, name: str, root: Path) -> None:
        self._faults, self._name, self.root = faults, name, root
        self.there: set[str] = set()  # may be there afterwards
        self.counts: dict[str, int] = {}

    def __call__(self, fault: tuple[str, int, int] | None) -> list[str]:
        """Runs it with a fault; returns what is wrong."""
        shutil.rmtree(self.root, ignore_errors=True)
        (self.root / "segments").mkdir(parents=True)
        (self.root / "disk").mkdir()
        way = WAYS[self._name](self.root / "disk")
        wrong: list[str] = []
        try:
            act = next(way)
            gc.collect()
            names, descriptors = _names(self.root), _descriptors()
            error = self._act(act, fault)
            counts = self._faults.counts
            failed = self._faults.failed
            if fault is None:
                self.counts, self.there = counts, names | _names(self.root)
                if error is not None:
                    wrong.append(_told(error))
            else:
                wrong += self._judge(error, failed)
                gc.collect()
                if error is not None and (more := _descriptors() - descriptors):
                    wrong.append(f"descriptors stay: {dict(more)}")
                left = _names(self.root) - self.there
                if left and fault[0] in REMOVING:
                    if Path(failed).parent.name == "segments":  # as `geartrain remove` does, on request
                        Path(failed).unlink(missing_ok=True)
                    again = error = self._act(act, None)
                    left = _names(self.root) - self.there
                    if again is not None and left:
                        wrong.append(f"done again: {_told(again)}")
                if left:
                    wrong.append(f"is left: {sorted(left)}")
            with contextlib.suppress(StopIteration):
                way.send(error)
                wrong.append("the way goes on")
        except Exception:
            wrong.append(traceback.format_exc())
        finally:
            way.close()
        return wrong

    def _act(self, act: Callable[[], object], fault: tuple[str, int, int] | None) -> BaseException | None:
        error: BaseException | None = None
        faulthandler.dump_traceback_later(HUNG_S, exit=True)
        with self._faults.armed(self.root, fault):
            try:
                act()
            except Exception as raised:
                error = raised
        faulthandler.cancel_dump_traceback_later()
        if fault is not None:
            _forget_frames(error)
        return error

    def _judge(self, error: BaseException | None, failed: str) -> list[str]:
        if error is None or not failed:
            return [] if error is None else [f"nothing failed: {_told(error)}"]
        named = isinstance(error, GeartrainError) and type(error) is not GeartrainError
        if isinstance(error, OSError) and not isinstance(error, GeartrainError):
            named = self._name in OS_ERRORS
        wrong = [] if named else [f"not named: {_told(error)}"]
        if str(self.root) not in str(error):
            wrong.append(f"without a path: {_told(error)}")
        return wrong


def _forget_frames(error: BaseException | None) -> None:
    """Lets go of what the calls that an error went through had opened."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _told(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error)) if error.__traceback__ else ""
    return f"{type(error).__name__}: {error}" + (f"\n{text}" if text else "")


def _faults_of(name: str, counts: dict[str, int], everything: bool) -> Iterator[tuple[str, int, int]]:
    """Door, number and error: all there are; or, of each door, one call or some with an error each."""
    chosen = random.Random(name)
    most = 6 if everything else 1
    for door, errors in DOORS.items():
        numbers = list(range(counts.get(door, 0)))
        if everything and name not in DEAR:
            yield from ((door, number, error) for number in numbers for error in errors)
        else:
            some = sorted(chosen.sample(numbers, min(most, len(numbers))))
            yield from ((door, number, chosen.choice(errors)) for number in some)


def main(names: list[str], everything: bool) -> int:
    """Runs ways; prints what is wrong."""
    for package in ("torch", "h5py", "minari", "pyarrow.parquet"):  # that ways import
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    gc.freeze()  # what was imported stays, and the collections of each run need not go through it
    faults = Faults(Path(os.environ[VARIABLE]))
    folder = Path(tempfile.mkdtemp(prefix="geartrain-io-faults-", dir="/dev/shm"))
    os.environ["GEARTRAIN_DIR"] = str(folder / "root" / "segments")
    logging.disable()  # what background threads tell of the faults
    found = ran = 0
    try:
        for name in names or [each for each in WAYS if everything or each not in SLOW]:
            run = _Run(faults, name, folder / "root")
            for wrong in run(None) or run(None):  # the first imports what is used
                print(f"{name} without a fault: {wrong}")
                found += 1
            for fault in _faults_of(name, run.counts, everything):
                ran += 1
                for wrong in run(fault):
                    place = Path(faults.failed).relative_to(folder / "root") if faults.failed else "not reached"
                    door, number, error = fault
                    print(f"{name}: {errno.errorcode[error]} of {door} {number} ({place}): {wrong}")
                    found += 1
            print(f"{name}: {run.counts}", file=sys.stderr)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{ran} faults, {found} findings", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main([word for word in sys.argv[1:] if word != "--all"], "--all" in sys.argv))
