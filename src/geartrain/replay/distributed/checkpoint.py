"""The shards of a job on disk: saved in parallel, complete everywhere or not there, restored to any number of hosts.

    DIRECTORY/step-00000042/shard-00000-of-00004/    a checkpoint of one store (checkpoint.py), incremental
    DIRECTORY/step-00000042/replay.json              names all shards and holds the replay's state; written last
    DIRECTORY/step-00000042/model/                   yours, from torch.distributed.checkpoint, for example

DIRECTORY may be on a disk that all hosts share, or on each host's own; then a host has its own shards and the same
replay.json as all others. A step is complete on a disk once it has a replay.json there, and can be restored when it is
complete, with the same id, on the disks of all ranks.

Saving goes in phases, none of which begins anywhere before the one before it has ended everywhere:

    1. look      what is on the disks; whether the ranks agree on what to save
    2. write     every shard's checkpoint, flushed, by the lowest of the ranks that share its store
    3. complete  replay.json, by every rank that wrote; under another name (replay.ID.json) where the step was complete
                 before, whose shards are still there: the new ones have other names
    4. clear     replay.ID.json takes replay.json's place; shards, steps and halves of steps nobody needs are removed

So at any instant the last step that was complete everywhere before, or the new one, is complete everywhere.

Long phases are kept alive: ranks that are ready ask the others once a second, so that a lost rank is noticed within
the deadline of `ranks`, however long a healthy one writes.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from geartrain.core.arguments import schema_difference
from geartrain.core.schema import Field
from geartrain.errors import (
    CheckpointError,
    PeerLostError,
    RanksDisagreeError,
    WaitTimeoutError,
)
from geartrain.replay.distributed.rank_group import RankGroup, SingleRank
from geartrain.replay.distributed.restore import SHARED_LIMITS, How, adopt_segment, saved_shard
from geartrain.store.checkpoint_reader import (
    STORED_NAMES,
    Checkpoint,
    json_checksum,
    make_directory,
    renamed,
    schema_of,
    sync_directory,
    write_json,
)
from geartrain.store.checkpoint_writer import Saved, save
from geartrain.store.store import Store

FORMAT = "geartrain-shards"
VERSION = 1
# How long a rank that is ready waits before it asks the others whether they are.
POLL_S = 1.0

_STEP = re.compile(r"step-(\d{8,})")
T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """What loading a shard came to.

    Attributes:
        path: the step's directory.
        step: its number.
        shard: (k, n), this rank's shard and how many there are.
        rows: selectable rows in it now.
        saved_shards: how many shards the checkpoint has.
        adopted: rows that were still in shared memory and were kept; 0 when all were read from disk.
        newer: rows of an adopted store that are newer than the checkpoint, and stay.
        gone: rows of the checkpoint that an adopted store has lost since.
        seconds: the time it took.
    """

    path: Path
    step: int
    shard: tuple[int, int]
    rows: int
    saved_shards: int
    adopted: int = 0
    newer: int = 0
    gone: int = 0
    seconds: float = 0.0


def save_checkpoint(
    store: Store,
    directory: str | os.PathLike[str],
    ranks: RankGroup | None = None,
    *,
    step: int | None = None,
    shard: tuple[int, int] | None = None,
    state: Mapping[str, Any] | None = None,
    keep: int = 2,
    companions: Sequence[str] = (),
    timeout_s: float = 3600.0,
    progress: bool = False,
) -> Saved:
    """Saves the stores of all ranks, each once and all at the same time; every rank calls it at the same step.

    Args:
        store: this rank's. Ranks that attached the same segment save it once, the lowest of them writes.
        directory: of all steps; on a shared disk or on each host's own.
        ranks: the ranks that save together; None for a process alone.
        step: the step's number; by default the one in `state`.
        shard: (k, n), this rank's shard and how many there are. By default shards are numbered by their lowest rank.
        state: what `Replay.state_dict()` returned, the same on all ranks; kept with the step.
        keep: complete steps to keep, this one included; older ones are removed.
        companions: names of whatever else lies in a step's directory and is to be removed with it, such as "model".
            Nothing else is touched.
        timeout_s: longest wait for the slowest shard.
        progress: show a progress bar for this rank's shard.

    Returns:
        Figures of all shards together, the same on every rank but for the time.

    Raises:
        CheckpointError: it failed on this or another rank; names the rank. The steps before are as they were. A step
            that is newer than this one and complete is in the way.
        RanksDisagreeError: on the step, the state, the schema, limits or shards; names two ranks and the difference.
        WaitTimeoutError: a shard took longer than `timeout_s`. It may still be written: restart the job.
        PeerLostError: a rank is gone.
    """
    began_s = time.monotonic()
    ranks = SingleRank() if ranks is None else ranks
    root = Path(directory).absolute()
    asked = f"saving shards to {root}"
    all_here = _together(ranks, asked, lambda: _look_before_saving(store, root, step, shard, state, keep), timeout_s)
    here = all_here[ranks.rank]
    members = _shards_of(all_here)
    _check_agreement(all_here, members)
    common = set.intersection(*(set(one.steps) for one in all_here))
    newer = max((number for number, _ in common), default=-1)
    if newer > here.step:
        raise CheckpointError(
            f"step {newer} in {root} is complete and newer than step {here.step}, which is to be saved: the next "
            f"restart would go on from there. Remove {_step_name(newer)} or save elsewhere"
        )
    number = next(k for k, group in enumerate(members) if ranks.rank in group)
    writes = ranks.rank == members[number][0]
    place = root / _step_name(here.step)
    seen = {key: steps for key, steps in here.steps.items() if key[0] == here.step}
    target = place / _free_name(number, len(members), {n for record in seen.values() for n in record.directories})

    doing = f"saving step {here.step} to {root}"
    try:
        entries = _together(
            ranks,
            doing,
            (lambda: _write_shard(store, root, target, here, members[number], progress)) if writes else dict,
            timeout_s,
        )
    except (PeerLostError, WaitTimeoutError):
        raise  # the others may have found all in order, and go on
    except Exception:
        if writes:
            shutil.rmtree(target, ignore_errors=True)
        raise
    every: list[Saved] = [entries[group[0]].pop("saved") for group in members]
    record = _record(all_here, [entries[group[0]] for group in members], store)
    final = place / (f"replay.{record['id']}.json" if seen else "replay.json")
    _together(ranks, doing, (lambda: _write_record(final, record, ranks.rank)) if writes else _nothing, timeout_s)
    kept = {here.step, *sorted({n for n, _ in common if n != here.step}, reverse=True)[: keep - 1]}

    def clear() -> None:
        _take_over(final, {entry["directory"] for entry in record["shards"]})
        _prune(root, kept, here.step, companions)

    _together(ranks, f"clearing up after {doing}", clear if writes else _nothing, timeout_s)
    return Saved(
        place,
        sum(each.rows for each in every),
        sum(each.bytes_written for each in every),
        sum(each.bytes_linked for each in every),
        time.monotonic() - began_s,
        sum(each.left_out for each in every),
        next((each.not_linked for each in every if each.not_linked), None),
    )


def load_checkpoint(
    directory: str | os.PathLike[str],
    name: str | os.PathLike[str],
    ranks: RankGroup | None = None,
    *,
    shard: tuple[int, int] | None = None,
    step: int | None = None,
    reshard: bool = False,
    together: str | None = None,
    capacity: int | None = None,
    part: int = 0,
    adopt: bool = False,
    timeout_s: float = 3600.0,
    progress: bool = False,
    **options: Any,
) -> tuple[Store, dict[str, Any] | None, Loaded]:
    """Brings the shards of a step back, in parallel; every rank calls it and gets its store, the state and a report.

    Args:
        directory: as in `save_checkpoint`.
        name: of the store to create. Ranks with the same shard and name share it: the lowest loads, the others join.
        ranks: the ranks that load together; None for a process alone.
        shard: (k, n), the shard this rank wants, out of so many. By default the host's number among the hosts as
            torchrun tells it, (0, 1) without torchrun.
        step: which; by default the newest that is complete on all ranks.
        reshard: allow another number of shards than were saved. All shards, one after the other and in each the rows
            by their numbers, are cut into n parts of nearly equal numbers of rows. All that selection looks at is kept:
            priorities, lengths, versions, ages, counts of samples and the order of commits. Row numbers and keys are
            new. Every rank must see all shards.
        together: with `reshard`, a field of one whole number a row; rows side by side that have the same are not
            parted.
        capacity: with `reshard`, rows of this rank's new store; by default its share of what all shards had.
        part: with `reshard`, which of the stores of a replay's mixture this is, for the state.
        adopt: where the store's segment is still in shared memory because its processes were killed, keep it and read
            nothing. Priorities and counts of samples of the checkpoint's rows are set back; rows that are newer stay.
        timeout_s: longest wait for the slowest shard.
        progress: show a progress bar for this rank's shard.
        options: `persist` and `reserve`, as in `Store.load`.

    Raises:
        CheckpointError: no such step, another number of shards, a missing or damaged file, another rank's failure.
        RanksDisagreeError: the ranks ask for different things.
        WaitTimeoutError: a shard took longer than `timeout_s`.
        PeerLostError: a rank is gone.
    """
    began_s = time.monotonic()
    ranks = SingleRank() if ranks is None else ranks
    root = Path(directory).absolute()
    how = How(reshard, together, capacity, part, adopt)
    asked = f"looking for steps in {root}"
    everyone = _together(
        ranks, asked, lambda: _look_before_loading(root, os.fspath(name), shard, step, how, options), timeout_s
    )
    mine = everyone[ranks.rank]
    _check_wishes(everyone)
    record = everyone[ranks.rank].steps[_choose(root, everyone)].content
    k, n = mine.shard
    if len(record["shards"]) != n and not reshard:
        raise CheckpointError(
            f"step {record['step']} in {root} was saved from {len(record['shards'])} shards, {n} are asked for; "
            f"reshard=True cuts the rows anew"
        )
    place = root / _step_name(record["step"])
    lowest = {(one.shard, one.name): rank for rank, one in reversed(list(enumerate(everyone)))}
    loads = lowest[mine.shard, mine.name] == ranks.rank
    opened: list[tuple[Store, bool]] = []

    def load() -> tuple[Loaded, dict[str, Any] | None]:
        source = saved_shard(place, record, k, n, how)
        adopted = adopt_segment(os.fspath(name), source) if adopt else None
        if adopted is None:
            store = source.load(os.fspath(name), progress, options)
            opened.append((store, False))
            source.remember(store)
            counts = (0, 0, 0)
        else:
            store, counts = adopted
            opened.append((store, True))
        return Loaded(place, record["step"], (k, n), len(store), len(record["shards"]), *counts), source.state()

    def join() -> None:
        opened.append((Store.open(name), True))

    doing = f"loading step {record['step']} from {root}"
    try:
        found = _together(ranks, doing, load if loads else _nothing, timeout_s)
        _together(ranks, doing, _nothing if loads else join, timeout_s)
    except BaseException:
        for store, was_there in opened:
            if not was_there:
                store.unlink()
            store.close(keep=True)
        raise
    report, state = found[lowest[mine.shard, mine.name]] or (None, None)
    assert report is not None
    return opened[0][0], state, replace(report, seconds=time.monotonic() - began_s)


def newest_step(
    directory: str | os.PathLike[str], ranks: RankGroup | None = None, *, timeout_s: float = 3600.0
) -> int | None:
    """The newest step that is complete on all ranks, the one `load_checkpoint` would load; None for a job that is new.

    Every rank calls it. Raises `PeerLostError` when a rank is gone.
    """
    root = Path(directory).absolute()
    everyone = _together(
        SingleRank() if ranks is None else ranks, f"looking at {root}", lambda: _scan(root)[0], timeout_s
    )
    return max((step for step, _ in set.intersection(*map(set, everyone))), default=None)


def describe_steps(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The steps in a directory as this disk has them, newest first: for people, and for `geartrain inspect`.

    A dict each: step, complete, created, path, state, world, and shards: a dict each of directory, rows, capacity,
    bytes, ranks and here (whether it is on this disk).
    """
    root = Path(directory)
    steps, _ = _scan(root)
    found = []
    for path in _step_paths(root):
        number = _number_of(path)
        records = [known for (step, _), known in steps.items() if step == number]
        record = max(records, key=lambda known: known.serial).content if records else {}
        shards = [
            {
                **{key: entry[key] for key in ("directory", "rows", "capacity", "bytes", "ranks")},
                "here": (path / entry["directory"] / "manifest.json").is_file(),
            }
            for entry in record.get("shards", [])
        ]
        about = {key: record.get(key) for key in ("created", "state", "world")}
        found.append({"step": number, "complete": bool(records), "path": str(path), **about, "shards": shards})
    return sorted(found, key=lambda step: -step["step"])


