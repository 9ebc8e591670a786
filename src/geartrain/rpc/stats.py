"""Latency histograms, and counters of batched functions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from geartrain.core.arguments import check_real

#: Buckets in each doubling of the duration: a quantile is right within 9 %.
_PER_OCTAVE = 8


class BatchDone(NamedTuple):
    """One executed batch of a batched function. Times are those of `time.monotonic()`, in seconds.

    Attributes:
        size: calls in the batch.
        asked_s: when its first call arrived.
        began_s: when the function began.
        returned_s: when the function returned or raised.
        answered_s: when all replies were sent.
        error: what the function raised; None if it returned.

    Examples:
        >>> from geartrain import rpc
        >>> done = []
        >>> @rpc.batched(max_size=1, on_batch=done.append)  # called with a BatchDone
        ... def doubled(values):
        ...     return [2 * value for value in values]
        >>> with rpc.Node("server") as server, rpc.Node("client", peers={"server": server.address}) as client:
        ...     client.call("server", doubled, 4)
        8
    """

    size: int
    asked_s: float  # when its first call arrived
    began_s: float  # when the function began
    returned_s: float  # when it returned or raised
    answered_s: float  # when all replies were sent
    error: BaseException | None  # what it raised


class Histogram:
    """Histogram of durations with logarithmic buckets: quantiles within 9 %. One thread at a time.

    Example:
        >>> times = Histogram()
        >>> for ms in range(1, 101):
        ...     times.add(ms * 1e-3)
        >>> 0.045 < times.quantile(0.5) < 0.055
        True
    """

    __slots__ = ("_buckets", "count", "most_s", "sum_s")

    def __init__(self) -> None:
        self.count, self.sum_s, self.most_s = 0, 0.0, 0.0
        self._buckets: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        """Adds a duration.

        Args:
            seconds: the duration; below a nanosecond it counts as a nanosecond.
        """
        bucket = math.floor(_PER_OCTAVE * math.log2(max(seconds, 1e-9)))
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1
        self.sum_s += seconds
        self.most_s = max(self.most_s, seconds)

    def quantile(self, q: float) -> float:
        """A quantile in seconds; 0 while there are no durations.

        Args:
            q: 0 to 1; 0.5 is the median.

        Raises:
            ArgumentError: `q` is below 0 or above 1.
        """
        check_real("a quantile", q, 0, 1)
        missing = q * self.count
        for bucket in sorted(self._buckets):
            missing -= self._buckets[bucket]
            if missing <= 0:
                return float(min(2.0 ** ((bucket + 0.5) / _PER_OCTAVE), self.most_s))
        return self.most_s

    def copy(self) -> Histogram:
        """A copy of the present state."""
        other = Histogram()
        other.count, other.sum_s, other.most_s = self.count, self.sum_s, self.most_s
        other._buckets = dict(self._buckets)
        return other

    def __repr__(self) -> str:
        p50, p99 = 1e6 * self.quantile(0.5), 1e6 * self.quantile(0.99)
        return f"<Histogram of {self.count}: p50 {p50:,.0f} us, p99 {p99:,.0f} us, most {1e6 * self.most_s:,.0f} us>"


@dataclass
class BatchStats:
    """Counters and latencies of a batched function. `rpc.batch_stats` returns them.

    Attributes:
        calls: calls that were replied to, with a result or an error.
        cancelled: calls that were cancelled before their batch ran.
        refused: calls that were refused with `BusyError`.
        batches: batches that ran.
        full: batches that filled before `max_wait_us`.
        errors: batches whose function raised.
        sizes: number of batches by their number of calls.
        waited: time from a batch's first call to its run.
        ran: time that the function took.
        took: time from a batch's first call until all replies were sent.
    """

    calls: int = 0  # replied to, with a result or an error
    cancelled: int = 0  # before their batch ran
    refused: int = 0  # with BusyError
    batches: int = 0
    full: int = 0  # of them, those that filled before `max_wait_us`
    errors: int = 0  # of them, those whose function raised
    sizes: dict[int, int] = field(default_factory=dict)  # calls in a batch -> batches
    waited: Histogram = field(default_factory=Histogram)
    ran: Histogram = field(default_factory=Histogram)
    took: Histogram = field(default_factory=Histogram)

    def add(self, done: BatchDone, full: bool) -> None:
        """Internal: adds a batch."""
        self.calls += done.size
        self.batches += 1
        self.full += full
        self.errors += done.error is not None
        self.sizes[done.size] = self.sizes.get(done.size, 0) + 1
        self.waited.add(done.began_s - done.asked_s)
        self.ran.add(done.returned_s - done.began_s)
        self.took.add(done.answered_s - done.asked_s)

    def copy(self) -> BatchStats:
        """A copy of the present state."""
        return BatchStats(
            self.calls,
            self.cancelled,
            self.refused,
            self.batches,
            self.full,
            self.errors,
            dict(self.sizes),
            self.waited.copy(),
            self.ran.copy(),
            self.took.copy(),
        )
