"""Causes of waits: finds the processes that wait, on one or more hosts, and the processes that they wait for.

There is one rule for each kind of wait: a stopped process, the segment's lock, the rate limiter, rows, a reply, an
all-reduce. A finding names processes, never "the network". It claims only what snapshots show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

#: A process that has not reported progress, or itself, for so long is named.
SILENT_S = 5.0
#: Share of the time from which on waiting is named.
WAITS = 0.05
#: A wait in progress from which on it is named.
WAITING_S = 1.0
_FULL = 0.05  # of the shared memory's file system that is free
_BEHIND = 10  # versions

Level = Literal["stopped", "lost", "waits", "note"]


@dataclass
class Diagnosis:
    """A problem, or a process that waits.

    Attributes:
        level: "stopped" and "lost" are causes, "waits" their effects, "note" worth knowing.
        about: its subject: a process, store, group, peer or weights.
        text: a sentence.
        cause: processes to blame, as "name (pid N)"; empty if there are none.
        host: name of the host.
    """

    level: Level
    about: str
    text: str
    cause: list[str] = field(default_factory=list)
    host: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


class HostView:
    """A snapshot with its processes by pid: their names, and whether they are stopped."""

    def __init__(self, snapshot: Mapping[str, Any]) -> None:
        self.snapshot = snapshot
        self.host: str = snapshot["host"]
        self.names: dict[int, str] = {}
        for report in snapshot["processes"]:
            nodes = [one["name"] for one in report["objects"] if one["kind"] == "node"]
            self.names[report["pid"]] = nodes[0] if nodes else report["command"]
        for job in snapshot["jobs"]:
            for process in job.get("processes", []):
                if process["pid"]:
                    self.names[process["pid"]] = f"{process['name']} of {job['name']}"
            if job.get("launcher"):
                what = "launcher" if job["kind"] == "job" else "owner of the actors"
                self.names[job["launcher"]] = f"{what} of {job['name']}"
        self.stopped = {int(pid) for pid, state in snapshot["pids"].items() if state["stopped"]}

    def name(self, pid: int) -> str:
        """A process for people."""
        known = self.names.get(pid) or self.snapshot["pids"].get(str(pid), {}).get("command", "a process")
        return f"{known} (pid {pid})"

    def blamed(self, pids: Sequence[int]) -> list[int]:
        """The processes to blame among possible causes: the stopped ones if there are any, otherwise all."""
        return [pid for pid in pids if pid in self.stopped] or list(pids)

    def objects(self, kind: str) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """Objects of a kind, each with its process's report."""
        for report in self.snapshot["processes"]:
            for one in report["objects"]:
                if one["kind"] == kind and "error" not in one["figures"]:
                    yield report, one

    def waiting_s(self, pid: int) -> float:
        """How long a process has waited for a batch by now; 0 if it does not."""
        waits = [
            one["figures"].get("waiting_s", 0.0) + report["age_s"]
            for report, one in self.objects("replay")
            if report["pid"] == pid and one["figures"].get("waiting_s")
        ]
        return max(waits, default=0.0)

    def samplers(self, store: str) -> list[int]:
        """Processes that report a replay of the store."""
        return [report["pid"] for report, one in self.objects("replay") if store in one["figures"].get("stores", ())]

    def writers(self, store: Mapping[str, Any]) -> list[int]:
        """Processes that are attached to the store and neither sample it nor only supervise."""
        rest = set(self.samplers(store["name"])) | {job.get("launcher") for job in self.snapshot["jobs"]}
        return [each["pid"] for each in store["clients"] if each["pid"] not in rest]


def find_causes(snapshots: Sequence[Mapping[str, Any]]) -> list[Diagnosis]:
    """What stands still or waits on these hosts, causes before effects. `snapshots` have been given rates."""
    views = [HostView(each) for each in snapshots]
    waits: list[tuple[Diagnosis, list[int], HostView]] = []
    found: list[Diagnosis] = []
    for view in views:
        for finding, pids in (*_stores(view), *_replays(view)):
            waits.append((finding, pids, view))
    for view, finding, blamed in (*_calls(views), *_groups(views)):
        waits.append((finding, blamed[1], blamed[0] or view))
        finding.host = view.host
    for finding, pids, view in waits:
        finding.cause = [view.name(pid) for pid in pids]
        finding.host = finding.host or view.host
    for view in views:
        for pid in sorted(view.stopped):
            effects = [each.about for each, pids, where in waits if where is view and pid in pids]
            held = [
                f"it holds the lock of store {store['name']!r}: every commit waits"
                for store in view.snapshot["stores"]
                if store.get("lock_holder") == pid
            ]
            waiting = f"; because of it {_listed(effects)} wait{'s' if len(effects) == 1 else ''}" if effects else ""
            text = f"{view.name(pid)} is stopped (SIGSTOP or a debugger){waiting}" + "".join(f"; {one}" for one in held)
            found.append(Diagnosis("stopped", view.name(pid), text, [view.name(pid)], view.host))
        for finding in (*_lost(view), *_notes(view)):
            finding.host = view.host
            found.append(finding)
    order: list[Level] = ["stopped", "lost", "waits", "note"]
    found += [finding for finding, _, _ in waits]
    return sorted(found, key=lambda each: order.index(each.level))


