"""Chooses for each store where its rows are drawn: on the host, or on the device from a copy of the priorities."""

from __future__ import annotations

from collections.abc import Sequence

from geartrain.errors import ArgumentError
from geartrain.replay.device.options import DeviceOptions
from geartrain.replay.device.priority_mirror import DevicePriorities, why_not
from geartrain.replay.device.target import DeviceTarget
from geartrain.replay.sampler import StoreSampler
from geartrain.store.recorder import repeats_field

# Why rows are not drawn on the device, by the path of batches.
_WHY_HOST = {"staged": "batches are staged", "copy": "copies of rows are given to the device by the host"}


class Mirrors:
    """For each store, the device's copy of its priorities, or the reason why the host draws.

    Args:
        samplers: one for each store. A sampler whose store has a copy gets a reference to it.
        targets: one for each store; none if nothing is gathered here.
        options: as `Replay` was given them.
        over_ranks: whether draws are made from the shards of several ranks.

    Attributes:
        copies: one for each store; None if the host draws.

    Raises:
        ArgumentError: select="device" was requested, and a store's rows cannot be drawn there.
    """

    def __init__(
        self,
        samplers: Sequence[StoreSampler],
        targets: Sequence[DeviceTarget],
        options: DeviceOptions,
        *,
        over_ranks: bool = False,
    ) -> None:
        self.copies: list[DevicePriorities | None] = []
        self._why_host: list[str] = []
        for number, sampler in enumerate(samplers):
            target = targets[number] if targets else None
            reason = _why_host(sampler, target, over_ranks)
            asked = options.select
            if asked == "device" and reason is not None:
                raise ArgumentError(f"select='device' was asked for, but {reason}")
            copy = None
            if asked != "host" and reason is None and target is not None:
                copy = DevicePriorities(target, ordered=sampler.traits.order is not None, always=asked == "device")
                sampler.priority_copy = copy
            self.copies.append(copy)
            self._why_host.append(f"host: {reason or 'it was asked for'}")

    def describe(self) -> list[str]:
        """For each store, where the rows of the last batch were drawn, and why."""
        return [why if copy is None else copy.describe() for why, copy in zip(self._why_host, self.copies, strict=True)]


def _why_host(sampler: StoreSampler, target: DeviceTarget | None, over_ranks: bool) -> str | None:
    path = "staged" if target is None else target.path
    reason = why_not(sampler.strategy) or _WHY_HOST.get(path)
    reason = reason or (None if not sampler.limited else "samples are limited, and counted on the host")
    reason = reason or (None if not sampler.plan.per_step else "keys name steps, which are placed on the host")
    placed_here = sampler.plan.windows is not None and not over_ranks  # with the draw; ranks do so on the host
    if reason is None and placed_here and repeats_field(sampler.plan.store.fields) is not None:
        return "rows repeat steps, and windows that two rows have are told apart on the host"
    if over_ranks and reason is None:
        if not sampler.traits.independent or hasattr(sampler.strategy, "select_shards"):
            return "over several ranks its draws depend on each other, and are made on the host"
        if sampler.may_refuse or sampler.step_plan is not None:
            return "over several ranks draws that may be refused are made on the host"
    if reason is None and target is not None:
        return target.device.why_no_selection()
    return reason


__all__ = ["Mirrors"]
