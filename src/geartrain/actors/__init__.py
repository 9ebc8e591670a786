"""Actors: step vectorised environments with a policy and record the episodes in a store.

    environments = environments_of([gym.make("Hopper-v5") for _ in range(8)])
    store = gt.Store.create("hopper", recorded_fields(environments.fields()), max_length=1000, capacity=1000)
    actor = Actor(environments, LocalPolicy(act, model, weights.Reader("policy")), store)
    actor.run(steps=100_000)

Each observation is stored once, whatever windows, frame stacks and n-step returns are drawn later. `publish_every` lets
learners sample a long episode before it ends. Every row carries the version of the model that acted. With the store's
rate limiter, actors wait while the learner is behind. recorder.py describes the contents of a row.
"""

from geartrain.actors.actor import Actor, ActorStats
from geartrain.actors.envs.adapters import StepResult, VectorEnv, environments_of
from geartrain.actors.job_stores import JobStores
from geartrain.actors.policy import LocalPolicy, Policy, RandomPolicy, RemotePolicy
from geartrain.actors.recorder import EpisodeRecorder, recorded_fields
from geartrain.actors.remote_store import RemoteRecorder, RemoteStore
from geartrain.actors.store_server import StoreServer

__all__ = [
    "Actor",
    "ActorStats",
    "EpisodeRecorder",
    "JobStores",
    "LocalPolicy",
    "Policy",
    "RandomPolicy",
    "RemotePolicy",
    "RemoteRecorder",
    "RemoteStore",
    "StepResult",
    "StoreServer",
    "VectorEnv",
    "environments_of",
    "recorded_fields",
]
