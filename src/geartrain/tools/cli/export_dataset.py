"""`geartrain export`: exports a store or checkpoint as a dataset of another format."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from geartrain.core.shared_files import check_trust
from geartrain.tools.cli.app import app, ended_by_sigterm, escape, out
from geartrain.tools.cli.dataset_options import (
    Casts,
    FormatOptions,
    Quiet,
    as_options,
    key_values,
)
from geartrain.tools.cli.inspect_remove import TRUST_HELP


@app.command("export")
def export(
    store: Annotated[str, typer.Argument(help="A store's name or path, or the directory of a checkpoint.")],
    path: Annotated[str, typer.Argument(help="The file or folder to write.")],
    format: Annotated[
        str, typer.Option(help="npz, npy, parquet, minari or lerobot; auto knows .npz and .parquet.")
    ] = "auto",
    field: Annotated[
        list[str] | None,
        typer.Option(help="Field to export, or written=stored; repeat for several. All by default."),
    ] = None,
    cast: Casts = None,
    skip_unsupported: Annotated[
        bool,
        typer.Option("--skip-unsupported", help="Leave out fields that the format cannot hold instead of refusing."),
    ] = False,
    metadata: Annotated[
        bool,
        typer.Option("--metadata", help="Write versions, priorities and the like of rows too (npz, npy, parquet)."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a dataset of this format that is there.")
    ] = False,
    option: FormatOptions = None,
    trust: Annotated[str, typer.Option(help=TRUST_HELP)] = "user",
    quiet: Quiet = False,
) -> None:
    """Export all rows of a store or checkpoint, an episode a row.

    Writes .npz and .npy files, Parquet, Minari datasets and LeRobot v3 datasets, a group of rows in memory at a time.
    The dataset is complete or absent. A store may be in use; it is only looked at.

    Example: geartrain export hopper ./hopper.parquet

    Example: geartrain export arm ./arm --format lerobot --option fps=30 --option video=true
    """
    from geartrain.integrations import export_store

    with ended_by_sigterm(), as_options():
        report = export_store(
            store,
            path,
            format=format,
            fields=field,
            cast=cast or (),
            skip_unsupported=skip_unsupported,
            metadata=metadata,
            overwrite=overwrite,
            progress=not quiet,
            trust=check_trust(trust),
            **key_values(option or [], export_store),
        )
    if quiet or not (sys.stdout.isatty() and sys.stderr.isatty()):  # on a terminal the progress ends with this line
        out.print(escape(f"{path}: {report}"), soft_wrap=True)
