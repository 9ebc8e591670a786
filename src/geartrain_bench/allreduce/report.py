"""Tables of `geartrain bench allreduce`, and targets with their results. Plots: plot.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import geartrain_bench.harness.report as report
from geartrain_bench.allreduce.profile import print_profiles

Case = Mapping[str, Any]
Cases = Sequence[Case]

#: TCP, IP and Ethernet headers, and what a token bucket keeps: the time of K bytes is this many K/B.
FRAMING = 1.045
MB = 1 << 20


def size_text(nbytes: int) -> str:
    """4 KB, 16 MB: binary, as arrays are sized."""
    return f"{nbytes / MB:g} MB" if nbytes >= MB else f"{nbytes / 1024:g} KB"


def find(cases: Cases, **wanted: Any) -> Case | None:
    """The only case with these values, or None."""
    return next((case for case in cases if all(case.get(key) == value for key, value in wanted.items())), None)


# --- targets ---------------------------------------------------------------------------------------------------------


def targets(cases: Cases) -> list[dict[str, Any]]:
    """Every target whose cases were measured: its name, bound, result, and whether it is met."""
    return [
        {"what": what, "target": target, "measured": round(measured, 4), "met": met}
        for part in (_shaped_targets, _slow_targets, _delay_targets, _loopback_targets, _training_targets)
        for what, target, measured, met in part(cases)
    ]


Target = tuple[str, str, float, bool]


def _at_most(what: str, measured: float, most: float) -> Target:
    return what, f"<= {most:g}", measured, measured <= most


def _at_least(what: str, measured: float, least: float) -> Target:
    return what, f">= {least:g}", measured, measured >= least


def _within(what: str, measured: float, wanted: float, share: float) -> Target:
    return what, f"{wanted:.3f} +- {share:.1%}", measured, abs(measured / wanted - 1) <= share


def _largest(cases: Cases, part: str) -> int:
    """The largest array of a part that Gloo has been measured with; 16 MB where it is among them."""
    sizes = {case["nbytes"] for case in cases if case["part"] == part and "units" in case}
    return 16 * MB if 16 * MB in sizes else max(sizes, default=0)


def _shaped_targets(cases: Cases) -> Iterator[Target]:
    nbytes = _largest(cases, "shaped")
    size = size_text(nbytes)
    for n in (2, 4, 8):
        here: Callable[[str], Case | None] = lambda configuration, n=n: find(  # type: ignore[misc]  # noqa: E731
            cases, part="shaped", arm=configuration, workers=n, nbytes=nbytes
        )
        ours, rings, others, equal = (
            here(configuration)
            for configuration in ("geartrain dedicated", "geartrain ring", "gloo", "geartrain workers")
        )
        if ours is not None:
            yield _at_most(f"N={n}, {size}: dedicated, K/B", ours["units"], 1.08)
        if rings is not None:
            yield _within(f"N={n}, {size}: ring, K/B", rings["units"], 2 * (n - 1) / n * FRAMING, 0.03)
        least = {4: 1.45, 8: 1.65}.get(n)
        if ours is not None and others is not None and least is not None:
            yield _at_least(f"N={n}, {size}: Gloo / dedicated", others["p50_s"] / ours["p50_s"], least)
        for case in (ours, rings, equal):
            if case is not None:
                for way in ("sent", "received"):
                    yield _within(
                        f"N={n}, {size}: {short(case)}, K {way} by worker 0", case[way], case["expected"], 0.015
                    )
    for case in cases:
        if case["part"] == "shaped" and "hybrid" in case["arm"]:
            name = f"N={case['workers']}, {size_text(case['nbytes'])}: {short(case)}"
            yield _within(f"{name}, K/B", case["units"], case["planned_units"] * FRAMING, 0.06)
            yield _within(f"{name}, K sent by worker 0", case["sent"], case["expected"], 0.015)


def _slow_targets(cases: Cases) -> Iterator[Target]:
    nbytes = _largest(cases, "slow-link")
    ours = find(cases, part="slow-link", arm="geartrain weighted", nbytes=nbytes)
    others = find(cases, part="slow-link", arm="gloo", nbytes=nbytes)
    if ours is not None and others is not None:
        yield _at_least(
            f"one slow link, {size_text(nbytes)}: Gloo / weighted shares", others["p50_s"] / ours["p50_s"], 1.45
        )


def _delay_targets(cases: Cases) -> Iterator[Target]:
    for rtt_ms in sorted({case["rtt_ms"] for case in cases if case["part"] == "delay"}):
        for n in sorted({case["workers"] for case in cases if case["part"] == "delay"}):
            for configuration in ("geartrain dedicated", "geartrain workers"):
                small = find(cases, part="delay", arm=configuration, workers=n, nbytes=4096, rtt_ms=rtt_ms)
                if small is not None:
                    name = f"{rtt_ms:g} ms, N={n}, 4 KB: {short(small)}, round trips"
                    yield _at_most(name, 1e3 * small["p50_s"] / rtt_ms, 1.6)
        for nbytes in (4096, MB):
            ours = find(cases, part="delay", arm="geartrain dedicated", workers=4, nbytes=nbytes, rtt_ms=rtt_ms)
            others = find(cases, part="delay", arm="gloo", workers=4, nbytes=nbytes, rtt_ms=rtt_ms)
            if ours is not None and others is not None and nbytes == 4096:
                yield _at_least(
                    f"{rtt_ms:g} ms, N=4, {size_text(nbytes)}: Gloo / dedicated", others["p50_s"] / ours["p50_s"], 4.0
                )


def _loopback_targets(cases: Cases) -> Iterator[Target]:
    for case in cases:
        if case["part"] == "loopback" and case["arm"] == "geartrain workers":
            n, nbytes = case["workers"], case["nbytes"]
            others = find(cases, part="loopback", arm="gloo", workers=n, nbytes=nbytes)
            if others is not None:
                yield _at_least(
                    f"loopback, {n} ranks, {size_text(nbytes)}: Gloo / ours", others["p50_s"] / case["p50_s"], 1.0
                )
        if case["part"] == "loopback" and case["arm"] == "geartrain workers, C, spinning" and case["nbytes"] == 4096:
            mpi = find(cases, part="loopback", arm="openmpi", workers=case["workers"], nbytes=4096)
            if mpi is not None:
                name = f"loopback, {case['workers']} ranks, 4 KB: C, spinning / Open MPI"
                yield _at_most(name, case["p50_s"] / mpi["p50_s"], 2.0)


def _training_targets(cases: Cases) -> Iterator[Target]:
    """DDP's targets, except bytes: padding of its buckets and a barrier cross the interface too."""
    for case in cases:
        if case["part"] == "ddp":
            yield _at_least(f"DDP, {case['arm']}: ranks whose weights are equal", case["equal_ranks"], case["workers"])
            if case["arm"] != "gloo":
                equal = float(case["equals_reference"])
                yield _at_least(f"DDP, {case['arm']}: weights equal to one process's (1: yes)", equal, 1)
    ours = find(cases, part="ddp", arm="geartrain dedicated")
    others = find(cases, part="ddp", arm="gloo")
    if ours is not None and others is not None:
        yield _at_least("DDP, 25 M parameters, N=4: steps/s over Gloo's", others["p50_s"] / ours["p50_s"], 1.35)


