"""Assignment of a global batch's draws, of all its stores, to the replicas and ranks that train on and read them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import ArgumentError
from geartrain.replay.distributed.assignment import Assigner, Assignment, sizes_of
from geartrain.replay.distributed.members import Members
from geartrain.replay.distributed.read import AssignedDraws
from geartrain.replay.sampler import StoreSampler
from geartrain.selection.sharded import ShardedDraw


def check_sizes(samplers: Sequence[StoreSampler], replicas: int, batch_size: int, assignment: Assignment) -> None:
    """Raises `ArgumentError` where a global batch cannot be divided evenly over the replicas, groups of rows whole."""
    if batch_size % replicas:
        raise ArgumentError(
            f"a global batch of {batch_size} rows cannot be divided evenly over {replicas} data-parallel replicas"
        )
    rows = batch_size // replicas
    sizes = sorted({sampler.atom for sampler in samplers})
    for size in sizes:
        if rows % size:
            raise ArgumentError(
                f"{rows} rows a replica do not hold whole groups of {size}; choose a batch_size "
                f"that is a multiple of {size * replicas}"
            )
    for small, large in itertools.pairwise(sizes):
        if large % small:
            raise ArgumentError(
                f"groups of {small} and of {large} rows cannot fill a replica together; one must divide the other"
            )
    if len(sizes) > 1 and assignment == "ordered" and replicas > 1:
        raise ArgumentError("slices of a mixture with groups would cut groups; use assignment='local_first'")


class BatchAssigner:
    """Assigns the draws of each batch, for all stores one after the other: step 4 of builder.py.

    Args:
        samplers: of each store.
        members: the ranks.
        assignment: as of the replay.
    """

    def __init__(self, samplers: Sequence[StoreSampler], members: Members, assignment: Assignment) -> None:
        self._samplers = samplers
        self._stores = members.stores
        self._replicas = len(members.replicas)
        self._assignment: Assignment = assignment
        self._assigner = Assigner(members.replicas, [ranks for store in members.stores for ranks in store.ranks])
        self._layouts: dict[tuple[int, ...], _Layout] = {}

    def assign(self, drawn: Sequence[ShardedDraw | None], counts: Sequence[int]) -> AssignedDraws:
        """The draws of a batch that has so many rows of each store."""
        layout = self._layouts.get(tuple(counts))
        if layout is None:
            if len(self._layouts) > 64:  # of mixtures whose shares follow a schedule
                self._layouts.clear()
            layout = self._layouts[tuple(counts)] = _layout_of(self._samplers, counts, self._replicas)
        parts = [each.shard + of.first for each, of in zip(drawn, self._stores, strict=True) if each is not None]
        shard = parts[0] if len(parts) == 1 else np.concatenate(parts)
        assigned = self._assigner.assign(shard, self._assignment, layout.atom_sizes)
        return AssignedDraws(
            layout.store, shard, assigned.replica, assigned.reader, assigned.place, layout.first, layout.counts
        )


class _Layout(NamedTuple):
    """The draws of a batch by their stores, each of which has so many.

    `store` (n,), `atom_sizes` (None where every draw stands alone), `first` (stores + 1,) and `counts` (replicas,).
    """

    store: NDArray[np.int64]
    atom_sizes: NDArray[np.int64] | None
    first: NDArray[np.int64]
    counts: NDArray[np.int64]


def _layout_of(samplers: Sequence[StoreSampler], quotas: Sequence[int], replicas: int) -> _Layout:
    atoms = [sampler.atom for sampler in samplers]
    sizes = None
    if any(atom > 1 for atom in atoms):
        whole = [quota // atom for quota, atom in zip(quotas, atoms, strict=True)]
        sizes = np.repeat(np.array(atoms, np.int64), whole)
    store = np.repeat(np.arange(len(quotas)), quotas)
    first = np.concatenate([[0], np.cumsum(quotas)]).astype(np.int64)
    return _Layout(store, sizes, first, sizes_of(sum(quotas), replicas))


__all__ = ["BatchAssigner", "check_sizes"]
