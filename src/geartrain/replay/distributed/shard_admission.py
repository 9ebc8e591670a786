"""`ShardAdmission`: waits until the rate limiters of the shards admit a global batch.

Each shard's rate limiter admits an even share of the rows that its store contributes.
"""

from __future__ import annotations

from collections.abc import Sequence

from geartrain.replay.admission import Admission
from geartrain.replay.distributed.members import Members
from geartrain.replay.sampler import StoreSampler
from geartrain.replay.store_waits import wait_together
from geartrain.selection.mixture import Selection, quotas_of


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

        `found` is the number of rows found in each store. It is lower than usual at the end of a pass, and where a late
        group has fewer rows than others.
        """
        for number, n in enumerate(found):
            admission.keep(self._samplers[number], self._share(number, n))

    def _share(self, number: int, n: int) -> int:
        return -(-n // len(self._members.stores[number].ranks)) if self._members.leads(number) else 0


__all__ = ["ShardAdmission"]
