"""`geartrain generate`: a job's description as files for schedulers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from geartrain.errors import ArgumentError
from geartrain.tools.cli.app import Commands, app

generate = Commands(help="Write the file that starts a job under Slurm or on Kubernetes, to stdout.")
app.add_typer(generate, name="generate", no_args_is_help=True)

Description = Annotated[
    str,
    typer.Argument(help="As for `geartrain launch`: a TOML file; or module:name or file.py:name of a Job."),
]


def _pairs(option: str, given: list[str]) -> dict[str, str]:
    """NAME=VALUE words as a table."""
    found: dict[str, str] = {}
    for word in given:
        name, sign, value = word.partition("=")
        if not name.strip() or not sign:
            raise ArgumentError(f"{option} is NAME=VALUE, found {word!r}")
        found[name] = value
    return found


@generate.command()
def slurm(
    job: Description,
    hosts: Annotated[int, typer.Option(min=1, max=100_000, help="Number of hosts (nodes).")] = 1,
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option of sbatch, NAME=VALUE, such as partition=gpu or account=me; repeat it."),
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(help="A line of shell before the start, such as 'module load cuda'; repeat it."),
    ] = None,
    python: Annotated[
        str, typer.Option(help="Interpreter on the hosts, with geartrain; by default the one that runs this command.")
    ] = sys.executable,
) -> None:
    """Write a batch script for Slurm: sbatch starts the job on --hosts nodes, one launcher each.

    \b
    The description says what processes need; the script asks for what the
    largest host needs:
      shared_memory_gb = 20          # of the job's stores and weights, in /dev/shm
      \\[learner]
      run = "pendulum:learn"
      processes = 4
      cpus = 8                       # each; `threads` by default
      gpus = 1                       # each; 0 by default
      memory_gb = 30                 # each; --mem when all roles say it

    Ranks, stores and addresses are found from Slurm's variables, so the same
    script runs on any nodes. scancel ends the job as Ctrl-C does; a launcher
    that fails ends it on all nodes, with its error in the output file.
    Within an allocation of your own (salloc) no script is needed:
    srun --ntasks-per-node 1 geartrain launch job.toml, with GEARTRAIN_SECRET set.
    See docs/clusters.md.

    Example: geartrain generate slurm job.toml --hosts 2 --option partition=gpu > job.sbatch
    """
    import geartrain.launch as launching
    from geartrain.launch.slurm import batch_script

    sys.path.insert(0, str(Path.cwd()))
    if not python.strip() or not python.isprintable():
        raise ArgumentError(f"--python is a path or name of an interpreter, found {python!r}")
    script = batch_script(
        launching.load(job),
        str(Path(job).resolve()) if job.endswith(".toml") else job,
        hosts=hosts,
        python=python,
        options=_pairs("--option", option or []),
        setup=setup or [],
    )
    typer.echo(script, nl=False)
