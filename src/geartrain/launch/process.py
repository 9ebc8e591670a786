"""One process of a job, as its launcher sees it: started, signalled, ended, and what it said last."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from geartrain.launch.context import ORDER, Order
from geartrain.launch.job import Job, Role

#: Lines of its output that an error shows, of so many bytes at most.
LAST_LINES = 12
_LAST_BYTES = 4096
#: What torchrun or another launcher may have left in the environment, and only ranks are given.
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


@dataclasses.dataclass(frozen=True)
class Place:
    """Where this launcher stands among the hosts of a job, and where the ranks meet.

    Attributes:
        host, hosts: which of how many.
        master_addr, master_port: for the ranks; port 0 is a free one, on one host.
        link_port: on host 0, where the launchers meet; master_port + 1 by default.
        agent_store: the ranks meet in torchrun's store, which is at that port already.
    """

    host: int = 0
    hosts: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    link_port: int = 0
    agent_store: bool = False


class Process:
    """The process NUMBER of a role; the same object when it is started again."""

    def __init__(self, job: Job, role: Role, local: int, slot: int, place: Place, folder: Path) -> None:
        self.job, self.role, self.local, self.slot, self.place = job, role, local, slot, place
        hosts = place.hosts if role.hosts == "all" else 1
        self.number = (place.host if role.hosts == "all" else 0) * role.processes + local
        self.processes = hosts * role.processes
        self.name = f"{role.name}-{self.number}"
        self.log = folder / f"{self.name}.log"
        self.folder = folder
        self.restart = 0
        self.returncode: int | None = None
        self.killed_because = ""  # when it was the launcher
        self.started_s = 0.0  # wall clock
        self.pidfd = -1
        self._popen: subprocess.Popen[bytes] | None = None
        self._log_from = 0

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._popen is not None and self.returncode is None

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return self._popen.pid if self._popen is not None and self.running else None

    def start(self, order: Mapping[str, object], environment: Mapping[str, str]) -> None:
        """Starts it: once more, if it has ended."""
        with self.log.open("ab") as log:
            if self.restart:
                log.write(f"--- {self.name} is started again ({self.restart}) ---\n".encode())
                log.flush()
            self._log_from = log.tell()
            told = Order(
                job=self.job.name,
                role=self.role.name,
                kind=self.role.kind,
                number=self.number,
                processes=self.processes,
                local=self.local,
                host=self.place.host,
                hosts=self.place.hosts,
                restart=self.restart,
                run=self.role.run,
                args=dict(self.role.args),
                slot=self.slot,
                folder=str(self.folder),
                parent=os.getpid(),
                path=[str(Path(entry or ".").resolve()) for entry in sys.path],
                **order,  # type: ignore[arg-type]
            )
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "geartrain.launch.entry"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.job.directory,
                env={**environment, **self.role.env, ORDER: json.dumps(dataclasses.asdict(told))},
                start_new_session=True,  # the terminal's Ctrl-C is the launcher's, and what it starts ends with it
            )
        self.returncode, self.killed_because, self.started_s = None, "", time.time()
        self.pidfd = os.pidfd_open(self._popen.pid)

    def ended(self) -> bool:
        """Whether it has ended by now; then what it started in its session is killed as well."""
        if self._popen is None or self.returncode is not None:
            return True
        pid = self._popen.pid
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self._kill_session()  # while its number cannot be another's
        self.returncode = self._popen.wait()
        os.close(self.pidfd)
        self.pidfd = -1
        return True

    def ask_to_end(self) -> None:
        """SIGTERM."""
        if self._popen is not None and self.running:
            self._popen.terminate()

    def kill(self, because: str = "") -> None:
        """SIGKILL, with all that it started in its session."""
        if self.running:
            self.killed_because = self.killed_because or because
            self._kill_session()

    def _kill_session(self) -> None:
        assert self._popen is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def why(self) -> str:
        """How it ended, in words."""
        code = self.returncode
        if self.killed_because:
            return self.killed_because
        if code is None:
            return "runs"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return "ended without being told to" if code == 0 else f"failed with exit code {code}"

    def last_lines(self) -> str:
        """The end of what it has said since it was last started."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_from, size - _LAST_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
            return "\n".join(lines[-LAST_LINES:])
        return ""


__all__ = ["LAST_LINES", "RANK_VARIABLES", "Place", "Process"]