# --- acting together --------------------------------------------------------------------------------------------


def _together(ranks: RankGroup, doing: str, body: Callable[[], T], timeout_s: float) -> list[T]:
    """What `body` returned on each rank. When it raised on one, all raise."""
    outcome: list[tuple[Exception | None, Any]] = []

    def run() -> None:
        try:
            outcome.append((None, body()))
        except Exception as error:
            outcome.append((error, None))

    thread = threading.Thread(target=run, name="geartrain-shards", daemon=True)
    thread.start()
    deadline_s = time.monotonic() + timeout_s
    while True:
        thread.join(POLL_S)
        error, result = outcome[0] if outcome else (None, None)
        failure = None if error is None else f"{type(error).__name__}: {error}"
        told = ranks.all_gather_object((bool(outcome), failure, result, time.monotonic() > deadline_s))
        slow = [rank for rank, (done, *_) in enumerate(told) if not done]
        if not slow:
            break
        if any(late for *_, late in told):
            raise WaitTimeoutError(f"{doing}: rank {slow[0]} was not ready within {timeout_s} s")
    if error is not None:
        raise error
    for rank, (_, failure, *_) in enumerate(told):
        if failure is not None:
            raise CheckpointError(f"{doing} failed on rank {rank}: {failure}")
    return [result for _, _, result, _ in told]


