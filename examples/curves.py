"""Learning curves of the examples, as JSON and PNG, and the options that the examples share.

A curve is a JSON file: what was run, the points (x, y, seconds since the start), lines to compare with, and the figures
that `results.py` compares with targets. `python examples/curves.py CURVE.json PICTURE.png` draws one again, and of
several curves (CURVE.json OTHER.json PICTURE.png) one picture.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rich import console, progress

FORMAT = "geartrain-curve-1"


def options(about: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The options that every example has; `defaults` for those that an example wants otherwise."""
    text = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    text.add_argument("--seed", type=int, default=0, help="everything random follows from it (0)")
    text.add_argument("--curve", type=Path, help="write the learning curve here (JSON)")
    text.add_argument("--plot", type=Path, help="draw the learning curve here (PNG)")
    text.add_argument("--tiny", action="store_true", help="a few small steps: does it run?")
    text.set_defaults(**defaults)
    return text


def prepare() -> None:
    """One thread for torch, which repeats bit for bit and leaves the cores to the other processes; `kill` cleans up."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds as Ctrl-C does, so stores are taken away


def bars(screen: console.Console | None = None) -> progress.Progress:
    """Progress bars with a count, the time, and room for a few words; of no height where there is no terminal."""
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn())
    return progress.Progress(*columns, progress.TimeElapsedColumn(), console=screen)


def used_cpu_s() -> float:
    """Of this process and of its children that have ended, in seconds."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Curve:
    """Points of a run as they come, written to --curve and drawn to --plot at its end.

    Args:
        title: of the picture.
        x, y: what the axes count.
        chosen: the parsed options.
        lines: values of y to compare with, by name.
    """

    def __init__(self, title: str, x: str, y: str, chosen: argparse.Namespace, **lines: float) -> None:
        self.began_s = time.perf_counter()
        self.file, self.picture = chosen.curve, chosen.plot
        self.content: dict[str, Any] = {
            "format": FORMAT,
            "title": title,
            "command": " ".join(["python", *sys.argv]),
            "seed": chosen.seed,
            "cores": len(os.sched_getaffinity(0)),
            "x": x,
            "y": y,
            "lines": lines,
            "points": [],
            "result": {},
        }

    def line(self, name: str, y: float) -> None:
        """A value to compare with, such as what random actions get."""
        self.content["lines"][name] = float(y)

    def point(
        self,
        x: float,
        y: float,
        low: float | None = None,
        high: float | None = None,
        wall_s: float | None = -1.0,
        **others: float,
    ) -> None:
        """A measurement, and how far the single episodes lie apart, if there are several; `others` are kept with it.

        It is of this moment, unless `wall_s` tells its seconds since the start, or None that they are not known.
        """
        made = {"x": float(x), "y": float(y), **{name: float(value) for name, value in others.items()}}
        if wall_s is not None:
            made["wall_s"] = round(time.perf_counter() - self.began_s, 2) if wall_s < 0 else wall_s
        if low is not None and high is not None:
            made |= {"low": float(low), "high": float(high)}
        self.content["points"].append(made)
        self._write()  # what a run that is cut short has found

    def finish(self, others_cpu_s: float = 0.0, **result: float) -> dict[str, Any]:
        """Writes what was asked for, and adds wall and processor time.

        `result`: the run's figures, by name. `others_cpu_s`: of processes that are not this one's children.
        """
        self.content["result"] = {
            **{name: float(value) for name, value in result.items()},
            "wall_s": time.perf_counter() - self.began_s,
            "cpu_s": used_cpu_s() + others_cpu_s,
        }
        self._write()
        if self.picture:
            self.picture.parent.mkdir(parents=True, exist_ok=True)
            draw(self.content, self.picture)
        return self.content

    def _write(self) -> None:
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(self.content, indent=1))


def draw(content: dict[str, Any], picture: Path) -> None:
    """The curve as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    points = content["points"]
    x, y = [point["x"] for point in points], [point["y"] for point in points]
    axes.plot(x, y, "o-" if len(x) < 40 else "-", ms=4, color="#08519c")
    if points and all("low" in point for point in points):
        axes.fill_between(x, [p["low"] for p in points], [p["high"] for p in points], color="#9ecae1", alpha=0.5, lw=0)
    for (name, value), color in zip(content["lines"].items(), ("#636363", "#31a354", "#de2d26"), strict=False):
        axes.axhline(value, color=color, ls="--", lw=1, label=name)
    if content["lines"]:
        axes.legend(frameon=False)
    axes.set(xlabel=content["x"], ylabel=content["y"])
    result = content["result"]  # empty where the run was cut short
    cost = f", {result['cpu_s']:.0f} CPU s" if result else ""  # which other jobs on the machine change least
    axes.set_title(f"{content['title']}, seed {content['seed']}{cost}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def draw_together(contents: list[dict[str, Any]], picture: Path) -> None:
    """Curves of several seeds in one picture, those of one title in one color."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    titles = list(dict.fromkeys(content["title"] for content in contents))
    seeds: list[int] = []
    for content in contents:
        number = titles.index(content["title"])
        x, y = zip(*((point["x"], point["y"]) for point in content["points"]), strict=True)
        again = any(line.get_label() == content["title"] for line in axes.lines)
        label = None if again else content["title"]
        axes.plot(x, y, "o-", ms=4, lw=1, alpha=0.8, color=("#08519c", "#e6550d", "#31a354")[number % 3], label=label)
        seeds.append(content["seed"])
    for (name, value), style in zip(contents[0]["lines"].items(), ("--", ":", "-."), strict=False):
        axes.axhline(value, color="#636363", ls=style, lw=1, label=name)
    axes.legend(frameon=False)
    axes.set(xlabel=contents[0]["x"], ylabel=contents[0]["y"])
    axes.set_title(f"seeds {', '.join(map(str, sorted(set(seeds))))}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    read = [json.loads(Path(each).read_text()) for each in sys.argv[1:-1]]
    if len(read) == 1:
        draw(read[0], Path(sys.argv[-1]))
    else:
        draw_together(read, Path(sys.argv[-1]))
