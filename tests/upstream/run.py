"""Runs another project's own tests, unmodified, over its stock classes and over geartrain's: `make upstream`.

    python tests/upstream/run.py sb3 [SOURCE] [--tests GLOB ...] [--json PATH] [-- pytest arguments]

SOURCE is an sdist, a wheel that ships tests, or the folder of a checkout; without it the sdist of the installed version
is downloaded. It is unpacked or copied to a temporary folder, and both runs import the project from there. Printed, and
written as JSON: the revision, each file with its digest, and what passed, failed and was skipped on either side. Exits
with 1 when a test passes on stock and not on geartrain's.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path
from typing import Any

from projects import PROJECTS, Project

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SIDES = ("stock", "geartrain")
#: Longest run of one side's tests, in seconds.
LONGEST_S = 3600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", choices=sorted(PROJECTS))
    parser.add_argument("source", nargs="?", type=Path)
    parser.add_argument("--tests", nargs="+", metavar="GLOB", help="files, instead of the project's usual ones")
    parser.add_argument("--json", type=Path, help="default: runs/upstream-PROJECT.json")
    given = sys.argv[1:]
    extra = given[given.index("--") + 1 :] if "--" in given else []
    options = parser.parse_args(given[: given.index("--")] if "--" in given else given)
    project = PROJECTS[options.project]
    with tempfile.TemporaryDirectory(prefix="geartrain-upstream-") as folder:
        source = options.source or download(project, Path(folder))
        tree = unpacked(source, project, Path(folder) / "tree")
        files = sorted({path for glob in options.tests or project.tests for path in tree.glob(glob)})
        if not files:
            sys.exit(f"{source} holds none of {', '.join(options.tests or project.tests)}")
        report = {
            "project": project.package,
            "revision": revision(source, tree, project),
            "geartrain": subprocess.run(
                ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
            ).stdout.strip(),
            "versions": versions(),
            "files": {
                str(path.relative_to(tree)): {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()} for path in files
            },
        }
        results = {side: run(side, project, tree, files, extra) for side in SIDES}
    for name in report["files"]:
        for side in SIDES:
            report["files"][name][side] = counts(results[side], name)
    report["total"] = {side: counts(results[side], None) for side in SIDES}
    report["lost"] = sorted(
        test for test, outcome in results["stock"].items() if outcome == "passed" != results["geartrain"].get(test)
    )
    path = options.json or ROOT / "runs" / f"upstream-{options.project}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    show(report, path)
    return 1 if report["lost"] else 0


def download(project: Project, folder: Path) -> Path:
    """The sdist of the installed version."""
    version = importlib.metadata.version(project.package)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-binary",
        ":all:",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run([*command, "-d", str(folder), f"{project.package}=={version}"], check=True, timeout=600)
    return next(path for path in folder.iterdir() if path.name.endswith((".tar.gz", ".zip")))


def unpacked(source: Path, project: Project, into: Path) -> Path:
    """The project's tree, copied: the folder that holds its package."""
    if source.is_dir():
        shutil.copytree(source, into, ignore=shutil.ignore_patterns(".git", "build", ".venv", "__pycache__"))
    elif source.name.endswith((".whl", ".zip")):
        with zipfile.ZipFile(source) as archive:
            archive.extractall(into)
    elif ".tar" in source.name:
        with tarfile.open(source) as archive:
            archive.extractall(into, filter="data")
    else:
        sys.exit(f"{source} is no sdist, wheel or folder")
    found = sorted(into.rglob(f"{project.folder}/__init__.py"), key=lambda path: len(path.parts))
    if not found:
        sys.exit(f"{source} holds no package {project.folder}")
    return found[0].parent.parent


def revision(source: Path, tree: Path, project: Project) -> str:
    """A checkout's commit, or an archive's version and digest."""
    if source.is_dir():
        command = ["git", "-C", str(source), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False)
        if commit.returncode == 0:
            return commit.stdout.strip()
    written = tree / project.folder / "version.txt"
    version = written.read_text().strip() if written.exists() else importlib.metadata.version(project.package)
    return version if source.is_dir() else f"{version} ({source.name}, sha256 {digest(source)})"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def versions() -> dict[str, str]:
    names = ("numpy", "torch", "gymnasium", "pytest")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def run(side: str, project: Project, tree: Path, files: list[Path], extra: list[str]) -> dict[str, str]:
    """Outcomes by test."""
    written = tree.parent / f"{side}.xml"
    plugin = ["-p", project.plugin] if side == "geartrain" else []
    paths = [str(tree), str(HERE / "plugins"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", *plugin, "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "--no-header"]
    command += [
        "--timeout=600",
        "-o",
        "addopts=",
        f"--junitxml={written}",
        f"--rootdir={tree}",
        *map(str, files),
        *extra,
    ]
    print(f"--- {side}: {project.package}, {len(files)} files", flush=True)
    subprocess.run(command, cwd=tree, env=environment, timeout=LONGEST_S, check=False)
    if not written.exists():
        sys.exit(f"the tests of {project.package} did not run over {side}")
    outcomes = {}
    for case in ET.parse(written).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        outcomes[f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"] = outcome
    return outcomes


def counts(outcomes: dict[str, str], name: str | None) -> dict[str, int]:
    """How many tests of a file had which outcome."""
    stem = None if name is None else name.removesuffix(".py")
    of = [each for test, each in outcomes.items() if stem is None or test.partition(".py::")[0].startswith(stem)]
    return {outcome: of.count(outcome) for outcome in ("passed", "failed", "skipped")}


def show(report: dict[str, Any], path: Path) -> None:
    print(f"\n{report['project']} {report['revision']}")
    for name, file in [*report["files"].items(), ("total", report["total"])]:
        cells = [f"{side} {file[side]['passed']} passed, {file[side]['failed']} failed" for side in SIDES]
        print(f"  {name:32} {'; '.join(cells)}; {file['stock']['skipped']} skipped")
    for test in report["lost"]:
        print(f"  only on stock: {test}")
    print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
