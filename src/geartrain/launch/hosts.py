"""Which of how many hosts this is: what torchrun or Slurm says in the environment, or what was asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping

from geartrain.errors import ArgumentError
from geartrain.launch.process import Place

#: Where ranks meet when nobody says; with Slurm a number from the job's id is added, for jobs that share a host.
PORT = 29_500


def place_of(
    environment: Mapping[str, str],
    *,
    hosts: int | None = None,
    host: int | None = None,
    master: str | None = None,
    link_port: int | None = None,
) -> Place:
    """This launcher's place.

    Args:
        environment: with torchrun's variables (one launcher a host: `--nproc-per-node 1`), or Slurm's (one task a
            host), or neither: one host.
        hosts, host: how many, and which this is, instead.
        master: "host:port" of host 0, where the ranks meet; needed with `hosts`.
        link_port: where the launchers meet on host 0; the ranks' port and one by default.

    Raises:
        ArgumentError: what is said does not go together.
    """
    if hosts is not None or host is not None or master is not None:
        if hosts is None or host is None or (hosts > 1 and master is None):
            raise ArgumentError("say all of hosts, host (from 0) and master (host:port of host 0)")
        address, port = _split(master) if master else ("127.0.0.1", 0)
        return _checked(Place(host, hosts, address, port, link_port or port + 1))
    if "TORCHELASTIC_RUN_ID" in environment and "RANK" in environment:
        if environment.get("LOCAL_WORLD_SIZE", "1") != "1":
            raise ArgumentError(
                f"torchrun starts {environment['LOCAL_WORLD_SIZE']} launchers on a host: one is wanted, which starts "
                "the ranks (torchrun --nproc-per-node 1)"
            )
        port = int(environment["MASTER_PORT"])
        return _checked(
            Place(
                int(environment["RANK"]),
                int(environment["WORLD_SIZE"]),
                environment["MASTER_ADDR"],
                port if environment["WORLD_SIZE"] != "1" else 0,
                link_port or port + 1,
                environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and environment["WORLD_SIZE"] != "1",
            )
        )
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1")))
    if tasks > 1 and "SLURM_PROCID" in environment:
        nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
        if environment.get("SLURM_STEP_NUM_NODES", str(tasks)) != str(tasks):
            raise ArgumentError(
                f"Slurm starts {tasks} launchers on {environment['SLURM_STEP_NUM_NODES']} hosts: one a host is wanted "
                "(srun --ntasks-per-node 1)"
            )
        port = int(environment.get("MASTER_PORT", PORT + int(environment.get("SLURM_JOB_ID", "0")) % 1000 * 2))
        address = environment.get("MASTER_ADDR") or first_host(nodes)
        return _checked(Place(int(environment["SLURM_PROCID"]), tasks, address, port, link_port or port + 1))
    return Place()


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


def _split(master: str) -> tuple[str, int]:
    address, found, port = master.rpartition(":")
    if not found or not address or not port.isdigit():
        raise ArgumentError(f"master is host:port, found {master!r}")
    return address, int(port)


def _checked(place: Place) -> Place:
    if place.hosts < 1 or not 0 <= place.host < place.hosts:
        raise ArgumentError(f"hosts are numbered from 0, found host {place.host} of {place.hosts}")
    return place


__all__ = ["place_of"]
