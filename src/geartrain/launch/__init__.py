"""Launcher of distributed jobs: starts, supervises, restarts and ends the processes of a job, on one host or several.

    import geartrain.launch as launch

    job = launch.Job(
        "pendulum",
        [
            launch.learners("pendulum:learn", 2),                                # ranks, with torchrun's variables
            launch.agents("pendulum:serve"),                                     # serves actions
            launch.actors("pendulum:environments", "pendulum:policy", 4),        # writes episodes into the store
        ],
    )

`launch.workers` claim the rows of a task of a store.

`geartrain launch pendulum.py` runs this job. `geartrain launch pendulum.toml` runs a job from a TOML file.

The function of a learner or an agent gets a `Context` as its first argument. The context gives access to the job's
store, weights and RPC node, and reports metrics to the table. A script that runs as a command gets its context from
`launch.context()`.

A job ends when:

- its learners return
- a process dies more often than `max_restarts` allows
- you press Ctrl-C
- its time limit is over

In every case all processes end, and rows that were being written are freed. After a failure the store stays, and the
next start adopts it. docs/launch.md has the details, also for several hosts.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from geartrain.core.arguments import check_flag, check_path, check_real, check_text, check_type, check_whole
from geartrain.errors import JobInterruptedError, JobTimeoutError, ProcessDiedError
from geartrain.launch.actor_pool import ActorContext, ActorPool
from geartrain.launch.context import Context, context
from geartrain.launch.hosts import HostPosition, host_position
from geartrain.launch.job import Job, Role, actors, agents, learners, load, reducers, workers
from geartrain.launch.summary import Summary


def run(
    job: Job,
    *,
    folder: str | os.PathLike[str] | None = None,
    position: HostPosition | None = None,
    fresh: bool = False,
    live: bool | None = None,
    every_s: float = 10.0,
    metrics_port: int | None = None,
    metrics_host: str = "127.0.0.1",
) -> Summary:
    """Runs a job to its end on this host. On several hosts, call it on each.

    Args:
        job: a `Job`, or one that `load` returned.
        folder: folder for a log of each process, launch.log and summary.json; by default runs/NAME-TIME.
        position: position of this host among those of the job; by default from the variables of torchrun or Slurm.
        fresh: start with an empty store; by default rows that a failed job left are adopted.
        live: True shows a table, False prints lines; by default a table on a terminal.
        every_s: seconds between lines.
        metrics_port: port of this host that serves metrics for Prometheus; 0 is a free one.
        metrics_host: address to serve them on, without a password; loopback by default. "0.0.0.0" is all of the host's.

    Returns:
        How the job went.

    Raises:
        ArgumentError: an argument is out of range, or the job does not fit the hosts.
        ProcessDiedError: a process died and may not be restarted. The message has its last lines of output.
        JobTimeoutError: the job took longer than its `timeout_s`.
        JobInterruptedError: Ctrl-C, or SIGTERM.
        PeerLostError: the launcher of another host is lost.
        StoreExistsError: a job of this name runs already.

    Examples:
        >>> import contextlib, io, tempfile
        >>> from geartrain import launch
        >>> job = launch.Job("doc-hello", [launch.Role("greeter", ["echo", "hello"])])
        >>> with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        ...     summary = launch.run(job, folder=folder, live=False)  # a Summary
        >>> summary.outcome
        'finished'
    """
    from geartrain.launch.launcher import Launcher  # a job's processes do not need it, and start faster

    check_type("launch.run takes a Job, or what load() returns", job, Job)
    check_type("position is a HostPosition, or None", position, HostPosition | None)
    check_flag("fresh", fresh)
    if live is not None:
        check_flag("live", live)
    check_real("every_s", every_s, above=0)
    if metrics_port is not None:
        check_whole("metrics_port", metrics_port, 0, 65535)
    check_text("metrics_host", metrics_host)
    position = position or host_position(os.environ)
    name = f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}" + ("" if position.hosts == 1 else f"-host{position.host}")
    logs = check_path("folder", folder) if folder is not None else Path("runs") / name
    return Launcher(
        job,
        position,
        logs.resolve(),
        fresh=fresh,
        live=live,
        every_s=every_s,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
    ).run()


__all__ = [
    "ActorContext",
    "ActorPool",
    "Context",
    "HostPosition",
    "Job",
    "JobInterruptedError",
    "JobTimeoutError",
    "ProcessDiedError",
    "Role",
    "Summary",
    "actors",
    "agents",
    "context",
    "host_position",
    "learners",
    "load",
    "reducers",
    "run",
    "workers",
]
