"""Actors: processes that step environments and write what happens straight into a store.

    environments = environments_of([gym.make("Hopper-v5") for _ in range(8)])
    store = gt.Store.create("hopper", recorded_fields(environments.fields()), max_length=1000, capacity=1000)
    actor = Actor(environments, LocalPolicy(act, model, weights.Reader("policy")), store)
    actor.run(steps=100_000)

`recorder.py` says what a row holds. An observation stands once, whatever windows, frame stacks and n-step targets are
made of it; a long episode can be selected while it goes on (`publish_every`); every row carries the version of the
model that acted; and where the store's `limiter` is set, actors wait while the learners are behind.
"""

from geartrain.actors.actor import Actor, ActorStats
from geartrain.actors.envs.adapters import Environments, Stepped, environments_of
from geartrain.actors.policy import LocalPolicy, Policy, RandomPolicy, RemotePolicy
from geartrain.actors.recorder import Recorder, recorded_fields

__all__ = [
    "Actor",
    "ActorStats",
    "Environments",
    "LocalPolicy",
    "Policy",
    "RandomPolicy",
    "Recorder",
    "RemotePolicy",
    "Stepped",
    "environments_of",
    "recorded_fields",
]
