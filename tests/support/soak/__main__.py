"""`python -m soak`: the job, its kills, and its figures; exit code 1 where something grew, or a row was not whole."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deadlines import patience

from soak.figures import Sample, growths, sample
from soak.roles import TASKS

KILLED = ("actor", "actor", "second-rank", "loader", "answer")
KILL_EVERY_S = 4.0
SAMPLE_EVERY_S = 1.0


def main() -> int:
    """Parses, runs, prints."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long, 60 by default")
    parser.add_argument("--json", type=Path, help="a file for all samples and figures")
    options = parser.parse_args()
    if not 0.2 <= options.minutes <= 100_000:
        parser.error(f"--minutes is from 0.2 to 100,000, found {options.minutes}")
    shared = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        tempfile.TemporaryDirectory(prefix="soak-", dir=shared if shared.is_dir() else None) as segments,
    ):
        found = run(Path(folder), Path(segments), options.minutes * 60)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found) + "\n")
    return show(found)


def run(folder: Path, segments: Path, seconds: float) -> dict[str, Any]:
    """Runs the job for so long; its samples and figures."""
    environment = {
        **os.environ,
        "GEARTRAIN_DIR": str(segments),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # Else the C library keeps an arena for each of many threads, which fill one after the other.
        "MALLOC_ARENA_MAX": "2",
    }

    def start(role: str, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "soak.roles", role, str(folder)]
        return subprocess.Popen(command, env=environment, text=True, **options)

    os.environ["GEARTRAIN_DIR"] = str(segments)  # to look at the store with tasks
    learner = start("learner", stdout=subprocess.PIPE)
    judge = start("judge")
    others = [start(role) for role in KILLED]
    samples: list[Sample] = []
    kills, ended = 0, 0
    began_s = time.monotonic()
    try:
        while not (folder / "address").exists() and learner.poll() is None and time.monotonic() - began_s < 120:
            time.sleep(0.1)
        began_s = time.monotonic()
        while (now_s := time.monotonic() - began_s) < seconds and learner.poll() is None:
            samples.append(sample((learner.pid, judge.pid), now_s, segments, folder / "journal", TASKS))
            if now_s > (kills + 1) * KILL_EVERY_S:
                at = kills % len(KILLED)
                ended += others[at].poll() is not None  # by itself, which nothing should make it
                others[at].kill()
                others[at].wait()
                others[at] = start(KILLED[at])
                kills += 1
            time.sleep(SAMPLE_EVERY_S)
        ended += judge.poll() is not None
        for process in (*others, judge):  # first: the learner takes the store with it
            process.kill()
            process.wait()
        told = last_words(learner, patience(120))
    finally:
        for process in (learner, judge, *others):
            process.kill()
            process.wait()
    return {
        **told,
        "seconds": round(time.monotonic() - began_s, 1),
        "kills": kills,
        "ended_by_themselves": ended,
        "growth": [asdict(one) for one in growths(samples)],
        "samples": [one._asdict() for one in samples],
    }


def last_words(learner: subprocess.Popen[str], timeout_s: float) -> dict[str, Any]:
    """Ends the learner: its figures and what it found, or how it ended; neither costs the samples."""
    learner.terminate()
    try:
        out, _ = learner.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"figures": {}, "problems": [f"the learner did not end within {timeout_s:g} s of SIGTERM"]}
    found: dict[str, Any] = json.loads(out) if out else {"figures": {}, "problems": ["the learner ended by itself"]}
    return found


def show(found: dict[str, Any]) -> int:
    """Prints the figures; 1 where anything is wrong."""
    print(f"soak: {found['seconds']:,.0f} s, {found['kills']} kills, {len(found['samples'])} samples")
    for name, count in found["figures"].items():
        print(f"  {name:20}{count:>14,}")
    print(f"  {'':20}{'early':>14}{'late':>14}")
    for one in found["growth"]:
        print(f"  {one['figure']:20}{one['early']:>14,.1f}{one['late']:>14,.1f}{'   GREW' if one['grew'] else ''}")
    wrong = [f"{one['figure']} grew" for one in found["growth"] if one["grew"]]
    wrong += found["problems"]
    wrong += ["rows or sums were mixed"] if found["figures"].get("mixed") else []
    wrong += [f"{found['ended_by_themselves']} processes ended by themselves"] if found["ended_by_themselves"] else []
    wrong += [
        f"no {name}" for name in ("batches", "all_reduces", "calls", "task_rows") if not found["figures"].get(name)
    ]
    print("soak: " + ("; ".join(wrong) if wrong else "nothing grew"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
