"""Loads trajectories for a buffer: from a saved store, or from RLinf's own checkpoint files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from geartrain.core.arguments import check_flag, check_whole
from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError
from geartrain.integrations.rlinf.files import TrajectoryFiles
from geartrain.integrations.rlinf.layout import COUNT, NUMBER, TOTAL, SampleLayout
from geartrain.integrations.rlinf.samples import TrajectorySamples
from geartrain.replay.fetch import fetch
from geartrain.store.store import Store


class CheckpointPart(NamedTuple):
    """Whose trajectories a rank takes: part `rank` of `ranks`."""

    rank: int
    ranks: int

    @staticmethod
    def of(is_distributed: bool, local_rank: int, world_size: int) -> CheckpointPart:
        """Of the arguments of `load_checkpoint`."""
        rank, ranks = check_whole("local_rank", local_rank), check_whole("world_size", world_size)
        if not check_flag("is_distributed", is_distributed):
            return CheckpointPart(0, 1)
        if not 0 <= rank < ranks:
            raise ArgumentError(f"local_rank ({rank}) must be in range [0, {ranks})")
        return CheckpointPart(rank, ranks)

    def of_count(self, count: int) -> slice:
        """Which of `count` trajectories: parts follow each other, and the first ones may have one more."""
        size, more = divmod(count, self.ranks)
        first = self.rank * size + min(self.rank, more)
        return slice(first, first + size + (self.rank < more))


class SavedTrajectories(NamedTuple):
    """Trajectories to load, oldest first.

    Attributes:
        number: number of the last trajectory, from 1.
        total: samples added up to and including the last trajectory.
        sizes: samples of each trajectory.
        each: the trajectories, as an iterator.
    """

    number: int
    total: int
    sizes: list[int]
    each: Iterator[TrajectorySamples]

    @staticmethod
    def of_files(files: TrajectoryFiles, part: CheckpointPart, most: int) -> SavedTrajectories:
        """The newest `most` of a part of RLinf's files, counted as RLinf does: of all, all that were ever added."""
        found = files.numbers()
        mine = found[part.of_count(len(found))]
        number, total = len(mine), sum(files.sizes(mine))
        if part.ranks == 1:
            number = max(number, int(files.metadata.get("size", 0)))
            total = max(total, int(files.metadata.get("total_samples", 0)))
        newest = mine[-most:]
        return SavedTrajectories(number, total, files.sizes(newest), files.read(newest))

    @staticmethod
    def of_store(store: Store, part: CheckpointPart, most: int) -> SavedTrajectories:
        """The newest `most` of a part of those in a store."""
        layout = SampleLayout.of_fields(store.name, store.fields)
        keys = store.keys()
        number, count, total = (store.column(name)[keys.row] for name in (NUMBER, COUNT, TOTAL))
        numbers, of = np.unique(number, return_inverse=True)
        sizes = np.bincount(of, weights=count, minlength=len(numbers)).astype(np.int64)
        mine = np.arange(len(numbers))[part.of_count(len(numbers))]
        last, behind = len(mine), int(sizes[mine].sum())
        if part.ranks == 1 and len(keys):
            last, behind = int(number.max()), int(total.max())
        newest = mine[-most:]
        each = (_read(store, layout, keys[np.flatnonzero(of == which)]) for which in newest)
        return SavedTrajectories(last, behind, sizes[newest].tolist(), each)


def _read(store: Store, layout: SampleLayout, keys: Keys) -> TrajectorySamples:
    """The samples of one trajectory's rows, as of one environment."""
    found = []
    for at in range(len(keys)):
        batch: Any = fetch(store, keys[np.array([at])], output="numpy", pad="right")
        length = int(batch.length[0])
        found.append(layout.samples_of({name: batch[name][0, :length] for name in layout.drawn()}))
    arrays = {place: np.concatenate([each.arrays[place] for each in found]) for place in found[0].arrays}
    return TrajectorySamples(sum(each.steps for each in found), 1, arrays, found[0].dtypes)


__all__ = ["CheckpointPart", "SavedTrajectories"]
