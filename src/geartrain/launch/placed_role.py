"""Placement of a job's roles: which processes run on which host, and how they are numbered.

    host 0   learner-0 learner-1   store-0     the learners' stores are here
    host 1   learner-2 learner-3   store-1
    host 2   actor-0 actor-1                   no store: actor-0 writes to store-0, actor-1 to store-1
    host 3   actor-2 actor-3   reducer-0

A host without learners has no store of the job. If a host without learners runs actors or other processes, each host
with learners gets one more process, which serves its store (store_role.py). `Job.serve_stores` requests the same. This
process does not depend on a learner, so it keeps serving while learners restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from geartrain.errors import ArgumentError
from geartrain.launch.context import STORES, store_number
from geartrain.launch.job import Job, Role

#: Target of the processes of the role "store", and how often the processes of a host may die.
SERVE_STORE, STORE_RESTARTS = "geartrain.launch.store_role:serve", 10
#: Its heartbeat timeout; it reports ten times a second.
_SILENT_S = 60.0


@dataclass(frozen=True)
class PlacedRole:
    """A role and the hosts that it runs on.

    Attributes:
        role: with the number of its processes on each of the hosts.
        hosts: in order.
    """

    role: Role
    hosts: tuple[int, ...]

    @property
    def processes(self) -> int:
        """How many there are on all hosts."""
        return len(self.hosts) * self.role.processes

    def number(self, host: int, local: int) -> int:
        """Number of the process `local` of a host among all."""
        return self.hosts.index(host) * self.role.processes + local


def place(job: Job, hosts: int) -> list[PlacedRole]:
    """The roles of a job on this many hosts, in their order. Store servers come last, if there are any.

    Raises:
        ArgumentError: a role is to run on a host that is not there; a host has nothing to run; learners of several
            hosts are to be restarted; a role has the name of the store servers; a task has processes for the stores of
            some hosts only.
    """
    placed = [PlacedRole(role, job.hosts_of(role, hosts)) for role in job.roles]
    idle = sorted(set(range(hosts)).difference(*(each.hosts for each in placed)))
    if idle:
        raise ArgumentError(
            f"job {job.name!r}: no role runs on host {', '.join(map(str, idle))} of {hosts}: use fewer "
            "hosts, or name them in a role's hosts"
        )
    learner = next((each for each in placed if each.role.kind == "learner"), None)
    if learner is None:
        return placed
    if len(learner.hosts) > 1 and learner.role.max_restarts:
        raise ArgumentError(
            f"role {learner.role.name!r}: learners can be restarted on one host only (max_restarts), but "
            f"these run on {len(learner.hosts)}"
        )
    _check_tasks(job, placed, learner.hosts)
    users = [each for each in placed if each.role.kind in ("actor", "worker", "other")]
    away = [each for each in users if set(each.hosts) - set(learner.hosts)]
    if away or job.serve_stores:
        if any(role.name == STORES for role in job.roles):
            raise ArgumentError(
                f"job {job.name!r}: {STORES!r} is reserved for the role that serves the learners' stores: "
                "choose another name"
            )
        servers = Role(STORES, SERVE_STORE, kind="agent", max_restarts=STORE_RESTARTS, silent_s=_SILENT_S)
        placed.append(PlacedRole(servers, learner.hosts))
    return placed


def _check_tasks(job: Job, placed: Sequence[PlacedRole], served: Sequence[int]) -> None:
    """Refuses tasks that some hosts' stores have no process for: their rows would never be done."""
    tasks: dict[str, list[PlacedRole]] = {}
    for each in placed:
        if each.role.kind == "worker" and each.role.args["store"] in ("", job.name):
            tasks.setdefault(each.role.args["task"], []).append(each)
    for task, workers in tasks.items():
        reached = {
            host if host in served else served[store_number(served, each.hosts, each.role.processes, host, local)]
            for each in workers
            for host in each.hosts
            for local in range(each.role.processes)
        }
        missing = sorted(set(served) - reached)
        if missing:
            names = ", ".join(repr(each.role.name) for each in workers)
            raise ArgumentError(
                f"job {job.name!r}: no process does the task {task!r} for the store of host "
                f"{', '.join(map(str, missing))}: raise processes or hosts of role {names}"
            )


__all__ = ["SERVE_STORE", "PlacedRole", "place"]
