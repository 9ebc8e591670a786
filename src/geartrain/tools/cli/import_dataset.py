"""`geartrain import`: imports a dataset into a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from geartrain.integrations.datasets.importer import FORMATS
from geartrain.store.store import Store
from geartrain.tools.cli.app import app, ended_by_sigterm, escape, out
from geartrain.tools.cli.dataset_options import (
    Casts,
    FormatOptions,
    Quiet,
    as_options,
    key_values,
)

_FLAT = (
    "note: every record became an episode of one step: no column holds lists, one a record, over the steps of an "
    "episode. A table with a record a step is to be grouped by its episode first (docs/importers.md)."
)
_FORMATS = [name for name in FORMATS if name != "torch"]  # of files


@app.command("import")
def import_(
    source: Annotated[str, typer.Argument(help="Dataset: a directory or file.")],
    into: Annotated[str, typer.Option(help="The store to create: a path (./data/hopper.gt) or a name in /dev/shm.")],
    format: Annotated[str, typer.Option(help=f"{', '.join(_FORMATS)}; auto looks into the files.")] = "auto",
    field: Annotated[
        list[str] | None,
        typer.Option(help="Field to import, or stored=found; repeat for several. All usual ones by default."),
    ] = None,
    episodes: Annotated[
        str | None,
        typer.Option(help="Episodes to import: 0:100 (the first hundred), -10: (the last ten), 7, or 3,5,8:10."),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            help="Import only episodes whose metadata matches: 'task=pick', 'length>100'; also !=, <, <=, >=. In "
            "quotes, since the shell takes < and > for files. Repeatable: all must hold. An unknown name lists the "
            "known ones."
        ),
    ] = None,
    cast: Casts = None,
    capacity: Annotated[
        int | None, typer.Option(min=1, help="Rows of the store; as many as imported episodes by default.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Steps that a row has room for; the longest episode's by default.")
    ] = None,
    on_too_long: Annotated[
        str, typer.Option(help="What becomes of an episode longer than --max-length: error, truncate or skip.")
    ] = "error",
    skip_unsupported: Annotated[
        bool,
        typer.Option(
            "--skip-unsupported", help="Leave out fields that no store can hold, such as text, instead of refusing."
        ),
    ] = False,
    option: FormatOptions = None,
    quiet: Quiet = False,
) -> None:
    """Import a dataset, an episode a row.

    The dataset may be larger than memory: about one episode is in memory at a time.

    Reads Minari datasets, D4RL-layout HDF5, RLDS/TFDS files (TFRecord, ArrayRecord), LeRobot v3 and v2 datasets with
    their videos, Parquet and .npz files of arrays, each without the framework that wrote it. The store is complete or
    absent.

    Example: geartrain import ~/datasets/hopper.hdf5 --into ./hopper.gt --cast float64=float32

    Example: geartrain import ~/datasets/aloha --into ./aloha.gt --option image_size=240x320

    Example: geartrain import ~/datasets/aloha --into ./pick.gt --episodes 0:100 --where task=pick --where 'length>50'
    """
    from geartrain.integrations import import_dataset

    with ended_by_sigterm(), as_options():
        store = import_dataset(
            source,
            into,
            format=format,
            fields=field,
            episodes=episodes,
            where=where,
            cast=cast or (),
            capacity=capacity,
            max_length=max_length,
            on_too_long=on_too_long,  # type: ignore[arg-type]  # checked by import_dataset, with a message
            skip_unsupported=skip_unsupported,
            persist=True,
            progress=not quiet,
            **key_values(option or [], import_dataset),
        )
    out.print(_summary(store))
    if Path(source).suffix == ".parquet" and store.max_length == 1 and len(store) > 1:
        out.print(_FLAT)
    store.close()


def _summary(store: Store) -> str:
    steps = int(store.status()["length"].sum())
    return f"{len(store):,} rows, {steps:,} steps, {store.nbytes / 1e6:,.1f} MB in {escape(str(store.path))}"
