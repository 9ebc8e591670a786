"""`geartrain inspect` and `geartrain remove`: stores, weights, counters and checkpoints of this host."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import geartrain.core.counters as counters
import geartrain.weights as weights
from geartrain.core.arguments import at_most_one
from geartrain.core.shared_files import Trust, check_trust, segments_directory, shared_files
from geartrain.errors import ArgumentError, GeartrainError, IncompatibleStoreError
from geartrain.launch.host_snapshot import tasks_of
from geartrain.store.store import Store
from geartrain.tools.cli.app import app, die, escape, make_table, out, print_json
from geartrain.tools.cli.checks import output_folder
from geartrain.tools.cli.rows import print_rows, rows_as_json

HISTOGRAM_BINS = 12
#: What has a name beside stores, and the module that finds and describes it.
_NAMED: dict[str, Any] = {"weights": weights, "counters": counters}
TRUST_HELP = "Who may write to the segment: user (its owner alone), group or any, as it was created with."


@app.command()
def inspect(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A store's name or path, the name of weights or counters, or the directory of a checkpoint, its "
            "steps or a journal. Without it: a list of all stores, weights and counters."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    audit: Annotated[bool, typer.Option("--audit", help="Attach to the store and check its metadata.")] = False,
    rows: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Show the newest rows of a store; pixels as pictures.")
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(callback=output_folder, help="With --rows: write the pictures of all steps into this folder."),
    ] = None,
    trust: Annotated[str, typer.Option(help=TRUST_HELP)] = "user",
) -> None:
    """Show a store: schema, rows, bytes, priorities, counters; or a model's weights, a checkpoint, a journal.

    Without a name: a list of what this host has. A store is attached to with --audit alone, which checks its metadata
    and exits with 1 where something is wrong.

    Example: geartrain inspect pendulum --rows 3
    """
    trusted = check_trust(trust)
    if png is not None and rows is None:
        raise ArgumentError("--png writes pictures of the rows that --rows shows")
    at_most_one(**{"--audit": audit or None, "--rows": rows})
    if name is None:
        if audit or rows is not None:
            raise ArgumentError(f"{'--audit' if audit else '--rows'} is for one store: name it")
        _list_segments(as_json, trusted)
        return
    kind = _kind_of(name)
    if kind == "store":
        if rows is not None:
            _inspect_rows(name, rows, png, as_json, trusted)
        else:
            _inspect_store(name, as_json, audit, trusted)
        return
    if audit or rows is not None:
        die(f"{'--audit' if audit else '--rows'} is for stores; {name!r} names {kind}")
    if kind == "a checkpoint":
        _inspect_checkpoint(Path(name), as_json)
    elif kind == "checkpoints":
        _inspect_checkpoint(Path(name) / "latest", as_json)
    elif kind == "a journal":
        _inspect_journal(Path(name), as_json)
    elif kind == "steps of a job":
        _inspect_steps(Path(name), as_json)
    else:
        about = {"kind": kind, **_NAMED[kind].describe(name)._asdict()}
        if as_json:
            print_json(about)
        elif kind == "weights":
            _print_weights([about])
        else:
            _print_counters([about])


def _kind_of(name: str) -> str:
    if (Path(name) / "manifest.json").is_file():
        return "a checkpoint"
    if (Path(name) / "journal.json").is_file():
        return "a journal"
    if any(Path(name).glob("step-*")):
        return "steps of a job"
    if (Path(name) / "latest" / "manifest.json").is_file():
        return "checkpoints"
    if "/" in name and Path(name).is_dir():
        die(f"{name} is a directory without a checkpoint, checkpoints with their `latest`, steps of a job or a journal")
    return next((kind for kind in _NAMED if _is_named(kind, name)), "store")


def _inspect_rows(name: str, rows: int, png: Path | None, as_json: bool, trust: Trust) -> None:
    store = Store.open(name, mode="r", adopt=True, trust=trust)
    if as_json:
        sys.stdout.write(json.dumps(rows_as_json(store, rows)) + "\n")
        return
    if png is not None:
        png.mkdir(exist_ok=True)
    print_rows(store, rows, out, png)


def _list_segments(as_json: bool, trust: Trust) -> None:
    found: list[dict[str, Any]] = []
    directory = segments_directory()
    for path in shared_files("geartrain.*", directory):
        name = path.name.removeprefix("geartrain.")
        try:
            store = Store.open(name, mode="r", adopt=True, trust=trust)
            found.append(
                {
                    "name": name,
                    "rows": len(store),
                    "capacity": store.capacity,
                    "bytes": store.nbytes,
                    "processes": store.native.live_clients(),
                    "closed_in_order": store.native.closed_in_order(),
                }
            )
        except GeartrainError as error:
            found.append({"name": name, "error": str(error)})
    found_weights, found_counters = ([_described(kind, each) for each in _NAMED[kind].names()] for kind in _NAMED)
    if as_json:
        print_json(found + found_weights + found_counters)
        return
    if found_weights:
        _print_weights(found_weights)
    if found_counters:
        _print_counters(found_counters)
    if not found:
        missing = "" if directory.is_dir() else ", which is no directory"
        out.print(f"no stores in {escape(str(directory))}{missing}")
        return
    table = make_table("name", "rows", "capacity", "MB", "processes")
    for entry in found:
        if "error" in entry:
            table.add_row(escape(entry["name"]), f"[red]{escape(entry['error'])}[/]")
        else:
            unused = "none (kept)" if entry["closed_in_order"] else "[yellow]none (left behind)[/]"
            attached = str(entry["processes"]) if entry["processes"] else unused
            table.add_row(
                escape(entry["name"]),
                f"{entry['rows']:,}",
                f"{entry['capacity']:,}",
                f"{entry['bytes'] / 1e6:,.1f}",
                attached,
            )
    out.print(table)


def _is_named(kind: str, name: str) -> bool:
    return name in _NAMED[kind].names() and not (segments_directory() / f"geartrain.{name}").exists()


def _described(kind: str, name: str) -> dict[str, Any]:
    try:
        return {"kind": kind, **_NAMED[kind].describe(name)._asdict()}
    except (GeartrainError, OSError) as error:
        return {"kind": kind, "name": name, "error": str(error)}


def _print_weights(found: list[dict[str, Any]]) -> None:
    table = make_table(
        "weights", "newest version", "published", "versions", "MB a version", "MB in memory", "publisher"
    )
    for entry in found:
        if "error" in entry:
            table.add_row(escape(entry["name"]), f"[red]{escape(entry['error'])}[/]")
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


def _print_counters(found: list[dict[str, Any]]) -> None:
    table = make_table("counters", "processes", "created by", "totals")
    for entry in found:
        if "error" in entry:
            table.add_row(escape(entry["name"]), f"[red]{escape(entry['error'])}[/]")
            continue
        counted = {name: value for name, value in entry["totals"].items() if value and name in counters.COUNTED}
        table.add_row(
            escape(entry["name"]),
            str(entry["slots"]),
            "a living process" if entry["in_use"] else "[yellow]nobody alive (left behind)[/]",
            escape(", ".join(f"{name} {value:,.0f}" for name, value in counted.items())),
        )
    out.print(table)


def _describe(store: Store) -> dict[str, Any]:
    status = store.status()
    priorities = status["priority"]
    edges = _histogram_edges(priorities)
    counts = np.histogram(priorities, edges)[0] if len(edges) else np.empty(0, int)
    return {
        "name": store.name,
        "path": str(store.path),
        "fields": [
            {
                "name": name,
                "shape": [*([] if field.axis is None else [field.axis]), *field.shape],
                "dtype": field.dtype if field.kind == "array" else field.kind,
                "per_row": field.per_row,
                "row_bytes": _row_bytes(store, name),
            }
            for name, field in store.fields.items()
        ],
        "rows": len(priorities),
        "capacity": store.capacity,
        "max_length": store.max_length,
        "steps": int(status["length"].sum()),
        "bytes": store.nbytes,
        "row_bytes": sum(_row_bytes(store, name) is not None and f.nbytes for name, f in store.fields.items()),
        "processes": store.native.live_clients(),
        "closed_in_order": store.native.closed_in_order(),
        "options": store.options,
        "counters": store.stats(),
        "axes": list(store.axes),
        "tasks": tasks_of(store),
        "limiter": str(store.limiter.state()),
        "versions": [int(status["version"].min()), int(status["version"].max())] if len(priorities) else None,
        "priorities": {"edges": edges.tolist(), "rows": counts.tolist(), "zero": int((priorities == 0).sum())},
    }


def _row_bytes(store: Store, name: str) -> int | None:
    """Bytes of a field in every row; None if each row has its own."""
    if store.plan is not None and store.plan.in_spans(name):
        return None
    return store.fields[name].block_nbytes(store.max_length)


def _print_tasks(about: dict[str, Any]) -> None:
    tasks, counters = about["tasks"], about["counters"]
    if not tasks:
        return
    out.print(
        f"clock {counters['clock']:,}, {counters['in_flight']:,} rows in flight, {counters['stale']:,} ended for their "
        f"age; limiter: {about['limiter']}"
    )
    table = make_table("task", "due", "claimed", "done", "released", "deaths", "set back", "oldest claim")
    for name, task in tasks.items():
        figures, pid = task["figures"], task["oldest_pid"]
        oldest = "" if pid is None else f"process {pid}, inserted {task['oldest_age_s']:,.0f} s ago"
        numbers = (figures[key] for key in ("due", "claimed", "done", "released", "deaths", "set_back"))
        table.add_row(escape(name), *(f"{number:,}" for number in numbers), oldest)
    out.print(table)


def _histogram_edges(priorities: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bins for positive priorities: by magnitude where they span more than two orders of it."""
    positive = priorities[priorities > 0]
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


