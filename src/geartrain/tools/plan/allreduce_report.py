"""Shows the plan of an all-reduce as text, JSON and a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from geartrain.core.shared_files import writing
from geartrain.tools.plan.allreduce import (
    ALGORITHMS,
    FORMULAS,
    AlgorithmCost,
    AllReducePlan,
    Network,
    Priced,
    cheapest,
    growing,
    plan,
    with_reducers,
)
from geartrain.tools.plan.report import rich_console
from geartrain.tools.plan.units import bytes_text, rate_text, seconds_text
from geartrain.tools.plots import import_pyplot

COUNTS = (2, 4, 8, 16, 32, 64)
MOST_PLOTTED = 400
#: Algorithms whose workers move K in two hops, whatever N is.
WITHOUT_OWNERS = ("single", "dedicated")


def show(
    network: Network,
    *,
    price_worker: float | None = None,
    price_reducer: float | None = None,
    compute_s: float = 0.0,
    json_path: Path | None = None,
    plot_path: Path | None = None,
) -> AllReducePlan:
    """Plans, prints, and writes the files that were asked for. Prices, both or none, are of a machine for an hour."""
    found = plan(network)
    best = None
    if price_worker is not None and price_reducer is not None:
        best = cheapest(network, price_worker=price_worker, price_reducer=price_reducer, compute_s=compute_s)
    counts = sorted({*COUNTS, len(network.workers)} - {1})
    rows = growing(network, counts)
    _print(found, best, compute_s, counts, rows)
    if json_path is not None:
        with writing(json_path):
            json_path.write_text(json.dumps(_as_json(found, best, rows), indent=1) + "\n")
    if plot_path is not None:
        plot(found, best, plot_path)
    return found


def _print(
    found: AllReducePlan,
    best: tuple[Priced, list[Priced]] | None,
    compute_s: float,
    counts: Sequence[int],
    rows: Sequence[Sequence[AlgorithmCost]],
) -> None:
    console, table_of = rich_console()
    network = found.network

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    unit = network.unit_s
    say(
        f"an array of {bytes_text(network.nbytes)} (K) over {_kinds(network.workers)} workers and "
        f"{_kinds(network.reducers) if network.reducers else 'no'} reducers"
    )
    say(f"K/B      {seconds_text(unit)}: the array once through the slowest worker's link, the least time there is")
    say(f"time     {seconds_text(found.seconds)}, {_ratio(found.seconds, unit, 'K/B')}")
    n = len(network.workers)
    say("shares   " + "; ".join(_groups(found, 0, n, "worker") + _groups(found, n, len(found.shares), "reducer")))
    say(
        f"reducers needed for a time of K/B: {found.needed_dedicated} dedicated of {rate_text(found.needed_rate)}"
        + (f", {found.needed} if workers own a share" if found.needed != found.needed_dedicated else "")
    )
    if best is not None:
        say(_price_line(best, compute_s))
        console.print(_price_table(table_of, best, compute_s))
    table = table_of(title="on this network", title_justify="left")
    table.add_column("")
    for name in ("reducers", "a worker moves", "", "the busiest moves", "", "hops", "latency", "time", ""):
        table.add_column(name, justify="right")
    for one in found.costs:
        table.add_row(
            one.algorithm,
            str(one.reducers),
            bytes_text(one.worker_bytes),
            _ratio(one.worker_bytes, network.nbytes, "K"),
            bytes_text(one.busiest_bytes),
            _ratio(one.busiest_bytes, network.nbytes, "K"),
            str(one.hops),
            seconds_text(one.latency_s),
            seconds_text(one.seconds),
            _ratio(one.seconds, unit, "K/B"),
        )
    console.print(table)
    title = "by formula: N workers, K bytes, each way; * other N than 2^i: of the next lower, and K and 2 hops more"
    table = table_of(title=title, title_justify="left")
    for name in ("", "a worker moves", "the busiest moves", "hops"):
        table.add_column(name)
    for name, formulas in FORMULAS.items():
        table.add_row(name, *formulas)
    console.print(table)
    slowest = rate_text(min(network.workers))
    title = f"against N, all links {slowest}; K each way; dedicated: enough reducers, hybrid: {len(network.reducers)}"
    table = table_of(title=title, title_justify="left")
    table.add_column("N", justify="right", no_wrap=True)
    for name in ALGORITHMS:
        shown = "time" if name in WITHOUT_OWNERS else f"K, {'latency' if network.rtt_s else 'hops'}, time"
        table.add_column(f"{name}:\n{shown}", justify="right", no_wrap=True)
    for count, row in zip(counts, rows, strict=True):
        cells = []
        for one in row:
            delay = seconds_text(one.latency_s) if network.rtt_s else str(one.hops)
            moved = "" if one.algorithm in WITHOUT_OWNERS else _short_ratio(one.worker_bytes, network.nbytes)
            cells.append(f"{moved} {delay if moved else '':>6} {seconds_text(one.seconds):>7}".strip())
        table.add_row(str(count), *cells)
    console.print(table)


def _price_line(best: tuple[Priced, list[Priced]], compute_s: float) -> str:
    least, priced = best
    none = priced[0]
    saved = 1 - least.cost / none.cost if none.cost else 0.0
    return (
        f"cheapest {least.reducers} reducers: a step of {seconds_text(compute_s)} and the all-reduce takes "
        f"{seconds_text(least.step_s)} and costs {least.cost:.4g} in the unit of the prices, {saved:.1%} less than "
        f"without ({seconds_text(none.step_s)}, {none.cost:.4g}); the fastest, {priced[-1].reducers}, takes "
        f"{seconds_text(priced[-1].step_s)} and costs {priced[-1].cost:.4g}"
    )


def _price_table(table_of: Callable[..., Any], best: tuple[Priced, list[Priced]], compute_s: float) -> Any:
    """Some numbers of reducers between none and the fastest, the cheapest among them."""
    least, priced = best
    fastest = len(priced) - 1
    shown = sorted({0, least.reducers, *(round(fastest * part / 5) for part in range(6))})
    table = table_of(title="cost of a step by the number of reducers", title_justify="left")
    for name in ("reducers", "all-reduce", "step", "steps/s", "1,000 steps, in the prices' unit", "of none"):
        table.add_column(name, justify="right")
    for one in (priced[count] for count in shown):
        table.add_row(
            f"{one.reducers}{' (cheapest)' if one is least else ''}",
            seconds_text(one.step_s - compute_s),
            seconds_text(one.step_s),
            f"{1 / one.step_s:.4g}" if one.step_s else "-",
            f"{1000 * one.cost:.4g}",
            f"{100 * one.cost / priced[0].cost:.1f} %" if priced[0].cost else "-",
        )
    return table


def _kinds(rates: Sequence[float]) -> str:
    counted: dict[float, int] = {}
    for rate in rates:
        counted[rate] = counted.get(rate, 0) + 1
    return " + ".join(f"{count} x {rate_text(rate)}" for rate, count in counted.items())


def _groups(found: AllReducePlan, start: int, stop: int, what: str) -> list[str]:
    """Members with the same rate own the same, so they are one group."""
    rates = (*found.network.workers, *found.network.reducers)
    counted: dict[tuple[float, float, float], int] = {}
    for i in range(start, stop):
        key = (rates[i], found.shares[i], found.moved[i])
        counted[key] = counted.get(key, 0) + 1
    return [
        f"{count} {what}{'s' * (count > 1)} of {rate_text(rate)} own{'s' * (count == 1)} {share:.2%}"
        f"{' each' * (count > 1)} and move{'s' * (count == 1)} {bytes_text(moved)}"
        for (rate, share, moved), count in counted.items()
    ]


def _ratio(value: float, unit: float, name: str) -> str:
    return f"{value / unit:.3f} {name}" if unit else "-"


def _short_ratio(value: float, unit: float) -> str:
    return f"{value / unit:#.3g}" if unit else "-"


def _as_json(
    found: AllReducePlan, best: tuple[Priced, list[Priced]] | None, rows: Sequence[Sequence[AlgorithmCost]]
) -> dict[str, Any]:
    words = asdict(found)
    words["unit_s"] = found.network.unit_s
    words["growing"] = [asdict(one) for row in rows for one in row]
    if best is not None:
        words["cheapest"] = asdict(best[0])
        words["priced"] = [asdict(one) for one in best[1]]
    return words


def plot(found: AllReducePlan, best: tuple[Priced, list[Priced]] | None, path: Path) -> None:
    """Bytes and latency against N, time against the number of reducers. Needs matplotlib."""
    pyplot = import_pyplot()
    network = found.network
    counts = range(2, max(COUNTS) + 1)
    rows = growing(network, counts)
    figure, (moved, latency, helped) = pyplot.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
    styles = {
        "single": ("C5", "--"),
        "root": ("C4", "-."),
        "ring": ("C3", "-"),
        "tree": ("C1", ":"),
        "dedicated": ("C2", "--"),
        "hybrid": ("C0", "-"),
    }
    powers = [i for i, n in enumerate(counts) if n & (n - 1) == 0]
    for column, name in enumerate(ALGORITHMS):
        color, dash = styles[name]
        # A tree of another number of workers than a power of two is a sawtooth that hides the rest.
        shown = powers if name == "tree" else list(range(len(rows)))
        at = [counts[i] for i in shown]
        marker = "o" if name == "tree" else ""
        look: dict[str, Any] = {"color": color, "linestyle": dash, "label": name, "marker": marker, "markersize": 3}
        moved.plot(at, [rows[i][column].worker_bytes / network.nbytes for i in shown], **look)
        scale = network.rtt_s / 2 * 1e3 if network.rtt_s else 1.0
        latency.plot(at, [rows[i][column].hops * scale for i in shown], **look)
    moved.set(title="bytes of a worker, each way", xlabel="workers", ylabel="arrays (K)", ylim=(0.9, 2.1))
    latency.set(title="latency", xlabel="workers", ylabel="ms" if network.rtt_s else "hops", yscale="log")
    rate = found.needed_rate
    most = min(MOST_PLOTTED, max(4, math.ceil(1.2 * found.needed_dedicated), len(network.reducers)))
    times = with_reducers(network, rate, most)
    unit = network.unit_s or 1.0
    ring = next(one.seconds for one in found.costs if one.algorithm == "ring") / unit
    helped.axhline(ring, color="C3", label="ring")
    helped.plot(range(1, most + 1), [b / unit for _, b in times[1:]], color="C2", linestyle="--", label="dedicated")
    helped.plot(range(most + 1), [a / unit for a, _ in times], color="C0", label="hybrid")
    if network.reducers and len(set(network.reducers)) == 1 and len(network.reducers) <= most:
        helped.plot(len(network.reducers), found.seconds / unit, "o", color="C0", label="this network")
    if best is not None:
        helped.axvline(best[0].reducers, color="0.6", linestyle=":", label=f"cheapest: {best[0].reducers}")
    helped.set(
        title=f"{len(network.workers)} workers with reducers of {rate_text(rate)}",
        xlabel="reducers",
        ylabel="time (K/B)",
        ylim=(0.9, max(2.2, 1.1 * ring)),
    )
    for axis in (moved, latency, helped):
        axis.grid(alpha=0.25, linewidth=0.4)
        axis.legend(fontsize=8)
    round_trip = f", round trip {seconds_text(network.rtt_s)}" if network.rtt_s else ""
    figure.suptitle(
        f"all-reduce of {bytes_text(network.nbytes)} over {_kinds(network.workers)}{round_trip}", fontsize=10
    )
    with writing(path):
        figure.savefig(path, dpi=120)
    pyplot.close(figure)