def _nothing() -> None:
    pass


class _Known(NamedTuple):
    """A record on a disk."""

    serial: int  # of the saves of this step
    directories: list[str]
    content: dict[str, Any]


# Steps that are complete on a disk, by number and id.
_Steps = dict[tuple[int, str], _Known]


def _scan(root: Path) -> tuple[_Steps, list[str]]:
    """The records on this disk, and what is wrong with those that cannot be used."""
    steps: _Steps = {}
    wrong: list[str] = []
    for place in _step_paths(root):
        records: list[Path] = []
        with suppress(FileNotFoundError):  # the whole step is being removed
            records = sorted(place.glob("replay*.json"))
        for path in records:
            try:
                content = json.loads(path.read_text())
                whole = content.pop("checksum") == json_checksum(content) and content["format"] == FORMAT
                if whole and content["version"] != VERSION:
                    wrong.append(f"{path} has version {content['version']}, this build reads version {VERSION}")
                elif whole and content["step"] == _number_of(place):
                    directories = [shard["directory"] for shard in content["shards"]]
                    known = _Known(content["serial"], directories, content)
                    steps[content["step"], content["id"]] = known
                else:
                    wrong.append(f"{path} is damaged: its checksum does not match")
            except FileNotFoundError:
                continue  # it was just removed, or renamed
            except (ValueError, KeyError, AttributeError, TypeError):
                wrong.append(f"{path} is damaged: it is not the JSON that was written")
    return steps, wrong


