"""The cases of `geartrain bench allreduce` as tables, promises beside what was found, and plots."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from geartrain.bench import report
from geartrain.bench.harness import BenchResult
from geartrain.errors import MissingDependencyError

Case = Mapping[str, Any]
Cases = Sequence[Case]

#: TCP, IP and Ethernet headers, and what a token bucket keeps: the time of K bytes is this many K/B.
FRAMING = 1.045
MB = 1 << 20
COLORS = {
    "gloo": "C3",
    "geartrain ring": "C1",
    "geartrain workers": "C0",
    "geartrain workers, tcp": "C9",
    "geartrain dedicated": "C2",
    "geartrain weighted": "C4",
    "mpich": "C5",
    "openmpi": "C6",
    "baidu on mpich": "C7",
    "baidu on openmpi": "C8",
}


def size_text(nbytes: int) -> str:
    """4 KB, 16 MB: binary, as arrays are sized."""
    return f"{nbytes / MB:g} MB" if nbytes >= MB else f"{nbytes / 1024:g} KB"


def find(cases: Cases, **wanted: Any) -> Case | None:
    """The one case with these values."""
    return next((case for case in cases if all(case.get(key) == value for key, value in wanted.items())), None)


# --- what was promised ------------------------------------------------------------------------------------------------


def targets(cases: Cases) -> list[dict[str, Any]]:
    """Every promise whose cases were measured: what, the target, what was found, and whether it is met."""
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
        here: Callable[[str], Case | None] = lambda arm, n=n: find(  # type: ignore[misc]  # noqa: E731
            cases, part="shaped", arm=arm, workers=n, nbytes=nbytes
        )
        ours, rings, others, equal = (
            here(arm) for arm in ("geartrain dedicated", "geartrain ring", "gloo", "geartrain workers")
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
                        f"N={n}, {size}: {_short(case)}, K {way} by worker 0", case[way], case["expected"], 0.015
                    )
    for case in cases:
        if case["part"] == "shaped" and "hybrid" in case["arm"]:
            name = f"N={case['workers']}, {size_text(case['nbytes'])}: {_short(case)}"
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
            for arm in ("geartrain dedicated", "geartrain workers"):
                small = find(cases, part="delay", arm=arm, workers=n, nbytes=4096, rtt_ms=rtt_ms)
                if small is not None:
                    name = f"{rtt_ms:g} ms, N={n}, 4 KB: {_short(small)}, round trips"
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


def _training_targets(cases: Cases) -> Iterator[Target]:
    """DDP's, but for the bytes: its buckets' padding, and a barrier, cross the interface too."""
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


def _short(case: Case) -> str:
    return str(case["arm"]).removeprefix("geartrain ")


# --- tables -----------------------------------------------------------------------------------------------------------


def print_cases(result: Any) -> None:
    """Bytes at the interface beside theory, ratios to Gloo, and the promises."""
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
            "samples/s, over as many workers that need no all-reduce",
            ["", *(f"N = {n}" for n in counts)],
            {key: [f"{found[n]:.2f}" if n in found else "-" for n in counts] for key, found in shares.items()},
        )
    if result.targets:
        met = sum(one["met"] for one in result.targets)
        report.print_counts(
            f"promises: {met} of {len(result.targets)} met",
            ["", "target", "measured", ""],
            {
                one["what"]: [one["target"], f"{one['measured']:.3f}", "met" if one["met"] else "NOT MET"]
                for one in result.targets
            },
        )


def _delayed(case: Case) -> str:
    return f" {case['rtt_ms']:g} ms" if case["rtt_ms"] else ""


# --- plots ------------------------------------------------------------------------------------------------------------


def plot(result: BenchResult, path: Path) -> None:
    """A file for each part that was measured: FILE.png for the first, FILE-PART.png for the others."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        raise MissingDependencyError("plots need matplotlib: pip install 'geartrain[plot]'") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    cases: list[Case] = result.cases  # type: ignore[attr-defined]
    drawings = {
        "shaped": _plot_shaped,
        "slow-link": None,  # drawn with shaped
        "delay": _plot_delay,
        "loopback": _plot_loopback,
        "throughput": _plot_throughput,
    }
    first = True
    for part, draw in drawings.items():
        here = [case for case in cases if case["part"] == part or (part == "shaped" and case["part"] == "slow-link")]
        if draw is None or not here:
            continue
        figure = draw(pyplot, here)
        words = textwrap.wrap(result.command, int(12 * figure.get_figwidth()), break_on_hyphens=False)
        figure.suptitle("\n".join([*words, f"{result.machine['cpu']}, {result.machine['cores']} cores"]), fontsize=9)
        figure.savefig(path if first else path.with_stem(f"{path.stem}-{part}"), dpi=120)
        pyplot.close(figure)
        first = False


