"""Figures of processes and stores that should not grow, and whether they did."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import geartrain as gt


class Sample(NamedTuple):
    """Of one instant: private memory, shared memory that is mapped, threads, open files, files of segments, spans."""

    at_s: float
    private_mb: float
    shared_mb: float
    threads: int
    descriptors: int
    segments: int
    segments_mb: float
    journal_mb: float
    spans_kb: float


#: What a figure may grow by: a share of what it was, and so much more. Python's memory moves by arenas of 1 MB. Rings
#: of connections are mapped page by page as messages pass through them: 2 MB for each of two actors and the second
#: rank, which ten minutes need not fill twice, and 1 MB of its link for all-reduces.
ALLOWED = {
    "private_mb": (0.03, 12.0),
    "shared_mb": (0.01, 7.0),
    "threads": (0.0, 2.0),
    "descriptors": (0.0, 4.0),
    "segments": (0.0, 1.0),
    "segments_mb": (0.01, 1.0),
    "spans_kb": (0.1, 2.0),
}
#: A journal takes at most twice the living rows, two files of 64 MB and the one that is being written.
JOURNAL_SHARE, JOURNAL_MB = 2.0, 3 * 67.2


@dataclass
class Growth:
    """A figure early and late, at most, and whether it grew by more than is allowed; of a journal medians."""

    figure: str
    early: float
    late: float
    grew: bool


def sample(pids: Sequence[int], at_s: float, segments: Path, journal: Path, tasks: str) -> Sample:
    """Looks at processes, two folders, and the store with tasks. Raises `OSError` where a process has ended."""
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    statuses = [dict(line.split(":", 1) for line in text.splitlines() if ":" in line) for text in texts]
    files = sizes(segments)
    with gt.Store.open(tasks, mode="r", adopt=True) as store:
        stats = store.stats()
    return Sample(
        at_s,
        sum(int(status["RssAnon"].split()[0]) for status in statuses) / 1024,
        sum(int(status["RssShmem"].split()[0]) for status in statuses) / 1024,
        sum(int(status["Threads"]) for status in statuses),
        sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        len(files),
        sum(files) / 1e6,
        sum(sizes(journal)) / 1e6,
        (stats["span_bytes"] - stats["free_span_bytes"]) / 1e3,
    )


def sizes(folder: Path) -> list[int]:
    """Of the files in a folder and below it; those that go meanwhile are left out."""
    found = []
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                found.append(path.stat().st_size)
        except OSError:
            continue
    return found


def _high(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[round(0.99 * (len(ordered) - 1))]


def growths(samples: list[Sample]) -> list[Growth]:
    """Each figure between a tenth and a third of the time, and in its last quarter: what it was at most, but for 1 %.

    How many peers are connected follows from the kills and the load, and medians with it; what all of them need at once
    does not, and a leak adds to it.
    """
    end_s = samples[-1].at_s if samples else 0.0
    early = [one for one in samples if 0.1 * end_s <= one.at_s <= 0.33 * end_s]
    late = [one for one in samples if one.at_s >= 0.75 * end_s]
    found: list[Growth] = []
    if not early or not late:
        return found  # the learner ended before it was looked at
    for figure, (share, more) in ALLOWED.items():
        before, after = (_high(float(getattr(one, figure)) for one in samples) for samples in (early, late))
        found.append(Growth(figure, before, after, after > before * (1 + share) + more))
    journals = [one.journal_mb for one in early], [one.journal_mb for one in late]
    most = JOURNAL_SHARE * median(one.segments_mb for one in late) + JOURNAL_MB
    found.append(Growth("journal_mb", median(journals[0]), median(journals[1]), max(journals[1]) > most))
    return found
