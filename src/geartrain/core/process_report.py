"""Process report: statistics of a process's replays, RPC nodes, groups and readers, for other processes of its host.

    register(replay, "replay", lambda replay: {"name": ..., **replay.stats()})   # in a constructor
    for report in read_reports(): ...                                          # in `geartrain top`

Once a second, a background thread reads the figures of all registered objects that are alive. It writes them into a
small file in the directory of the segments, `geartrain-report-PID.json`. Batches and calls themselves count and lock
nothing for this. The thread starts with the first object. If the process can have no more threads, it continues without
reports, and logs this.

A file is replaced as a whole, so a reader sees one complete report. The process removes its file when it ends. If it
was killed, the next process of the host that reports removes the file. It recognises such a file by the process's start
time.

The environment variable GEARTRAIN_REPORT_S sets the period in seconds. 0 disables the thread and the file.
"""

from __future__ import annotations

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
from typing import Any, Literal

from geartrain.core.lifetime import living, on_error
from geartrain.core.processes import at_end_of_forked_child, process_state
from geartrain.core.shared_files import leftovers, open_shared, segments_directory, shared_files
from geartrain.core.threads import DaemonThread, ReentrantEvent
from geartrain.errors import ArgumentError, GeartrainError

FORMAT = "geartrain-report-1"
PERIOD_VARIABLE = "GEARTRAIN_REPORT_S"
_PREFIX, _SUFFIX = "geartrain-report-", ".json"
#: The suffix of a report that is being written.
_UNFINISHED = ".new"
_PERIOD_S = 1.0
#: Delay before the first report. A process that ends sooner writes none.
_FIRST_S = 0.5
_MOST_BYTES = 1 << 20
#: Most objects of one process. The oldest are reported.
_MOST_OBJECTS = 256
#: Most elements of an array among figures. For a longer array, its length is reported.
_MOST_ELEMENTS = 64
#: Deepest nesting of figures, because code that copies or shows a report recurses too.
_MOST_LEVELS = 32
#: Errors that reading a file raises if its content is not a report.
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)

#: Numbers that each kind of object, and each peer of a node, must report: readers rely on them.
_NUMBERS_OF = {
    "replay": ("batch_size", "waiting_s", "batches", "rows", "bytes", "redrawn", "wait_s", "make_s"),
    "group": (
        *("rank", "world_size", "epoch", "issued", "operations", "array_bytes"),
        *("lost_reducers", "reducer_losses", "reducer_returns", "taken_over_bytes"),
    ),
    "node": ("backlog",),
}
_NUMBERS_OF_PEER = ("open", "messages_sent", "messages_received", "bytes_sent", "bytes_received")

#: Kinds of objects that are reported.
Kind = Literal["replay", "node", "group", "reducer", "reader", "job", "pool"]
Read = Callable[[Any], Mapping[str, Any]]


@dataclass
class ObjectFigures:
    """Figures of one object of a process.

    Attributes:
        kind: a `Kind`, or that of another build.
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
        left_out: how many more objects it has, for which a report has no room.
    """

    pid: int
    command: str
    at_s: float
    period_s: float
    objects: list[ObjectFigures]
    alive: bool
    left_out: int = 0


def register(owner: object, kind: Kind, read: Read) -> None:
    """Reports an object's figures for as long as it lives. Starts the thread if it does not run yet.

    Args:
        owner: is not kept alive.
        kind: what it is.
        read: returns its figures, `name` among them; called on the reporting thread. A `GeartrainError` leaves it out:
            it is closed.
    """
    _reporter.add(owner, kind, read)


def period_s() -> float:
    """Seconds between reports, 0 for none. Raises `ArgumentError` unless it is a number from 0 to 3600."""
    text = os.environ.get(PERIOD_VARIABLE, "")
    try:
        value = float(text) if text else _PERIOD_S
    except ValueError:
        value = math.nan
    if not 0 <= value <= 3600:
        raise ArgumentError(f"{PERIOD_VARIABLE} is a number of seconds from 0 (no reports) to 3600, found {text!r}")
    return value