def _stores(view: HostView) -> Iterator[tuple[Diagnosis, list[int]]]:
    """Inserts that the rate limiter holds back, and locks of stopped processes."""
    for store in view.snapshot["stores"]:
        if "error" in store:
            continue
        limiter, share = store["limiter"], store["rates"].get("insert_wait_s", 0.0)
        full = limiter["lead"] + limiter["samples_per_insert"] > limiter["error_buffer"]
        if not (limiter["enabled"] and limiter["samples_per_insert"] and full and share > WAITS):
            continue
        samplers = view.samplers(store["name"])
        who = "" if samplers else ", and no process here reports to sample it"
        yield (
            Diagnosis(
                "waits",
                f"inserts into {store['name']}",
                f"inserts into {store['name']} wait for samples (rate limiter, {share:.1f} s of waiting a second){who}",
            ),
            view.blamed(samplers),
        )


def _replays(view: HostView) -> Iterator[tuple[Diagnosis, list[int]]]:
    """Consumers that wait for batches."""
    stores = {each["name"]: each for each in view.snapshot["stores"] if "error" not in each}
    for report, one in view.objects("replay"):
        figures, pid = one["figures"], report["pid"]
        waiting_s, share = figures.get("waiting_s", 0.0), one["rates"].get("wait_s", 0.0)
        if (waiting_s < WAITING_S and share < WAITS) or pid in view.stopped:
            continue
        for_s = f"for {waiting_s + report['age_s']:.0f} s" if waiting_s >= WAITING_S else f"{share:.0%} of the time"
        about = f"{view.name(pid)}"
        why, pids = "its batches take that long to make", [pid]
        for name in figures.get("stores", ()):
            store = stores.get(name)
            if store is None:
                continue
            limiter, writers = store["limiter"], view.blamed(view.writers(store))
            n = figures.get("batch_size", 1)
            low = limiter["samples_per_insert"] and limiter["lead"] - n < -limiter["error_buffer"]
            if store["lock_holder"] in view.stopped:
                why, pids = f"the lock of {name} is held by a stopped process", [store["lock_holder"]]
            elif limiter["enabled"] and (low or limiter["selectable"] < limiter["min_size_to_sample"]):
                why, pids = f"the rate limiter of {name} lets it draw when more {limiter['unit']} are inserted", writers
            elif (lag := _lagging(store)) and store["rows"] < n:
                why, pids = f"its task {lag[0]}", view.blamed(lag[1])
            elif store["rows"] == 0:
                why, pids = f"no row of {name} is selectable", writers
            else:
                continue
            break
        else:
            if one["rates"].get("exchange_s", 0.0) > WAITS:
                why, pids = "other ranks' rows come late", view.blamed([])
        yield Diagnosis("waits", about, f"{about} waits for batches of {one['name']} {for_s}: {why}"), pids


def _lagging(store: Mapping[str, Any]) -> tuple[str, list[int]] | None:
    """The task that most rows wait for, in words, and the process that has claimed the oldest of them."""
    tasks = dict(list(store.get("tasks", {}).items())[:-1])  # a replay draws the rows of the last one
    rows = {name: task["figures"]["due"] + task["figures"]["claimed"] for name, task in tasks.items()}
    name = max(rows, key=lambda each: rows[each], default=None)
    if name is None or rows[name] == 0:
        return None
    figures, pid = tasks[name]["figures"], tasks[name]["oldest_pid"]
    text = f"{name!r} lags by {rows[name]} rows, {figures['due']} due and {figures['claimed']} claimed"
    return text, [] if pid is None else [pid]


_Blamed = tuple["HostView | None", list[int]]


def _calls(views: Sequence[HostView]) -> Iterator[tuple[HostView, Diagnosis, _Blamed]]:
    """Calls without a reply, whose peer has sent nothing for the time of a report."""
    nodes: dict[str, tuple[HostView, int, Mapping[str, Any]]] = {}
    for view in views:
        for report, one in view.objects("node"):
            nodes[one["name"]] = (view, report["pid"], one["figures"])
    for view in views:
        for report, one in view.objects("node"):
            if report["pid"] in view.stopped:
                continue
            for peer, counts in one["figures"].get("peers", {}).items():
                received = one["rates"].get(f"peers.{peer}.messages_received")
                if not counts.get("open") or received is None or received > 0:
                    continue
                where, pid, figures = nodes.get(peer, (None, 0, {}))
                stopped = where is not None and pid in where.stopped
                backlog = figures.get("backlog", 0)
                why = "its process is stopped" if stopped else f"{backlog} calls wait for a thread there"
                text = f"{view.name(report['pid'])} waits for {counts['open']} replies of {peer}"
                finding = Diagnosis(
                    "waits", view.name(report["pid"]), text + (f": {why}" if stopped or backlog else "")
                )
                yield view, finding, (where, [pid] if where is not None else [])


