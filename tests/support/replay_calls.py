"""Replays whose rare options tests give as keywords, beside those of `Replay`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import geartrain as gt

_RARE = {field.name for field in fields(gt.ReplayOptions)}
_OF_RANKS = {field.name for field in fields(gt.RankOptions)} - {"group"}


def replay_of(*given: Any, **options: Any) -> gt.Replay:
    """A replay; fields of `ReplayOptions` and `RankOptions` may be among its keywords."""
    rare = {name: options.pop(name) for name in _RARE & options.keys()}
    ranks = {name: options.pop(name) for name in _OF_RANKS & options.keys()}
    if ranks:
        options["group"] = gt.RankOptions(options.get("group"), **ranks)
    if rare:
        options["options"] = gt.ReplayOptions(**rare)
    return gt.Replay(*given, **options)
