"""Client of a fleet of benchmark workers (`worker.py`, `reverb_baseline.py`): concurrent requests to all ranks."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.lifetime import on_error
from geartrain.tools.testing.cluster import Hosts
from geartrain_bench.harness.baselines import BaselineError

WORKER = [sys.executable, "-m", "geartrain_bench.distributed_replay.worker"]
REVERB = Path(__file__).parents[1] / "distributed_replay" / "reverb_baseline.py"


@dataclass(frozen=True)
class Measured:
    """Measurements of all ranks, over so many batches."""

    ranks: int
    batches: int
    laps_s: list[float]
    seconds: float
    wait_s: float
    cpu_s: float
    stats: dict[str, float]
    sent_bytes: int
    busiest_bytes: int
    disturbed: int

    @classmethod
    def of_rounds(cls, rounds: Sequence[Measured]) -> Measured:
        """Several rounds of the same ranks as one measurement."""
        return cls(
            ranks=rounds[0].ranks,
            batches=sum(one.batches for one in rounds),
            laps_s=[lap_s for one in rounds for lap_s in one.laps_s],
            seconds=sum(one.seconds for one in rounds),
            wait_s=sum(one.wait_s for one in rounds),
            cpu_s=sum(one.cpu_s for one in rounds),
            stats={key: sum(one.stats[key] for one in rounds) for key in rounds[0].stats},
            sent_bytes=sum(one.sent_bytes for one in rounds),
            busiest_bytes=sum(one.busiest_bytes for one in rounds),
            disturbed=sum(one.disturbed for one in rounds),
        )

    def figures(self, batch: int, row_bytes: int) -> dict[str, float]:
        """A batch's figures for JSON: rates and bytes summed over ranks, times of the mean rank."""
        per_batch = 1 / self.batches

        def mean_ms(what: str) -> float:
            return 1e3 * self.stats.get(what, 0.0) * per_batch / self.ranks

        return {
            "batches": self.batches,
            "samples_per_s": batch * self.batches / self.seconds,
            "median_samples_per_s": batch / float(np.median(self.laps_s)),
            "gb_per_s": batch * row_bytes * self.batches / self.seconds / 1e9,
            "batch_ms": 1e3 * self.seconds * per_batch,
            "wait_ms": 1e3 * self.wait_s * per_batch / self.ranks,
            "cpu_ms": 1e3 * self.cpu_s * per_batch,
            "select_ms": mean_ms("select_s"),
            "fetch_ms": mean_ms("fetch_s"),
            "exchange_ms": mean_ms("exchange_s"),
            "moved_bytes": self.stats.get("received_bytes", 0.0) * per_batch,
            "selection_bytes": self.stats.get("selection_bytes", 0.0) * per_batch,
            "wire_bytes": self.sent_bytes * per_batch,
            "busiest_bytes": self.busiest_bytes * per_batch,
        }


