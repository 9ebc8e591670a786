"""`geartrain reducer` and `geartrain launch`: processes that go on for long."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from geartrain.tools.cli.app import app, die, errors


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
    from geartrain.collectives.reducer_main import serve

    with errors():
        serve(bind, secret_file, metrics_port, window, every_s, grace_s)


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
    import geartrain.launch as launching
    from geartrain.launch.hosts import place_of

    sys.path.insert(0, str(Path.cwd()))  # where `python -m` looks, too
    with errors():
        described = launching.load(job)
        if timeout_s is not None:
            described = dataclasses.replace(described, timeout_s=timeout_s)
        place = place_of(os.environ, hosts=hosts, host=host, master=master, link_port=link_port)
        try:
            launching.run(
                described, folder=folder, place=place, fresh=fresh, live=False if lines else None, every_s=every_s
            )
        except launching.JobTimeoutError as error:
            die(str(error), 124)
        except launching.JobInterruptedError as error:
            die(str(error), 130)
