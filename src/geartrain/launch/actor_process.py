"""The process of an actor pool: reads its task from stdin and runs one actor. actor_entry.py starts it."""

from __future__ import annotations

import contextlib
import multiprocessing.spawn
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geartrain.core.counters import SharedCounters
from geartrain.core.processes import die_with_parent
from geartrain.core.shared_files import Trust
from geartrain.launch.actor_role import ActorContext, actor_seed, run_actor
from geartrain.launch.metrics import Reporter
from geartrain.store.store import Store

#: What to do about an error of a program's main file while an actor imports it.
MAIN_GUARD = "an actor imports the program's main file: put what that runs under `if __name__ == '__main__':`"
#: Whether this process is an actor that imports the program's main file.
importing_main = False


@dataclass(frozen=True)
class ActorTask:
    """The task of an actor pool's processes.

    Attributes:
        store, counters: names of both; actor i has the counters' slot i.
        trust: who may write to the store.
        make_environments, make_policy: see `ActorPool`.
        actors: how many there are.
        seed: of the pool.
        threads: that torch may use.
        options: for `Actor`.
    """

    store: str
    trust: Trust
    counters: str
    make_environments: Callable[[ActorContext], Any]
    make_policy: Callable[[ActorContext], Any]
    actors: int
    seed: int
    threads: int
    options: dict[str, Any]


def task_bytes(task: ActorTask, number: int, restart: int, error_fd: int) -> bytes:
    """Stdin of process `number`: the data that its interpreter needs to find the task's functions, and the pickled
    task.

    Raises:
        pickle.PicklingError, AttributeError: a function that a new process cannot find.
    """
    preparation = multiprocessing.spawn.get_preparation_data(f"geartrain-actor-{number}")
    preparation.pop("authkey", None)  # belongs to the pipes of multiprocessing, which are not used
    header = pickle.dumps((preparation, number, restart, os.getpid(), error_fd))
    return header + pickle.dumps(task)


def main() -> None:
    """Runs one actor until its slot says stop. Sends the traceback of an error to the pool."""
    preparation, number, restart, parent, error_fd = pickle.load(sys.stdin.buffer)
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # interrupts are the pool's owner's affair
    global importing_main
    try:
        importing_main = True
        multiprocessing.spawn.prepare(preparation)  # sys.path, and the main module that functions may be in
        importing_main = False
        task: ActorTask = pickle.load(sys.stdin.buffer)
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.environ.setdefault("OMP_NUM_THREADS", str(task.threads))
        if (torch := sys.modules.get("torch")) is not None:  # it read the variable when the user's module imported it
            torch.set_num_threads(task.threads)
        _act(task, number, restart)
    except BaseException:
        with contextlib.suppress(OSError), os.fdopen(error_fd, "w") as errors:
            errors.write(traceback.format_exc() + (f"{MAIN_GUARD}\n" if importing_main else ""))
        raise SystemExit(1) from None


def _end_on_sigterm(stopping: Callable[[], bool]) -> None:
    """If the pool is being stopped, SIGTERM ends this process by an exception, wherever it is."""

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        if stopping():
            raise SystemExit(128 + number)
        os.kill(os.getpid(), number)

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # else the user's module has one of its own
        signal.signal(signal.SIGTERM, end)


def _act(task: ActorTask, number: int, restart: int) -> None:
    slot = SharedCounters.open(task.counters).slot(number)
    _end_on_sigterm(lambda: slot["stop"] != 0.0)
    run_actor(
        ActorContext(number, task.actors, actor_seed(task.seed, number, restart), restart),
        task.make_environments,
        task.make_policy,
        lambda: Store.open(task.store, trust=task.trust),
        Reporter(slot, None),
        lambda: slot["stop"] != 0.0,
        **task.options,
    )


def last_error(trace: str) -> str:
    """The line of a traceback that has the error and its remedy; empty for no traceback."""
    lines = trace.splitlines()
    after = max((number for number, line in enumerate(lines) if line.startswith("  ")), default=-1) + 1
    if after >= len(lines):
        return ""
    return f"{lines[after]}; {MAIN_GUARD}" if lines[-1] == MAIN_GUARD else lines[after]


__all__ = ["MAIN_GUARD", "ActorTask", "last_error", "main", "task_bytes"]