def short(case: Case) -> str:
    """A configuration's name without the prefix "geartrain"."""
    return str(case["arm"]).removeprefix("geartrain ")


# --- tables -----------------------------------------------------------------------------------------------------------


def print_cases(result: Any) -> None:
    """Bytes at the interface compared with theory, ratios to Gloo, and the targets."""
    shaped = [case for case in result.cases if "sent" in case]
    if shaped:
        columns = ["", "p50 ms", "p95 ms", "K/B", "planned", "sent K", "received K", "theory", "Gloo / it"]
        rows = {}
        for case in shaped:
            others = find(
                result.cases, **{key: case[key] for key in ("part", "workers", "nbytes", "rtt_ms")}, arm="gloo"
            )
            name = f"{case['part']}{_delayed(case)}, N={case['workers']}, {size_text(case['nbytes'])}, {case['arm']}"
            rows[name.replace("geartrain ", "")] = [
                f"{1e3 * case['p50_s']:,.1f}",
                f"{1e3 * case['p95_s']:,.1f}",
                f"{case['units']:,.3f}",
                f"{case['planned_units']:,.3f}",
                f"{case['sent']:.3f}",
                f"{case['received']:.3f}",
                f"{case['expected']:.3f}",
                f"{others['p50_s'] / case['p50_s']:.2f}" if others is not None else "-",
            ]
        report.print_counts("K/B: by the clock and by the planner; K through worker 0's interface", columns, rows)
    trained = [case for case in result.cases if case["part"] == "ddp"]
    if trained:
        report.print_counts(
            "DDP: a step, and what rank 0 sent in it",
            ["", "p50 s", "p95 s", "sent K", "equal ranks", "as one process"],
            {
                case["arm"]: [
                    f"{case['p50_s']:.2f}",
                    f"{case['p95_s']:.2f}",
                    f"{case['step_sent']:.3f}",
                    f"{case['equal_ranks']} of {case['workers']}",
                    "yes" if case["equals_reference"] else "no",
                ]
                for case in trained
            },
        )
    training = [case for case in result.cases if case["part"] == "throughput"]
    if training:
        shares: dict[str, dict[int, float]] = {}
        for case in training:
            alone = case["one_worker_bound"]
            key = f"{case['arm']}, {'during' if case['overlap'] else 'after'} backward"
            shares.setdefault(key, {})[case["workers"]] = case["samples_per_s"] / (alone * case["workers"])
        counts = sorted({case["workers"] for case in training})
        report.print_counts(
            "samples/s, relative to as many workers without an all-reduce",
            ["", *(f"N = {n}" for n in counts)],
            {key: [f"{found[n]:.2f}" if n in found else "-" for n in counts] for key, found in shares.items()},
        )
    print_profiles(
        result.cases,
        lambda case: f"{case['workers']} ranks, {size_text(case['nbytes'])}, {short(case).removeprefix('workers, ')}",
    )
    if result.targets:
        met = sum(one["met"] for one in result.targets)
        report.print_counts(
            f"targets: {met} of {len(result.targets)} met",
            ["", "target", "measured", ""],
            {
                one["what"]: [one["target"], f"{one['measured']:.3f}", "met" if one["met"] else "NOT MET"]
                for one in result.targets
            },
        )


def _delayed(case: Case) -> str:
    return f" {case['rtt_ms']:g} ms" if case["rtt_ms"] else ""
