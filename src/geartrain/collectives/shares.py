"""Shares: the fraction of an array that each rank or reducer owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import geartrain._native as _native
from geartrain.core.arguments import check_choice, check_real, shown
from geartrain.errors import ArgumentError


@dataclass(frozen=True)
class Owners:
    """The owners of an array's shares: ranks first, then reducers.

    Attributes:
        reducers: host:port of each.
        shares: of each rank, then of each reducer; of sum 1.
        rates: bytes/s of each rank's link, then of each reducer's; None where they were not given.
    """

    reducers: tuple[str, ...]
    shares: tuple[float, ...]
    rates: tuple[float, ...] | None = None


def _numbers(what: str, values: Sequence[float], ranks: int, reducers: int) -> list[float]:
    try:
        found = [check_real(f"each of {what}", value) for value in values]
    except TypeError:
        raise ArgumentError(f"{what} is a sequence of numbers, found {shown(values)}") from None
    if len(found) != ranks + reducers:
        raise ArgumentError(f"{ranks} ranks and {reducers} reducers need as many {what}, found {len(found)}")
    return found


def pick_shares(
    shares: str | Sequence[float],
    world_size: int,
    addresses: Sequence[str],
    rates: Sequence[float] | None,
    algorithm: str,
) -> tuple[float, ...]:
    """The shares of ranks and reducers: as given, equal on the ranks, or the best for the rates of their links.

    Without `rates` all links are equal. A reducer whose address occurs several times has one link for all its shares.

    Raises:
        ArgumentError: a wrong number of shares or rates, or any of them for a ring.
    """
    reducers = len(addresses)
    if algorithm == "ring" and (reducers or not isinstance(shares, str)):
        raise ArgumentError('algorithm="ring" takes neither reducers nor shares')
    if isinstance(shares, str):
        check_choice("shares, unless they are numbers,", shares, ("auto", "equal"))
        if shares == "equal" or algorithm == "ring":
            return (*(1.0 / world_size,) * world_size, *(0.0,) * reducers)
        if rates is None:
            return tuple(_native.shares_of_equal_links(world_size, list(addresses)))
        return tuple(_native.plan_shares(world_size, _numbers("rates", rates, world_size, reducers)))
    return tuple(_numbers("shares", shares, world_size, reducers))
