"""Checkpoints of a job: saves the shards of all ranks in parallel and atomically, and restores them to any host count.

    DIRECTORY/step-00000042/shard-00000-of-00004/    a checkpoint of one store, incremental (checkpoint_writer.py)
    DIRECTORY/step-00000042/replay.json              the record: all shards and the replay's state; written last
    DIRECTORY/step-00000042/model/                   the model's, by torch.distributed.checkpoint, for example

DIRECTORY is on a disk that all hosts share, or on a local disk of each host. A local disk has only the shards of its
host, and the same record as all others. A step is complete on a disk once its record is there. A step can be restored
when it is complete, with the same id, on the disks of all ranks.

A save has four phases, separated by barriers:

    1. request   the ranks all-gather what is on their disks and what they save, and check that it is consistent
    2. write     the lowest rank of each store writes and flushes its shard's checkpoint
    3. complete  every rank that wrote a shard writes the record
    4. clean up  superseded shards, old steps and incomplete ones are removed

If the step was complete before, its old shards stay until phase 4, and the new shards have other names. Phase 3 then
writes the record as replay.ID.json, and phase 4 renames it to replay.json. So at any instant one step is complete
everywhere: the new one, or the last one before it.

During a long phase the ranks that are done all-gather once a second. So they notice a lost rank within the timeout of
the rank group, however long a healthy rank writes.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from geartrain.checkpoints.requests import (
    LoadRequest,
    SaveRequest,
    check_companions,
    check_load_requests,
    check_save_requests,
    load_request,
    newest_common,
    save_request,
    shard_ranks,
)
from geartrain.checkpoints.restore import LoadOptions, adopt_segment, saved_shard
from geartrain.checkpoints.steps import (
    FORMAT,
    VERSION,
    base_checkpoint,
    free_shard_name,
    prune_steps,
    replace_record,
    scan_steps,
    step_name,
    write_record,
)
from geartrain.core.arguments import check_flag, check_path, check_whole, timeout
from geartrain.core.lifetime import on_error
from geartrain.core.threads import DaemonThread
from geartrain.errors import ArgumentError, CheckpointError, GeartrainError, PeerLostError, WaitTimeoutError
from geartrain.ranks.rank_group import RankGroup, SingleRank
from geartrain.ranks.topology import topology_of
from geartrain.ranks.torch_rank_group import as_rank_group
from geartrain.store.checkpoint_reader import Checkpoint
from geartrain.store.checkpoint_writer import Saved, save
from geartrain.store.segment import check_name, stored_schema_of
from geartrain.store.store import Store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from geartrain.replay.replay import Replay

# Interval of the all-gathers during a phase.
POLL_S = 1.0

#: Times that a load starts again because the step that it had chosen was removed.
_MOST_TRIES = 20
_REMOVED = "removed"

T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """Result of loading a shard.

    Attributes:
        path: the step's directory.
        step: its number.
        shard: (k, n), this rank's shard and the number of shards.
        rows: selectable rows in it.
        saved_shards: shards of the checkpoint.
        adopted: rows that were still in shared memory and were kept; 0 when all were read from disk.
        newer: rows of an adopted store that are newer than the checkpoint, and kept.
        gone: rows of the checkpoint that an adopted store has lost since.
        seconds: duration.
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


@contextmanager
def _joined(group: ProcessGroup | RankGroup | None, timeout_s: float) -> Iterator[RankGroup]:
    """The rank group of a call's ranks. One that is made here, for a process group, is left at the end."""
    if group is None:
        yield SingleRank()
        return
    ranks = as_rank_group(group, topology_of(group, None).members, timeout_s)
    try:
        yield ranks
    finally:
        if ranks is not group:
            ranks.close()


