"""Runs of the native fuzzers, in turns, with as many executions as asked for, counted in native/tests/fuzz_counts.json.

    python tests/support/fuzz_native.py --build build/address --executions 100000000    # make fuzz

Each fuzzer has the same time, in slices; a slice has a seed that no earlier one had, so a further run tries other
inputs. A finding ends the run: its fuzzer, the seed of its slice and what the sanitizer said are printed. Counts are
written after each slice, so an interrupted run loses at most one of each fuzzer.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
COUNTS = ROOT / "native" / "tests" / "fuzz_counts.json"
SLICE_S = 20.0


class FindingError(Exception):
    """What a fuzzer found."""


def fuzzers() -> list[str]:
    """The names of all, as their executables have them."""
    return sorted(path.stem for path in (ROOT / "native" / "tests").glob("*/fuzz_*.cc") if path.stem != "fuzz_driver")


def slice_of(program: Path, runs: int, seconds: float, seed: int) -> int:
    """Executions of one slice. Raises `FindingError`, with the command that shows it again."""
    command = [str(program), str(runs), str(seconds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    found = re.search(r"^(\d+) inputs, the slowest", done.stdout, re.MULTILINE)
    if done.returncode != 0 or found is None:
        told = (done.stdout + done.stderr)[-4000:]
        raise FindingError(f"{' '.join(command)} ended with {done.returncode}:\n{told}")
    return int(found[1])


def run(programs: Sequence[Path], counts: Path, executions: int, jobs: int, slice_s: float = SLICE_S) -> dict[str, int]:
    """Runs all in turns until so many executions are done; executions of each. Raises `FindingError`."""
    known = json.loads(counts.read_text()) if counts.exists() else {}
    done = dict.fromkeys((program.name for program in programs), 0)

    def one(program: Path) -> tuple[str, int]:
        before = known.get(program.name, {"executions": 0})
        return program.name, slice_of(program, most, slice_s, before["executions"])

    with ThreadPoolExecutor(jobs) as threads:
        while (left := executions - sum(done.values())) > 0:
            most = -(-left // len(programs))
            for name, more in threads.map(one, programs):
                done[name] += more
                entry = known.setdefault(name, {"executions": 0, "slices": 0})
                entry["executions"] += more
                entry["slices"] += 1
                new = counts.with_suffix(".new")
                new.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
                new.replace(counts)
    return done


def main() -> int:
    """Parses, runs, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, required=True, help="the folder of the fuzzers")
    parser.add_argument("--executions", type=int, default=100_000_000, help="of all together")
    parser.add_argument("--jobs", type=int, default=2, help="fuzzers at a time")
    options = parser.parse_args()
    if options.executions < 1 or options.jobs < 1:
        parser.error("--executions and --jobs are from 1")
    programs = [options.build.resolve() / name for name in fuzzers()]
    began_s = time.monotonic()
    try:
        done = run(programs, COUNTS, options.executions, options.jobs)
    except (FindingError, OSError) as error:
        print(f"fuzz: {error}")
        return 1
    known = json.loads(COUNTS.read_text())
    for name, count in done.items():
        print(f"  {name:20}{count:>14,} now{known[name]['executions']:>16,} in all")
    took_s = time.monotonic() - began_s
    print(f"fuzz: {sum(done.values()):,} executions in {took_s:,.0f} s, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
