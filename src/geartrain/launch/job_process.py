"""A process of a job: its specification, its log, and how its launcher starts it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from geartrain.launch.context import SPEC, ProcessSpec
from geartrain.launch.hosts import HostPosition
from geartrain.launch.job import Job
from geartrain.launch.placed_role import PlacedRole
from geartrain.launch.process import ChildProcess, python_command

#: An error shows this many lines of the process's output, and at most this many bytes.
LAST_LINES = 12
_LAST_BYTES = 4096
#: Variables that torchrun or another launcher may have left in the environment. Only learners get values of their own.
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
)


class JobProcess(ChildProcess):
    """Process `number` of a role. The object stays the same when the process is restarted.

    Args:
        job, placed: what it belongs to.
        local: its number on this host.
        slot: of the job's counters.
        position: of this host.
        folder: of the logs.
    """

    def __init__(
        self, job: Job, placed: PlacedRole, local: int, slot: int, position: HostPosition, folder: Path
    ) -> None:
        self.job, self.placed, self.local, self.slot, self.position = job, placed, local, slot, position
        self.role = placed.role
        self.number = placed.number(position.host, local)
        self.processes = placed.processes
        super().__init__(f"{self.role.name}-{self.number}")
        self.log = folder / f"{self.name}.log"
        self.folder = folder
        self._log_from = 0

    def start(
        self,
        roles: dict[str, list[object]],
        counters: str,
        launcher: str,
        environment: Mapping[str, str],
        address: str = "127.0.0.1",
    ) -> None:
        """Starts it: once more, if it has ended.

        Args:
            roles: of the job: name -> [kind, processes on a host, hosts].
            counters: name of the job's counters.
            launcher: address of the coordinator's node.
            environment: of the process, but for what its role and this class add.
            address: of this host, for others.
        """
        with self.log.open("ab") as log:
            if self.restart:
                log.write(f"--- {self.name} is started again ({self.restart}) ---\n".encode())
                log.flush()
            self._log_from = log.tell()
            spec = ProcessSpec(
                job=self.job.name,
                role=self.role.name,
                kind=self.role.kind,
                number=self.number,
                processes=self.processes,
                local=self.local,
                host=self.position.host,
                hosts=self.position.hosts,
                restart=self.restart,
                run=self.role.run,
                args=dict(self.role.args),
                roles=roles,
                counters=counters,
                slot=self.slot,
                folder=str(self.folder),
                launcher=launcher,
                address=address,
                trust=self.job.trust,
                parent=os.getpid(),
                path=[str(Path(entry or ".").resolve()) for entry in sys.path],
            )
            self.spawn(
                python_command("geartrain.launch.entry"),
                environment={**environment, **self.role.env, SPEC: json.dumps(dataclasses.asdict(spec))},
                directory=self.job.directory,
                output=log,
            )

    def last_lines(self) -> str:
        """The end of its log since it was last started."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_from, size - _LAST_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
            return "\n".join(lines[-LAST_LINES:])
        return ""


__all__ = ["LAST_LINES", "RANK_VARIABLES", "JobProcess"]
