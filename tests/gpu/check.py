"""Everything that needs a GPU, in one go and in under eight minutes: `make gpu-check`, or python tests/gpu/check.py

Runs on a machine where nothing can be installed from outside. It needs Python with torch and Triton, a GPU, and this
checkout with build/gpu-bundle in it, which `make gpu-bundle` fills where there is an index and a compiler: geartrain's
wheel for the same version of Python, and what it is tested with (pytest, rich, numpy). What is installed already is
used as it is; the rest is unpacked from the bundle into build/gpu-site, and the wheel's native module beside this
checkout's Python files. Nothing is compiled here but Triton's kernels.

Runs one after the other, each within its share of the time, the rest even if one fails:

    tests        pytest tests/gpu
    fetch        geartrain bench fetch --device cuda
    selection    geartrain bench selection --device cuda
    p2p          geartrain bench p2p --device cuda
    conformance  of selection on the GPU, with the reference

Prints a table, and writes runs/gpu-check.json with all of it and a log of each step beside it. Ends with 0 when
everything passed.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
BUNDLE = ROOT / "build" / "gpu-bundle"
SITE = ROOT / "build" / "gpu-site"
SOURCE = ROOT / "src"
BUDGET_S = 470.0
NEEDED = {
    "torch": "on the machine",
    "triton": "on the machine",
    "numpy": "carried",
    "pytest": "carried",
    "rich": "carried",
}
PURE = ["pytest", "pytest-timeout", "pluggy", "iniconfig", "packaging", "pygments", "rich", "markdown-it-py", "mdurl"]
#: bench fetch: system, bytes of a row, least share of the floor that is to be reached.
GOALS = {"rows of 4 KB": 0.7, "rows of 100 KB": 0.9, "rows of 1000 KB": 0.9}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", action="store_true", help="fill build/gpu-bundle (needs an index and a compiler)")
    parser.add_argument("--dry-run", action="store_true", help="do all but what needs a GPU")
    parser.add_argument("--json", type=Path, default=ROOT / "runs" / "gpu-check.json")
    given = parser.parse_args()
    if given.bundle:
        return bundle()
    missing = unpack()
    found = {"python": platform.python_version(), **about_gpu()}
    print(", ".join(f"{key} {value}" for key, value in found.items()))
    if missing:
        print("\n".join(missing))
        return 2
    if "gpu" not in found and not given.dry_run:
        print(f"there is no GPU to check: {found.get('why', '')}")
        return 2
    steps = dry_steps() if given.dry_run else gpu_steps(given.json.parent)
    found |= about_memory()
    result: dict[str, Any] = {"machine": found, "steps": {}}
    given.json.parent.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    names = list(steps)
    for i, name in enumerate(names):
        command, _, report = steps[name]
        # Whatever one step takes, those behind it get what they need.
        kept_s = sum(steps[later][1] for later in names[i + 1 :])
        left_s = BUDGET_S - (time.monotonic() - began_s) - kept_s
        log = given.json.parent / f"gpu-check-{name}.log"
        result["steps"][name] = run(name, command, max(10.0, left_s), report, log)
        result["seconds"] = round(time.monotonic() - began_s, 1)
        result["goals"] = goals(result["steps"].get("fetch", {}).get("report"))
        given.json.write_text(json.dumps(result, indent=1) + "\n")  # complete or not: somebody may end us
    show(result)
    print(f"written to {given.json}")
    return 0 if all(step["passed"] for step in result["steps"].values()) else 1


Step = tuple[list[str], float, Path | None]


def gpu_steps(runs: Path) -> dict[str, Step]:
    """What is run, in this order: command, seconds kept for it, the JSON that it writes."""
    python = sys.executable
    fetch, selection, p2p = (runs / f"gpu-{name}.json" for name in ("fetch", "selection", "p2p"))
    pytest = [python, "-m", "pytest", "-vv", "--tb=short", "--durations=15", "-p", "no:cacheprovider"]
    # Compiling, and starting processes that import torch, takes most of the time: files side by side.
    beside = ["-n", "6", "--dist", "loadfile"] if importlib.util.find_spec("xdist") else []
    # The largest stores of the bench have 4 GB, with --quick 2.
    quick = ["--quick"] if shutil.disk_usage("/dev/shm").free < 6e9 else []
    return {
        "tests": ([*pytest, *beside, "tests/gpu"], 120, None),
        "fetch": ([python, "-m", "geartrain_bench.fetch.bench", *quick, "--json", str(fetch)], 150, fetch),
        "selection": (
            [python, "-m", "geartrain_bench.selection.gpu", "--quick", "--json", str(selection)],
            60,
            selection,
        ),
        "p2p": ([python, "-m", "geartrain_bench.messages.gpu", "--quick", "--json", str(p2p)], 60, p2p),
        "conformance": ([*pytest, "-k", "cuda", "tests/selection/test_selection_conformance.py"], 60, None),
    }


def dry_steps() -> dict[str, Step]:
    """The same machinery where there is no GPU: everything is imported and collected, and the bench runs its paths."""
    code = "import geartrain, torch, triton, rich, pytest; print('geartrain', geartrain.__version__)"
    bench = "from geartrain_bench.fetch import bench; bench.main_cpu(quick=True)"
    return {
        "imports": ([sys.executable, "-c", code], 60, None),
        "tests": ([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"], 60, None),
        "fetch": ([sys.executable, "-c", bench], 120, None),
    }


def run(name: str, command: list[str], timeout_s: float, report: Path | None, log: Path) -> dict[str, Any]:
    """One step; its output goes to a file as it comes, and its last lines are kept."""
    print(f"== {name}, at most {timeout_s:.0f} s: {' '.join(command)}", flush=True)
    began_s = time.monotonic()
    if report is not None:
        report.unlink(missing_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = 124
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            process.wait()
    lines = log.read_text(errors="replace").splitlines()
    print("\n".join(lines[-60:]), flush=True)
    step: dict[str, Any] = {
        "command": " ".join(command), "passed": code == 0, "code": code,
        "seconds": round(time.monotonic() - began_s, 1), "last_lines": lines[-30:],
    }  # fmt: skip
    if report is not None and report.exists():
        step["report"] = json.loads(report.read_text())
    return step


def goals(report: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What was to be reached, beside what was."""
    if report is None:
        return []
    rows = [row for row in report["rows"] if row["metric"] == "batches to the device"]
    found = []
    for start, share in GOALS.items():
        mine = [row for row in rows if row["case"].startswith(start + ",")]
        paths = [f"geartrain {path}" for path in ("gather", "copy", "staged")]
        ours = max((r for r in mine if r["system"] in paths), key=lambda r: r["p50"])
        peer = next(row for row in mine if row["system"] == "index_select, pinned copy")
        found.append(
            {
                "case": ours["case"], "path": ours["system"], "gb_per_s": ours["p50"],
                "of_floor": ours["ratio_to_floor"],
                "goal": share, "times_index_select": ours["p50"] / peer["p50"], "goal_times": 3.0,
            }
        )  # fmt: skip
    return found


