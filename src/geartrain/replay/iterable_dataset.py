"""torch IterableDataset adapter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from geartrain.core.extras import require_torch
from geartrain.errors import ArgumentError
from geartrain.replay.batch import check_names
from geartrain.replay.replay import Replay

require_torch("ReplayDataset")
from torch.utils.data import IterableDataset  # noqa: E402


class ReplayDataset(IterableDataset[dict[str, Any]]):
    """A replay as a torch `IterableDataset`: each item is one batch, a plain dict of tensors.

    Use it with `DataLoader(ReplayDataset(replay), batch_size=None)`. The replay prepares batches ahead by itself, so
    the loader needs no worker processes; with `num_workers > 0` it refuses, because every worker would deliver the
    same batches.

    Raises:
        ArgumentError: a field has the name of a batch's own entry, such as "mask" or "length".
    """

    def __init__(self, replay: Replay) -> None:
        check_names(replay.field_names)
        self.replay = replay

    def __iter__(self) -> Iterator[dict[str, Any]]:
        from torch.utils.data import get_worker_info

        if get_worker_info() is not None:
            raise ArgumentError(
                "a replay prefetches by itself and its batches are already in this process; "
                "use DataLoader(..., batch_size=None, num_workers=0)"
            )
        for batch in self.replay:
            yield batch.as_dict()

    def __len__(self) -> int:
        return len(self.replay)
