"""Actors in processes of their own: started, watched, started again when they die, and stopped.

A process that dies leaves a store without harm: rows that it was writing come back, rows that could be selected while
they grew stay with the steps they have. The pool notices a death at once (it sleeps on the processes themselves), has
the store take the rows back, and starts the actor again with another seed, up to a limit; beyond it, `check` and the
end of the pool raise `ActorDiedError`, which says what the last one died of.

When the process that made the pool dies, however it does, the kernel kills its actors.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from geartrain.actors.actor import Actor
from geartrain.actors.policy import Policy
from geartrain.core.counters import Board
from geartrain.errors import ActorDiedError, ArgumentError, CallCancelledError
from geartrain.store.store import Store

COLUMNS = (
    "steps",
    "episodes",
    "rows",
    "policy_s",
    "environment_s",
    "store_s",
    "version",
    "mean_return",
    "pid",
    "restarts",
    "beat_s",
    "stop",
)
#: A seed that is this far from those of the actors that never died.
_RESTART_SEED = 1_000_003
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ActorContext:
    """What an actor's process is told about itself.

    Attributes:
        number, actors: which of how many it is.
        seed: of its episodes, and for anything random of its policy; another one after each restart.
        restart: how often it was started again.
        environments: the environments, for a policy that wants to know their spaces.
        part: under `geartrain launch`, this process's `launch.Part`.
    """

    number: int
    actors: int
    seed: int
    restart: int
    environments: Any = None
    part: Any = None


class ActorPool:
    """Processes that act until they are stopped.

    Args:
        store: where they write; they attach by its name.
        make_environments: called in each process with its `ActorContext`; returns what `environments_of` takes. A
            module's function, because a new process has to find it.
        make_policy: the same for the policy.
        actors: how many processes.
        seed: actor i uses seed + i * 1,000.
        publish_every, overlap: as for `Recorder`.
        max_restarts: of all actors together. With 0 the first death is an error.
        threads: that torch may use in each process.

    Raises:
        ArgumentError: no actors.

    Use it as a context manager; leaving it stops the actors, which end their episodes where they are.
    """

    def __init__(
        self,
        store: Store,
        make_environments: Callable[[ActorContext], Any],
        make_policy: Callable[[ActorContext], Policy],
        actors: int,
        *,
        seed: int = 0,
        publish_every: int | None = None,
        overlap: int = 0,
        max_restarts: int = 10,
        threads: int = 1,
    ) -> None:
        if actors < 1:
            raise ArgumentError(f"a pool needs at least one actor, found {actors}")
        self.store = store
        self.actors = actors
        self.restarts = 0
        self._max_restarts = max_restarts
        self._board = Board.create(f"actors-{secrets.token_hex(6)}", actors, COLUMNS)
        self._order = {
            "store": store.name,
            "board": self._board.name,
            "make_environments": make_environments,
            "make_policy": make_policy,
            "actors": actors,
            "seed": seed,
            "publish_every": publish_every,
            "overlap": overlap,
            "threads": threads,
        }
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = [None] * actors
        self._last_words: list[Any] = [None] * actors
        self._starts = [0] * actors
        self._failed: ActorDiedError | None = None
        self._stopping = False
        self._wake, self._bell = self._context.Pipe(duplex=False)
        try:
            for number in range(actors):
                self._start(number)
        except BaseException:
            self._kill()
            self._board.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="geartrain-actors", daemon=True)
        self._watcher.start()

    def stats(self) -> dict[str, Any]:
        """What all actors have done, those that died included.

        steps, episodes, rows; policy_share, environment_share, store_share (of their time, waits for the rate limiter
        in the last); oldest_version, newest_version (of the models that act); mean_return (of their last episodes);
        restarts; alive (processes).
        """
        column = self._board.column
        steps = column("steps")
        shares = {name: float(column(f"{name}_s").sum()) for name in ("policy", "environment", "store")}
        busy_s = sum(shares.values()) or 1.0
        ended = column("episodes") > 0
        version = column("version")[steps > 0]
        return {
            "steps": int(steps.sum()),
            "episodes": int(column("episodes").sum()),
            "rows": int(column("rows").sum()),
            **{f"{name}_share": seconds / busy_s for name, seconds in shares.items()},
            "oldest_version": int(version.min(initial=version.max(initial=0))),
            "newest_version": int(version.max(initial=0)),
            "mean_return": float(column("mean_return")[ended].mean()) if ended.any() else float("nan"),
            "restarts": self.restarts,
            "alive": sum(process is not None and process.is_alive() for process in self._processes),
        }

    def check(self) -> None:
        """Raises `ActorDiedError` once more actors have died than may be started again."""
        if self._failed is not None:
            raise self._failed

    def stop(self, timeout_s: float = 20.0) -> None:
        """Ends all actors: each after the step it is at, and after the deadline by force.

        Rows that the store's limiter holds up are given back: there may be no learner any more to make room for them.
        """
        if self._stopping:
            return
        self._stopping = True
        for number in range(self.actors):
            self._board.slot(number)["stop"] = 1.0
        until_s = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(0.0, until_s - time.monotonic()))
        self._kill()
        self._bell.send_bytes(b"stop")
        self._watcher.join(timeout_s)
        self.store.reap()
        self._board.close()

    def __enter__(self) -> ActorPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if kind is None:
            self.check()

    # --- processes --------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        order = {**self._order, "number": number, "restart": self._starts[number], "parent": os.getpid()}
        process = self._context.Process(
            target=_act, args=(order, theirs), name=f"geartrain-actor-{number}", daemon=True
        )
        process.start()
        theirs.close()
        self._starts[number] += 1
        self._processes[number], self._last_words[number] = process, ours

    def _watch(self) -> None:
        while not self._stopping and self._failed is None:
            sentinels = {process.sentinel: number for number, process in enumerate(self._processes)}
            for ready in multiprocessing.connection.wait([*sentinels, self._wake]):
                if ready in sentinels and not self._stopping and self._failed is None:
                    self._bury(sentinels[ready])  # type: ignore[index]
        self._wake.poll(None)  # the kernel takes the end of the thread that started a process for that of its parent

    def _bury(self, number: int) -> None:
        process, words = self._processes[number], self._last_words[number]
        process.join()
        why = _why(process.exitcode)
        with contextlib.suppress(EOFError, OSError):
            if words.poll(0):
                why = f"{why}:\n{words.recv()}"
        with contextlib.suppress(Exception):  # whoever needs a row next does it as well
            self.store.reap()
        self.restarts += 1
        if self.restarts > self._max_restarts:
            self._failed = ActorDiedError(
                f"actor {number} {why}\n{self.restarts} actors have died, and {self._max_restarts} may be started again"
            )
            return
        self._start(number)
        self._board.slot(number)["restarts"] = self._starts[number] - 1

    def _kill(self) -> None:
        for process in self._processes:
            if process is not None and process.is_alive():
                process.kill()
                process.join(10)


def _why(exitcode: int) -> str:
    if exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return "ended without being told to" if exitcode == 0 else f"failed with exit code {exitcode}"


def _act(order: dict[str, Any], last_words: Any) -> None:
    """An actor's process."""
    _die_with(order["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the pool's maker decides
    os.environ.setdefault("OMP_NUM_THREADS", str(order["threads"]))
    if (torch := sys.modules.get("torch")) is not None:  # which read the variable when the user's module imported it
        torch.set_num_threads(order["threads"])
    try:
        _run(order)
    except BaseException:
        with contextlib.suppress(OSError):
            last_words.send(traceback.format_exc())
        raise SystemExit(1) from None


def _run(order: dict[str, Any]) -> None:
    number, restart = order["number"], order["restart"]
    board = Board.open(order["board"])
    slot = board.slot(number)
    seed = order["seed"] + 1000 * number + _RESTART_SEED * restart
    context = ActorContext(number, order["actors"], seed, restart)
    environments = order["make_environments"](context)
    policy = order["make_policy"](ActorContext(number, order["actors"], seed, restart, environments))
    before = dict(slot)  # of those that died
    slot["pid"] = os.getpid()
    with Store.open(order["store"]) as store:
        actor = Actor(
            environments, policy, store, seed=seed, publish_every=order["publish_every"], overlap=order["overlap"]
        )
        stats = actor.stats

        def tell() -> bool:
            for name in ("steps", "episodes", "rows", "policy_s", "environment_s", "store_s"):
                slot[name] = before[name] + getattr(stats, name)
            slot["version"] = stats.version
            if stats.returns:
                slot["mean_return"] = sum(stats.returns) / len(stats.returns)
            slot["beat_s"] = time.time()
            return slot["stop"] != 0.0

        store.limiter.stopping = lambda: slot["stop"] != 0.0
        with contextlib.suppress(CallCancelledError):
            actor.run(until=tell)
        actor.close()
        tell()


def _die_with(parent: int) -> None:
    """The kernel kills this process when its parent, or the parent's thread that started it, ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


__all__ = ["ActorContext", "ActorPool"]
