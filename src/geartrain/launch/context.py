"""A process's view of the job it is part of; outside of a launch, of a job of one process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from geartrain.core.counters import Board
from geartrain.core.schema import Field
from geartrain.errors import (
    ArgumentError,
    GeartrainError,
    StaleStoreError,
    StoreMissingError,
    UnknownPeerError,
    WaitTimeoutError,
)
from geartrain.launch.metrics import Teller
from geartrain.store.store import Store

if TYPE_CHECKING:
    import geartrain.weights as weights
    from geartrain.actors.policy import RemotePolicy
    from geartrain.rpc import Node

#: Where a process finds its order.
ORDER = "GEARTRAIN_PART"
#: The node of the launcher on host 0, where peers of a job find each other.
LAUNCHER = "geartrain.launch"
#: A store that is not there yet is looked for so often.
_LOOK_EVERY_S = 0.05


@dataclass
class Order:
    """What the launcher tells a process, as JSON in its environment."""

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
    roles: dict[str, list[Any]] = field(default_factory=dict)  # name -> processes on a host, "all" or "first"
    board: str = ""
    slot: int = 0
    folder: str = ""
    launcher: str = ""  # its node's address
    parent: int = 0
    path: list[str] = field(default_factory=list)


class Part:
    """What a process of a job knows and says. `launch.part()` gives it; functions get it as first argument.

    Attributes:
        job: the job's name, which is also its store's and its weights'.
        role, number, processes: which of how many of that role, over all hosts.
        name: "ROLE-NUMBER", which is also its node's.
        host, hosts: which of how many.
        rank, world_size: of a learner; 0 of 1 for others.
        restart: how often it was started again.
        folder: of the job's logs, for what the process writes; None outside of a launch.
    """

    def __init__(self, order: Order | None = None) -> None:
        alone = order is None
        order = order or Order("alone", "alone", "other", 0, 1, 0, 0, 1, 0, None)
        self._order = order
        self.job, self.role, self.number, self.processes = order.job, order.role, order.number, order.processes
        self.name = f"{order.role}-{order.number}"
        self.host, self.hosts, self.restart = order.host, order.hosts, order.restart
        self.rank, self.world_size = 0, 1
        if order.kind == "learner":
            self.rank, self.world_size = order.number, order.processes
        elif alone:
            self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.folder = Path(order.folder) if order.folder else None
        slot = None if alone else Board.open(order.board).slot(order.slot)
        names = None if self.folder is None else self.folder / f".{self.name}.figures.json"
        self._teller = Teller(slot, names)
        self._replays: list[Any] = []
        self._node: Node | None = None
        self._signalled = 0
        self._lock = threading.Lock()

    @property
    def stopping(self) -> bool:
        """Whether the job ends: return soon. Looking costs a microsecond.

        Ranks that train together may see it at different steps: they agree first (an all-reduce of this flag), or one
        of them waits for the others until it is killed.
        """
        return self._signalled > 0 or self._teller.told_to_stop

    def report(
        self,
        *,
        steps: int | None = None,
        samples: int | None = None,
        rows: int | None = None,
        episodes: int | None = None,
        wait_s: float | None = None,
        version: int | None = None,
        **figures: float,
    ) -> None:
        """Tells how far this process is. It costs microseconds: call it every step.

        Args:
            steps, samples, rows, episodes: totals of this process since it was started.
            wait_s: seconds it has waited for others, in total.
            version: of the weights that it trained last, or acts with.
            figures: anything else to show: losses, returns; 16 at most.
        """
        for replay in self._replays:
            stats = replay.stats()
            samples = int(stats["rows"]) if samples is None else samples
            wait_s = float(stats["wait_s"]) if wait_s is None else wait_s
        counts = {"steps": steps, "samples": samples, "rows": rows, "episodes": episodes, "wait_s": wait_s}
        for name, value in counts.items():
            if value is not None:
                self._teller.count(name, value)
        if version is not None:
            self._teller.version(version)
        for name, value in figures.items():
            self._teller.figure(name, float(value))
        self._teller.beat()

    def watch(self, replay: Any) -> Any:
        """Has `report` tell of this replay's samples and waits as well; returns it."""
        self._replays.append(replay)
        return replay

    # --- what the processes of a job share ------------------------------------------------------------------------

    def store(
        self, fields: Mapping[str, Field] | None = None, *, name: str = "", timeout_s: float = 60.0, **options: Any
    ) -> Store:
        """The job's store on this host.

        Args:
            fields: those of the store: it is made if there is none, and its rows are adopted if a job that died has
                left it. Without them this waits for somebody else to make it.
            name: of another store; the job's name by default.
            timeout_s: how long to wait for it.
            options: for `Store.create`.

        Raises:
            WaitTimeoutError: nobody made it in time.
            IncompatibleStoreError: a store of that name has other fields; `geartrain remove NAME`, or --fresh.
        """
        if fields is not None:
            return Store.open(name or self.job, fields, create="missing", adopt=True, timeout_s=timeout_s, **options)
        if options:
            raise ArgumentError(f"{', '.join(options)} only mean something with fields")
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                return Store.open(name or self.job)
            except (StoreMissingError, StaleStoreError) as error:
                if time.monotonic() > until_s:
                    raise WaitTimeoutError(
                        f"{self.name}: nobody has made the store {name or self.job!r} within {timeout_s:g} s: {error}"
                    ) from None
                if self.stopping:
                    raise SystemExit(0) from None
                time.sleep(_LOOK_EVERY_S)

    def publisher(self, **options: Any) -> weights.Publisher:
        """The job's weights, to publish them (`weights.Publisher`): for one process of the job."""
        import geartrain.weights as weights

        if self.hosts > 1:
            options.setdefault("node", self.node())
        return weights.Publisher(self.job, **options)

    def reader(self, source: str = "learner-0", **options: Any) -> weights.Reader:
        """The job's weights, to follow them (`weights.Reader`). `source` is who publishes, for other hosts."""
        import geartrain.weights as weights

        if self.hosts > 1:
            options.update(node=self.node(), source=source)
        return weights.Reader(self.job, **options)

    def node(self, **options: Any) -> Node:
        """This process's `rpc.Node`, which the job's other processes call by this part's name; made at the first call.

        Args:
            options: for `Node`.
        """
        from geartrain.rpc import Node

        with self._lock:
            if self._node is None:
                order = self._order
                options.setdefault("secret", os.environ.get("GEARTRAIN_SECRET", "").encode())
                if order.hosts > 1:
                    options.setdefault("host", "0.0.0.0")
                peers = {LAUNCHER: order.launcher} if order.launcher else {}
                node = Node(self.name, peers=peers, **options)
                if order.launcher:
                    node.directory.store = Names(node)
                    node.directory.put(node.name, node.address)
                self._node = node
            return self._node

    def policy(self, function: str, *, agent: str = "agent", timeout_s: float = 30.0) -> RemotePolicy:
        """A policy that asks an agent of this host, or of the first if there are only those.

        An agent that dies is asked again once it is back, within `timeout_s`.

        Args:
            function: of the agent, by `rpc.batched` or `rpc.function`.
            agent: the role's name. Processes take its agents in turns.
            timeout_s: longest wait for an answer.
        """
        from geartrain.actors.policy import RemotePolicy

        if agent not in self._order.roles:
            raise ArgumentError(f"the job has no role {agent!r}; it has {', '.join(self._order.roles)}")
        processes, hosts = self._order.roles[agent]
        first = 0 if hosts == "first" else self.host * processes
        return RemotePolicy(
            self.node(),
            f"{agent}-{first + self._order.local % processes}",
            function,
            timeout_s=timeout_s,
            retry_s=timeout_s,
        )

    # --- signals --------------------------------------------------------------------------------------------------

    def on_signals(self) -> None:
        """SIGTERM asks for an end (`stopping`), a second one raises SystemExit; Ctrl-C is the launcher's affair."""
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _on_term(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled += 1
        if self._signalled > 1:
            raise SystemExit(0)

    def __repr__(self) -> str:
        return f"<Part {self.name} of {self.job!r}, {self.number + 1} of {self.processes}>"


class Names:
    """The names of a job's peers, kept by the launcher of host 0: a store of the kind that `rpc` takes."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def set(self, key: str, value: str) -> None:
        """As torch's."""
        self._node.call(LAUNCHER, "geartrain.launch.put", key, value)

    def get(self, key: str) -> str:
        """As torch's."""
        found = self._node.call(LAUNCHER, "geartrain.launch.get", key, 0.0)
        if found is None:
            raise UnknownPeerError(f"{key} is gone")
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
        """As torch's. The launcher forgets processes that have ended by itself, and may be gone already."""
        with contextlib.suppress(GeartrainError):
            self._node.call(LAUNCHER, "geartrain.launch.drop", key, timeout_s=1.0)


_part: Part | None = None


def part() -> Part:
    """This process's part. Outside of a launch: one of its own, of the job "alone", whose reports go nowhere.

    So a script runs by itself, and under `geartrain launch` as a command of a role.

    Example:
        >>> from geartrain import launch
        >>> part = launch.part()
        >>> part.name, part.rank, part.stopping
        ('alone-0', 0, False)
        >>> part.report(steps=1, loss=0.5)
    """
    global _part
    if _part is None:
        told = os.environ.get(ORDER)
        _part = Part(Order(**json.loads(told)) if told else None)
        if told and threading.current_thread() is threading.main_thread():
            _part.on_signals()
            _part.report()
    return _part


__all__ = ["LAUNCHER", "ORDER", "Names", "Order", "Part", "part"]
