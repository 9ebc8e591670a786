"""Restores one shard of a step from a job's checkpoint, in one of three ways.

- The shard is loaded as it was saved.
- The shard is resharded: it becomes a slice of all saved shards.
- A segment that is still in shared memory is adopted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.json_values import object_entries, read_object, whole_entry
from geartrain.core.keys import Keys
from geartrain.core.lifetime import on_error
from geartrain.core.progress import Progress
from geartrain.errors import ArgumentError, CheckpointError, FieldError, StoreMissingError
from geartrain.store.checkpoint_format import ROW_RECORD, json_checksum, put_json
from geartrain.store.checkpoint_reader import Checkpoint, put_blocks, restore
from geartrain.store.saved_parts import (
    COMMITTED,
    TAKEN,
    TASK_COUNTERS,
    TASK_FIGURES,
    UNDER_WAY,
    changed_parts,
    load_rows,
)
from geartrain.store.segment import creation_options
from geartrain.store.store import Store

# Limits that shards of one population share.
SHARED_LIMITS = (
    "remover",
    "max_times_sampled",
    "max_age_s",
    "priority_fraction_bits",
    "priority_per",
    "new_priority",
)
_NO_STEPS: NDArray[np.uint32] = np.empty(0, np.uint32)


@dataclass(frozen=True)
class LoadOptions:
    """Options of `load_checkpoint`."""

    reshard: bool
    together: str | None
    capacity: int | None
    part: int
    adopt: bool


def saved_shard(place: Path, record: dict[str, Any], k: int, n: int, how: LoadOptions) -> SavedShard:
    """Shard k of n of the step at `place`: as it was saved, or resharded.

    Raises:
        CheckpointError: a shard that is needed is missing, damaged, or not the one the step was completed with.
    """
    as_saved = len(record["shards"]) == n and how.together is None and how.capacity is None
    shard: SavedShard = (_WholeShard if as_saved else _ReshardedShard)(place, record, k, n, how)
    with on_error(shard.close):
        shard.open()
    return shard


def adopt_segment(name: str, source: SavedShard) -> tuple[Store, tuple[int, int, int]] | None:
    """The segment in shared memory, and (adopted, newer, gone); None where there is none.

    Priorities and counts of samples of the rows it shares with the checkpoint are reset to the saved ones.
    """
    try:
        peeked = Store.open(name, mode="r", adopt=True)
    except StoreMissingError:
        return None
    if not source.is_in(peeked.id):
        raise CheckpointError(
            f"the segment {peeked.path} is not the one that {source.place.name} was saved from, nor "
            f"loaded from it. Remove it with `geartrain remove {name}` to load from disk"
        )
    store = Store.open(name, adopt=True)
    with on_error(store.close, keep=True):
        if store.id != peeked.id:
            raise CheckpointError(f"another segment took the name {name!r} while its rows were adopted")
        if store.plan is not None:
            return store, _adopt_parts(store, source)
        saved = source.rows()
        keys = store.keys()
        infos = store.native.infos(keys.row)
        before = np.zeros(store.capacity, ROW_RECORD)
        before[saved["row"]] = saved
        there = before[keys.row]
        same = (there["generation"] == keys.generation) & (there["sequence"] == infos["sequence"])
        same &= infos["generation"] == keys.generation
        lost = _reset_priorities(store, keys, same, infos, there, source.step_priorities())
        drawn = np.flatnonzero(same & (there["times_sampled"] != infos["times_sampled"]))
        counts = np.ascontiguousarray(there["times_sampled"][drawn])
        store.native.set_times_sampled(keys.row[drawn], keys.generation[drawn], counts)
    adopted = int(same.sum()) - lost
    return store, (adopted, len(keys) - int(same.sum()), len(saved) - adopted)


def _adopt_parts(store: Store, source: SavedShard) -> tuple[int, int, int]:
    """(adopted, newer, gone) of a store with axes or tasks, whose priorities are reset to the saved ones."""
    saved = source.rows()
    _, rows, _ = changed_parts(store.native, 0)
    rows = rows[np.isin(rows["state"], (COMMITTED, UNDER_WAY, TAKEN))]
    before = np.zeros(store.capacity, ROW_RECORD)
    before[saved["row"]] = saved
    there = before[rows["row"]]
    same = (there["generation"] == rows["generation"]) & (there["sequence"] == rows["sequence"])
    moved = same & (rows["state"] == COMMITTED) & (there["priority"] != rows["priority"])
    keys = Keys.of_rows(
        np.ascontiguousarray(rows["row"][moved]), np.ascontiguousarray(rows["generation"][moved]), store.id
    )
    store.update_priorities(keys, there["priority"][moved] / 2.0 ** store.options["priority_fraction_bits"])
    adopted = int(same.sum())
    return adopted, len(rows) - adopted, len(saved) - adopted


def _reset_priorities(
    store: Store,
    keys: Keys,
    same: NDArray[np.bool_],
    infos: Mapping[str, NDArray[Any]],
    there: NDArray[Any],
    steps: list[NDArray[np.uint32]] | None,
) -> int:
    """Sets the priorities of the rows that are the `same` to the saved ones; returns how many of these are gone.

    Args:
        infos, there: of each row in the store, and in the checkpoint.
        steps: the checkpoint's priorities of steps, by row number; None in a store without.
    """
    if steps is None:
        moved = np.flatnonzero(same & (there["priority"] != infos["priority"]))
        saved = there["priority"][moved]
        rows = keys[moved]
    else:
        mine = np.flatnonzero(same)
        counts = there["length"][mine]  # steps that a row has grown by since keep theirs
        saved = np.concatenate([_NO_STEPS, *(steps[row] for row in keys.row[mine])])
        numbers = [np.arange(count, dtype=np.uint32) for count in counts]
        rows = keys[np.repeat(mine, counts)].of_steps(np.concatenate([_NO_STEPS, *numbers]))
    lost = store.update_priorities(rows, saved / 2.0 ** store.options["priority_fraction_bits"])
    if steps is None or not lost:
        return lost
    return int((store.native.infos(keys.row[mine])["generation"] != keys.generation[mine]).sum())


class SavedShard(ABC):
    """One shard of a step: loads a store, or says what an adopted one should hold. Open until `close`."""

    def __init__(self, place: Path, record: dict[str, Any], k: int, n: int, how: LoadOptions) -> None:
        self.place = place
        self._record = record
        self._shard = (k, n)
        self._how = how
        self._opened: list[Checkpoint] = []

    @abstractmethod
    def open(self) -> None:
        """Opens the checkpoints that it needs: from now on they stay as they are, whatever is saved or removed."""

    @abstractmethod
    def load(self, name: str, progress: bool, options: dict[str, Any]) -> Store:
        """A new store with its rows."""

    @abstractmethod
    def rows(self) -> NDArray[Any]:
        """The table of its rows, (n,) of ROW_RECORD."""

    @abstractmethod
    def step_priorities(self) -> list[NDArray[np.uint32]] | None:
        """Of each of those rows, at the place of its number, its steps' priorities; None in a store without."""

    def state(self) -> dict[str, Any] | None:
        """The replay's state for these shards."""
        found: dict[str, Any] | None = self._record["state"]
        return found

    def is_in(self, store_id: int) -> bool:
        """Whether a segment is the one that was saved, or was loaded from this shard."""
        try:
            content = read_object(self._note(store_id))
        except (OSError, ValueError):
            return False
        checksum = content.pop("checksum", None)
        return bool(checksum == json_checksum(content) and content == self._origin())

    def remember(self, store: Store) -> None:
        """Notes in the step that a segment was loaded from it, so that it can be adopted before its first save."""
        with suppress(OSError):  # a read-only disk: after a crash the shard is read again
            note = self._note(store.id)
            put_json(note, self._origin(), note.with_suffix(".new.json"))

    def _note(self, store_id: int) -> Path:
        return self.place / f"restored-{store_id:016x}.json"

    def _origin(self) -> dict[str, Any]:
        how = self._how
        return {"id": self._record["id"], "shard": list(self._shard), "cut": [how.together, how.capacity]}

    def close(self) -> None:
        """Releases the opened files, so that they can be removed."""
        for source in self._opened:
            source.close()

    def _checkpoint(self, number: int) -> Checkpoint:
        entry = self._record["shards"][number]
        path = self.place / entry["directory"]
        if not path.is_dir():
            raise CheckpointError(
                f"{path} is missing: shard {number} of {len(self._record['shards'])} of step {self._record['step']} "
                f"is not on this disk"
            )
        found = Checkpoint(path)
        self._opened.append(found)
        if found.id != entry["id"]:
            raise CheckpointError(f"{path} is not the checkpoint that step {self._record['step']} was completed with")
        return found


