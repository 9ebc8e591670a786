"""Plants known defects in a copy of the tree, one at a time, and tells which test catches each: `make defects`.

    python tests/defects/plant.py [--only ID ...] [--kind KIND ...] [--where WHERE ...] [--missing] [--suites]
                                  [--record] [--json PATH] | --list

defects.toml has the defects: a file, the text that stands there, the text that takes its place, the tests to run, and
the test that caught it (`caught_by`; "" where none did; absent where it was not run yet). suites.toml lists the tests
that hold the batch pipeline bit for bit; `--suites` runs these instead of the own ones of a defect of that pipeline.

The copy is build/defects/tree, with the files of the working tree that git tracks or does not ignore. The working tree
is never changed. The native module is built there, by ccache where that is installed, and only where a native file
changed. Text is compared token by token, so that a formatter may break lines elsewhere. A test that catches a defect is
run once more without it: one that fails anyway has caught nothing.

Exits with 1 when a defect that was caught before is not caught, or an entry does not fit the code any more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DEFECTS, SUITES = HERE / "defects.toml", HERE / "suites.toml"
SCRATCH = ROOT / "build" / "defects"
TREE, NATIVE, REPORT = SCRATCH / "tree", SCRATCH / "native", SCRATCH / "report"
CLEAN = SCRATCH / "clean"
PYTHON = ROOT / ".venv" / "bin" / "python"
BATCH_KINDS = ("draw", "gather", "redraw", "updates")  # those of the batch pipeline, which suites.toml holds
KINDS = (*BATCH_KINDS, "transport", "collectives")
WHERE = ("one host", "ranks", "devices", "peers")
#: Longest test on an idle machine (a defect may have it wait for ever), longest run of a defect's tests, longest build:
#: seconds.
LONGEST_TEST_S, LONGEST_S, LONGEST_BUILD_S = 60, 900, 1800


class StaleError(Exception):
    """An entry that does not fit the code."""


@dataclass(frozen=True)
class Defect:
    """An entry of defects.toml. `caught_by`: None where it was not run yet, "" where no test caught it."""

    id: str
    kind: str
    where: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    caught_by: str | None = None

    @property
    def native(self) -> bool:
        return self.file.startswith("native/")

    def planted(self, text: str) -> str:
        """The file's text with the defect.

        Raises:
            StaleError: the old text stands there never, or more than once.
        """
        found = list(pattern_of(self.old).finditer(text))
        if len(found) != 1:
            raise StaleError(f"{self.id}: its old text stands {len(found)} times in {self.file}, once was expected")
        return text[: found[0].start()] + self.new + text[found[0].end() :]


@dataclass
class Result:
    """What became of a defect: "caught", "not caught", "stale", "broken" (it does not build, or its tests do not run),
    or "unproven" (the test fails without the defect as well)."""

    id: str
    kind: str
    where: str
    outcome: str
    caught_by: str = ""
    before: str | None = None
    seconds: float = 0.0
    detail: str = field(default="", repr=False)

    @property
    def good(self) -> bool:
        """Whether nothing that was caught before goes uncaught, and the entry can be judged."""
        return self.outcome == "caught" or (self.outcome == "not caught" and not self.before)


def pattern_of(text: str) -> re.Pattern[str]:
    """What finds a text whatever white space stands between its words and signs."""
    tokens = re.findall(r"\w+|[^\w\s]", text)
    parts = [re.escape(tokens[0])]
    for before, token in itertools.pairwise(tokens):
        both_words = re.match(r"\w", before) and re.match(r"\w", token)
        parts.append((r"\s+" if both_words else r"\s*") + re.escape(token))
    begin = r"(?<!\w)" if re.match(r"\w", tokens[0]) else ""
    end = r"(?!\w)" if re.match(r"\w", tokens[-1]) else ""
    return re.compile(begin + "".join(parts) + end)


def read_toml(path: Path) -> dict[str, Any]:
    import tomllib  # Python 3.11 and later

    return tomllib.loads(path.read_text())


def defects() -> list[Defect]:
    """All entries of defects.toml."""
    return [Defect(**{**each, "tests": tuple(each["tests"])}) for each in read_toml(DEFECTS)["defect"]]


def suites() -> dict[str, list[str]]:
    """The tests of suites.toml, by the name of their suite."""
    return {name: each["tests"] for name, each in read_toml(SUITES).items()}


# --- the copy ---------------------------------------------------------------------------------------------------------


def bring_up_to_date() -> None:
    """Makes the copy equal to the working tree. Files that are equal keep their times."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
        text=True,
        errors="surrogateescape",  # names of files are bytes
    ).stdout
    names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    for name in names:
        source, copy = ROOT / name, TREE / name
        if not copy.is_file() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            write(copy, source.read_bytes())
            shutil.copymode(source, copy)
    for path in TREE.rglob("*"):
        known = path.relative_to(TREE).as_posix() in names
        if path.is_file() and not known and path.suffix != ".so" and "__pycache__" not in path.parts:
            path.unlink()