def save_checkpoint(
    store: Store,
    directory: str | os.PathLike[str],
    group: ProcessGroup | RankGroup | None = None,
    *,
    step: int | None = None,
    shard: tuple[int, int] | None = None,
    state: Mapping[str, Any] | None = None,
    replay: Replay | None = None,
    keep: int = 2,
    companions: Sequence[str] = (),
    timeout_s: float = 3600.0,
    progress: bool = False,
) -> Saved:
    """Saves the stores of all ranks in parallel, each store once. Collective: every rank calls it at the same step.

    Args:
        store: this rank's shard. If several ranks have the same segment, the lowest of them writes it.
        directory: directory of all steps; on a shared disk, or on a disk of each host.
        group: the job's ranks, as for `Replay`: a `torch.distributed` process group, such as `dist.group.WORLD`, or a
            `RankGroup`. None saves the store of this process alone.
        step: number of the step; by default the one in `state`.
        shard: (k, n), this rank's shard and the number of shards. By default shards are numbered by their lowest rank.
        state: `Replay.state_dict()`, the same on all ranks; kept with the step.
        replay: in place of `state`, the replay itself: its state is kept. If it keeps its rows (`keep="saved"`), the
            rows of the batches that it has delivered are freed once the step is complete on all ranks.
        keep: number of complete steps to keep, this one included. Older ones are removed.
        companions: names of further entries in a step's directory that belong to it, such as "model". Save them before
            this call. They are removed with the step; nothing else is touched.
        timeout_s: longest wait for the slowest shard, and for the last rank to make the call, in seconds.
        progress: show a progress bar for this rank's shard.

    Returns:
        Sums over all shards, the same on every rank except for the time.

    Raises:
        ArgumentError: both `state` and `replay` were given.
        CheckpointError: the save failed on this rank or on another, which the message names; earlier steps are intact.
            Or a newer step is complete already, or a companion is on no rank's disk.
        RanksDisagreeError: the ranks differ in step, state, schema, limits or shards. The message names two ranks and
            the difference.
        WaitTimeoutError: a shard took longer than `timeout_s`, and may still be being written. Restart the job.
        PeerLostError: a rank is lost, or did not make the call within `timeout_s`.

    Examples:
        >>> import geartrain as gt, tempfile
        >>> store = gt.Store.create({"x": gt.Field((), "float32", per_row=True)}, capacity=8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = gt.save_checkpoint(store, folder, step=100)
        ...     restored, state, report = gt.load_checkpoint(folder, "doc-restored")
        >>> list(restored.fields)
        ['x']
        >>> restored.close(); store.close()
    """
    timeout(timeout_s)
    check_flag("progress", progress)
    root = check_path("directory", directory).absolute()
    if replay is not None:
        if state is not None:
            raise ArgumentError("save_checkpoint takes the replay or its state, not both: leave out state=")
        state = replay.state_dict()

    def request() -> SaveRequest:
        return save_request(store, root, step, shard, state, keep, companions)

    with _joined(group, timeout_s) as ranks:
        saved = _save(ranks, root, store, request, companions, timeout_s, progress)
    if replay is not None and state is not None and replay.keeps_rows and state["step"] > 0:
        replay.saved(state["step"] - 1)
    return saved


def _save(
    ranks: RankGroup,
    root: Path,
    store: Store,
    request: Callable[[], SaveRequest],
    companions: Sequence[str],
    timeout_s: float,
    progress: bool,
) -> Saved:
    """The phases of `save_checkpoint`."""
    began_s = time.monotonic()
    all_here = _run_phase(ranks, f"saving shards to {root}", request, timeout_s)
    here = all_here[ranks.rank]
    members = shard_ranks(all_here)
    check_save_requests(all_here, members)
    common = set.intersection(*(set(one.steps) for one in all_here))
    newer = max((number for number, _ in common), default=-1)
    if newer > here.step:
        raise CheckpointError(
            f"step {newer} in {root} is newer than step {here.step} and complete, so the next restart "
            f"would resume from it: remove {step_name(newer)}, or save elsewhere"
        )
    check_companions(root / step_name(here.step), all_here)
    number = next(k for k, group in enumerate(members) if ranks.rank in group)
    writes = ranks.rank == members[number][0]
    place = root / step_name(here.step)
    seen = {key: steps for key, steps in here.steps.items() if key[0] == here.step}
    target = place / free_shard_name(number, len(members), {n for record in seen.values() for n in record.directories})

    doing = f"saving step {here.step} to {root}"
    try:
        entries = _run_phase(
            ranks,
            doing,
            (lambda: _write_shard(store, root, target, here, members[number], progress)) if writes else dict,
            timeout_s,
        )
    except (PeerLostError, WaitTimeoutError):
        raise  # the other ranks may have completed the phase
    except Exception:
        if writes:
            shutil.rmtree(target, ignore_errors=True)
        raise
    every: list[Saved] = [entries[group[0]].pop("saved") for group in members]
    record = _new_record(all_here, [entries[group[0]] for group in members], store)
    final = place / (f"replay.{record['id']}.json" if seen else "replay.json")
    _run_phase(ranks, doing, (lambda: write_record(final, record, ranks.rank)) if writes else _nothing, timeout_s)
    kept = {here.step, *sorted({n for n, _ in common if n != here.step}, reverse=True)[: here.keep - 1]}

    def clean_up() -> None:
        replace_record(final, {entry["directory"] for entry in record["shards"]})
        prune_steps(root, kept, here.step, companions)

    _run_phase(ranks, f"cleaning up after {doing}", clean_up if writes else _nothing, timeout_s)
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
    group: ProcessGroup | RankGroup | None = None,
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
    """Restores the shards of a step in parallel. Collective: every rank gets its store, the state and a report.

    Args:
        directory: as for `save_checkpoint`.
        name: name of the store to create. Ranks with the same shard and name share it: the lowest loads it, the others
            attach.
        group: the job's ranks, as for `save_checkpoint`. Their number may differ from the one that saved.
        shard: (k, n), this rank's shard and the number of shards. By default torchrun's host number and number of
            hosts; (0, 1) without torchrun.
        step: number of the step; by default the newest that is complete on all ranks.
        reshard: allow another number of shards than was saved. All shards are concatenated, and cut into n parts with
            nearly the same number of rows. Priorities, lengths, versions, ages, numbers of samples and the order of
            commits are kept; row numbers and keys are new. Every rank must see all shards.
        together: with `reshard`, a scalar `per_row` field of whole numbers: neighbouring rows with the same value stay
            in one shard.
        capacity: with `reshard`, rows of this rank's new store; by default its share of the saved capacities.
        part: with `reshard`, the index of this store in a replay's mixture, for the state.
        adopt: if the store's segment is still in shared memory, because its processes were killed, keep it and read
            nothing. Priorities and numbers of samples of the checkpoint's rows are reset; newer rows are kept.
        timeout_s: longest wait for the slowest shard, and for the last rank to make the call, in seconds.
        progress: show a progress bar for this rank's shard.
        options: `persist` and `reserve`, as for `Store.load`.

    Raises:
        CheckpointError: there is no such step, the number of shards differs, a file is missing or damaged, or another
            rank failed.
        RanksDisagreeError: the ranks have different arguments.
        WaitTimeoutError: a shard took longer than `timeout_s`.
        PeerLostError: a rank is lost, or did not make the call within `timeout_s`.
    """
    timeout(timeout_s)
    check_flag("progress", progress)
    root = check_path("directory", directory).absolute()
    how = LoadOptions(reshard, together, capacity, part, adopt)
    unknown = set(options) - {"persist", "reserve"}

    def request() -> LoadRequest:
        return load_request(root, check_name(name), shard, step, how, unknown)

    with _joined(group, timeout_s) as ranks:
        return _load(ranks, root, request, how, timeout_s, progress, options)


