"""A Ray cluster on one machine: a node in each of two emulated hosts, with a network and a /dev/shm each."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

from deadlines import patience

from geartrain.tools.testing.cluster import Hosts

CPUS = 8
PORT = 6379
_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "OMP_NUM_THREADS": "1",
    "NO_COLOR": "1",
}


@functools.cache
def why_not() -> str | None:
    """None where a cluster can be started, or the reason why not."""
    if importlib.util.find_spec("ray") is None:
        return "ray is not installed: pip install 'geartrain[ray]'"
    reason = Hosts.viable()
    return None if reason is None else f"no hosts can be made here: {reason}"


class RayCluster:
    """Two nodes of 8 processors each; `address` is the cluster's, for drivers in its hosts. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.hosts = folder, Hosts(2)
        self.address = f"{self.hosts.address(0)}:{PORT}"
        try:
            head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}/ray"]
            self._start(0, head)
            self._start(1, [f"--address={self.address}"])
        except BaseException:
            self.close()
            raise

    def popen(self, argv: list[str], said: Path, **options) -> subprocess.Popen[bytes]:
        """Starts a driver in host 0."""
        with said.open("w") as out:
            return self.hosts.popen(0, argv, env=_ENV, stdout=out, stderr=out, **options)

    def close(self) -> None:
        """Ends all that runs in the hosts."""
        self.hosts.close()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self, i: int, words: list[str]) -> None:
        said = self.folder / f"node{i}.txt"
        argv = [str(Path(sys.executable).parent / "ray"), "start", *words, f"--node-ip-address={self.hosts.address(i)}"]
        argv += [f"--num-cpus={CPUS}", "--object-store-memory=100000000", "--disable-usage-stats", "--block"]
        with said.open("w") as out:
            node = self.hosts.popen(i, argv, env={**os.environ, **_ENV}, stdout=out, stderr=out)
        until_s = time.monotonic() + patience(60)
        while "Ray runtime started" not in said.read_text():
            assert node.poll() is None and time.monotonic() < until_s, said.read_text()
            time.sleep(0.1)


__all__ = ["CPUS", "RayCluster", "why_not"]
