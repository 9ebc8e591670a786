"""`geartrain doctor` and `geartrain bench`: capabilities and performance of this machine."""

from __future__ import annotations

import inspect as inspect_module
import os
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from geartrain.core.arguments import at_most_one, check_pair, leave_out
from geartrain.errors import ArgumentError
from geartrain.tools.cli.app import app, escape, make_table, out, print_json
from geartrain.tools.cli.checks import input_file, output_file, plot_file
from geartrain_bench import BENCHES

_STYLES = {"ok": "green", "missing": "yellow", "broken": "red"}


@app.command()
def doctor(
    peer: Annotated[
        str | None,
        typer.Option(
            help="Connect to this address and report transport and speed: printed by --listen, or a node's `.address`."
        ),
    ] = None,
    listen: Annotated[
        bool,
        typer.Option("--listen", help="Print an address for --peer on the other side, and reply until Ctrl-C."),
    ] = False,
    transport: Annotated[
        str | None,
        typer.Option(help="With --peer: only this transport; an error with the reason where it is not viable."),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="With --listen: the host to bind. Anything but loopback needs GEARTRAIN_SECRET on both sides."
        ),
    ] = "127.0.0.1",
    timeout_s: Annotated[
        float, typer.Option(min=1e-3, max=1e9, help="With --peer: for connecting, and for every reply.")
    ] = 10.0,
    megabytes: Annotated[float, typer.Option(help="With --peer: size of the big message, 67 at most.")] = 16.0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Details of every capability.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Check this machine, a line for each capability: ok, missing or broken, and what to do; or probe a peer.

    What is missing is optional. With --peer: the chosen transport, why each faster one was not, round trips, bandwidth
    each way, and the path of the bytes. Exits with 1 when the peer cannot be reached.

    Example: geartrain doctor --listen

    Example: geartrain doctor --peer ADDRESS --transport tcp
    """
    import geartrain.tools.peer_probe as peer_probe
    from geartrain.tools.doctor import about, examine, summary

    secret = os.environ.get("GEARTRAIN_SECRET", "").encode()
    if listen:
        leave_out("--listen is one side, and --peer the other", **{"--peer": peer})
    if peer is None:
        leave_out("--transport is for --peer", **{"--transport": transport})
    if listen:
        peer_probe.serve(host, secret)
        return
    if peer is not None:
        found = peer_probe.probe(
            peer,
            transport=transport,
            secret=secret,
            timeout_s=timeout_s,
            megabytes=megabytes,
            progress=not as_json,
        )
        if as_json:
            print_json(vars(found))
        else:
            _print_report(found)
        return
    findings = examine()
    if as_json:
        print_json([vars(finding) for finding in findings])
        return
    more = "" if verbose else "; details: geartrain doctor --verbose"
    out.print(f"{about()}\n{summary(findings)}{more}\n", highlight=False, soft_wrap=True)
    wide = max(len(finding.what) for finding in findings)
    for finding in findings:
        line = f"{finding.what:<{wide}}  [{_STYLES[finding.state]}]{finding.state}[/]"
        remedy = f": {escape(finding.remedy)}" if finding.remedy else ""
        out.print(line + remedy, highlight=False, soft_wrap=True)
        if verbose:
            words = textwrap.wrap(
                finding.because, max(40, out.width - 4), break_long_words=False, break_on_hyphens=False
            )
            out.print(escape(textwrap.indent("\n".join(words), "    "), lines=True), highlight=False, soft_wrap=True)


def _print_report(found: Any) -> None:
    title = escape("{name}, process {pid} on {host}".format(**found.about))
    table = make_table("what", "found", title=title, title_justify="left")
    for what, text in found.in_words().items():
        table.add_row(escape(what), escape(text))
    out.print(table)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="Which: " + ", ".join(BENCHES) + "; or plot, to draw saved results again.")
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer cases and repeats, within a minute; names what it left out.")
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", callback=output_file, help="Write the figures to this file.")
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", callback=plot_file, help="Draw them into this file (PNG, SVG, PDF).")
    ] = None,
    baseline_python: Annotated[
        list[str] | None,
        typer.Option(help="Interpreter of a baseline's environment, as name=PATH. Repeatable."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda for benchmarks with a GPU variant (selection, fetch, p2p).")
    ] = "cpu",
    full: Annotated[
        bool, typer.Option("--full", help="Every case, where the default leaves some out (ranks).")
    ] = False,
    train_ms: Annotated[
        list[float] | None,
        typer.Option(
            min=0, help="Milliseconds of the consumer's step, for benchmarks that have one (ranks). Repeatable."
        ),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help="Only cases with this text in their name (transitions, llm). Repeatable."),
    ] = None,
) -> None:
    """Run a benchmark, with this machine's floor (lower bound) and the installed baselines.

    `bench plot FILE.json ...` draws results saved with --json, and reports of rpc-rl: FILE.png beside each, or --plot
    for one.

    rpc-rl and allreduce take further arguments: python -m geartrain_bench.rpc_rl.bench --help tells them.

    Example: geartrain bench store --quick --json store.json --plot store.png
    """
    from geartrain_bench import load, plot_saved

    if name == "plot":
        why = "bench plot takes saved results, and --plot FILE where there is one"
        given = {"--quick": quick, "--full": full, "--json": json_path, "--train-ms": train_ms, "--case": case}
        leave_out(why, **given, **{"--baseline-python": baseline_python, "--device": device != "cpu" and device})
        _plot_saved([Path(one) for one in context.args], plot_path, plot_saved)
        return
    main = load(name, device)
    takes_arguments = BENCHES[name].takes_arguments
    if context.args and not takes_arguments:
        raise ArgumentError(f"the benchmark {name!r} takes no {' '.join(context.args)}")
    further = {"arguments": context.args} if takes_arguments else {}
    baselines = dict(map(_baseline, baseline_python or []))
    at_most_one(**{"--quick": quick or None, "--full": full or None})
    more = {key: value for key, value in {"full": full, "train_ms": train_ms, "case": case}.items() if value}
    for key in more.keys() - inspect_module.signature(main).parameters.keys():
        raise ArgumentError(f"the benchmark {name!r} has no --{key.replace('_', '-')}")
    main(quick=quick, json_path=json_path, plot_path=plot_path, baselines=baselines or None, **more, **further)


def _plot_saved(saved: list[Path], plot_path: Path | None, plot: Callable[[Path, Path], None]) -> None:
    if not saved:
        raise ArgumentError("bench plot takes files that were saved with --json")
    if plot_path is not None and len(saved) > 1:
        raise ArgumentError("--plot names one picture; without it each file gets its own, FILE.png")
    for one in saved:
        input_file(one)
    pictures = [plot_path] if plot_path is not None else [one.with_suffix(".png") for one in saved]
    for picture in pictures:
        plot_file(picture)
    for one, picture in zip(saved, pictures, strict=True):
        plot(one, picture)
        out.print(f"{picture}", highlight=False, markup=False)


def _baseline(given: str) -> tuple[str, str]:
    """Name and interpreter of another system, from name=/path/to/python."""
    name, python = check_pair("--baseline-python", given, "NAME=/path/to/python")
    if shutil.which(python) is None:
        raise ArgumentError(f"--baseline-python {name}: {python!r} is no program")
    return name, python
