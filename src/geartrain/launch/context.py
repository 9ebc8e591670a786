"""`Context`: gives a process of a job its rank, store, weights, RPC node and reports.

Outside of `geartrain launch`, the context is that of a job with one process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, overload

import geartrain.core.trace as trace
from geartrain.core.arguments import check_keywords, did_you_mean
from geartrain.core.counters import SharedCounters
from geartrain.core.lifetime import Uncopied, living
from geartrain.core.schema import Field
from geartrain.core.shared_files import Trust
from geartrain.errors import (
    ArgumentError,
    GeartrainError,
    PeerError,
    StaleStoreError,
    StoreMissingError,
    UnknownPeerError,
    WaitTimeoutError,
)
from geartrain.launch.metrics import Reporter
from geartrain.store.store import Store

if TYPE_CHECKING:
    import geartrain.weights as weights
    from geartrain.actors.job_stores import JobStores
    from geartrain.actors.policy import RemotePolicy
    from geartrain.actors.remote_store import RemoteStore
    from geartrain.rpc import Node

#: Environment variable with the `ProcessSpec` of a process.
SPEC = "GEARTRAIN_PROCESS"
#: Name of the coordinator's node on host 0, which keeps the addresses of the job's nodes.
LAUNCHER = "geartrain.launch"
#: Prefix of keys in the job's name service: the address of a reducer, by its process's name.
REDUCER_KEY = "geartrain/reducer/"
#: Longest wait for another host's store: the hosts have to join, and a learner has to start.
REMOTE_STORE_S = 360.0
#: Pause between attempts to open a store that does not exist yet.
_RETRY_EVERY_S = 0.05
#: Longest wait for an answer of a store server that may not be there yet, and the pause before the next one.
_ASK_S, _ASK_AGAIN_S = 5.0, 0.2
#: Name of the role that serves stores to hosts without learners (placed_role.py).
STORES = "store"


def store_number(served: Sequence[int], hosts: Sequence[int], processes: int, host: int, local: int) -> int:
    """Which of the served stores a process of a host without one uses: the role's processes are dealt in turn.

    Args:
        served: hosts with stores.
        hosts, processes: of the process's role, and how many of them a host has.
        host, local: of the process, and its number there.
    """
    away = [each for each in hosts if each not in served]
    return (away.index(host) * processes + local) % len(served)


@dataclass
class ProcessSpec:
    """What the launcher tells a process about itself, as JSON in an environment variable."""

    job: str
    role: str
    kind: str
    number: int
    processes: int
    local: int
    host: int
    hosts: int
    restart: int
    run: Any
    args: dict[str, Any] = field(default_factory=dict)
    roles: dict[str, list[Any]] = field(default_factory=dict)  # name -> kind, processes on a host, hosts
    counters: str = ""
    slot: int = 0
    folder: str = ""
    launcher: str = ""  # address of the coordinator's node
    address: str = "127.0.0.1"  # of this host, for others
    trust: Trust = "user"
    parent: int = 0
    path: list[str] = field(default_factory=list)


class Context(Uncopied, elsewhere="call launch.context() there"):
    """A process's access to its job.

    The function of a role gets the context as its first argument. Other code gets it from `launch.context()`.

    Args:
        spec: set by the launcher; do not call the class itself.

    Attributes:
        job: name of the job, of its store and of its weights.
        role: name of the process's role.
        number: number of this process in its role, over all hosts.
        processes: number of processes of the role, over all hosts.
        name: "ROLE-NUMBER", also the name of its node.
        host: number of this host.
        hosts: number of hosts.
        address: address of this host, for other hosts of the job.
        has_store: whether this host has a store of the job; otherwise `store` is one of a learners' host.
        rank, world_size: of a learner; 0 and 1 for others.
        restart: how often this process was restarted.
        folder: folder of the job's logs, for files of the process; None outside of a launch.
        reporter: counters of this process; `report` writes to them.

    Examples:
        >>> def learn(context, steps=1000):  # of launch.learners("file.py:learn")
        ...     store, publisher = context.store(), context.publisher()
        ...     for step in range(steps):
        ...         context.report(steps=step + 1)
        ...         if context.stopping:
        ...             break
    """

    def __init__(self, spec: ProcessSpec | None = None) -> None:
        alone = spec is None
        spec = spec or ProcessSpec("alone", "alone", "other", 0, 1, 0, 0, 1, 0, None)
        self._spec = spec
        self.job, self.role, self.number, self.processes = spec.job, spec.role, spec.number, spec.processes
        self.name = f"{spec.role}-{spec.number}"
        self.host, self.hosts, self.restart = spec.host, spec.hosts, spec.restart
        self.address = spec.address
        learner_hosts = next((hosts for kind, _, hosts in spec.roles.values() if kind == "learner"), None)
        self.has_store = learner_hosts is None or spec.host in learner_hosts
        self.rank, self.world_size = 0, 1
        if spec.kind == "learner":
            self.rank, self.world_size = spec.number, spec.processes
        elif alone:
            self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.folder = Path(spec.folder) if spec.folder else None
        slot = None if alone else SharedCounters.open(spec.counters).slot(spec.slot)
        names = None if self.folder is None else self.folder / f".{self.name}.metrics.json"
        self.reporter = Reporter(slot, names)
        self._replays: list[Any] = []
        self._node: Node | None = None
        self._signalled = 0
        self._lock = threading.RLock()  # a signal's handler may come in between, in the same thread
        _contexts.add(self)
        if not alone:
            trace.name_process(f"{self.name} of {self.job}")

    def after_fork(self) -> None:
        """Internal: in a forked child, replaces the lock that another thread may have held."""
        self._lock = threading.RLock()

    @property
    def stopping(self) -> bool:
        """Whether the job is ending and the function should return soon. Costs a microsecond.

        Ranks that train together may see it at different steps. All-reduce it, so that no rank waits for the others
        until it is killed.
        """
        return self._signalled > 0 or self.reporter.stop_requested

    def report(
        self,
        *,
        steps: int | None = None,
        samples: int | None = None,
        rows: int | None = None,
        episodes: int | None = None,
        wait_s: float | None = None,
        version: int | None = None,
        **metrics: float,
    ) -> None:
        """Reports progress of this process, which also counts as a heartbeat. Costs microseconds: call it every step.

        Args:
            steps, samples, rows, episodes: totals of this process since it started.
            wait_s: total time that it waited for other processes, in seconds.
            version: version of the weights that it trained last, or acts with.
            metrics: other numbers to show, such as losses and returns; at most 16 names.
        """
        for replay in self._replays:
            stats = replay.stats()
            samples = int(stats["rows"]) if samples is None else samples
            wait_s = float(stats["wait_s"]) if wait_s is None else wait_s
        counts = {"steps": steps, "samples": samples, "rows": rows, "episodes": episodes, "wait_s": wait_s}
        for name, value in counts.items():
            if value is not None:
                self.reporter.count(name, value)
        if version is not None:
            self.reporter.version(version)
        for name, value in metrics.items():
            self.reporter.metric(name, float(value))
        self.reporter.heartbeat()

    def watch(self, replay: Any) -> Any:
        """Adds a replay's samples and waits to `report`; returns the replay.

        Args:
            replay: a `geartrain.Replay`.
        """
        self._replays.append(replay)
        return replay

    # --- store, weights and nodes of the job ------------------------------------------------------------------------

    @overload
    def store(
        self, fields: Mapping[str, Field], *, name: str = "", timeout_s: float | None = None, **options: Any
    ) -> Store: ...
    @overload
    def store(
        self, fields: None = None, *, name: str = "", timeout_s: float | None = None, **options: Any
    ) -> Store | RemoteStore: ...
    def store(
        self,
        fields: Mapping[str, Field] | None = None,
        *,
        name: str = "",
        timeout_s: float | None = None,
        **options: Any,
    ) -> Store | RemoteStore:
        """The job's store on this host, or the store of a learners' host if this host has none (`has_store`).

        Under a launcher the store stays until the job is over. `Job.keep_store` then decides. Hosts without learners
        are assigned, in order, to the stores of the hosts with learners. In a job with actors or workers, replays of
        the job's store wait for rows while these start (`Store.expect_writers`).

        Args:
            fields: fields of the store. If there is no store on this host, it is created; one that a dead job left is
                adopted with its rows. Without fields this waits for another process to create the store.
            name: name of another store of this host; the job's name by default.
            timeout_s: longest wait, in seconds; by default 60, and 360 for a store of another host, whose processes may
                start later.
            options: as for `Store.create`. In a launched job `trust` is that of `Job.trust`, for all processes; only
                stores of other names may differ.

        Raises:
            ArgumentError: `trust` differs from the job's, or fields were given on a host without a store.
            WaitTimeoutError: no process created the store in time.
            IncompatibleStoreError: a store of that name has other fields. Run `geartrain remove NAME`, or start with
                --fresh.
        """
        of_job = self.folder is not None and name in ("", self.job)
        if of_job and not self.has_store:
            if fields is not None or options:
                raise ArgumentError(
                    f"{self.name}: host {self.host} has no learners, so it has no store of the job: call store() "
                    "without fields to use a learners' host, or give a store of this host another name"
                )
            return self._remote_store(REMOTE_STORE_S if timeout_s is None else timeout_s)
        timeout_s = 60.0 if timeout_s is None else timeout_s
        trust: Trust = options.pop("trust", self._spec.trust)
        if of_job and trust != self._spec.trust:
            raise ArgumentError(
                f"every process of a job must open its store with the same trust: set trust={trust!r} in the "
                f"job's description (Job.trust), which has {self._spec.trust!r}"
            )
        if fields is not None:
            if of_job:
                options.setdefault("persist", True)  # until the launcher removes it, whichever process ends before
            options["trust"] = trust
            name = name or self.job
            made = Store.open(name, fields, create="missing", adopt=True, timeout_s=timeout_s, **options)
            return self._expecting_writers(made) if of_job else made
        if options:
            raise ArgumentError(f"{', '.join(options)}: options of a store need fields, which create it")
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                found = Store.open(name or self.job, trust=trust)
                return self._expecting_writers(found) if of_job else found
            except (StoreMissingError, StaleStoreError) as error:
                if time.monotonic() > until_s:
                    raise WaitTimeoutError(
                        f"{self.name}: no process has created the store {name or self.job!r} within {timeout_s:g} s: "
                        f"{error}"
                    ) from None
                self._pause_or_end(_RETRY_EVERY_S)

    def _expecting_writers(self, store: Store) -> Store:
        if any(kind in ("actor", "worker") for kind, _, _ in self._spec.roles.values()):
            store.expect_writers()  # until it is closed: a process that dies is started again, or the job ends
        return store

    def stores(self, own: Store | None = None, *, timeout_s: float = REMOTE_STORE_S) -> JobStores:
        """The stores of all hosts with learners, by their servers' names: "store-0", "store-1", ...

        Fetch rows of any of them by key (`gt.fetch(stores, keys)`), update and remove rows by key, and insert by name.
        The servers run if `Job.serve_stores` is set, or if a host without learners needs them.

        Args:
            own: this host's store, if it is open already.
            timeout_s: longest wait for each server, in seconds.

        Raises:
            ArgumentError: no process serves the job's stores.
            WaitTimeoutError: a store is not served in time.
        """
        from geartrain.actors.job_stores import JobStores

        found: dict[str, Store | RemoteStore] = {}
        for number, host in enumerate(self._store_hosts()):
            server = f"{STORES}-{number}"
            if host != self.host:
                found[server] = self._served_by(server, timeout_s)
            else:
                found[server] = self.store(timeout_s=timeout_s) if own is None else own
        return JobStores(found)

    def _remote_store(self, timeout_s: float) -> RemoteStore:
        """The store of one of the learners' hosts, for a process of a host without."""
        served = self._store_hosts()
        _, processes, hosts = self._spec.roles[self.role]
        number = store_number(served, hosts, processes, self.host, self._spec.local)
        return self._served_by(f"{STORES}-{number}", timeout_s)

    def _store_hosts(self) -> list[int]:
        if STORES not in self._spec.roles:
            raise ArgumentError(
                f"{self.name}: no process serves the stores of the job {self.job!r} to other hosts: set "
                "Job(serve_stores=True)"
            )
        return list(self._spec.roles[STORES][2])

    def _served_by(self, server: str, timeout_s: float) -> RemoteStore:
        """A store as its server serves it (store_role.py)."""
        from geartrain.actors.remote_store import TIMEOUT_S, RemoteStore

        served = self._store_hosts()
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                found = RemoteStore(self.node(), server, self.job, timeout_s=_ASK_S)
                found.timeout_s = TIMEOUT_S
                found.stopping = lambda: self.stopping
                return found
            except (PeerError, UnknownPeerError, WaitTimeoutError, LookupError, OSError) as error:
                if time.monotonic() > until_s:
                    raise WaitTimeoutError(
                        f"{self.name}: {server} of host {served[int(server.rpartition('-')[2])]} served no store "
                        f"within {timeout_s:g} s: {error}"
                    ) from None
                self._pause_or_end(_ASK_AGAIN_S)

    def _pause_or_end(self, pause_s: float) -> None:
        if self.stopping:
            raise SystemExit(0)
        self.reporter.heartbeat()
        time.sleep(pause_s)

    def publisher(self, **options: Any) -> weights.Publisher:
        """A publisher of the job's weights (`weights.Publisher`). One process of the job may have it.

        Args:
            options: as for `weights.Publisher`.
        """
        import geartrain.weights as weights

        check_keywords("publisher", options, weights.Publisher)
        if self.hosts > 1:
            options.setdefault("node", self.node())
        options.setdefault("trust", self._spec.trust)
        return weights.Publisher(self.job, **options)

    def reader(self, source: str = "learner-0", **options: Any) -> weights.Reader:
        """A reader of the job's weights (`weights.Reader`).

        Args:
            source: name of the process that publishes, for other hosts.
            options: as for `weights.Reader`.
        """
        import geartrain.weights as weights

        check_keywords("reader", options, weights.Reader)
        if self.hosts > 1:
            options.update(node=self.node(), source=source)
        options.setdefault("trust", self._spec.trust)
        return weights.Reader(self.job, **options)

    def node(self, **options: Any) -> Node:
        """This process's `rpc.Node`, made at the first call. The job's other processes call it by this process's name.

        Args:
            options: as for `rpc.Node`.
        """
        from geartrain.rpc import Node

        with self._lock:
            if self._node is None:
                options.setdefault("secret", os.environ.get("GEARTRAIN_SECRET", "").encode())
                if self._spec.hosts > 1:
                    options.setdefault("host", "0.0.0.0")
                peers = {LAUNCHER: self._spec.launcher} if self._spec.launcher else {}
                node = Node(self.name, peers=peers, **options)
                if self._node is not None:  # a signal's handler has made it meanwhile
                    node.close()
                    return self._node
                if self._spec.launcher:
                    node.directory.store = CoordinatorStore(node)
                    node.directory.put(node.name, node.address)
                self._node = node
            return self._node

    def policy(self, function: str, *, agent: str = "agent", timeout_s: float = 30.0) -> RemotePolicy:
        """A policy that calls an agent of this host, or of the hosts that the role runs on.

        A call to an agent that dies is retried until the agent is back, within `timeout_s`.

        Args:
            function: name of the agent's function (`rpc.batched` or `rpc.function`).
            agent: name of the agents' role. Processes are distributed round-robin over its agents, of this host if it
                has any.
            timeout_s: longest wait for a reply, in seconds.

        Raises:
            ArgumentError: the job has no such role.
        """
        from geartrain.actors.policy import RemotePolicy

        if agent not in self._spec.roles:
            raise ArgumentError(
                f"the job has no role {agent!r}; it has {', '.join(self._spec.roles)}"
                f"{did_you_mean(agent, self._spec.roles)}"
            )
        _, processes, hosts = self._spec.roles[agent]
        if self.host in hosts:
            number = hosts.index(self.host) * processes + self._spec.local % processes
        else:
            number = self.number % (len(hosts) * processes)
        return RemotePolicy(
            self.node(),
            f"{agent}-{number}",
            function,
            timeout_s=timeout_s,
            retry_s=timeout_s,
        )

    # --- signals --------------------------------------------------------------------------------------------------

    def on_signals(self) -> None:
        """Internal: handles signals.

        SIGTERM sets `stopping`, a second one raises SystemExit; Ctrl-C is left to the launcher.
        """
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        atexit.register(self.ends)

    def ends(self) -> None:
        """Internal: the process ends by itself; SIGTERM is ignored, which would change its exit code."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _on_term(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled += 1
        # A scheduler's own SIGTERM to all processes of a job comes before the launcher's first, and is no second one.
        if self._signalled > 1 and self.reporter.stop_requests != 1:
            raise SystemExit(0)

    def __repr__(self) -> str:
        return f"<Context {self.name} of {self.job!r}, {self.number + 1} of {self.processes}>"


class CoordinatorStore:
    """Addresses of a job's nodes, with the interface of a c10d store. The coordinator on host 0 keeps them."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def set(self, key: str, value: str) -> None:
        """As torch's."""
        self._node.call(LAUNCHER, "geartrain.launch.put", key, value)

    def get(self, key: str) -> str:
        """As torch's."""
        found = self._node.call(LAUNCHER, "geartrain.launch.get", key, 0.0)
        if found is None:
            raise UnknownPeerError(f"{key} is not registered any more")
        return str(found)

    def check(self, keys: list[str]) -> bool:
        """As torch's."""
        return all(self._node.call(LAUNCHER, "geartrain.launch.get", key, 0.0) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """As torch's: RuntimeError when they are not there in time."""
        until_s = time.monotonic() + timeout.total_seconds()
        for key in keys:
            left_s = max(0.0, until_s - time.monotonic())
            if self._node.call(LAUNCHER, "geartrain.launch.get", key, left_s, timeout_s=left_s + 10) is None:
                raise RuntimeError(f"timeout: {key} is not there")

    def delete_key(self, key: str) -> None:
        """As torch's. The launcher removes processes that have ended by itself, and may have ended before."""
        with contextlib.suppress(GeartrainError):
            self._node.call(LAUNCHER, "geartrain.launch.drop", key, timeout_s=1.0)


_context: Context | None = None
_contexts = living(after_fork=Context.after_fork)


def context() -> Context:
    """This process's context. Outside of a launch, it is the context of a job "alone", whose reports go nowhere.

    A script can therefore run by itself, and under `geartrain launch` as a command of a role.

    Example:
        >>> from geartrain import launch
        >>> context = launch.context()
        >>> context.name, context.rank, context.stopping
        ('alone-0', 0, False)
        >>> context.report(steps=1, loss=0.5)
    """
    global _context
    if _context is None:
        spec = os.environ.get(SPEC)
        _context = Context(ProcessSpec(**json.loads(spec)) if spec else None)
        if spec and threading.current_thread() is threading.main_thread():
            _context.on_signals()
            _context.report()
    return _context


__all__ = [
    "LAUNCHER",
    "REDUCER_KEY",
    "REMOTE_STORE_S",
    "SPEC",
    "STORES",
    "Context",
    "CoordinatorStore",
    "ProcessSpec",
    "context",
    "store_number",
]
