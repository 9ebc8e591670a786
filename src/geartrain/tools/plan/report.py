"""Reports of predictions: tables, JSON, and known clusters."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from geartrain.core.extras import require
from geartrain.core.shared_files import writing
from geartrain.tools.plan.machine import DEFAULTS, Constants
from geartrain.tools.plan.replay import ARMS, Checked, Cluster, Prediction, predict

#: What the GEAR paper measured on 1, 2 and 3 DGX-A100 servers, GB/s in all; batches of up to 1024.
GEAR_GB_PER_S = {1: 17.1, 2: 29.1, 3: 33.0}
#: Of such a server: two EPYC 7742 of 64 cores; eight channels of DDR4-3200 each give 410 GB/s, of which a copied byte
#: takes three (read, ownership, write). From the data sheets; all else is as measured on the machine of the constants.
SERVER_CORES, SERVER_COPY_GB_PER_S = 128, 136.0
#: The paper names no link: one port of HDR InfiniBand.
SERVER_LINK_GBIT = 200.0
SERVER_MEMORY_GB = 1000.0
#: A ratio of predicted to measured beyond this, either way, is pointed out.
FAR_OFF = 2.0


#: Columns of a cluster's table, with their units; times are those of a batch.
_COLUMNS = {
    **{"a rank": "GB/s", "all ranks": "GB/s"},
    **dict.fromkeys(("gather", "choose", "assign", "fetch", "exchange", "batch"), "ms"),
    "moved": "MB",
}


@dataclass(frozen=True)
class ClusterCase:
    """A named cluster to be predicted, and the constants for it."""

    name: str
    cluster: Cluster
    constants: Constants
    note: str = ""


def known_clusters(constants: Constants | None = None) -> list[ClusterCase]:
    """The GEAR paper's cluster, at its 1, 2 and 3 servers, and one of 1,024 GPUs."""
    server = (constants or DEFAULTS).of_host(SERVER_CORES, SERVER_COPY_GB_PER_S)
    asked = []
    for hosts, measured in GEAR_GB_PER_S.items():
        cluster = Cluster(
            hosts, 8, rows=6e6 * hosts, batch=1032 // (hosts * 8) * hosts * 8, row_bytes=100e3,
            link_gbit=SERVER_LINK_GBIT, memory_gb=SERVER_MEMORY_GB,
        )  # fmt: skip
        asked.append(
            ClusterCase(f"GEAR's cluster, {hosts} x 8 GPUs", cluster, server, f"the paper measured {measured} GB/s")
        )
    thousand = Cluster(128, 8, rows=1e9, batch=8192, row_bytes=100e3, link_gbit=SERVER_LINK_GBIT, memory_gb=1000.0)
    asked.append(ClusterCase("1,024 GPUs: 128 x 8", thousand, server))
    return asked


def show(asked: Sequence[ClusterCase], constants: Constants, json_path: Path | None = None) -> None:
    """Prints the predictions, a table a cluster, a line a configuration; writes them as JSON to `json_path`.

    Args:
        asked: the clusters, each with the constants for its hosts.
        constants: of the machine that they come from; the file has them, for `read_constants`.
        json_path: the file, or None.
    """
    console, table_of = rich_console()
    found: list[dict[str, Any]] = []
    for one in asked:
        cluster = one.cluster
        predictions = [predict(cluster, arm, one.constants) for arm in (ARMS if cluster.hosts > 1 else ARMS[:1])]
        table = table_of(title=f"{one.name}{': ' + one.note if one.note else ''}", title_justify="left")
        table.add_column("placement", no_wrap=True)
        for name, unit in _COLUMNS.items():
            table.add_column(f"{name}\n{unit}", justify="right")
        table.add_column("bound by")
        for each in predictions:
            table.add_row(each.arm, *_cells(cluster, each), each.bound_by)
        console.print(table)
        console.print(_about(cluster), highlight=False, markup=False, soft_wrap=True)
        found.append(
            {"name": one.name, "cluster": asdict(cluster), "predictions": [asdict(each) for each in predictions]}
        )
    console.print(f"constants: {constants.source}", highlight=False, markup=False, soft_wrap=True)
    if json_path is not None:
        with writing(json_path):
            json_path.write_text(json.dumps({"constants": constants.as_json(), "clusters": found}, indent=1) + "\n")


def show_checked(checked: Sequence[Checked]) -> bool:
    """Prints predictions and measurements; returns whether all are within a factor of `FAR_OFF`."""
    console, table_of = rich_console()
    table = table_of(title="predicted and measured", title_justify="left")
    for name in ("case", "what"):
        table.add_column(name, no_wrap=True)
    for name in ("predicted", "measured", "ratio"):
        table.add_column(name, justify="right")
    for each in checked:
        far = not 1 / FAR_OFF <= each.ratio <= FAR_OFF
        ratio = f"[red]{each.ratio:.2f}[/]" if far else f"{each.ratio:.2f}"
        table.add_row(each.case, f"{each.what}, {each.unit}", number(each.predicted), number(each.measured), ratio)
    console.print(table)
    for what in dict.fromkeys(each.what for each in checked):
        ratios = [each.ratio for each in checked if each.what == what]
        far_off = sum(not 1 / FAR_OFF <= ratio <= FAR_OFF for ratio in ratios)
        off = 100 * statistics.median(map(deviation, ratios))
        console.print(
            f"{what}: {len(ratios)} cases, median ratio {statistics.median(ratios):.2f}, from {min(ratios):.2f} to "
            f"{max(ratios):.2f}; half of them within {off:.0f} %, {far_off} "
            f"off by more than {FAR_OFF:g}x",
            highlight=False,
        )
    return all(1 / FAR_OFF <= each.ratio <= FAR_OFF for each in checked)


def deviation(ratio: float) -> float:
    """How far a prediction is off, as a part of the smaller of it and the measurement."""
    return max(ratio, 1 / ratio) - 1 if ratio > 0 else math.inf


def number(value: float) -> str:
    """A number with three significant digits: 12,345, 12.3, 1.23, 0.00123."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"


def _cells(cluster: Cluster, found: Prediction) -> list[str]:
    return [
        number(value)
        for value in (
            found.gb_per_s_rank,
            found.gb_per_s_rank * cluster.ranks,
            found.gather_ms,
            found.choose_ms,
            found.assign_ms,
            found.fetch_ms,
            found.exchange_ms,
            found.batch_ms,
            found.moved_bytes / 1e6,
        )
    ]


def _about(cluster: Cluster) -> str:
    words = (
        f"  batches of {cluster.batch:,} rows of {cluster.row_bytes / 1e3:g} KB, {cluster.batch // cluster.ranks} "
        f"a rank, "
        f"out of {cluster.rows:.3g} rows; links of {cluster.link_gbit:g} Gbit/s"
    )
    if cluster.memory_gb is not None:
        share = cluster.rows * cluster.row_bytes / 1e9 / (cluster.memory_gb * cluster.hosts)
        fits = f"{share:.0%} of the hosts' memory" if share <= 1 else f"{share:,.0f} times the hosts' memory: too many"
        words += f"; the rows take {fits}"
    return words


def rich_console() -> tuple[Any, Any]:
    """rich's console, as wide as lines need where it is a file, and its table."""
    console = require("rich.console", "geartrain[cli]", "Printing a plan").Console(emoji=False)
    if not console.is_terminal:
        console.width = 120
    return console, require("rich.table", "geartrain[cli]", "Printing a plan").Table


__all__ = ["GEAR_GB_PER_S", "ClusterCase", "known_clusters", "number", "show", "show_checked"]