def _step_paths(root: Path) -> list[Path]:
    return [path for path in sorted(root.glob("step-*")) if _STEP.fullmatch(path.name) and path.is_dir()]


def _step_name(step: int) -> str:
    return f"step-{step:08d}"


def _number_of(path: Path) -> int:
    found = _STEP.fullmatch(path.name)
    assert found is not None
    return int(found.group(1))


# --- saving -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Saver:
    """What a rank says before it saves."""

    store_id: int
    step: int
    state: str | None
    shard: tuple[int, int] | None
    keep: int
    fields: dict[str, Field]
    limits: dict[str, Any]
    steps: _Steps
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    now: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


def _look_before_saving(
    store: Store,
    root: Path,
    step: int | None,
    shard: tuple[int, int] | None,
    state: Mapping[str, Any] | None,
    keep: int,
) -> _Saver:
    if step is None and state is not None:
        step = state.get("step")
    if not isinstance(step, int) or not 0 <= step < 10**18:
        raise CheckpointError(f"a step is a number from 0 on, given as step= or in the replay's state, found {step!r}")
    if keep < 1:
        raise CheckpointError(f"at least one step must be kept, found keep={keep}")
    try:
        text = None if state is None else json.dumps(state, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the state must be made of what JSON knows: {error}") from None
    make_directory(root)
    limits = {limit: store.options[limit] for limit in SHARED_LIMITS}
    steps, _ = _scan(root)
    return _Saver(store.native.describe()["store_id"], step, text, shard, keep, store.fields, limits, steps)


def _shards_of(everyone: Sequence[_Saver]) -> list[list[int]]:
    """The ranks of each shard."""
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
                    f"ranks {group[0]} and {rank} share a store and call it shard {first} and {shard}"
                )
            if shard is None or shard[1] != len(groups):
                raise RanksDisagreeError(f"the ranks have {len(groups)} stores, rank {rank} says shard={shard}")
    numbered = {everyone[group[0]].shard: group for group in groups}
    if {shard[0] for shard in numbered if shard} != set(range(len(groups))):
        raise RanksDisagreeError(f"shards must be numbered 0 to {len(groups) - 1}, found {list(numbered)}")
    return [numbered[k, len(groups)] for k in range(len(groups))]


