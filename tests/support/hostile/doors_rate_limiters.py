"""Calls of rate limiters, each with arguments that it takes."""

from __future__ import annotations

from typing import Any

from hostile.stores import CAPACITY, STEPS, new_store
from hostile.subject import Tools
from hostile.values import SECONDS, SHORT_S, Door, choice, door, flag, number, whole


@door(
    "RateLimiter.set",
    min_size_to_sample=whole(1, CAPACITY * STEPS, none=True),
    error_buffer=number(1, none=True),
    unit=choice("rows", "steps"),
    afresh=lambda value: value is None or flag(value),
)
def limiter_set(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))
    given = {"samples_per_insert": 2.0, "min_size_to_sample": 4, "error_buffer": 100.0, "unit": "steps"}
    return there.limiter.set, {**given, "afresh": None}


@door("RateLimiter.admit_inserts", n=whole(0, 2**32), timeout_s=SECONDS)
def admit_inserts(tools: Tools) -> Door:
    limiter = tools.enter(new_store(tools)).limiter
    limiter.set(samples_per_insert=1, min_size_to_sample=4, error_buffer=1000)
    return limiter.admit_inserts, {"n": 1, "timeout_s": SHORT_S}


@door("RateLimiter.admit_samples", n=whole(0, 2**32), timeout_s=SECONDS)
def admit_samples(tools: Tools) -> Door:
    limiter = tools.enter(new_store(tools)).limiter
    limiter.set(min_size_to_sample=4)
    return limiter.admit_samples, {"n": 1, "timeout_s": SHORT_S, "stopping": None}


@door("RateLimiter.give_back", inserts=whole(0, 2**32), samples=whole(0, 2**32))
def give_back(tools: Tools) -> Door:
    limiter = tools.enter(new_store(tools)).limiter
    limiter.set(min_size_to_sample=4)
    return limiter.give_back, {"inserts": 1, "samples": 1}


@door("RateLimiter.stopping")
def limiter_stopping(tools: Tools) -> Door:
    limiter = tools.enter(new_store(tools)).limiter
    limiter.set(samples_per_insert=1, min_size_to_sample=1, error_buffer=1)

    def call(stopping: Any) -> None:
        limiter.stopping = stopping
        limiter.admit_inserts(2, SHORT_S)

    return call, {"stopping": None}
