"""Environment variables of a job's processes: all get the job's secret, and ranks also get torchrun's variables."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from geartrain.launch.job_process import RANK_VARIABLES, JobProcess


def environment_of(process: JobProcess, secret: str) -> dict[str, str]:
    """This process's environment without a rank's variables, plus the variables that every process of a job has."""
    inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    inherited |= {"PYTHONUNBUFFERED": "1", "GEARTRAIN_SECRET": secret}
    if process.role.threads is not None:
        inherited.setdefault("OMP_NUM_THREADS", str(process.role.threads))
    return inherited


def rank_environment(
    process: JobProcess,
    secret: str,
    *,
    job: str,
    master: tuple[str, int],
    group_rank: int,
    group_size: int,
    agent_store: bool,
    reducers: Sequence[str] | None,
) -> dict[str, str]:
    """The environment of a learner's rank.

    Args:
        process: the rank, as it starts this time.
        secret: of the job.
        job: its name.
        master: address and port of the ranks' rendezvous.
        group_rank: this host's place among those that have ranks.
        group_size: how many hosts have ranks.
        agent_store: torchrun has the rendezvous's store.
        reducers: their addresses; None in a job without any.
    """
    made = environment_of(process, secret)
    if reducers is not None:
        made["GEARTRAIN_REDUCERS"] = ",".join(reducers)
    role = process.role
    ours = {
        "RANK": process.number,
        "WORLD_SIZE": process.processes,
        "LOCAL_RANK": process.local,
        "LOCAL_WORLD_SIZE": role.processes,
        "GROUP_RANK": group_rank,
        "GROUP_WORLD_SIZE": group_size,
        "ROLE_RANK": process.number,
        "ROLE_WORLD_SIZE": process.processes,
        "ROLE_NAME": role.name,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": process.restart,
        "TORCHELASTIC_MAX_RESTARTS": role.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": agent_store,
    }
    return made | {name: str(value) for name, value in ours.items()}


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


__all__ = ["environment_of", "free_port", "rank_environment"]
