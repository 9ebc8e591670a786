"""Waits of a batch over ranks: `ShardAdmission` for the shards' rate limiters, `wait_for_rows` for rows.

A rank waits by itself for the limiters of its shards, before all ranks draw. For rows all ranks keep waiting, or stop
in the same round and for the same reason. Each rank has its own clock, and knows only the writers that its own handle
expects (`Store.expect_writers`). So the ranks exchange both whenever they have counted too few rows. Processes that
have the store open do not count as writers, because they may be ranks. A store with tasks has workers: processes that
have it open and are no ranks are waited for, until `finish` was called on all shards and too few rows are left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from geartrain.errors import CallCancelledError, NotEnoughRowsError, WaitTimeoutError
from geartrain.replay.admission import Admission
from geartrain.replay.distributed.members import Members
from geartrain.replay.distributed.sharded_sampler import CommonError, TooFewGroupsError, TooFewRowsError
from geartrain.replay.sampler import StoreSampler
from geartrain.replay.store_waits import NoMoreRowsError, wait_together
from geartrain.selection.mixture import Selection, quotas_of

#: Between two counts, which are a round of messages each.
COUNT_EVERY_S = 0.05
_EXPECTED, _GAVE_UP, _LATE, _STOPPED, _OPEN, _LEFT, _STUCK, _AWAITED = range(8)
_NONE_EXPECTED = (
    "; no rank expects writers, so nothing is waited for. Insert rows first, or start the writers by an ActorPool or "
    "within `with store.expect_writers()`"
)


class ShardAdmission:
    """Waits for the rate limiters of the shards that this rank leads, before all ranks draw.

    How many rows a shard will be drawn for is not known by then, so that its rate limiter admits an even share.

    Args:
        samplers: of this rank's shards, one for each store.
        members: the ranks.
        selection: the strategy, or the mixture.
        batch_size: of the global batch.
    """

    def __init__(
        self, samplers: Sequence[StoreSampler], members: Members, selection: Selection, batch_size: int
    ) -> None:
        self._samplers = samplers
        self._members = members
        self._selection = selection
        self._batch_size = batch_size
        self._fixed = [batch_size] if len(samplers) == 1 else []

    def quotas(self, step: int) -> list[int]:
        """Rows of each store in the global batch of a step."""
        return self._fixed or quotas_of(self._selection, self._batch_size, step)

    def wait(self, step: int, admission: Admission) -> None:
        """Waits until the batch of a step is admitted; raises what `StoreSampler.admit` raises.

        Args:
            step: of the batch.
            admission: to which its rows are added.
        """
        wait_together(self._samplers)
        for number, quota in enumerate(self.quotas(step)):
            share = self._share(number, quota)
            if share:
                self._samplers[number].admit(share, admission, may_stop=False)

    def keep(self, admission: Admission, found: Sequence[int]) -> None:
        """Gives back admitted rows that the batch does not need.

        `found` is the number of rows found in each store. It is lower than usual at the end of a pass.
        """
        for number, n in enumerate(found):
            admission.keep(self._samplers[number], self._share(number, n))

    def _share(self, number: int, n: int) -> int:
        return -(-n // len(self._members.stores[number].ranks)) if self._members.leads(number) else 0


def wait_for_rows(few: TooFewRowsError, samplers: Sequence[StoreSampler], members: Members) -> None:
    """Waits a moment, after which all ranks count again. Collective, on all ranks that have counted too few rows.

    Args:
        few: the error with the count.
        samplers: samplers of this rank's shards, which have the deadline.
        members: the ranks.

    Raises:
        CommonError: on all ranks, if no more rows can come (`NoMoreRowsError`), if no rank expects writers
            (`NotEnoughRowsError`), or if one has waited for its `timeout_s` (`WaitTimeoutError`) or closes its replay
            (`CallCancelledError`).
    """
    sampler, rank = samplers[few.store], members.group.rank
    writers = sampler.plan.store.writers
    late = time.monotonic() >= sampler.until_s
    of_groups = isinstance(few, TooFewGroupsError)
    leads, shards = members.leads(few.store), members.stores[few.store]
    expected = writers.expected
    if sampler.has_tasks and leads:
        ranks = shards.processes[shards.of_rank[rank]]
        expected = expected or sampler.plan.store.other_processes() >= ranks
    left, kept = sampler.rows_left(), sampler.kept
    stuck = 0 if kept is None or not leads else 2 * kept.alone_stop() or left == len(sampler.plan.store)
    mine = np.array(
        [
            expected,
            writers.failure is not None,
            late,
            sampler.is_stopped(),
            left is None,
            left or 0,
            stuck,
            sampler.is_awaited(sampler.step),
        ],
        np.int64,
    )
    every = members.all_gather(mine)
    of_shards = every[shards.leaders]
    if not of_shards[:, _OPEN].any() and of_shards[:, _LEFT].sum() < sampler.min_rows:
        raise CommonError(
            NoMoreRowsError(
                f"finish() was called for all shards of {sampler.plan.store.name!r}, and fewer rows are left than the "
                f"{sampler.min_rows} that a batch needs; {of_shards[:, _LEFT].sum()} can be drawn"
            )
        )
    # 2: kept rows alone stop the shard, 1: all of its rows are finished, 0: more may come
    kept_alone = of_shards[:, _STUCK].min() > 0 and of_shards[:, _STUCK].max() == 2
    if kept_alone and every[:, _AWAITED].all():
        texts = members.group.all_gather_object(kept.describe() if kept is not None and leads else "")
        raise CommonError(
            NotEnoughRowsError(f"{few.error}, and no other row can come: {'; '.join(filter(None, texts))}")
        )
    failed = [other for other in np.flatnonzero(every[:, _GAVE_UP]).tolist() if other != rank]
    trouble = writers.trouble
    if failed:
        trouble += f"; the writers of rank {failed[0]} have given up, and its own error says why"
    may_come = every[:, _EXPECTED].any() or kept_alone
    if kept_alone:  # a training loop that does not wait yet may free some
        sampler.until_s = max(sampler.until_s, time.monotonic() + sampler.timeout_s)
        every[:, _LATE] = False
    groups = "" if may_come and not every[:, _LATE].any() else _what_lacks(few, sampler, members)
    if not may_come:
        raise CommonError(NotEnoughRowsError(f"{few.error}{groups}{trouble or _NONE_EXPECTED}"))
    if every[:, _LATE].any():
        first, what = int(every[:, _LATE].argmax()), "whole groups" if of_groups else "rows"
        raise CommonError(
            WaitTimeoutError(f"too few {what} within the timeout of rank {first}: {few.error}{groups}{trouble}")
        )
    if every[:, _STOPPED].any():
        first = int(every[:, _STOPPED].argmax())
        raise CommonError(CallCancelledError(f"rank {first} stopped its replay while the ranks waited for rows"))
    sampler.stage = "waiting for rows"
    time.sleep(COUNT_EVERY_S)


def _what_lacks(few: TooFewRowsError, sampler: StoreSampler, members: Members) -> str:
    """Names incomplete groups of all shards, unless the error does, and tasks that lag. Collective where there are."""
    grouped = sampler.traits.form == "groups" and not isinstance(few, TooFewGroupsError)
    if not (grouped or sampler.has_tasks):
        return ""
    mine = ""
    if members.leads(few.store):
        mine = (sampler.describe_groups() if grouped else "") + sampler.lag
    return "".join(members.group.all_gather_object(mine))


__all__ = ["COUNT_EVERY_S", "ShardAdmission", "wait_for_rows"]