def _inspect_store(name: str, as_json: bool, audit: bool, trust: Trust) -> None:
    about = _describe(Store.open(name, mode="r", adopt=True, trust=trust))
    if audit:
        about["problems"] = _problems(name, trust)
    if as_json:
        print_json(about)
    else:
        _print_store(about)
    if about.get("problems"):
        raise typer.Exit(1)


def _print_store(about: dict[str, Any]) -> None:
    unused = "no process attached"
    if not about["closed_in_order"]:
        unused = "[yellow]no process attached; those that were have been killed, or the host was[/]"
    out.print(f"[bold]{escape(about['name'])}[/]  {escape(about['path'])}", soft_wrap=True)
    out.print(
        f"{about['rows']:,} of {about['capacity']:,} rows, {about['steps']:,} steps, {about['bytes'] / 1e6:,.1f} MB, "
        + (f"{about['processes']} process{'es' * (about['processes'] > 1)} attached" if about["processes"] else unused)
    )
    table = make_table("field", "shape of a step", "dtype", "once a row", "bytes a row", title_justify="left")
    for field in about["fields"]:
        table.add_row(
            escape(field["name"]),
            str(tuple(field["shape"])),
            field["dtype"],
            "yes" if field["per_row"] else "no",
            "as it comes" if field["row_bytes"] is None else f"{field['row_bytes']:,}",
        )
    out.print(table)
    _print_tasks(about)
    limits = {key: value for key, value in about["options"].items() if value is not None}
    out.print("options   " + escape(", ".join(f"{key}={value}" for key, value in limits.items())))
    shown = {key: value for key, value in about["counters"].items() if value}
    out.print("counters  " + (", ".join(f"{key} {value:,}" for key, value in shown.items()) or "none yet"))
    if about["versions"]:
        out.print(f"versions  {about['versions'][0]} to {about['versions'][1]}")
    _print_histogram(about["priorities"])
    for problem in about.get("problems", ()):
        out.print(f"[red]wrong:[/] {escape(problem)}")
    if about.get("problems") == []:
        out.print("[green]audit: every row is accounted for, every sum is exact[/]")


