"""A job on emulated hosts: `geartrain launch` on each, what it said, its summary and its processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
from deadlines import patience
from numpy.typing import NDArray

from geartrain.core.counters import SharedCounters
from geartrain.tools.testing.cluster import Hosts

DIRECTORY = Path(__file__).parent  # which has the programs of jobs
PORT = 29500


class HostsJob:
    """The launchers of one description on `n` hosts, as forks whose processes are forks, or as `interpreters`.

    The text's `{tests}` and `{limit_s}` are filled in, and what is `given`.
    """

    def __init__(
        self, n: int, into: Path, text: str, *, torchrun: bool = False, interpreters: bool = False, **given: object
    ) -> None:
        self.folder = into
        path = into / "job.toml"
        path.write_text(text.format(tests=DIRECTORY, limit_s=patience(100), **given))
        (self._name,) = re.findall(r'^name = "(.+)"', text, re.MULTILINE)
        self._generations = 0 if interpreters else 2 if torchrun else 1
        self.hosts = Hosts(n)
        self.launchers: list[subprocess.Popen[str]] = []
        try:
            for i in range(n):
                words = ["launch", str(path), "--folder", str(into / f"logs{i}"), "--every-s", "1"]
                if torchrun:
                    run = [f"--nnodes={n}", "--nproc-per-node=1", "--master-addr=host0", f"--master-port={PORT}"]
                    words = ["torch.distributed.run", *run, f"--node-rank={i}", "-m", "geartrain", *words]
                else:
                    words = ["geartrain", *words, "--hosts", str(n), "--host", str(i), "--master", f"host0:{PORT}"]
                self.launchers.append(self._start(i, [sys.executable, "-m", *words]))
        except BaseException:
            self.close()
            raise

    def _start(self, i: int, command: Sequence[str]) -> subprocess.Popen[str]:
        environment = {"GEARTRAIN_SECRET": "a secret of this test", "OMP_NUM_THREADS": "1"}
        with (self.folder / f"launcher{i}.txt").open("w") as out:
            options: dict[str, Any] = {"stdout": out, "stderr": out, "cwd": DIRECTORY, "start_new_session": True}
            if not self._generations:
                return self.hosts.popen(i, command, env=environment, **options)
            environment = {**os.environ, **self.hosts.env(i), **environment, preloaded.NESTED: str(self._generations)}
            return preloaded.Popen(command, host=self.hosts.files(i), env=environment, **options)

    def close(self) -> None:
        """Ends what runs, and removes the hosts."""
        self.hosts.close()

    def said(self) -> str:
        """What the launchers said, and the end of each process's log."""
        texts = [f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("launcher*.txt"))]
        return "".join([*texts, *(f"--- {p.name}\n{p.read_text()[-800:]}" for p in self.folder.glob("logs*/*-*.log"))])

    def launcher_said(self, i: int) -> str:
        """What the launcher of host i said."""
        return (self.folder / f"launcher{i}.txt").read_text()

    def codes(self) -> list[int]:
        """What the launchers ended with, when they have."""
        return [launcher.wait(patience(100)) for launcher in self.launchers]

    def summary(self, i: int) -> dict[str, Any]:
        """The summary that the launcher of host i has written."""
        found: dict[str, Any] = json.loads((self.folder / f"logs{i}" / "summary.json").read_text())
        return found

    def wait_for(self, host: int, log: str, text: str) -> None:
        """Waits until a log of a host has that text, while all launchers run."""
        path = self.folder / f"logs{host}" / log
        self.wait(lambda: path.exists() and text in path.read_text(), f"{text!r} in {path}")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for a condition, while all launchers run."""
        until_s = time.monotonic() + patience(60)
        while not condition():
            assert time.monotonic() < until_s, f"waited for {what}\n{self.said()}"
            assert all(launcher.poll() is None for launcher in self.launchers), self.said()
            time.sleep(0.05)

    def column(self, host: int, name: str) -> NDArray[np.float64]:
        """A column of the shared counters that the processes of a host have now, a value for each."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GEARTRAIN_DIR", str(self.hosts.files(host).memory))
            with SharedCounters.open(f"launch-{self._name}") as counters:
                return counters.column(name).copy()

    def pid(self, host: int, name: str) -> int:
        """The process whose output is the log of that name."""
        log = self.folder / f"logs{host}" / f"{name}.log"
        pids = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if (process / "fd" / "1").samefile(log):
                    pids.append(int(process.name))
            except OSError:  # it has ended, or has no such file
                continue
        assert len(pids) == 1, f"{log}: {pids}"
        return pids[0]

    def kill_launcher(self, i: int, signal_number: int) -> None:
        """Kills the launcher of host i, and all of its session."""
        os.killpg(self.launchers[i].pid, signal_number)
        self.launchers[i].wait(patience(20))