def show(result: dict[str, Any]) -> None:
    """The table."""
    print(f"\n{'step':<14}{'passed':<8}{'seconds':>8}")
    for name, step in result["steps"].items():
        print(f"{name:<14}{'yes' if step['passed'] else 'NO':<8}{step['seconds']:>8}")
    if result["goals"]:
        print(f"\n{'case':<34}{'path':<18}{'GB/s':>7}{'of floor':>10}{'goal':>6}{'x index_select':>16}{'goal':>6}")
    for goal in result["goals"]:
        print(
            f"{goal['case']:<34}{goal['path']:<18}{goal['gb_per_s']:>7.1f}{goal['of_floor']:>10.2f}{goal['goal']:>6}"
            f"{goal['times_index_select']:>16.1f}{goal['goal_times']:>6}"
        )
    print(f"\n{result['seconds']} s in all")


# --- what it runs with -------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Paths to what was unpacked, and nothing that makes Triton interpret."""
    paths = [str(SOURCE), str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    made = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_DEFAULT_FP_FUSION": "0"}
    made.pop("TRITON_INTERPRET", None)
    return made


def unpack() -> list[str]:
    """Unpacks from the bundle what is not installed; returns what is missing, and how to get it."""
    SITE.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(SITE))
    wheels = sorted(BUNDLE.glob("*.whl"))
    for wheel in wheels:
        name = wheel.name.split("-")[0].lower().replace("_", "-")
        module = {"pytest-timeout": "pytest_timeout", "markdown-it-py": "markdown_it"}.get(name, name.replace("-", "_"))
        if not fits(wheel):
            continue
        with zipfile.ZipFile(wheel) as archive:
            if name == "geartrain" and older_than(wheel):
                for member in archive.namelist():
                    if member.startswith("geartrain/_native") and member.endswith(".so"):
                        archive.extract(member, SOURCE)
            elif name != "geartrain" and importlib.util.find_spec(module) is None:
                archive.extractall(SITE)
    importlib.invalidate_caches()
    missing = [
        f"{name} is missing ({where})" for name, where in NEEDED.items() if importlib.util.find_spec(name) is None
    ]
    if not native():
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        names = ", ".join(wheel.name for wheel in wheels) or "nothing"
        missing.append(
            f"geartrain's wheel for {tag} on {platform.machine()} is missing; build/gpu-bundle has {names}. Run "
            f"`make gpu-bundle PYTHON=python{sys.version_info.major}.{sys.version_info.minor}` where there is an index "
            "and a compiler, and carry build/gpu-bundle here"
        )
    return missing


