"""`ReplayDataset`: a replay as a torch `IterableDataset`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, SupportsIndex

from geartrain.core.extras import require_torch
from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError
from geartrain.replay.batch import Batch, check_names
from geartrain.replay.replay import Replay

require_torch("ReplayDataset")
import torch  # noqa: E402
from torch.utils.data import IterableDataset, get_worker_info  # noqa: E402

_FOR_WORKERS = (
    "this replay was made before the loader's workers, each of which would yield the same batches. Use "
    "DataLoader(..., batch_size=None, num_workers=0), as the replay prepares batches ahead by itself; or make a replay "
    "in each worker, with a seed of its own"
)


class ReplayDataset(IterableDataset[Any]):
    """A replay as a torch `IterableDataset`: each item is one batch, a dict of tensors.

    Use it with `DataLoader(ReplayDataset(replay), batch_size=None)`. An item has the fields, the metadata (`mask`,
    `length`, `importance_weights`, ...) and `keys`, an int64 tensor (B, 6), because loaders pin, move and send only
    tensors. `update_priorities`, `gt.fetch` and other functions of keys accept this tensor.

    With a `transform` the dataset yields what that returns. Keys that are a value of a returned dict become numbers
    too.

    The replay prefetches by itself, so the loader needs no workers. `num_workers > 0` is refused for a replay that was
    made before the workers: each of them would yield the same batches. A worker may make a replay with a seed of its
    own (docs/replay.md).

    Args:
        replay: the replay.

    Raises:
        ArgumentError: a field has the name of a metadata entry, such as "mask" or "length".

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> store = gt.Store.create({"x": gt.Field((2,), "float32")}, max_length=4, capacity=8)
        >>> _ = store.insert({"x": np.zeros((8, 4, 2), np.float32)})
        >>> replay = gt.Replay(store, gt.selection.Uniform(seed=0), batch_size=3, num_batches=2)
        >>> [tuple(item["keys"].shape) for item in gt.ReplayDataset(replay)]
        [(3, 6), (3, 6)]
        >>> replay.close(); store.close()
    """

    def __init__(self, replay: Replay) -> None:
        check_names(replay.field_names)
        self.replay = replay

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None and self.replay.forked:
            raise ArgumentError(_FOR_WORKERS)
        return map(_as_item, self.replay)

    def __len__(self) -> int:
        return len(self.replay)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ArgumentError(_FOR_WORKERS)  # where workers are spawned, which pickles it


def _as_item(made: Any) -> Any:
    """What a loader can handle, of what the replay gives."""
    if isinstance(made, Batch):
        return {**made.as_dict(), "keys": torch.from_numpy(made.keys.as_array())}
    if isinstance(made, Mapping) and any(isinstance(value, Keys) for value in made.values()):
        return {
            name: torch.from_numpy(value.as_array()) if isinstance(value, Keys) else value
            for name, value in made.items()
        }
    return made