def _color(arm: str) -> str:
    return COLORS.get(arm, "0.5")


def _finish(axis: Any, title: str, x: str, y: str) -> None:
    if axis.get_yscale() == "log":  # 20, not 2 x 10^1
        axis.yaxis.set_major_formatter("{x:g}")
        least, most = axis.get_ylim()
        axis.yaxis.set_minor_formatter("{x:g}" if most < 20 * least else "")
        axis.tick_params(axis="y", which="minor", labelsize=6)
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    axis.grid(alpha=0.25, linewidth=0.4)
    axis.legend(fontsize=8)


def _plot_shaped(pyplot: Any, cases: Cases) -> Any:
    """K/B against N; hybrids beside the planner; K/B against the array's size; the slow link."""
    figure, grid = pyplot.subplots(2, 2, figsize=(13, 9), layout="constrained")
    axes = grid.flat
    shaped = [case for case in cases if case["part"] == "shaped"]
    nbytes = _largest(shaped, "shaped")
    counts = sorted({case["workers"] for case in shaped if case["nbytes"] == nbytes})
    if counts:
        dense = [min(counts) + i * (max(counts) - min(counts)) / 50 for i in range(51)]
        axes[0].plot(dense, [2 * (n - 1) / n for n in dense], "k:", linewidth=1, label="theory: ring's bytes")
        axes[0].plot(dense, [1.0] * len(dense), "k--", linewidth=1, label="theory: dedicated")
    for arm in ("gloo", "geartrain ring", "geartrain workers", "geartrain dedicated"):
        points = [
            (case["workers"], case["units"]) for case in shaped if case["arm"] == arm and case["nbytes"] == nbytes
        ]
        if points:
            axes[0].plot(*zip(*sorted(points), strict=True), "o-", color=_color(arm), label=arm)
    axes[0].set_ylim(0.9, None)
    axes[0].set_xticks(counts)
    _finish(axes[0], f"{size_text(nbytes)}: time against N", "workers", "K/B")
    _plot_hybrids(axes[1], shaped, nbytes)
    most = max(counts, default=0)
    for arm in ("gloo", "geartrain ring", "geartrain workers", "geartrain dedicated"):
        points = [(case["nbytes"], case["units"]) for case in shaped if case["arm"] == arm and case["workers"] == most]
        if points:
            axes[2].plot(*zip(*sorted(points), strict=True), "o-", color=_color(arm), label=arm)
    axes[2].set_xscale("log", base=2)
    axes[2].set_yscale("log")
    sizes = sorted({case["nbytes"] for case in shaped if case["workers"] == most})
    axes[2].set_xticks(sizes, [size_text(one) for one in sizes])
    _finish(axes[2], f"N = {most}: time against the array", "array", "K/B")
    slow = [case for case in cases if case["part"] == "slow-link"]
    largest = max((case["nbytes"] for case in slow), default=0)
    bars = [case for case in slow if case["nbytes"] == largest]
    names = [_short(case) for case in bars]
    axes[3].bar(names, [case["units"] for case in bars], color=[_color(case["arm"]) for case in bars])
    for place, case in enumerate(bars):
        axes[3].text(place, case["units"], f"{case['units']:.2f}", ha="center", va="bottom", fontsize=8)
    axes[3].axhline(1.0, color="k", linestyle="--", linewidth=1, label="floor: the slow worker's own array")
    axes[3].set_ylim(0, 1.3 * max([1.0, *(case["units"] for case in bars)]))
    rates = " + ".join(f"{rate:g}" for rate in bars[0]["rates_mbit"]) if bars else ""
    _finish(axes[3], f"links of {rates} Mbit/s, {size_text(largest)}", "", "K / the slowest rate")
    return figure


