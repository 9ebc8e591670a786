"""Runs one actor in its process, for `geartrain launch` (the role `actors`) and for `ActorPool`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from geartrain.actors.actor import Actor
from geartrain.actors.policy import Policy
from geartrain.actors.remote_store import RemoteStore, serves_no_more
from geartrain.errors import CallCancelledError, PeerLostError
from geartrain.launch.context import Context
from geartrain.launch.job import find_or_exit
from geartrain.launch.metrics import Reporter
from geartrain.store.store import Store

#: Distance between the seeds of neighbouring actors, with room for the environments of each; and between restarts.
_ACTOR_SEEDS, _RESTART_SEEDS = 1000, 1_000_003


@dataclass(frozen=True)
class ActorContext:
    """Identity and seed of an actor's process. The functions that make environments and policies get it.

    Attributes:
        number: number of this actor, from 0.
        actors: number of actors.
        seed: seed of its episodes, and of anything random in its policy (`actor_seed`).
        restart: how often it was restarted.
        environments: the environments, for a policy that needs their spaces.
        job: under `geartrain launch`, this process's `launch.Context`; None in an `ActorPool`.

    Examples:
        >>> from geartrain.actors import RandomPolicy
        >>> def make_policy(context):  # an ActorContext
        ...     return RandomPolicy(context.environments.action_space, seed=context.seed)
    """

    number: int
    actors: int
    seed: int
    restart: int
    environments: Any = None
    job: Any = None


def actor_seed(seed: int, number: int, restart: int) -> int:
    """Seed of actor `number` after `restart` restarts. It differs from all other seeds. Environment i adds i."""
    return seed + _ACTOR_SEEDS * number + _RESTART_SEEDS * restart


def run_actor(
    context: ActorContext,
    make_environments: Callable[[ActorContext], Any],
    make_policy: Callable[[ActorContext], Policy],
    open_store: Callable[[], Store | RemoteStore],
    reporter: Reporter,
    stopping: Callable[[], bool],
    *,
    steps: int | None = None,
    **options: Any,
) -> None:
    """Steps environments into a store until `stopping()`, and reports after each step.

    If the store is a peer's and the peer is lost, the actor continues when the peer is back. Published steps stay.

    Args:
        context: number and seed of this actor.
        make_environments, make_policy: called with the context, the second one with the environments in it.
        open_store: attaches to the store; called again when its peer was lost.
        reporter: counters of this process.
        stopping: whether to end; also ends a wait for the store's rate limiter.
        steps: at most so many.
        options: for `Actor`.
    """
    environments = make_environments(context)
    policy = make_policy(replace(context, environments=environments))
    with contextlib.ExitStack() as stack:
        store = open_store()
        if isinstance(store, Store):
            stack.enter_context(store)
            store.limiter.stopping = stopping  # there may be no learner left to sample what holds an insert up
        actor = Actor(environments, policy, store, seed=context.seed, **options)
        stats = actor.stats

        def report() -> bool:
            for name in ("steps", "rows", "episodes", "policy_s", "environment_s", "store_s"):
                reporter.count(name, getattr(stats, name))
            reporter.count("wait_s", stats.policy_s + stats.store_s)
            reporter.version(stats.version)
            if stats.returns:
                reporter.metric("return", sum(stats.returns) / len(stats.returns))
            reporter.heartbeat()
            return stopping()

        while True:
            try:
                if actor.recorder_lost:
                    actor.record_into(open_store())
                    print(f"goes on with {actor.store!r}", flush=True)
                actor.run(until=report, steps=None if steps is None else steps - stats.steps)
                break
            except CallCancelledError:
                break
            except (PeerLostError, LookupError) as error:
                if not (actor.recorder_lost and serves_no_more(error)):
                    raise
                print(f"the store's server is lost, and waited for: {error}", flush=True)
        actor.close()
        report()


def act(
    context: Context,
    *,
    environments: str,
    policy: str,
    seed: int = 0,
    steps: int | None = None,
    **options: Any,
) -> None:
    """Function that the processes of `launch.actors` run. See there."""
    number, restart = context.number, context.restart
    run_actor(
        ActorContext(number, context.processes, actor_seed(seed, number, restart), restart, job=context),
        find_or_exit(environments),
        find_or_exit(policy),
        context.store,
        context.reporter,
        lambda: context.stopping,
        steps=steps,
        **options,
    )


__all__ = ["ActorContext", "act", "actor_seed", "run_actor"]
