"""`GlooCarrier`: moves the messages of a rank group by Gloo.

It has a process group of its own, so its traffic never mixes with the training's collectives.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from geartrain.ranks.carrier import MAX_MESSAGES, CarrierError, Cause, Message


class GlooCarrier:
    """Carrier of messages by Gloo.

    Args:
        store: of `torch.distributed`, unique for the group.
        rank, size: in the group.
        timeout_s: for all ranks to join, and of each exchange.

    Raises:
        RuntimeError: not all ranks joined in time.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        import torch.distributed as dist

        self._rank = rank
        self._size = size
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=max(timeout_s, 1e-3)))

    def exchange(self, number: int, sends: Sequence[Message], receives: Sequence[Message], until_s: float) -> None:
        import torch

        group = self._group
        if group is None:
            raise CarrierError(self._rank, Cause.left)
        pending: list[tuple[int, Any]] = []
        peer = self._rank
        try:
            for start, messages in ((group.recv, receives), (group.send, sends)):
                numbers: dict[int, int] = {}
                for peer, array in messages:
                    count = numbers[peer] = numbers.get(peer, -1) + 1
                    tag = number % 65536 * MAX_MESSAGES + count
                    pending.append((peer, start([torch.from_numpy(array)], peer, tag)))
            for peer, work in pending:  # noqa: B007  the error names the peer
                work.wait(timedelta(seconds=max(0.001, until_s - time.monotonic())))
        except RuntimeError as error:
            cause = Cause.timed_out if "imed out" in str(error) else Cause.lost
            raise CarrierError(peer, cause) from error

    def peers(self) -> dict[str, int]:
        return {"gloo": self._size - 1}

    def close(self, reason: str = "") -> None:
        """The reason stays untold."""
        self._group = None


__all__ = ["GlooCarrier"]
