"""`ActorPool`: runs actors in processes, and supervises, restarts and stops them.

Start. Until an actor inserts rows, replays of the pool's store handle wait for rows (`Store.expect_writers`).

Restart. The pool's supervisor notices a death at once. It has the store free the rows that the actor was writing, and
restarts the actor with another seed. Rows that were selectable while they grew keep the steps they have. The first
death is logged as a warning.

Giving up. The pool gives up after too many deaths. It also gives up if one actor dies three times before it has
inserted anything, because its code must then be broken. It stops all actors, and waits for rows end with an error that
names the cause. `check` and the end of the pool raise `ActorDiedError` with the traceback.

If the process that made the pool dies, for whatever reason, the kernel kills the actors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, Any

import geartrain.launch.actor_process as actor_process
from geartrain.actors.policy import Policy
from geartrain.core.arguments import (
    check_function,
    check_type,
    check_whole,
    default_threads,
)
from geartrain.core.counters import SharedCounters
from geartrain.core.lifetime import Lifetime, on_error
from geartrain.core.process_report import register
from geartrain.core.threads import DaemonThread, ReentrantEvent
from geartrain.errors import ActorDiedError, ArgumentError, StoreClosedError
from geartrain.launch.actor_process import MAIN_GUARD, ActorTask, last_error, task_bytes
from geartrain.launch.actor_role import ActorContext
from geartrain.launch.metrics import COLUMNS, METRICS
from geartrain.launch.process import ChildProcess, python_command
from geartrain.launch.supervisor import KILL_S, Supervisor
from geartrain.store.recorder import check_steps
from geartrain.store.store import Store

#: Limit of processes that may have a store open.
MOST_ACTORS = 255
#: Time for an actor to end. One that steps ends in milliseconds; this limit is for one that hangs.
STOP_S = 6.0
#: Deaths of one actor without an insert in between, after which the pool gives up.
BARREN_DEATHS = 3
_log = logging.getLogger(__name__)


class ActorPool(Lifetime, elsewhere="it supervises processes of this one", at_exit=True):
    """Processes that run actors until the pool is closed.

    As a context manager, the pool closes at the end of the block, and the interpreter closes it at exit. The actors end
    their episodes and keep the steps. The pool belongs to the process that made it: in a forked child `close` does
    nothing.

    Args:
        store: the store that they write to; they open it by its name.
        make_environments: called in each process with its `ActorContext`; returns what `environments_of` takes. It is
            pickled: use a module's function, or a `functools.partial` of one.
        make_policy: the same for the policy.
        actors: number of processes.
        seed: actor i uses seed + i * 1,000, and another seed after each restart.
        publish_every, overlap: as for `Store.recorder`.
        max_restarts: restarts of all actors together. 0 gives up at the first death.
        threads: threads that torch may use in each process.

    Raises:
        ArgumentError: there are no actors, or another argument is out of range.
        StoreClosedError: the store is closed.

    Examples:
        >>> def collect(store, make_environments, make_policy):
        ...     with ActorPool(store, make_environments, make_policy, actors=4) as pool:
        ...         while len(store) < 1000:
        ...             pool.check()  # raises if the actors died
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
        check_type("the actors of a pool write into a Store of this host", store, Store)
        if actor_process.importing_main:
            raise ArgumentError(f"an actor cannot make a pool: {MAIN_GUARD}")
        check_function("make_environments", make_environments)
        check_function("make_policy", make_policy)
        check_whole("actors", actors, 1, MOST_ACTORS)
        actors = int(actors)
        check_whole("seed", seed)
        check_whole("max_restarts", max_restarts, 0, 2**31)
        default_threads(threads)
        check_steps(publish_every, overlap, store.max_length)
        super().__init__(f"the actor pool of store {store.name!r}")
        self.store = store
        self.actors = actors
        self.restarts = 0
        self._max_restarts = max_restarts
        self.counters = SharedCounters.create(f"actors-{secrets.token_hex(6)}", actors, (*COLUMNS, "restarts"))
        self._task = ActorTask(
            store=store.name,
            trust=store.trust,
            counters=self.counters.name,
            make_environments=make_environments,
            make_policy=make_policy,
            actors=actors,
            seed=seed,
            threads=threads,
            options={"publish_every": publish_every, "overlap": overlap},
        )
        self._supervisor = Supervisor([_ActorProcess(number) for number in range(actors)])
        self._failed: BaseException | None = None
        self._start_error: BaseException | None = None
        self._stop_at_s: float | None = None
        self._closing = threading.RLock()  # a signal's handler may close it while its thread does
        self._started = ReentrantEvent()
        # One thread starts, watches and reaps all: the kernel kills them when that thread ends.
        self._thread = DaemonThread(self._supervise, "geartrain-actors")
        with on_error(self.counters.close), on_error(self._supervisor.close):
            self._writers = store.expect_writers()
            with on_error(self._writers.close):  # no more threads
                self._thread.start()
        with on_error(self.close):  # KeyboardInterrupt
            self._started.wait()
        if self._start_error is not None:
            self._thread.join()
            self._writers.close()
            self.counters.close()
            raise self._start_error
        with on_error(self.close):  # a setting that cannot be used
            self._begin()
            register(self, "pool", _figures)

    def stats(self) -> dict[str, Any]:
        """What all actors have done, including those that died.

        | key | meaning |
        |---|---|
        | steps, episodes, rows | totals |
        | policy_share, environment_share, store_share | shares of the actors' time, rate limiter in the last |
        | oldest_version, newest_version | versions of the models that act |
        | mean_return | mean return of the last episodes |
        | restarts, alive | restarts so far, processes now |
        """
        column = self.counters.column
        steps = column("steps")
        shares = {name: float(column(f"{name}_s").sum()) for name in ("policy", "environment", "store")}
        busy_s = sum(shares.values()) or 1.0
        with_returns = column("own") > 0
        version = column("version")[steps > 0]
        return {
            "steps": int(steps.sum()),
            "episodes": int(column("episodes").sum()),
            "rows": int(column("rows").sum()),
            **{f"{name}_share": seconds / busy_s for name, seconds in shares.items()},
            "oldest_version": int(version.min(initial=version.max(initial=0))),
            "newest_version": int(version.max(initial=0)),
            "mean_return": float(column(METRICS[0])[with_returns].mean()) if with_returns.any() else float("nan"),
            "restarts": self.restarts,
            "alive": sum(process.running for process in self._supervisor.processes),
        }

    def check(self) -> None:
        """Raises `ActorDiedError`, with the traceback of the last death, once the pool has given up."""
        if self._failed is not None:
            raise self._failed

    def close(self, timeout_s: float = STOP_S) -> None:
        """Ends all actors: each after its present step, by SIGTERM after half of `timeout_s`, by SIGKILL at its end.

        SIGTERM raises SystemExit in an actor that is still starting, or in a step. Its unpublished steps are then lost.
        Rows that wait for the store's rate limiter are abandoned, because there may be no learner any more.

        Args:
            timeout_s: time until the last actor is killed, in seconds.
        """
        if self._forked:
            return
        with self._closing:  # a second caller returns when they have ended
            if not self._unended:
                return
            self._ask_to_stop(timeout_s)
            self._supervisor.wake()
            self._thread.join(timeout_s + 2 * KILL_S)
            with contextlib.suppress(StoreClosedError):  # closed before its pool: whoever has it open does it
                self.store.reap()
            self._writers.close()
            self.counters.close()
            self._end()

    def __exit__(self, *raised: object) -> None:
        self.close()
        if raised[0] is None:
            self.check()

    def _ask_to_stop(self, timeout_s: float) -> None:
        for number in range(self.actors):
            self.counters.slot(number)["stop"] = 1.0
        if self._stop_at_s is None:
            self._stop_at_s = time.monotonic() + timeout_s

    # --- the supervisor's thread ------------------------------------------------------------------------------

    def _supervise(self) -> None:
        processes = self._supervisor.processes
        try:
            for process in processes:
                if self._stop_at_s is not None:  # Ctrl-C in the constructor
                    break
                self._start(process)
            self._started.set()
            while self._stop_at_s is None:
                self._supervisor.wait(None)
                for process in self._supervisor.reap():
                    if self._stop_at_s is None:
                        self._handle_exit(process)
            self._await_ends((time.monotonic() + self._stop_at_s) / 2)
            for process in processes:
                process.terminate()
            self._await_ends(self._stop_at_s)
        except BaseException as error:  # for `check`, or the constructor
            if self._started.is_set():
                self._give_up(self._failed or error, f"the supervisor of its actor pool has failed: {error!r}")
            else:
                self._start_error = error
        finally:
            self._supervisor.kill(processes)
            for process in processes:
                process.close()
            self._supervisor.close()
            self._started.set()

    def _await_ends(self, until_s: float) -> None:
        while any(each.running for each in self._supervisor.processes) and (left_s := until_s - time.monotonic()) > 0:
            self._supervisor.wait(left_s)
            self._supervisor.reap()

    def _start(self, process: _ActorProcess) -> None:
        slot = self.counters.slot(process.number)
        process.began_with = self._inserted(process.number)
        process.start(self._task)
        slot["pid"], slot["restarts"] = process.pid or 0, process.restart

    def _inserted(self, number: int) -> float:
        """Rows that an actor has completed; or published, where it publishes unfinished ones."""
        slot, publish_every = self.counters.slot(number), self._task.options["publish_every"]
        return slot["rows"] + (slot["steps"] // publish_every if publish_every else 0)

    def _handle_exit(self, process: _ActorProcess) -> None:
        trace = process.traceback()
        reason = f"actor {process.number} {process.exit_reason()}"
        brief = f"{reason} ({last_error(trace)})" if trace else reason
        with contextlib.suppress(Exception):  # the next insert does it as well
            self.store.reap()
        self.restarts += 1
        process.barren = 0 if self._inserted(process.number) > process.began_with else process.barren + 1
        if self.restarts > self._max_restarts:
            why = f"{self.restarts} deaths are more than max_restarts={self._max_restarts}"
        elif process.barren == BARREN_DEATHS:
            why = f"it has died {BARREN_DEATHS} times before it had inserted a row"
        else:
            if self.restarts == 1:
                _log.warning("%s, and is restarted. Call pool.check(): it raises once the pool gives up", brief)
            self._writers.trouble = f"of its actor pool {brief}, with {self.restarts} restarts so far"
            process.restart += 1
            self._start(process)
            return
        told = f"{reason}:\n{trace}" if trace else reason
        trouble = f"its actor pool has given up: {brief}, and {why}. pool.check() raises the traceback"
        self._give_up(ActorDiedError(f"{told}\n{why}"), trouble)

    def _give_up(self, failure: BaseException, trouble: str) -> None:
        _log.error("store %r: %s", self.store.name, trouble)
        self._failed = failure
        self._writers.give_up(failure, trouble)
        self._ask_to_stop(STOP_S)


def _figures(pool: ActorPool) -> dict[str, Any]:
    """For the process's report: which counters belong to which actor, by slot."""
    return {
        "name": pool.store.name,
        "counters": pool.counters.name,
        "processes": [
            {
                "name": each.name,
                "kind": "actor",
                "pid": each.pid,
                "restarts": each.restart,
                "exit_code": each.returncode,
            }
            for each in pool._supervisor.processes
        ],
    }


class _ActorProcess(ChildProcess):
    """The process of one actor. It shares stdout and stderr with its parent, and reports a traceback through a file.

    Attributes:
        barren: deaths since it last inserted something.
        began_with: what it had inserted when it was started.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"actor-{number}")
        self.number = number
        self.barren = 0
        self.began_with = 0.0
        self._errors: IO[bytes] | None = None

    def start(self, task: ActorTask) -> None:
        self.close()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # read when the process has ended
        with tempfile.TemporaryFile() as stdin:
            stdin.write(task_bytes(task, self.number, self.restart, self._errors.fileno()))
            stdin.seek(0)
            self.spawn(
                python_command("geartrain.launch.actor_entry"),
                environment=dict(os.environ),
                stdin=stdin,
                pass_fds=[self._errors.fileno()],
            )

    def traceback(self) -> str:
        """Of the error that ended it; empty after a kill."""
        if self._errors is None:
            return ""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def close(self) -> None:
        if self._errors is not None:
            self._errors.close()
            self._errors = None


__all__ = ["ActorContext", "ActorPool"]
