"""Trace of batches, calls and all-reduces in Chrome's trace-event format. GEARTRAIN_TRACE=FILE turns it on.

    GEARTRAIN_TRACE=trace.json geartrain launch job.toml      # then open trace.json in Perfetto or chrome://tracing

All processes of a host append to one file. Each batch, call and all-reduce is a slice. Arrows (flows) connect a batch's
creation to its consumer, a call to its execution and back, and one rank to another. `%h` in the file name stands for
the host's name. Use it if hosts share the folder.

Cost. Without the variable, each traced place costs one branch (`if trace.on`). With it, the process keeps at most
`MOST` events in memory, and a thread appends them to the file every `EVERY_S` seconds. Events that do not fit are
dropped and counted. An event in the trace says how many.

Times. Timestamps are CLOCK_MONOTONIC in microseconds, which all processes of a host share. The metadata of each process
has the offset to the wall clock. `merge` adds it when it combines the files of several hosts.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from geartrain.core.processes import at_end_of_forked_child
from geartrain.core.shared_files import reading
from geartrain.core.threads import DaemonThread, ReentrantEvent
from geartrain.errors import ArgumentError, GeartrainError

VARIABLE = "GEARTRAIN_TRACE"
#: Events in memory of a process: about 50 MB.
MOST = 100_000
EVERY_S = 0.5

#: Whether events are recorded; every place that records asks this first.
on: bool = False


class _Recorder:
    """The events of this process that are not in the file yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reset()

    def reset(self) -> None:
        """Without events and thread: at first, and in a forked child."""
        self.events: deque[dict[str, Any]] = deque()
        self.dropped = 0
        self._began = False
        self._threads: set[int] = set()
        self._thread: threading.Thread | None = None
        self._no_thread = False  # the system has no more: what fits into memory is appended at the end
        self._stop = ReentrantEvent()
        self._lock = threading.RLock()  # of the file; a signal's handler may come in between

    def add(self, *events: dict[str, Any]) -> None:
        if len(self.events) + len(events) > MOST:
            self.dropped += len(events)
            return
        tid = threading.get_native_id()
        if tid not in self._threads:
            self._threads.add(tid)
            self.events.append(_metadata("thread_name", tid, name=threading.current_thread().name))
        self.events.extend(events)
        if self._thread is None and not self._no_thread and not self._stop.is_set():
            with self._lock:
                if self._thread is None:
                    thread = DaemonThread(self._run, "geartrain-trace")
                    try:
                        thread.start()
                        self._thread = thread
                    except GeartrainError as error:
                        import logging

                        self._no_thread = True
                        logging.getLogger(__name__).warning(
                            "the trace keeps %d events at most, until this process ends: %s", MOST, error
                        )
                    at_end_of_forked_child(self.close)

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self.flush()

    def flush(self) -> None:
        """Appends the recorded events to the file: whole lines, in one write."""
        with self._lock:
            lines = [self.events.popleft() for _ in range(len(self.events))]
            if self.dropped:
                at = {"pid": os.getpid(), "tid": threading.get_native_id(), "ts": _us(time.perf_counter())}
                lines.append({"ph": "i", "s": "p", "name": f"{self.dropped} events dropped", "cat": "trace", **at})
                self.dropped = 0
            if not lines:
                return
            if not self._began:
                self._began = True
                offset_us = (time.time_ns() - time.perf_counter_ns()) / 1e3
                about = {"name": _process, "host": os.uname().nodename, "wall_offset_us": offset_us}
                lines.insert(0, _metadata("process_name", 0, **about))
            text = "".join(json.dumps(line, default=str) + ",\n" for line in lines)
            with contextlib.suppress(OSError):  # a full disk, or a folder that is gone: training goes on
                _create(self.path)
                fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
                try:
                    os.write(fd, text.encode())
                finally:
                    os.close(fd)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        self.flush()


def name_process(name: str) -> None:
    """Names this process in its trace: "learner-0", or a node's name. The first name stays."""
    global _process
    _process = _process or name


def slice_of(
    name: str,
    category: str,
    began_s: float,
    ended_s: float,
    *,
    flow_in: str | None = None,
    flow_out: str | None = None,
    flow_in_s: float | None = None,
    **arguments: Any,
) -> None:
    """Records a slice of this thread.

    Args:
        name, category: as they are shown.
        began_s, ended_s: `time.perf_counter()`'s.
        flow_in: an arrow that ends here, at `flow_in_s`; by default at the slice's end.
        flow_out: one that begins here; the same text on both sides, and no other arrow's.
        arguments: shown with the slice.
    """
    recorder = _recorder
    if recorder is None:
        return
    at = {"cat": category, "pid": os.getpid(), "tid": threading.get_native_id()}
    began_us, ended_us = _us(began_s), _us(ended_s)
    events: list[dict[str, Any]] = [
        {"ph": "X", "name": name, "ts": began_us, "dur": round(ended_us - began_us, 3), **at, "args": arguments}
    ]
    if flow_in is not None:
        events.append({"ph": "f", "bp": "e", "name": category, "id": flow_in, **at})
        events[-1]["ts"] = ended_us if flow_in_s is None else _us(flow_in_s)
    if flow_out is not None:
        events.append({"ph": "s", "name": category, "id": flow_out, "ts": began_us, **at})
    recorder.add(*events)