class Fleet:
    """Worker processes that execute requests, all at the same time. A context manager; leaving it kills them.

    Every request raises `BaselineError` on failure, and every wait has a deadline.
    """

    def __init__(self, start: Sequence[Callable[[Any], subprocess.Popen[bytes]]]) -> None:
        self._members: list[_Member] = []
        with on_error(self.close):
            for number, one in enumerate(start):
                self._members.append(_Member(number, one))

    @classmethod
    def here(cls, n: int, argv: Sequence[str] = WORKER) -> Fleet:
        """n processes on this host, connected over loopback."""

        def start(stderr: Any) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                argv,
                env={**_environment(), "GLOO_SOCKET_IFNAME": "lo"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )

        return cls([start] * n)

    @classmethod
    def on(cls, hosts: Hosts, which: Sequence[int], argv: Sequence[str] = WORKER) -> Fleet:
        """A process on each of these hosts."""

        def starter(i: int) -> Callable[[Any], subprocess.Popen[bytes]]:
            def start(stderr: Any) -> subprocess.Popen[bytes]:
                return hosts.popen(
                    i, argv, env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
                )

            return start

        return cls([starter(i) for i in which])

    def ask(self, members: Sequence[int], timeout_s: float = 180.0, **request: Any) -> list[dict[str, Any]]:
        """Sends one request to all members; returns their answers."""
        return self.ask_each(dict.fromkeys(members, request), timeout_s)

    def ask_each(self, requests: Mapping[int, dict[str, Any]], timeout_s: float) -> list[dict[str, Any]]:
        """Sends each member its own request; returns the answers in the same order."""
        for i, request in requests.items():
            self._members[i].tell(request)
        ends_s = time.monotonic() + timeout_s
        # The first failure has the cause; the others only report a lost peer.
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for i in requests:
                selector.register(self._members[i].stdout, selectors.EVENT_READ, i)
            while len(answers) < len(requests):
                ready = selector.select(max(0.0, ends_s - time.monotonic()))
                if not ready:
                    late = [i for i in requests if i not in answers]
                    raise BaselineError(
                        f"ranks {late} gave no answer to {next(iter(requests.values()))} in {timeout_s:g} s"
                    )
                for key, _ in ready:
                    answer = self._members[key.data].read()
                    if answer is not None:
                        answers[key.data] = answer
                        selector.unregister(key.fileobj)
        return [answers[i] for i in requests]

    @contextlib.contextmanager
    def joined(self, members: Sequence[int], host: str) -> Iterator[None]:
        """A `torch.distributed` job of these members, the first of which hosts its key-value store."""
        (kept,) = self.ask(members[:1], do="listen", host=host)
        ask = {"do": "join", "host": host, "port": kept["port"], "size": len(members)}
        self.ask_each({i: {**ask, "rank": rank} for rank, i in enumerate(members)}, 180.0)
        yield
        self.ask(members, do="leave")

    def measure(
        self,
        members: Sequence[int],
        *,
        batches: int,
        train_ms: float,
        hosts: Hosts | None = None,
        rounds: int = 1,
        warm: int,
        between: Callable[[], object] | None = None,
        **case: Any,
    ) -> Measured:
        """One case: a new job and a new replay over the members, and rounds of warm-up and of measured batches.

        Args:
            batches: measured ones of a round.
            warm: batches before them, in each round: those that were made while nothing was timed.
            between: called before each round, and after the last one.
        """
        found = []
        with self.joined(members, "127.0.0.1" if hosts is None else hosts.address(0)):
            self.ask(members, do="prepare", **case)
            for _ in range(rounds):
                if between is not None:
                    between()
                self.ask(members, do="warm", batches=warm)
                found.append(self.go(members, batches, train_ms, hosts))
            if between is not None:
                between()
            self.ask(members, do="finish")
        return Measured.of_rounds(found)

    def go(self, members: Sequence[int], batches: int, train_ms: float, hosts: Hosts | None) -> Measured:
        """So many measured batches."""
        before = [hosts.bytes(i) for i in range(hosts.n)] if hosts is not None else []
        answers = self.ask(members, timeout_s=600.0, do="go", batches=batches, train_ms=train_ms)
        after = [hosts.bytes(i) for i in range(hosts.n)] if hosts is not None else []
        moved = [max(b.sent - a.sent, b.received - a.received) for a, b in zip(before, after, strict=True)]
        ends_s = np.array([answer["ends_s"] for answer in answers]).max(axis=0)
        # Laps of a few batches: single ones alternate between prefetched and not.
        laps = max(1, min(8, batches // 3))
        cuts = np.linspace(0, batches, laps + 1).astype(int)
        marks = np.concatenate([[0.0], ends_s])[cuts]
        stats = {key: [answer["stats"].get(key, 0.0) for answer in answers] for key in answers[0]["stats"]}
        return Measured(
            ranks=len(answers),
            batches=batches,
            laps_s=(np.diff(marks) / np.diff(cuts)).tolist(),
            seconds=float(ends_s[-1]),
            wait_s=sum(answer["wait_s"] for answer in answers),
            cpu_s=sum(answer["cpu_s"] for answer in answers),
            stats={key: sum(values) for key, values in stats.items()},
            sent_bytes=sum(b.sent - a.sent for a, b in zip(before, after, strict=True)),
            busiest_bytes=max(moved, default=0),
            disturbed=sum(answer["switches"] for answer in answers),
        )

    def close(self) -> None:
        """Ends them all: by end of input, so that they release their resources; then by SIGKILL."""
        for member in self._members:
            member.hang_up()
        for member in self._members:
            member.close()
        self._members = []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "OMP_NUM_THREADS": "1"}


class _Member:
    """One process of a fleet."""

    def __init__(self, number: int, start: Callable[[Any], subprocess.Popen[bytes]]) -> None:
        self._number = number
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        try:
            self._process = start(self._stderr)
        except OSError as error:
            self._stderr.close()
            raise BaselineError(f"rank {number} does not start: {error}") from None
        # Where the kernel groups processes by sessions, the niceness of a session counts, and not that of a process.
        with contextlib.suppress(OSError):
            Path(f"/proc/{self._process.pid}/autogroup").write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))
        assert self._process.stdout is not None
        self.stdout = self._process.stdout
        os.set_blocking(self.stdout.fileno(), False)
        self._unread = b""

    def tell(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise BaselineError(f"rank {self._number} ended: {self._last_words()}") from None

    def read(self) -> dict[str, Any] | None:
        """An answer, or None while it is incomplete."""
        more = os.read(self.stdout.fileno(), 1 << 16)
        if not more:
            raise BaselineError(f"rank {self._number} ended: {self._last_words()}")
        self._unread += more
        if b"\n" not in self._unread:
            return None
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BaselineError(f"rank {self._number}: {answer['error']}")
        return answer

    def hang_up(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=30)
        self.stdout.close()
        self._stderr.close()

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