def write(path: Path, data: bytes) -> None:
    """Writes a file whose time is a later second than before, which is what Python's compiled files go by."""
    before = int(path.stat().st_mtime) if path.exists() else 0
    path.write_bytes(data)
    at = max(int(time.time()), before + 1)
    os.utime(path, (at, at))


def build() -> str:
    """Builds the native module of the copy and puts it there; what the compiler said where it cannot be built."""
    environment = {**os.environ, "PATH": f"{PYTHON.parent}:{os.environ['PATH']}"}
    # Of optimization as little as most of the code has anyway: compilers take most of the time of a native defect.
    flags = "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"
    options = ["-G", "Ninja", "-DSKBUILD=ON", f"-DPython_EXECUTABLE={PYTHON}", flags]
    if shutil.which("ccache"):
        options.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
        environment |= {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"} | {
            name: value for name, value in os.environ.items() if name.startswith("CCACHE_")
        }
    run: dict[str, Any] = {"env": environment, "capture_output": True, "text": True, "timeout": LONGEST_BUILD_S}
    nanobind = subprocess.run([PYTHON, "-m", "nanobind", "--cmake_dir"], check=True, **run).stdout.strip()
    for command in (
        ["cmake", "-S", TREE, "-B", NATIVE, f"-Dnanobind_DIR={nanobind}", *options],
        ["cmake", "--build", NATIVE, "--target", "_native"],
    ):
        done = subprocess.run(command, check=False, **run)
        if done.returncode != 0:
            return (done.stdout + done.stderr)[-3000:]
    put_module(NATIVE)
    return ""


def put_module(folder: Path) -> None:
    """Puts the native module of a folder into the copy."""
    (module,) = folder.glob("_native.*.so")
    shutil.copy2(module, TREE / "src" / "geartrain" / f".{module.name}")
    (TREE / "src" / "geartrain" / f".{module.name}").replace(TREE / "src" / "geartrain" / module.name)


def keep_clean_module() -> None:
    CLEAN.mkdir(exist_ok=True)
    for module in NATIVE.glob("_native.*.so"):
        shutil.copy2(module, CLEAN / module.name)


def run_tests(tests: Sequence[str], *, stop: bool) -> tuple[int, str, str]:
    """Runs tests in the copy; returns pytest's exit status, the test that failed first or ended the process, and the
    end of what was printed. `stop`: with the first failure."""
    REPORT.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TREE / "tests" / "defects" / "site"), os.environ.get("PYTHONPATH", "")]),
        "GEARTRAIN_TEST_TREE": str(TREE / "src"),
        "GEARTRAIN_TEST_REPORT": str(REPORT),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [PYTHON, "-m", "pytest", "-n", "0", "-p", "first_failure", "-p", "no:cacheprovider", "--no-header"]
    command += ["-o", "addopts=-q --strict-markers", "-o", f"timeout={LONGEST_TEST_S}"]
    command += [*(["-x"] if stop else ["-rfE"]), *tests]
    process = subprocess.Popen(
        command, cwd=TREE, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LONGEST_S)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the session that was started here
        output, _ = process.communicate()
        status = -signal.SIGKILL
    told = REPORT.read_text() if REPORT.exists() else ""
    how, _, test = told.partition(" ")
    return status, test if how in ("failed", "runs") else "", output[-20_000:]


# --- a defect ---------------------------------------------------------------------------------------------------------


def judge(defect: Defect, tests: Sequence[str]) -> Result:
    """Plants a defect, runs tests, and takes it out again."""
    began_s = time.monotonic()
    result = Result(defect.id, defect.kind, defect.where, "caught", before=defect.caught_by)
    path = TREE / defect.file
    original = path.read_bytes()
    try:
        write(path, defect.planted(original.decode()).encode())
        if defect.native and (said := build()):
            result.outcome, result.detail = "broken", said
            return result
        status, test, output = run_tests(tests, stop=True)
        if status == 0:
            result.outcome = "not caught"
        elif test:
            result.caught_by, result.detail = test, output
        else:
            result.outcome, result.detail = "broken", output
    except StaleError as error:
        result.outcome, result.detail = "stale", str(error)
    finally:
        if path.read_bytes() != original:
            write(path, original)
        result.seconds = time.monotonic() - began_s
    return result


