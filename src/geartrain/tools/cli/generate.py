"""`geartrain generate`: writes a job's description as files for schedulers (Slurm, Kubernetes)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from geartrain.core.arguments import check_pair
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
    return dict(check_pair(option, word, empty=True) for word in given)


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
        str,
        typer.Option(help="Interpreter on the hosts, with geartrain.", show_default="the one that runs this command"),
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


@generate.command()
def kubernetes(
    job: Description,
    image: Annotated[str, typer.Option(help="Container image with geartrain, the job's code and its description.")],
    hosts: Annotated[int, typer.Option(min=1, max=100_000, help="Number of hosts: pods.")] = 1,
    description: Annotated[
        str | None,
        typer.Option(help="Where the image has the description: a path or module there; JOB as it is by default."),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the JobSet; the job's by default.")] = "",
    namespace: Annotated[str, typer.Option(help="Namespace of the JobSet; kubectl's by default.")] = "",
    secret: Annotated[
        str,
        typer.Option(help="Secret whose key 'secret' is GEARTRAIN_SECRET, for several hosts; NAME-secret by default."),
    ] = "",
    env: Annotated[
        list[str] | None, typer.Option(help="An environment variable of all pods, NAME=VALUE; repeat it.")
    ] = None,
    gpu_resource: Annotated[str, typer.Option(help="What accelerators are called in the cluster.")] = "nvidia.com/gpu",
    max_restarts: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="Starts of all pods again after a failure, with empty stores.")
    ] = 0,
) -> None:
    """Write a JobSet for Kubernetes: --hosts pods, one launcher each.

    \b
    The description says what processes need; a pod asks for the sum over the
    roles that it runs, and has a memory volume as its /dev/shm:
      shared_memory_gb = 20          # needed: of the job's stores and weights
      \\[learner]
      run = "pendulum:learn"
      processes = 4
      cpus = 8                       # each; `threads` by default
      gpus = 1                       # each; 0 by default
      memory_gb = 30                 # each; a limit when all roles say it

    Consecutive hosts with the same roles are one replicated Job. Pods find
    host 0 by the JobSet's headless service. kubectl delete ends the job as
    Ctrl-C does. The cluster needs the JobSet controller (jobset.sigs.k8s.io).
    See docs/clusters.md.

    Example: geartrain generate kubernetes job.toml --image registry/pendulum:1 --hosts 2 > job.yaml
    """
    import geartrain.launch as launching
    from geartrain.launch.kubernetes import job_set, manifest

    sys.path.insert(0, str(Path.cwd()))
    made = job_set(
        launching.load(job),
        job if description is None else description,
        image=image,
        hosts=hosts,
        name=name,
        namespace=namespace,
        secret=secret,
        env=_pairs("--env", env or []),
        gpu_resource=gpu_resource,
        max_restarts=max_restarts,
    )
    typer.echo(manifest(made), nl=False)
