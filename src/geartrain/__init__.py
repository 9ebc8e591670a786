"""geartrain: the data plane for training large models with reinforcement learning.

    import geartrain as gt

    store = gt.Store.create("hopper", {"obs": gt.Field((11,), "float32")}, max_length=1000, capacity=10_000)
    replay = gt.Replay(store, gt.selection.Prioritized(seed=0), batch_size=256, window=20)

The public names are these; each is documented where it is defined, and imported when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux" or sys.maxsize < 2**32:
    raise ImportError(
        f"geartrain needs 64-bit Linux; this is {sys.platform} with {sys.maxsize.bit_length() + 1}-bit Python"
    )

if TYPE_CHECKING:
    import geartrain.actors as actors
    import geartrain.collectives as collectives
    import geartrain.errors as errors
    import geartrain.integrations as integrations
    import geartrain.launch as launch
    import geartrain.rpc as rpc
    import geartrain.selection as selection
    import geartrain.transport as transport
    import geartrain.weights as weights
    from geartrain.checkpoints.job import load_checkpoint, save_checkpoint
    from geartrain.core.keys import Keys
    from geartrain.core.schema import Bytes, Field, Text
    from geartrain.core.tasks import Task
    from geartrain.launch.actor_pool import ActorPool
    from geartrain.placement.placement import Placement
    from geartrain.replay.batch import Batch
    from geartrain.replay.cost import Cost
    from geartrain.replay.device.options import DeviceOptions
    from geartrain.replay.fetch import fetch
    from geartrain.replay.hindsight import Hindsight
    from geartrain.replay.iterable_dataset import ReplayDataset
    from geartrain.replay.options import RankOptions, ReplayOptions
    from geartrain.replay.replay import Replay
    from geartrain.replay.transitions import Transitions
    from geartrain.replay.windows import Windows
    from geartrain.store.claims import Claim, ClaimedRow
    from geartrain.store.rate_limiter import RateLimiter
    from geartrain.store.recorder import recorded_fields
    from geartrain.store.row import Row, Rows
    from geartrain.store.store import Store

__version__ = "0.1.0"

# Where each public name is defined; a module that is public itself stands with an empty name.
_NAMES = {
    "ActorPool": ("geartrain.launch.actor_pool", "ActorPool"),
    "Batch": ("geartrain.replay.batch", "Batch"),
    "Bytes": ("geartrain.core.schema", "Bytes"),
    "Claim": ("geartrain.store.claims", "Claim"),
    "ClaimedRow": ("geartrain.store.claims", "ClaimedRow"),
    "Cost": ("geartrain.replay.cost", "Cost"),
    "Field": ("geartrain.core.schema", "Field"),
    "Hindsight": ("geartrain.replay.hindsight", "Hindsight"),
    "Keys": ("geartrain.core.keys", "Keys"),
    "DeviceOptions": ("geartrain.replay.device.options", "DeviceOptions"),
    "Placement": ("geartrain.placement.placement", "Placement"),
    "RankOptions": ("geartrain.replay.options", "RankOptions"),
    "RateLimiter": ("geartrain.store.rate_limiter", "RateLimiter"),
    "Replay": ("geartrain.replay.replay", "Replay"),
    "ReplayDataset": ("geartrain.replay.iterable_dataset", "ReplayDataset"),
    "ReplayOptions": ("geartrain.replay.options", "ReplayOptions"),
    "Row": ("geartrain.store.row", "Row"),
    "Rows": ("geartrain.store.row", "Rows"),
    "Store": ("geartrain.store.store", "Store"),
    "Task": ("geartrain.core.tasks", "Task"),
    "Text": ("geartrain.core.schema", "Text"),
    "Transitions": ("geartrain.replay.transitions", "Transitions"),
    "Windows": ("geartrain.replay.windows", "Windows"),
    "actors": ("geartrain.actors", ""),
    "collectives": ("geartrain.collectives", ""),
    "errors": ("geartrain.errors", ""),
    "fetch": ("geartrain.replay.fetch", "fetch"),
    "integrations": ("geartrain.integrations", ""),
    "launch": ("geartrain.launch", ""),
    "load_checkpoint": ("geartrain.checkpoints.job", "load_checkpoint"),
    "recorded_fields": ("geartrain.store.recorder", "recorded_fields"),
    "rpc": ("geartrain.rpc", ""),
    "save_checkpoint": ("geartrain.checkpoints.job", "save_checkpoint"),
    "selection": ("geartrain.selection", ""),
    "transport": ("geartrain.transport", ""),
    "weights": ("geartrain.weights", ""),
}

__all__ = [
    "ActorPool",
    "Batch",
    "Bytes",
    "Claim",
    "ClaimedRow",
    "Cost",
    "DeviceOptions",
    "Field",
    "Hindsight",
    "Keys",
    "Placement",
    "RankOptions",
    "RateLimiter",
    "Replay",
    "ReplayDataset",
    "ReplayOptions",
    "Row",
    "Rows",
    "Store",
    "Task",
    "Text",
    "Transitions",
    "Windows",
    "actors",
    "collectives",
    "errors",
    "fetch",
    "integrations",
    "launch",
    "load_checkpoint",
    "recorded_fields",
    "rpc",
    "save_checkpoint",
    "selection",
    "transport",
    "weights",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _NAMES[name]
    found = importlib.import_module(module)
    if attribute:
        found = getattr(found, attribute)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
