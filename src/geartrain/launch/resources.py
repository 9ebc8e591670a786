"""Computes the resources of a job's hosts for schedulers: processors, accelerators, memory, shared memory.

A role states what each of its processes needs (`Role.cpus`, `gpus`, `memory_gb`). A job states the shared memory that
its stores and weights need on a host (`Job.shared_memory_gb`). A host needs the sum over everything that runs on it.

`geartrain launch` itself allocates nothing. Slurm (slurm.py), Kubernetes (kubernetes.py) and Ray (ray.py) do.
"""

from __future__ import annotations

from dataclasses import dataclass

from geartrain.core.arguments import check_whole
from geartrain.launch.job import Job, check_shared_memory
from geartrain.launch.placed_role import place
from geartrain.launch.role_hosts import resolve_hosts


@dataclass(frozen=True)
class HostResources:
    """The resources that one host of a job needs.

    Attributes:
        roles: that run there, with how many processes each.
        cpus: of all its processes: `Role.cpus`, or `Role.threads`, or 1 each.
        gpus: of all its processes.
        memory_gb: of all its processes, without shared memory; None when a role does not say what it needs.
        shared_memory_gb: of the stores, weights and messages there; None when the job does not say.
    """

    roles: tuple[tuple[str, int], ...]
    cpus: float
    gpus: int
    memory_gb: float | None
    shared_memory_gb: float | None

    @property
    def all_memory_gb(self) -> float | None:
        """Memory with shared memory, which control groups count as well; None when either is not known."""
        if self.memory_gb is None or self.shared_memory_gb is None:
            return None
        return self.memory_gb + self.shared_memory_gb


def host_resources(job: Job, hosts: int) -> list[HostResources]:
    """The resources that each host of a job needs, in order of the hosts.

    Raises:
        ArgumentError: the job cannot be placed on so many hosts.
    """
    check_whole("the number of a job's hosts", hosts, 1)
    placed = place(job, hosts)
    shared = _shared_memory(job, hosts)
    found = []
    for host in range(hosts):
        here = [each.role for each in placed if host in each.hosts]
        # The server of a store has no tensors of its own; it is the launcher's, and no description says anything of it.
        said = [role.memory_gb for role in here if role in job.roles]
        memory = [role.memory_gb * role.processes for role in here if role.memory_gb is not None]
        found.append(
            HostResources(
                roles=tuple((role.name, role.processes) for role in here),
                cpus=sum((role.cpus or role.threads or 1) * role.processes for role in here),
                gpus=sum(role.gpus * role.processes for role in here),
                memory_gb=None if None in said else sum(memory),
                shared_memory_gb=shared[host],
            )
        )
    return found


def _shared_memory(job: Job, hosts: int) -> list[float | None]:
    classes = {name: str(terms) for name, terms in job.hosts.items()}
    found: list[float | None] = [None] * hosts
    for terms, value in check_shared_memory(f"job {job.name!r}", job.shared_memory_gb).items():
        for host in resolve_hosts(f"job {job.name!r}: shared_memory_gb", terms, classes, hosts):
            found[host] = (found[host] or 0.0) + value
    return found


__all__ = ["HostResources", "host_resources"]
