"""`geartrain reducer` and `geartrain launch`: commands that keep running."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from geartrain.core.arguments import leave_out
from geartrain.errors import ArgumentError
from geartrain.tools.cli.app import app, die
from geartrain.tools.cli.checks import input_file, output_folder


@app.command()
def reducer(
    bind: Annotated[str, typer.Option(help="host:port to listen on; port 0 is any free one.")] = "127.0.0.1:0",
    secret_file: Annotated[
        Path | None,
        typer.Option(
            callback=input_file,
            help="A file with the secret shared with ranks; or GEARTRAIN_SECRET. Without: loopback only.",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve Prometheus metrics on this port of the host.")
    ] = None,
    window: Annotated[int, typer.Option(min=1, help="Bytes in flight of each rank: received and not yet reduced.")] = 16
    << 20,
    every_s: Annotated[
        float, typer.Option(min=0, max=1e9, help="Seconds between lines of statistics; 0 for none.")
    ] = 10.0,
    grace_s: Annotated[float, typer.Option(min=0, max=1e9, help="Time limit of groups to leave after SIGTERM.")] = 10.0,
    threads: Annotated[
        int, typer.Option(min=1, max=64, help="That receive, sum and send: list the address as often to use them all.")
    ] = 1,
) -> None:
    """Reduce for other hosts: receive arrays of their all-reduces, sum them, return the sums. Needs no accelerator.

    One process a host serves any number of groups. SIGTERM or Ctrl-C stops it: it accepts no new groups, gives active
    ones time to leave, and disconnects the rest.

    Example: geartrain reducer --bind 0.0.0.0:7000 --secret-file /etc/geartrain/secret
    """
    from geartrain.collectives.reducer_main import serve

    serve(bind, secret_file, metrics_port, window, every_s, grace_s, threads)


@app.command()
def launch(
    job: Annotated[
        str,
        typer.Argument(
            help="A TOML file; or module:name or file.py:name of a geartrain.launch.Job (`job` by default)."
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Option(
            callback=output_folder,
            help="For a log of each process and summary.json; runs/NAME-TIME by default. The folder above must exist.",
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Start with an empty store; by default, rows of a failed job are adopted."),
    ] = False,
    timeout_s: Annotated[float | None, typer.Option(help="Time limit of the job, instead of its own.")] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Lines instead of a table, also on a terminal.")] = False,
    every_s: Annotated[float, typer.Option(min=0.1, max=1e9, help="Seconds between lines.")] = 10.0,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve Prometheus metrics on this port of the host.")
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="Address for --metrics-port, which has no password; 0.0.0.0 is all of the host's.")
    ] = "127.0.0.1",
    hosts: Annotated[
        int | None, typer.Option(min=1, help="Number of hosts. Not needed under torchrun or srun.")
    ] = None,
    host: Annotated[int | None, typer.Option(min=0, help="Number of this host, from 0.")] = None,
    master: Annotated[str | None, typer.Option(help="host:port of host 0, for the ranks' rendezvous.")] = None,
    coordinator_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of host 0 for the launchers; the one after the ranks' by default."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Run it on --hosts nodes of this Ray cluster: auto, host:port, or local for one started here."
        ),
    ] = None,
) -> None:
    """Run a job: start, supervise and end its learner ranks, agents and actors.

    \b
    job.toml:
      name = "pendulum"              # also of its store and its weights
      timeout_s = 3600               # optional
      \\[learner]                      # ranks, with torchrun's variables
      run = "pendulum:learn"         # or a command: ["python", "x.py"]
      processes = 2
      \\[agent]                        # optional: serves actions
      run = "pendulum:serve"
      \\[actor]                        # writes episodes into the store
      environments = "pendulum:environments"
      policy = "pendulum:policy"
      processes = 4
      max_restarts = 10              # of processes that die
      hosts = "1-"                   # all by default; or "0,2-3", or a class
      \\[reducer]                      # optional: owns shares of all-reduces
      hosts = \\[0, 1]

    Hosts without learners have no store: actors there write into those of the
    learners' hosts, over the network. \\[hosts] defines classes of hosts:
    simulators = "2-".

    On a terminal it shows a table: steps/s, rows/s and samples/s of each role,
    the share of time it waits, the version of the weights it uses and how many
    versions that is behind, losses. Elsewhere, a line every --every-s seconds.

    It exits with 0 when the learners have returned; 1 when a process died
    after its last restart, with its last lines; 124 at the time limit; 130
    after Ctrl-C (a second one kills at once). After a failure the store is
    kept, and the next start adopts its rows.

    Several hosts: the same command on each, under torchrun (--nproc-per-node
    1), srun (--ntasks-per-node 1) or with --hosts, --host and --master;
    GEARTRAIN_SECRET must be the same on all. With --ray auto --hosts 2, once
    anywhere in a Ray cluster. `geartrain generate` writes files for sbatch and
    for Kubernetes. See docs/launch.md and docs/clusters.md.

    Example: geartrain launch job.toml --folder pendulum-run
    """
    import geartrain.launch as launching
    from geartrain.launch.hosts import host_position

    sys.path.insert(0, str(Path.cwd()))  # where `python -m` looks, too
    described = launching.load(job)
    if timeout_s is not None:
        described = dataclasses.replace(described, timeout_s=timeout_s)
    if ray is not None:
        placed = {"--host": host, "--master": master, "--coordinator-port": coordinator_port}
        leave_out("--ray finds the nodes itself", **placed)
        if not ray.strip() or not ray.isprintable():
            raise ArgumentError(f"--ray is auto, host:port or local, found {ray!r}")
    else:
        position = host_position(os.environ, hosts=hosts, host=host, master=master, coordinator_port=coordinator_port)
    try:
        if ray is not None:
            from geartrain.launch.ray import run

            options: dict[str, Any] = {"folder": folder, "fresh": fresh, "every_s": every_s}
            options |= {"metrics_port": metrics_port, "metrics_host": metrics_host}
            run(described, hosts=hosts or 1, address=ray, **options)
            return
        launching.run(
            described,
            folder=folder,
            position=position,
            fresh=fresh,
            live=False if lines else None,
            every_s=every_s,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
        )
    except launching.JobTimeoutError as error:
        die(str(error), 124)
    except launching.JobInterruptedError as error:
        die(str(error), 130)
