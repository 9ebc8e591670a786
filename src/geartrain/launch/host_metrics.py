"""Converts a snapshot of a host into Prometheus metrics: stores, processes, replays, RPC peers, groups and weights.

`METRICS` lists the names, and docs/monitoring.md the labels. Several objects can have the same labels, such as two
replays of one store in one process. Their counters are then added up, and the largest of their gauges is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from geartrain.core.metrics_server import Metric
from geartrain.core.printable import printable
from geartrain.launch.metrics import COUNTS

Value = tuple[str, tuple[str, ...], float]


def _metrics() -> Iterator[Metric]:
    def some(prefix: str, labels: tuple[str, ...], **named: str) -> Iterator[Metric]:
        for name, about in named.items():
            kind: Literal["counter", "gauge"] = "counter" if name.endswith("_total") else "gauge"
            yield Metric(f"geartrain_{prefix}_{name.removesuffix('_total')}", kind, about, labels)

    yield from some("shm", (), bytes="Size of the file system of segments", free_bytes="What is free of it")
    yield from some(
        "store",
        ("store",),
        rows="Rows that can be selected",
        capacity_rows="Rows there is room for",
        bytes="Size of the segment",
        processes="Processes attached and alive",
        inserted_total="Rows committed",
        sampled_total="Samples counted against rows",
        torn_total="Copies discarded because the row changed meanwhile",
        stale_keys_total="Updates of rows that no longer exist",
        priorities_updated_total="Priorities set",
        reclaimed_total="Rows reclaimed from processes that died",
        repairs_total="Rebuilds after a death inside the lock",
    )
    yield from some(
        "store",
        ("store",),
        under_way="Rows that tasks are still to be done for",
        in_flight="Rows whose batch the training loop has not finished",
        clock="Version of the policy that is trained",
        kept="Rows of batches that are not told to be saved",
        span_bytes="Bytes for values of different lengths",
        free_span_bytes="What is free of them",
    )
    yield from some(
        "task",
        ("store", "task"),
        due="Rows that may be claimed",
        claimed="Rows that are claimed",
        done_total="Puts",
        released_total="Rows released by their claimers",
        deaths_total="Claimers that died",
        set_back_total="Results given up to make room",
        oldest_claim_seconds="Since the oldest claimed row was inserted",
    )
    yield from some(
        "store",
        ("store", "reason"),
        removed_total="Rows removed: evicted, expired, exhausted, deleted, dropped, given up, stale",
    )
    yield from some(
        "limiter",
        ("store",),
        enabled="Whether inserts and samples may have to wait",
        lead="Samples allowed beyond the middle of what is allowed",
        error_buffer="How far either side may run ahead",
        most_in_flight="Most rows in flight; 0: no limit",
        insert_wait_seconds_total="Seconds that inserts have waited, of all threads",
        sample_wait_seconds_total="Seconds that samples have waited, of all threads",
    )
    counts = {
        f"{name.removesuffix('_s')}_seconds_total" if name.endswith("_s") else f"{name}_total": f"Total {name}"
        for name in COUNTS
    }
    yield from some(
        "process",
        ("job", "process"),
        **counts,
        version="Version of the weights in use",
        silent_seconds="Since it reported progress",
        restarts="How often it was started again",
    )
    yield from some(
        "process",
        ("process", "pid"),
        stopped="1 for a process that is stopped by a signal or a debugger",
        cpu_seconds_total="CPU time",
        resident_bytes="Memory",
    )
    yield from some(
        "replay",
        ("store", "process"),
        batches_total="Batches delivered",
        rows_total="Rows delivered",
        bytes_total="Bytes delivered",
        redrawn_total="Rows lost between their draw and their copy",
        wait_seconds_total="Seconds that the consumer has waited",
        make_seconds_total="Seconds spent on selecting and fetching",
        waiting_seconds="How long the consumer waits now",
    )
    yield from some(
        "rpc",
        ("node", "peer"),
        messages_sent_total="Messages sent",
        messages_received_total="Messages received",
        bytes_sent_total="Bytes sent",
        bytes_received_total="Bytes received",
        open_calls="Calls without a reply",
    )
    yield from some("rpc", ("node",), backlog="Calls of peers that wait for a thread")
    yield from some(
        "group",
        ("group", "rank"),
        operations_total="All-reduces done",
        array_bytes_total="Bytes of their arrays",
        pending="All-reduces begun and not done",
        failed="1 for a group that has ended by an error",
        lost_reducers="Reducers that it goes on without now",
        reducer_losses_total="Reducers lost",
        reducer_returns_total="Lost reducers that have their share again",
        taken_over_bytes_total="Bytes that ranks reduced in the place of lost reducers",
    )
    yield from some(
        "reducer",
        ("reducer",),
        operations_total="All-reduces done",
        bytes_received_total="Bytes received",
        bytes_sent_total="Bytes sent",
        memory_bytes="Of chunks",
    )
    yield from some(
        "weights",
        ("weights",),
        version="Newest version",
        published_timestamp_seconds="When it was published",
        bytes="Of a version",
        publisher_alive="1 while there is a publisher",
    )
    yield from some("weights", ("weights", "process"), reader_version="Version of a reader's newest snapshot")


#: All of them, by name.
METRICS: dict[str, Metric] = {each.name: each for each in _metrics()}


def values_of(snapshot: Mapping[str, Any]) -> dict[str, dict[tuple[str, ...], float]]:
    """The values of a snapshot, by metric and labels; a metric without any is there, and empty."""
    found: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in METRICS}
    for short, labels, value in _values(snapshot):
        name = f"geartrain_{short}"
        shown = tuple(map(printable, labels))
        before = found[name].get(shown)
        merged = (before + value if METRICS[name].kind == "counter" else max(before, value)) if before else value
        found[name][shown] = float(merged)
    return found


def _values(snapshot: Mapping[str, Any]) -> Iterator[Value]:
    yield "shm_bytes", (), snapshot["shm"]["bytes"]
    yield "shm_free_bytes", (), snapshot["shm"]["free_bytes"]
    names = {str(report["pid"]): report["command"] for report in snapshot["processes"]}
    for job in snapshot["jobs"]:
        for process in job.get("processes", []):
            names[str(process["pid"])] = process["name"]
            yield from _of_process((job["name"], process["name"]), process)
    for pid, state in snapshot["pids"].items():
        labels = (names.get(pid, state["command"]), pid)
        yield "process_stopped", labels, float(state["stopped"])
        yield "process_cpu_seconds", labels, state["cpu_s"]
        yield "process_resident_bytes", labels, state["rss_bytes"]
    for store in snapshot["stores"]:
        if "error" not in store:
            yield from _of_store((store["name"],), store)
    for weights in snapshot["weights"]:
        if "error" not in weights:
            label = (weights["name"],)
            if weights["version"] is not None:
                yield "weights_version", label, weights["version"]
                yield "weights_published_timestamp_seconds", label, weights["published_ns"] / 1e9
            yield "weights_bytes", label, weights["version_bytes"]
            yield "weights_publisher_alive", label, float(weights["has_publisher"])
    for report in snapshot["processes"]:
        for one in report["objects"]:
            if "error" not in one["figures"]:
                yield from _of_object(names[str(report["pid"])], one["kind"], one["name"], one["figures"])


def _of_process(labels: tuple[str, ...], process: Mapping[str, Any]) -> Iterator[Value]:
    for name, value in process["counts"].items():
        yield f"process_{name.removesuffix('_s')}_seconds" if name.endswith("_s") else f"process_{name}", labels, value
    yield "process_restarts", labels, process["restarts"]
    if process["version"] is not None:
        yield "process_version", labels, process["version"]
    if process["silent_s"] is not None:
        yield "process_silent_seconds", labels, process["silent_s"]


def _of_store(label: tuple[str, ...], store: Mapping[str, Any]) -> Iterator[Value]:
    counters, limiter = store["counters"], store["limiter"]
    yield "store_rows", label, store["rows"]
    yield "store_capacity_rows", label, store["capacity"]
    yield "store_bytes", label, store["bytes"]
    yield "store_processes", label, len(store["clients"])
    for name in ("inserted", "sampled", "torn", "stale_keys", "priorities_updated", "reclaimed", "repairs"):
        yield f"store_{name}", label, counters[name]
    for reason in ("evicted", "expired", "exhausted", "deleted"):
        yield "store_removed", (*label, reason), counters[reason]
    if store["tasks"]:
        for name in ("under_way", "kept", "span_bytes", "free_span_bytes"):
            yield f"store_{name}", label, counters[name]
        for name in ("in_flight", "clock"):
            yield f"store_{name}", label, counters[name]
        yield "limiter_most_in_flight", label, limiter["most_in_flight"] or 0
        for reason in ("dropped", "given_up", "stale"):
            yield "store_removed", (*label, reason), counters[reason]
    for task, about in store["tasks"].items():
        for name in ("due", "claimed", "done", "released", "deaths", "set_back"):
            yield f"task_{name}", (*label, task), about["figures"][name]
        yield "task_oldest_claim_seconds", (*label, task), about["oldest_age_s"] or 0.0
    yield "limiter_enabled", label, float(limiter["enabled"])
    yield "limiter_lead", label, limiter["lead"]
    yield "limiter_error_buffer", label, limiter["error_buffer"]
    yield "limiter_insert_wait_seconds", label, limiter["insert_wait_s"]
    yield "limiter_sample_wait_seconds", label, limiter["sample_wait_s"]


def _of_object(process: str, kind: str, name: str, figures: Mapping[str, Any]) -> Iterator[Value]:
    if kind == "replay":
        for column in ("batches", "rows", "bytes", "redrawn"):
            yield f"replay_{column}", (name, process), figures[column]
        for column in ("wait", "make"):
            yield f"replay_{column}_seconds", (name, process), figures[f"{column}_s"]
        yield "replay_waiting_seconds", (name, process), figures["waiting_s"]
    elif kind == "node":
        yield "rpc_backlog", (name,), figures["backlog"]
        for peer, counts in figures["peers"].items():
            for column in ("messages_sent", "messages_received", "bytes_sent", "bytes_received"):
                yield f"rpc_{column}", (name, peer), counts[column]
            yield "rpc_open_calls", (name, peer), counts["open"]
    elif kind == "group":
        labels = (name, str(figures["rank"]))
        yield "group_operations", labels, figures["operations"]
        yield "group_array_bytes", labels, figures["array_bytes"]
        yield "group_pending", labels, figures["issued"] - figures["operations"]
        yield "group_failed", labels, float(bool(figures["failed"]))
        for column in ("lost_reducers", "reducer_losses", "reducer_returns", "taken_over_bytes"):
            yield f"group_{column}", labels, figures[column]
    elif kind == "reducer":
        for column in ("operations", "bytes_received", "bytes_sent", "memory_bytes"):
            yield f"reducer_{column}", (name,), figures[column]
    elif kind == "reader" and figures["version"] is not None:
        yield "weights_reader_version", (name, process), figures["version"]


__all__ = ["METRICS", "values_of"]
