"""A Slurm cluster on one machine: munged, slurmctld and a slurmd in each of some emulated hosts, with files of its own.

Each host has its network, hostname and /dev/shm (`tools.testing.cluster`), and its slurmd says that it has 16
processors. Where Slurm's daemons are not installed, `why_not` says so: on Debian they are slurm-wlm and munge.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from deadlines import patience

from geartrain.tools.testing.cluster import Hosts

CPUS = 16
_DAEMONS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")


def why_not() -> str | None:
    """None where a cluster can be started, or the reason why not."""
    missing = [each for each in _DAEMONS if shutil.which(each, path=_path()) is None]
    if missing:
        return f"there is no {', '.join(missing)}: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "Slurm's daemons and the hosts need root"
    reason = Hosts.viable()
    return None if reason is None else f"no hosts can be made here: {reason}"


class SlurmCluster:
    """So many nodes, host0, host1, ...; slurmctld is on host0. A context manager.

    `folder` is where all of its files lie: at most 60 bytes, for the sockets in it.
    """

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder, self.hosts = folder, Hosts(nodes)
        self.env = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
        self._munged: subprocess.Popen[bytes] | None = None
        try:
            self._write_files(nodes)
            self._start(nodes)
        except BaseException:
            self.close()
            raise

    def run(self, *argv: str, timeout_s: float = 60.0) -> str:
        """What a command prints on host0; an error if it fails."""
        return self.hosts.run(0, argv, env=self.env, timeout_s=patience(timeout_s))

    def job(self, number: str, *fields: str) -> dict[str, str]:
        """What Slurm knows of a job: JobState, ExitCode, Reason, ..."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(word.partition("=")[::2] for word in shown.split() if "=" in word)

    def wait_for_job(self, number: str, timeout_s: float = 90.0) -> dict[str, str]:
        """The same once the job is over."""
        until_s = time.monotonic() + patience(timeout_s)
        while (found := self.job(number))["JobState"] in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < until_s, (found, self.logs())
            time.sleep(0.3)
        return found

    def logs(self) -> str:
        """The last lines of all daemons."""
        return "".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        """Ends all daemons, and what runs in the hosts."""
        self.hosts.close()
        if self._munged is not None:
            self._munged.kill()
            self._munged.wait()

    def __enter__(self) -> SlurmCluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write_files(self, nodes: int) -> None:
        folder = self.folder
        for name in ("state", *(f"spool.host{i}" for i in range(nodes))):
            (folder / name).mkdir()
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # not looked for, and not used
        lines = [
            "ClusterName=test",
            "SlurmctldHost=host0",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder}/munge",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool.%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/slurmd.%n.pid",
            f"SlurmctldLogFile={folder}/slurmctld.log",
            f"SlurmdLogFile={folder}/slurmd.%n.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SchedulerType=sched/builtin",
            "SchedulerParameters=sched_min_interval=100000",
            "ReturnToService=2",
            "SlurmdParameters=config_overrides",
            "MailProg=/bin/true",
            "KillWait=20",
            *(
                f"NodeName={self.hosts.hostname(i)} NodeAddr={self.hosts.address(i)} CPUs={CPUS} RealMemory=16000"
                for i in range(nodes)
            ),
            "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        ]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")

    def _start(self, nodes: int) -> None:
        folder = self.folder
        munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge", f"--key-file={folder}/key"]
        munge += [f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/seed"]
        with (folder / "munged.log").open("wb") as log:
            self._munged = subprocess.Popen(munge, env={**os.environ, **self.env}, stdout=log, stderr=log)
        self._wait((folder / "munge").exists)
        with (folder / "daemons.log").open("wb") as log:
            self.hosts.popen(0, ["slurmctld", "-D", "-i"], env=self.env, stdout=log, stderr=log)
            for i in range(nodes):
                argv = ["slurmd", "-D", "-N", self.hosts.hostname(i)]
                self.hosts.popen(i, argv, env=self.env, stdout=log, stderr=log)
        self._wait(lambda: self._idle() == nodes)

    def _idle(self) -> int:
        shown = self.hosts.popen(
            0, ["sinfo", "--noheader", "--states=idle", "--format=%D"], env=self.env, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        found, _ = shown.communicate(timeout=patience(30))
        return int(found or 0)

    def _wait(self, ready) -> None:
        until_s = time.monotonic() + patience(30)
        while not ready():
            assert time.monotonic() < until_s, self.logs()
            time.sleep(0.1)


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


__all__ = ["CPUS", "SlurmCluster", "why_not"]
