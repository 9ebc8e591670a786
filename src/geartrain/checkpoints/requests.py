"""Requests of the ranks before a job's checkpoint is saved or loaded.

The ranks all-gather their requests. Every rank then checks that the requests are consistent.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.checkpoints.restore import SHARED_LIMITS, LoadOptions
from geartrain.checkpoints.steps import Steps, scan_steps, step_name
from geartrain.core.arguments import check_flag, check_text, check_texts, check_type, check_whole, optional, shown
from geartrain.core.schema import Field, schema_difference
from geartrain.errors import ArgumentError, CheckpointError, RanksDisagreeError
from geartrain.store.checkpoint_format import make_directory
from geartrain.store.store import Store

# --- saving -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SaveRequest:
    """A rank's contribution to the all-gather before a save.

    Attributes:
        store_id: id of its segment.
        step, state, shard, keep: arguments of `save_checkpoint`; the state as JSON.
        fields, max_length, limits: properties of its store.
        steps: steps that are complete on its disk.
        companions: names of entries that must be in the step's directory, and whether they are there on its disk.
        token: the step's id, if this is rank 0.
        now: UTC, the step's time if this is rank 0.
    """

    store_id: int
    step: int
    state: str | None
    shard: tuple[int, int] | None
    keep: int
    fields: dict[str, Field]
    max_length: int
    limits: dict[str, Any]
    steps: Steps
    companions: dict[str, bool]
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    now: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


def save_request(
    store: Store,
    root: Path,
    step: int | None,
    shard: tuple[int, int] | None,
    state: Mapping[str, Any] | None,
    keep: int,
    companions: Sequence[str],
) -> SaveRequest:
    """This rank's request, once its arguments make sense."""
    check_type("save_checkpoint takes a Store, this rank's shard", store, Store)
    check_type("state is what Replay.state_dict() returns", state, Mapping | None)
    if step is None and state is not None:
        step = state.get("step")
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or not 0 <= step < 10**18:
        raise CheckpointError(
            f"a step is a whole number >= 0, given as step= or in the replay's state, found {shown(step)}"
        )
    if check_whole("keep", keep) < 1:
        raise CheckpointError(f"at least one step must be kept, found keep={shown(keep)}")
    for name in check_texts("companions", companions):
        if name in ("", ".", "..") or "/" in name or name.startswith(("shard-", ".shard-", "replay.", "restored-")):
            raise ArgumentError(
                "a companion is the name of an entry in the step's directory that save_checkpoint does not write "
                f"itself, such as 'model', found {shown(name)}"
            )
    step, keep, shard = int(step), int(keep), None if shard is None else _numbered(shard)
    try:
        text = None if state is None else json.dumps(state, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the state must be JSON: {error}") from None
    make_directory(root)
    limits = {limit: store.options[limit] for limit in SHARED_LIMITS}
    steps, _ = scan_steps(root)
    store_id, schema = store.id, (store.fields, store.max_length)
    there = {name: os.path.lexists(root / step_name(step) / name) for name in companions}
    return SaveRequest(store_id, step, text, shard, keep, *schema, limits, steps, there)


def shard_ranks(everyone: Sequence[SaveRequest]) -> list[list[int]]:
    """The ranks of each shard, by its number."""
    by_store: dict[int, list[int]] = {}
    for rank, one in enumerate(everyone):
        by_store.setdefault(one.store_id, []).append(rank)
    groups = list(by_store.values())
    if all(one.shard is None for one in everyone):
        return groups
    for group in groups:
        for rank in group:
            shard, first = everyone[rank].shard, everyone[group[0]].shard
            if shard != first:
                raise RanksDisagreeError(
                    f"ranks {group[0]} and {rank} share a store, which is shard {first} on one and {shard} on the other"
                )
            if shard is None or shard[1] != len(groups):
                raise RanksDisagreeError(f"the ranks have {len(groups)} stores, rank {rank} says shard={shard}")
    numbered = {everyone[group[0]].shard: group for group in groups}
    if {shard[0] for shard in numbered if shard} != set(range(len(groups))):
        raise RanksDisagreeError(f"shards must be numbered 0 to {len(groups) - 1}, found {list(numbered)}")
    return [numbered[k, len(groups)] for k in range(len(groups))]


def check_companions(place: Path, everyone: Sequence[SaveRequest]) -> None:
    """Raises `CheckpointError` where a companion is not in the step's directory `place` on any rank's disk."""
    for name in {name: None for one in everyone for name in one.companions}:
        if not any(one.companions.get(name) for one in everyone):
            raise CheckpointError(
                f"the companion {place / name} does not exist on any rank, so a restart from this step would lack it: "
                "save it before the call of save_checkpoint, which completes the step"
            )


def check_save_requests(everyone: Sequence[SaveRequest], members: Sequence[Sequence[int]]) -> None:
    """Raises `RanksDisagreeError` unless all ranks save the same step of stores of one schema and of equal limits."""
    first = everyone[0]
    for rank, one in enumerate(everyone):
        for what, ours, theirs in (
            ("step", first.step, one.step),
            ("keep", first.keep, one.keep),
            ("state", first.state, one.state),
        ):
            if ours != theirs:
                raise RanksDisagreeError(f"ranks 0 and {rank} differ in {what}: {ours} and {theirs}")
    for group in members:
        rank, one = group[0], everyone[group[0]]
        if one.fields != first.fields:
            difference = schema_difference(first.fields, one.fields)
            raise RanksDisagreeError(f"the shards of ranks 0 and {rank} have different schemas: {difference}")
        if list(one.fields) != list(first.fields):
            raise RanksDisagreeError(
                f"the shards of ranks 0 and {rank} have their fields in different orders: "
                f"{', '.join(first.fields)} and {', '.join(one.fields)}"
            )
        if one.max_length != first.max_length:
            raise RanksDisagreeError(
                f"the shards of ranks 0 and {rank} have different schemas: rows of at most {first.max_length} "
                f"and of {one.max_length} steps"
            )
        for limit, ours in first.limits.items():
            if one.limits[limit] != ours:
                raise RanksDisagreeError(
                    f"the shards of ranks 0 and {rank} have different limits: {limit} is {ours} and {one.limits[limit]}"
                )


# --- loading ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadRequest:
    """A rank's contribution to the all-gather before a load.

    Attributes:
        name, shard, step: arguments of `load_checkpoint`.
        options: the rest of its arguments.
        steps: steps that are complete on its disk.
        damaged: error texts of the records that cannot be used.
    """

    name: str
    shard: tuple[int, int]
    step: int | None
    options: LoadOptions
    steps: Steps
    damaged: list[str]


def load_request(
    root: Path, name: str, shard: tuple[int, int] | None, step: int | None, options: LoadOptions, unknown: set[str]
) -> LoadRequest:
    """This rank's request, once its arguments make sense; `unknown` are options that there are not."""
    if unknown:
        raise CheckpointError(
            f"fields and limits come from the checkpoint; {', '.join(sorted(unknown))} cannot be set. For others load "
            f"it as it is, create a store with them, and insert the rows that `fetch` gets from it"
        )
    for what, flag in (("reshard", options.reshard), ("adopt", options.adopt)):
        check_flag(what, flag)
    if not options.reshard and (options.together is not None or options.capacity is not None):
        raise CheckpointError("together= and capacity= need reshard=True")
    if options.together is not None:
        check_text("together", options.together)
    optional(check_whole, "capacity", options.capacity, 1, 2**32 - 1)
    check_whole("part", options.part, 0, 2**16)
    step = None if step is None else check_whole("step", step, 0, 10**18)
    shard = _numbered(torchrun_shard(os.environ) if shard is None else shard)
    steps, damaged = scan_steps(root, newest=step is None)
    return LoadRequest(name, shard, step, options, steps, damaged)


def _numbered(shard: object) -> tuple[int, int]:
    """A shard's number and the number of shards. Raises `CheckpointError`."""
    numbers = shard if isinstance(shard, tuple | list) else ()
    try:
        k, n = (check_whole("a shard's number", number) for number in numbers)
    except ValueError:  # not two, or no numbers
        k, n = 0, 0
    if not 0 <= k < n:
        raise CheckpointError(f"a shard is (k, n) with k from 0 to n - 1, found {shown(shard)}")
    return k, n


def torchrun_shard(environment: Mapping[str, str]) -> tuple[int, int]:
    """(host, hosts): this host's number and the number of hosts, from torchrun's environment."""
    if "GROUP_RANK" not in environment:
        return 0, 1
    if "GROUP_WORLD_SIZE" in environment:
        return int(environment["GROUP_RANK"]), int(environment["GROUP_WORLD_SIZE"])
    world, local = int(environment.get("WORLD_SIZE", 0)), int(environment.get("LOCAL_WORLD_SIZE", 0))
    if local < 1 or world % local:
        raise CheckpointError(f"WORLD_SIZE={world} is not a multiple of LOCAL_WORLD_SIZE={local}: give shard=(k, n)")
    return int(environment["GROUP_RANK"]), world // local


def check_load_requests(everyone: Sequence[LoadRequest]) -> None:
    """Raises `RanksDisagreeError` unless all ranks have the same arguments, and every shard is loaded by one."""
    first = everyone[0]
    for rank, one in enumerate(everyone):
        for what, ours, theirs in (
            ("step", first.step, one.step),
            ("shards", first.shard[1], one.shard[1]),
            ("reshard", first.options.reshard, one.options.reshard),
            ("together", first.options.together, one.options.together),
            ("part", first.options.part, one.options.part),
            ("adopt", first.options.adopt, one.options.adopt),
        ):
            if ours != theirs:
                raise RanksDisagreeError(f"ranks 0 and {rank} have different arguments: {what} {ours} and {theirs}")
    asked = {one.shard[0] for one in everyone}
    if missing := set(range(first.shard[1])) - asked:
        raise RanksDisagreeError(f"no rank loads shard {min(missing)} of {first.shard[1]}: give each shard to a rank")


def newest_common(root: Path, everyone: Sequence[LoadRequest]) -> tuple[int, str]:
    """The newest step, or the requested one, that is complete on all disks: its number and id."""
    step = everyone[0].step
    common = set.intersection(*(set(one.steps) for one in everyone))
    possible = [key for key in common if step is None or key[0] == step]
    if possible:
        return max(possible, key=lambda key: (key[0], everyone[0].steps[key].serial))
    wanted = "no step" if step is None else f"step {step} is not"
    complete = [
        f"rank {rank} has {', '.join(map(str, sorted({n for n, _ in one.steps}))) or 'none'}"
        for rank, one in enumerate(everyone)
    ]
    damaged = [text for one in everyone for text in one.damaged]
    raise CheckpointError(
        f"{wanted} complete on all ranks in {root}: {'; '.join(complete[:8])}{'; ...' if len(complete) > 8 else ''}"
        + (f". {damaged[0]}" if damaged else "")
    )


__all__ = [
    "LoadRequest",
    "SaveRequest",
    "check_companions",
    "check_load_requests",
    "check_save_requests",
    "load_request",
    "newest_common",
    "save_request",
    "shard_ranks",
    "torchrun_shard",
]
