"""Processes of one backend in the RPC benchmark: started together, told what to do, and killed where they fail."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from geartrain.core.lifetime import on_error
from geartrain.errors import GeartrainError, PeerLostError, WaitTimeoutError
from geartrain_bench.rpc_rl.settings import Settings, lengths

if TYPE_CHECKING:
    from geartrain_bench.rpc_rl.worker import Work

START_S, EPISODE_S, END_S = 300.0, 600.0, 30.0


@contextlib.contextmanager
def started(backend: str, settings: Settings, point: dict[str, Any]) -> Iterator[Team]:
    """The processes of a backend for one measurement, joined and idle."""
    from geartrain_bench.rpc_rl.worker import Work

    with tempfile.TemporaryDirectory() as directory:
        port = point["master_port"]
        work = Work(
            world_size=point["world_size"],
            batch=point["batch"],
            state_size=lengths(point["state_size"]),
            nlayers=point["nlayers"],
            out_features=point["out_features"],
            threads=settings.threads,
            agent_threads=settings.agent_threads,
            init_method=f"file://{directory}/met" if port == "0" else f"tcp://{point['master_addr']}:{port}",
        )
        with Team(backend, work) as team:
            yield team


class Team:
    """The processes of one backend, joined and idle. A context manager; leaving it ends or kills them.

    Every wait has a deadline, and raises `WaitTimeoutError` at it, or `PeerLostError` with its output when a process
    ends.
    """

    def __init__(self, backend: str, work: Work) -> None:
        from geartrain_bench.rpc_rl.worker import name_of
        from geartrain_bench.rpc_rl.worker import run as worker

        self.backend = backend
        context = _context()
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.names = [name_of(rank) for rank in range(work.world_size)]
        with on_error(self.kill):
            for rank in range(work.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(target=worker, args=(backend, rank, work, theirs), daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self.pipes.append(ours)
            for rank in range(work.world_size):
                self._answer(rank, START_S, "join")

    def episode(self, steps: int) -> tuple[list[float], list[float]]:
        """Seconds of the agent's decisions and of the observers' calls in one episode."""
        self.pipes[0].send(("episode", steps))
        agent, observer = self._answer(0, EPISODE_S, "end an episode")
        return agent, observer

    def floor(self, repeats: int) -> list[float]:
        """Seconds of the agent's work without requests."""
        self.pipes[0].send(("floor", repeats))
        (found,) = self._answer(0, EPISODE_S, "measure the floor")
        return list(found)

    def close(self) -> None:
        """Asks all processes to leave, and kills the rest."""
        with contextlib.suppress(OSError, GeartrainError):
            for pipe in self.pipes:
                pipe.send(("end",))
            for rank in range(len(self.pipes)):
                self._answer(rank, END_S, "leave")
            for pipe in self.pipes:
                pipe.send(("end",))
            until_s = time.monotonic() + END_S
            for process in self.processes:
                process.join(max(0.0, until_s - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kills all."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(END_S)
        for pipe in self.pipes:
            pipe.close()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close() if kind is None else self.kill()

    def _answer(self, rank: int, limit_s: float, what: str) -> list[Any]:
        """The next message of a process, unless one of them ends before."""
        sentinels = {process.sentinel: other for other, process in enumerate(self.processes)}
        happened = wait([self.pipes[rank], *sentinels], limit_s)
        if not happened:
            raise WaitTimeoutError(f"{self.names[rank]} over {self.backend} did not {what} within {limit_s:g} s")
        for one in happened:
            other = sentinels.get(one, rank)  # type: ignore[call-overload]
            word, *said = self._heard(other)
            if word == "error":
                raise PeerLostError(f"{self.names[other]} over {self.backend} failed:\n{said[0]}")
            if one in sentinels:
                self.processes[other].join()
                code = self.processes[other].exitcode
                raise PeerLostError(f"{self.names[other]} over {self.backend} ended, with exit code {code}")
        return list(said)

    def _heard(self, rank: int) -> list[Any]:
        try:
            return list(self.pipes[rank].recv()) if self.pipes[rank].poll() else [""]
        except (EOFError, OSError):
            return [""]


def _context() -> Any:
    """Processes forked from one that has only loaded torch: twenty start as fast as one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["geartrain_bench.rpc_rl.worker"])
    return context
