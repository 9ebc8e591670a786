"""Steps of a build that may be interrupted: done once for what they are made of, locked, timed, and what is left told.

A step that is done leaves a stamp: the digest of what went into it, its files with theirs, and its time. It is not done
again while all of these hold. Two builds of one tree may run at once: a step is locked while it is done, and whoever
waits for it then finds it done.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LOCK_TIMEOUT_S = 3600.0  # a build under emulation, on a busy machine
LOCK_RETRY_S = 0.5


class StepError(Exception):
    """Why a step failed, in one line."""


class LeftOutError(Exception):
    """Why this machine cannot do a step."""


@dataclass(frozen=True)
class Made:
    """What a step made."""

    files: tuple[Path, ...] = ()
    note: str = ""


def digest(*parts: str | bytes | Path) -> str:
    """SHA-256 of texts, and of files and folders by their contents and relative names."""
    total = hashlib.sha256()
    for part in parts:
        if not isinstance(part, Path):
            total.update(part.encode() if isinstance(part, str) else part)
        elif part.is_dir():
            for path in files_of(part):
                total.update(str(path.relative_to(part)).encode() + b"\0" + digest(path).encode())
        else:
            total.update(part.read_bytes())
        total.update(b"\0")
    return total.hexdigest()


def files_of(folder: Path) -> list[Path]:
    """All files in a folder, without bytecode, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def version_of(python: Path) -> str:
    """What an interpreter says it is: its path stays when it is updated. Raises `StepError` where it does not run."""
    done = subprocess.run([python, "-VV"], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise StepError(f"{python} -VV failed with {done.returncode}")
    return done.stdout


def run(*command: str | Path, **options: object) -> None:
    """Runs a command. Raises `StepError` where it fails."""
    line = [str(part) for part in command]
    print("$", " ".join(line), flush=True)
    done = subprocess.run(line, check=False, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        raise StepError(f"{Path(line[0]).name} {' '.join(line[1:4])} ... failed with {done.returncode}")


@contextmanager
def locked(path: Path, shared: bool = False) -> Iterator[None]:
    """A lock between processes, which ends with its holder. Raises `StepError` after an hour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        began, told = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - began > LOCK_TIMEOUT_S:
                    raise StepError(f"another build has held {path} for {LOCK_TIMEOUT_S:.0f} s") from None
                if not told:
                    print(f"waits for another build, which holds {path.name}", flush=True)
                    told = True
                time.sleep(LOCK_RETRY_S)
        yield


class Steps:
    """The steps of one build, in order."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """`names`: all steps that are planned, of which progress is told."""
        self._folder = folder
        self._names = list(names)
        self._left = list(names)
        self.failed: list[str] = []
        self.left_out: list[str] = []
        self.made: list[str] = []

    def once(self, name: str, made_of: str, make: Callable[[], Made], lock: str = "") -> Made | None:
        """What the step made, now or earlier; None where it failed or is left out, which the others need not care for.

        `lock`: of several steps that must not be done at once (default: the step's own).
        """
        stamp = self._stamp(name)
        with locked(self._folder / f"{lock or name}.lock".replace(" ", "-")):
            if (made := self._made_before(stamp, made_of)) is not None:
                self._say(name, "as it was")
                return made
            stamp.unlink(missing_ok=True)
            print(f"[{self._number(name)}] {name} ...", flush=True)
            began, processors = time.monotonic(), _processors_s()
            try:
                made = make()
            except LeftOutError as reason:
                self.left_out.append(f"{name}: {reason}")
                self._say(name, f"left out, {reason}")
                return None
            except (StepError, OSError, subprocess.SubprocessError) as error:
                self.failed.append(f"{name}: {error}")
                self._say(name, f"FAILED after {time.monotonic() - began:.0f} s, {error}")
                return None
            seconds, processors = time.monotonic() - began, _processors_s() - processors
            record = {
                "made_of": made_of, "files": {str(path): digest(path) for path in made.files}, "note": made.note,
                "seconds": seconds,
            }  # fmt: skip
            _replace(stamp, json.dumps(record))
            _replace(self._times(name), f"{seconds:.1f}")
            self._say(name, f"done in {seconds:.0f} s, {processors:.0f} s of processors")
            return made

    def skip(self, names: Iterable[str], reason: str) -> None:
        """Leaves steps out that need one that failed."""
        for name in names:
            self.left_out.append(f"{name}: {reason}")
            self._left.remove(name)

    def _made_before(self, stamp: Path, made_of: str) -> Made | None:
        try:
            record = json.loads(stamp.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        files = {Path(path): found for path, found in record["files"].items()}
        if record["made_of"] != made_of or any(not path.is_file() or digest(path) != of for path, of in files.items()):
            return None
        return Made(tuple(files), record["note"])

    def _number(self, name: str) -> str:
        return f"{self._names.index(name) + 1}/{len(self._names)}"

    def _say(self, name: str, what: str) -> None:
        self._left.remove(name)
        self.made.append(f"{name}: {what}")
        times = [float(path.read_text()) for left in self._left if (path := self._times(left)).exists()]
        left = f"; left: {', '.join(self._left)}" if self._left else ""
        if left and len(times) == len(self._left):
            left += f" ({sum(times):.0f} s by their last times)"
        print(f"[{self._number(name)}] {name}: {what}{left}", flush=True)

    def _stamp(self, name: str) -> Path:
        return self._folder / f"{name.replace(' ', '-')}.json"

    def _times(self, name: str) -> Path:
        return self._folder / f"{name.replace(' ', '-')}.seconds"


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)


def _processors_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
