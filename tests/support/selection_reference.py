"""native/selection/selection.h once more, slow and obvious, in NumPy and Python's whole numbers: what every
implementation is compared with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import EmptyStoreError, NotEnoughRowsError, SchemaError

MASK32 = 0xFFFFFFFF
ROW_STREAM, WINDOW_STREAM, DISTINCT_STREAM = range(3)
OLDEST, NEWEST, HEAVIEST = range(3)
Chosen = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], int]


def philox4x32(counter: list[NDArray[np.uint64]], key: list[int]) -> list[NDArray[np.uint64]]:
    """Salmon et al., 2011: ten rounds. 32-bit numbers in 64-bit arrays."""
    mask, half = np.uint64(MASK32), np.uint64(32)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (product1 >> half) ^ c1 ^ np.uint64(k0), product1 & mask
        c2, c3 = (product0 >> half) ^ c3 ^ np.uint64(k1), product0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return [c0, c1, c2, c3]


def random_bits(seed: int, step: int, stream: int, draws: NDArray[np.uint32], attempt: int) -> list[int]:
    """128 bits a draw."""
    same = np.ones(len(draws), np.uint64)
    counter = [
        draws.astype(np.uint64),
        same * np.uint64(stream << 24 | attempt),
        same * np.uint64(step & MASK32),
        same * np.uint64(step >> 32),
    ]
    a, b, c, d = (word.tolist() for word in philox4x32(counter, [seed & MASK32, seed >> 32]))
    return [w << 96 | x << 64 | y << 32 | z for w, x, y, z in zip(a, b, c, d, strict=True)]


def below(bits: int, bound: int) -> int:
    return bits * bound >> 128


class ReferenceCandidates:
    """Rows with priorities, selectable bits and sequence numbers, and every way of choosing among them."""

    def __init__(
        self,
        priorities: NDArray[np.uint32],
        selectable: NDArray[np.bool_] | None = None,
        sequence: NDArray[np.int64] | None = None,
    ) -> None:
        n = len(priorities)
        self.selectable = np.ones(n, bool) if selectable is None else selectable
        self.by_priority = np.where(self.selectable, priorities, 0).astype(np.uint64)
        self.sequence = np.arange(1, n + 1) if sequence is None else sequence
        self._running: dict[bool, NDArray[np.uint64]] = {}  # sums of shares, which take the longest

    def total_priority(self) -> int:
        return int(self.by_priority.sum())

    def count(self) -> int:
        return int(self.selectable.sum())

    def _shares(self, by_priority: bool) -> NDArray[np.uint64]:
        return self.by_priority if by_priority else self.selectable.astype(np.uint64)

    def draw(
        self,
        by_priority: bool,
        seed: int,
        step: int,
        round: int,
        numbers: NDArray[np.uint32],
        strata: int = 0,
        stream: int = ROW_STREAM,
    ) -> Chosen:
        if by_priority not in self._running:
            self._running[by_priority] = np.cumsum(self._shares(by_priority), dtype=np.uint64)
        running = self._running[by_priority]
        total = int(running[-1])
        if len(numbers) and total == 0:
            raise EmptyStoreError
        if strata and any(number >= strata for number in numbers):
            raise SchemaError
        targets = []
        for number, bits in zip(numbers.tolist(), random_bits(seed, step, stream, numbers, round * 64), strict=True):
            if strata == 0:
                targets.append(below(bits, total))
            else:
                first, last = number * total // strata, (number + 1) * total // strata
                targets.append(min(first + below(bits, max(last - first, 1)), total - 1))
        rows = np.searchsorted(running, np.array(targets, np.uint64), side="right")
        drawn = (self.by_priority if by_priority else self.selectable)[rows]
        return rows, np.ones(len(rows), int), drawn.astype(np.float64) / float(total), 0

    def draw_distinct(
        self, by_priority: bool, seed: int, step: int, round: int, n: int, excluded: NDArray[np.uint32]
    ) -> Chosen:
        if self.count() < n + len(excluded):
            raise NotEnoughRowsError
        shares = self._shares(by_priority)
        seen = set(excluded.tolist())
        rows: list[int] = []
        most = 4 * n + 64
        numbers = np.arange(most if n else 0, dtype=np.uint32)
        for row in self.draw(by_priority, seed, step, round, numbers, stream=DISTINCT_STREAM)[0].tolist():
            if len(rows) < n and row not in seen:
                seen.add(row)
                rows.append(row)
        left = [0 if row in seen else share for row, share in enumerate(shares.tolist())]
        if sum(share > 0 for share in left) < n - len(rows):
            raise NotEnoughRowsError
        for number in range(most, most + n - len(rows)):
            (bits,) = random_bits(seed, step, DISTINCT_STREAM, np.array([number], np.uint32), round * 64 + 63)
            target = below(bits, sum(left))
            row = 0
            while target >= left[row]:
                target -= left[row]
                row += 1
            left[row] = 0
            rows.append(row)
        chosen = np.array(rows, np.int64)
        return chosen, np.ones(n, int), shares[chosen].astype(np.float64) / float(shares.sum()), 0

    def first(self, order: int, n: int, after: int, excluded: NDArray[np.uint32]) -> Chosen:
        gone = set(excluded.tolist())
        allowed = [row for row in np.flatnonzero(self.selectable & (self.sequence > after)).tolist() if row not in gone]
        rank = {
            OLDEST: lambda row: self.sequence[row],
            NEWEST: lambda row: -self.sequence[row],
            HEAVIEST: lambda row: (-int(self.by_priority[row]), self.sequence[row]),
        }
        rows = np.zeros(n, np.int64)
        found = sorted(allowed, key=rank[order])[:n]
        rows[: len(found)] = found
        return rows, np.ones(n, int), np.ones(n), len(found)
