"""Runs another project's own tests, unmodified, over its stock classes and over geartrain's: `make upstream`.

    python tests/upstream/run.py sb3 [SOURCE] [--tests GLOB ...] [--json PATH] [-- pytest arguments]

SOURCE is an sdist, a wheel that ships tests, or the folder of a checkout; without it the sdist of the installed version
is downloaded, where there is one. It is unpacked or copied to a temporary folder, and both runs import the project from
there; where the project says so, the installed package is copied over the checkout's before.

Printed, and written as JSON: the revision, each file with its digest, and what passed, failed and was skipped on either
side. Judged are the cases that pass on stock and have made something of geartrain's, if the plug-in tells that. Exits
with 1 when one of them does not pass on geartrain's and is not among those that differ on purpose.

`torch`, whose tests come installed, has a runner of its own (torch_distributed.py), and so has `rlinf`, which has no
tests of the class that is substituted (rlinf_differential.py).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
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

import rlinf_differential
import torch_distributed
from projects import PROJECTS, Project

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SIDES = ("stock", "geartrain")
#: Longest run of one side's tests, in seconds.
LONGEST_S = 3600


def main() -> int:
    if sys.argv[1:2] == ["torch"]:
        return torch_distributed.main(sys.argv[2:])
    if sys.argv[1:2] == ["rlinf"]:
        return rlinf_differential.main(sys.argv[2:])
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
        if project.installed:
            report["over"] = f"{project.package} {importlib.metadata.version(project.package)} as installed"
            use_installed(project, tree)
        results, messages, substituted = {}, {}, {}
        for side in SIDES:
            results[side], messages, substituted = run(side, project, tree, files, extra)
    for name in report["files"]:
        for side in SIDES:
            report["files"][name][side] = counts(results[side], name)
    report["total"] = {side: counts(results[side], None) for side in SIDES}
    passed = {test for test, outcome in results["stock"].items() if outcome == "passed"}
    judged = sorted(passed & {test for test, made in substituted.items() if made} if substituted else passed)
    lost = [test for test in judged if results["geartrain"].get(test) != "passed"]
    report["apart"] = {
        reason: sorted(test for test in lost if any(each in f"{test} {messages.get(test, '')}" for each in parts))
        for reason, parts in project.apart.items()
    }
    apart = {test for tests in report["apart"].values() for test in tests}
    report["judged"] = {
        "cases": len(judged) - len(apart),
        "passed": len(judged) - len(lost),
        "apart": len(apart),
    }
    report["lost"] = [test for test in lost if test not in apart]
    path = options.json or ROOT / "runs" / f"upstream-{options.project}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    show(report, path)
    return 1 if report["lost"] else 0


def use_installed(project: Project, tree: Path) -> None:
    """Puts the installed package in the place of the checkout's, with its extension for the installed torch."""
    found = importlib.util.find_spec(project.folder)
    if found is None or not found.submodule_search_locations:
        sys.exit(f"{project.package} is not installed")
    package = tree / project.folder
    shutil.rmtree(package)
    shutil.copytree(found.submodule_search_locations[0], package, ignore=shutil.ignore_patterns("__pycache__"))
    module = f"{project.folder}._{project.folder}"
    loads = [sys.executable, "-c", f"import torch, {module}"]
    if not project.extension or not subprocess.run(loads, cwd=tree, capture_output=True, check=False).returncode:
        return
    print(f"--- {module} does not load with the installed torch: it is compiled for it", flush=True)
    built = tree.parent / "extension"
    built.mkdir()
    build = (
        "import sys; from torch.utils.cpp_extension import load; load(sys.argv[1], sys.argv[3:], build_directory="
        "sys.argv[2], extra_cflags=['-O1', '-std=c++20'], is_python_module=False)"
    )
    sources = [str(package / name) for name in project.extension]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    command = [sys.executable, "-c", build, module.rpartition(".")[2], str(built), *sources]
    subprocess.run(command, env=environment, check=True, timeout=LONGEST_S)
    for old in package.glob(f"_{project.folder}.*.so"):
        old.unlink()
    shutil.copy(built / f"_{project.folder}.so", package)


