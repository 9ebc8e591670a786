"""Moves rows between shards: chooses the rows that leave each shard, and transfers them in row messages.

A row is committed in its new shard, and acknowledged, before it is removed from its old one. If the job is killed in
between, some rows exist twice, and no row is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from geartrain.core.progress import Progress
from geartrain.placement.balance import heaviest_within, rounds_of
from geartrain.ranks.rank_group import Message
from geartrain.replay.distributed.members import Members
from geartrain.replay.distributed.messages import ROW_HEADER, STORED_ROW, RowMessage
from geartrain.replay.fetch_plan import FetchPlan
from geartrain.store.store import Store

# Largest row message, unless a single row is larger.
PIECE_BYTES = 32 << 20


class RowMover:
    """Moves rows from this rank's shard of a store to others, and takes theirs in.

    Args:
        members: the ranks; the store is their only one.
        plan: fetches whole rows of all fields.
        by_priority: whether amounts are priorities, or numbers of rows.
    """

    def __init__(self, members: Members, plan: FetchPlan, by_priority: bool) -> None:
        self.members = members
        self.store: Store = plan.store
        self.row_bytes = sum(plan.row_bytes(name) for name in plan.names)
        self._plan = plan
        self._by_priority = by_priority
        self._scale = 2.0 ** self.store.options["priority_fraction_bits"]
        self._max_rows = int(self.store.options["max_rows"])
        self._shard = members.stores[0].of_rank[members.group.rank]

    def free_rows(self) -> int:
        """Rows that the shard takes before it evicts one."""
        counts = self.store.native.counters()
        return max(0, min(counts["free"], self._max_rows - counts["committed"] - counts["open"] - counts["writing"]))

    # --- which rows ---------------------------------------------------------------------------------------------

    def choose(self, wanted: NDArray[np.float64]) -> dict[int, NDArray[np.uint32]]:
        """The rows of this shard to be moved to each other shard: keys (n, 2), in the order in which they leave.

        Args:
            wanted: (shards, shards), the amount to move from each shard to each.
        """
        to = np.flatnonzero(wanted[self._shard])
        if not self.members.leads(0) or not len(to):
            return {}
        rows, generations = self.store.native.keys()  # oldest first
        keys = np.stack([rows, generations], 1)[::-1]
        if self._by_priority:
            infos = self.store.native.infos(np.ascontiguousarray(keys[:, 0]))
            amounts = np.where(infos["generation"] == keys[:, 1], infos["priority"], 0) / self._scale
            order = np.argsort(-amounts, kind="stable")[: int(np.count_nonzero(amounts))]
            keys, amounts = keys[order], amounts[order]
        else:
            amounts = np.ones(len(keys))
        chosen: dict[int, NDArray[np.uint32]] = {}
        for shard in to.tolist():
            index = heaviest_within(amounts, float(wanted[self._shard, shard]))
            chosen[shard] = keys[index]
            keys, amounts = np.delete(keys, index, 0), np.delete(amounts, index)
        return chosen

    def fit(
        self, chosen: dict[int, NDArray[np.uint32]], free: Sequence[int], most_rows: int | None
    ) -> NDArray[np.int64]:
        """Number of the chosen rows to move from each shard to each, (shards, shards). Collective.

        Args:
            chosen: chosen rows of this shard.
            free: rows that each shard takes.
            most_rows: most rows to move in all; None for no limit.
        """
        mine = np.zeros(len(free), np.int64)
        for shard, keys in chosen.items():
            mine[shard] = len(keys)
        counts = self.members.all_gather_shards(0, mine)
        for shard, room in enumerate(free):
            counts[:, shard] = np.diff(np.minimum(counts[:, shard].cumsum(), room), prepend=0)
        wanted = int(counts.sum())
        if most_rows is not None and most_rows < wanted:
            # The same part of each flow.
            upto = counts.reshape(-1).cumsum()
            counts = np.diff([int(each) * most_rows // wanted for each in upto], prepend=0).reshape(counts.shape)
        return counts.astype(np.int64)

    # --- transfer -----------------------------------------------------------------------------------------------

    def move(self, chosen: dict[int, NDArray[np.uint32]], counts: NDArray[np.int64], bar: Progress) -> int:
        """Sends the chosen rows and inserts those received; returns how many have left this shard. Collective."""
        chosen = self._oldest_first(chosen, counts)
        ranks, leads = self.members.stores[0].ranks, self.members.leads(0)
        group = self.members.group
        bytes_each = self.row_bytes + ROW_HEADER.itemsize + STORED_ROW.itemsize
        moved = 0
        for transfers in rounds_of(counts, max(1, PIECE_BYTES // bytes_each)):
            sends: list[Message] = []
            receives: list[Message] = []
            keys: NDArray[np.uint32] | None = None
            incoming: RowMessage | None = None
            peer, committed = -1, np.zeros(0, np.uint8)
            for sender, receiver, start, count in transfers:
                if leads and sender == self._shard:
                    peer, committed = ranks[receiver][0], np.zeros(count, np.uint8)
                    keys = chosen[receiver][start : start + count]
                    sends = [(peer, self._pack(keys).data)]
                elif leads and receiver == self._shard:
                    peer, committed = ranks[sender][0], np.zeros(count, np.uint8)
                    incoming = RowMessage(self._plan, count, with_stored=True)
                    receives = [(peer, incoming.data)]
            group.exchange(sends, receives)
            if incoming is not None:
                committed[:] = self._insert(incoming)
            acknowledgement = [(peer, committed)]
            group.exchange(acknowledgement if receives else [], acknowledgement if sends else [])
            if keys is not None:
                left = keys[committed != 0]
                self.store.native.remove(np.ascontiguousarray(left[:, 0]), np.ascontiguousarray(left[:, 1]))
                moved += len(left)
            rows = sum(count for *_, count in transfers)
            bar.advance(rows * self.row_bytes, rows)
        return moved

    def _oldest_first(
        self, chosen: dict[int, NDArray[np.uint32]], counts: NDArray[np.int64]
    ) -> dict[int, NDArray[np.uint32]]:
        """The rows that are moved, in the order of commits, which they keep among themselves."""
        ordered = {}
        for shard, keys in chosen.items():
            moved = keys[: counts[self._shard, shard]]
            sequences = self.store.native.infos(np.ascontiguousarray(moved[:, 0]))["sequence"]
            ordered[shard] = moved[np.argsort(sequences, kind="stable")]
        return ordered

    def _pack(self, keys: NDArray[np.uint32]) -> RowMessage:
        """Rows of this shard as a message; one that is gone has generation 0."""
        rows, generations = np.ascontiguousarray(keys[:, 0]), np.ascontiguousarray(keys[:, 1])
        message = RowMessage(self._plan, len(rows), with_stored=True)
        raw = self._plan.fetch(rows, generations, None, list(message.arrays))
        infos = self.store.native.infos(rows)
        there = (raw.torn == 0) & (infos["generation"] == generations)
        headers, stored = message.headers, message.stored
        headers["row"], headers["generation"], headers["shard"] = rows, np.where(there, generations, 0), self._shard
        headers["length"], headers["start"], headers["steps"] = raw.lengths, 0, raw.lengths
        headers["version"], headers["probability"] = raw.versions, 0
        stored["priority"], stored["times_sampled"] = infos["priority"] / self._scale, infos["times_sampled"]
        stored["reserved"] = 0
        return message

    def _insert(self, message: RowMessage) -> NDArray[np.bool_]:
        """Commits received rows; returns which. The last ones are refused where there is no room for them."""
        arrays, headers, stored = message.arrays, message.headers, message.stored
        taken: NDArray[np.bool_] = headers["generation"] != 0
        taken[np.flatnonzero(taken)[self.free_rows() :]] = False
        if not taken.all():
            arrays, headers, stored = [array[taken] for array in arrays], headers[taken], stored[taken]
        if len(headers):
            rows, generations = self.store.native.insert(
                len(headers),
                list(zip(self._plan.numbers, arrays, strict=True)),
                headers["length"].astype(np.uint32),
                np.ascontiguousarray(stored["priority"]),
                np.ascontiguousarray(headers["version"]),
                self._plan.threads,
            )
            self.store.native.set_times_sampled(rows, generations, np.ascontiguousarray(stored["times_sampled"]))
        return taken


__all__ = ["PIECE_BYTES", "RowMover"]
