"""Sections of the screen: tables of stores, processes, replays, peers, groups and weights, from hosts' snapshots."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from geartrain.tools.watch.causes import SILENT_S, WAITING_S, HostView

_IDLE = "dim"  # the style of what nobody uses


@dataclass(frozen=True)
class Column:
    """A column: its heading, how its values are shown, and whether to the right."""

    name: str
    show: Callable[[Any], str] = str
    right: bool = True


@dataclass
class Line:
    """One line of a section.

    Attributes:
        values: one for each column; None where there is none.
        style: "" or a style of rich.
        detail: everything known about the line.
    """

    values: list[Any]
    style: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Section:
    """A table. Columns are ordered by importance: if they do not fit, the rightmost are left out."""

    title: str
    columns: list[Column]
    lines: list[Line]

    def naming(self, names: Sequence[str]) -> Section:
        """The lines in which one of these texts stands; all of them without any."""
        lines = [
            line
            for line in self.lines
            if not names or any(name in value for name in names for value in line.values if isinstance(value, str))
        ]
        return Section(self.title, self.columns, lines)

    def sorted(self, column: int, descending: bool) -> list[Line]:
        """The lines sorted by a column's values. Lines without a value come last. By name, unused ones come last."""
        there = [line for line in self.lines if line.values[column] is not None]
        rest = [line for line in self.lines if line.values[column] is None]
        number = all(isinstance(line.values[column], int | float) for line in there)
        there.sort(key=lambda line: line.values[column] if number else str(line.values[column]), reverse=descending)
        return sorted(there + rest, key=lambda line: column == 0 and line.style == _IDLE)


def count(value: float | None) -> str:
    """A number with at most four digits and a unit: 12, 1,234, 56.7k, 8.9M."""
    if value is None:
        return ""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * size:
            return f"{value / size:.1f}{unit}"
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.1f}"


def size(value: float | None) -> str:
    """Bytes."""
    if value is None:
        return ""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= one:
            return f"{value / one:,.1f} {unit}"
    return f"{value:,.0f} B"


def share(value: float | None) -> str:
    """A share of the time."""
    return "" if value is None else f"{min(max(value, 0.0), 9.99):.0%}"


def seconds(value: float | None) -> str:
    """A duration."""
    if value is None:
        return ""
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.0f} h"


def text(value: Any) -> str:
    """Anything; nothing for None."""
    return "" if value is None else str(value)


_NAME = Column("name", text, right=False)