def _check_agreement(everyone: Sequence[_Saver], members: Sequence[Sequence[int]]) -> None:
    first = everyone[0]
    for rank, one in enumerate(everyone):
        for what, ours, theirs in (
            ("step", first.step, one.step),
            ("keep", first.keep, one.keep),
            ("state", first.state, one.state),
        ):
            if ours != theirs:
                raise RanksDisagreeError(f"ranks 0 and {rank} save with another {what}: {ours} and {theirs}")
    for group in members:
        rank, one = group[0], everyone[group[0]]
        if one.fields != first.fields:
            difference = schema_difference(first.fields, one.fields)
            raise RanksDisagreeError(f"the shard of rank {rank} has another schema than that of rank 0: {difference}")
        if list(one.fields) != list(first.fields):
            raise RanksDisagreeError(
                f"the shards of ranks 0 and {rank} have their fields in another order: "
                f"{', '.join(first.fields)} and {', '.join(one.fields)}"
            )
        for limit, ours in first.limits.items():
            if one.limits[limit] != ours:
                raise RanksDisagreeError(
                    f"the shards of ranks 0 and {rank} have different limits: {limit} is {ours} and {one.limits[limit]}"
                )


def _free_name(number: int, shards: int, taken: set[str]) -> str:
    """A shard's name, another than those of this step's earlier save."""
    name = f"shard-{number:05d}-of-{shards:05d}"
    names = [name, *(f"{name}.{again}" for again in range(2, len(taken) + 3))]
    return next(each for each in names if each not in taken)


def _base_of(root: Path, here: _Saver, origin: str | None) -> Path | None:
    """The newest checkpoint of the same store on this disk, or the one it was made from."""
    for (step, _), known in sorted(here.steps.items(), key=lambda each: (each[0][0], each[1].serial), reverse=True):
        for entry in known.content["shards"]:
            if entry["store_id"] == f"{here.store_id:016x}" or entry["id"] == origin:
                path: Path = root / _step_name(step) / entry["directory"]
                if path.is_dir():
                    return path
    return None


def _write_shard(
    store: Store, root: Path, target: Path, here: _Saver, members: list[int], progress: bool
) -> dict[str, Any]:
    """Saves the store to its place in the step; what the record says of it, and what it came to."""
    saved = save(
        store.native,
        store.fields,
        store.options,
        target,
        base=_base_of(root, here, store.origin),
        origin=store.origin,
        progress=progress,
    )
    found = Checkpoint(target)
    return {
        "directory": target.name,
        "id": found.id,
        "store_id": f"{here.store_id:016x}",
        "rows": found.rows,
        "capacity": found.options["capacity"],
        "bytes": found.nbytes,
        "ranks": members,
        "saved": saved,
    }


def _record(everyone: Sequence[_Saver], shards: list[dict[str, Any]], store: Store) -> dict[str, Any]:
    """What replay.json says, the same on every rank."""
    first = everyone[0]
    serials = [known.serial for one in everyone for (step, _), known in one.steps.items() if step == first.step]
    return {
        "format": FORMAT,
        "version": VERSION,
        "id": first.token,
        "serial": 1 + max(serials, default=0),
        "step": first.step,
        "created": first.now,
        "world": len(everyone),
        "shards": shards,
        "fields": schema_of(store.fields),
        "limits": renamed(first.limits, STORED_NAMES),
        "state": None if first.state is None else json.loads(first.state),
    }


def _write_record(path: Path, record: dict[str, Any], rank: int) -> None:
    fresh = path.with_name(f"{path.name}.{rank}.tmp")
    write_json(fresh, record)
    fresh.replace(path)
    sync_directory(path.parent)


def _take_over(record: Path, shards: set[str]) -> None:
    """Lets a step's new record take the old one's place, and removes what only the old one named."""
    place = record.parent
    if record.name != "replay.json":
        with suppress(FileNotFoundError):  # another rank of this disk was faster
            record.replace(place / "replay.json")
        sync_directory(place)
    for left in [*place.glob("shard-*-of-*"), *place.glob(".shard-*"), *place.glob("replay.*.json")]:
        if left.name not in shards:
            _remove(left)


