"""Batch scripts for Slurm: converts a job's description into a file for `sbatch`.

    geartrain generate slurm job.toml --hosts 2 --option partition=gpu > job.sbatch
    sbatch job.sbatch

The script does three things:

1. It requests the hosts, each with the resources that the largest host needs (resources.py).
2. It generates the secret that launchers and processes of several hosts share.
3. It starts one launcher on each host by `srun`.

A launcher finds its position among the hosts in the variables of its Slurm step (hosts.py).
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from geartrain.errors import ArgumentError
from geartrain.launch.coordinator import JOIN_S
from geartrain.launch.job import Job
from geartrain.launch.resources import host_resources

#: Added to the job's time limit to get Slurm's: time for launchers to join, and for processes to stop.
MARGIN_S = JOIN_S + 60.0
#: Options of sbatch that follow from the number of hosts and launchers.
_OURS = ("nodes", "ntasks", "ntasks-per-node")
_NAME = re.compile(r"[a-z][a-z0-9-]*")


def batch_script(
    job: Job,
    description: str,
    *,
    hosts: int = 1,
    python: str = "python",
    directory: str | Path = ".",
    options: Mapping[str, str] | None = None,
    setup: Sequence[str] = (),
) -> str:
    """Text of an sbatch script that runs a job.

    Args:
        job: the job that `description` names, for its resources.
        description: as for `launch.load`; the hosts read it again.
        hosts: number of hosts.
        python: Python interpreter of the launchers, which has geartrain.
        directory: directory where the script runs; logs go to `runs` below it.
        options: further options of sbatch by their long names, such as {"partition": "gpu"}. They replace those that
            follow from the description. An empty value is an option without one.
        setup: shell lines before the launchers start, such as "module load cuda".

    Raises:
        ArgumentError: the job cannot be placed on so many hosts; or an option is invalid, or follows from `hosts`.

    Examples:
        >>> from geartrain import launch
        >>> job = launch.Job("pendulum", [launch.learners("pendulum:learn", 2)], timeout_s=3600)
        >>> [line for line in batch_script(job, "pendulum.toml", hosts=2).splitlines() if "#SBATCH" in line][:4]
        ['#SBATCH --job-name=pendulum', '#SBATCH --nodes=2', '#SBATCH --ntasks-per-node=1', '#SBATCH --cpus-per-task=2']
    """
    needed = host_resources(job, hosts)
    most_cpus = math.ceil(max(each.cpus for each in needed))
    most_gpus = max(each.gpus for each in needed)
    memory = [each.all_memory_gb for each in needed]
    asked: dict[str, str] = {
        "job-name": job.name,
        "nodes": str(hosts),
        "ntasks-per-node": "1",
        "cpus-per-task": str(most_cpus),
    }
    if most_gpus:
        asked["gpus-per-node"] = str(most_gpus)
    known = [each for each in memory if each is not None]
    if len(known) == hosts:
        asked["mem"] = f"{math.ceil(max(known) * 1024)}M"
    if job.timeout_s is not None:
        asked["time"] = str(math.ceil((job.timeout_s + job.stop_s + MARGIN_S) / 60))
    asked["output"] = f"{job.name}-%j.out"
    asked["chdir"] = str(Path(directory).resolve())
    for name, value in (options or {}).items():
        if not _NAME.fullmatch(name):
            raise ArgumentError(
                f"an option of sbatch is its long name without dashes, such as partition=gpu, found {name!r}"
            )
        if name in _OURS:
            raise ArgumentError(f"{name} of sbatch follows from the number of hosts: one launcher on each of {hosts}")
        asked[name] = value
    for line in setup:
        if not line.strip() or not line.isprintable():
            raise ArgumentError(f"a line of setup is one line of shell, found {line!r}")
    launch = [python, "-m", "geartrain", "launch", description, "--lines"]
    differ = len({(each.cpus, each.gpus, each.all_memory_gb) for each in needed}) > 1
    lines = [
        "#!/bin/bash",
        f"# {job.name} on {hosts} {'host' if hosts == 1 else 'hosts'}, by `geartrain generate slurm`. `sbatch FILE`",
        "# starts it, `sbatch FILE --fresh` with an empty store: further words are options of `geartrain launch`.",
        *(["# Hosts differ: each is asked for what the largest needs."] if differ else []),
        *(_directive(name, value) for name, value in asked.items()),
        "set -euo pipefail",
        *setup,
        "# Launchers and processes of all hosts prove to each other that they belong to this job.",
        "export GEARTRAIN_SECRET=\"${GEARTRAIN_SECRET:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')}\"",
        "# srun does not pass on the batch job's processors by itself. A launcher that fails ends the others with its",
        "# error: they have a minute before Slurm ends them.",
        'exec srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 --wait=60 \\',
        f'  {shlex.join(launch)} "$@"',
    ]
    return "\n".join(lines) + "\n"


def _directive(name: str, value: str) -> str:
    if not value.isprintable() or '"' in value or "\\" in value:
        raise ArgumentError(f"--{name} of sbatch is one line without quotes and backslashes, found {value!r}")
    if not value:
        return f"#SBATCH --{name}"
    return (
        f'#SBATCH --{name}="{value}"' if re.search(r"[^\w.,:;%/@+=*\[\]&|!()-]", value) else f"#SBATCH --{name}={value}"
    )


__all__ = ["MARGIN_S", "batch_script"]
