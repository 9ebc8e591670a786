"""Writers that are killed: processes that record into a store, by its name, while somebody else is measured at it.

One at a time opens the store and records steps of four environments into rows that grow and are published every few
steps, until SIGKILL ends it after 0.2 to 0.6 s, mostly in the middle of rows; what it has published is removed, and the
next one begins. Whoever is measured samples rows that appear, grow, are lost and are reclaimed meanwhile.

As a program it is the process that starts and kills them: requests and answers as lines of JSON, as of any baseline.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from geartrain.core.lifetime import on_error
from geartrain.errors import GeartrainError
from geartrain.store.recorder import EPISODES
from geartrain.store.store import Store
from geartrain_bench.harness.child_process import AnsweringProcess, BaselineError

if TYPE_CHECKING:
    from typing_extensions import Self

#: A writer's life, at least and at most, in seconds.
LIFE_S = (0.2, 0.6)
#: Between two steps of a writer: it is there, and leaves the processor to whoever is measured.
PAUSE_S = 0.002
N_ENVS = 4
PUBLISH_EVERY = 8
#: Rows that a store needs for them.
ROWS = 2 * N_ENVS
#: Steps of an episode, at most.
EPISODE = 1000
#: Of their rows, by which those are known.
PRIORITY = 2.0


class KilledWriters:
    """Writers at a named store, from `enter` to `leave`.

    Args:
        name: of a store that has a recorder's fields.

    Attributes:
        kills: how many were killed so far; known after it was left.

    Raises:
        BaselineError: one of them could not record.
    """

    def __init__(self, name: str) -> None:
        self.kills = 0
        self._name = name
        self._process = AnsweringProcess("writers", sys.executable, Path(__file__), {"OMP_NUM_THREADS": "1"})

    def __enter__(self) -> Self:
        with on_error(self._process.close):
            self._process.ask({"do": "start", "store": self._name}, 120)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            told = self._process.ask({"do": "stop"}, 60)
            self.kills = told["kills"]
            if kind is None and told["failed"]:
                raise BaselineError(f"{told['failed']} writers ended by themselves")
        except BaselineError:
            if kind is None:
                raise
        finally:
            self._process.close()


def record(name: str) -> None:
    """Records into the store until the process is killed."""
    with Store.open(name, timeout_s=60) as store:
        given: dict[str, Any] = {
            field: np.zeros((N_ENVS, *one.shape), one.dtype)
            for field, one in store.fields.items()
            if field not in ("obs", "terminated", "truncated", "last", EPISODES)
        }
        obs = np.zeros((N_ENVS, *store.fields["obs"].shape), store.fields["obs"].dtype)
        never = np.zeros(N_ENVS, bool)
        length = min(EPISODE, store.max_length - 1)
        with store.recorder(N_ENVS, autoreset="next_step", publish_every=PUBLISH_EVERY, priority=PRIORITY) as recorder:
            recorder.reset(obs)
            at = 0
            while True:
                at += 1
                ended = np.full(N_ENVS, at % length == 0)
                recorder.step(obs, **given, terminated=ended, truncated=never)
                time.sleep(PAUSE_S)


class _Keeper:
    """Starts writers and kills them, on a thread, until it is stopped."""

    def __init__(self, store: Store) -> None:
        self.kills = self.failed = 0
        self._store = store
        # Rows that were there before: no writer's.
        self._others = np.zeros(store.capacity, bool)
        self._others[store.keys().row] = True
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Kills the last one."""
        self._over.set()
        self._thread.join(30)
        self._store.close()

    def _run(self) -> None:
        chosen = random.Random(0)
        while not self._over.is_set():
            child = os.fork()
            if child == 0:
                try:
                    record(self._store.name)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            self._over.wait(chosen.uniform(*LIFE_S))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if os.WIFSIGNALED(status):
                self.kills += 1
            else:
                self.failed += 1
            keys = self._store.keys()
            keys = keys[~self._others[keys.row]]
            # Of a row's first step, where steps have priorities: a row without a key's step has the sum of all.
            first = keys.of_steps(0) if self._store.per_step else keys
            self._store.delete(keys[self._store.status(first)["priority"] == PRIORITY])


def main() -> None:
    """Answers requests until the end of its input."""
    keeper: _Keeper | None = None
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if request["do"] == "start":
                keeper = _Keeper(Store.open(request["store"], timeout_s=60))
            elif keeper is not None:
                keeper.stop()
                answer = {"kills": keeper.kills, "failed": keeper.failed}
        except GeartrainError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    if keeper is not None:
        keeper.stop()


__all__ = ["KilledWriters"]

if __name__ == "__main__":
    main()