def new_flow() -> str:
    """The name of an arrow within this process."""
    return f"{os.getpid()}.{next(_numbers)}"


def start(path: str | os.PathLike[str]) -> None:
    """Begins to record into a file, as GEARTRAIN_TRACE does. Raises `ArgumentError` for a file in no folder."""
    global _recorder, on
    stop()
    file = Path(str(path).replace("%h", os.uname().nodename)).absolute()
    if not file.parent.is_dir():
        raise ArgumentError(f"{VARIABLE} must be a file in an existing folder, found {os.fspath(path)!r}")
    _recorder, on = _Recorder(file), True


def stop() -> None:
    """Ends recording; everything is in the file when it returns."""
    global _recorder, on
    recorder, _recorder, on = _recorder, None, False
    if recorder is not None:
        recorder.close()


def load(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of a trace. The trace may still be written, so that its list has no end yet.

    A line that a full disk has cut is left out.

    Raises:
        ArgumentError: it is no trace. OSError: it cannot be read.
    """
    with reading(Path(path)):
        text = Path(path).read_text(errors="replace").rstrip().removesuffix("]").rstrip().removesuffix(",")
    try:
        events = json.loads(text + "]")
    except (ValueError, RecursionError):
        events = []
        for line in text.splitlines()[1:]:
            with contextlib.suppress(ValueError, RecursionError):
                events.append(json.loads(line.removesuffix(",")))
        if not events:
            raise ArgumentError(f"{os.fspath(path)!r} is not a trace: it is not a list of events") from None
    if not isinstance(events, list) or not all(isinstance(each, dict) and "ph" in each for each in events):
        raise ArgumentError(f"{os.fspath(path)!r} is not a trace: an event has no phase")
    for each in events:
        wrong = _wrong(each)
        if wrong:
            raise ArgumentError(f"{os.fspath(path)!r} is not a trace: the {wrong} of an event is invalid")
    return events


def merge(paths: Iterable[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """The events of several hosts' traces as one: times by the wall clocks, and process ids that do not meet.

    Raises:
        ArgumentError: a file is no trace.
    """
    merged: list[dict[str, Any]] = []
    for number, path in enumerate(paths):
        events = load(path)
        named = {each["pid"]: each.get("args", {}) for each in events if each["name"] == "process_name"}
        offsets = [args["wall_offset_us"] for args in named.values() if "wall_offset_us" in args]
        offset_us = min(offsets) if offsets else 0.0
        for each in events:
            moved = {**each, "pid": each["pid"] + number * (1 << 23)}
            if "ts" in each:
                moved["ts"] = each["ts"] + offset_us
            if each.get("cat") == "replay" and "id" in each:  # an arrow within one process; others cross hosts
                moved["id"] = f"{number}/{each['id']}"
            merged.append(moved)
    return merged


def _wrong(event: dict[str, Any]) -> str:
    """What an event has that none of a trace has; "" for nothing."""
    arguments = event.get("args", {})
    if not isinstance(event.get("pid"), int):
        return f"pid is no whole number: {event.get('pid')!r:.40}"
    if not isinstance(event.get("name"), str):
        return f"name is no text: {event.get('name')!r:.40}"
    if not _is_time(event.get("ts", 0)):
        return f"ts is no number: {event['ts']!r:.40}"
    if not isinstance(arguments, dict):
        return f"args are no object: {arguments!r:.40}"
    if event["name"] == "process_name" and not _is_time(arguments.get("wall_offset_us", 0)):
        return f"wall_offset_us is no number: {arguments['wall_offset_us']!r:.40}"
    return ""


def _is_time(value: Any) -> bool:
    """Whether it is a number of microseconds. NaN, Infinity and numbers beyond a float's range are not."""
    return isinstance(value, int | float) and abs(value) < 1e18


def _metadata(what: str, tid: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": os.getpid(), "tid": tid, "args": arguments}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _create(path: Path) -> None:
    """The file with the beginning of a list, whichever process is the first."""
    if path.exists():
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text("[\n")
    try:
        os.link(beside, path)
    except FileExistsError:
        pass
    finally:
        beside.unlink(missing_ok=True)


def _after_fork() -> None:
    global _process
    _process = ""
    if _recorder is not None:
        _recorder.reset()


_recorder: _Recorder | None = None
_process = ""
_numbers = itertools.count(1)
os.register_at_fork(after_in_child=_after_fork)
atexit.register(stop)
if os.environ.get(VARIABLE):
    start(os.environ[VARIABLE])
