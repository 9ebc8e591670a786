"""Runs PyTorch's own tests of torch.distributed over Gloo and over geartrain: `make upstream PROJECT=torch`.

    python tests/upstream/run.py torch [--ranks N ...] [--short] [--cases EXPRESSION] [--json PATH]

The cases are those of `torch.testing._internal.distributed.distributed_test`, which the installed torch has
(plugins/torch_cases.py). They name the backend "gloo", and run once on that and once on geartrain's. All-to-alls are
kept for the name "mpi", and run under that, which stands for either as well. Judged are the cases that pass on Gloo.
What fails on either side runs there once more, alone.

Printed, and written as JSON: torch's version, the digest of the file of the cases, what passed, failed and was skipped
on either side for every number of ranks, and the calls of torch's methods that geartrain made and that it left to Gloo.
Exits with 1 when a judged case does not pass on geartrain, and is not among those that differ on purpose.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SIDES = ("stock", "geartrain")
CASES = HERE / "plugins" / "torch_cases.py"
NAMES = {"gloo": "", "mpi": "all_to_all and not cuda"}  # of backends, and the cases run under each
#: What torch's testing package imports and torch does not depend on: installed for the run where it is missing.
NEEDS = ("expecttest==0.3.0",)
LONGEST_S = 3600
#: Every collective in about 40 s.
SHORT = (
    "(test_all_reduce_sum or test_all_reduce_product or test_all_reduce_coalesced_max or test_reduce_full_group_min "
    "or test_reduce_product or test_all_gather_coalesced_simple or test_gather_checks "
    "or test_scatter_full_group or test_broadcast or test_barrier_timeout_full_group or test_barrier_full_group "
    "or test_monitored_barrier_gloo or test_all_to_all_single_unequal_split or test_send_recv_any_source "
    "or test_accumulate_gradients_no_sync_allreduce_hook) and not cuda and not complex and not profiler and not object"
)
APART = {"the name of the backend, which is geartrain": ("test_get_backend",)}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", help="default: 2 3 4, or 3 with --short")
    parser.add_argument("--short", action="store_true", help="some cases of each collective")
    parser.add_argument("--cases", default="", help="pytest's -k")
    parser.add_argument("--json", type=Path, default=ROOT / "runs" / "upstream-torch.json")
    options = parser.parse_args(arguments)
    import torch

    cases = Path(torch.__file__).parent / "testing" / "_internal" / "distributed" / "distributed_test.py"
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "cases": {"file": "torch/testing/_internal/distributed/distributed_test.py", "sha256": digest(cases)},
        "geartrain": head.stdout.strip(),
        "ranks": {},
    }
    with tempfile.TemporaryDirectory(prefix="geartrain-upstream-") as folder:
        packages = needed(Path(folder) / "packages")
        for ranks in options.ranks or ([3] if options.short else [2, 3, 4]):
            found = judged(
                Run(ranks, Path(folder), packages), " and ".join(filter(None, [options.short and SHORT, options.cases]))
            )
            report["ranks"][ranks] = found
            show(ranks, found)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"torch {report['torch']}; written to {options.json}")
    return 1 if any(found["lost"] or not found["judged"] for found in report["ranks"].values()) else 0


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def needed(folder: Path) -> Path:
    """A folder of what torch's testing package needs and is not installed."""
    missing = [need for need in NEEDS if importlib.util.find_spec(need.partition("==")[0]) is None]
    folder.mkdir()
    if missing:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *missing]
        subprocess.run(command, check=True, timeout=600)
    return folder


