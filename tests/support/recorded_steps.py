"""Stores of small steps for recorders, and the rows that they hold."""

from __future__ import annotations

import numpy as np

import geartrain as gt
from geartrain.store.recorder import recorded_fields


def store_of(max_length, capacity=4000, *, overlap=False, **more):
    """Of observations, actions and rewards of three, one and one number a step."""
    fields = recorded_fields(
        {"obs": gt.Field((3,), "float32"), "action": gt.Field((), "int32"), "reward": gt.Field((), "float32")},
        truncated=gt.Field((), "bool"),
        step_version=gt.Field((), "int64"),
        episode_return=gt.Field((), "float32", per_row=True),
        overlap=overlap,
        **more,
    )
    return gt.Store.create(fields, max_length=max_length, capacity=capacity)


def rows_of(store):
    """Fields by row, each as long as its row."""
    keys = store.keys()
    batch, lengths = gt.fetch(store, keys, output="numpy"), store.status(keys)["length"]
    timed = [name for name, field in store.fields.items() if not field.per_row]
    return [
        {name: batch[name][i, : lengths[i]] for name in timed} | {"episode_return": batch["episode_return"][i]}
        for i in range(len(keys))
    ]


def flags(n, ended=()):
    """`terminated` and `truncated` of n environments, of which those in `ended` terminate."""
    return {"terminated": np.isin(np.arange(n), list(ended)), "truncated": np.zeros(n, bool)}