class _Reporter:
    """The registered objects of the process, and the thread that reports them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Without objects and thread: at first, and in a forked child."""
        self._lock = threading.RLock()  # a signal's handler may come in between, in the same thread
        self._objects: list[tuple[weakref.ref[Any], str, Read]] = []
        self._before: dict[int, tuple[float, dict[str, float]]] = {}  # id of a reference -> when, numbers
        self._thread: threading.Thread | None = None
        self._stop = ReentrantEvent()
        self._path: Path | None = None
        self._about: dict[str, Any] = {}

    def add(self, owner: object, kind: str, read: Read) -> None:
        period = period_s()
        if period == 0:
            return
        with self._lock:
            self._objects.append((weakref.ref(owner), kind, read))
            if self._thread is None and not self._stop.is_set():
                path = segments_directory() / f"{_PREFIX}{os.getpid()}{_SUFFIX}"
                thread = DaemonThread(self._run, "geartrain-report", (path, period, self._stop))
                try:
                    thread.start()
                except GeartrainError as error:  # the next object tries again
                    import logging

                    logging.getLogger(__name__).warning(
                        "what this process does is not reported to `geartrain top`: %s", error
                    )
                    return
                self._thread = thread
                at_end_of_forked_child(self.close)

    def _run(self, path: Path, period: float, stop: ReentrantEvent) -> None:
        wait_s = min(period, _FIRST_S)
        with contextlib.suppress(Exception):  # whatever others have left there: this process reports
            remove_stale()
        while not stop.wait(wait_s):
            wait_s = period
            with contextlib.suppress(Exception):  # a full file system: the next one may find room
                self._write(path, *self._collect(), period)

    def _collect(self) -> tuple[list[str], int]:
        """The objects as JSON, and how many there are beyond the most that are reported."""
        with self._lock:
            self._objects = [each for each in self._objects if each[0]() is not None]
            objects, more = self._objects[:_MOST_OBJECTS], len(self._objects[_MOST_OBJECTS:])
            self._before = {key: value for key, value in self._before.items() if key in {id(r) for r, _, _ in objects}}
        found = []
        for reference, kind, read in objects:
            owner = reference()
            if owner is None:
                continue
            name = ""
            try:
                figures = dict(read(owner))
                name = str(figures.pop("name", ""))[:1000]
                found.append(_encoded(kind, name, figures, self._rates(id(reference), figures)))
            except GeartrainError:
                continue
            except Exception as error:  # of what was changed or closed meanwhile; shown, not hidden
                found.append(_encoded(kind, name, {"error": f"{type(error).__name__}: {error}"[:1000]}, {}))
            finally:
                del owner
        return found, more

    def _rates(self, key: int, figures: Mapping[str, Any]) -> dict[str, float]:
        """Since the figures before."""
        now_s = time.monotonic()
        numbers = dict(_numbers(figures))
        then_s, before = self._before.get(key, (now_s, {}))
        self._before[key] = (now_s, numbers)
        elapsed_s = now_s - then_s
        return {
            name: (value - before[name]) / elapsed_s
            for name, value in numbers.items()
            if elapsed_s > 0 and name in before
        }

    def _write(self, path: Path, objects: list[str], more: int, period: float) -> None:
        if self._stop.is_set():
            return
        data = _fitting({**self._process(), "at_s": time.time(), "period_s": period}, objects, more)
        beside = path.with_suffix(_UNFINISHED)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(beside, flags, 0o600)
        self._path = path
        with on_error(beside.unlink, missing_ok=True):
            with open(fd, "wb") as file:  # noqa: PTH123
                file.write(data)
            beside.replace(path)
            if self._stop.is_set():  # close() has not waited for this, and removed the one before
                path.unlink(missing_ok=True)

    def _process(self) -> dict[str, Any]:
        """The values that stay the same for the process's life. They are read once."""
        if self._about.get("started") is None:
            me = process_state(os.getpid())
            self._about = {
                "format": FORMAT,
                "pid": os.getpid(),
                "started": None if me is None else me.started,
                "namespace": _namespace(),
                "command": _command(),
            }
        return self._about

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
    for path in shared_files(f"{_PREFIX}*{_SUFFIX}"):
        try:
            yield _parsed(_read(path))
        except FileNotFoundError:
            continue  # its process has just ended
        except (GeartrainError, OSError) as error:
            yield path.name, str(error)
        except _DAMAGE as error:
            yield path.name, f"it is no report of this build: {error!r:.200}"


def remove_stale() -> list[str]:
    """Removes reports of processes that have ended without removing theirs; returns the names of the files.

    An unreadable or unfinished report belongs to the process whose pid is in its name.
    """
    removed = []
    for path in leftovers(f"{_PREFIX}*"):
        if path.suffix not in (_SUFFIX, _UNFINISHED):
            continue
        with contextlib.suppress(GeartrainError, OSError):
            if not _is_of_living(path):
                path.unlink()
                removed.append(path.name)
    return removed