def _load(
    ranks: RankGroup,
    root: Path,
    request: Callable[[], LoadRequest],
    how: LoadOptions,
    timeout_s: float,
    progress: bool,
    options: dict[str, Any],
) -> tuple[Store, dict[str, Any] | None, Loaded]:
    """The phases of `load_checkpoint`, begun again where the step that was chosen is removed meanwhile."""
    began_s = time.monotonic()
    for left in reversed(range(_MOST_TRIES)):
        everyone = _run_phase(ranks, f"looking for steps in {root}", request, timeout_s)
        check_load_requests(everyone)
        number, identity = newest_common(root, everyone)
        load = _ShardLoad(everyone, ranks.rank, root, (number, identity), how, progress, options)
        with on_error(load.undo):
            found = _run_phase(ranks, load.doing, load.run, timeout_s)
            if _REMOVED in found:
                # By a save, before some rank had opened it: there is a newer one.
                if left == 0:
                    raise CheckpointError(
                        f"{load.doing}: the checkpoint was removed, like {_MOST_TRIES - 1} others before it"
                    )
                load.undo()
                continue
            _run_phase(ranks, load.doing, load.attach, timeout_s)
        loaded = found[load.loader]
        assert load.store is not None
        assert isinstance(loaded, tuple)
        report, state = loaded
        return load.store, state, replace(report, seconds=time.monotonic() - began_s)
    raise AssertionError("unreachable")


