"""Process report: what replays, RPC nodes, groups and readers of a process do, for other processes of its host.

    register(replay, "replay", lambda replay: {"name": ..., **replay.stats()})   # in a constructor
    for report in read_reports(): ...                                          # in `geartrain top`

A thread of the process, started with the first object, reads the figures of all that live once a second and writes them
into a small file beside the segments, `geartrain-report-PID.json`: nothing is counted or locked where batches and calls
are made. A file is replaced as a whole, so a reader sees one report or the next. It goes with its process; what a
killed process leaves is removed by whoever reports next on the host, and is recognised by the process's start time.

GEARTRAIN_REPORT_S is the period in seconds; 0 for no thread and no file.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geartrain.core.processes import process_state
from geartrain.core.shared_files import open_shared, segments_directory
from geartrain.errors import ArgumentError, GeartrainError

FORMAT = "geartrain-report-1"
PERIOD_VARIABLE = "GEARTRAIN_REPORT_S"
_PREFIX, _SUFFIX = "geartrain-report-", ".json"
_PERIOD_S = 1.0
#: A process that ends sooner leaves no trace.
_FIRST_S = 0.5
_MOST_BYTES = 1 << 20
#: Of one process; the oldest are reported.
_MOST_OBJECTS = 256

Read = Callable[[Any], Mapping[str, Any]]


@dataclass
class ObjectFigures:
    """Figures of one object of a process.

    Attributes:
        kind: "replay", "node", "group", "reducer", "reader", "job" or "pool".
        name: for people.
        figures: as its class reports them.
        rates: of the numbers among them, a second, nested names joined by dots: over the time since the report before.
    """

    kind: str
    name: str
    figures: dict[str, Any]
    rates: dict[str, float] = field(default_factory=dict)


@dataclass
class ProcessReport:
    """The newest report of a process.

    Attributes:
        pid, command: of the process.
        at_s: when it was written, wall clock.
        period_s: between its reports.
        objects: what it has.
        alive: whether the process is; as its own kernel tells, or by the report's age where it is in another namespace.
    """

    pid: int
    command: str
    at_s: float
    period_s: float
    objects: list[ObjectFigures]
    alive: bool


def register(owner: object, kind: str, read: Read) -> None:
    """Has an object's figures reported for as long as it lives, and starts the thread where there is none.

    Args:
        owner: is not kept alive.
        kind: see `ObjectFigures`.
        read: returns its figures, `name` among them; called on the reporting thread. A `GeartrainError` leaves it out:
            it is closed.
    """
    _reporter.add(owner, kind, read)


def period_s() -> float:
    """Seconds between reports, 0 for none. Raises `ArgumentError` for what is no number from 0 to 3600."""
    text = os.environ.get(PERIOD_VARIABLE, "")
    try:
        value = float(text) if text else _PERIOD_S
    except ValueError:
        value = math.nan
    if not 0 <= value <= 3600:
        raise ArgumentError(f"{PERIOD_VARIABLE} is a number of seconds from 0 (no reports) to 3600, found {text!r}")
    return value


class _Reporter:
    """The process's objects, and the thread that reports them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Without objects and thread: at first, and in a forked child."""
        self._lock = threading.RLock()  # a signal's handler may come in between, in the same thread
        self._objects: list[tuple[weakref.ref[Any], str, Read]] = []
        self._before: dict[int, tuple[float, dict[str, float]]] = {}  # id of a reference -> when, numbers
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._path: Path | None = None

    def add(self, owner: object, kind: str, read: Read) -> None:
        period = period_s()
        if period == 0:
            return
        with self._lock:
            self._objects.append((weakref.ref(owner), kind, read))
            if self._thread is None and not self._stop.is_set():
                path = segments_directory() / f"{_PREFIX}{os.getpid()}{_SUFFIX}"
                self._thread = threading.Thread(
                    target=self._run, args=(path, period, self._stop), name="geartrain-report", daemon=True
                )
                self._thread.start()

    def _run(self, path: Path, period: float, stop: threading.Event) -> None:
        wait_s = min(period, _FIRST_S)
        with contextlib.suppress(GeartrainError, OSError):
            remove_stale()
        while not stop.wait(wait_s):
            wait_s = period
            objects = self._collect()
            with contextlib.suppress(OSError, GeartrainError):  # a full file system: the next one may find room
                self._write(path, objects, period)

    def _collect(self) -> list[dict[str, Any]]:
        with self._lock:
            self._objects = [each for each in self._objects if each[0]() is not None]
            objects = self._objects[:_MOST_OBJECTS]
            self._before = {key: value for key, value in self._before.items() if key in {id(r) for r, _, _ in objects}}
        found = []
        for reference, kind, read in objects:
            owner = reference()
            if owner is None:
                continue
            try:
                figures = dict(read(owner))
            except GeartrainError:
                continue
            except Exception as error:  # of what was changed or closed meanwhile; shown, not hidden
                figures = {"error": f"{type(error).__name__}: {error}"}
            finally:
                del owner
            now_s = time.monotonic()
            numbers = dict(_numbers(figures))
            then_s, before = self._before.get(id(reference), (now_s, {}))
            self._before[id(reference)] = (now_s, numbers)
            elapsed_s = now_s - then_s
            rates = {
                name: (value - before[name]) / elapsed_s
                for name, value in numbers.items()
                if elapsed_s > 0 and name in before
            }
            found.append({"kind": kind, "name": str(figures.pop("name", "")), "figures": figures, "rates": rates})
        return found

    def _write(self, path: Path, objects: list[dict[str, Any]], period: float) -> None:
        if self._stop.is_set():
            return
        me = process_state(os.getpid())
        report = {
            "format": FORMAT,
            "pid": os.getpid(),
            "started": None if me is None else me.started,
            "namespace": _namespace(),
            "command": _command(),
            "at_s": time.time(),
            "period_s": period,
            "objects": objects,
        }
        beside = path.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(beside, flags, 0o600)
        self._path = path
        try:
            with open(fd, "wb") as file:  # noqa: PTH123
                file.write(json.dumps(report, default=_plain).encode())
            beside.replace(path)
            if self._stop.is_set():  # close() has not waited for this, and removed the one before
                path.unlink(missing_ok=True)
        except OSError:
            beside.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """At the interpreter's end: ends the thread, and removes the file."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


def read_reports() -> Iterator[ProcessReport | tuple[str, str]]:
    """The newest report of each process of this host that has one; for a file that is none, its name and why."""
    for path in sorted(segments_directory().glob(f"{_PREFIX}*{_SUFFIX}")):
        try:
            yield _parsed(_read(path))
        except FileNotFoundError:
            continue  # its process has just ended
        except (GeartrainError, OSError) as error:
            yield path.name, str(error)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            yield path.name, f"it is no report of this build: {error!r}"


def remove_stale() -> list[str]:
    """Removes reports of processes that have ended without removing theirs; returns the names of the files."""
    removed = []
    for path in segments_directory().glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(GeartrainError, OSError, ValueError, KeyError, TypeError, AttributeError):
            if not _parsed(_read(path)).alive:
                path.unlink()
                removed.append(path.name)
    return removed


def _read(path: Path) -> Any:
    fd = open_shared(path, writable=False)
    try:
        return json.loads(os.pread(fd, _MOST_BYTES, 0))
    finally:
        os.close(fd)


def _parsed(found: Any) -> ProcessReport:
    if found["format"] != FORMAT:
        raise ValueError(found["format"])
    pid, at_s, period = int(found["pid"]), float(found["at_s"]), float(found["period_s"])
    if found["namespace"] == _namespace():
        now = process_state(pid)
        alive = now is not None and now.state != "Z" and now.started == found["started"]
    else:
        alive = time.time() - at_s < 10 + 3 * period
    objects = [
        ObjectFigures(
            str(each["kind"]),
            str(each["name"]),
            dict(each["figures"]),
            {name: float(value) for name, value in each["rates"].items()},
        )
        for each in found["objects"]
    ]
    return ProcessReport(pid, str(found["command"]), at_s, period, objects, alive)


def _numbers(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield f"{prefix}{name}", float(value)


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's; what JSON has no form for, as text."""
    return value.item() if hasattr(value, "item") else str(value)


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""


def _command() -> str:
    """The program, as people know it: a module's name, or a file's."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return str(spec.name).removesuffix(".__main__")
    return Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"


_reporter = _Reporter()
os.register_at_fork(after_in_child=_reporter.reset)
atexit.register(_reporter.close)

__all__ = [
    "FORMAT",
    "PERIOD_VARIABLE",
    "ObjectFigures",
    "ProcessReport",
    "period_s",
    "read_reports",
    "register",
    "remove_stale",
]