def download(project: Project, folder: Path) -> Path:
    """The sdist of the installed version."""
    if project.sources:
        sys.exit(f"{project.package} has no sdist with tests: give a checkout's folder as SOURCE")
    version = importlib.metadata.version(project.package)
    if project.installed:
        sys.exit(f"{project.package} has no sdist: give a checkout's folder near {version} as SOURCE")
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
    inside = Path(project.sources) / project.folder
    found = sorted(into.rglob(f"{inside}/__init__.py"), key=lambda path: len(path.parts))
    if not found:
        sys.exit(f"{source} holds no package {inside}")
    return found[0].parents[len(inside.parts)]


def revision(source: Path, tree: Path, project: Project) -> str:
    """A checkout's commit, or an archive's version and digest."""
    if source.is_dir():
        command = ["git", "-C", str(source), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False)
        if commit.returncode == 0:
            return commit.stdout.strip()
    written = tree / project.sources / project.folder / "version.txt"
    version = written.read_text().strip() if written.exists() else importlib.metadata.version(project.package)
    return version if source.is_dir() else f"{version} ({source.name}, sha256 {digest(source)})"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def versions() -> dict[str, str]:
    names = ("numpy", "torch", "gymnasium", "pytest")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def run(
    side: str, project: Project, tree: Path, files: list[Path], extra: list[str]
) -> tuple[dict[str, str], dict[str, str], dict[str, int]]:
    """Outcomes by test, what failures said, and how many objects of geartrain's each has made, if the plug-in tells."""
    written = tree.parent / f"{side}.xml"
    plugin = ["-p", project.plugin] if side == "geartrain" else []
    paths = [str(tree / project.sources), str(tree), str(HERE / "plugins"), os.environ.get("PYTHONPATH", "")]
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
        *project.options,
        *extra,
    ]
    print(f"--- {side}: {project.package}, {len(files)} files", flush=True)
    subprocess.run(command, cwd=tree, env=environment, timeout=LONGEST_S, check=False)
    if not written.exists():
        sys.exit(f"the tests of {project.package} did not run over {side}")
    outcomes, messages, substituted = {}, {}, {}
    for case in ET.parse(written).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        outcomes[test] = outcome
        messages[test] = " ".join(child.get("message", "") for child in case if child.tag in ("failure", "error"))
        for each in case.iter("property"):
            if each.get("name") == "substituted":
                substituted[test] = int(each.get("value", "0"))
    return outcomes, messages, substituted


def counts(outcomes: dict[str, str], name: str | None) -> dict[str, int]:
    """How many tests of a file had which outcome."""
    stem = None if name is None else name.removesuffix(".py")
    of = [each for test, each in outcomes.items() if stem is None or test.partition(".py::")[0].startswith(stem)]
    return {outcome: of.count(outcome) for outcome in ("passed", "failed", "skipped")}


def show(report: dict[str, Any], path: Path) -> None:
    print(f"\n{report['project']} {report['revision']}{', over ' + report['over'] if 'over' in report else ''}")
    for name, file in [*report["files"].items(), ("total", report["total"])]:
        cells = [f"{side} {file[side]['passed']} passed, {file[side]['failed']} failed" for side in SIDES]
        print(f"  {name:32} {'; '.join(cells)}; {file['stock']['skipped']} skipped")
    judged = report["judged"]
    print(f"  judged: {judged['cases']} cases that pass on stock and use ours, {judged['passed']} pass on ours")
    for reason, tests in report["apart"].items():
        print(f"  apart: {len(tests)} cases, {reason}")
    for test in report["lost"]:
        print(f"  only on stock: {test}")
    print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
