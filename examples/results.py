"""Reproduces the results of docs/results.md: runs each command, keeps its curve, and compares it with its target.

    python examples/results.py                  # everything, one after the other
    python examples/results.py hopper dqn-atari   # some of them
    python examples/results.py --list           # what there is

Curves (JSON), pictures (PNG), what was printed (log) and a summary go to runs/results. Exit code 1: a target
was missed. A new result is one more `Result` in the table below: a command that writes --curve and --plot by
`curves.Curve`, and a figure of it with a bound.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich import console, table

import curves

HERE = Path(__file__).parent
TORCHRUN = "torchrun --standalone --nproc-per-node"


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        command: what is run, without --curve and --plot; "python" and "torchrun" are those of this environment.
        target: in words. figure, at_least, at_most: of the curve's result, what that means.
        follows: another result, whose losses this one's must follow within `apart` (relative, largest over the steps).
    """

    command: str
    target: str
    figure: str
    at_least: float = float("-inf")
    at_most: float = float("inf")
    timeout_s: float = 3600.0
    follows: str | None = None
    apart: float = 0.0


RESULTS = {
    "hopper": Result(
        "python examples/offline_gato_hopper.py --seed 0",
        "95 % of the expert over 10 episodes, within 8 minutes of training",
        "share_of_expert",
        at_least=0.95,
    ),
    "pipeline": Result(
        f"{TORCHRUN} 2 examples/pipeline_gato.py --seed 0",
        "95 % of the expert in two stages; the losses of one process",
        "share_of_expert",
        at_least=0.95,
        follows="hopper",
        apart=0.01,
    ),
    "replicas": Result(
        f"{TORCHRUN} 2 examples/pipeline_gato.py --stages 1 --seed 0",
        "95 % of the expert on two replicas; the losses of one process",
        "share_of_expert",
        at_least=0.95,
        follows="hopper",
        apart=0.01,
    ),
    "dqn-atari": Result(
        "python examples/online_dqn_atari.py --steps 6000 --eval-episodes 5 --seed 0",
        "Freeway: 15 points above random actions",
        "gain",
        at_least=15.0,
    ),
    "mat-3m": Result(
        "python examples/online_mat_smax.py --task smax/3m --seed 0",
        "SMAX 3m: wins 85 % of its battles, with greedy actions",
        "greedy",
        at_least=0.85,
    ),
    "mat-2s3z": Result(
        "python examples/online_mat_smax.py --task smax/2s3z --minibatches 8 --steps 500000 --seconds 780 --seed 0",
        "SMAX 2s3z: wins 40 % of its battles, with greedy actions",
        "greedy",
        at_least=0.4,
    ),
    "sac-fetch": Result(
        "python examples/online_sac_fetch.py --seed 0",
        "FetchReach: at the goal at the end of 90 % of the episodes",
        "success",
        at_least=0.9,
    ),
    "gato-small": Result(
        "python examples/offline_gato_small.py --seed 0",
        "Hopper, HalfCheetah, Freeway by one model: 75 % of the way from random actions to the experts, mean of tasks",
        "share_of_experts",
        at_least=0.75,
        timeout_s=7200.0,
    ),
}


