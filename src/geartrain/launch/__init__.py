"""A job's processes on one host, or on each of several: started, watched, shown, and ended together.

    import geartrain.launch as launch

    job = launch.Job(
        "pendulum",
        [
            launch.learners("pendulum:learn", 2),                                # ranks, with torchrun's variables
            launch.agents("pendulum:serve"),                                     # answers actors
            launch.actors("pendulum:environments", "pendulum:policy", 4),        # writes episodes into the store
        ],
    )

`geartrain launch pendulum.py` runs it, and `geartrain launch pendulum.toml` the same from a file of tables. Each
function of a learner or an agent gets a `Part`, which knows the job's store, weights and peers, and takes reports for
the table; a script that is run as a command finds it by `launch.part()`.

The job is over when its learners have returned; when any process dies more often than it may be started again; at
Ctrl-C; or at its time limit. However it ends, every process ends, rows that were being written come back, and after a
failure the store stays for the next start to adopt. docs/launch.md has all of it, several hosts included.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from geartrain.errors import JobInterruptedError, JobTimeoutError, PartDiedError
from geartrain.launch.actor_pool import ActorContext, ActorPool
from geartrain.launch.context import Part, part
from geartrain.launch.hosts import place_of
from geartrain.launch.job import Job, Role, actors, agents, learners, load
from geartrain.launch.process import Place
from geartrain.launch.summary import Summary


def run(
    job: Job,
    *,
    folder: str | os.PathLike[str] | None = None,
    place: Place | None = None,
    fresh: bool = False,
    live: bool | None = None,
    every_s: float = 10.0,
) -> Summary:
    """Runs a job to its end, on this host; on each of several hosts, when they all call it.

    Args:
        job: see `Job`, or `load`.
        folder: for a log of each process, launch.log and summary.json; by default runs/NAME-TIME.
        place: which of how many hosts this is; by default what torchrun or Slurm says.
        fresh: begin with an empty store, where a job that died has left one.
        live: a live table, or lines; by default a table on a terminal.
        every_s: a line so often.

    Raises:
        PartDiedError: a process died, and may not be started again; with the last lines it said.
        JobTimeoutError: the job took longer than its `timeout_s`.
        JobInterruptedError: Ctrl-C, or SIGTERM.
        PeerLostError: another host is gone.
        StoreExistsError: a job of this name runs already.
    """
    from geartrain.launch.launcher import Launcher  # parts do without it, and start faster

    place = place or place_of(os.environ)
    name = f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}" + ("" if place.hosts == 1 else f"-host{place.host}")
    logs = Path(folder) if folder is not None else Path("runs") / name
    logs.mkdir(parents=True, exist_ok=True)
    return Launcher(job, place, logs.resolve(), fresh=fresh, live=live, every_s=every_s).run()


__all__ = [
    "ActorContext",
    "ActorPool",
    "Job",
    "JobInterruptedError",
    "JobTimeoutError",
    "Part",
    "PartDiedError",
    "Place",
    "Role",
    "Summary",
    "actors",
    "agents",
    "learners",
    "load",
    "part",
    "run",
]
