"""`geartrain plan`: predicts the performance of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from geartrain.core.arguments import at_most_one
from geartrain.errors import ArgumentError
from geartrain.tools.cli.app import Commands, app
from geartrain.tools.cli.checks import input_file, output_file, plot_file

plan = Commands(help="Predict a cluster's performance from constants measured on this machine.")
_BATCH = 1024
app.add_typer(plan, name="plan", no_args_is_help=True)


@plan.command("ranks")
def plan_ranks(
    hosts: Annotated[
        int | None, typer.Option(min=1, help="Hosts, each with a shard. Without it: the clusters of docs/plan.md.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Ranks that read data, on each host.")] = 8,
    rows: Annotated[float, typer.Option(min=1, help="Rows of all shards together.")] = 1e9,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of the global batch; 1,024 by default, or the next multiple of the ranks."),
    ] = None,
    row_bytes: Annotated[float, typer.Option(min=1, help="Bytes of a row.")] = 100e3,
    link_gbit: Annotated[float, typer.Option(help="A host's link, each way, in Gbit/s.")] = 200.0,
    step_ms: Annotated[float, typer.Option(min=0, help="Training time of a batch; 0 for the largest rate.")] = 0.0,
    share: Annotated[
        list[float] | None,
        typer.Option(min=0, max=1, help="Probability that a draw falls on a host; once for each. Equal by default."),
    ] = None,
    cores: Annotated[
        int | None, typer.Option(min=1, help="Cores of a host; those of the constants by default.")
    ] = None,
    memory_gb: Annotated[
        float | None, typer.Option(min=1e-9, help="Memory of a host: check whether the rows fit.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine's constants first: 10 s.")] = False,
    constants: Annotated[
        Path | None,
        typer.Option(callback=input_file, help="Constants from this file: of `bench ranks --json` or of --json here."),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            callback=input_file,
            help="Predict the cases of this `bench ranks --json` file, compared with its measurements.",
        ),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", callback=output_file, help="Write predictions and constants here.")
    ] = None,
) -> None:
    """Predict GB/s per rank, bytes on the network, selection and fetch time, and the bottleneck.

    A line of the table is a placement: how the drawn rows are shared out to the ranks (docs/plan.md).

    Example: geartrain plan ranks --hosts 3 --gpus 8 --rows 1e9 --batch 1032 --row-bytes 100e3 --link-gbit 200
    """
    import geartrain.tools.plan.report as report
    from geartrain.tools.plan.machine import DEFAULTS, read_constants, read_result
    from geartrain.tools.plan.machine import measure as measure_constants
    from geartrain.tools.plan.replay import Cluster
    from geartrain.tools.plan.replay import check as check_cases

    at_most_one(**{"--measure": measure or None, "--constants": constants})
    known = measure_constants() if measure else read_constants(constants) if constants else None
    if check is not None:
        if not report.show_checked(check_cases(read_result(check), known)):
            raise typer.Exit(1)
        return
    if hosts is None:
        asked = report.known_clusters(known)
    else:
        cluster = Cluster(
            hosts=hosts,
            gpus=gpus,
            rows=rows,
            batch=batch or -(-_BATCH // (hosts * gpus)) * hosts * gpus,
            row_bytes=row_bytes,
            link_gbit=link_gbit,
            step_ms=step_ms,
            shares=tuple(share) if share else None,
            memory_gb=memory_gb,
        )
        here = known or DEFAULTS
        asked = [report.ClusterCase(f"{hosts} x {gpus} ranks", cluster, here.of_host(cores) if cores else here)]
    report.show(asked, known or DEFAULTS, json_path)


@plan.command("allreduce")
def plan_allreduce(
    workers: Annotated[str, typer.Option(help="Workers' links, each way: 8x100Gbit, or 1x100Mbit+3x400Mbit.")],
    bytes_: Annotated[str, typer.Option("--bytes", help="Of the array: 1.2GB, 16MiB, 4096.")],
    reducers: Annotated[str, typer.Option(help="Reducers' links: 14x32Gbit. None by default.")] = "",
    rtt: Annotated[str, typer.Option(help="Round trip between any two: 0.1ms.")] = "0",
    price_worker: Annotated[float | None, typer.Option(min=0, help="Of a worker, an hour.")] = None,
    price_reducer: Annotated[float | None, typer.Option(min=0, help="Of a reducer, an hour.")] = None,
    compute: Annotated[str, typer.Option(help="Time of a training step without the all-reduce: 0.2s.")] = "0",
    json_path: Annotated[
        Path | None, typer.Option("--json", callback=output_file, help="Write predictions here, as JSON.")
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", callback=plot_file, help="Draw it into this file (PNG, SVG, PDF).")
    ] = None,
) -> None:
    """Predict the time of an all-reduce, optimal shares of owners, and the useful number of reducers.

    Prints a single reducer, root, ring, tree, dedicated and hybrid in one table: bytes of a worker, latency and time
    over the number of workers; and their costs by formula. With both prices: the number of reducers with which a
    training step is cheapest.

    Example: geartrain plan allreduce --workers 8x100Gbit --reducers 14x32Gbit --bytes 1.2GB --rtt 0.1ms
    """
    from geartrain.tools.plan.allreduce import Network
    from geartrain.tools.plan.allreduce_report import show
    from geartrain.tools.plan.units import parse_bytes, parse_links, parse_seconds

    if (price_worker is None) != (price_reducer is None):
        raise ArgumentError("--price-worker and --price-reducer need each other")
    show(
        Network(parse_links(workers), parse_links(reducers), parse_bytes(bytes_), parse_seconds(rtt)),
        price_worker=price_worker,
        price_reducer=price_reducer,
        compute_s=parse_seconds(compute),
        json_path=json_path,
        plot_path=plot_path,
    )
