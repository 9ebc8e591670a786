"""What processes tell of themselves on the job's board, and what is made of it: rates, shares, the latest figures."""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from geartrain.core.counters import Board, Slot
from geartrain.errors import ArgumentError

#: Figures of a process's own choice: losses, returns.
OWN_FIGURES = 16
#: Those that count up, and go on counting when a process is started again.
COUNTS = ("steps", "samples", "rows", "episodes", "wait_s", "policy_s", "environment_s", "store_s")
COLUMNS = (*COUNTS, "version", "pid", "beat_s", "stop", "own", *(f"own{i}" for i in range(OWN_FIGURES)))
#: Rates are those of the last so many seconds.
WINDOW_S = 5.0


class Teller:
    """A process's side: writes counts and figures to its slot. `slot` is None outside of a launch.

    The figures' names go to a file beside the logs, once each.
    """

    def __init__(self, slot: Slot | None, names: Path | None) -> None:
        self._slot = slot
        self._names_path = names
        self._names: list[str] = []
        if names is not None and names.exists():  # of this process before it was started again
            self._names = json.loads(names.read_text())
        self._before = {} if slot is None else {name: slot[name] for name in COUNTS}

    def count(self, name: str, value: float) -> None:
        """A total of this process since it was started."""
        if self._slot is not None:
            self._slot[name] = self._before[name] + value

    def version(self, version: int) -> None:
        """Of the model that acts, or that was trained last."""
        if self._slot is not None:
            self._slot["version"] = version

    def figure(self, name: str, value: float) -> None:
        """A figure to show. Raises `ArgumentError` for one too many."""
        if name not in self._names:
            if len(self._names) == OWN_FIGURES:
                raise ArgumentError(f"a process shows {OWN_FIGURES} figures at most, and {name!r} is one more")
            self._names.append(name)
            if self._names_path is not None:
                beside = self._names_path.with_suffix(".new")
                beside.write_text(json.dumps(self._names))
                beside.replace(self._names_path)
        if self._slot is not None:
            self._slot[f"own{self._names.index(name)}"] = float(value)
            self._slot["own"] = len(self._names)

    def beat(self) -> None:
        """The process lives and gets on."""
        if self._slot is not None:
            self._slot["beat_s"] = time.time()

    @property
    def told_to_stop(self) -> bool:
        """Whether the launcher wants the process to end."""
        return self._slot is not None and self._slot["stop"] != 0.0


@dataclass
class Seen:
    """A process as its slot showed it at some time.

    Attributes:
        counts: COUNTS, since the job began.
        rates: the same per second, of the last seconds.
        version: None before there was one.
        own: figures of its own, by name.
    """

    counts: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    version: int | None = None
    own: dict[str, float] = field(default_factory=dict)


class Watch:
    """The launcher's side: looks at all slots now and then, and knows the rates."""

    def __init__(self, board: Board, names: list[Path]) -> None:
        self._slots = [board.slot(number) for number in range(board.slots)]
        self._paths = names
        self._own: list[list[str]] = [[] for _ in names]
        self._past: deque[tuple[float, list[dict[str, float]]]] = deque()

    def look(self) -> list[Seen]:
        """All processes, now."""
        now_s = time.monotonic()
        counts = [{name: slot[name] for name in COUNTS} for slot in self._slots]
        self._past.append((now_s, counts))
        while len(self._past) > 2 and self._past[1][0] < now_s - WINDOW_S:
            self._past.popleft()
        then_s, before = self._past[0]
        elapsed_s = max(now_s - then_s, 1e-9)
        seen = []
        for number, slot in enumerate(self._slots):
            rates = {
                name: (counts[number][name] - before[number][name]) / elapsed_s if len(self._past) > 1 else 0.0
                for name in COUNTS
            }
            version = int(slot["version"]) if slot["beat_s"] else None
            own = {name: slot[f"own{i}"] for i, name in enumerate(self._names(number, int(slot["own"])))}
            seen.append(Seen(counts[number], rates, version, own))
        return seen

    def _names(self, number: int, n: int) -> list[str]:
        if len(self._own[number]) < n:
            self._own[number] = json.loads(self._paths[number].read_text())
        return self._own[number][:n]


__all__ = ["COLUMNS", "COUNTS", "OWN_FIGURES", "Seen", "Teller", "Watch"]