def _prune(root: Path, kept: set[int], step: int, companions: Sequence[str]) -> None:
    """Removes steps older than those kept, and newer halves of steps that nobody will complete."""
    steps, _ = _scan(root)
    complete = {number for number, _ in steps}
    for path in _step_paths(root):
        number = _number_of(path)
        # A newer step that is complete here and not on another disk stays until it is outdated: files can be copied.
        if number in kept or (number > step and number in complete):
            continue
        with suppress(OSError):  # it holds files of somebody else, or another rank of this disk was faster
            records = [*path.glob("replay*.json*"), *path.glob("restored-*.json")]
            blocks = [*path.glob("shard-*-of-*"), *path.glob(".shard-*")]
            others = [path / companion for companion in companions] if records or blocks else []
            for entry in [*records, *others, *blocks]:  # nothing without its record; and blocks tell what is ours
                _remove(entry)
            if records or blocks or number < step:
                path.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# --- loading ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wish:
    """What a rank says before it loads."""

    name: str
    shard: tuple[int, int]
    step: int | None
    how: How
    steps: _Steps
    wrong: list[str]


def _look_before_loading(
    root: Path, name: str, shard: tuple[int, int] | None, step: int | None, how: How, options: dict[str, Any]
) -> _Wish:
    unknown = set(options) - {"persist", "reserve"}
    if unknown:
        raise CheckpointError(f"limits come from the checkpoint; {', '.join(sorted(unknown))} cannot be set")
    if not how.reshard and (how.together is not None or how.capacity is not None):
        raise CheckpointError("together= and capacity= only mean something with reshard=True")
    shard = _torchrun_shard(os.environ) if shard is None else shard
    if not 0 <= shard[0] < shard[1]:
        raise CheckpointError(f"a shard is (k, n) with k from 0 to n - 1, found {shard}")
    steps, wrong = _scan(root)
    return _Wish(name, (int(shard[0]), int(shard[1])), step, how, steps, wrong)


def _torchrun_shard(environment: Mapping[str, str]) -> tuple[int, int]:
    """This host's number and how many hosts there are, as torchrun tells its workers."""
    if "GROUP_RANK" not in environment:
        return 0, 1
    if "GROUP_WORLD_SIZE" in environment:
        return int(environment["GROUP_RANK"]), int(environment["GROUP_WORLD_SIZE"])
    world, local = int(environment.get("WORLD_SIZE", 0)), int(environment.get("LOCAL_WORLD_SIZE", 0))
    if local < 1 or world % local:
        raise CheckpointError(
            f"WORLD_SIZE={world} and LOCAL_WORLD_SIZE={local} do not tell how many hosts there are; give shard=(k, n)"
        )
    return int(environment["GROUP_RANK"]), world // local


def _check_wishes(everyone: Sequence[_Wish]) -> None:
    first = everyone[0]
    for rank, one in enumerate(everyone):
        for what, ours, theirs in (
            ("step", first.step, one.step),
            ("shards", first.shard[1], one.shard[1]),
            ("reshard", first.how.reshard, one.how.reshard),
            ("together", first.how.together, one.how.together),
            ("part", first.how.part, one.how.part),
            ("adopt", first.how.adopt, one.how.adopt),
        ):
            if ours != theirs:
                raise RanksDisagreeError(f"ranks 0 and {rank} ask for different things: {what} {ours} and {theirs}")
    asked = {one.shard[0] for one in everyone}
    if missing := set(range(first.shard[1])) - asked:
        raise RanksDisagreeError(f"of {first.shard[1]} shards, no rank asks for shard {min(missing)}")


def _choose(root: Path, everyone: Sequence[_Wish]) -> tuple[int, str]:
    """The newest step, or the one asked for, that is complete on all disks."""
    step = everyone[0].step
    common = set.intersection(*(set(one.steps) for one in everyone))
    possible = [key for key in common if step is None or key[0] == step]
    if possible:
        return max(possible, key=lambda key: (key[0], everyone[0].steps[key].serial))
    wanted = "no step" if step is None else f"step {step} is not"
    told = [
        f"rank {rank} has {', '.join(map(str, sorted({n for n, _ in one.steps}))) or 'none'}"
        for rank, one in enumerate(everyone)
    ]
    wrong = [text for one in everyone for text in one.wrong]
    raise CheckpointError(
        f"{wanted} complete on all ranks in {root}: {'; '.join(told[:8])}{'; ...' if len(told) > 8 else ''}"
        + (f". {wrong[0]}" if wrong else "")
    )


__all__ = ["Loaded", "describe_steps", "load_checkpoint", "newest_step", "save_checkpoint"]
