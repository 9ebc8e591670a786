"""Rows that can tell whether they are whole: every byte follows from one tag that the row carries."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain as gt

STEPS, WIDTH = 160, 24
FIELDS = {
    "tag": gt.Field((), "uint64", per_row=True),
    "steps": gt.Field((WIDTH,), "uint64"),
    "bytes": gt.Field((3,), "uint8"),
    "late": gt.Field((5,), "uint64", per_row=True),
}
_LANES = np.arange(WIDTH, dtype=np.uint64)
_ODD = np.uint64(0x9E3779B97F4A7C15)


def length_of(tags: NDArray[np.uint64]) -> NDArray[np.int64]:
    """A row's length, 1 to STEPS."""
    return (1 + (tags * np.uint64(0x2545F4914F6CDD1D) >> np.uint64(40)) % np.uint64(STEPS)).astype(np.int64)


def steps_of(tags: NDArray[np.uint64], steps: NDArray[np.int64]) -> NDArray[np.uint64]:
    """What field "steps" holds at these steps, (n, w, WIDTH)."""
    with np.errstate(over="ignore"):
        return (tags * _ODD)[:, None, None] + steps.astype(np.uint64)[:, :, None] * np.uint64(WIDTH) + _LANES


def rows_of(tags: NDArray[np.uint64]) -> dict[str, NDArray[Any]]:
    """The fields of rows with these tags."""
    tags = np.asarray(tags, np.uint64)
    steps = steps_of(tags, np.broadcast_to(np.arange(STEPS), (len(tags), STEPS)))
    return {
        "tag": tags,
        "steps": steps,
        "bytes": (steps[:, :, :3] & np.uint64(255)).astype(np.uint8),
        "late": tags[:, None] ^ np.arange(5, dtype=np.uint64),
    }


def create(name: str, capacity: int = 16, **options: Any) -> gt.Store:
    """A store for such rows."""
    return gt.Store.create(name, FIELDS, max_length=STEPS, capacity=capacity, **options)


def insert(store: gt.Store, tags: Any, **options: Any) -> gt.Keys:
    """Rows of these tags, with the tag as version and each with its own length."""
    tags = np.asarray(tags, np.uint64)
    return store.insert(
        rows_of(tags),
        lengths=length_of(tags),
        versions=(tags & np.uint64(2**62 - 1)).astype(np.int64),
        threads=1,
        **options,
    )


def mixed(batch: gt.Batch) -> list[int]:
    """The tags of rows in a batch (as NumPy) that are not exactly what their tag says; empty for a good batch."""
    tags = batch["tag"]
    width = batch.mask.shape[1]
    mask = batch.mask
    real = mask.sum(axis=1)
    first = mask.argmax(axis=1)
    steps = batch.start[:, None] + np.arange(width)[None] - first[:, None]
    expected = np.where(mask[:, :, None], steps_of(tags, steps), 0)
    good = (batch["steps"] == expected).all(axis=(1, 2))
    good &= (batch["bytes"] == (expected[:, :, :3] & np.uint64(255)).astype(np.uint8)).all(axis=(1, 2))
    good &= (batch["late"] == tags[:, None] ^ np.arange(5, dtype=np.uint64)).all(axis=1)
    good &= batch.length == length_of(tags)
    good &= batch.version == (tags & np.uint64(2**62 - 1)).astype(np.int64)
    good &= (batch.start + real <= batch.length) & (real >= 1)
    good &= np.diff(mask.astype(np.int8), axis=1, prepend=0, append=0).__abs__().sum(axis=1) == 2  # one run of steps
    if width == STEPS:
        good &= real == batch.length
    return [int(tag) for tag in tags[~good]]


def check_steps(batch: gt.Batch) -> None:
    """That every step in a batch, of torch tensors, padded or packed, is what its row's tag says."""
    tags = batch["tag"].numpy()
    starts, lengths = batch.start.numpy(), batch.length.numpy()
    assert (lengths == length_of(tags)).all()
    for i, tag in enumerate(tags):
        if batch.cu_seqlens is None:
            found = batch["steps"][i][batch.mask[i]].numpy()
        else:
            found = batch["steps"][int(batch.cu_seqlens[i]) : int(batch.cu_seqlens[i + 1])].numpy()
        at = starts[i] + np.arange(len(found))
        np.testing.assert_array_equal(found, steps_of(np.array([tag]), at[None])[0])


def assert_sound(store: gt.Store) -> None:
    """Nothing is held, nothing is lost, nothing is mixed."""
    store.reap()
    assert store.audit() == []
    stats = store.stats()
    assert stats["free"] + stats["committed"] == store.capacity, stats
    batch = gt.fetch(store, store.keys(), output="numpy", threads=1)
    assert mixed(batch) == []