def run(name: str, result: Result, out: Path) -> dict[str, object]:
    """Runs one of them; what came of it, as a line of the summary."""
    curve, log = out / f"{name}.json", out / f"{name}.log"
    curve.unlink(missing_ok=True)
    words = result.command.split()
    here = Path(sys.executable).parent
    program = [sys.executable] if words[0] == "python" else [str(here / words[0])]
    command = [*program, *words[1:], "--curve", str(curve), "--plot", str(out / f"{name}.png")]
    began_s = time.perf_counter()
    why = ""
    with log.open("w") as printed:
        try:
            done = subprocess.run(
                command,
                cwd=HERE.parent,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                timeout=result.timeout_s,
                check=False,
            )
            why = f"exit code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            why = f"not done after {result.timeout_s:.0f} s"
    line: dict[str, object] = {"command": result.command, "wall_s": time.perf_counter() - began_s}
    if not curve.exists():
        return line | {"met": False, "why": f"{why or 'no curve'}; see {log}"}
    found = json.loads(curve.read_text())
    measured = found["result"][result.figure]
    line |= {"figure": result.figure, "measured": measured, "cpu_s": found["result"]["cpu_s"]}
    line["train_s"] = found["result"].get("train_s", found["result"]["wall_s"])
    met = result.at_least <= measured <= result.at_most and not why
    if result.follows:
        other = out / f"{result.follows}.json"
        if not other.exists():
            return line | {"met": False, "why": f"run {result.follows} first: its losses are to be compared with"}
        apart = distance(found["losses"], json.loads(other.read_text())["losses"])
        line["losses_apart"] = apart
        met = met and apart <= result.apart
        why = why or f"losses at most {100 * apart:.2g} % from those of {result.follows}"
    return line | {"met": met, "why": why}


def distance(mine: list[float], others: list[float]) -> float:
    """The largest relative distance of two curves of losses; infinite when they are not of one length."""
    if len(mine) != len(others):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(mine, others, strict=True))


def shown(lines: dict[str, dict[str, object]]) -> table.Table:
    out = table.Table("result", "measured", "target", "wall", "CPU", "met", "")
    for name, line in lines.items():
        result = RESULTS[name]
        measured = f"{line['figure']} {line['measured']:.3g}" if "measured" in line else "–"
        cpu = f"{line['cpu_s']:.0f} s" if "cpu_s" in line else ""
        met = "[green]yes" if line["met"] else "[red]no"
        out.add_row(name, measured, result.target, f"{line['wall_s']:.0f} s", cpu, met, str(line["why"]))
    return out


def markdown(lines: dict[str, dict[str, object]]) -> str:
    """The summary as docs/results.md has it."""
    out = [
        "| result | target | measured | training, s | all, s | CPU, s | command |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, line in lines.items():
        if name in RESULTS and "measured" in line:
            figure = f"{line['measured']:.3g}" + ("" if line["met"] else ", **not met**")
            times = f"{line['train_s']:.0f} | {line['wall_s']:.0f} | {line['cpu_s']:.0f}"
            out.append(f"| {name} | {RESULTS[name].target} | {figure} | {times} | `{line['command']}` |")
    return "\n".join(out)


def main(arguments: list[str] | None = None) -> int:
    text = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(RESULTS)} (all)")
    text.add_argument("--out", type=Path, default=Path("runs/results"), help="where everything goes (runs/results)")
    text.add_argument("--list", action="store_true", help="print the commands and run nothing")
    text.add_argument("--markdown", action="store_true", help="print what is in --out as a table, and run nothing")
    chosen = text.parse_args(arguments)
    unknown = set(chosen.names) - set(RESULTS)
    if unknown:
        text.error(f"there is no result named {', '.join(sorted(unknown))}; there are {', '.join(RESULTS)}")
    screen = console.Console()
    if chosen.list:
        for name, result in RESULTS.items():
            screen.print(f"[bold]{name}[/]: {result.target}\n    {result.command}", soft_wrap=True)
        return 0
    out = chosen.out.absolute()
    if chosen.markdown:
        print(markdown(json.loads((out / "summary.json").read_text())))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    lines: dict[str, dict[str, object]] = {}
    summary = out / "summary.json"  # of all that were run, now or earlier
    before = json.loads(summary.read_text()) if summary.exists() else {}
    names = [name for name in RESULTS if not chosen.names or name in chosen.names]
    with curves.bars(screen) as bars:
        bar = bars.add_task("results", total=len(names))
        for name in names:
            bars.update(bar, description=name)
            lines[name] = run(name, RESULTS[name], out)
            bars.advance(bar)
            summary.write_text(json.dumps(before | lines, indent=1))
    screen.print(shown(lines))
    return 0 if all(line["met"] for line in lines.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
