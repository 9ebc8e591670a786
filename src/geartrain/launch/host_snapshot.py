"""Snapshot of a host as plain data: its stores, weights, jobs, and the reports of its processes.

    snapshot = take_snapshot()
    snapshot["stores"][0]["counters"]["inserted"]

A snapshot reads everything without attaching, locking or writing. It reads stores as `geartrain inspect` does, and the
counters of jobs, the process reports (core/process_report.py) and /proc. Anything that vanishes meanwhile is left out.
Anything that is damaged, or belongs to another user, becomes an entry with its name and an `error`. The cost is one
opened file for each store, set of weights, counters and process.

    host, id, at_s, shm: {directory, bytes, free_bytes}
    stores     name, rows, capacity, bytes, clients [{pid, rows}], lock_holder, counters {..}, limiter {..}, age_s
    weights    name, version, published_ns, version_bytes, file_bytes, has_publisher, in_use
    jobs       name, kind, host, hosts, coordinator, processes [{name, kind, pid, restarts, counts {..}, ...}]
    processes  pid, command, age_s, period_s, objects [{kind, name, figures {..}, rates {..}}], left_out
    pids       pid -> state, command, cpu_s, rss_bytes, threads; of all that are named above
    unreadable file -> why
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import geartrain.core.counters as counters
import geartrain.weights as weights
from geartrain.core.process_report import ProcessReport, read_reports
from geartrain.core.processes import process_of_thread, process_state
from geartrain.core.shared_files import Trust, segments_directory, shared_files
from geartrain.errors import GeartrainError
from geartrain.launch.metrics import COUNTS
from geartrain.store.store import Store

FORMAT = "geartrain-host-1"
_SEGMENT_PREFIX = "geartrain."
_JOB_PREFIX = "launch-"


def take_snapshot(trust: Trust = "user") -> dict[str, Any]:
    """The host as it is now; see the module.

    Args:
        trust: whose segments are read, as for `Store.open`.
    """
    reports, unreadable = [], {}
    for report in read_reports():
        if not isinstance(report, ProcessReport):
            unreadable[report[0]] = report[1]
        elif report.alive:
            reports.append(report)
    found: dict[str, Any] = {
        "format": FORMAT,
        "host": socket.gethostname(),
        "id": _identity(),
        "at_s": time.time(),
        "shm": _file_system(),
        "stores": _stores(trust),
        "weights": _weights(trust),
        "jobs": _jobs(reports),
        "processes": [
            {
                "pid": each.pid,
                "command": each.command,
                "age_s": max(0.0, time.time() - each.at_s),
                "period_s": each.period_s,
                "objects": [asdict(one) for one in each.objects],
                "left_out": each.left_out,
            }
            for each in reports
        ],
        "unreadable": unreadable,
    }
    found["pids"] = _pids(found)
    return found


def _identity() -> str:
    """An id that is equal for all processes that see the same segments. It has the boot and the folder."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        about = segments_directory().stat()
        return f"{boot}/{about.st_dev}/{about.st_ino}"
    return boot


def _file_system() -> dict[str, Any]:
    directory = segments_directory()
    with contextlib.suppress(OSError):
        about = os.statvfs(directory)
        return {
            "directory": str(directory),
            "bytes": about.f_blocks * about.f_frsize,
            "free_bytes": about.f_bavail * about.f_frsize,
        }
    return {"directory": str(directory), "bytes": 0, "free_bytes": 0}


def _stores(trust: Trust) -> list[dict[str, Any]]:
    found = []
    for path in shared_files(f"{_SEGMENT_PREFIX}*"):
        name = path.name.removeprefix(_SEGMENT_PREFIX)
        try:
            about = _store(name, trust)
        except (GeartrainError, OSError) as error:
            if path.exists():
                found.append({"name": name, "error": str(error)})
        else:
            found.append(about)
    return found


