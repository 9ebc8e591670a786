"""Checks the numbers of processors and accelerators, and the memory, that a job's description asks schedulers for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geartrain.errors import ArgumentError
from geartrain.launch.role_hosts import check_terms


def check_shared_memory(about: str, given: Any) -> dict[str, float]:
    """Shared memory by terms of hosts: a number is that of all.

    Raises:
        ArgumentError: it is neither a number above 0 nor a table of such numbers.
    """
    if given is None:
        return {}
    table = given if isinstance(given, Mapping) else {"all": given}
    checked = {}
    for terms, value in table.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise ArgumentError(
                f"{about}: shared_memory_gb is a number above 0, or a table of numbers by hosts such as "
                f"{{ trainers = 20, simulators = 1 }}, found {given!r}"
            )
        checked[check_terms(f"{about}: shared_memory_gb", terms)] = float(value)
    return checked


def check_amount(about: str, what: str, value: Any, *, whole: bool = False) -> None:
    """Raises `ArgumentError` for an invalid amount of a resource. None is valid and means unspecified."""
    if value is None:
        return
    kinds = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < 1e9 or (value == 0 and not whole):
        allowed = "a whole number from 0 on" if whole else "a number above 0"
        raise ArgumentError(f"{about}: {what} is {allowed}, found {value!r}")


__all__ = ["check_amount", "check_shared_memory"]
