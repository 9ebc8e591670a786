"""DI-engine's DQN on Pong over nng and over geartrain's queue: seconds for the same epochs, on one host and on two.

    python -m geartrain_bench.di_engine.atari --python /path/to/di/bin/python                    # 20 epochs, one host
    python -m geartrain_bench.di_engine.atari --python ... --hosts 2 --rate-mbit 1000 --epochs 100

A learner and a collector with the settings of DI-engine's `pong_dqn_config`: in an epoch the collector steps 8 games 96
times in all, sends the transitions (96 of 226 KB), and waits for the model; the learner takes 10 batches of 32. Queues
alternate; time is the learner's, after its first 3 epochs. It is the measurement of the torchrpc page, whose 100 epochs
took 127.6 s over nng and 29.4 s over torchrpc with a GPU. Two hosts are network namespaces
(geartrain.tools.testing.Hosts).

Threats to validity. Games run in the collector's process, where the configuration has a process for each: those would
want more than two cores. Computing is the same for both queues, and on a CPU takes long, which makes the ratio smaller.
nng drops an event for which it has no room or no peer yet, and DI-engine's learner then waits for ever: such a run is
stopped after --limit-s, counted, and repeated once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from geartrain.tools.testing import Hosts

WORKER = Path(__file__).with_name("atari_worker.py")
QUEUES = ("nng", "geartrain")


@contextlib.contextmanager
def workers(python: str, queue: str, folder: Path, epochs: int, hosts: Hosts | None) -> Iterator[list[Any]]:
    """Learner and collector, which end with the context."""
    command = [python, str(WORKER), queue, str(folder), str(epochs)]
    environment = {"OMP_NUM_THREADS": "1", "GEARTRAIN_SECRET": secrets.token_hex(16)}
    started: list[subprocess.Popen[Any]] = []
    with (folder / "log").open("wb") as log:
        how: dict[str, Any] = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "start_new_session": True}
        try:
            if hosts is None:
                started.append(subprocess.Popen(command, env={**os.environ, **environment}, **how))
            else:
                first, second = hosts.address(0), hosts.address(1)
                started.append(hosts.popen(0, [*command, "0", first], env=environment, **how))
                time.sleep(2.0)  # nng dials once
                started.append(hosts.popen(1, [*command, "1", second, first], env=environment, **how))
            yield started
        finally:
            for process in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)


def run(python: str, queue: str, epochs: int, hosts: Hosts | None, limit_s: float) -> dict[str, Any] | None:
    """What the learner found, or None where there was no end within the limit; raises `SystemExit` if a worker ends."""
    with tempfile.TemporaryDirectory(prefix="di-engine-atari-") as place:
        folder = Path(place)
        with workers(python, queue, folder, epochs, hosts) as processes:
            until_s = time.monotonic() + limit_s
            while time.monotonic() < until_s:
                if (folder / "result.json").exists():
                    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
                    return found
                if any(process.poll() is not None for process in processes):
                    lines = (folder / "log").read_text(errors="replace").strip().splitlines()
                    raise SystemExit(f"a worker over {queue} has ended:\n" + "\n".join(lines[-8:]))
                time.sleep(0.2)
    return None


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints."""
    text = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text.add_argument("--python", required=True, help="of an environment with DI-engine, ale-py and geartrain in it")
    text.add_argument("--epochs", type=int, default=20, help="that are timed (20)")
    text.add_argument("--rounds", type=int, default=2, help="runs of each queue (2)")
    text.add_argument(
        "--hosts", type=int, choices=(1, 2), default=1, help="learner and collector on one host, or two (1)"
    )
    text.add_argument("--rate-mbit", type=float, help="of the links between two hosts; unshaped without it")
    text.add_argument("--limit-s", type=float, default=600.0, help="longest time of a run (600)")
    text.add_argument("--json", type=Path, help="write all figures here")
    chosen = text.parse_args(arguments)
    if chosen.epochs < 1 or chosen.rounds < 1 or not chosen.limit_s > 0:
        text.error("--epochs, --rounds and --limit-s are above zero")
    if chosen.rate_mbit is not None and (chosen.hosts == 1 or not chosen.rate_mbit > 0):
        text.error("--rate-mbit is above zero, and of the links between --hosts 2")
    if not os.access(chosen.python, os.X_OK):
        text.error(f"--python {chosen.python} is not a program")
    reason = Hosts.viable() if chosen.hosts == 2 else None
    if reason is not None:
        text.error(f"two hosts are not possible here: {reason}")
    found: dict[str, list[dict[str, Any]]] = {queue: [] for queue in QUEUES}
    stalled = dict.fromkeys(QUEUES, 0)
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(2, rate_mbit=chosen.rate_mbit)) if chosen.hosts == 2 else None
        for number in range(chosen.rounds):
            for queue in QUEUES[:: 1 if number % 2 == 0 else -1]:
                for _ in range(2):
                    result = run(chosen.python, queue, chosen.epochs, hosts, chosen.limit_s)
                    if result is not None:
                        found[queue].append(result)
                        print(f"round {number + 1}, {queue}: {result['seconds']:.1f} s", file=sys.stderr, flush=True)
                        break
                    stalled[queue] += 1
                    print(
                        f"round {number + 1}, {queue}: no end within {chosen.limit_s:g} s", file=sys.stderr, flush=True
                    )
    link = (
        "one host"
        if chosen.hosts == 1
        else f"two hosts, {chosen.rate_mbit or 'not'} {'Mbit/s' if chosen.rate_mbit else 'shaped'}"
    )
    print(f"{chosen.epochs} epochs on {link}; load {os.getloadavg()[0]:.1f}")
    for queue in QUEUES:
        seconds = sorted(each["seconds"] for each in found[queue])
        if seconds:
            steps = statistics.median(each["env_steps"] for each in found[queue])
            spread = f"{seconds[0]:.1f} to {seconds[-1]:.1f}"
            print(f"{queue:>10}: {statistics.median(seconds):7.1f} s ({spread}), {steps:.0f} environment steps", end="")
            print(f", {stalled[queue]} runs stalled" if stalled[queue] else "")
        else:
            print(f"{queue:>10}: no run came to its end, {stalled[queue]} stalled")
    if all(found.values()):
        nng, ours = (statistics.median(each["seconds"] for each in found[queue]) for queue in QUEUES)
        print(f"nng takes {nng / ours:.2f} times as long")
    if chosen.json is not None:
        chosen.json.write_text(
            json.dumps({"runs": found, "stalled": stalled, "load": os.getloadavg()[0]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
