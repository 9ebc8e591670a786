"""A job that is watched: an actor that inserts, and a learner that draws no more than the rate limiter lets it."""

from __future__ import annotations

import time

import numpy as np
from replay_calls import replay_of

import geartrain as gt

FIELDS = {"x": gt.Field((2,), "float32")}


def act(context):
    store = context.store(FIELDS, max_length=1, capacity=100)
    store.limiter.stopping = lambda: context.stopping
    rows = 0
    while not context.stopping:
        store.insert({"x": np.zeros((1, 1, 2), np.float32)})
        rows += 1
        context.report(steps=rows, rows=rows)
        time.sleep(0.005)


def learn(context):
    store = context.store()
    store.limiter.set(samples_per_insert=4, min_size_to_sample=1, error_buffer=16)
    replay = replay_of(store, gt.selection.Uniform(seed=0), batch_size=4, output="numpy", timeout_s=600.0)
    with context.watch(replay):
        while not context.stopping:
            replay.sample()
            context.report(steps=replay.step)