def _print_histogram(priorities: dict[str, Any]) -> None:
    if priorities["zero"]:
        out.print(f"priorities   {priorities['zero']:,} rows have priority 0")
    if not priorities["rows"]:
        return
    table = make_table("priority", "rows", "", box=None, padding=(0, 1))
    largest = max(priorities["rows"]) or 1
    edges = priorities["edges"]
    for low, high, rows in zip(edges, edges[1:], priorities["rows"], strict=False):
        span = f"{(low + high) / 2:.4g}" if len(edges) == 2 else f"{low:.4g} to {high:.4g}"
        table.add_row(span, f"{rows:,}", "█" * max(round(40 * rows / largest), 1 if rows else 0))
    out.print(table)


def _inspect_checkpoint(directory: Path, as_json: bool) -> None:
    from geartrain.store.checkpoint_reader import Checkpoint
    from geartrain.store.saved_parts import COMMITTED, TAKEN, UNDER_WAY

    with Checkpoint(directory) as found:
        manifest, size, shared, plan = found.manifest, found.nbytes, found.shared_nbytes, found.plan
        states = None if plan is None else found.records()["state"]
    if as_json:
        print_json(manifest)
        return
    out.print(
        f"checkpoint of {escape(manifest['created'])}: {manifest['rows']:,} rows, {size / 1e6:,.1f} MB"
        + (f", {shared / 1e6:,.1f} MB of them shared with other checkpoints" if shared else "")
    )
    if plan is not None and states is not None:
        named = {"finished": COMMITTED, "under way": UNDER_WAY, "kept by batches until they are saved": TAKEN}
        counts = {what: int((states == state).sum()) for what, state in named.items()}
        out.print(", ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "no rows")
        table = make_table("field", "values of a row", "written by")
        writers = ["the insert", *(f"task {name}" for name in plan.tasks)]
        for name, spec in plan.fields.items():
            table.add_row(escape(name), escape(str(spec)), escape(writers[plan.writer[name]]))
        out.print(table)
        return
    table = make_table("field", "shape of a row's block", "dtype", "time in front")
    for field in manifest["fields"]:
        table.add_row(
            escape(field["name"]),
            str(tuple(field["shape"])),
            escape(field["dtype"]),
            "yes" if field["timed"] else "no",
        )
    out.print(table)


def _inspect_journal(directory: Path, as_json: bool) -> None:
    from geartrain.store.journal_directory import JournalDirectory

    journal = JournalDirectory(directory)
    found = journal.contents()
    newest = int(found.records["inserted_at_ns"][found.records["generation"] != 0].max(initial=0))
    about: dict[str, Any] = {
        "kind": "journal",
        "rows": found.rows,
        "capacity": journal.capacity,
        "max_length": journal.max_length,
        "segments": len(found.segments),
        "bytes": sum(segment.nbytes for segment in found.segments),
        "unfinished_bytes": found.cut_bytes,
        "newest_row_ns": newest,
        "next_sequence": found.next_sequence,
        "store": found.store_path,
        "fields": journal.stored_fields,
        **({} if journal.plan is None else {"axes": [axis.name for axis in journal.plan.axes]}),
        **({} if journal.plan is None else {"tasks": list(journal.plan.tasks)}),
    }
    if as_json:
        print_json(about)
        return
    out.print(
        f"journal: {found.rows:,} rows of a store of {journal.capacity:,}, {about['bytes'] / 1e6:,.1f} MB in "
        f"{len(found.segments)} segment{'s' if len(found.segments) != 1 else ''}, all checksums right"
        + (f"; {found.cut_bytes:,} bytes at the end are not whole, and hold nothing" if found.cut_bytes else "")
    )
    if newest:
        out.print(f"newest row committed {(time.time_ns() - newest) / 1e9:,.0f} s ago")
    table = make_table("field", "shape of a step, or of a row's value", "dtype", "per row")
    for name, field in journal.fields.items():
        shape = field.shape if field.axis is None else (field.axis, *field.shape)
        dtype = field.dtype if field.kind == "array" else field.kind
        table.add_row(escape(name), escape(str(shape)), dtype, "yes" if field.per_row else "no")
    out.print(table)


def _inspect_steps(directory: Path, as_json: bool) -> None:
    from geartrain.checkpoints.steps import describe_steps

    steps = describe_steps(directory)
    if as_json:
        print_json(steps)
        return
    table = make_table("step", "created", "shards", "on this disk", "rows", "MB", "ranks")
    for step in steps:
        shards = step["shards"]
        table.add_row(
            f"{step['step']:,}",
            escape(str(step["created"])) if step["complete"] else "[yellow]not complete[/]",
            f"{len(shards):,}",
            f"{sum(shard['here'] for shard in shards):,}",
            f"{sum(shard['rows'] for shard in shards):,}",
            f"{sum(shard['bytes'] for shard in shards) / 1e6:,.1f}",
            f"{step['world'] or 0:,}",
        )
    out.print(table)
    for step in steps:
        if step["damaged"] is not None:
            out.print(f"[yellow]step {step['step']:,}:[/] " + escape(step["damaged"]), soft_wrap=True)
    newest = next((step for step in steps if step["complete"]), None)
    if newest is None:
        out.print("[yellow]no step is complete on this disk[/]")
        return
    out.print(f"step {newest['step']:,}, the newest that is complete on this disk:")
    table = make_table("shard", "rows", "capacity", "MB", "saved by ranks", "on this disk")
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
        out.print("replay    " + escape(", ".join(f"{key} {value}" for key, value in known.items())))


def _problems(name: str, trust: Trust) -> list[str]:
    store = Store.open(name, adopt=True, trust=trust)
    try:
        return store.audit()
    finally:
        store.close(keep=True)  # an audit must not remove a dead run's store


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="The name of a store, of weights or of counters, or a store's path.")],
    force: Annotated[
        bool, typer.Option("--force", help="Even while processes use it; the memory is freed when they end.")
    ] = False,
    trust: Annotated[str, typer.Option(help=TRUST_HELP)] = "user",
) -> None:
    """Remove a store that a dead run left behind, a model's weights, or counters.

    Example: geartrain remove pendulum
    """
    trusted = check_trust(trust)
    for kind, module in _NAMED.items():
        if _is_named(kind, name):
            about = module.describe(name)
            if about.in_use and not force:
                die(f"living processes use the {kind} {name!r}; --force removes the name regardless")
            module.unlink(name)
            what = f" (version {about.version}, {about.file_bytes / 1e6:,.1f} MB)" if kind == "weights" else ""
            out.print(f"removed the {kind} {escape(name)}{what}")
            return
    try:
        store = Store.open(name, mode="r", adopt=True, trust=trusted)
    except IncompatibleStoreError as error:
        _remove_unreadable(name, force, error)
        return
    users = store.native.live_clients()
    if users and not force:
        die(f"{users} living process{'es use' if users > 1 else ' uses'} {name!r}; --force removes its name regardless")
    rows = len(store)
    if not store.unlink() and store.path.exists():
        die(f"{store.path} cannot be removed: its directory is read-only, or only another user may")
    out.print(f"removed {escape(name)} ({rows:,} rows, {store.nbytes / 1e6:,.1f} MB)")


def _remove_unreadable(name: str, force: bool, error: IncompatibleStoreError) -> None:
    """Removes a file under a store's name that is no segment of this build: damaged, cut, or of another build."""
    path = segments_directory() / f"geartrain.{name}"
    if "/" in name or not path.is_file() or path.is_symlink():
        raise error
    if not force:
        die(f"{error}; --force removes it unseen, processes that use it keep their memory")
    path.unlink()
    out.print(f"removed {escape(name)}, which no store could be read from")