def _is_of_living(path: Path) -> bool:
    if path.suffix == _SUFFIX:
        with contextlib.suppress(*_DAMAGE):
            return _parsed(_read(path)).alive
    pid = path.stem.removeprefix(_PREFIX)
    if not (pid.isascii() and pid.isdecimal() and len(pid) < 8):
        return True  # no name of ours
    now = process_state(int(pid))
    return now is not None and now.state != "Z"


def _read(path: Path) -> Any:
    fd = open_shared(path, writable=False)
    try:
        found = json.loads(os.pread(fd, _MOST_BYTES, 0))
        json.dumps(found, ensure_ascii=False).encode()  # halves of surrogate pairs are text that nobody can show
        return found
    finally:
        os.close(fd)


def _parsed(found: Any) -> ProcessReport:
    if found["format"] != FORMAT:
        raise ValueError(found["format"])
    pid, at_s, period = int(found["pid"]), float(found["at_s"]), float(found["period_s"])
    age_s = time.time() - at_s
    if not (0 < pid < 1 << 22 and math.isfinite(at_s) and 0 < period <= 3600 and age_s >= -10):
        raise ValueError(f"pid {pid}, at_s {at_s}, period_s {period}")
    if found["namespace"] == _namespace():
        now = process_state(pid)
        alive = now is not None and now.state != "Z" and now.started == found["started"]
    else:
        alive = age_s < 10 + 3 * period
    objects = [
        ObjectFigures(
            str(each["kind"]),
            str(each["name"]),
            dict(each["figures"]),
            {name: float(value) for name, value in each["rates"].items()},
        )
        for each in found["objects"]
    ]
    for one in objects:
        _require_shallow(one.figures)
        if "error" not in one.figures:
            try:
                _require_numbers(one.kind, one.figures)
            except (KeyError, TypeError, ValueError) as error:
                one.figures = {"error": f"no figures of this build: {error!r}"}
    return ProcessReport(pid, str(found["command"]), at_s, period, objects, alive, int(found.get("left_out", 0)))


def _require_numbers(kind: str, figures: Mapping[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError where a number that readers rely on is missing or is none."""
    peers = figures["peers"] if kind == "node" else {}
    if not isinstance(peers, Mapping) or not isinstance(figures.get("stores", []), list):
        raise TypeError(f"figures of a {kind}: {str(figures)[:100]}")
    for found, names in ((figures, _NUMBERS_OF.get(kind, ())), *((each, _NUMBERS_OF_PEER) for each in peers.values())):
        for name in names:
            if isinstance(found[name], str) or not math.isfinite(found[name]):
                raise ValueError(f"{name} of a {kind} is {found[name]!r}")


def _numbers(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield f"{prefix}{name}", float(value)


def _encoded(kind: str, name: str, figures: Mapping[str, Any], rates: Mapping[str, float]) -> str:
    """An object of a report as JSON. Raises what JSON does of figures that it has no form for, or no room."""
    _require_shallow(figures)
    text = json.dumps({"kind": kind, "name": name, "figures": figures, "rates": rates}, default=_plain)
    if len(text) > _MOST_BYTES // 2:
        raise ValueError(f"figures of {len(text)} bytes")
    return text


def _fitting(report: Mapping[str, Any], objects: list[str], more: int) -> bytes:
    """The file of a report: with as many of the objects as a reader reads, and how many are not among them."""
    room = _MOST_BYTES - len(json.dumps({**report, "left_out": len(objects) + more, "objects": []}))
    kept = 0
    while kept < len(objects) and len(objects[kept]) + 2 <= room:
        room -= len(objects[kept]) + 2
        kept += 1
    head = json.dumps({**report, "left_out": len(objects) - kept + more})
    return f'{head[:-1]}, "objects": [{", ".join(objects[:kept])}]}}'.encode()


def _require_shallow(figures: Any, levels: int = _MOST_LEVELS) -> None:
    if isinstance(figures, Mapping | list | tuple):
        if levels == 0:
            raise ValueError(f"figures of more than {_MOST_LEVELS} levels")
        for each in figures.values() if isinstance(figures, Mapping) else figures:
            _require_shallow(each, levels - 1)


def _plain(value: Any) -> Any:
    """Converts NumPy numbers and short arrays to Python's. Values without a JSON form become text."""
    if not hasattr(value, "tolist"):
        return str(value)
    length = math.prod(value.shape) if hasattr(value, "shape") else len(value)
    return value.tolist() if length <= _MOST_ELEMENTS else f"{length} elements"


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
living(_Reporter.reset, _Reporter.close).add(_reporter)

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
