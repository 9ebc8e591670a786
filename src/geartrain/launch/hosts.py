"""Finds this launcher's position among the hosts of a job, from torchrun, Slurm, Kubernetes or arguments."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from geartrain.errors import ArgumentError
from geartrain.transport.rendezvous import address_towards

#: The ranks' rendezvous port by default; with Slurm a number from the job's id is added, for jobs that share a host.
PORT = 29_500
#: Longest wait for a pod's name to resolve: Kubernetes knows only the names of pods that have started.
POD_NAME_S = 300.0
#: Variable that `geartrain generate kubernetes` sets in pods: "first/hosts" or "first/hosts@master", of the first host
#: of a group of pods, the job's number of hosts, and host:port of host 0. Kubernetes adds JOB_COMPLETION_INDEX, a pod's
#: number in its group.
POD = "GEARTRAIN_POD"


@dataclass(frozen=True)
class HostPosition:
    """A launcher's position among the hosts of a job, and the addresses of the rendezvous.

    Attributes:
        host: number of this host.
        hosts: number of hosts.
        master_addr: host of the ranks' rendezvous.
        master_port: port of the ranks' rendezvous; 0 is a free one, on one host.
        coordinator_port: port of the launchers' coordinator on host 0; master_port + 1 by default.
        agent_store: the ranks use torchrun's store, which listens at master_port already.
        name_s: longest wait until the name of host 0 can be resolved, in seconds.
    """

    host: int = 0
    hosts: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    coordinator_port: int = 0
    agent_store: bool = False
    name_s: float = 0.0


def host_position(
    environment: Mapping[str, str],
    *,
    hosts: int | None = None,
    host: int | None = None,
    master: str | None = None,
    coordinator_port: int | None = None,
) -> HostPosition:
    """This launcher's position among the hosts of a job, from its environment.

    Args:
        environment: variables of torchrun (one launcher a host: `--nproc-per-node 1`), of Slurm (one task a host), or
            of a pod (`geartrain generate kubernetes`); without any of these, one host.
        hosts: number of hosts, instead of the environment's.
        host: number of this host, instead of the environment's.
        master: "host:port" of host 0 for the ranks' rendezvous; needed with `hosts`.
        coordinator_port: port of the launchers' coordinator on host 0; by default the one after the ranks' port.

    Raises:
        ArgumentError: arguments or variables contradict each other, or a Slurm job of several hosts was started without
            srun.

    Examples:
        >>> from geartrain import launch
        >>> launch.host_position({}, hosts=2, host=1, master="10.0.0.1:29500").host  # of a HostPosition
        1
    """
    if hosts is not None or host is not None or master is not None:
        if hosts is None or host is None or (hosts > 1 and master is None):
            raise ArgumentError("hosts, host (from 0) and master (host:port of host 0) go together: give all three")
        address, port = _split(master) if master is not None else ("127.0.0.1", 0)
        return _checked(HostPosition(host, hosts, address, port, coordinator_port or port + 1))
    if "TORCHELASTIC_RUN_ID" in environment and "RANK" in environment:
        if environment.get("LOCAL_WORLD_SIZE", "1") != "1":
            raise ArgumentError(
                f"torchrun starts {environment['LOCAL_WORLD_SIZE']} launchers on a host, but one is needed, "
                "which starts the ranks: use torchrun --nproc-per-node 1"
            )
        port = _number(environment, "MASTER_PORT")
        return _checked(
            HostPosition(
                _number(environment, "RANK"),
                _number(environment, "WORLD_SIZE"),
                environment["MASTER_ADDR"],
                port if environment["WORLD_SIZE"] != "1" else 0,
                coordinator_port or port + 1,
                environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and environment["WORLD_SIZE"] != "1",
            )
        )
    if POD in environment and "JOB_COMPLETION_INDEX" in environment:
        return _of_pod(environment, coordinator_port)
    return _of_slurm(environment, coordinator_port)


def _of_pod(environment: Mapping[str, str], coordinator_port: int | None) -> HostPosition:
    given = environment[POD]
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})(?:@(.+))?", given, re.ASCII)
    if found is None:
        raise ArgumentError(f"{POD} is first/hosts@host:port, found {given!r}")
    host, hosts = int(found[1]) + _number(environment, "JOB_COMPLETION_INDEX"), int(found[2])
    if hosts == 1:
        return _checked(HostPosition(host, hosts))
    address, port = _split(found[3] or "")
    return _checked(HostPosition(host, hosts, address, port, coordinator_port or port + 1, name_s=POD_NAME_S))


def _of_slurm(environment: Mapping[str, str], coordinator_port: int | None) -> HostPosition:
    if "SLURM_STEP_NODELIST" not in environment and "SLURM_STEP_ID" not in environment:
        nodes = _number(environment, "SLURM_JOB_NUM_NODES", 1)
        if nodes > 1:  # a batch script, or the shell of salloc: nobody has started launchers on the other hosts
            raise ArgumentError(
                f"Slurm gave this job {nodes} hosts, and this is a shell on one of them: start a launcher on "
                "each with srun --ntasks-per-node 1 geartrain launch ..., or use only this one with --hosts "
                "1 --host 0"
            )
        return HostPosition()
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", _number(environment, "SLURM_NTASKS", 1))
    if tasks == 1:
        return HostPosition()
    if environment.get("SLURM_STEP_NUM_NODES", str(tasks)) != str(tasks):
        raise ArgumentError(
            f"Slurm starts {tasks} launchers on {environment['SLURM_STEP_NUM_NODES']} hosts, but one a "
            "host is needed: use srun --ntasks-per-node 1"
        )
    nodes_of_step = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
    port = _number(environment, "MASTER_PORT", PORT + _number(environment, "SLURM_JOB_ID", 0) % 1000 * 2)
    address = environment.get("MASTER_ADDR") or first_host(nodes_of_step)
    return _checked(
        HostPosition(_number(environment, "SLURM_PROCID"), tasks, address, port, coordinator_port or port + 1)
    )


def first_host(nodes: str) -> str:
    """The first of Slurm's list of hosts.

    Example:
        >>> first_host("gpu[007-012,3],login1"), first_host("node1"), first_host("rack[2-3]node[01,04]-ib")
        ('gpu007', 'node1', 'rack2node01-ib')
    """
    found = re.match(r"(?:[^\[\],]|\[[^\[\]]*\])+", nodes)
    name = "" if found is None else re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", found[0])
    if not name:
        raise ArgumentError(f"Slurm's list of hosts names none: {nodes!r}; set MASTER_ADDR")
    return name


def own_address(master: str, name_s: float = 0.0) -> str:
    """The address by which hosts that reach `master` reach this one: of the interface that leads there.

    Args:
        master: host 0, by name or address.
        name_s: how long to wait for its name to be known.

    Raises:
        ArgumentError: nothing leads there.
    """
    until_s = time.monotonic() + name_s
    while True:
        try:
            return address_towards(master)
        except OSError as error:
            if not isinstance(error, socket.gaierror) or time.monotonic() >= until_s:
                waited = f" within {name_s:g} s" if name_s else ""
                raise ArgumentError(f"host 0 cannot be reached at {master!r}{waited}: {error}") from None
        time.sleep(0.5)


def _split(master: str) -> tuple[str, int]:
    address, found, port = master.rpartition(":")
    if not found or not address.strip() or not (port.isascii() and port.isdigit()):
        raise ArgumentError(f"master is host:port, found {master!r}")
    return address, int(port)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable that is a whole number."""
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdigit()):
        raise ArgumentError(f"{name} is a whole number, found {'nothing' if text is None else repr(text)}")
    return int(text)


def _checked(position: HostPosition) -> HostPosition:
    if position.hosts < 1 or not 0 <= position.host < position.hosts:
        raise ArgumentError(f"hosts are numbered from 0, found host {position.host} of {position.hosts}")
    if position.hosts > 1 and not (0 < position.master_port < 65536 and 0 < position.coordinator_port < 65536):
        raise ArgumentError(
            f"ports are from 1 to 65535, found {position.master_port} for the ranks and {position.coordinator_port} "
            "for the launchers"
        )
    return position


__all__ = [
    "POD",
    "PORT",
    "HostPosition",
    "first_host",
    "host_position",
    "own_address",
]
