"""One process of the RL benchmark: a coordinator, an agent or an observer, over geartrain.rpc or torch.distributed.rpc.

Every process starts in `run` and has one pipe to the benchmark, which ends it by closing it. The coordinator receives
the request to run an episode there: it calls `run_episode` of all observers concurrently, each of which requests an
action from the agent a hundred times and times every call; then it fetches the agent's measurements. The agent's work,
`Agent.decide`, and the observers', `_episode`, are the same code for both; transport and batching differ:
`rpc.batched` on one side, a shared future and a lock with `async_execution` on the other.
"""

from __future__ import annotations

import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, TypeVar, cast

import torch
from torch.distributed import rpc as torch_rpc

import geartrain.rpc as rpc

F = TypeVar("F", bound=Callable[..., Any])
COORDINATOR, AGENT, OBSERVER = "coordinator", "agent", "observer{}"
#: Time limit of a rendezvous and of a call, in seconds.
JOIN_S, CALL_S = 300.0, 600.0


@dataclass(frozen=True)
class Work:
    """One measurement: so many processes, a policy of this shape, a batched agent or one that is not."""

    world_size: int
    batch: bool
    state_size: tuple[int, ...]
    nlayers: int
    out_features: int
    threads: int
    agent_threads: int | None
    init_method: str

    @property
    def observers(self) -> int:
        """All processes but the coordinator and the agent; as many as a batch has states."""
        return self.world_size - 2


def name_of(rank: int) -> str:
    """Name of the process of that rank."""
    return {0: COORDINATOR, 1: AGENT}.get(rank) or OBSERVER.format(rank)


def run(backend: str, rank: int, work: Work, pipe: Connection) -> None:
    """Joins, says "ready", and serves until the pipe says "end" or is closed. Sends errors there before it ends."""
    warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # by init_rpc itself
    torch.set_num_threads(work.threads)
    torch.manual_seed(rank)
    try:
        SERVE[backend](rank, work, pipe)
    except EOFError:
        pass  # the benchmark has ended
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        raise


# --- workload, equal for all backends -----------------------------------------------------------------------------


class Agent:
    """A policy that chooses actions for states, and its own measurements."""

    def __init__(self, work: Work) -> None:
        width = 1
        for length in work.state_size:
            width *= length
        sizes = [width, *[work.out_features] * (work.nlayers + 1)]
        linears = [torch.nn.Linear(a, b) for a, b in pairwise(sizes)]
        self.policy = torch.nn.Sequential(torch.nn.Flatten(), *linears, torch.nn.Softmax(dim=0))
        self.work = work
        self.log_probs: list[torch.Tensor] = []
        self.latencies: list[float] = []
        self.lock = threading.Lock()  # held while a batch is answered, until its time is noted

    def decide(self, states: torch.Tensor) -> torch.Tensor:
        """An action for each state, drawn; its log probability is kept, with its graph, as for a training step."""
        chances: Any = torch.distributions.Categorical(self.policy(states))
        actions: torch.Tensor = chances.sample()
        self.log_probs.append(chances.log_prob(actions))
        return actions

    def decide_one(self, state: torch.Tensor) -> int:
        """The same for one state, timed."""
        began_s = time.perf_counter()
        action = self.decide(state.float().unsqueeze(0))
        self.latencies.append(time.perf_counter() - began_s)
        return int(action.item())

    def take_latencies(self) -> list[float]:
        """Seconds of all decisions since the last time; the episode's graphs are dropped."""
        with self.lock:
            taken, self.latencies = self.latencies, []
            self.log_probs = []
        return taken

    def floor(self, repeats: int) -> list[float]:
        """Seconds of the agent's work without requests: actions for states in memory."""
        n = self.work.observers if self.work.batch else 1
        states = [torch.rand(self.work.state_size) for _ in range(n)]
        found = []
        for _ in range(repeats + 20):
            began_s = time.perf_counter()
            self.decide(torch.stack(states)).tolist()
            found.append(time.perf_counter() - began_s)
        self.log_probs = []
        return found[20:]  # the first ones warm it up


def _episode(ask: Callable[[torch.Tensor], Any], state_size: tuple[int, ...], steps: int) -> list[float]:
    """Seconds of each of an observer's calls. After each it makes a new state and a reward, both random."""
    found = []
    state = torch.rand(state_size)
    for _ in range(steps):
        began_s = time.perf_counter()
        ask(state)
        found.append(time.perf_counter() - began_s)
        state, _reward = torch.rand(state_size), torch.rand(1).item()
    return found


def _left(pipe: Connection) -> None:
    """Reports it, and stays until all have left: the coordinator hosts the store that others need to leave."""
    pipe.send(("left",))
    pipe.recv()


def _coordinate(
    pipe: Connection,
    episode: Callable[[int], list[list[float]]],
    latencies: Callable[[], list[float]],
    floor: Callable[[int], list[float]],
) -> None:
    """Executes the benchmark's requests: ("episode", steps) and ("floor", repeats), until ("end",)."""
    pipe.send(("ready",))
    while True:
        word, *given = pipe.recv()
        if word == "end":
            return
        if word == "floor":
            pipe.send((word, floor(*given)))
            continue
        observed = episode(*given)
        pipe.send((word, latencies(), [one for of_one in observed for one in of_one]))


# --- geartrain.rpc -------------------------------------------------------------------------------------------------