def check_without(results: Iterable[Result]) -> None:
    """Runs the tests that caught defects without any of them."""
    caught = sorted({each.caught_by for each in results if each.outcome == "caught"})
    if not caught:
        return
    put_module(CLEAN)
    status, _, output = run_tests(caught, stop=False)
    if status == 0:
        return
    lines = [line.partition(" ")[2] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    failing = {each for each in caught if any(line == each or line.startswith(f"{each} - ") for line in lines)}
    for each in results:
        if each.caught_by in (failing or caught):  # none is named where the process ended
            each.outcome, each.detail = "unproven", f"{each.caught_by} fails without the defect as well\n{output}"


def record(results: Iterable[Result]) -> None:
    """Writes what was found to defects.toml, as `caught_by`; an entry that cannot be judged loses its own."""
    judged = ("caught", "not caught")
    found = {each.id: json.dumps(each.caught_by) if each.outcome in judged else None for each in results}
    lines, id_ = [], ""
    for line in DEFECTS.read_text().splitlines():
        name, _, value = line.partition(" = ")
        id_ = json.loads(value) if name == "id" else id_
        if name == "caught_by" and id_ in found:
            continue
        lines.append(line)
        if name == "tests" and found.get(id_) is not None:
            lines.append(f"caught_by = {found[id_]}")
    DEFECTS.write_text("\n".join(lines) + "\n")


def table(results: Sequence[Result]) -> str:
    """What became of the defects, by kind."""
    lines = [f"{'':11}  {'defects':>7}  {'caught':>6}  {'not caught':>10}  {'other':>5}"]
    for kind in KINDS:
        mine = [each.outcome for each in results if each.kind == kind]
        caught, missed = mine.count("caught"), mine.count("not caught")
        lines.append(f"{kind:11}  {len(mine):7}  {caught:6}  {missed:10}  {len(mine) - caught - missed:5}")
    for each in results:
        if not each.good:
            was = f", was caught by {each.before}" if each.before else ""
            lines.append(f"{each.id}: {each.outcome}{was}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the defects, and run nothing")
    parser.add_argument("--only", nargs="+", metavar="ID", default=[], help="defects with these ids")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--where", nargs="+", choices=WHERE, default=WHERE)
    parser.add_argument("--missing", action="store_true", help="only those whose entry has no `caught_by` yet")
    parser.add_argument(
        "--suites", action="store_true", help="run all tests of suites.toml for each of the batch pipeline; hours"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results to a file")
    parser.add_argument("--record", action="store_true", help="write the results to defects.toml")
    options = parser.parse_args()
    every = defects()
    unknown = set(options.only) - {each.id for each in every}
    if unknown:
        parser.error(f"no defect is called {', '.join(sorted(unknown))}; --list prints the ids")
    chosen = [
        each
        for each in every
        if (not options.only or each.id in options.only)
        and each.kind in options.kind
        and each.where in options.where
        and not (options.missing and each.caught_by is not None)
    ]
    if options.list:
        for each in chosen:
            print(f"{each.id:32} {each.kind:11} {each.where:9} {each.what}")
        return 0
    bring_up_to_date()
    print("building the native module without a defect", flush=True)
    if said := build():
        sys.exit(f"the copy in {TREE} does not build:\n{said}")
    keep_clean_module()
    results: list[Result] = []
    for number, defect in enumerate(sorted(chosen, key=lambda each: each.native), 1):
        of_suites = options.suites and defect.kind in BATCH_KINDS
        tests = sorted({test for each in suites().values() for test in each}) if of_suites else defect.tests
        result = judge(defect, tests)
        results.append(result)
        print(
            f"[{number}/{len(chosen)}] {defect.id}: {result.outcome} {result.caught_by} ({result.seconds:.0f} s)",
            flush=True,
        )
        if result.outcome in ("stale", "broken"):
            print(result.detail, flush=True)
        if options.record:
            record([result])
    check_without(results)
    if options.record:
        record(results)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
    print(table(results))
    return 0 if all(each.good for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