class _ShardLoad:
    """One rank's part in loading a step: its store, and the data needed to undo the load."""

    def __init__(
        self,
        everyone: list[LoadRequest],
        rank: int,
        root: Path,
        key: tuple[int, str],
        how: LoadOptions,
        progress: bool,
        options: dict[str, Any],
    ) -> None:
        self._mine, self._root, self._key = everyone[rank], root, key
        self._how, self._progress, self._options = how, progress, options
        self._record = self._mine.steps[key].content
        self.doing = f"loading step {key[0]} from {root}"
        lowest = {(one.shard, one.name): at for at, one in reversed(list(enumerate(everyone)))}
        self.loader = lowest[self._mine.shard, self._mine.name]  # the rank that loads it
        self._loads = self.loader == rank
        self.store: Store | None = None
        self._was_there = False
        shards, n = len(self._record["shards"]), self._mine.shard[1]
        if shards != n and not how.reshard:
            raise CheckpointError(
                f"step {key[0]} in {root} has {shards} shards, but {n} were requested: reshard=True "
                "redistributes the rows"
            )

    def run(self) -> tuple[Loaded, dict[str, Any] | None] | str | None:
        """Loads the store, if this rank is to: its report and the state; `_REMOVED` when the step was, meanwhile."""
        if not self._loads:
            return None
        try:
            return self._load()
        except CheckpointError:
            if self._key in scan_steps(self._root)[0]:
                raise
            return _REMOVED

    def _load(self) -> tuple[Loaded, dict[str, Any] | None]:
        (k, n), name = self._mine.shard, self._mine.name
        place = self._root / step_name(self._key[0])
        with closing(saved_shard(place, self._record, k, n, self._how)) as source:
            adopted = adopt_segment(name, source) if self._how.adopt else None
            if adopted is None:
                store = source.load(name, self._progress, self._options)
                self.store = store
                source.remember(store)
                counts = (0, 0, 0)
            else:
                store, counts = adopted
                self.store, self._was_there = store, True
            state = source.state()
            if (
                store.tasks
                and state is not None
                and check_whole("the state's step", state.get("step", 0), 0, 2**40) > 0
            ):
                store.native.free_taken(int(state["step"]) - 1)  # trained, and saved with this step
            report = Loaded(place, self._key[0], (k, n), len(store), len(self._record["shards"]), *counts)
            return report, state

    def attach(self) -> None:
        """Opens what another rank of this host has loaded, if it has."""
        if not self._loads:
            self.store, self._was_there = Store.open(self._mine.name), True

    def undo(self) -> None:
        """Removes the store, unless it was there before."""
        if self.store is not None:
            if not self._was_there:
                self.store.unlink()
            self.store.close(keep=True)
            self.store = None


def newest_step(
    directory: str | os.PathLike[str],
    group: ProcessGroup | RankGroup | None = None,
    *,
    timeout_s: float = 3600.0,
) -> int | None:
    """The newest step that is complete on all ranks, which `load_checkpoint` would load; None without one.

    Collective, over the ranks of `group`, as in `save_checkpoint`.

    Raises:
        CheckpointError: the directory, or a newer step's record, cannot be read on a rank.
        PeerLostError: a rank is lost.
    """
    timeout(timeout_s)
    root = check_path("directory", directory).absolute()
    with _joined(group, timeout_s) as ranks:
        everyone = _run_phase(ranks, f"looking at {root}", lambda: scan_steps(root, newest=True)[0], timeout_s)
    return max((step for step, _ in set.intersection(*map(set, everyone))), default=None)


# --- phases --------------------------------------------------------------------------------------------


def _run_phase(ranks: RankGroup, doing: str, body: Callable[[], T], timeout_s: float) -> list[T]:
    """Runs a phase on every rank and returns all results; when it fails on one rank, all raise. Collective."""
    outcome: list[tuple[Exception | None, Any]] = []

    def run() -> None:
        try:
            outcome.append((None, body()))
        except Exception as error:
            outcome.append((error, None))

    thread = DaemonThread(run, "geartrain-shards")
    try:
        thread.start()
    except GeartrainError as failed:  # no more threads: the others are told, as of any failure
        outcome.append((failed, None))
    deadline_s = time.monotonic() + timeout_s
    while True:
        if thread.is_alive():
            thread.join(POLL_S)
        error, result = outcome[0] if outcome else (None, None)
        failure = None if error is None else f"{type(error).__name__}: {error}"
        every = ranks.all_gather_object((bool(outcome), failure, result, time.monotonic() > deadline_s))
        slow = [rank for rank, (done, *_) in enumerate(every) if not done]
        if not slow:
            break
        if any(late for *_, late in every):
            raise WaitTimeoutError(f"{doing}: rank {slow[0]} was not ready within {timeout_s} s")
    if error is not None:
        raise error
    for rank, (_, failure, *_) in enumerate(every):
        if failure is not None:
            raise CheckpointError(f"{doing} failed on rank {rank}: {failure}")
    return [result for _, _, result, _ in every]


def _nothing() -> None:
    pass


# --- saving -----------------------------------------------------------------------------------------------------


def _write_shard(
    store: Store, root: Path, target: Path, here: SaveRequest, members: list[int], progress: bool
) -> dict[str, Any]:
    """Saves the store to its directory in the step; returns its entry of the record, and the writer's result."""
    saved = save(
        store.native,
        store.fields,
        store.max_length,
        store.options,
        target,
        base=base_checkpoint(root, here.steps, here.store_id, store.origin),
        origin=store.origin,
        progress=progress,
    )
    with Checkpoint(target) as found:
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


def _new_record(everyone: Sequence[SaveRequest], shards: list[dict[str, Any]], store: Store) -> dict[str, Any]:
    """The content of replay.json, the same on every rank."""
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
        **stored_schema_of(store.native),
        "limits": first.limits,
        "state": None if first.state is None else json.loads(first.state),
    }


__all__ = ["Loaded", "load_checkpoint", "newest_step", "save_checkpoint"]