def native() -> list[Path]:
    """The checkout's native module, under a name that this Python imports: its own, or that of the stable ABI."""
    made = (SOURCE / "geartrain" / f"_native{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return [module for module in made if module.exists()]


def older_than(wheel: Path) -> bool:
    """Whether there is no native module here, or one that is older than the bundle's."""
    return all(module.stat().st_mtime < wheel.stat().st_mtime for module in native())


def fits(wheel: Path) -> bool:
    """Whether a wheel is for this interpreter and machine."""
    _, python, abi, system = wheel.stem.rsplit("-", 3)
    mine = f"cp{sys.version_info.major}{sys.version_info.minor}"
    if abi == "abi3":  # of the stable ABI: for that version and all later ones
        fitting = sys.version_info >= (3, int(python.removeprefix("cp3")))
    else:
        fitting = abi in ("none", mine) and ("py3" in python or mine in python)
    return fitting and (system == "any" or platform.machine() in system)


def about_gpu() -> dict[str, str]:
    """Versions of torch and Triton, and the GPU, or why there is none."""
    try:
        import torch
        import triton
    except ImportError as error:
        return {"why": str(error)}
    found = {"torch": torch.__version__, "triton": triton.__version__}
    if not torch.cuda.is_available():
        return {**found, "why": f"torch {torch.__version__} finds no CUDA device"}
    return {**found, "gpu": torch.cuda.get_device_name(0), "cuda": str(torch.version.cuda)}


def about_memory() -> dict[str, str]:
    """What stores and pinned memory have to fit into."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 1e6:.0f} MB"
    return {"/dev/shm": f"{shutil.disk_usage('/dev/shm').free / 1e9:.1f} GB free", "RLIMIT_MEMLOCK": limit}


def bundle() -> int:
    """Fills build/gpu-bundle."""
    BUNDLE.mkdir(parents=True, exist_ok=True)
    for old in BUNDLE.glob("*.whl"):
        old.unlink()
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(BUNDLE), str(ROOT)], check=True)
    subprocess.run([*pip, "download", "-q", "--no-deps", "-d", str(BUNDLE), *PURE, "numpy"], check=True)
    for wheel in sorted(BUNDLE.glob("*.whl")):
        print(f"{wheel.stat().st_size / 1e6:6.1f} MB  {wheel.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