class Run:
    """Runs of cases at one number of ranks."""

    def __init__(self, ranks: int, folder: Path, packages: Path) -> None:
        self.ranks = ranks
        self.folder = folder
        self.packages = packages
        self.calls = folder / f"calls-{ranks}"

    def __call__(self, side: str, name: str, *, expression: str = "", tests: list[str] | None = None) -> dict[str, str]:
        """The outcomes of cases, by name."""
        if tests == []:
            return {}
        written = self.folder / f"{side}.xml"
        written.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(CASES.parent), str(self.packages), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "BACKEND": name,
            "WORLD_SIZE": str(self.ranks),
            "INIT_METHOD": f"file://{self.folder / 'init'}",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "100",
            "GEARTRAIN_ALLREDUCE": "1" if side == "geartrain" else "0",
            "GEARTRAIN_TEST_UPSTREAM_CALLS": str(self.calls) if side == "geartrain" else os.devnull,
        }
        environment.pop("PYTEST_ADDOPTS", None)
        given = [str(CASES)] if tests is None else [f"{CASES}::TestDistributed::{test}" for test in tests]
        ids = self.folder / "ids"
        ids.write_text("\n".join(given) + "\n")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "--no-header"]
        command += ["--tb=short", "-W", "ignore", "--timeout=600", "-o", "addopts=", f"--junitxml={written}"]
        command += [f"--rootdir={CASES.parent}", *(["-k", expression] if expression else []), f"@{ids}"]
        print(f"--- {side}: {self.ranks} ranks, {len(tests) if tests is not None else 'all'} cases", flush=True)
        with (self.folder / "log").open("w+") as log:  # of pytest, whose passed cases say much about leaks
            subprocess.run(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, timeout=LONGEST_S, check=False
            )
            log.seek(0)
            text = log.read()
        if not written.exists():
            sys.exit(f"{text}\nthe cases did not run over {side}")
        outcomes = {}
        for case in ET.parse(written).iter("testcase"):
            kinds = {child.tag for child in case}
            failed = kinds & {"failure", "error"}
            outcomes[case.get("name", "")] = "failed" if failed else "skipped" if "skipped" in kinds else "passed"
            for child in case:
                if failed and child.text:
                    print(f"{case.get('name')} on {side}:", *child.text.splitlines()[-40:], sep="\n    ")
        return outcomes

    def twice(self, side: str, name: str, **what: Any) -> tuple[dict[str, str], list[str]]:
        """The outcomes, and which of them are those of a second run."""
        outcomes = self(side, name, **what)
        failed = [test for test, outcome in outcomes.items() if outcome == "failed"]
        again = self(side, name, tests=failed) if len(failed) < 20 else {}
        return {**outcomes, **again}, [test for test, outcome in again.items() if outcome == "passed"]


def judged(run: Run, expression: str) -> dict[str, Any]:
    """What one number of ranks comes to."""
    found: dict[str, Any] = {side: Counter() for side in SIDES} | {"second": [], "judged": 0, "lost": [], "apart": {}}
    for name, of_name in NAMES.items():
        asked = " and ".join(f"({part})" for part in (of_name, expression) if part)
        stock, again = run.twice("stock", name, expression=asked)
        passed = [test for test, outcome in stock.items() if outcome == "passed"]
        ours, ours_again = run.twice("geartrain", name, tests=passed)
        found["second"] += [f"{test} on stock" for test in again] + [f"{test} on geartrain" for test in ours_again]
        found["stock"].update(stock.values())
        found["geartrain"].update(ours.values())
        found["judged"] += len(passed)
        lost = [test for test in passed if ours.get(test) != "passed"]
        for reason, tests in APART.items():
            found["apart"].setdefault(reason, []).extend(test for test in lost if test in tests)
        found["lost"] += [test for test in lost if not any(test in tests for tests in APART.values())]
    ours_calls, inner = Counter[str](), Counter[str]()
    groups = 0
    with contextlib.suppress(FileNotFoundError):
        for line in run.calls.read_text().splitlines():
            rank = json.loads(line)
            groups += rank["groups"]
            ours_calls.update(rank["ours"])
            inner.update(rank["inner"])
    if found["judged"] and not groups:
        sys.exit("no group of geartrain's was made: nothing was substituted")
    return found | {"calls": {"ours": ours_calls, "inner": inner}}


def show(ranks: int, found: dict[str, Any]) -> None:
    stock = found["stock"]
    apart = sum(len(tests) for tests in found["apart"].values())
    print(
        f"{ranks} ranks: Gloo {stock['passed']} passed, {stock['failed']} failed, {stock['skipped']} skipped; "
        f"of the {found['judged']} that pass, geartrain {found['geartrain']['passed']}, apart {apart}"
    )
    print("  made by geartrain:", ", ".join(f"{name} {n}" for name, n in sorted(found["calls"]["ours"].items())))
    print("  left to Gloo:", ", ".join(f"{name} {n}" for name, n in sorted(found["calls"]["inner"].items())) or "none")
    for reason, tests in found["apart"].items():
        print(f"  apart, {reason}: {', '.join(tests) or 'none'}")
    for test in found["second"]:
        print(f"  passed at the second time: {test}")
    for test in found["lost"]:
        print(f"  only on Gloo: {test}")