def _store(name: str, trust: Trust) -> dict[str, Any]:
    store = Store.open(name, mode="r", adopt=True, trust=trust)
    try:
        holder = store.native.lock_holder()
        limiter = store.limiter.state()
        selectable = store.num_steps if limiter.enabled and limiter.unit == "steps" else len(store)
        about = store.native.describe()
        return {
            "name": name,
            "rows": len(store),
            "capacity": store.capacity,
            "bytes": store.nbytes,
            "age_s": max(0.0, (time.time_ns() - about["created_ns"]) / 1e9),
            "options": {key: value for key, value in store.options.items() if isinstance(value, int | float | str)},
            "clients": [{"pid": each["pid"], "rows": each["rows"]} for each in store.native.clients()],
            "lock_holder": process_of_thread(holder) if holder else None,
            "counters": store.stats(),
            "limiter": {**asdict(limiter), "lead": limiter.lead, "selectable": selectable},
            "tasks": tasks_of(store),
        }
    finally:
        store.close()


def tasks_of(store: Store) -> dict[str, dict[str, Any]]:
    """Figures of each task of a store, and who holds its oldest claim; empty if it has no tasks."""
    if not store.tasks:
        return {}
    last = list(store.tasks)[-1]
    found: dict[str, dict[str, Any]] = {}
    for name, figures in store.task_stats().items():
        oldest = None if name == last else store.oldest_claim(name)
        pid, age_s = (None, None) if oldest is None else oldest
        found[name] = {"figures": figures, "oldest_pid": pid, "oldest_age_s": age_s}
    return found


def _weights(trust: Trust) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in weights.names():
        try:
            found.append(weights.describe(name, trust=trust)._asdict())
        except (GeartrainError, OSError) as error:
            if name in weights.names():
                found.append({"name": name, "error": str(error)})
    return found


def _jobs(reports: list[ProcessReport]) -> list[dict[str, Any]]:
    """Counters of jobs and pools.

    The names of their processes come from the reports of launchers and pools, if there are any.
    """
    known = {
        one.figures.get("counters"): (report, one)
        for report in reports
        for one in report.objects
        if one.kind in ("job", "pool")
    }
    found: list[dict[str, Any]] = []
    for name in counters.names():
        try:
            board = counters.SharedCounters.open(name)
            in_use = counters.describe(name).in_use
        except (GeartrainError, OSError) as error:
            if name in counters.names():
                found.append({"name": name, "error": str(error)})
            continue
        if not set(COUNTS) <= set(board.columns):
            continue  # of a program of its own
        report, one = known.get(name, (None, None))
        figures: dict[str, Any] = {} if one is None else one.figures
        listed = figures.get("processes", [])
        processes = []
        for slot in range(board.slots):
            values = dict(board.slot(slot))
            about = listed[slot] if slot < len(listed) else {}
            processes.append(
                {
                    "name": about.get("name", f"slot {slot}"),
                    "kind": about.get("kind", "other"),
                    "pid": int(values["pid"]) or None,
                    "restarts": about.get("restarts", 0),
                    "exit_code": about.get("exit_code"),
                    "counts": {count: values[count] for count in COUNTS},
                    "version": int(values["version"]) if values["beat_s"] else None,
                    "silent_s": max(0.0, time.time() - values["beat_s"]) if values["beat_s"] else None,
                    "stopping": bool(values["stop"]),
                }
            )
        found.append(
            {
                "name": figures.get("name") or name.removeprefix(_JOB_PREFIX),
                "kind": "pool" if one is not None and one.kind == "pool" else "job",
                "counters": name,
                "alive": in_use,
                "launcher": None if report is None else report.pid,
                **{
                    key: figures[key]
                    for key in ("coordinator", "host", "hosts", "folder", "elapsed_s")
                    if key in figures
                },
                "processes": processes,
            }
        )
    return found


def _pids(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """State of all processes that a snapshot names; their names as keys are text, as in JSON."""
    pids = {each["pid"] for each in found["processes"]}
    for store in found["stores"]:
        pids |= {each["pid"] for each in store.get("clients", [])} | {store.get("lock_holder")}
    for job in found["jobs"]:
        pids |= {each["pid"] for each in job.get("processes", [])}
    states = {}
    for pid in sorted(pid for pid in pids if pid):
        state = process_state(pid)
        if state is not None:
            states[str(pid)] = {
                "state": state.state,
                "stopped": state.is_stopped,
                "command": state.command,
                "cpu_s": state.cpu_s,
                "rss_bytes": state.rss_bytes,
                "threads": state.threads,
            }
    return states


__all__ = ["FORMAT", "take_snapshot"]
