"""Rows whose every byte follows from a tag that they carry."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain as gt

STEPS, WIDTH = 24, 6
FIELDS = {
    "tag": gt.Field((), "uint64", per_row=True),
    "steps": gt.Field((WIDTH,), "uint64"),
    "bytes": gt.Field((3,), "uint8"),
    "late": gt.Field((), "uint64", per_row=True),
}
_LANES = np.arange(WIDTH, dtype=np.uint64)
_ODD = np.uint64(0x9E3779B97F4A7C15)


def length_of(tags: NDArray[np.uint64]) -> NDArray[np.int64]:
    """A whole row's length, 2 to STEPS."""
    with np.errstate(over="ignore"):
        mixed = tags * np.uint64(0x2545F4914F6CDD1D)
    return (2 + (mixed >> np.uint64(40)) % np.uint64(STEPS - 1)).astype(np.int64)


def _steps_of(tags: NDArray[np.uint64], steps: NDArray[np.int64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        return (tags * _ODD)[:, None, None] + steps.astype(np.uint64)[:, :, None] * np.uint64(WIDTH) + _LANES


def rows_of(tags: NDArray[np.uint64]) -> dict[str, NDArray[Any]]:
    """The fields of rows with these tags."""
    tags = np.asarray(tags, np.uint64)
    steps = _steps_of(tags, np.broadcast_to(np.arange(STEPS), (len(tags), STEPS)))
    return {
        "tag": tags,
        "steps": steps,
        "bytes": (steps[:, :, :3] & np.uint64(255)).astype(np.uint8),
        "late": ~tags,
    }


def torn(batch: gt.Batch, *, whole: bool = False) -> list[int]:
    """Tags of the rows of a batch that are not what their tag says. With `whole` they must have their full length."""
    tags, mask = batch["tag"], batch.mask
    width = mask.shape[1]
    first, real = mask.argmax(axis=1), mask.sum(axis=1)
    steps = batch.start[:, None] + np.arange(width)[None] - first[:, None]
    expected = np.where(mask[:, :, None], _steps_of(tags, steps), 0)
    good = (batch["steps"] == expected).all(axis=(1, 2))
    good &= (batch["bytes"] == (expected[:, :, :3] & np.uint64(255)).astype(np.uint8)).all(axis=(1, 2))
    good &= batch["late"] == ~tags
    good &= batch.version == (tags & np.uint64(2**62 - 1)).astype(np.int64)
    good &= (real >= 1) & (batch.start + real <= batch.length)
    good &= (batch.length == length_of(tags)) if whole else (batch.length <= length_of(tags))
    return [int(tag) for tag in tags[~good]]


def versions_of(tags: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The version that a row of a tag has."""
    return (tags & np.uint64(2**62 - 1)).astype(np.int64)