def _plot_hybrids(axis: Any, shaped: Cases, nbytes: int) -> None:
    hybrids = [case for case in shaped if "hybrid" in case["arm"]]
    n = hybrids[0]["workers"] if hybrids else 4
    planned = [(m, 2 * (n - 1) / (n + (n - 2) * m / n)) for m in range(n + 1)]
    axis.plot([m for m, _ in planned], [max(1.0, t) for _, t in planned], "k:", label="planner")
    axis.plot(
        [m for m, _ in planned], [FRAMING * max(1.0, t) for _, t in planned], "k-", linewidth=0.8,
        label=f"planner and headers ({FRAMING - 1:.1%})",
    )  # fmt: skip
    alone = find(shaped, arm="geartrain workers", workers=n, nbytes=nbytes)
    full = find(shaped, arm="geartrain dedicated", workers=n, nbytes=nbytes)
    points = [(case["reducers"], case["units"]) for case in hybrids]
    points += [(0, alone["units"])] if alone else []
    points += [(n, full["units"])] if full else []
    if points:
        axis.plot(*zip(*sorted(points), strict=True), "o", color="C0", label="measured")
    others = find(shaped, arm="gloo", workers=n, nbytes=nbytes)
    if others:
        axis.axhline(others["units"], color="C3", linewidth=1, label="gloo")
    axis.set_xticks(range(n + 1))
    axis.set_ylim(0.9, None)
    _finish(axis, f"N = {n}: every reducer helps", "reducers", "K/B")


def _plot_delay(pyplot: Any, cases: Cases) -> Any:
    """A panel for each size and round trip: milliseconds against N."""
    sizes = sorted({case["nbytes"] for case in cases})
    rtts = sorted({case["rtt_ms"] for case in cases})
    figure, axes = pyplot.subplots(
        1, len(sizes) * len(rtts), figsize=(4.5 * len(sizes) * len(rtts), 4.4), squeeze=False, layout="constrained"
    )
    panels = [(nbytes, rtt_ms) for nbytes in sizes for rtt_ms in rtts]
    for axis, (nbytes, rtt_ms) in zip(axes[0], panels, strict=True):
        here = [case for case in cases if case["nbytes"] == nbytes and case["rtt_ms"] == rtt_ms]
        for arm in dict.fromkeys(case["arm"] for case in here):
            points = sorted((case["workers"], 1e3 * case["p50_s"]) for case in here if case["arm"] == arm)
            axis.plot(*zip(*points, strict=True), "o-", color=_color(arm), label=arm)
        axis.axhline(rtt_ms, color="k", linestyle="--", linewidth=1, label="one round trip")
        axis.set_yscale("log")
        axis.set_xticks(sorted({case["workers"] for case in here}))
        _finish(axis, f"{size_text(nbytes)}, round trip {rtt_ms:g} ms", "workers", "ms")
    return figure


def _plot_loopback(pyplot: Any, cases: Cases) -> Any:
    """Multiples of a memcpy against the array's size, a panel for each number of ranks."""
    counts = sorted({case["workers"] for case in cases})
    figure, axes = pyplot.subplots(1, len(counts), figsize=(7 * len(counts), 5), squeeze=False, layout="constrained")
    for axis, n in zip(axes[0], counts, strict=True):
        here = [case for case in cases if case["workers"] == n]
        for arm in dict.fromkeys(case["arm"] for case in here):
            points = sorted((case["nbytes"], case["p50_s"] / case["floor_s"]) for case in here if case["arm"] == arm)
            wide = 2.2 if arm == "geartrain workers" else 1.2
            axis.plot(*zip(*points, strict=True), "o-", color=_color(arm), label=arm, linewidth=wide, markersize=4)
        sizes = sorted({case["nbytes"] for case in here})
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sizes, [size_text(one) for one in sizes])
        _finish(axis, f"{n} ranks of one host", "array", "time, in memcpys of the array")
    return figure


def _plot_throughput(pyplot: Any, cases: Cases) -> Any:
    """Samples a second against workers, during and after backward."""
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for axis, overlap in zip(axes, (True, False), strict=True):
        here = [case for case in cases if case["overlap"] is overlap]
        for arm in dict.fromkeys(case["arm"] for case in here):
            points = sorted((case["workers"], case["samples_per_s"]) for case in here if case["arm"] == arm)
            axis.plot(*zip(*points, strict=True), "o-", color=_color(arm), label=arm)
        most = max((case["workers"] for case in here), default=1)
        rate = here[0]["one_worker_bound"] if here else math.nan
        axis.plot([1, most], [rate, rate * most], "k--", linewidth=1, label="no all-reduce at all")
        axis.set_xticks(sorted({case["workers"] for case in here}))
        _finish(axis, f"summed {'during' if overlap else 'after'} backward", "workers", "samples/s")
    return figure
