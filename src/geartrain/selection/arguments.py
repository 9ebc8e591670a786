"""Checks of strategy arguments: flags, numbers and whole numbers."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from geartrain.errors import ArgumentError

_LARGEST = float(np.finfo(np.float64).max)


def check_flag(what: str, value: Any) -> None:
    """Raises `ArgumentError` unless the value is True or False: any other is true or false by accident."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(f"{what} is True or False, found {value!r}")


def check_number(
    what: str, value: Any, wanted: str = "a finite number", *, least: float = -_LARGEST, above: bool = False
) -> None:
    """Raises `ArgumentError` unless the value is a finite real number of at least (or `above`) `least`."""
    is_real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    number = value.item() if isinstance(value, np.generic) else value  # or bounds would be rounded to its type
    if not is_real or not (least < number if above else least <= number) or not number <= _LARGEST:
        raise ArgumentError(f"{what} is {wanted}, found {value!r}")


def check_whole(what: str, value: Any, least: int, most: int) -> None:
    """Raises `ArgumentError` unless the value is a whole number in the range; fractions, text and booleans are none."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        is_in_range = least <= operator.index(value) <= most
    except TypeError:
        is_in_range = False
    if not is_in_range:
        raise ArgumentError(f"{what} is a whole number from {least} to {most}, found {value!r}")


__all__ = ["check_flag", "check_number", "check_whole"]
