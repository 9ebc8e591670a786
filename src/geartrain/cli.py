"""The command line: look at stores, fill them from datasets, remove what was left behind, measure."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect as inspect_module
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from geartrain import board, weights
from geartrain.bench import BENCHES
from geartrain.errors import GeartrainError
from geartrain.store import Store

app = typer.Typer(
    help="The data plane for training large models with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console()

HISTOGRAM_BINS = 12


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Shows what was refused as one line on stderr, not as a traceback."""
    try:
        yield
    except GeartrainError as error:
        _die(str(error))


def _die(message: str, code: int = 1) -> NoReturn:
    Console(stderr=True).print(f"[red]error:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)


# --- import -----------------------------------------------------------------------------------------------------


@app.command("import")
def import_(
    source: Annotated[str, typer.Argument(help="Dataset: a directory or file.")],
    into: Annotated[str, typer.Option(help="The store to create: a path (./data/hopper.gt) or a name in /dev/shm.")],
    format: Annotated[str, typer.Option(help="auto, or the format's name.")] = "auto",
    field: Annotated[
        list[str] | None,
        typer.Option(help="Field to import, or stored=found; repeat for several. All usual ones by default."),
    ] = None,
    cast: Annotated[list[str] | None, typer.Option(help="Convert dtypes, e.g. float64=float32. Repeatable.")] = None,
    capacity: Annotated[int | None, typer.Option(help="Rows of the store; as many as episodes by default.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Steps of the longest row; found by default.")] = None,
    on_too_long: Annotated[str, typer.Option(help="error, truncate or skip episodes longer than that.")] = "error",
    skip_unsupported: Annotated[
        bool, typer.Option(help="Leave out text and video fields instead of refusing.")
    ] = False,
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option of the format as key=value, e.g. split=train. Repeatable."),
    ] = None,
    quiet: Annotated[bool, typer.Option(help="No progress bar.")] = False,
) -> None:
    """Import a dataset, an episode a row.

    Reads Minari datasets, D4RL-layout HDF5, RLDS/TFDS files (TFRecord, ArrayRecord), LeRobot v3 datasets and
    .npz files of arrays, each without the framework that wrote it. The store is complete or absent.

    Example: geartrain import ~/datasets/hopper.hdf5 --into ./hopper.gt --cast float64=float32
    """
    from geartrain.integrations import import_dataset

    with _errors():
        store = import_dataset(
            source,
            into,
            format=format,
            fields=field,
            cast=cast or (),
            capacity=capacity,
            max_length=max_length,
            on_too_long=on_too_long,  # type: ignore[arg-type]  # checked by import_dataset, with a message
            skip_unsupported=skip_unsupported,
            persist=True,
            progress=not quiet,
            **_key_values(option or []),
        )
        out.print(_summary(store))
        store.close()


