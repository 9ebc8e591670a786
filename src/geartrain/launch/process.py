"""Child processes: starts and signals them, kills them with all processes that they started, and reaps them.

Each child runs in a session of its own. A terminal's Ctrl-C therefore reaches only its parent, and the child can be
killed with everything it has started. Each child is watched through a pidfd, which still identifies it after its pid
was reused. One thread starts and reaps the children of a `Supervisor` (supervisor.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any


def python_command(module: str) -> list[str]:
    """The command that runs a module with this interpreter and its options (-O, -W, -X)."""
    return [sys.executable, *subprocess._args_from_interpreter_flags(), "-m", module]  # type: ignore[attr-defined]


class ChildProcess:
    """One child process. The object stays the same when the child is restarted.

    Attributes:
        name: for messages.
        restart: how often it was started again; counted by its supervisor.
        returncode: exit status as in `subprocess`: minus the signal's number for a signal. None while it runs, and when
            something else in this process has taken the status (`reaped_elsewhere`).
        killed_because: why this process killed it; empty otherwise.
        started_s: wall clock of the last start.
        pidfd: readable once the process has ended; -1 while there is none.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.restart = 0
        self.returncode: int | None = None
        self.reaped_elsewhere = False
        self.killed_because = ""
        self.started_s = 0.0
        self.pidfd = -1
        self._pid: int | None = None

    @property
    def running(self) -> bool:
        """Whether it was started, and was not found to have ended."""
        return self._pid is not None

    @property
    def pid(self) -> int | None:
        """Process id; None if no process runs."""
        return self._pid

    def spawn(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        directory: str | Path | None = None,
        stdin: IO[Any] | int = subprocess.DEVNULL,
        output: IO[Any] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Starts the process, once more if it has ended. stdout and stderr go to `output`, or where this process's go.

        Raises:
            OSError: the command cannot be run.
        """
        started = subprocess.Popen(
            list(command),
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            cwd=directory,
            env=environment,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        self.pidfd = os.pidfd_open(started.pid)
        self._pid = started.pid
        started.returncode = 0  # `ended` reaps it, and Popen must not
        self.returncode, self.reaped_elsewhere, self.killed_because = None, False, ""
        self.started_s = time.time()

    def ended(self) -> bool:
        """Whether the process has ended. If so, kills the rest of its session, and reaps the process."""
        if self._pid is None:
            return True
        try:
            if os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            self._kill_session()  # before it is reaped, while its number cannot be another's
            _, status = os.waitpid(self._pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        except ChildProcessError:  # SIGCHLD is ignored here, or another thread waits for any child
            self.reaped_elsewhere = True
        os.close(self.pidfd)
        self.pidfd, self._pid = -1, None
        return True

    def terminate(self) -> None:
        """SIGTERM."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)

    def kill(self, because: str = "") -> None:
        """SIGKILL, for all of its session."""
        if self.running:
            self.killed_because = self.killed_because or because
            self._kill_session()

    def _kill_session(self) -> None:
        assert self._pid is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)

    def exit_reason(self) -> str:
        """How it ended, in words."""
        if self.killed_because:
            return self.killed_because
        if self.running or (self.returncode is None and not self.reaped_elsewhere):
            return "runs"
        if self.returncode is None:
            return "ended, with an exit code that something else in its parent has taken"
        if self.returncode < 0:
            return f"was killed by {signal.Signals(-self.returncode).name}"
        return "ended without being told to" if self.returncode == 0 else f"failed with exit code {self.returncode}"


__all__ = ["ChildProcess", "python_command"]
