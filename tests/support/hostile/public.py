"""Public classes of the package, and those that have no lifetime that a caller could misuse."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from typing import Any

import geartrain as gt

#: Classes that users hold, beside those in the packages' `__all__`.
FURTHER = {
    "geartrain.core.counters": ("SharedCounters", "CounterSlot"),
    "geartrain.core.progress": ("Progress",),
    "geartrain.launch.prometheus": ("PrometheusEndpoint",),
    "geartrain.store.agents": ("AgentRecorder",),
    "geartrain.store.recorder": ("StepRecorder",),
    "geartrain.store.writers": ("ExpectedWriters",),
}
#: Packages whose classes are parts of another one; its factories run them.
PARTS = {
    "geartrain.replay.device": "parts of Replay(device=...), see the factory `Replay: on a device`",
    "geartrain.tools.plan": "figures computed from figures: nothing is opened",
    "geartrain.tools.cli": "functions of the command line",
}
ENDS = ("close", "stop", "shutdown", "abort", "unlink", "__enter__", "__del__")

#: Classes without a lifetime, and why.
NO_LIFETIME = {
    "Keys": "two arrays",
    "RowView": "a view of a row's blocks, which live as long as the view; `Rows` hands it out",
    "ExpectedWriters": "a mark on a handle of a store, which is tried itself",
    "RandomPolicy": "a function of the observation; holds an action space only",
    "Source": "base class of readers, which open their files while they are iterated",
    "BatchDone": "a tuple of figures",
    "Histogram": "counts in a dict",
    "Candidates": "a view of one step's rows, which a strategy is given and must not keep",
    "DeclaredStrategy": "base class of the strategies, which are functions of their arguments",
    "Mixture": "strategies and their shares",
    "WholeGroups": "a trait of a strategy",
    "LinkTraffic": "a tuple of figures",
    "WeightsInfo": "a tuple of figures",
    "SimulatedTensor": "an array of a test double",
    "SimulatedDevice": "a test double without memory or threads that outlive a call; `Replay: on a device` runs it",
    "SimulatedRuntime": "a test double of files in a folder of its test",
    "Job": "a description; `launch.run` is what runs",
    "JobStores": "names of stores, local and remote, which are tried themselves",
    "PrioritizedDQN": "an algorithm of Stable-Baselines3's; its buffer is `PrioritizedReplayBuffer`",
    "PrioritizedReplayBufferSamples": "a tuple of tensors",
    "PrioritizedSampler": "draws from its buffer's storage",
    "PrioritizedSliceSampler": "draws from its buffer's storage",
    "RoundRobinWriter": "writes to its buffer's storage",
    # torchrl imports triton, whose leaks at exit hide those that this is to find.
    "SharedStorage": "holds a `Store`, which is tried; closing and forking is in tests/integrations/test_torchrl*.py",
    "SliceSampler": "draws from its buffer's storage",
    "ExperiencePair": "two pytrees of arrays",
    "Sample": "pytrees of arrays",
    "BufferState": "one number, and its buffer's store",
    "PositionColumn": "reads from its buffer's store",
    "BatchTransition": "a dict of tensors",
    # JAX's threads at the interpreter's end, and in forks, are not ours to judge.
    "TrajectoryBuffer": "holds a `Store`, which is tried; the rest is in tests/integrations/test_jax_buffers.py",
    # The wheel is not on every machine. Their doors are tried in tests/transport/test_nixl.py.
    "NixlHandshake": "needs NIXL",
    "NixlLink": "needs NIXL",
    "RegisteredRegion": "needs NIXL",
    "UniformSampler": "numbers below the length of its buffer's storage",
}

#: Classes with a lifetime that do not refuse copies and pickles themselves, or are tried elsewhere, and why.
COPIED = {
    "Actor": "its recorder refuses",
    "Batch": "arrays",
    "EpisodeRecorder": "its recorder refuses",
    "Hosts": "of tests",
    "LocalPolicy": "its reader refuses; without one it is a function",
    "Progress": "a loop's own",
    "RemotePolicy": "its node refuses",
    "ReplayBuffer": "has a store of its own in the copy",
    "DictReplayBuffer": "likewise",
    "HerReplayBuffer": "likewise",
    "NStepReplayBuffer": "likewise",
    "PrioritizedReplayBuffer": "likewise",
    "ReplayDataset": "its replay refuses",
    "Row": "tried in tests/store/test_copies.py",
    "Rows": "likewise",
    "Snapshot": "arrays",
    "Store": "opens the segment again, see tests/store/test_copies.py",
    "ThreadRankGroup": "of tests",
}


def modules() -> list[Any]:
    """Every module whose `__all__` is API."""
    found = [gt]
    for info in pkgutil.walk_packages(gt.__path__, "geartrain."):
        if info.ispkg and info.name not in PARTS:
            found.append(importlib.import_module(info.name))
    return found


def classes() -> dict[str, type]:
    """The public classes by name."""
    found: dict[str, type] = {}
    for module in modules():
        for name in getattr(module, "__all__", ()):
            one = getattr(module, name)
            if inspect.isclass(one) and one.__module__.startswith("geartrain"):
                assert found.setdefault(one.__name__, one) is one, f"two public classes are named {one.__name__}"
    for module, names in FURTHER.items():
        found.update({name: getattr(importlib.import_module(module), name) for name in names})
    return found


def why_no_lifetime(one: type) -> str | None:
    """Why a class cannot be used at a wrong time; None where it can."""
    if issubclass(one, BaseException):
        return "an exception"
    if getattr(one, "_is_protocol", False):
        return "a protocol, which users implement"
    if dataclasses.is_dataclass(one) and not any(name in vars(one) for name in ENDS):
        return "a plain dataclass"
    return NO_LIFETIME.get(one.__name__)
