"""Runs the same calls on RLinf's replay buffer and on geartrain's: `make upstream PROJECT=rlinf`.

    python tests/upstream/run.py rlinf [SOURCE] [--cases NAME ...] [--json PATH]

SOURCE is a wheel or the folder of a checkout; without it the wheel of version 0.3.0 is downloaded. RLinf has no tests
of this class: the cases are geartrain's (rlinf_cases.py), and RLinf's own trajectories, builder and datasets take part.

Printed, and written as JSON: the revision, the digests of the files, and which cases pass on either side. Exits with 1
when one that passes on RLinf's class does not on geartrain's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SIDES = ("stock", "geartrain")


def main(arguments: list[str]) -> int:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import rlinf_source
    from rlinf_cases import CASES, Setting

    from geartrain.integrations.rlinf import TrajectoryReplayBuffer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", type=Path)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), metavar="NAME")
    parser.add_argument("--json", type=Path, default=ROOT / "runs" / "upstream-rlinf.json")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="geartrain-upstream-") as name:
        folder = Path(name)
        source = options.source or rlinf_source.downloaded(folder)
        rlinf = rlinf_source.loaded(source.resolve(), folder / "tree")
        outcomes: dict[str, dict[str, str]] = {}
        for case in options.cases or CASES:
            outcomes[case] = {}
            for side, kind in zip(SIDES, (rlinf.buffer, TrajectoryReplayBuffer), strict=True):
                made: list[Any] = []
                place = folder / f"{case}-{side}"
                place.mkdir()
                setting = Setting(rlinf, _kept(kind, made), _kept(rlinf.buffer, made), place)
                outcomes[case][side] = outcome(lambda case=case, setting=setting: CASES[case](setting))
                for buffer in made:
                    buffer.close()
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    passed = {side: [case for case in outcomes if outcomes[case][side] == "passed"] for side in SIDES}
    lost = [case for case in passed["stock"] if case not in passed["geartrain"]]
    report = {"revision": rlinf.revision, "files": rlinf.files, "geartrain": head.stdout.strip(), "cases": outcomes}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"rlinf {rlinf.revision}")
    for case, of in outcomes.items():
        print(f"  {case:28} {'; '.join(f'{side} {of[side]}' for side in SIDES)}")
    print(f"  {len(outcomes)} cases: {', '.join(f'{side} passes {len(passed[side])}' for side in SIDES)}")
    print(f"written to {options.json}")
    return 1 if lost or not passed["stock"] else 0


def _kept(kind: Any, made: list[Any]) -> Callable[..., Any]:
    """Makes buffers, which are closed after the case."""

    def make(**options: Any) -> Any:
        made.append(kind(**options))
        return made[-1]

    return make


def outcome(case: Callable[[], None]) -> str:
    """ "passed", or what it failed by."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).split("\n")[0][:120]
        return f"failed: {type(error).__name__} {text} ({Path(last.filename).name}:{last.lineno})"
    return "passed"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
