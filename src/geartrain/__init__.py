"""geartrain: the data plane for training large models with reinforcement learning.

    import geartrain as gt

    store = gt.Store.create("hopper", {"obs": gt.Field((1000, 11), "float32")}, capacity=10_000)
    replay = gt.Replay(store, gt.selection.Weighted(seed=0), batch_size=256, window=20)

The public names are these; each is documented where it is defined.
"""

from typing import TYPE_CHECKING, Any

from geartrain import errors, selection
from geartrain.batch import Batch
from geartrain.fetch import fetch
from geartrain.keys import Keys
from geartrain.replay import Replay
from geartrain.row import Row, Rows
from geartrain.schema import Field
from geartrain.store import Store

if TYPE_CHECKING:
    from geartrain.train import ReplayDataset

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Field",
    "Keys",
    "Replay",
    "ReplayDataset",
    "Row",
    "Rows",
    "Store",
    "errors",
    "fetch",
    "selection",
]


def __getattr__(name: str) -> Any:
    # Subclassing torch's IterableDataset needs torch, which the rest of the package can do without.
    if name == "ReplayDataset":
        from geartrain.train import ReplayDataset

        return ReplayDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
