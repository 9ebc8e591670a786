"""Runs of the native fuzzers, in turns, with as many executions as asked for, counted in native/tests/fuzz_counts.json.

    python tests/support/fuzz_native.py --build build/fuzz-clang++ --executions 100000000    # make fuzz

Fuzzers are clang's libFuzzer, or native/tests/support/fuzz_driver.cc; each keeps the inputs that reached something new
in the build's folder `corpus`, and a further slice begins with them. In each round a fuzzer has a slice of time, and a
quarter of one if its last slice found no such input. A slice has a seed that no earlier one had, so a further run tries
other inputs. A finding ends the run: the command of its slice, and what the sanitizer said, with the file of the input,
are printed. Counts are written after each slice, so an interrupted run loses at most one of each fuzzer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COUNTS = ROOT / "native" / "tests" / "fuzz_counts.json"
SLICE_S = 20.0
FRUITLESS = 0.25  # of a slice, after one that found nothing new
#: Clang's check of stacks after return makes targets that refuse inputs by exceptions two to six times as slow, so only
#: one slice in so many has it, and a signal stack for each thread.
STACK_CHECKS_EVERY = 8
QUICK = "detect_stack_use_after_return=0:use_sigaltstack=0"
INPUT_TIMEOUT_S = 60  # of one input under libFuzzer: a busy machine may leave it without a processor for long


class FindingError(Exception):
    """What a fuzzer found."""


@dataclass(frozen=True)
class Slice:
    """What a fuzzer did: executions, and inputs that it kept."""

    executions: int
    kept: int


def fuzzers() -> list[str]:
    """The names of all, as their executables have them."""
    support = ("fuzz_driver", "fuzz_seed_files")
    return sorted(path.stem for path in (ROOT / "native" / "tests").glob("*/fuzz_*.cc") if path.stem not in support)


def uses_libfuzzer(program: Path) -> bool:
    """Whether it is clang's, which describes its options."""
    done = subprocess.run([program, "-help=1"], capture_output=True, text=True, errors="replace", check=False)
    return "max_total_time" in done.stdout + done.stderr


def slice_of(
    program: Path, runs: int, seconds: float, seed: int, libfuzzer: bool = False, sanitizer: str | None = None
) -> Slice:
    """One slice of a fuzzer, with options for ASan. Raises `FindingError`, with the command that shows it again."""
    corpus = program.parent / "corpus" / program.name
    corpus.mkdir(parents=True, exist_ok=True)
    if libfuzzer:
        findings = f"{program.parent / program.name}-finding-"
        command = [
            str(program), f"-runs={runs}", f"-max_total_time={max(1, round(seconds))}", f"-seed={seed % 2**31 + 1}",
            f"-timeout={INPUT_TIMEOUT_S}", f"-artifact_prefix={findings}", "-print_final_stats=1",
            "-detect_leaks=0",  # after each input, that is: the process looks for them at its end
            "-entropic=0", "-reload=0",  # which took a third of the time of the slow ones
            "-print_funcs=0", str(corpus),  # their names come from a symbolizer, which each slice started anew
        ]  # fmt: skip
        said = (r"^stat::number_of_executed_units:\s*(\d+)", r"^stat::new_units_added:\s*(\d+)")
    else:
        command = [str(program), str(runs), str(seconds), str(seed), str(corpus)]
        said = (r"^(\d+) inputs, the slowest", r"; (\d+) of them new")
    environment = dict(os.environ)
    if sanitizer:
        environment["ASAN_OPTIONS"] = ":".join(filter(None, (sanitizer, environment.get("ASAN_OPTIONS"))))
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, cwd=program.parent, env=environment
    )
    told = done.stdout + done.stderr
    found = [re.search(pattern, told, re.MULTILINE) for pattern in said]
    if done.returncode != 0 or found[0] is None or found[1] is None:
        options = f"ASAN_OPTIONS={sanitizer} " if sanitizer else ""
        raise FindingError(f"{options}{' '.join(command)} ended with {done.returncode}:\n{told[-4000:]}")
    return Slice(int(found[0][1]), int(found[1][1]))


def run(
    programs: Sequence[Path],
    counts: Path,
    executions: int,
    jobs: int,
    slice_s: float = SLICE_S,
    seconds: float = float("inf"),
) -> dict[str, int]:
    """Runs all in turns until so many executions are done, or so much time is over; executions of each.

    Raises `FindingError`.
    """
    known = json.loads(counts.read_text()) if counts.exists() else {}
    done = dict.fromkeys((program.name for program in programs), 0)
    share = dict.fromkeys(done, 1.0)
    libfuzzer = {program.name: uses_libfuzzer(program) for program in programs}
    ends_s = time.monotonic() + seconds

    def one(program: Path) -> tuple[str, Slice]:
        name = program.name
        before = known.get(name, {"executions": 0, "slices": 0})
        quick = libfuzzer[name] and before["slices"] % STACK_CHECKS_EVERY > 0
        seconds_now = slice_s * share[name]
        return name, slice_of(
            program, most, seconds_now, before["executions"], libfuzzer[name], QUICK if quick else None
        )

    with ThreadPoolExecutor(jobs) as threads:
        while (left := executions - sum(done.values())) > 0 and time.monotonic() < ends_s:
            most = -(-left // len(programs))
            for name, more in threads.map(one, programs):
                done[name] += more.executions
                share[name] = 1.0 if more.kept else FRUITLESS
                entry = known.setdefault(name, {"executions": 0, "slices": 0})
                entry["executions"] += more.executions
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
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="ends before, after the round that it is in"
    )
    parser.add_argument("--jobs", type=int, default=2, help="fuzzers at a time")
    options = parser.parse_args()
    if options.executions < 1 or options.jobs < 1:
        parser.error("--executions and --jobs are from 1")
    programs = [options.build.resolve() / name for name in fuzzers()]
    began_s = time.monotonic()
    try:
        done = run(programs, COUNTS, options.executions, options.jobs, seconds=options.seconds)
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
