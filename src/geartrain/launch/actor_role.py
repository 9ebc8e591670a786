"""An actor under `geartrain launch`: steps environments into the job's store until the job is over."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from geartrain.actors import Actor
from geartrain.errors import CallCancelledError
from geartrain.launch.actor_pool import ActorContext
from geartrain.launch.context import Part
from geartrain.launch.job import find

#: A seed that is this far from those of the processes that never died.
_RESTART_SEED = 1_000_003


def act(
    part: Part,
    *,
    environments: str,
    policy: str,
    seed: int = 0,
    publish_every: int | None = None,
    overlap: int = 0,
    priority: float = 1.0,
    steps: int | None = None,
) -> None:
    """See `launch.actors`."""
    own_seed = seed + 1000 * part.number + _RESTART_SEED * part.restart
    context = ActorContext(part.number, part.processes, own_seed, part.restart, part=part)
    made = find(environments)(context)
    acting = find(policy)(replace(context, environments=made))
    with part.store() as store:
        actor = Actor(
            made, acting, store, seed=own_seed, publish_every=publish_every, overlap=overlap, priority=priority
        )
        stats = actor.stats
        teller = part._teller

        def told() -> bool:
            for name in ("steps", "rows", "episodes", "policy_s", "environment_s", "store_s"):
                teller.count(name, getattr(stats, name))
            teller.count("wait_s", stats.policy_s + stats.store_s)
            teller.version(stats.version)
            if stats.returns:
                teller.figure("return", sum(stats.returns) / len(stats.returns))
            teller.beat()
            return part.stopping

        store.limiter.stopping = lambda: part.stopping  # nobody may be left who would draw what it holds up
        with contextlib.suppress(CallCancelledError):
            actor.run(until=told, steps=steps)
        actor.close()
        told()
