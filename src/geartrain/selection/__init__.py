"""Selection strategies: which rows form a batch, as a function of the candidates, a seed and a step.

    gt.Replay(store, gt.selection.Prioritized(beta=0.4), batch_size=256)

| strategy | draws |
|---|---|
| `Uniform` | rows or steps, all with the same probability |
| `Prioritized` | rows or steps in proportion to their priorities |
| `TopK`, `Lifo`, `Fifo` | rows in an order |
| `GroupSampling` | whole groups of rows, such as the answers to one prompt |
| `Epochs` | each row or step once a pass |
| `Mixture` | from several stores in fixed shares |

Any object with the methods of `Strategy` is a strategy too. A subclass of `DeclaredStrategy` also works on devices and
over ranks.
"""

from geartrain.selection.declared import DeclaredStrategy, WholeGroups
from geartrain.selection.epochs import Epochs
from geartrain.selection.groups import GroupSampling
from geartrain.selection.mixture import Mixture
from geartrain.selection.ordered import Fifo, Lifo, TopK
from geartrain.selection.random import Prioritized, Uniform, importance_weights
from geartrain.selection.schedule import Linear
from geartrain.selection.strategy import Candidates, Draw, Limits, Redraw, Strategy, Traits

__all__ = [
    "Candidates",
    "DeclaredStrategy",
    "Draw",
    "Epochs",
    "Fifo",
    "GroupSampling",
    "Lifo",
    "Limits",
    "Linear",
    "Mixture",
    "Prioritized",
    "Redraw",
    "Strategy",
    "TopK",
    "Traits",
    "Uniform",
    "WholeGroups",
    "importance_weights",
]
