"""Selection: which rows make a batch. Strategies are functions of the candidates, a seed and a step.

    gt.Replay(store, gt.selection.Prioritized(beta=0.4), batch_size=256)

`Uniform` and `Prioritized` draw at random, `TopK`, `Lifo` and `Fifo` in an order, `Group` whole groups of rows, `Mixture` from
several stores; any object with the methods of `Strategy` is one as well.
"""

from geartrain.selection.strategy import (
    Again,
    Candidates,
    Drawn,
    Fifo,
    Group,
    Lifo,
    Limits,
    Linear,
    Mixture,
    Prioritized,
    Strategy,
    TopK,
    Uniform,
    importance_weights,
)

__all__ = [
    "Again",
    "Candidates",
    "Drawn",
    "Fifo",
    "Group",
    "Lifo",
    "Limits",
    "Linear",
    "Mixture",
    "Strategy",
    "TopK",
    "Uniform",
    "Prioritized",
    "importance_weights",
]
