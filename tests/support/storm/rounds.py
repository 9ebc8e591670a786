"""One round of the storm: processes start, faults befall them, they end, and what is left is proven."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import deadlines

import geartrain as gt
import storm.proof as proof
import storm.recorded as recorded
from storm.clock import Clock
from storm.journal import beats_of
from storm.roles import ROLES, Part
from storm.rows import FIELDS, STEPS

#: Stores: room for all rows; so few that the oldest are evicted all the time; each row for one sample; rows that age.
KINDS: dict[str, dict[str, Any]] = {
    "roomy": {"capacity": 60_000},
    "small": {"capacity": 40},
    "sampled once": {"capacity": 200, "max_times_sampled": 1},
    "aging": {"capacity": 300, "max_age_s": 0.3, "max_rows": 200},
    "recorded": {"capacity": 30_000},
}
CREW = ("writer", "writer", "writer", "reader", "learner", "saver")
#: Of a store of steps that recorders write.
RECORDED_CREW = ("recorder", "recorder", "recorder", "viewer", "saver")
#: A process that is not stopped and makes no call for so long, on an idle machine, hangs.
HANG_S = 20.0
#: Longest stop of a process: less than any deadline of the others.
STOP_S = 0.4
_SUBREAPER = 36


def children() -> list[int]:
    """The children of this process, those of its dead children among them: it is their subreaper."""
    return [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


@dataclass
class Worker:
    """A process of the round."""

    pid: int
    role: str
    part: Part
    log: Path
    killed: bool = False
    asked: bool = False  # to end
    beats: int = -1
    moved_s: float = 0.0


@dataclass
class Round:
    """A round and what came of it.

    Args:
        seed: of all choices.
        kind: of the store, one of `KINDS`.
        folder: empty, for journals, logs and checkpoints.
        disk: a folder on a small file system; None where there is none.
        clock: the processes' wall clock.
        seconds: of faults.
    """

    seed: int
    kind: str
    folder: Path
    disk: Path | None
    clock: Clock
    seconds: float
    #: What a process of each role does.
    roles: ClassVar[Mapping[str, Callable[[Part], None]]] = {**ROLES, **recorded.ROLES}

    defects: list[str] = field(default_factory=list)
    figures: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.choose = random.Random(self.seed)
        self.name = f"storm-{os.getpid()}-{self.seed}"
        self.workers: list[Worker] = []
        self._stopped: dict[int, float] = {}  # process -> when it is continued
        self._numbers = 0

    def run(self) -> None:
        """Runs the round. Every defect is noted, none is raised."""
        fields = recorded.FIELDS if self.kind == "recorded" else FIELDS
        store = gt.Store.create(self.name, fields, max_length=STEPS, persist=True, timeout_s=30, **KINDS[self.kind])
        keeper = self.choose.random() < 0.5
        with self.ends():
            self._start(store)
            if not keeper:  # the processes have the store for themselves, and leave it as they die
                store.close()
            self._strike(store if keeper else None)
            self._end()
            self._prove(store if keeper else gt.Store.open(self.name, adopt=True, timeout_s=30))

    @contextlib.contextmanager
    def ends(self) -> Iterator[None]:
        """Notes what the round itself raised, and leaves no process and no segment behind."""
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # children of killed processes are this one's to wait for
        try:
            yield
        except Exception:
            self.defects.append(f"the storm itself could not go on: {traceback.format_exc()}")
        finally:
            self._kill_all()
            self.clock.set(0)
            for path in Path("/dev/shm").glob(f"geartrain.{self.name}*"):
                path.unlink(missing_ok=True)

    # --- processes ------------------------------------------------------------------------------------------------

    def _start(self, store: gt.Store) -> None:
        for role in RECORDED_CREW if self.kind == "recorded" else CREW:
            self._begin(role, store if self.choose.random() < 0.5 else None)

    def _begin(self, role: str, handle: gt.Store | None) -> None:
        self._numbers += 1
        number = 1000 + self._numbers
        part = Part(self.name, number, self.choose.getrandbits(32), self.folder, self.disk, handle, self.kind)
        log = self.folder / f"log-{role}-{number}"
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with log.open("wb") as file:
                    os.dup2(file.fileno(), 2)
                faulthandler.enable()
                faulthandler.register(signal.SIGUSR1, all_threads=True)
                self.roles[role](part)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        self.workers.append(Worker(pid, role, part, log, moved_s=time.monotonic()))
        self.figures["processes"] += 1

    def _strike(self, store: gt.Store | None) -> None:
        until_s = time.monotonic() + self.seconds
        stopped = self._stopped
        while time.monotonic() < until_s and not self.defects:
            time.sleep(self.pause_s())
            now_s = time.monotonic()
            for pid in [pid for pid, end_s in stopped.items() if end_s < now_s]:
                del stopped[pid]
                os.kill(pid, signal.SIGCONT)
            self._look()
            self.fault(self.choose.choice(self.workers), store)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        stopped.clear()

    def pause_s(self) -> float:
        """Time to the next fault."""
        return self.choose.random() * 0.02

    def fault(self, victim: Worker, store: gt.Store | None) -> None:
        """Kills a process, which is begun again, or stops it for a while, or has the clock jump."""
        strike = self.choose.random()
        if victim.pid in self._stopped and strike >= 0.25:
            return
        if strike < 0.25:
            self.kill(victim, store if store is not None and self.choose.random() < 0.5 else None)
        elif strike < 0.4:
            os.kill(victim.pid, signal.SIGSTOP)
            self._stopped[victim.pid] = time.monotonic() + self.choose.random() * STOP_S
            self.figures["stops"] += 1
        elif strike < 0.45 and self.clock.viable:
            self.clock.set(self.choose.choice([0, 1, -1]) * 10 ** self.choose.uniform(-2, 8))
            self.figures["clock jumps"] += 1

    def kill(self, victim: Worker, handle: gt.Store | None) -> None:
        """Kills a process, and begins another in its place."""
        os.kill(victim.pid, signal.SIGKILL)
        victim.killed = True
        self.figures["kills"] += 1
        self._reap(victim)
        self._begin(victim.role, handle)

    def _look(self) -> None:
        """Notes processes that have ended by themselves, or make no calls."""
        for worker in list(self.workers):
            if os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._reap(worker)
                continue
            now_s = time.monotonic()
            with contextlib.suppress(OSError, IndexError):
                beats = beats_of(self.folder / f"journal-{worker.part.number}")
                if beats != worker.beats or worker.pid in self._stopped:
                    worker.beats, worker.moved_s = beats, now_s
            if now_s - worker.moved_s > deadlines.patience(HANG_S):
                self._hangs(worker, "makes no calls")

    def _hangs(self, worker: Worker, what: str) -> None:
        os.kill(worker.pid, signal.SIGUSR1)  # shows its stacks
        time.sleep(0.5)
        self.defects.append(f"{worker.role} {worker.part.number} {what}: {self._last_words(worker)}")
        os.kill(worker.pid, signal.SIGKILL)
        worker.killed = True
        self._reap(worker)

    def _reap(self, worker: Worker) -> None:
        self.workers.remove(worker)
        self._stopped.pop(worker.pid, None)
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        expected = (0, *([-signal.SIGKILL] if worker.killed else []), *([-signal.SIGTERM] if worker.asked else []))
        if code not in expected:  # a process may be asked to end before it can hear that
            how = signal.Signals(-code).name if code < 0 else f"code {code}"
            self.defects.append(f"{worker.role} {worker.part.number} ended with {how}: {self._last_words(worker)}")
        self.figures["calls"] += max(0, worker.beats)

    def _last_words(self, worker: Worker) -> str:
        return worker.log.read_text(errors="replace") if worker.log.exists() else ""

    def _end(self) -> None:
        """All processes end: asked to, or by SIGKILL in the middle of what they do."""
        if self.choose.random() < 0.5:
            for worker in self.workers:
                worker.asked = True
                os.kill(worker.pid, signal.SIGTERM)
            until_s = time.monotonic() + deadlines.patience(HANG_S)
            while self.workers and time.monotonic() < until_s:
                self._look()
                time.sleep(0.01)
            for worker in list(self.workers):
                self._hangs(worker, "does not end")
        self._kill_all()

    def _kill_all(self) -> None:
        for worker in self.workers:
            worker.killed = True
            os.kill(worker.pid, signal.SIGKILL)
        for worker in list(self.workers):
            self._reap(worker)
        while orphans := children():  # what they have forked, and theirs
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    # --- afterwards -----------------------------------------------------------------------------------------------

    def _prove(self, store: gt.Store) -> None:
        self.clock.set(0)
        journals = sorted(self.folder.glob("journal-*"))
        self.figures["forks"] += sum(int(path.name.split("-")[1]) >= 100_000 for path in journals)
        with store:
            self.defects += proof.audit(store)
            is_recorded = self.kind == "recorded"
            found, figures = (recorded.rows if is_recorded else proof.rows)(store, self.kind, journals)
            self.defects += found
            self.figures += figures
            self.defects += [] if is_recorded else proof.drawn(store, self.kind)
            self.defects += proof.audit(store)
            for key in ("torn", "reclaimed", "repairs"):
                self.figures[f"{key} (store)"] += store.stats()[key]
        tags = proof.written(journals)
        places = [self.folder, *([self.disk] if self.disk is not None else [])]
        for number, place in enumerate(places):
            contents = recorded.contents if is_recorded else proof.contents
            found, rows = proof.checkpoint(place / "saved", f"{self.name}-loaded-{number}", tags, contents)
            self.defects += found
            self.figures["rows proven in checkpoints"] += rows
        self.figures["audits"] += 2