def _key_values(pairs: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not found:
            _die(f"--option takes key=value, found {pair!r}")
        values[key] = {"true": True, "false": False}.get(value, int(value) if value.isdigit() else value)
    return values


# --- inspect ----------------------------------------------------------------------------------------------------


@app.command()
def inspect(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A store's name or path, the name of weights or of a board, or the directory of a checkpoint or its "
            "steps. Lists all stores, weights and boards without."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    audit: Annotated[bool, typer.Option(help="Join the store and check all of its books.")] = False,
) -> None:
    """Show a store: schema, rows, bytes, weights, counters; or a model's weights. No trace unless --audit is given."""
    with _errors():
        if name is None:
            _list_segments(as_json)
        elif (Path(name) / "manifest.json").is_file():
            _inspect_checkpoint(Path(name), as_json)
        elif any(Path(name).glob("step-*")):
            _inspect_steps(Path(name), as_json)
        elif _is_weights(name):
            _inspect_weights(name, as_json)
        elif _is_board(name):
            about = {"kind": "board", **board.describe(name)._asdict()}
            if as_json:
                sys.stdout.write(json.dumps(about, indent=1) + "\n")
            else:
                _print_boards([about])
        else:
            _inspect_store(name, as_json)
            if audit:
                _audit(name)


def _list_segments(as_json: bool) -> None:
    found: list[dict[str, Any]] = []
    for path in sorted(Path("/dev/shm").glob("geartrain.*")):
        name = path.name.removeprefix("geartrain.")
        try:
            store = Store.peek(name)
            found.append(
                {
                    "name": name,
                    "rows": len(store),
                    "capacity": store.capacity,
                    "bytes": store.nbytes,
                    "processes": store.native.live_clients(),
                }
            )
        except GeartrainError as error:
            found.append({"name": name, "error": str(error)})
    found_weights = [_describe_weights(name) for name in weights.names()]
    found_boards = [_describe_board(name) for name in board.names()]
    if as_json:
        sys.stdout.write(json.dumps(found + found_weights + found_boards, indent=1) + "\n")
        return
    if found_weights:
        _print_weights(found_weights)
    if found_boards:
        _print_boards(found_boards)
    if not found:
        out.print("no stores in /dev/shm")
        return
    table = Table("name", "rows", "capacity", "MB", "processes")
    for entry in found:
        if "error" in entry:
            table.add_row(escape(entry["name"]), "[red]" + escape(entry["error"]) + "[/]", "", "", "")
        else:
            attached = str(entry["processes"]) if entry["processes"] else "[yellow]none (left behind)[/]"
            table.add_row(
                escape(entry["name"]),
                f"{entry['rows']:,}",
                f"{entry['capacity']:,}",
                f"{entry['bytes'] / 1e6:,.1f}",
                attached,
            )
    out.print(table)


def _is_weights(name: str) -> bool:
    return name in weights.names() and not Path(f"/dev/shm/geartrain.{name}").exists()


def _describe_weights(name: str) -> dict[str, Any]:
    try:
        return {"kind": "weights", **weights.describe(name)._asdict()}
    except (GeartrainError, OSError) as error:
        return {"kind": "weights", "name": name, "error": str(error)}


def _inspect_weights(name: str, as_json: bool) -> None:
    about = {"kind": "weights", **weights.describe(name)._asdict()}
    if as_json:
        sys.stdout.write(json.dumps(about, indent=1) + "\n")
    else:
        _print_weights([about])


def _print_weights(found: list[dict[str, Any]]) -> None:
    table = Table("weights", "newest version", "published", "versions", "MB a version", "MB in memory", "publisher")
    for entry in found:
        if "error" in entry:
            table.add_row(escape(entry["name"]), "[red]" + escape(entry["error"]) + "[/]", *[""] * 5)
            continue
        used = "" if entry["in_use"] else "[yellow], nobody attached (left behind)[/]"
        table.add_row(
            escape(entry["name"]),
            "none yet" if entry["version"] is None else f"{entry['version']:,}",
            "" if entry["version"] is None else f"{(time.time_ns() - entry['published_ns']) / 1e9:,.0f} s ago",
            f"{entry['published']:,}",
            f"{entry['version_bytes'] / 1e6:,.1f}",
            f"{entry['file_bytes'] / 1e6:,.1f}",
            ("alive" if entry["has_publisher"] else "gone") + used,
        )
    out.print(table)


def _is_board(name: str) -> bool:
    return name in board.names() and not Path(f"/dev/shm/geartrain.{name}").exists()


def _describe_board(name: str) -> dict[str, Any]:
    try:
        return {"kind": "board", **board.describe(name)._asdict()}
    except (GeartrainError, OSError) as error:
        return {"kind": "board", "name": name, "error": str(error)}


def _print_boards(found: list[dict[str, Any]]) -> None:
    table = Table("board", "processes", "made by", "counts")
    for entry in found:
        if "error" in entry:
            table.add_row(escape(entry["name"]), "[red]" + escape(entry["error"]) + "[/]", "", "")
            continue
        counted = {name: value for name, value in entry["totals"].items() if value and name in board.COUNTED}
        table.add_row(
            escape(entry["name"]),
            str(entry["slots"]),
            "a living process" if entry["in_use"] else "[yellow]nobody alive (left behind)[/]",
            escape(", ".join(f"{name} {value:,.0f}" for name, value in counted.items())),
        )
    out.print(table)


def _describe(store: Store) -> dict[str, Any]:
    books = store.status()
    weights = books["weight"]
    edges = _histogram_edges(weights)
    counts = np.histogram(weights, edges)[0] if len(edges) else np.empty(0, int)
    return {
        "name": store.name,
        "path": str(store.path),
        "fields": [
            {"name": name, "shape": list(f.shape), "dtype": f.dtype, "timed": f.timed, "row_bytes": f.nbytes}
            for name, f in store.fields.items()
        ],
        "rows": len(weights),
        "capacity": store.capacity,
        "max_length": store.max_length,
        "steps": int(books["length"].sum()),
        "bytes": store.nbytes,
        "row_bytes": sum(f.nbytes for f in store.fields.values()),
        "processes": store.native.live_clients(),
        "options": store.options,
        "counters": store.stats(),
        "versions": [int(books["version"].min()), int(books["version"].max())] if len(weights) else None,
        "weights": {"edges": edges.tolist(), "rows": counts.tolist(), "zero": int((weights == 0).sum())},
    }


def _histogram_edges(weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bins for positive weights: by magnitude where they span more than two orders of it."""
    positive = weights[weights > 0]
    if positive.size == 0:
        return np.empty(0)
    low, high = float(positive.min()), float(positive.max())
    if low == high:
        return np.array([low * 0.5, high * 1.5])
    edges = (
        np.geomspace(low, high, HISTOGRAM_BINS + 1) if high / low > 100 else np.linspace(low, high, HISTOGRAM_BINS + 1)
    )
    edges[0], edges[-1] = low, high
    return edges


def _inspect_store(name: str, as_json: bool) -> None:
    about = _describe(Store.peek(name))
    if as_json:
        sys.stdout.write(json.dumps(about, indent=1) + "\n")
        return
    out.print(f"[bold]{escape(about['name'])}[/]  {escape(about['path'])}", soft_wrap=True)
    out.print(
        f"{about['rows']:,} of {about['capacity']:,} rows, {about['steps']:,} steps, {about['bytes'] / 1e6:,.1f} MB, "
        + (f"{about['processes']} processes attached" if about["processes"] else "[yellow]no process attached[/]")
    )
    table = Table("field", "shape of a row", "dtype", "timed", "bytes a row", title_justify="left")
    for field in about["fields"]:
        table.add_row(
            escape(field["name"]),
            str(tuple(field["shape"])),
            field["dtype"],
            "yes" if field["timed"] else "no",
            f"{field['row_bytes']:,}",
        )
    out.print(table)
    limits = {key: value for key, value in about["options"].items() if value is not None}
    out.print("options   " + ", ".join(f"{key}={value}" for key, value in limits.items()))
    shown = {key: value for key, value in about["counters"].items() if value}
    out.print("counters  " + (", ".join(f"{key} {value:,}" for key, value in shown.items()) or "nothing happened yet"))
    if about["versions"]:
        out.print(f"versions  {about['versions'][0]} to {about['versions'][1]}")
    _print_histogram(about["weights"])


def _print_histogram(weights: dict[str, Any]) -> None:
    if weights["zero"]:
        out.print(f"weights   {weights['zero']:,} rows have weight 0")
    if not weights["rows"]:
        return
    table = Table("weight", "rows", "", box=None, padding=(0, 1))
    largest = max(weights["rows"]) or 1
    edges = weights["edges"]
    for low, high, rows in zip(edges, edges[1:], weights["rows"], strict=False):
        span = f"{(low + high) / 2:.4g}" if len(edges) == 2 else f"{low:.4g} to {high:.4g}"
        table.add_row(span, f"{rows:,}", "█" * max(round(40 * rows / largest), 1 if rows else 0))
    out.print(table)


def _inspect_checkpoint(directory: Path, as_json: bool) -> None:
    from geartrain.checkpoint import read_manifest

    manifest = read_manifest(directory)
    if as_json:
        sys.stdout.write(json.dumps(manifest, indent=1) + "\n")
        return
    size = sum(file["bytes"] for file in manifest["files"].values())
    shared = sum(file["bytes"] for name, file in manifest["files"].items() if (directory / name).stat().st_nlink > 1)
    out.print(
        f"checkpoint of {manifest['created']}: {manifest['rows']:,} rows, {size / 1e6:,.1f} MB"
        + (f", {shared / 1e6:,.1f} MB of them shared with other checkpoints" if shared else "")
    )
    table = Table("field", "shape of a row", "dtype", "timed")
    for field in manifest["fields"]:
        table.add_row(
            escape(field["name"]),
            str(tuple(field["shape"])),
            field["dtype"],
            "yes" if field["timed"] else "no",
        )
    out.print(table)


def _inspect_steps(directory: Path, as_json: bool) -> None:
    from geartrain.shards import describe_steps

    steps = describe_steps(directory)
    if as_json:
        sys.stdout.write(json.dumps(steps, indent=1) + "\n")
        return
    table = Table("step", "created", "shards", "on this disk", "rows", "MB", "ranks")
    for step in steps:
        shards = step["shards"]
        table.add_row(
            f"{step['step']:,}",
            step["created"] if step["complete"] else "[yellow]not complete[/]",
            f"{len(shards):,}",
            f"{sum(shard['here'] for shard in shards):,}",
            f"{sum(shard['rows'] for shard in shards):,}",
            f"{sum(shard['bytes'] for shard in shards) / 1e6:,.1f}",
            f"{step['world'] or 0:,}",
        )
    out.print(table)
    newest = next((step for step in steps if step["complete"]), None)
    if newest is None:
        out.print("[yellow]no step is complete on this disk[/]")
        return
    out.print(f"step {newest['step']:,}, the newest that is complete on this disk:")
    table = Table("shard", "rows", "capacity", "MB", "saved by ranks", "on this disk")
    for shard in newest["shards"]:
        table.add_row(
            escape(shard["directory"]),
            f"{shard['rows']:,}",
            f"{shard['capacity']:,}",
            f"{shard['bytes'] / 1e6:,.1f}",
            ", ".join(map(str, shard["ranks"])),
            "yes" if shard["here"] else "no",
        )
    out.print(table)
    if newest["state"]:
        known = {key: newest["state"][key] for key in ("step", "seed") if key in newest["state"]}
        out.print("replay    " + ", ".join(f"{key} {value}" for key, value in known.items()))


def _audit(name: str) -> None:
    store = Store.open(name, adopt=True)
    problems = store.audit()
    store.close(keep=True)  # looking must not remove what a dead run left
    for problem in problems:
        out.print(f"[red]wrong:[/] {escape(problem)}")
    if problems:
        raise typer.Exit(1)
    out.print("[green]audit: every row is accounted for, every sum is exact[/]")


# --- remove, doctor ---------------------------------------------------------------------------------------------


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="The name of a store, of weights or of a board, or a store's path.")],
    force: Annotated[
        bool, typer.Option(help="Even while processes use it; they keep the memory until they end.")
    ] = False,
) -> None:
    """Remove a store, a model's weights, or a board of counters, that a run has left behind."""
    with _errors():
        if _is_weights(name):
            about = weights.describe(name)
            if about.in_use and not force:
                _die(f"living processes use the weights {name!r}; --force removes the name all the same")
            weights.unlink(name)
            out.print(f"removed the weights {name} (version {about.version}, {about.file_bytes / 1e6:,.1f} MB)")
            return
        if _is_board(name):
            if board.describe(name).in_use and not force:
                _die(f"the process that made the board {name!r} lives; --force removes the name all the same")
            board.unlink(name)
            out.print(f"removed the board {name}")
            return
        store = Store.peek(name)
        users = store.native.live_clients()
        if users and not force:
            _die(f"{users} living processes use {name!r}; --force removes its name all the same")
        rows = len(store)
        store.unlink()
        out.print(f"removed {name} ({rows:,} rows, {store.nbytes / 1e6:,.1f} MB)")


@app.command()
def doctor(
    peer: Annotated[
        str | None,
        typer.Option(
            help="Connect to this address, and say how and how fast: what --listen printed, or any node's `.address`."
        ),
    ] = None,
    listen: Annotated[
        bool, typer.Option("--listen", help="Print an address for --peer on the other side, and answer until Ctrl-C.")
    ] = False,
    transport: Annotated[
        str | None, typer.Option(help="With --peer: only this one; an error with the reason where it cannot work.")
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="With --listen: the host to bind. Anything but loopback needs GEARTRAIN_SECRET on both sides."
        ),
    ] = "127.0.0.1",
    timeout_s: Annotated[float, typer.Option(help="With --peer: for connecting, and for every answer.")] = 10.0,
    megabytes: Annotated[float, typer.Option(help="With --peer: of one big message, 67 at most.")] = 16.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what this machine can do, and why not where it cannot; or how a peer is reached, and how fast.

    With --peer: the transport that was chosen, why each faster one was not, round trips, bandwidth each way, and which
    way the bytes went. Exits with 1 when the peer cannot be reached.

    Example: geartrain doctor --listen, and on the other side: geartrain doctor --peer ADDRESS --transport tcp
    """
    from geartrain import reach
    from geartrain.doctor import examine

    secret = os.environ.get("GEARTRAIN_SECRET", "").encode()
    if listen and peer is not None:
        _die("--listen is one side, and --peer the other")
    if transport is not None and peer is None:
        _die("--transport is for --peer")
    if listen:
        with _errors():
            reach.serve(host, secret)
        return
    if peer is not None:
        with _errors():
            found = reach.reach(
                peer,
                transport=transport,
                secret=secret,
                timeout_s=timeout_s,
                megabytes=megabytes,
                progress=not as_json,
            )
        if as_json:
            sys.stdout.write(json.dumps(vars(found), indent=1) + "\n")
        else:
            _print_reached(found)
        return
    findings = examine()
    if as_json:
        sys.stdout.write(json.dumps([vars(finding) for finding in findings], indent=1) + "\n")
        return
    table = Table("what", "", "because")
    for finding in findings:
        table.add_row(
            finding.what,
            "[green]viable[/]" if finding.viable else "[yellow]not viable[/]",
            escape(finding.because),
        )
    out.print(table)


def _print_reached(found: Any) -> None:
    table = Table("what", "found", title="{name}, process {pid} on {host}".format(**found.about), title_justify="left")
    for what, text in found.in_words().items():
        table.add_row(what, escape(text))
    out.print(table)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Which: " + ", ".join(BENCHES) + ".")],
    quick: Annotated[bool, typer.Option(help="Fewer cases and repeats; ends within 60 s on 2 cores.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Draw them into this file (PNG, SVG, PDF).")] = None,
    peer_python: Annotated[
        list[str] | None,
        typer.Option(help="Interpreter of a peer's own environment, as peer=/path/to/python. Repeatable."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda for benches that have a GPU form (selection, fetch).")
    ] = "cpu",
    full: Annotated[bool, typer.Option(help="Every case, where the default leaves some out (ranks).")] = False,
    train_ms: Annotated[
        list[float] | None,
        typer.Option(help="What the consumer's step takes, for benches that have one (ranks). Repeatable."),
    ] = None,
) -> None:
    """Measure, beside the floor of this machine and the peers that are installed.

    rpc-rl and allreduce take further arguments: python -m geartrain.bench.rpc_rl --help, and so on.

    Example: geartrain bench store --quick --json store.json --plot store.png
    """
    from geartrain.bench import WITH_ARGUMENTS, load

    if context.args and name not in WITH_ARGUMENTS:
        _die(f"the bench {name!r} takes no {' '.join(context.args)}")
    further = {"arguments": context.args} if name in WITH_ARGUMENTS else {}

    peers = {}
    for pair in peer_python or []:
        peer, found, python = pair.partition("=")
        if not found:
            _die(f"--peer-python takes peer=/path/to/python, found {pair!r}")
        peers[peer] = python
    if quick and full:
        _die("--quick and --full ask for opposite things")
    with _errors():
        main = load(name, device)
        more = {key: value for key, value in {"full": full, "train_ms": train_ms}.items() if value}
        for key in more.keys() - inspect_module.signature(main).parameters.keys():
            _die(f"the bench {name!r} has no --{key.replace('_', '-')}")
        main(quick=quick, json_path=json_path, plot_path=plot_path, peers=peers or None, **more, **further)


# --- reducer ----------------------------------------------------------------------------------------------------------


@app.command()
def reducer(
    bind: Annotated[str, typer.Option(help="host:port to listen on; port 0 is any free one.")] = "127.0.0.1:0",
    secret_file: Annotated[
        Path | None,
        typer.Option(help="A file with the secret that ranks must know; or GEARTRAIN_SECRET. Without: loopback only."),
    ] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Serve Prometheus metrics on this port of the host.")] = None,
    window: Annotated[int, typer.Option(help="Bytes that a rank may have here and not yet added up.")] = 16 << 20,
    every_s: Annotated[float, typer.Option(help="Seconds between lines of figures; 0 for none.")] = 10.0,
    grace_s: Annotated[float, typer.Option(help="How long to wait, when told to stop, for groups to leave.")] = 10.0,
) -> None:
    """Own shares of other hosts' all-reduces: receive arrays, add them up, return the sums. Needs no accelerator.

    One process a host serves any number of groups. SIGTERM or Ctrl-C stops it: it takes no new groups, gives those at
    work time to leave, and tells the rest that it is gone.

    Example: geartrain reducer --bind 0.0.0.0:7000 --secret-file /etc/geartrain/secret
    """
    from geartrain.collectives.serve import serve

    with _errors():
        serve(bind, secret_file, metrics_port, window, every_s, grace_s)


# --- launch -----------------------------------------------------------------------------------------------------------


@app.command()
def launch(
    job: Annotated[
        str,
        typer.Argument(
            help="A TOML file; or module:name or file.py:name of a geartrain.launch.Job (`job` by default)."
        ),
    ],
    folder: Annotated[
        Path | None, typer.Option(help="For a log of each process and summary.json; runs/NAME-TIME by default.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin with an empty store, where a job that died has left one.")
    ] = False,
    timeout_s: Annotated[
        float | None, typer.Option(help="Stop the job after so long, instead of what it says.")
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Lines instead of a table, also on a terminal.")] = False,
    every_s: Annotated[float, typer.Option(help="A line so often.")] = 10.0,
    hosts: Annotated[
        int | None, typer.Option(help="Of several hosts: how many. Not needed under torchrun or srun.")
    ] = None,
    host: Annotated[int | None, typer.Option(help="Which of them this is, from 0.")] = None,
    master: Annotated[str | None, typer.Option(help="host:port of host 0, where the ranks meet.")] = None,
    link_port: Annotated[
        int | None, typer.Option(help="Port of host 0 where the launchers meet; the one after the ranks' by default.")
    ] = None,
) -> None:
    """Run a job: learner ranks, agents and actors of one description, watched and ended together.

    \b
    job.toml:
      name = "pendulum"              # also of its store and its weights
      timeout_s = 3600               # optional
      \\[learner]                      # ranks, with torchrun's variables
      run = "pendulum:learn"         # or a command: ["python", "x.py"]
      processes = 2
      \\[agent]                        # optional: answers actors
      run = "pendulum:serve"
      \\[actor]                        # writes episodes into the store
      environments = "pendulum:environments"
      policy = "pendulum:policy"
      processes = 4
      max_restarts = 10              # those that die are started again

    On a terminal it shows a table: steps/s, rows/s and samples/s of each role,
    the share of time it waits, the version of the weights it uses and how many
    versions that is behind, losses. Elsewhere, a line every --every-s seconds.

    It exits with 0 when the learners have returned; 1 when a process died for
    good, with its last lines; 124 at the time limit; 130 after Ctrl-C (a second
    one kills at once). After a failure the store stays, and the next start
    adopts its rows.

    Several hosts: the same command on each, under torchrun (--nproc-per-node
    1), srun (--ntasks-per-node 1) or with --hosts, --host and --master;
    GEARTRAIN_SECRET must be the same on all. See docs/launch.md.

    Example: geartrain launch job.toml --folder runs/pendulum
    """
    from geartrain import launch as launching
    from geartrain.launch.places import place_of

    sys.path.insert(0, str(Path.cwd()))  # where `python -m` looks, too
    with _errors():
        described = launching.load(job)
        if timeout_s is not None:
            described = dataclasses.replace(described, timeout_s=timeout_s)
        place = place_of(os.environ, hosts=hosts, host=host, master=master, link_port=link_port)
        try:
            launching.run(
                described, folder=folder, place=place, fresh=fresh, live=False if lines else None, every_s=every_s
            )
        except launching.JobTimeoutError as error:
            _die(str(error), 124)
        except launching.JobInterruptedError as error:
            _die(str(error), 130)


# --- plan -------------------------------------------------------------------------------------------------------

plan = typer.Typer(help="Say what a cluster that is not here would do, from what was measured here.")
app.add_typer(plan, name="plan", no_args_is_help=True)


@plan.command("ranks")
def plan_ranks(
    hosts: Annotated[int | None, typer.Option(help="Hosts, each with a shard. Two known clusters without.")] = None,
    gpus: Annotated[int, typer.Option(help="Ranks that read data, on each host.")] = 8,
    rows: Annotated[float, typer.Option(help="Rows of all shards together.")] = 1e9,
    batch: Annotated[int, typer.Option(help="Rows of the global batch.")] = 1024,
    row_bytes: Annotated[float, typer.Option(help="Bytes of a row.")] = 100e3,
    link_gbit: Annotated[float, typer.Option(help="A host's link, each way, in Gbit/s.")] = 200.0,
    step_ms: Annotated[float, typer.Option(help="What training on a batch takes; 0 asks for the most.")] = 0.0,
    share: Annotated[
        list[float] | None, typer.Option(help="Chance that a draw falls on a host; once for each. Equal by default.")
    ] = None,
    cores: Annotated[int | None, typer.Option(help="Of a host; as measured by default.")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="Of a host; says whether the rows fit.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine's constants first: 10 s.")] = False,
    constants: Annotated[
        Path | None, typer.Option(help="Constants from this file: of `bench ranks --json` or of --json here.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Predict the cases of this `bench ranks --json` file, beside what it measured.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write predictions and constants here.")] = None,
) -> None:
    """Predict GB/s per rank, bytes on the network, selection and fetch time, and what they are bound by.

    Example: geartrain plan ranks --hosts 3 --gpus 8 --rows 1e9 --batch 1032 --row-bytes 100e3 --link-gbit 200
    """
    from geartrain.plan import report
    from geartrain.plan.constants import DEFAULTS, read_constants, read_json
    from geartrain.plan.constants import measure as measure_constants
    from geartrain.plan.ranks import Cluster
    from geartrain.plan.ranks import check as check_cases

    with _errors():
        known = measure_constants() if measure else read_constants(constants) if constants else None
        if check is not None:
            if not report.show_checked(check_cases(read_json(check), known)):
                raise typer.Exit(1)
            return
        if hosts is None:
            asked = report.known_clusters(known)
        else:
            cluster = Cluster(
                hosts=hosts,
                gpus=gpus,
                rows=rows,
                batch=batch,
                row_bytes=row_bytes,
                link_gbit=link_gbit,
                step_ms=step_ms,
                shares=tuple(share) if share else None,
                memory_gb=memory_gb,
            )
            here = known or DEFAULTS
            asked = [report.Asked(f"{hosts} x {gpus} ranks", cluster, here.of_host(cores) if cores else here)]
        report.show(asked, json_path)


@plan.command("allreduce")
def plan_allreduce(
    workers: Annotated[str, typer.Option(help="Their links, each way: 8x100Gbit, or 1x100Mbit+3x400Mbit.")],
    bytes_: Annotated[str, typer.Option("--bytes", help="Of the array: 1.2GB, 16MiB, 4096.")],
    reducers: Annotated[str, typer.Option(help="Links of machines that only sum: 14x32Gbit. None without.")] = "",
    rtt: Annotated[str, typer.Option(help="A round trip between any two: 0.1ms.")] = "0",
    price_worker: Annotated[float | None, typer.Option(help="Of a worker, an hour.")] = None,
    price_reducer: Annotated[float | None, typer.Option(help="Of a reducer, an hour.")] = None,
    compute: Annotated[str, typer.Option(help="What a training step takes beside the all-reduce: 0.2s.")] = "0",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all of it here.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Draw it into this file (PNG, SVG, PDF).")] = None,
) -> None:
    """Say what an all-reduce takes, who should own what share, and how many reducers help or pay.

    Prints ring, tree, dedicated and hybrid beside each other: bytes of a worker, latency and time against the number
    of workers. With both prices: the number of reducers with which a training step costs least.

    Example: geartrain plan allreduce --workers 8x100Gbit --reducers 14x32Gbit --bytes 1.2GB --rtt 0.1ms
    """
    from geartrain.plan.allreduce import Network
    from geartrain.plan.allreduce_report import show
    from geartrain.plan.units import parse_bytes, parse_links, parse_seconds

    if (price_worker is None) != (price_reducer is None):
        _die("--price-worker and --price-reducer are asked for together, or not at all")
    with _errors():
        show(
            Network(parse_links(workers), parse_links(reducers), parse_bytes(bytes_), parse_seconds(rtt)),
            price_worker=price_worker,
            price_reducer=price_reducer,
            compute_s=parse_seconds(compute),
            json_path=json_path,
            plot_path=plot_path,
        )


def _summary(store: Store) -> str:
    steps = int(store.status()["length"].sum())
    return f"{len(store):,} rows, {steps:,} steps, {store.nbytes / 1e6:,.1f} MB in {escape(str(store.path))}"