def _groups(views: Sequence[HostView]) -> Iterator[tuple[HostView, Diagnosis, _Blamed]]:
    """All-reduces that wait for the ranks that have begun the fewest."""
    groups: dict[tuple[str, int, int], list[tuple[HostView, int, Mapping[str, Any], Mapping[str, Any]]]] = {}
    for view in views:
        for report, one in view.objects("group"):
            figures = one["figures"]
            key = (one["name"], figures["epoch"], figures["world_size"])
            groups.setdefault(key, []).append((view, report["pid"], figures, one["rates"]))
    for (name, _, _), members in groups.items():
        most = max(figures["issued"] for _, _, figures, _ in members)
        late = [each for each in members if each[2]["issued"] < most]
        for view, pid, figures, rates in members:
            pending = figures["issued"] - figures["operations"]
            if pid in view.stopped or pending <= 0 or rates.get("operations", 1.0) > 0:
                continue
            behind = [each for each in late if each[1] in each[0].stopped] or late
            who = ", ".join(f"rank {each[2]['rank']}" for each in behind) or "ranks of other hosts"
            text = f"rank {figures['rank']} of group {name}, {view.name(pid)}, waits for an all-reduce of {who}"
            where = behind[0][0] if behind else None
            pids = [each[1] for each in behind if each[0] is where]
            yield view, Diagnosis("waits", f"rank {figures['rank']} of {name}", text), (where, pids)


def _lost(view: HostView) -> Iterator[Diagnosis]:
    """Processes that are there and do not run their loop, and those that are gone while others need them."""
    for report in view.snapshot["processes"]:
        pid = report["pid"]
        if report["age_s"] > SILENT_S + 3 * report["period_s"] and pid not in view.stopped:
            text = f"{view.name(pid)} has not reported for {report['age_s']:.0f} s: its interpreter does not run"
            yield Diagnosis("lost", view.name(pid), text, [view.name(pid)])
    for job in view.snapshot["jobs"]:
        for process in job.get("processes", []):
            pid, code = process["pid"], process["exit_code"]
            if code not in (None, 0):
                about = f"{process['name']} of {job['name']}"
                yield Diagnosis("lost", about, f"{about} has ended with {code}", [about])
            elif (
                pid
                and (process["silent_s"] or 0.0) > SILENT_S
                and str(pid) in view.snapshot["pids"]
                and pid not in view.stopped
                and code is None
            ):
                text = f"{view.name(pid)} has reported no progress for {process['silent_s']:.0f} s"
                yield Diagnosis("waits", view.name(pid), text)
    versions = {each["name"]: each.get("version") for each in view.snapshot["weights"]}
    for each in view.snapshot["weights"]:
        if each.get("in_use") and not each.get("has_publisher"):
            yield Diagnosis(
                "lost", each["name"], f"weights {each['name']} have readers, and no publisher that is alive"
            )
    for report, one in view.objects("reader"):
        newest, mine = versions.get(one["name"]), one["figures"].get("version")
        if newest is not None and mine is not None and newest - mine >= _BEHIND:
            who = view.name(report["pid"])
            yield Diagnosis("note", who, f"{who} acts with version {mine} of {one['name']}, {newest - mine} behind")


def _notes(view: HostView) -> Iterator[Diagnosis]:
    shm = view.snapshot["shm"]
    if shm["bytes"] and shm["free_bytes"] < _FULL * shm["bytes"]:
        text = f"{shm['directory']} has {shm['free_bytes'] / 1e6:,.0f} of {shm['bytes'] / 1e6:,.0f} MB left"
        yield Diagnosis("note", shm["directory"], text)
    for store in view.snapshot["stores"]:
        if "error" in store:
            continue
        if torn := store["rates"].get("torn", 0.0):
            text = (
                f"{torn:,.1f} rows a second of {store['name']} are overwritten while they are copied, and drawn again"
            )
            yield Diagnosis("note", store["name"], text)
    left = [each for each in view.snapshot["stores"] if "error" not in each and not each["clients"]]
    if left:
        names = ", ".join(each["name"] for each in left[:3]) + (", ..." if len(left) > 3 else "")
        mb = sum(each["bytes"] for each in left) / 1e6
        what = f"the store {names} ({mb:,.1f} MB)" if len(left) == 1 else f"{len(left)} stores ({names}; {mb:,.1f} MB)"
        text = f"no process uses {what}: `geartrain remove NAME` frees the memory"
        yield Diagnosis("note", "stores", text)


def _listed(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


__all__ = ["SILENT_S", "WAITING_S", "Diagnosis", "HostView", "find_causes"]
