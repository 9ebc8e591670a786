"""geartrain: the data plane for training large models with reinforcement learning.

    import geartrain as gt

    store = gt.Store.create("hopper", {"obs": gt.Field((1000, 11), "float32")}, capacity=10_000)
    replay = gt.Replay(store, gt.selection.Weighted(seed=0), batch_size=256, window=20)

The public names are these; each is documented where it is defined.
"""

from geartrain import errors, selection
from geartrain.batch import Batch
from geartrain.fetch import fetch
from geartrain.keys import Keys
from geartrain.replay import Replay
from geartrain.schema import Field
from geartrain.store import Row, Rows, Store

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Field",
    "Keys",
    "Replay",
    "Row",
    "Rows",
    "Store",
    "errors",
    "fetch",
    "selection",
]
