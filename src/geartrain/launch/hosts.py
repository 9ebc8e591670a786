"""Host discovery: position of this launcher among the hosts of a job, from torchrun, Slurm or arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from geartrain.errors import ArgumentError
from geartrain.transport.rendezvous import address_towards

#: The ranks' rendezvous port by default; with Slurm a number from the job's id is added, for jobs that share a host.
PORT = 29_500


@dataclass(frozen=True)
class HostPosition:
    """Position of a launcher among the hosts of a job, and the addresses of its rendezvous.

    Attributes:
        host, hosts: which of how many.
        master_addr, master_port: rendezvous of the ranks; port 0 is a free one, on one host.
        coordinator_port: of the launchers' coordinator on host 0; master_port + 1 by default.
        agent_store: the ranks use torchrun's store, which listens at master_port already.
    """

    host: int = 0
    hosts: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    coordinator_port: int = 0
    agent_store: bool = False


def host_position(
    environment: Mapping[str, str],
    *,
    hosts: int | None = None,
    host: int | None = None,
    master: str | None = None,
    coordinator_port: int | None = None,
) -> HostPosition:
    """This launcher's position.

    Args:
        environment: with torchrun's variables (one launcher a host: `--nproc-per-node 1`), or Slurm's (one task a
            host), or neither: one host.
        hosts, host: how many, and which this is, instead.
        master: "host:port" of host 0 for the ranks' rendezvous; needed with `hosts`.
        coordinator_port: of the launchers' coordinator on host 0; the ranks' port and one by default.

    Raises:
        ArgumentError: the arguments or variables contradict each other.
    """
    if hosts is not None or host is not None or master is not None:
        if hosts is None or host is None or (hosts > 1 and master is None):
            raise ArgumentError("hosts, host (from 0) and master (host:port of host 0) go together: give all three")
        address, port = _split(master) if master is not None else ("127.0.0.1", 0)
        return _checked(HostPosition(host, hosts, address, port, coordinator_port or port + 1))
    if "TORCHELASTIC_RUN_ID" in environment and "RANK" in environment:
        if environment.get("LOCAL_WORLD_SIZE", "1") != "1":
            raise ArgumentError(
                f"torchrun starts {environment['LOCAL_WORLD_SIZE']} launchers on a host: one is wanted, which starts "
                "the ranks (torchrun --nproc-per-node 1)"
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
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", _number(environment, "SLURM_NTASKS", 1))
    if tasks > 1 and "SLURM_PROCID" in environment:
        nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
        if environment.get("SLURM_STEP_NUM_NODES", str(tasks)) != str(tasks):
            raise ArgumentError(
                f"Slurm starts {tasks} launchers on {environment['SLURM_STEP_NUM_NODES']} hosts: one a host is wanted "
                "(srun --ntasks-per-node 1)"
            )
        port = _number(environment, "MASTER_PORT", PORT + _number(environment, "SLURM_JOB_ID", 0) % 1000 * 2)
        address = environment.get("MASTER_ADDR") or first_host(nodes)
        return _checked(
            HostPosition(_number(environment, "SLURM_PROCID"), tasks, address, port, coordinator_port or port + 1)
        )
    return HostPosition()


def first_host(nodes: str) -> str:
    """The first of Slurm's list of hosts.

    Example:
        >>> first_host("gpu[007-012,3],login1"), first_host("node1")
        ('gpu007', 'node1')
    """
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    if found is None:
        raise ArgumentError(f"Slurm's list of hosts names none: {nodes!r}; set MASTER_ADDR")
    return found[1] + (found[2] or "")


def own_address(master: str) -> str:
    """The address by which hosts that reach `master` reach this one: of the interface that leads there.

    Raises:
        ArgumentError: nothing leads there.
    """
    try:
        return address_towards(master)
    except OSError as error:
        raise ArgumentError(f"host 0 cannot be reached at {master!r}: {error}") from None


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


__all__ = ["HostPosition", "first_host", "host_position", "own_address"]
