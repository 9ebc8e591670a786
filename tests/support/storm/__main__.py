"""`python -m storm`: rounds of faults for some minutes, and their figures; exit code 1 where anything was found."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import storm.clock as clock

_CLONE_NEWNS, _MS_REC_PRIVATE = 0x20000, 0x44000
#: Set for the process that runs the rounds, whose clock may jump.
INSIDE = "STORM_FOLDER"
DISK_BYTES = 3 << 20
ROUND_S = 3.0


def main() -> int:
    """Parses, and runs the arena in a process of its own, with the clock that jumps."""
    parser = argparse.ArgumentParser(prog="python -m storm", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long, 600 by default")
    parser.add_argument("--seed", type=int, default=None, help="of the first round; the others follow from it")
    parser.add_argument("--rounds", type=int, default=None, help="so many rounds instead of a time")
    parser.add_argument("--crashes", type=int, default=None, help="so many kills, of one or of all, instead of a time")
    parser.add_argument("--kind", help="of all rounds, such as 'tasks'; by default each round has one of its own")
    parser.add_argument("--keep", action="store_true", help="keep the journals and logs of rounds with defects")
    options = parser.parse_args()
    if options.seconds <= 0:
        parser.error(f"--seconds is above zero, found {options.seconds}")
    if INSIDE in os.environ:
        return arena(options)
    with tempfile.TemporaryDirectory(prefix="storm-", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, **clock.prepare(Path(folder)), INSIDE: folder}
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "storm", *sys.argv[1:]]
        return subprocess.run(command, env=environment, check=False).returncode


def arena(options: argparse.Namespace) -> int:
    """Runs rounds until the time is over; returns the exit code."""
    from storm.rounds import KINDS, Round
    from storm.tasks import KINDS as TASK_KINDS
    from storm.tasks import TaskRound

    known = dict.fromkeys(KINDS, Round) | dict.fromkeys(TASK_KINDS, TaskRound)
    if options.kind is not None and options.kind not in known:
        raise SystemExit(f"--kind is one of {', '.join(map(repr, known))}, found {options.kind!r}")
    folder = Path(os.environ[INSIDE])
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(3), "little")
    watch, disk = clock.Clock(), small_disk(folder)
    print(f"storm: seed {seed}; clock {'jumps' if watch.viable else 'does not jump: no C compiler'}; ", end="")
    print(f"{'a full disk of 3 MB' if disk else 'full disks by RLIMIT_FSIZE alone: no tmpfs can be mounted'}")
    figures: Counter[str] = Counter()
    defects = rounds = 0
    began_s = time.monotonic()

    def over() -> bool:
        if options.rounds is not None:
            return rounds >= options.rounds
        if options.crashes is not None:
            return figures["kills"] + figures["kills of all"] >= options.crashes
        return time.monotonic() - began_s >= options.seconds

    while not over():
        place = folder / f"round-{seed + rounds}"
        place.mkdir()
        left_s = options.seconds - (time.monotonic() - began_s)
        kind = options.kind or random.Random(seed + rounds).choice(list(known))
        lasts_s = ROUND_S if options.rounds or options.crashes else max(0.5, min(ROUND_S, left_s))
        one = known[kind](seed + rounds, kind, place, disk, watch, lasts_s)
        one.run()
        rounds += 1
        figures += one.figures
        spent_s = time.monotonic() - began_s
        print(
            f"  {spent_s:5.0f} s  round {one.seed}, {one.kind}: {one.figures['kills']} kills, "
            f"{one.figures['kills of all']} of all, "
            f"{one.figures['stops']} stops, {one.figures['forks']} forks, {one.figures['calls']:,} calls, "
            f"{one.figures['rows proven']:,} rows proven, {len(one.defects)} defects",
            flush=True,
        )
        for defect in one.defects:
            print(
                f"DEFECT in round {one.seed} (--rounds 1 --seed {one.seed} --kind {one.kind!r}): {defect}", flush=True
            )
        defects += len(one.defects)
        if one.defects and options.keep:
            kept = Path(tempfile.mkdtemp(prefix=f"storm-round-{one.seed}-"))
            shutil.copytree(place, kept, dirs_exist_ok=True)
            print(f"its journals and logs are in {kept}")
        shutil.rmtree(place, ignore_errors=True)
        if disk is not None:
            for entry in disk.iterdir():
                shutil.rmtree(entry, ignore_errors=True)
    print(f"storm: {rounds} rounds in {time.monotonic() - began_s:.0f} s, seeds {seed} to {seed + rounds - 1}")
    for name, count in sorted(figures.items()):
        print(f"  {name:28} {count:>12,}")
    print(f"  {'defects':28} {defects:>12,}")
    return 1 if defects else 0


def small_disk(folder: Path) -> Path | None:
    """A tmpfs of a few MB that this process and its children see; None where none can be mounted."""
    libc = ctypes.CDLL(None, use_errno=True)
    disk = folder / "disk"
    disk.mkdir()
    if libc.unshare(_CLONE_NEWNS) != 0 or libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) != 0:
        return None
    options = f"size={DISK_BYTES}".encode()
    if libc.mount(b"none", os.fsencode(disk), b"tmpfs", 0, options) != 0:
        return None
    return disk


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
