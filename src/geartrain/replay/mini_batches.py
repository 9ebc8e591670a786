"""Mini-batches and micro-batches of a global batch of packed rows.

A mini-batch is what one optimizer step is of: the same rows of the global batch on any number of ranks. A micro-batch
is what one forward and backward pass is of: as many of the rank's sequences as fit into `max_items`. All ranks make the
same number of micro-batches, each by itself, because each knows the lengths of the whole global batch
(`BatchLengths`).
"""

from __future__ import annotations

import heapq
import warnings
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.arguments import SEED, check_whole, did_you_mean, shown, some_of
from geartrain.errors import ArgumentError, FieldError
from geartrain.replay.batch_lengths import BatchLengths
from geartrain.store.packed import PackedFields, SelectedFields, spread


def mini_batches(
    batch: PackedFields, known: BatchLengths, step: int, n: int, epochs: int, seed: int
) -> Iterator[MiniBatch]:
    """Cuts a batch, see `PackedBatch.mini_batches`.

    Args:
        batch: rows of this rank.
        known: the whole global batch.
        step: the batch's number.
        n, epochs, seed: as there.
    """
    n = check_whole("n", n, 1)
    epochs = check_whole("epochs", epochs, 1, 2**63 - 1)
    seed = SEED("seed", seed)
    if len(known) % n:
        raise ArgumentError(f"n must divide the {len(known)} rows of the global batch, found {shown(n)}")
    return _mini_batches(batch, known, step, n, epochs, seed)


def _mini_batches(
    batch: PackedFields, known: BatchLengths, step: int, n: int, epochs: int, seed: int
) -> Iterator[MiniBatch]:
    for epoch in range(epochs):
        order = _shuffled(len(known), seed, step, epoch)
        for begin in range(0, len(known), n):
            yield MiniBatch(batch, known, order[begin : begin + n])


def _shuffled(n: int, seed: int, step: int, epoch: int) -> NDArray[np.int64]:
    """An order of n rows, which follows from the numbers alone: that of Philox numbers of the key (seed, 0)."""
    counter = np.array([0, epoch, step, 0], np.uint64)
    drawn: NDArray[np.uint64] = np.random.Philox(key=np.array([seed, 0], np.uint64), counter=counter).random_raw(n)
    order: NDArray[np.int64] = np.argsort(drawn, kind="stable")
    return order