def sections_of(snapshots: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> list[Section]:
    """All sections, in the order of the keys that show them, with the lines in which one of the names stands.

    Of several hosts, each name with its host's.
    """
    views = [HostView(each) for each in snapshots]
    many = len(views) > 1
    made = [
        _section("stores", views, many, _STORES, _stores),
        _section("processes", views, many, _PROCESSES, _processes),
        _section("replays", views, many, _REPLAYS, _replays),
        _section("peers", views, many, _PEERS, _peers),
        _section("groups", views, many, _GROUPS, _groups),
        _section("weights", views, many, _WEIGHTS, _weights),
        _section("tasks", views, many, _TASKS, _tasks),
    ]
    if many:
        made[-1].lines[:0] = _tasks_of_all(views)
    return [each.naming(names) for each in made]


def _section(
    title: str,
    views: Sequence[HostView],
    many: bool,
    columns: list[Column],
    lines: Callable[[HostView], Iterator[Line]],
) -> Section:
    made = []
    for view in views:
        for line in lines(view):
            if many:
                line.values[0] = f"{view.host}:{line.values[0]}"
            made.append(line)
    return Section(title, columns, made)


def _line(columns: list[Column], cells: Mapping[str, Any], style: str, detail: Mapping[str, Any]) -> Line:
    """A line of cells by the names of their columns; a column that is not among them has None."""
    return Line([cells.get(column.name) for column in columns], style, detail)


_STORES = [
    _NAME,
    Column("rows", count),
    Column("full", share),
    Column("insert/s", count),
    Column("sample/s", count),
    Column("size", size),
    Column("limiter", text, right=False),
    Column("torn/s", count),
    Column("evict/s", count),
    Column("prio/s", count),
    Column("procs", count),
]


def _stores(view: HostView) -> Iterator[Line]:
    for store in view.snapshot["stores"]:
        if "error" in store:
            yield _line(_STORES, {"name": store["name"], "limiter": store["error"]}, "red", store)
            continue
        rates, used = store["rates"], len(store["clients"])
        taken = store["rows"] + sum(store["counters"].get(state, 0) for state in ("under_way", "kept"))
        evicted = [rates[name] for name in ("evicted", "expired", "exhausted") if name in rates]
        yield _line(
            _STORES,
            {
                "name": store["name"],
                "rows": store["rows"],
                "full": taken / store["capacity"] if store["capacity"] else None,
                "insert/s": rates.get("inserted"),
                "sample/s": rates.get("sampled"),
                "size": store["bytes"],
                "limiter": _limiter(store),
                "torn/s": rates.get("torn"),
                "evict/s": sum(evicted) if evicted else None,
                "prio/s": rates.get("priorities_updated"),
                "procs": used,
            },
            "" if used else _IDLE,
            store,
        )


_TASKS = [
    _NAME,
    Column("task", text, right=False),
    Column("done/s", count),
    Column("due", count),
    Column("claimed", count),
    Column("oldest", seconds),
    Column("claimed by", text, right=False),
    Column("done", count),
    Column("deaths", count),
    Column("set back", count),
]
_SUMS = ("due", "claimed", "done", "deaths", "set_back")


def _tasks(view: HostView) -> Iterator[Line]:
    for store in view.snapshot["stores"]:
        for name, task in store.get("tasks", {}).items():
            yield _task_line(store["name"], name, [(view, task)], store)


def _tasks_of_all(views: Sequence[HostView]) -> Iterator[Line]:
    """Sums of the tasks of stores that several hosts have, each with the oldest claim of all hosts."""
    found: dict[tuple[str, str], list[tuple[HostView, Mapping[str, Any]]]] = {}
    for view in views:
        for store in view.snapshot["stores"]:
            for name, task in store.get("tasks", {}).items():
                found.setdefault((store["name"], name), []).append((view, task))
    for (store_name, name), tasks in found.items():
        if len(tasks) > 1:
            detail = {view.host: task for view, task in tasks}
            yield _task_line(f"{len(tasks)} hosts:{store_name}", name, tasks, detail)


def _task_line(
    store_name: str, name: str, tasks: Sequence[tuple[HostView, Mapping[str, Any]]], detail: Mapping[str, Any]
) -> Line:
    sums = {each: sum(task["figures"][each] for _, task in tasks) for each in _SUMS}
    rates = [task["rates"]["done"] for _, task in tasks if "done" in task["rates"]]
    claimed = [(task["oldest_age_s"], view, task["oldest_pid"]) for view, task in tasks if task["oldest_pid"]]
    oldest_s, where, pid = max(claimed, key=lambda each: each[0], default=(None, None, None))
    prefix = f"{where.host}:" if where is not None and len(tasks) > 1 else ""
    cells = {
        "name": store_name,
        "task": name,
        "done/s": sum(rates) if rates else None,
        "oldest": oldest_s,
        "claimed by": f"{prefix}{where.name(pid)}" if where is not None and pid is not None else "",
        **{each.replace("_", " "): value for each, value in sums.items()},
    }
    return _line(_TASKS, cells, "", detail)


def _limiter(store: Mapping[str, Any]) -> str:
    limiter, rates = store["limiter"], store["rates"]
    if limiter["most_in_flight"] is not None:
        flying = f"{limiter['in_flight']:,} of {limiter['most_in_flight']:,} in flight"
        return f"{flying}, {_ratio(limiter, rates)}" if limiter["enabled"] else flying
    return _ratio(limiter, rates) if limiter["enabled"] else "off"


def _ratio(limiter: Mapping[str, Any], rates: Mapping[str, float]) -> str:
    if limiter["selectable"] < limiter["min_size_to_sample"]:
        return f"below {limiter['min_size_to_sample']:,} {limiter['unit']}"
    waits = [f"{what} waits" for what in ("insert", "sample") if rates.get(f"{what}_wait_s", 0.0) > 0.05]
    ratio = limiter["samples_per_insert"]
    return ", ".join(waits) or (
        f"{limiter['lead']:+,.0f} of {limiter['error_buffer']:,.0f}" if ratio else "minimum only"
    )


_PROCESSES = [
    _NAME,
    Column("state", text, right=False),
    Column("waits", share),
    Column("steps/s", count),
    Column("cpu s", count),
    Column("memory", size),
    Column("rows/s", count),
    Column("sample/s", count),
    Column("pid", text),
    Column("version", text),
    Column("restarts", count),
    Column("job", text, right=False),
]


def _processes(view: HostView) -> Iterator[Line]:
    seen = set()
    for job in view.snapshot["jobs"]:
        for process in job.get("processes", []):
            pid, rates = process["pid"], process["rates"]
            seen.add(pid)
            kernel = view.snapshot["pids"].get(str(pid), {})
            state, style = _state(view, process, kernel)
            yield _line(
                _PROCESSES,
                {
                    "name": process["name"],
                    "state": state,
                    "waits": rates.get("wait_s"),
                    "steps/s": rates.get("steps"),
                    "cpu s": kernel.get("cpu_s"),
                    "memory": kernel.get("rss_bytes"),
                    "rows/s": rates.get("rows"),
                    "sample/s": rates.get("samples"),
                    "pid": pid,
                    "version": process["version"],
                    "restarts": process["restarts"],
                    "job": job["name"],
                },
                style,
                {**process, **kernel},
            )
    reports = {report["pid"]: report for report in view.snapshot["processes"]}
    attached = {each["pid"] for store in view.snapshot["stores"] for each in store.get("clients", [])}
    for pid in sorted((reports.keys() | attached) - seen):
        kernel = view.snapshot["pids"].get(str(pid), {})
        stopped = pid in view.stopped
        yield _line(
            _PROCESSES,
            {
                "name": view.name(pid).rpartition(" (")[0],
                "state": "STOPPED" if stopped else "runs" if kernel else "another host's or namespace's",
                "cpu s": kernel.get("cpu_s"),
                "memory": kernel.get("rss_bytes"),
                "pid": pid,
            },
            "bold red" if stopped else "",
            {**reports.get(pid, {"pid": pid}), **kernel},
        )


def _state(view: HostView, process: Mapping[str, Any], kernel: Mapping[str, Any]) -> tuple[str, str]:
    if process["pid"] in view.stopped:
        return "STOPPED", "bold red"
    if process["exit_code"] is not None:
        return ("finished", "dim") if process["exit_code"] == 0 else (f"ended ({process['exit_code']})", "red")
    if not kernel:
        return "gone", "red"
    waiting_s = view.waiting_s(process["pid"])
    if waiting_s > WAITING_S:
        return f"waits {seconds(waiting_s)}", "yellow"
    if process["silent_s"] is None:
        return "starts", "dim"
    if process["silent_s"] > SILENT_S:
        return f"silent {seconds(process['silent_s'])}", "yellow"
    return "runs", ""


_REPLAYS = [
    _NAME,
    Column("batch/s", count),
    Column("waits", share),
    Column("sample/s", count),
    Column("bytes/s", size),
    Column("now waits", seconds),
    Column("makes", share),
    Column("redrawn/s", count),
    Column("strategy", text, right=False),
    Column("process", text, right=False),
]


def _replays(view: HostView) -> Iterator[Line]:
    for report, one in view.objects("replay"):
        figures, rates = one["figures"], one["rates"]
        waiting_s = figures.get("waiting_s") or None
        yield _line(
            _REPLAYS,
            {
                "name": one["name"],
                "batch/s": rates.get("batches"),
                # A wait is counted when it ends: one that has lasted for seconds is all of the time.
                "waits": 1.0 if waiting_s and waiting_s > WAITING_S else rates.get("wait_s"),
                "sample/s": rates.get("rows"),
                "bytes/s": rates.get("bytes"),
                "now waits": waiting_s,
                "makes": rates.get("make_s"),
                "redrawn/s": rates.get("redrawn"),
                "strategy": figures.get("selection"),
                "process": view.name(report["pid"]),
            },
            "yellow" if waiting_s and waiting_s > 1 else "",
            {**figures, "rates": rates},
        )


_PEERS = [
    Column("peer", text, right=False),
    Column("of", text, right=False),
    Column("sent/s", count),
    Column("received/s", count),
    Column("open", count),
    Column("bytes/s out", size),
    Column("bytes/s in", size),
    Column("by", text, right=False),
]


def _peers(view: HostView) -> Iterator[Line]:
    for _, one in view.objects("node"):
        for peer, counts in one["figures"].get("peers", {}).items():
            rates = {name: one["rates"].get(f"peers.{peer}.{name}") for name in counts}
            stuck = counts["open"] and rates.get("messages_received") == 0
            yield _line(
                _PEERS,
                {
                    "peer": peer,
                    "of": one["name"],
                    "sent/s": rates.get("messages_sent"),
                    "received/s": rates.get("messages_received"),
                    "open": counts["open"],
                    "bytes/s out": rates.get("bytes_sent"),
                    "bytes/s in": rates.get("bytes_received"),
                    "by": counts["transport"],
                },
                "yellow" if stuck else "",
                {**counts, "rates": rates},
            )


_GROUPS = [
    _NAME,
    Column("rank", text),
    Column("op/s", count),
    Column("pending", count),
    Column("bytes/s", size),
    Column("issued", count),
    Column("epoch", text),
    Column("lost", count),
    Column("process", text, right=False),
    Column("failed", text, right=False),
]


def _groups(view: HostView) -> Iterator[Line]:
    for report, one in view.objects("group"):
        figures, rates = one["figures"], one["rates"]
        yield _line(
            _GROUPS,
            {
                "name": one["name"],
                "rank": f"{figures['rank']}/{figures['world_size']}",
                "op/s": rates.get("operations"),
                "pending": figures["issued"] - figures["operations"],
                "bytes/s": rates.get("array_bytes"),
                "issued": figures["issued"],
                "epoch": figures["epoch"],
                "lost": figures["lost_reducers"] or None,
                "process": view.name(report["pid"]),
                "failed": figures["failed"] or None,
            },
            "red" if figures["failed"] else "yellow" if figures["lost_reducers"] else "",
            {**figures, "rates": rates},
        )
    for report, one in view.objects("reducer"):
        figures, rates = one["figures"], one["rates"]
        yield _line(
            _GROUPS,
            {
                "name": f"reducer {one['name']}",
                "op/s": rates.get("operations"),
                "bytes/s": rates.get("bytes_received"),
                "issued": figures.get("operations"),
                "process": view.name(report["pid"]),
            },
            "",
            {**figures, "rates": rates},
        )


_WEIGHTS = [
    _NAME,
    Column("version", text),
    Column("age", seconds),
    Column("oldest read", text),
    Column("readers", count),
    Column("size", size),
    Column("publisher", text, right=False),
]


def _weights(view: HostView) -> Iterator[Line]:
    for each in view.snapshot["weights"]:
        if "error" in each:
            yield _line(_WEIGHTS, {"name": each["name"], "publisher": each["error"]}, "red", each)
            continue
        readers = [one["figures"].get("version") for _, one in view.objects("reader") if one["name"] == each["name"]]
        read = [version for version in readers if version is not None]
        age_s = time.time() - each["published_ns"] / 1e9 if each["version"] is not None else None
        yield _line(
            _WEIGHTS,
            {
                "name": each["name"],
                "version": each["version"],
                "age": age_s,
                "oldest read": min(read) if read else None,
                "readers": len(readers),
                "size": each["version_bytes"],
                "publisher": "alive" if each["has_publisher"] else "gone",
            },
            "" if each["has_publisher"] else "yellow" if each["in_use"] else "dim",
            each,
        )


__all__ = ["Column", "Line", "Section", "count", "sections_of", "size"]
