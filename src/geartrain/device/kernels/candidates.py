"""`DeviceCandidates`: draws rows on a GPU, with the same methods as `geartrain._native.Candidates`.

The priorities live in device memory and belong to the caller. `rebuild()` computes their sums, and `update()` keeps the
sums current. Everything runs on the current stream. Some calls need a number on the host, such as whether there is
anything to draw. They wait for the device once after each change.

Device memory besides the priorities:

- 16 bytes for each tile of 256 rows,
- as much again for draws by row if rows can be unselectable,
- 4 N for the order of sequence numbers, allocated on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from geartrain.core.arguments import check_array, check_whole
from geartrain.device.kernels.checks import check, check_rows
from geartrain.device.kernels.distinct_draw import draw_distinct
from geartrain.device.kernels.philox import ROW_STREAM, counter_word
from geartrain.device.kernels.scatter_update import scatter_update
from geartrain.device.kernels.top_rows import first_rows
from geartrain.device.kernels.weighted_draw import DrawKey, EveryRow, RunningSums, whole_numbers
from geartrain.errors import ArgumentError, EmptyStoreError, NotEnoughRowsError

Rows = torch.Tensor | NDArray[Any] | Sequence[int]
Chosen = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]
Found = Chosen
NO_ROW = 0xFFFFFFFF  # native/segment/segment.h


class DeviceCandidates:
    """Rows that can be drawn, in a GPU's memory. The same arguments choose the same rows as on a CPU, to the bit.

    Args:
        priorities: (N,) fixed-point, torch.uint32 on a CUDA device (viewed, so that what you write there counts after
            `rebuild()`), or NumPy uint32 (copied to `device`). N is at most 2**31 - 1.
        selectable: (N,) bool on the same device, viewed; None where all rows are. Others count as priority 0.
        sequence: (N,) int64 on the same device, the order of commits, no two alike; None where it is the row + 1.
        device: of NumPy priorities; by default the current CUDA device.

    Rows go in as int64 tensors on the device, or as NumPy whole numbers; they come out as int64 tensors.

    Raises:
        ArgumentError: a wrong device, dtype or shape.

    Example (on a GPU):
        >>> import numpy as np, torch                                                      # doctest: +SKIP
        >>> candidates = DeviceCandidates(np.array([0, 1, 3], np.uint32), device="cuda")   # doctest: +SKIP
        >>> rows, _, probability, _ = candidates.draw(True, seed=7, step=0, round=0, numbers=1000)  # doctest: +SKIP
        >>> torch.unique(rows).tolist()                                                    # doctest: +SKIP
        [1, 2]
    """

    def __init__(
        self,
        priorities: torch.Tensor | NDArray[np.uint32],
        selectable: torch.Tensor | None = None,
        sequence: torch.Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        priorities = _as_tensor(priorities, device or "cuda")
        check("priorities", priorities, (torch.uint32,))
        for name, tensor, dtype in (("selectable", selectable, torch.bool), ("sequence", sequence, torch.int64)):
            if tensor is not None:
                check(name, tensor, (dtype,), like=priorities, n=len(priorities))
        self.values = priorities
        self.selectable = selectable
        self.sequence = sequence
        self.rebuild()

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.values.device

    def rebuild(self) -> None:
        """Makes all sums anew, after priorities, selectable bits or sequence numbers were written from outside.

        Reads 4 bytes a row, 6 with selectable bits.
        """
        self._by_priority = RunningSums(self.values, self.selectable)
        self._by_row: RunningSums | EveryRow
        if self.selectable is None:
            self._by_row = EveryRow(len(self.values), self.device)
        else:
            self._by_row = RunningSums(self.selectable.view(torch.uint8))
        self._age_of: torch.Tensor | None = None

    def update(self, rows: Rows, priorities: torch.Tensor | NDArray[np.uint32]) -> None:
        """priorities[rows] = priorities; the last of duplicates wins. 240 bytes a row, and 16 a tile for the sums.

        Raises:
            ArgumentError: a row that is not there, or not as many priorities (uint32) as rows; nothing was changed.
        """
        scatter_update(
            self.values, self._known(rows), _as_tensor(priorities, self.device), self._by_priority.sums, self.selectable
        )
        self._by_priority.rerun()

    # --- what _native.Candidates has ---------------------------------------------------------------------------

    def total_priority(self) -> int:
        """The sum of the priorities of selectable rows."""
        return self._by_priority.total

    def count(self) -> int:
        """Selectable rows."""
        return self._by_row.total

    def priorities(self, rows: Rows) -> torch.Tensor:
        """Fixed-point priorities of some rows, int64."""
        return whole_numbers(self.values.view(torch.int32)[self._known(rows)].view(torch.uint32))

    def sequences(self, rows: Rows) -> torch.Tensor:
        """Sequence numbers of some rows, int64."""
        known = self._known(rows)
        return known + 1 if self.sequence is None else self.sequence[known]

    def draw(
        self,
        by_priority: bool,
        seed: int,
        step: int,
        round: int,
        numbers: int | torch.Tensor | NDArray[np.uint32],
        strata: int = 0,
        limits: None = None,
    ) -> Chosen:
        """Draws with replacement, one for each number.

        Args:
            by_priority: in proportion to priorities; otherwise uniformly from selectable rows.
            seed, step, round: of the random numbers.
            numbers: of the draws: an n for 0 to n - 1, or uint32 (n,).
            strata: 0 for plain draws; n for draws that share the total evenly.
            limits: None; make `selectable` from what limits a row.

        Returns:
            rows (int64), generations (all 1), probability (float64), and 0, the number of draws that failed.

        Raises:
            EmptyStoreError: there is nothing to draw.
        """
        self._check_key(seed, step, round, limits)
        known: torch.Tensor | range
        if isinstance(numbers, int):
            known = range(check_whole("numbers", numbers, 0, 2**32))
            largest = numbers - 1
        else:
            if isinstance(numbers, np.ndarray):
                numbers = torch.from_numpy(np.ascontiguousarray(numbers)).to(self.device)
            known = numbers
            check("numbers", known, (torch.uint32,), like=self.values)
            largest = int(whole_numbers(known).max()) if strata and len(known) else -1
        check_whole("strata", strata, 0, 2**32 - 1)
        if strata and largest >= strata:
            raise ArgumentError(f"draw {largest} is none of {strata} strata")
        population = self._by_priority if by_priority else self._by_row
        if len(known) and population.total == 0:
            what = "no selectable row has a priority above zero" if by_priority else "the store has no selectable row"
            raise EmptyStoreError(what)
        rows, probability = population.draw(DrawKey(seed, step, counter_word(ROW_STREAM, round)), known, strata)
        return rows, _generations(rows), probability, 0

    def find(self, by_priority: bool, targets: torch.Tensor | NDArray[np.uint64]) -> Found:
        """The rows that targets fall into, numbers below `total_priority()` or `count()`: draws from several shards.

        Args:
            by_priority: whether they are below the sum of priorities; otherwise below the number of rows.
            targets: (k,) int64 on the device, or NumPy uint64.

        Returns:
            rows (int64), generations (all 1), fixed-point priorities (int64, 1 by row) and how many were not found,
            targets that are beyond the total: rows `NO_ROW`, and the rest 0.
        """
        if isinstance(targets, np.ndarray):
            targets = torch.from_numpy(np.ascontiguousarray(targets).view(np.int64)).to(self.device)
        check("targets", targets, (torch.int64,), like=self.values)
        population = self._by_priority if by_priority else self._by_row
        there = (targets >= 0) & (targets < population.total)
        rows = torch.where(there, population.find(targets), 0)
        shares = self.priorities(rows) if by_priority else torch.ones_like(rows)
        missing = len(rows) - int(torch.count_nonzero(there))
        return torch.where(there, rows, NO_ROW), there.to(torch.int64), torch.where(there, shares, 0), missing

    def draw_distinct(
        self,
        by_priority: bool,
        seed: int,
        step: int,
        round: int,
        n: int,
        excluded: Rows = (),
        limits: None = None,
    ) -> Chosen:
        """Draws n different rows, none of `excluded`; the rest as in `draw`.

        Raises:
            EmptyStoreError, NotEnoughRowsError: there is nothing, or not enough, to draw.
        """
        self._check_key(seed, step, round, limits)
        gone = self._known(excluded)
        if self.count() < n + len(gone):
            available = max(self.count() - len(gone), 0)
            raise NotEnoughRowsError(f"{n} different rows were asked for, {available} can be drawn")
        population = self._by_priority if by_priority else self._by_row
        rows, probability = draw_distinct(population, seed, step, round, n, gone)
        return rows, _generations(rows), probability, 0

    def first(self, order: int, n: int, after: int, excluded: Rows = (), limits: None = None) -> Chosen:
        """The first n rows in an order: 0 oldest, 1 newest, 2 heaviest (the older of equals first); none of `excluded`.

        Rows with sequence numbers up to and including `after` are skipped.

        Returns:
            rows (int64), generations (all 1), probability (all 1), and the number of rows found. Elements after that
            number are 0.
        """
        self._check_key(0, 0, 0, limits)
        gone = self._known(excluded)
        found = first_rows(self.values, self.selectable, self._ages(), order, n + len(gone), self._up_to(after))
        found = found[~torch.isin(found, gone)][:n]
        rows = torch.zeros(n, dtype=torch.int64, device=self.device)
        rows[: len(found)] = found
        return rows, _generations(rows), torch.ones(n, dtype=torch.float64, device=self.device), len(found)

    # --- helpers -----------------------------------------------------------------------------------------------

    def _known(self, rows: Rows) -> torch.Tensor:
        """Row numbers as int64 on the device; raises when one is not there."""
        if isinstance(rows, torch.Tensor):
            check("rows", rows, (torch.int64,), like=self.values)
            known = rows
        else:
            array = check_array("rows are whole numbers (n,)", np.asarray(rows), (-1,), "iu")
            known = torch.from_numpy(array.astype(np.int64)).to(self.device)
        check_rows("rows", known, len(self.values))
        return known

    def _ages(self) -> torch.Tensor | None:
        if self.sequence is not None and self._age_of is None:
            order = torch.argsort(self.sequence, stable=True)
            self._age_of = torch.empty(len(order), dtype=torch.int32, device=self.device)
            self._age_of[order] = torch.arange(len(order), dtype=torch.int32, device=self.device)
        return self._age_of

    def _up_to(self, after: int) -> int:
        """Number of rows with sequence numbers up to and including `after`."""
        if self.sequence is None:
            return min(after, len(self.values))
        return int(torch.count_nonzero(self.sequence <= min(after, 2**63 - 1)))

    @staticmethod
    def _check_key(seed: int, step: int, round: int, limits: None) -> None:
        if limits is not None:
            raise ArgumentError("bare arrays have no versions, ages or lengths to limit")
        if not (0 <= seed < 2**64 and 0 <= step < 2**64 and 0 <= round < 2**18):
            raise ArgumentError(
                f"seed and step are below 2**64 and round below 2**18, found seed={seed}, step={step}, round={round}"
            )


def _as_tensor(priorities: torch.Tensor | NDArray[np.uint32], device: torch.device | str) -> torch.Tensor:
    """A tensor as it is; a copy of an array, on the device."""
    if not isinstance(priorities, np.ndarray):
        return priorities
    if priorities.dtype != np.uint32:
        raise ArgumentError(f"priorities are uint32 (n,), found {priorities.dtype} {priorities.shape}")
    return torch.from_numpy(np.ascontiguousarray(priorities)).to(device, copy=True)


def _generations(rows: torch.Tensor) -> torch.Tensor:
    """One 1 for each row; takes no memory."""
    return torch.ones((), dtype=torch.int64, device=rows.device).expand(len(rows))