class MiniBatch(SelectedFields):
    """Rows of a batch that one optimizer step is of. Made by `batch.mini_batches`.

    `len(mini)` is the number of its rows over all ranks. Values are those of this rank's rows: `mini["ids"]` and all
    else that packed fields have. A rank may have none of the rows.

    Args:
        batch, known, places: set by `mini_batches`.

    Examples:
        >>> import geartrain as gt
        >>> store = gt.Store.create({"ids": gt.Field(("tokens",), "int32")}, capacity=8, span_bytes=100_000)
        >>> _ = store.insert({"ids": [[1, 2], [3], [4, 5, 6], [7]]})
        >>> batch = gt.Replay(store, gt.selection.Uniform(seed=0, replacement=False), batch_size=4).sample()
        >>> [len(mini) for mini in batch.mini_batches(2, epochs=2)]
        [2, 2, 2, 2]
        >>> sum(mini.total("tokens") for mini in batch.mini_batches(2))
        7
        >>> store.close()
    """

    def __init__(self, batch: PackedFields, known: BatchLengths, places: NDArray[np.int64]) -> None:
        self._member = np.zeros(len(known), bool)  # of each row of the global batch
        self._member[places] = True
        super().__init__(batch, np.flatnonzero(self._member[known.places]))
        self._batch = batch
        self._known = known
        self._global_rows = len(places)

    def __len__(self) -> int:
        return self._global_rows

    def __repr__(self) -> str:
        return f"MiniBatch({len(self)} rows of all ranks, {len(self.rows)} of this one)"

    def total(self, name: str) -> int:
        """How many there are in the mini-batch over all ranks. No messages are sent.

        Args:
            name: a bool field with an axis: its items that are True, such as the tokens that a loss counts; an axis:
                its items; "rows": rows. A field goes before an axis of the same name, and an axis before "rows".

        Raises:
            FieldError: the batch knows no total of that name.
        """
        known = self._known
        if isinstance(name, str):
            for counts in (known.sums, known.lengths):
                if name in counts:
                    return int(counts[name][self._member].sum())
            if name == "rows":
                return len(self)
        names = list(dict.fromkeys([*known.sums, *known.lengths, "rows"]))
        raise FieldError(
            f"no total of {shown(name)}: there is one of bool fields with an axis, of axes, and of rows: "
            f"{some_of(names)}{did_you_mean(name, names)}"
        )

    def micro_batches(self, *, max_items: int, of: str | Sequence[str] | None = None) -> Iterator[MicroBatch]:
        """Cuts this rank's sequences of the mini-batch into micro-batches of at most `max_items` items.

        A sequence is a part of the axis `of`, if a field divides it, else a row. Each is in one micro-batch, and all
        micro-batches have about as many items. A sequence longer than `max_items` has a micro-batch for itself.

        All ranks make the same number. A rank with fewer sequences repeats its shortest one with `micro.weight` 0. If
        it has none in this mini-batch, it repeats the shortest of its whole batch; if it has none there either, its
        micro-batches are empty.

        Args:
            max_items: most items of a micro-batch.
            of: name of the axis whose items count, or several: `of=("prompt", "tokens")` counts prompt and answer, and
                the prompt once for each of its answers. By default the axis that is divided; without one the only
                axis.

        Returns:
            An iterator over the micro-batches of this rank.

        Raises:
            ArgumentError: `max_items` is not a whole number above zero; `of` is left out, and there are several axes;
                or it names an axis twice, or axes that are divided by fields of different axes.
            SchemaError: the store has no such axis.
            FieldError: the batch has no field of the axis.
        """
        most = check_whole("max_items", max_items, 1)
        axes = self._counted_axes(of)
        by = self._unit_of(axes)
        known = self._known
        row_of, costs = self._all_sequences(axes, by)
        chosen = self._member[row_of]
        replica = known.replica[row_of]
        packed = [_packed(_longest_first(costs[chosen & (replica == r)])[1], most) for r in range(known.replicas)]
        number = max(map(len, packed))

        # From here on this rank's sequences, in the order of its batch.
        counts = np.bincount(row_of, minlength=len(known))
        mine = spread((np.cumsum(counts) - counts)[known.places], counts[known.places])
        own, among = costs[mine], np.flatnonzero(chosen[mine])
        if len(among) and not known.warned and (longest := int(own[among].max())) > most:
            known.warned = True
            warnings.warn(
                f"a sequence has {longest} items of {some_of(axes)}, more than max_items={most}: it has a micro-batch "
                f"for itself. To avoid this, raise max_items or drop such rows before they are trained",
                stacklevel=2,
            )
        order, sorted_costs = _longest_first(own[among])
        bins = [np.sort(among[order[each]]) for each in _balanced(sorted_costs, number, most, packed[known.me])]
        return self._micro_batches(axes, by, bins, _stand_in(own, among), number)

    def _micro_batches(
        self, axes: list[str], by: str | None, bins: list[NDArray[np.int64]], stand_in: NDArray[np.int64], number: int
    ) -> Iterator[MicroBatch]:
        for i in range(number):
            numbers, weight = (bins[i], 1.0) if i < len(bins) else (stand_in, 0.0)
            yield MicroBatch(self._batch, numbers, by, axes, weight, last=i == number - 1)

    def _counted_axes(self, of: Any) -> list[str]:
        """The axes that `of` names."""
        if of is None:
            found = self._usual_axes()
            if len(found) != 1:
                raise ArgumentError(
                    f"max_items counts items of an axis, and there are {len(found)}: pass of= as one of "
                    f"{some_of(found)}, or as several"
                )
            return found
        axes = [of] if isinstance(of, str) else list(of) if isinstance(of, Sequence) else []
        if not axes or len({shown(axis) for axis in axes}) != len(axes):
            raise ArgumentError(f"of is an axis, or several axes, each of them once; found {shown(of)}")
        for axis in axes:
            self.bounds_of(axis)  # which refuses what is none
        return axes

    def _unit_of(self, axes: list[str]) -> str | None:
        """The axis whose items the sequences are; None: they are rows."""
        found = {axis: self.unit_of(axis) for axis in axes}
        units = {unit for unit in found.values() if unit is not None}
        if len(units) > 1:
            raise ArgumentError(
                f"{some_of(f'{axis!r} has sequences of {unit!r}' for axis, unit in found.items() if unit)}: of= counts "
                f"axes that are divided alike"
            )
        return next(iter(units), None)

    def _all_sequences(self, axes: list[str], by: str | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of each sequence of the global batch its row and its items."""
        known = self._known
        row_of = np.arange(len(known))
        if by is not None:
            row_of = np.repeat(row_of, known.lengths[by])
        costs = np.zeros(len(row_of), np.int64)
        for axis in axes:
            if by is not None and axis == by:
                costs += 1
            elif by is not None and axis in known.parts:
                costs += known.parts[axis][1]
            else:
                costs += known.lengths[axis][row_of]
        return row_of, costs


class MicroBatch(SelectedFields):
    """Sequences of a mini-batch that one forward and backward pass is of. Made by `mini.micro_batches`.

    `len(micro)` is the number of sequences. Values are those of the sequences, and of the rows that they belong to:
    `micro["ids"]`, `micro.joined("prompt", "ids")`, `micro.expand("advantage")` and all else that packed fields have.

    Args:
        source, numbers, by, axes, weight, last: set by `micro_batches`.

    Attributes:
        weight: 1.0, or 0.0 if the sequences are in another micro-batch, too. Multiply the loss by it.
        last: whether it is the last one of its mini-batch, and gradients are to be exchanged: `DDP.no_sync` is for the
            others.

    Examples:
        >>> import geartrain as gt
        >>> store = gt.Store.create({"ids": gt.Field(("tokens",), "int32")}, capacity=8, span_bytes=100_000)
        >>> _ = store.insert({"ids": [[1, 2], [3], [4, 5, 6], [7]]})
        >>> batch = gt.Replay(store, gt.selection.Fifo(), batch_size=4, output="numpy").sample()
        >>> for mini in batch.mini_batches(4):
        ...     for micro in mini.micro_batches(max_items=4):
        ...         print(micro["ids"], micro.cu_seqlens, micro.weight)
        [4 5 6 7] [0 3 4] 1.0
        [1 2 3] [0 2 3] 1.0
        >>> store.close()
    """

    def __init__(
        self,
        source: PackedFields,
        numbers: NDArray[np.int64],
        by: str | None,
        axes: list[str],
        weight: float,
        *,
        last: bool,
    ) -> None:
        super().__init__(source, numbers, by)
        divided = [axis for axis in axes if self.unit_of(axis) not in (None, axis)]
        self._axes = divided or axes
        self._sequences = len(numbers)
        self.weight = weight
        self.last = last

    def _usual_axes(self) -> list[str]:
        return self._axes

    def __len__(self) -> int:
        return self._sequences

    def __repr__(self) -> str:
        return f"MicroBatch({len(self)} sequences, weight {self.weight:g})"


# --- sequences into micro-batches --------------------------------------------------------------------------------


def _longest_first(costs: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[int]]:
    """An order by cost, the first of equal ones first, and the costs in it."""
    order = np.argsort(-costs, kind="stable")
    return order, costs[order].tolist()


def _packed(costs: list[int], most: int) -> list[list[int]]:
    """About as few bins as possible, by best fit: each cost to the bin that has least room for it.

    Args:
        costs: in descending order.
        most: largest sum of a bin of two or more.
    """
    bins: list[list[int]] = []
    room: list[int] = []  # what is left in each bin, ascending, with the bin's number below
    n = len(costs) + 1
    for i, cost in enumerate(costs):
        at = bisect_left(room, cost * n)
        if at == len(room):
            if cost <= most:
                insort(room, (most - cost) * n + len(bins))
            bins.append([i])
        else:
            left = room.pop(at)
            bins[left % n].append(i)
            insort(room, left - cost * n)
    return bins


def _balanced(costs: list[int], number: int, most: int, packed: list[list[int]]) -> list[list[int]]:
    """So many bins of about equal costs: each cost to the bin that has least. Fewer bins if there are fewer costs.

    Args:
        costs: in descending order.
        number: how many bins, at least as many as there are in `packed`.
        most: largest sum of a bin of two or more.
        packed: bins that hold to it. They are split if costs are too tight to be balanced.
    """
    number = min(number, len(costs))
    bins = [[i] for i in range(number)]
    loads = [cost * number + i for i, cost in enumerate(costs[:number])]  # with the bin's number below
    heapq.heapify(loads)
    limit = (most + 1) * number
    for i in range(number, len(costs)):
        least = loads[0] + costs[i] * number
        if least >= limit:
            break
        bins[least % number].append(i)
        heapq.heapreplace(loads, least)
    else:
        return bins
    bins = list(packed)
    while len(bins) < number:
        fullest = max(range(len(bins)), key=lambda each: len(bins[each]))
        bins.append(bins[fullest][1::2])
        bins[fullest] = bins[fullest][::2]
    return bins


def _stand_in(costs: NDArray[np.int64], among: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of the shortest sequence among some, else of all; one that has items if there is one. Empty: none."""
    if not len(among):
        among = np.arange(len(costs))
    if not len(among):
        return among
    with_items = among[costs[among] > 0]
    among = with_items if len(with_items) else among
    shortest = int(np.argmin(costs[among]))
    return among[shortest : shortest + 1]


__all__ = ["MicroBatch", "MiniBatch", "mini_batches"]
