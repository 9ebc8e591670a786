"""`Launcher`: runs a job on one host, from the start of its processes until all of them have ended.

One thread starts all processes and supervises them. If this thread ends, however it does, the kernel kills them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import geartrain.weights as weights
from geartrain.core.counters import SharedCounters
from geartrain.core.process_report import register
from geartrain.errors import (
    ArgumentError,
    GeartrainError,
    JobInterruptedError,
    JobTimeoutError,
    PeerLostError,
    ProcessDiedError,
)
from geartrain.launch.context import REDUCER_KEY
from geartrain.launch.coordinator import JOIN_S, Coordinator, job_secret
from geartrain.launch.display import Display, JobView, make_display
from geartrain.launch.hosts import HostPosition, own_address
from geartrain.launch.job import SERVERS, UNUSABLE, Job
from geartrain.launch.job_process import JobProcess
from geartrain.launch.job_store import JobStore
from geartrain.launch.metrics import COLUMNS, MetricsReader, ProcessMetrics
from geartrain.launch.placed_role import place
from geartrain.launch.rank_environment import environment_of, free_port, rank_environment
from geartrain.launch.summary import Summary
from geartrain.launch.supervisor import Supervisor

#: Period of the checks of heartbeats and time limits.
TICK_S = 0.5
#: Delay before a process's error ends the job, in case it is only the effect of an error on another host.
CAUSE_S = 1.0
#: Period of the loop until the job's store exists.
_STORE_TICK_S = 0.05
#: A signal within this time counts as the same interrupt, because some schedulers signal every host twice.
SAME_SIGNAL_S = 0.5
#: Key in the job's name service for the address and port of the ranks' rendezvous, if host 0 has no ranks.
_MASTER_KEY = "geartrain/launch/master"


class Launcher:
    """Runs one job on this host. `launch.run` makes the launcher."""

    def __init__(
        self,
        job: Job,
        position: HostPosition,
        folder: Path,
        *,
        fresh: bool,
        live: bool | None,
        every_s: float,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
    ) -> None:
        self.job, self.position, self.folder = job, position, folder
        self._placed = place(job, position.hosts)
        job_secret(position)  # refuses, before anything is made
        self.summary = Summary(folder=str(folder), restarts={each.role.name: 0 for each in self._placed})
        self._fresh = fresh
        self._metrics_host, self._metrics_port = metrics_host, metrics_port
        self._signals: list[int] = []
        self._began_s = time.monotonic()
        self._end: tuple[str, str] | None = None  # outcome, text
        self._failure: tuple[str, float] | None = None  # of a process here, and how long another host's comes before it
        self._done_hosts: set[int] = set()
        self._done_sent = False
        self._master = (position.master_addr, position.master_port)
        self._address = "127.0.0.1" if position.hosts == 1 else own_address(position.master_addr, position.name_s)
        learner = next((each for each in self._placed if each.role.kind == "learner"), None)
        #: Hosts of the job's stores: the learners', or wherever a process makes one.
        self._store_hosts = range(position.hosts) if learner is None else learner.hosts
        #: Hosts with ranks, in order. The first has the ranks' rendezvous, unless torchrun has it.
        self._rank_hosts = () if learner is None else learner.hosts
        self._reducers = [
            f"{each.role.name}-{number}"
            for each in self._placed
            if each.role.kind == "reducer"
            for number in range(each.processes)
        ]
        self._reducer_addresses: list[str] = []
        self._waiting: list[JobProcess] = []  # for addresses, before they start
        self._waiting_since_s = 0.0
        self._processes: list[JobProcess] = []
        for each in self._placed:
            for local in range(each.role.processes if position.host in each.hosts else 0):
                self._processes.append(JobProcess(job, each, local, len(self._processes), position, folder))
        self._supervisor = Supervisor(self._processes)
        prefix = "" if position.hosts == 1 else f"host {position.host}: "
        self._display: Display = make_display(job.name, live, every_s, prefix)
        self._store = JobStore(job, self._display.say)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"cannot create the folder for logs: {error.strerror} ({error.filename})") from error
        self._display.open_log(folder)

    def run(self) -> Summary:
        """Runs the job to its end. Raises as `launch.run`."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._supervisor.close)
            stack.enter_context(self._handling_signals())
            self._store.check_old(fresh=self._fresh)
            self._counters = stack.enter_context(
                SharedCounters.create(f"launch-{self.job.name}", len(self._processes), COLUMNS)
            )
            names = [self.folder / f".{each.name}.metrics.json" for each in self._processes]
            self._metrics = MetricsReader(self._counters, names)
            if self._metrics_port is not None:
                self._serve_metrics(self._metrics_port, names, stack)
            fingerprint = json.dumps(
                [
                    [each.role.name, each.role.kind, each.role.processes, each.hosts, each.role.run]
                    for each in self._placed
                ]
            )
            self._coordinator = Coordinator(self.position, fingerprint, self._supervisor.wake)
            stack.callback(self._coordinator.close)
            register(self, "job", _figures)
            stack.enter_context(self._display)
            try:
                if self._rank_hosts and self._rank_hosts[0] == self.position.host > 0 and not self.position.agent_store:
                    self._master = (self._address, self.position.master_port)
                    self._coordinator.tell(_MASTER_KEY, json.dumps(self._master))
                for process in self._processes:
                    if process.role.kind == "learner":
                        self._let_wait(process)
                    else:
                        self._start(process)
                while self._end is None:
                    self._start_waiting()
                    looks = self._waiting or (self._store.handle is None and self.position.host in self._store_hosts)
                    self._supervisor.wait(_STORE_TICK_S if looks else TICK_S)
                    self._handle_events()
            except BaseException as error:
                self._end = ("failed", f"{type(error).__name__}: {error}")
                raise
            finally:
                assert self._end is not None
                self._end_all()
                self._write_summary(*self._end)
        self._raise(*self._end)
        return self.summary

    def interrupt(self, number: int = signal.SIGTERM) -> None:
        """Ends the job as that signal to its process does; a second one kills. Any thread may call it."""
        self._signals.append(number)
        self._supervisor.wake()

    # --- events ---------------------------------------------------------------------------------------------

    def _handle_events(self) -> None:
        """Signals, events of other hosts, exits, timeouts: all since the last call."""
        for number in self._signals:
            self._finish("interrupted", f"stopped by {signal.Signals(number).name}")
        for event in self._events():
            self._handle_event(*event)
        # Of those that ended together, the one that was killed is the cause, and the others' errors its effect.
        for process in sorted(self._supervisor.reap(), key=lambda each: (each.returncode or 0) >= 0):
            if self._end is None and process not in self._waiting:  # with another rank that is to start again
                self._handle_exit(process)
        if self._failure is not None and time.monotonic() > self._failure[1]:
            self._finish("failed", self._failure[0])
        elapsed_s = time.monotonic() - self._began_s
        if self.job.timeout_s is not None and elapsed_s > self.job.timeout_s:
            self._finish("timed out", f"the job {self.job.name!r} was not over within {self.job.timeout_s:g} s")
        if self.position.host == 0 and elapsed_s > JOIN_S and len(self._coordinator.joined) < self.position.hosts:
            missing = sorted(set(range(self.position.hosts)) - self._coordinator.joined)
            self._finish("failed", f"hosts {missing} did not join within {JOIN_S:g} s")
        self._check_heartbeats()
        self._check_done()
        self._store.attach()
        self._draw()

    def _handle_event(self, kind: str, host: int, outcome: str, text: str) -> None:
        if kind == "done":
            self._done_hosts.add(host)
        elif kind == "over":
            self._finish(outcome, text if text.startswith("host ") else f"host {host}: {text}" if text else "")
        elif kind == "lost":
            self._finish("failed", f"the launcher of host {host} is lost: {text}")

    def _handle_exit(self, process: JobProcess) -> None:
        role = process.role
        if process.returncode == 0 and not process.killed_because and role.kind not in SERVERS:
            self._display.say(f"{process.name} has finished")
            return
        self._coordinator.unregister(process.name)
        self._store.reap()
        used = self.summary.restarts[role.name]
        if used >= role.max_restarts or process.returncode == UNUSABLE:
            limit = f", after {used} restarts" if used else ""
            lines = process.last_lines()
            tail = (
                f"; its last lines:\n{lines}\nAll of it: {process.log}"
                if lines
                else f"; it printed nothing ({process.log})"
            )
            failure = f"{process.name} {process.exit_reason()}{limit}{tail}"
            # Schedulers that end a job send SIGTERM to all of its processes, in any order: to this one a moment later.
            ended = process.returncode == -signal.SIGTERM
            if not ended and (self.position.hosts == 1 or self._done_sent or (process.returncode or 0) < 0):
                self._finish("failed", failure)
            elif self._failure is None:
                self._failure = (failure, time.monotonic() + CAUSE_S)
            return
        self.summary.restarts[role.name] = used + 1
        again = [process]
        if role.kind == "learner":
            again = [each for each in self._processes if each.role is role]
            self._supervisor.kill(again, "was killed because another rank died")
            if not self.position.agent_store:
                self._master = (self._address, 0)
        names = process.name if len(again) == 1 else f"all of {role.name}"
        self._display.say(
            f"{process.name} {process.exit_reason()}; {names} started again "
            f"({used + 1} of at most {role.max_restarts} times)"
        )
        for each in again:
            each.restart += 1
            if role.kind == "learner":
                self._let_wait(each)  # reducers may have moved
            else:
                self._start(each)

    def _check_heartbeats(self) -> None:
        for process in self._processes:
            silent_s = process.role.silent_s
            if silent_s is None or not process.running or process.killed_because:
                continue
            beat_s = self._counters.slot(process.slot)["beat_s"]
            if time.time() - max(beat_s, process.started_s) > silent_s:
                process.kill(f"was killed, for it had reported nothing for {silent_s:g} s")

    def _check_done(self) -> None:
        if self._end is not None or self._failure is not None:
            return
        if not self._done_sent:
            kinds = ("learner",) if self.job.learner is not None else ("actor", "worker", "other")
            if any(each.role.kind in kinds and each.returncode != 0 for each in self._processes):
                return
            self._done_sent = True
            self._done_hosts.add(self.position.host)
            if self.position.host > 0:
                self._coordinator.broadcast("done")
        if self.position.host == 0 and len(self._done_hosts) == self.position.hosts:
            self._finish("finished", "")

    def _finish(self, outcome: str, text: str) -> None:
        if self._end is None:
            self._end = (outcome, text)

    # --- processes ------------------------------------------------------------------------------------------------

    def _let_wait(self, process: JobProcess) -> None:
        """Has a rank wait for the addresses that it needs; the first one's wait is what has a deadline."""
        if not self._waiting:
            self._waiting_since_s = time.monotonic()
        self._waiting.append(process)

    def _start_waiting(self) -> None:
        """Starts the ranks once the addresses that they need are known: their rendezvous, the reducers."""
        if not self._waiting:
            return
        try:
            missing = self._look_up_addresses()
        except (GeartrainError, OSError) as error:
            self._finish("failed", f"the launcher of host 0 is lost: {error}")
            return
        if not missing:
            waiting, self._waiting = self._waiting, []
            for process in waiting:
                self._start(process)
        elif time.monotonic() - self._waiting_since_s > JOIN_S:
            self._finish("failed", f"the learners waited {JOIN_S:g} s for {', '.join(missing)}, and have not started")

    def _look_up_addresses(self) -> list[str]:
        """Looks up addresses, and says in words which are still unknown."""
        missing = []
        first = self._rank_hosts[0]
        if first not in (0, self.position.host) and not self.position.agent_store:
            found = self._coordinator.known(_MASTER_KEY)
            if found is None:
                missing.append(f"the address of host {first}, which has rank 0")
            else:
                self._master = tuple(json.loads(found))
        addresses = {name: self._coordinator.known(REDUCER_KEY + name) for name in self._reducers}
        missing += [name for name, address in addresses.items() if address is None]
        self._reducer_addresses = [address for address in addresses.values() if address is not None]
        return missing

    def _start(self, process: JobProcess) -> None:
        slot = self._counters.slot(process.slot)
        slot["stop"] = slot["beat_s"] = 0.0
        roles: dict[str, list[object]] = {
            each.role.name: [each.role.kind, each.role.processes, each.hosts] for each in self._placed
        }
        environment = self._environment(process)
        process.start(roles, self._counters.name, self._coordinator.address, environment, self._address)
        slot["pid"] = process.pid or 0

    def _environment(self, process: JobProcess) -> dict[str, str]:
        if process.role.kind != "learner":
            return environment_of(process, self._coordinator.secret)
        if self._master[1] == 0:
            self._master = (self._master[0], free_port())
        return rank_environment(
            process,
            self._coordinator.secret,
            job=self.job.name,
            master=self._master,
            group_rank=self._rank_hosts.index(self.position.host),
            group_size=len(self._rank_hosts),
            agent_store=self.position.agent_store,
            reducers=self._reducer_addresses if self._reducers else None,
        )

    def _end_all(self) -> None:
        """Sends SIGTERM to all, servers last, and again after half of `stop_s`.

        Sends SIGKILL to the rest after `stop_s`.
        """
        assert self._end is not None
        outcome, text = self._end
        self._coordinator.broadcast(
            "over", outcome, text if self.position.host == 0 else f"host {self.position.host}: {text}"
        )
        if text:
            self._display.say(text.partition("\n")[0])
        began_s = time.monotonic()
        self._signals.clear()
        signals: dict[JobProcess, int] = {}
        while True:
            self._supervisor.reap()
            left = [each for each in self._processes if each.running]
            waited_s = time.monotonic() - began_s
            if not left:
                break
            if outcome == "interrupted" and waited_s < SAME_SIGNAL_S:
                self._signals.clear()
            if waited_s > self.job.stop_s or self._signals:
                for each in left:
                    self._display.say(f"{each.name} is killed: it did not end within {waited_s:.1f} s")
                self._supervisor.kill(left, "was killed, for it did not end on SIGTERM")
                break
            half = waited_s > self.job.stop_s / 2
            others = [each for each in left if each.role.kind not in SERVERS]
            for each in left if half else others or left:
                times = signals.get(each, 0)
                if times < (2 if half else 1):
                    signals[each] = times + 1
                    self._counters.slot(each.slot)["stop"] = times + 1.0
                    each.terminate()
            self._supervisor.wait(0.1)
            self._draw()

    def _serve_metrics(self, port: int, names: list[Path], stack: contextlib.ExitStack) -> None:
        from geartrain.launch.prometheus import PrometheusEndpoint

        def read() -> dict[str, ProcessMetrics]:
            found = MetricsReader(self._counters, names).read()  # on a thread of the server
            return dict(zip((each.name for each in self._processes), found, strict=True))

        endpoint = PrometheusEndpoint(read, self._metrics_host, port, self.job.trust)
        stack.callback(endpoint.close)
        self._display.say(f"metrics for Prometheus on {endpoint.url}")

    # --- display and summary ------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        if not self._display.due():
            return
        version = None
        with contextlib.suppress(GeartrainError, OSError):
            version = weights.describe(self.job.name).version
        self._display.draw(
            JobView(
                elapsed_s=time.monotonic() - self._began_s,
                processes=self._processes,
                metrics=self._metrics.read(),
                restarts=self.summary.restarts,
                version=version,
                store=self._store.handle,
            )
        )

    def _write_summary(self, outcome: str, text: str) -> None:
        self.summary.outcome, self.summary.error = outcome, text
        self.summary.elapsed_s = time.monotonic() - self._began_s
        for process, metrics in zip(self._processes, self._metrics.read(), strict=True):
            self.summary.processes[process.name] = {
                "restarts": process.restart,
                "exit_code": process.returncode,
                **metrics.counts,
                "version": metrics.version,
                "metrics": metrics.metrics,
            }
        figures = self._store.leave(failed=outcome in ("failed", "timed out"))
        if figures is not None:
            self.summary.store = figures
        self._display.last(self.summary)
        for path in self.folder.glob(".*.metrics.json"):
            path.unlink()
        (self.folder / "summary.json").write_text(json.dumps(dataclasses.asdict(self.summary), indent=1) + "\n")

    def _raise(self, outcome: str, text: str) -> None:
        if outcome == "failed":
            raise (PeerLostError if text.startswith("the launcher of host") else ProcessDiedError)(text)
        if outcome == "timed out":
            raise JobTimeoutError(text)
        if outcome == "interrupted":
            raise JobInterruptedError(text)

    # --- signals --------------------------------------------------------------------------------------------------

    def _events(self) -> Iterator[tuple[str, int, str, str]]:
        while not self._coordinator.events.empty():
            yield self._coordinator.events.get()

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the job; only the main thread can have that."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, _frame: object) -> None:
            self.interrupt(number)

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        # Where it is ignored, as some parents pass on, exit codes of children are lost.
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _figures(launcher: Launcher) -> dict[str, Any]:
    """For the process's report: the job, where its coordinator is, and its processes on this host by slot."""
    position = launcher.position
    return {
        "name": launcher.job.name,
        "counters": launcher._counters.name,
        "coordinator": launcher._coordinator.address,
        "host": position.host,
        "hosts": position.hosts,
        "folder": str(launcher.folder),
        "elapsed_s": time.monotonic() - launcher._began_s,
        "processes": [
            {
                "name": each.name,
                "kind": each.role.kind,
                "pid": each.pid,
                "restarts": each.restart,
                "exit_code": each.returncode,
            }
            for each in launcher._processes
        ],
    }


__all__ = ["Launcher"]