class _WholeShard(SavedShard):
    """A shard as it was saved."""

    def open(self) -> None:
        self._source = self._checkpoint(self._shard[0])

    def load(self, name: str, progress: bool, options: dict[str, Any]) -> Store:
        return Store.load(self._source, name, progress=progress, **options)

    def rows(self) -> NDArray[Any]:
        return self._source.records()[: self._source.rows]

    def step_priorities(self) -> list[NDArray[np.uint32]] | None:
        records = self._source.records()
        parts = _priorities_by_record(self._source, records)
        if parts is None:
            return None
        found = [_NO_STEPS] * len(records)
        for row, part in zip(records["row"].tolist(), parts, strict=False):  # rows that are free have none
            found[row] = part
        return found

    def is_in(self, store_id: int) -> bool:
        return self._source.store_id == store_id or super().is_in(store_id)


class _ReshardedShard(SavedShard):
    """A resharded shard: a slice of all saved shards, one after the other."""

    def open(self) -> None:
        k, n = self._shard
        self._sources = [self._checkpoint(number) for number in range(len(self._record["shards"]))]
        self._plan = self._sources[0].plan
        self._tables = [source.records()[: source.rows] for source in self._sources]
        # The population: rows of the first shard by their numbers, then those of the second, and so on.
        orders = [np.argsort(table["row"], kind="stable") for table in self._tables]
        sizes = [len(order) for order in orders]
        self._shard_of = np.repeat(np.arange(len(sizes)), sizes)
        self._place_of = np.concatenate(orders)
        everything = np.concatenate([table[order] for table, order in zip(self._tables, orders, strict=True)])
        # New sequence numbers: first the rows that a FIFO has drawn, then the others, each in their old order.
        passed = everything["sequence"] <= self._cursors()[self._shard_of]
        by_commit = np.lexsort((self._shard_of, everything["sequence"], ~passed))
        self._passed = int(passed.sum())
        self._total = len(everything)
        sequence = np.empty(self._total, np.uint64)
        sequence[by_commit] = np.arange(1, self._total + 1)
        bounds = self._bounds(n)
        self._low, self._high = int(bounds[k]), int(bounds[k + 1])
        self._rows: NDArray[Any] = everything[self._low : self._high].copy()
        self._rows["row"] = np.arange(len(self._rows))
        self._rows["generation"] = 1
        self._rows["sequence"] = sequence[self._low : self._high]

    def rows(self) -> NDArray[Any]:
        return self._rows

    def step_priorities(self) -> list[NDArray[np.uint32]] | None:
        if self._plan is not None or not self._sources[0].per_step:
            return None
        found = [_NO_STEPS] * len(self._rows)
        for number, source in enumerate(self._sources):
            mine = np.flatnonzero(self._shard_of[self._low : self._high] == number)
            parts = _priorities_by_record(source, self._tables[number]) if len(mine) else None
            if parts is not None:
                for row, place in zip(mine.tolist(), self._place_of[self._low + mine].tolist(), strict=True):
                    found[row] = parts[place]
        return found

    def state(self) -> dict[str, Any] | None:
        """The state, with a FIFO's cursor in the new sequence numbers; a pass begins anew: its rows have new places."""
        state = super().state()
        entry = self._entry()
        if state is None or not (_cursor_names(entry) or "position" in entry):
            return state
        n = self._shard[1]
        if "position" in entry:
            fresh = {key: value for key, value in entry.items() if key in ("epoch", "skipped", "dropped")}
        else:
            fresh = {key: value for key, value in entry.items() if key not in _cursor_names(entry)}
            fresh |= {f"after/{k}": self._passed for k in range(n)}
            if n == 1:
                fresh["after"] = self._passed  # of a replay on one rank
        entries = list(state["state"])
        entries[self._how.part] = fresh
        return {**state, "state": entries}

    def load(self, name: str, progress: bool, options: dict[str, Any]) -> Store:
        limits = {**self._limits(), **options}
        first = self._sources[0]
        if self._plan is None:
            store = Store.create(name, first.fields, max_length=first.max_length, **limits)
        else:
            self._read_parts()
            store = Store.create(name, **creation_options(self._plan, {**limits, "span_bytes": self._span_bytes()}))
        with on_error(store.close), on_error(store.unlink):
            if self._plan is None:
                self._fill(store, progress)
            else:
                self._fill_parts(store, progress)
        return store

    def _limits(self) -> dict[str, Any]:
        n, rows = self._shard[1], len(self._rows)
        every = [source.options for source in self._sources]
        share = -(-sum(options["capacity"] for options in every) // n)
        capacity = max(share, rows, 1) if self._how.capacity is None else self._how.capacity
        if capacity < rows:
            raise CheckpointError(f"shard {self._shard[0]} of {n} gets {rows} rows, capacity={capacity} is too small")
        max_rows = capacity
        if any(options["max_rows"] < options["capacity"] for options in every):
            max_rows = min(capacity, max(-(-sum(options["max_rows"] for options in every) // n), rows, 1))
        shared = {limit: every[0][limit] for limit in SHARED_LIMITS}
        return {"capacity": capacity, "max_rows": max_rows, **shared}

    def _fill(self, store: Store, progress: bool) -> None:
        native = store.native
        native.allocate(store.capacity)
        columns = [native.column(number) for number in range(len(store.fields))]
        title = f"loading {self.place.name}, shard {self._shard[0]}"
        with Progress(title, len(self._rows), unit="rows", enabled=progress) as bar:
            for number, source in enumerate(self._sources):
                mine = np.flatnonzero(self._shard_of[self._low : self._high] == number)
                if not len(mine):
                    continue
                wanted = np.zeros(source.rows, bool)
                new_row = np.zeros(source.rows, np.uint32)
                places = self._place_of[self._low + mine]
                wanted[places] = True
                new_row[places] = mine
                for field_number, found, blocks in source.blocks(self._tables[number], wanted):
                    put_blocks(columns[field_number], new_row[found], blocks)
                    bar.advance(blocks.size, len(blocks) if field_number == 0 else 0)
        table = np.zeros(store.capacity, ROW_RECORD)
        committed = table[: len(self._rows)]
        committed[:] = self._rows[np.argsort(self._rows["sequence"])]
        table["row"][len(self._rows) :] = np.arange(len(self._rows), store.capacity)
        steps = self.step_priorities()
        if steps is None:
            restore(native, table, self._total + 1)
        else:
            restore(native, table, self._total + 1, np.concatenate([_NO_STEPS, *(steps[k] for k in committed["row"])]))
        native.restore_max_priority(max(source.max_priority for source in self._sources))
        self._restore_counters(store)

    def _read_parts(self) -> None:
        """Of each shard the parts of this shard's rows, which have their new row numbers; of a store with tasks."""
        self._parts: list[NDArray[Any]] = []
        for number, source in enumerate(self._sources):
            mine = np.flatnonzero(self._shard_of[self._low : self._high] == number)
            table = self._tables[number]
            new_row = np.full(source.options["capacity"], -1, np.int64)
            new_row[table["row"][self._place_of[self._low + mine]]] = mine
            parts = source.parts()
            parts = parts[new_row[np.minimum(parts["row"], len(new_row) - 1)] >= 0]
            parts["row"] = new_row[parts["row"]]
            parts["generation"] = 1
            self._parts.append(parts)

    def _span_bytes(self) -> int:
        """This shard's share of the saved ones, or what its rows take and a quarter more."""
        share: int = -(-sum(source.options["span_bytes"] for source in self._sources) // self._shard[1])
        each = 64 * (2 + len(self._sources[0].fields))  # a head, and the padding of each field
        need = sum(int(parts["bytes"].sum()) + each * len(parts) for parts in self._parts)
        return max(share, need + need // 4, 4096)

    def _fill_parts(self, store: Store, progress: bool) -> None:
        total = sum(int(parts["bytes"].sum()) for parts in self._parts)
        title = f"loading {self.place.name}, shard {self._shard[0]}"
        rows = self._rows[np.argsort(self._rows["sequence"])]
        with Progress(title, total, unit="bytes", enabled=progress) as bar:

            def contents() -> Iterator[tuple[NDArray[Any], NDArray[np.uint8], NDArray[np.uint64]]]:
                for source, parts in zip(self._sources, self._parts, strict=True):
                    for mine, content, bounds in source.contents(parts):
                        yield parts[mine], content, bounds
                        bar.advance(len(content), len(content))

            load_rows(store.native, rows, contents(), self._total + 1, self.place, CheckpointError)
        k, n = self._shard
        states = [source.manifest["state"] for source in self._sources]
        store.native.restore_task_state(dealt_state(states, k, n, len(rows)))
        store.native.restore_max_priority(max(source.max_priority for source in self._sources))
        self._restore_counters(store)

    def _restore_counters(self, store: Store) -> None:
        if self._shard[0] == 0:  # counters of the past are kept by one shard
            counters: dict[str, int] = {}
            for source in self._sources:
                counters = {name: counters.get(name, 0) + count for name, count in source.counters.items()}
            store.native.set_counters(counters)

    def _bounds(self, n: int) -> NDArray[np.int64]:
        bounds = np.array([k * self._total // n for k in range(n + 1)], np.int64)
        name = self._how.together
        if name is None:
            return bounds
        if self._plan is not None:
            raise ArgumentError("together= is not for stores with axes, strings or tasks: leave it out")
        spec = self._sources[0].fields.get(name)
        if spec is None:
            raise FieldError(f"the shards have no field {name!r} to keep rows together by")
        if spec.shape or not spec.per_row or spec.dtype.startswith(("float", "bfloat", "complex")):
            raise ArgumentError(f"rows are kept together by a field of one whole number a row, {name!r} is {spec}")
        values = np.empty(self._total, spec.numpy_dtype)
        for number, source in enumerate(self._sources):
            mine = self._shard_of == number
            values[mine] = source.values(self._tables[number], name)[self._place_of[mine]]
        ends = np.flatnonzero(values[1:] != values[:-1]) + 1
        allowed = np.concatenate([[0], ends, [self._total]]).astype(np.int64)
        after = np.searchsorted(allowed, bounds).clip(1, len(allowed) - 1)
        low, high = allowed[after - 1], allowed[after]
        nearest: NDArray[np.int64] = np.where(bounds - low < high - bounds, low, high)
        nearest[0], nearest[-1] = 0, self._total
        np.maximum.accumulate(nearest, out=nearest)
        return nearest

    def _entry(self) -> dict[str, int]:
        state = super().state()
        if state is None:
            return {}
        try:
            entries = object_entries({"state": [], **state}, "state")
            for name in {name for each in entries for name in _cursor_names(each)}:
                for each in entries:
                    whole_entry({name: 0, **each}, name, 0, 2**64 - 1)
        except ValueError as error:
            raise CheckpointError(
                f"{self.place / 'replay.json'} does not have the state of a replay: {error}"
            ) from None
        if self._how.part >= max(len(entries), 1):
            raise CheckpointError(f"the state has {len(entries)} stores, part={self._how.part} is none of them")
        return dict(entries[self._how.part]) if entries else {}

    def _cursors(self) -> NDArray[np.uint64]:
        """A FIFO's cursor in each of the saved shards; 0 where there is none."""
        entry = self._entry()
        alone = entry.get("after", 0) if len(self._sources) == 1 else 0
        return np.array([entry.get(f"after/{k}", alone) for k in range(len(self._sources))], np.uint64)


def dealt_state(states: Sequence[Mapping[str, Any]], k: int, n: int, rows: int) -> dict[str, Any]:
    """What is beside the rows of shard k of n, of `rows` rows: clock, limits and counters (`_native.task_state`).

    Shards of one job have one clock. Of `in_flight` each gets its share, and shard 0 gets the counters of the past.
    """
    in_flight = [state["in_flight"] for state in states]
    limits = [state["max_stale"] for state in states]
    counters = TASK_COUNTERS if k == 0 else ()
    tasks = range(len(states[0]["tasks"]))
    return {
        "clock": max(state["clock"] for state in states),
        "finished": all(state["finished"] for state in states),
        "saved_before": max(state["saved_before"] for state in states),
        "next_row": rows,
        "passed_before": 0,
        "in_flight": -(-sum(in_flight) // n) if all(in_flight) else 0,
        "max_stale": None if None in limits else max(limits),
        **{name: sum(state[name] for state in states) if name in counters else 0 for name in TASK_COUNTERS},
        "tasks": [
            {name: sum(state["tasks"][task][name] for state in states) if k == 0 else 0 for name in TASK_FIGURES}
            for task in tasks
        ],
    }


def _priorities_by_record(source: Checkpoint, records: NDArray[Any]) -> list[NDArray[np.uint32]] | None:
    """A checkpoint's priorities of steps, of each committed row in the order of its records; None without any."""
    priorities = source.step_priorities(records)
    if priorities is None:
        return None
    ends = np.cumsum(records["length"][: source.rows], dtype=np.int64)
    return np.split(priorities, ends[:-1]) if len(ends) else []


def _cursor_names(entry: Mapping[str, int]) -> set[str]:
    return {key for key in entry if key == "after" or key.startswith("after/")}


__all__ = ["SHARED_LIMITS", "LoadOptions", "SavedShard", "adopt_segment", "saved_shard"]
