"""Profile of an all-reduce within a host: where the time of a call goes (`gt_group_profile`), and its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import geartrain_bench.harness.report as report

#: Of `gt_stage`, in its order.
STAGES = (
    "outside", "frames", "copy out", "copy in", "read", "sum", "deliver", "wake", "poll", "yield", "sleep",
)  # fmt: skip
#: Times that are counted from, and bytes, of `gt_profile`.
COUNTS = ("operations", "by_callers", "sent", "received", "read")

#: Microseconds of one call of one rank. `call`: before and after it runs the group, and where another thread does.
Profile = dict[str, Any]


def of_calls(before: Mapping[str, Any], after: Mapping[str, Any], seconds: Sequence[float]) -> Profile:
    """The profile of a rank's calls between two answers of `GroupInC.profiled`, each round's calls of `seconds`."""
    calls = after["operations"] - before["operations"]
    us = {stage: after["ns"][stage] / calls / 1e3 for stage in STAGES[1:]}
    whole_us = 1e6 * float(np.mean(seconds))
    return {
        "whole_us": whole_us,
        "us": {"call": whole_us - sum(us.values()), **us},
        "times": {stage: after["entered"][stage] / calls for stage in STAGES[1:]},
        "by_callers": (after["by_callers"] - before["by_callers"]) / calls,
        "ring_bytes": (after["sent"] - before["sent"]) / calls,
        "read_bytes": (after["read"] - before["read"]) / calls,
    }


def mean(profiles: Sequence[Profile]) -> Profile:
    """Of all ranks."""

    def over(*path: str) -> float:
        values = []
        for profile in profiles:
            found: Any = profile
            for key in path:
                found = found[key]
            values.append(found)
        return float(np.mean(values))

    return {
        key: {name: over(key, name) for name in value} if isinstance(value, dict) else over(key)
        for key, value in profiles[0].items()
    }


def print_profiles(cases: Sequence[Mapping[str, Any]], name_of: Any) -> None:
    """Tables: us in each stage, how often it was entered, bytes."""
    profiled = {name_of(case): case["profile"] for case in cases if "profile" in case}
    if not profiled:
        return
    stages = ("call", *STAGES[1:])
    # In two tables each: a line that is cut off says nothing.
    for title, columns in (("us, mean of all ranks and calls", stages[:6]), ("further us", stages[6:])):
        rows = {
            name: [f"{found['whole_us']:.1f}", *(f"{found['us'][stage]:.1f}" for stage in columns)]
            for name, found in profiled.items()
        }
        report.print_counts(f"where the time of a call goes: {title}", ["", "whole", *columns], rows)
    half = STAGES[1:7]
    report.print_counts(
        "how often a call enters a stage",
        ["", *half],
        {name: [f"{found['times'][stage]:.1f}" for stage in half] for name, found in profiled.items()},
    )
    rest = STAGES[7:]
    report.print_counts(
        "further times; bytes that it sends through rings, and reads; calls that end on who waits",
        ["", *rest, "ring KB", "read KB", "by callers"],
        {
            name: [
                *(f"{found['times'][stage]:.1f}" for stage in rest),
                f"{found['ring_bytes'] / 1024:.0f}",
                f"{found['read_bytes'] / 1024:.0f}",
                f"{found['by_callers']:.0%}",
            ]
            for name, found in profiled.items()
        },
    )