def _serve_geartrain(rank: int, work: Work, pipe: Connection) -> None:
    if rank == 1:
        _offer_agent(work)
    elif rank > 1:
        _offer_observer(rank, work)
    node = rpc.init(
        name_of(rank),
        rank=rank,
        world_size=work.world_size,
        init_method=work.init_method,
        timeout_s=JOIN_S,
        secret=b"",
        **(
            {}
            if rank != 1 or work.agent_threads is None
            else {"options": rpc.NodeOptions(max_running=work.agent_threads)}
        ),
    )
    if rank == 0:
        observers = [name_of(other) for other in range(2, work.world_size)]

        def episode(steps: int) -> list[list[float]]:
            asked = [node.call_async(name, "run_episode", steps, timeout_s=CALL_S) for name in observers]
            return [one.result() for one in asked]

        _coordinate(
            pipe,
            episode,
            lambda: node.call(AGENT, "take_latencies"),  # type: ignore[no-any-return]
            lambda repeats: node.call(AGENT, "floor", repeats),  # type: ignore[no-any-return]
        )
    else:
        pipe.send(("ready",))
        pipe.recv()
    rpc.shutdown()
    _left(pipe)


def _offer_agent(work: Work) -> None:
    agent = Agent(work)
    rpc.function(name="take_latencies")(agent.take_latencies)
    rpc.function(name="floor")(agent.floor)
    if not work.batch:

        @rpc.function(name="select_action")
        def select_one(observer: int, state: torch.Tensor) -> int:
            return agent.decide_one(state)

        return

    def note(done: rpc.BatchDone) -> None:
        agent.latencies.append(done.answered_s - done.asked_s)
        agent.lock.release()

    @rpc.batched(max_size=work.observers, max_wait_us=None, on_batch=note)
    def select_action(observers: list[int], states: list[torch.Tensor]) -> list[int]:
        agent.lock.acquire()  # until its time is noted
        actions: list[int] = agent.decide(torch.stack(states)).tolist()
        return actions


def _offer_observer(rank: int, work: Work) -> None:
    @rpc.function
    def run_episode(steps: int) -> list[float]:
        call = rpc.node().call
        return _episode(lambda state: call(AGENT, "select_action", rank, state), work.state_size, steps)


# --- torch.distributed.rpc -----------------------------------------------------------------------------------------


_answered_later = cast("Callable[[F], F]", torch_rpc.functions.async_execution)


class _TorchAgent(Agent):
    """The agent behind an RRef; a batch is gathered under a lock, and one future answers all of it."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.states = torch.zeros(work.observers, *work.state_size)
        self.missing = work.observers
        self.actions: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self.since_s = 0.0

    @staticmethod
    def select_action(agent: torch_rpc.RRef[_TorchAgent], observer: int, state: torch.Tensor) -> int:
        """An action, at once."""
        return int(agent.local_value().decide_one(state))

    @staticmethod
    @_answered_later
    def select_action_batch(
        agent: torch_rpc.RRef[_TorchAgent], observer: int, state: torch.Tensor
    ) -> torch.futures.Future[int]:
        """An action, once all observers have called: the last call computes all of them."""
        self: _TorchAgent = agent.local_value()
        place = observer - 2
        self.states[place].copy_(state)
        answer: torch.futures.Future[int] = self.actions.then(lambda actions: int(actions.wait()[place].item()))
        with self.lock:
            if self.missing == self.work.observers:
                self.since_s = time.perf_counter()
            self.missing -= 1
            if self.missing == 0:
                self.missing = self.work.observers
                asked, self.actions = self.actions, torch.futures.Future()
                asked.set_result(self.decide(self.states))
                self.latencies.append(time.perf_counter() - self.since_s)
        return answer


class _TorchObserver:
    """An observer behind an RRef."""

    def __init__(self, rank: int, work: Work) -> None:
        self.rank, self.work = rank, work

    def run_episode(self, agent: torch_rpc.RRef[_TorchAgent], steps: int) -> list[float]:
        """Seconds of each call to the agent."""
        select = _TorchAgent.select_action_batch if self.work.batch else _TorchAgent.select_action
        owner, rank = agent.owner(), self.rank
        return _episode(
            lambda state: torch_rpc.rpc_sync(owner, select, args=(agent, rank, state)), self.work.state_size, steps
        )


def _serve_torch(rank: int, work: Work, pipe: Connection) -> None:
    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=work.init_method, rpc_timeout=CALL_S)
    if rank == 1 and work.agent_threads is not None:
        options.num_worker_threads = work.agent_threads
    join: Callable[..., None] = torch_rpc.init_rpc
    join(name_of(rank), rank=rank, world_size=work.world_size, rpc_backend_options=options)
    if rank == 0:
        _coordinate_torch(work, pipe)
    else:
        pipe.send(("ready",))
        pipe.recv()
    torch_rpc.shutdown()
    _left(pipe)


def _coordinate_torch(work: Work, pipe: Connection) -> None:
    agent = torch_rpc.remote(AGENT, _TorchAgent, args=(work,))
    observers = [
        torch_rpc.remote(name_of(rank), _TorchObserver, args=(rank, work)) for rank in range(2, work.world_size)
    ]

    def episode(steps: int) -> list[list[float]]:
        return torch.futures.wait_all([one.rpc_async().run_episode(agent, steps) for one in observers])

    _coordinate(
        pipe,
        episode,
        lambda: agent.rpc_sync().take_latencies(),
        lambda repeats: agent.rpc_sync().floor(repeats),
    )


SERVE: dict[str, Callable[[int, Work, Connection], None]] = {"geartrain": _serve_geartrain, "torch": _serve_torch}
