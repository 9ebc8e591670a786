"""`geartrain top`, `metrics` and `trace`: the activity of this host's stores and jobs, their waits and the causes."""

from __future__ import annotations

import json
import queue
import shlex
import signal
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from geartrain.core.shared_files import check_trust, writing
from geartrain.core.threads import set_by, sleep
from geartrain.tools.cli.app import app, die, escape, out, print_json
from geartrain.tools.cli.checks import input_file, output_file
from geartrain.tools.cli.inspect_remove import TRUST_HELP


def _input_files(paths: list[Path]) -> list[Path]:
    for path in paths:
        input_file(path)
    return paths


@app.command()
def top(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...",
            help="Only lines in which one of these stands: a part of a name of a store, process or job.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the tables once, and exit. Needs no terminal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print snapshot and findings once, as JSON.")] = False,
    every_s: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between looks; rates are over them.")
    ] = 1.0,
    all_hosts: Annotated[
        bool,
        typer.Option(
            "--all-hosts", help="Other hosts of this host's jobs too, by their launchers; needs their GEARTRAIN_SECRET."
        ),
    ] = False,
    trust: Annotated[str, typer.Option(help=TRUST_HELP)] = "user",
) -> None:
    """Watch stores, replays, actors, RPC peers, collectives and weights of this host: rates, waits and their causes.

    What is stopped or lost, and who waits because of it, stands at the top. It only reads: nothing is attached to,
    locked or written. Keys: 1 to 7 one section, 0 all, arrows and Enter all of a line, s and r sort, p pauses, q quits.

    Example: geartrain top --once

    Example: geartrain top replay
    """
    from geartrain.tools.watch.screen import Screen, plain_lines
    from geartrain.tools.watch.terminal import Terminal
    from geartrain.tools.watch.watcher import BackgroundWatcher, Watcher

    if not all(name.strip() and name.isprintable() for name in names or ()):
        die("a name is a printable text, and not blank", 2)
    if as_json and names:
        die("names choose lines of the tables; --json prints everything", 2)
    watcher = Watcher(check_trust(trust), all_hosts)
    if once or as_json:
        watcher.look()
        sleep(every_s)
        snapshots, findings, missing = watcher.look()
        watcher.close()
        if as_json:
            document = {"hosts": snapshots, "findings": [each.to_json() for each in findings], "missing": missing}
            print_json(document)
            return
        for line in plain_lines(snapshots, findings, out.width, names or ()):
            out.print(line, soft_wrap=True)
        for each in missing:
            out.print(f"[yellow]no answer:[/] {escape(each)}", soft_wrap=True)
        return
    why = Terminal.why_not()
    if why is not None:
        die(f"{why}: `geartrain top --once` prints the tables, --json the same for programs")
    seen: queue.SimpleQueue[Any] = queue.SimpleQueue()
    screen = Screen(names=names or ())
    with Terminal() as terminal:

        def put(found: Any) -> None:
            seen.put(found)
            terminal.wake()

        background = BackgroundWatcher(watcher, every_s, put)
        try:
            while True:
                while not seen.empty():
                    found = seen.get()
                    if isinstance(found, Exception):
                        raise found
                    screen.update(*found)
                terminal.draw(screen.lines)
                if not all(screen.press(key) for key in terminal.wait()):
                    return
        finally:
            background.close()
            watcher.close()


@app.command()
def metrics(
    port: Annotated[int, typer.Option(min=0, max=65535, help="To listen on; 0 is a free one.")] = 9464,
    host: Annotated[
        str, typer.Option(help="To listen on; the metrics have names of stores and programs, and no password.")
    ] = "127.0.0.1",
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Print a dashboard for Grafana as JSON, and exit.")
    ] = False,
    trust: Annotated[str, typer.Option(help=TRUST_HELP)] = "user",
) -> None:
    """Serve metrics of all stores, jobs, replays, peers, groups and weights of this host to Prometheus, until Ctrl-C.

    In prometheus.yml: targets: ["localhost:9464"]

    Example: geartrain metrics --port 9464
    """
    from geartrain.launch.prometheus import PrometheusEndpoint

    trusted = check_trust(trust)
    if dashboard:
        import geartrain.tools.watch.dashboard as grafana

        print_json(grafana.dashboard())
        return
    with set_by(signal.SIGTERM) as ended:
        endpoint = PrometheusEndpoint(None, host, port, trusted)
        try:
            out.print(f"metrics on {endpoint.url}", soft_wrap=True, markup=False)
            ended.wait()
        finally:
            endpoint.close()


@app.command()
def trace(
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE...", callback=_input_files, help="Traces, one of each host.")
    ],
    to: Annotated[Path | None, typer.Option("--out", callback=output_file, help="Write them here as one.")] = None,
) -> None:
    """Check traces that GEARTRAIN_TRACE=FILE has written, tell what is in them, and join those of several hosts.

    Example: geartrain trace trace-host0.json trace-host1.json --out trace.json
    """
    from geartrain.core.trace import merge

    events = merge(paths)
    slices = Counter(str(each.get("cat", "")) for each in events if each["ph"] == "X")
    begun = {(str(each.get("cat")), str(each.get("id"))) for each in events if each["ph"] == "s"}
    ended = {(str(each.get("cat")), str(each.get("id"))) for each in events if each["ph"] == "f"}
    processes = sum(each["name"] == "process_name" for each in events)
    shown = ", ".join(f"{number:,} of {name}" for name, number in sorted(slices.items())) or "none"
    what = "1 process" if processes == 1 else f"{processes} processes"
    out.print(escape(f"{what}; slices: {shown}; {len(begun & ended):,} flows"), soft_wrap=True)
    for each in events:
        if each.get("cat") == "trace":
            out.print(f"[yellow]{escape(each['name'])}[/]")
    if to is not None:
        with writing(to):
            to.write_text(json.dumps(events) + "\n")
    if to is None and len(paths) > 1:
        words = " ".join(shlex.quote(str(path)) for path in paths)
        out.print(escape(f"next, write them as one: geartrain trace {words} --out trace.json"), soft_wrap=True)
    else:
        out.print(escape(f"next, open {to or paths[0]} at https://ui.perfetto.dev"), soft_wrap=True)
