"""Rates per second of a host's stores and jobs, from two snapshots (launch/host_snapshot.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Counters of a limiter whose rates mean something.
_LIMITER = ("inserts", "samples", "insert_wait_s", "sample_wait_s")


def add_rates(before: Mapping[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """Adds `rates` to each store and each process of a job in `now`, and returns it; processes report their own.

    Rates are empty without an earlier snapshot, and for a store or process that is new or was made again since. The
    rate of a count of seconds is a share of the time.
    """
    elapsed_s = 0.0 if before is None else now["at_s"] - before["at_s"]
    stores = {} if before is None else {each["name"]: each for each in before["stores"] if "error" not in each}
    jobs = {} if before is None else {each.get("counters"): each for each in before["jobs"] if "error" not in each}
    for store in now["stores"]:
        then = stores.get(store["name"])
        store["rates"] = {}
        for task in store.get("tasks", {}).values():
            task["rates"] = {}
        if "error" in store or then is None or elapsed_s <= 0 or then["age_s"] > store["age_s"]:
            continue
        for name, task in store["tasks"].items():
            task["rates"] = _rates(then["tasks"][name]["figures"], task["figures"], elapsed_s)
        store["rates"] = _rates(then["counters"], store["counters"], elapsed_s) | {
            name: (store["limiter"][name] - then["limiter"][name]) / elapsed_s for name in _LIMITER
        }
    for job in now["jobs"]:
        then_processes = jobs.get(job.get("counters"), {}).get("processes", [])
        for slot, process in enumerate(job.get("processes", [])):
            then = then_processes[slot] if slot < len(then_processes) else None
            same = then is not None and elapsed_s > 0
            process["rates"] = _rates(then["counts"], process["counts"], elapsed_s) if same and then else {}
    return now


def _rates(before: Mapping[str, float], now: Mapping[str, float], elapsed_s: float) -> dict[str, float]:
    """A second; a count that went back, for it was begun anew, has none."""
    return {
        name: (value - before[name]) / elapsed_s
        for name, value in now.items()
        if name in before and value >= before[name]
    }


__all__ = ["add_rates"]
