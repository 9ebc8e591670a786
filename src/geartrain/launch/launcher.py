"""The loop of a launcher: starts a job's processes, sleeps until something happens to one, and ends them all.

It has one thread, which starts all processes: the kernel kills them when that thread ends, however it does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import geartrain.weights as weights
from geartrain.core.counters import Board
from geartrain.errors import (
    GeartrainError,
    JobInterruptedError,
    JobTimeoutError,
    PartDiedError,
    PeerLostError,
    StoreExistsError,
    StoreMissingError,
)
from geartrain.launch.coordinator import JOIN_S, Link
from geartrain.launch.display import Shown, View, show_for
from geartrain.launch.job import Job
from geartrain.launch.metrics import COLUMNS, Watch
from geartrain.launch.process import RANK_VARIABLES, Place, Process
from geartrain.launch.summary import Summary
from geartrain.store.store import Store

#: A look at silent processes, and at the time, that often.
TICK_S = 0.5
#: And at whether the store is there by now.
_STORE_TICK_S = 0.05


class Launcher:
    """Runs one job on this host. `launch.run` makes one."""

    def __init__(self, job: Job, place: Place, folder: Path, *, fresh: bool, live: bool | None, every_s: float) -> None:
        self.job, self.place, self.folder = job, place, folder
        self.summary = Summary(folder=str(folder), restarts={role.name: 0 for role in job.roles})
        self._fresh = fresh
        self._bell, bell = socket.socketpair()
        self._bell.setblocking(False)
        bell.setblocking(False)
        self._ring = bell
        self._signals: list[int] = []
        self._began_s = time.monotonic()
        self._over: tuple[str, str] | None = None  # outcome, text
        self._done_hosts: set[int] = set()
        self._told_done = False
        self._store: Store | None = None
        self._master_port = place.master_port
        roles = [role for role in job.roles if role.hosts == "all" or place.host == 0]
        self._processes: list[Process] = []
        for role in roles:
            for local in range(role.processes):
                self._processes.append(Process(job, role, local, len(self._processes), place, folder))
        self._show: Shown = show_for(job.name, live, every_s, "" if place.hosts == 1 else f"host {place.host}: ")
        self._show.into(folder)

    def run(self) -> Summary:
        """To the end. Raises what `launch.run` says."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._ring.close)
            stack.callback(self._bell.close)
            stack.enter_context(self._catching())
            self._clear_the_ground()
            board = stack.enter_context(Board.create(f"launch-{self.job.name}", len(self._processes), COLUMNS))
            self._board = board
            self._watch = Watch(board, [self.folder / f".{each.name}.figures.json" for each in self._processes])
            fingerprint = json.dumps([[r.name, r.kind, r.processes, r.hosts, r.run] for r in self.job.roles])
            self._link = Link(self.place, fingerprint, self._wake)
            stack.callback(self._link.close)
            stack.enter_context(self._show)
            try:
                for process in self._processes:
                    self._start(process)
                while self._over is None:
                    self._sleep(TICK_S if self._store is not None else _STORE_TICK_S)
                    self._look()
            except BaseException as error:
                self._over = ("failed", f"{type(error).__name__}: {error}")
                raise
            finally:
                assert self._over is not None
                self._end_all()
                self._sum_up(*self._over)
        self._raise(*self._over)
        return self.summary

    # --- what happens ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """All that may have happened since the last look."""
        for number in self._signals:
            self._finish("interrupted", f"stopped by {signal.Signals(number).name}")
        for event in self._events():
            self._hear(*event)
        ended = [each for each in self._processes if each.running and each.ended()]
        # Of those that ended together, the one that was killed is the cause, and the others' errors its effect.
        for process in sorted(ended, key=lambda each: (each.returncode or 0) >= 0):
            if self._over is None:
                self._bury(process)
        elapsed_s = time.monotonic() - self._began_s
        if self.job.timeout_s is not None and elapsed_s > self.job.timeout_s:
            self._finish("timed out", f"the job {self.job.name!r} was not over within {self.job.timeout_s:g} s")
        if self.place.host == 0 and elapsed_s > JOIN_S and len(self._link.joined) < self.place.hosts:
            missing = sorted(set(range(self.place.hosts)) - self._link.joined)
            self._finish("failed", f"hosts {missing} did not join within {JOIN_S:g} s")
        self._check_silence()
        self._check_done()
        self._hold_store()
        self._draw()

    def _hear(self, what: str, host: int, outcome: str, text: str) -> None:
        if what == "done":
            self._done_hosts.add(host)
        elif what == "over":
            self._finish(outcome, text if text.startswith("host ") else f"host {host}: {text}" if text else "")
        elif what == "lost":
            self._finish("failed", f"the launcher of host {host} is lost: {text}")

    def _bury(self, process: Process) -> None:
        role = process.role
        if process.returncode == 0 and not process.killed_because and role.kind != "agent":
            self._show.say(f"{process.name} is done")
            return
        self._link.forget(process.name)
        if self._store is not None:
            with contextlib.suppress(GeartrainError):  # whoever needs a row next does it as well
                self._store.reap()
        used = self.summary.restarts[role.name]
        if used >= role.max_restarts:
            limit = f", after {used} restarts" if role.max_restarts else ""
            said = process.last_lines()
            tail = (
                f"; its last lines:\n{said}\nAll of it: {process.log}" if said else f"; it said nothing ({process.log})"
            )
            self._finish("failed", f"{process.name} {process.why()}{limit}{tail}")
            return
        self.summary.restarts[role.name] = used + 1
        again = [process]
        if role.kind == "learner":
            again = [each for each in self._processes if each.role is role]
            for each in again:
                each.kill("was killed because another rank died")
            for each in again:
                self._await_end(each)
            self._master_port = 0
        names = process.name if len(again) == 1 else f"all of {role.name}"
        self._show.say(
            f"{process.name} {process.why()}; {names} started again ({used + 1} of at most {role.max_restarts} times)"
        )
        for each in again:
            each.restart += 1
            self._start(each)

    def _check_silence(self) -> None:
        for process in self._processes:
            silent_s = process.role.silent_s
            if silent_s is None or not process.running or process.killed_because:
                continue
            beat_s = self._board.slot(process.slot)["beat_s"]
            if time.time() - max(beat_s, process.started_s) > silent_s:
                process.kill(f"was killed, for it had reported nothing for {silent_s:g} s")

    def _check_done(self) -> None:
        if self._over is not None:
            return
        if not self._told_done:
            kinds = ("learner",) if self.job.learner is not None else ("actor", "other")
            if any(each.role.kind in kinds and each.returncode != 0 for each in self._processes):
                return
            self._told_done = True
            self._done_hosts.add(self.place.host)
            if self.place.host > 0:
                self._link.tell("done")
        if self.place.host == 0 and len(self._done_hosts) == self.place.hosts:
            self._finish("finished", "")

    def _finish(self, outcome: str, text: str) -> None:
        if self._over is None:
            self._over = (outcome, text)

    # --- processes ------------------------------------------------------------------------------------------------

    def _start(self, process: Process) -> None:
        slot = self._board.slot(process.slot)
        slot["stop"] = slot["beat_s"] = 0.0
        roles = {role.name: [role.processes, role.hosts] for role in self.job.roles}
        process.start(
            {"roles": roles, "board": self._board.name, "launcher": self._link.address}, self._environment(process)
        )
        slot["pid"] = process.pid or 0

    def _environment(self, process: Process) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        inherited |= {"PYTHONUNBUFFERED": "1", "GEARTRAIN_SECRET": self._link.secret}
        role, place = process.role, self.place
        if role.threads is not None:
            inherited.setdefault("OMP_NUM_THREADS", str(role.threads))
        if role.kind != "learner":
            return inherited
        if self._master_port == 0:
            self._master_port = _free_port()
        ours = {
            "RANK": process.number,
            "WORLD_SIZE": process.processes,
            "LOCAL_RANK": process.local,
            "LOCAL_WORLD_SIZE": role.processes,
            "GROUP_RANK": place.host,
            "GROUP_WORLD_SIZE": place.hosts,
            "ROLE_RANK": process.number,
            "ROLE_WORLD_SIZE": process.processes,
            "ROLE_NAME": role.name,
            "MASTER_ADDR": place.master_addr,
            "MASTER_PORT": self._master_port,
            "TORCHELASTIC_RUN_ID": self.job.name,
            "TORCHELASTIC_RESTART_COUNT": process.restart,
            "TORCHELASTIC_MAX_RESTARTS": role.max_restarts,
            "TORCHELASTIC_USE_AGENT_STORE": place.agent_store,
        }
        return inherited | {name: str(value) for name, value in ours.items()}

    def _await_end(self, process: Process) -> None:
        until_s = time.monotonic() + 10
        while not process.ended() and time.monotonic() < until_s:
            time.sleep(0.01)

    def _end_all(self) -> None:
        """Asks all to end, agents last; asks again after half the time, and kills who is left at the end of it."""
        assert self._over is not None
        outcome, text = self._over
        self._link.tell("over", outcome, text if self.place.host == 0 else f"host {self.place.host}: {text}")
        if text:
            self._show.say(text.partition("\n")[0])
        began_s = time.monotonic()
        self._signals.clear()
        asked: dict[Process, int] = {}
        while True:
            left = [each for each in self._processes if each.running and not each.ended()]
            waited_s = time.monotonic() - began_s
            if not left:
                break
            if waited_s > self.job.stop_s or self._signals:
                for each in left:
                    self._show.say(f"{each.name} is killed: it did not end within {waited_s:.1f} s")
                    each.kill("was killed, for it did not end when it was asked to")
                for each in left:
                    self._await_end(each)
                break
            half = waited_s > self.job.stop_s / 2
            others = [each for each in left if each.role.kind != "agent"]
            for each in left if half else others or left:
                times = asked.get(each, 0)
                if times < (2 if half else 1):
                    asked[each] = times + 1
                    self._board.slot(each.slot)["stop"] = 1.0
                    each.ask_to_end()
            self._sleep(0.1)
            self._draw()

    # --- the store ------------------------------------------------------------------------------------------------

    def _clear_the_ground(self) -> None:
        name = self.job.name
        with contextlib.suppress(StoreMissingError):
            left = Store.peek(name)
            users = left.native.live_clients()
            if self._fresh and users:
                raise StoreExistsError(f"{users} living processes use the store {name!r}; it cannot be begun afresh")
            if self._fresh:
                left.unlink()
            elif not users:
                self._show.say(f"the store {name!r} was left with {len(left):,} rows, which are adopted")
        if self._fresh and name in weights.names() and not weights.describe(name).in_use:
            weights.unlink(name)

    def _hold_store(self) -> None:
        """Joins the store once it is there, so that it lives as long as the launcher, whoever dies."""
        if self._store is None:
            with contextlib.suppress(GeartrainError, OSError):
                self._store = Store.open(self.job.name, timeout_s=1.0)

    def _leave_store(self, outcome: str) -> None:
        failed = outcome in ("failed", "timed out")
        keep = self.job.keep_store == "always" or (self.job.keep_store == "on_failure" and failed)
        if self._store is not None:
            with contextlib.suppress(GeartrainError):
                self._store.reap()
            self.summary.store = {"selectable": len(self._store), **self._store.stats()}
            self._store.close(keep=keep)
            if keep:
                self._show.say(
                    f"the store {self.job.name!r} stays with {self.summary.store['selectable']:,} rows: the next start "
                    f"adopts them, `geartrain remove {self.job.name}` removes it"
                )
            self._store = None
        if not keep and self.job.name in weights.names():
            with contextlib.suppress(GeartrainError, OSError):
                if not weights.describe(self.job.name).in_use:  # its processes were killed
                    weights.unlink(self.job.name)

    # --- showing --------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        if not self._show.due():
            return
        version = None
        with contextlib.suppress(GeartrainError, OSError):
            version = weights.describe(self.job.name).version
        self._show.draw(
            View(
                elapsed_s=time.monotonic() - self._began_s,
                processes=self._processes,
                seen=self._watch.look(),
                restarts=self.summary.restarts,
                version=version,
                store=self._store,
            )
        )

    def _sum_up(self, outcome: str, text: str) -> None:
        self.summary.outcome, self.summary.error = outcome, text
        self.summary.elapsed_s = time.monotonic() - self._began_s
        for process, seen in zip(self._processes, self._watch.look(), strict=True):
            self.summary.parts[process.name] = {
                "restarts": process.restart,
                "exit_code": process.returncode,
                **seen.counts,
                "version": seen.version,
                **{"figures": seen.own},
            }
        self._leave_store(outcome)
        self._show.last(self.summary)
        for path in self.folder.glob(".*.figures.json"):
            path.unlink()
        (self.folder / "summary.json").write_text(json.dumps(dataclasses.asdict(self.summary), indent=1) + "\n")

    def _raise(self, outcome: str, text: str) -> None:
        if outcome == "failed":
            raise (PeerLostError if text.startswith("the launcher of host") else PartDiedError)(text)
        if outcome == "timed out":
            raise JobTimeoutError(text)
        if outcome == "interrupted":
            raise JobInterruptedError(text)

    # --- waiting --------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake up; closed: it is over
            self._ring.send(b"!")

    def _sleep(self, timeout_s: float) -> None:
        poll = select.poll()
        for fd in [self._bell.fileno(), *(process.pidfd for process in self._processes if process.running)]:
            poll.register(fd, select.POLLIN)
        poll.poll(timeout_s * 1000)
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)

    def _events(self) -> Iterator[tuple[str, int, str, str]]:
        while not self._link.events.empty():
            yield self._link.events.get()

    @contextlib.contextmanager
    def _catching(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the job; only the main thread can have that."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def caught(number: int, _frame: object) -> None:
            self._signals.append(number)
            self._wake()

        before = {number: signal.signal(number, caught) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


__all__ = ["Launcher"]
