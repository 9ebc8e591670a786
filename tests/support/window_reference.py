"""Windows of known stores: a slow and obvious reference for where they lie, and whether a batch has them."""

from __future__ import annotations

import numpy as np

import geartrain as gt

MAX = 12


def make_store(lengths, **options):
    """Row i has the values 100 i + step, and 100 i of the row itself."""
    fields = {"t": gt.Field((), "int64"), "row": gt.Field((), "int64", per_row=True)}
    store = gt.Store.create(fields, max_length=MAX, capacity=max(len(lengths), 1), **options)
    numbers = np.arange(len(lengths)) * 100
    store.insert({"t": numbers[:, None] + np.arange(MAX), "row": numbers}, lengths=lengths)
    return store


def middle(keys, lengths, random):
    """The anchors of windows of 3 steps, whole where there are so many."""
    assert len(keys) == len(lengths) == len(random) and (random >= 0).all() and (random < 1).all()
    return np.minimum(lengths - 1, 2 + (random * np.maximum(lengths - 4, 0)).astype(np.int64))


def anchors_of(length, windows):
    """Slow and obvious: the anchors of a row's windows, in order."""
    every = range(0, length, windows.stride)
    if not windows.from_first:
        every = sorted(length - 1 - t for t in every)
    return [t for t in every if not windows.whole or len(steps_of(t, length, windows)) == windows.length]


def steps_of(anchor, length, windows):
    """The steps of the window that is told by a step."""
    first = anchor if windows.from_first else anchor - windows.length + 1
    return [t for t in range(first, first + windows.length) if 0 <= t < length]


def check_batch(batch, lengths, windows, pad, *, anchors=None):
    """Every window is one that its row may have, and lies in the batch as it should."""
    for i in range(len(batch)):
        row = int(batch["row"][i]) // 100
        length = lengths[row]
        found = (batch["t"][i][batch.mask[i]] - 100 * row).tolist()
        if anchors is not None:
            allowed = [anchors[i]]
        elif windows.at == "start":
            allowed = [0]
        elif windows.at == "end":
            allowed = [length - 1]
        else:
            allowed = anchors_of(length, windows)
        assert found in [steps_of(anchor, length, windows) for anchor in allowed]
        assert len(found) == windows.length or not windows.whole
        assert batch.start[i] == found[0] and batch.length[i] == length
        missing = windows.length - len(found)
        at = slice(missing, None) if pad == "left" else slice(0, len(found))
        expected = np.zeros(windows.length, np.int64)
        expected[at] = 100 * row + np.array(found)
        assert batch["t"][i].tolist() == expected.tolist()
        assert batch.mask[i, at].all() and batch.mask[i].sum() == len(found)


CASES = [
    gt.Windows(4, at="start"),
    gt.Windows(4, at="end"),
    gt.Windows(4, anchor="first"),
    gt.Windows(4, anchor="first", stride=3, whole=True),
    gt.Windows(4, stride=2, whole=True),
    gt.Windows(4, at=middle),
]
CASE_IDS = ["start", "end", "first", "first-whole-3", "whole-2", "function"]
