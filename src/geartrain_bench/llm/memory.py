"""Memory of rows of any length: bytes of a full region over those of its values. Reads of rows that no cache has."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
import geartrain_bench.harness.timing as harness
from geartrain.core.keys import Keys
from geartrain.core.schema import Field
from geartrain.core.tasks import Task
from geartrain.errors import NoSpaceError, WaitTimeoutError
from geartrain.replay.fetch import fetch
from geartrain.store.store import Store
from geartrain_bench.harness.timing import Lap, System
from geartrain_bench.llm.run import Run
from geartrain_bench.llm.samples import (
    TOKEN_BYTES,
    TOKEN_FIELDS,
    USUAL,
    Answers,
    Lengths,
    answer_fields,
    make_answers,
    prompts,
    store_of_answers,
    store_of_tasks,
)

MEMORY, TAIL = "memory over payload when full", "memory over payload when full, p99"
GATHER = "cold gather by CPU time"
#: Rows that grow at the same time, and tokens of an append.
GROWING, TURN = 32, 256


class _Noise:
    """Rows of any length, whose values are views of the same noise: making one copies nothing."""

    def __init__(self, lengths: Lengths, per_row: int, random: np.random.Generator) -> None:
        self.lengths, self.per_row, self.random = lengths, per_row, random
        self.flat = {name: values[0] for name, values in make_answers([per_row * lengths.high], random).items()}

    def lengths_of(self, n: int) -> NDArray[np.int64]:
        """(n, answers of a row)."""
        return self.lengths.draw(n * self.per_row, self.random).reshape(n, self.per_row)

    def rows(self, lengths: NDArray[np.int64]) -> dict[str, list[NDArray[Any]]]:
        """Rows whose answers have these lengths."""
        totals = lengths.sum(axis=1)
        made: Answers = {name: [flat[:total] for total in totals] for name, flat in self.flat.items()}
        return {**made, "length": list(lengths.astype(np.int32))}

    def piece(self, tokens: int) -> dict[str, NDArray[Any]]:
        """Of an append."""
        return {name: flat[:tokens] for name, flat in self.flat.items()}


def _payload(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes of the values of rows whose answers have these lengths."""
    totals: NDArray[np.int64] = TOKEN_BYTES * lengths.sum(axis=1) + 4 * lengths.shape[1]
    return totals


def memory(run: Run, lengths: Lengths, per_row: int) -> None:
    """Rows are inserted until the region is full, random ones removed, and so on."""
    noise = _Noise(lengths, per_row, run.random)
    region = _region(run, lengths, per_row, run.plan.region_bytes)
    expected = int(region / (TOKEN_BYTES * lengths.mean * per_row))
    with store_of_answers(run.store_name(), 4 * expected + 64, region) as store:
        keys: list[Keys] = []
        sizes: list[int] = []
        found: list[float] = []
        # The rows that are there at the first full moments have been put one behind the other.
        while len(found) < run.plan.settling + run.plan.full_moments:
            _fill(store, noise, keys, sizes)
            found.append(region / sum(sizes))
            # Rows whose insert found no room were longer than others. They are not tried again.
            gone = run.random.choice(len(keys), max(1, len(keys) // 50), replace=False)
            store.delete(Keys.join([keys[i] for i in gone]))
            for i in sorted(gone.tolist(), reverse=True):
                del keys[i], sizes[i]
    _record_memory(run, f"{lengths.name}, rows of {per_row}", found[run.plan.settling :])


def _region(run: Run, lengths: Lengths, per_row: int, most: int) -> int:
    """Bytes of a case's region, `most` at most."""
    row = TOKEN_BYTES * lengths.mean * per_row
    return int(min(most, max(8 << 20, run.plan.region_rows * row)))


def _record_memory(run: Run, case: str, found: list[float]) -> None:
    run.add(case, "geartrain", MEMORY, "ratio", found, best=1.0)
    run.add(case, "geartrain", TAIL, "ratio", [float(np.percentile(found, 99))], best=1.0)


def _fill(store: Store, noise: _Noise, keys: list[Keys], sizes: list[int]) -> None:
    """Inserts rows until one finds no room: many at a time, then one by one."""
    n = 64
    while True:
        lengths = noise.lengths_of(n)
        try:
            inserted = store.insert(noise.rows(lengths), timeout_s=0.0)
        except (WaitTimeoutError, NoSpaceError):
            if n == 1:
                return
            n //= 8
            continue
        keys += [inserted[i] for i in range(n)]
        sizes += _payload(lengths).tolist()


def growing_memory(run: Run, lengths: Lengths, per_row: int) -> None:
    """Rows grow by appends to their answers in turn, until one finds no room; then the oldest finished ones go."""
    noise = _Noise(lengths, per_row, run.random)
    region = _region(run, lengths, per_row, run.plan.growing_bytes)
    expected = int(region / (TOKEN_BYTES * lengths.mean * per_row))
    tasks = {"answer": Task(answer_fields(), keep_partial=True), "train": Task(after="answer")}
    growing = max(2, min(GROWING, expected // 4))
    prompt_bytes = prompts(1)[0].nbytes
    found: list[float] = []
    with store_of_tasks(run.store_name(), tasks, 4 * expected + 64, region) as store:
        finished: list[tuple[Any, int]] = []
        rows: list[_GrowingRow] = []

        def make_room() -> None:
            found.append(region / (sum(size for _, size in finished) + sum(row.size for row in rows)))
            if not finished:
                raise NoSpaceError("the rows that grow fill the region alone")
            gone = finished[: max(1, len(finished) // 50)]
            store.delete(Keys.join([key for key, _ in gone]))
            del finished[: len(gone)]

        def patiently(write: Any) -> None:
            while True:
                try:
                    write()
                    return
                except (WaitTimeoutError, NoSpaceError):
                    make_room()

        while len(found) < run.plan.settling + run.plan.full_moments:
            while len(rows) < growing:
                patiently(lambda: store.insert({"prompt": prompts(1)}, timeout_s=0.0))
                (claimed,) = store.claim("answer", 1)
                rows.append(_GrowingRow(claimed, noise.lengths_of(1)[0].tolist(), prompt_bytes))
            row = rows[int(run.random.integers(len(rows)))]
            item = row.next_item(run.random)
            if item is None:
                patiently(lambda row=row: row.claimed.put(timeout_s=0.0))
                row.size += 4 * per_row
                finished.append((row.claimed.key, row.size))
                rows.remove(row)
                continue
            tokens = min(TURN, row.left[item])
            piece = noise.piece(tokens)
            patiently(lambda row=row, item=item, piece=piece: row.claimed.append(piece, item=item, timeout_s=0.0))
            row.left[item] -= tokens
            row.size += TOKEN_BYTES * tokens
    _record_memory(run, f"{lengths.name}, rows of {per_row}, growing", found[run.plan.settling :])


class _GrowingRow:
    """A claimed row, the tokens that its answers lack, and the bytes that it has."""

    def __init__(self, claimed: Any, left: list[int], size: int) -> None:
        self.claimed, self.left, self.size = claimed, left, size
        self.open_items = list(range(len(left)))

    def next_item(self, random: np.random.Generator) -> int | None:
        """An answer that is not whole."""
        while self.open_items:
            at = int(random.integers(len(self.open_items)))
            if self.left[self.open_items[at]]:
                return self.open_items[at]
            del self.open_items[at]
        return None


# --- reads of cold rows -----------------------------------------------------------------------------------------------


def gather(run: Run, lengths: Lengths, per_row: int) -> None:
    """Random rows of answers, beside one copy of as many bytes from a random place."""
    noise = _Noise(lengths, per_row, run.random)
    row = TOKEN_BYTES * lengths.mean * per_row
    many = max(1, min(64, int(run.plan.read_bytes / row)))
    n = many * int(run.plan.gather_bytes / (many * row))
    with store_of_answers(run.store_name(), 2 * n, int(1.2 * n * row) + n * 1024) as store:
        keys = Keys.join([store.insert(noise.rows(noise.lengths_of(many))) for _ in range(n // many)])
        _gather(run, f"{lengths.name}, rows of {per_row}", store, keys, row)


def gather_of_size(run: Run, size: int) -> None:
    """Rows of two fields with so many bytes each."""
    fields = {name: Field(("tokens",), TOKEN_FIELDS[name]) for name in ("ids", "log_prob")}
    n = 64 * (run.plan.gather_bytes // (128 * size))
    values = {name: np.ones((64, size // 4), field.dtype) for name, field in fields.items()}
    with Store.create(run.store_name(), fields, capacity=2 * n, span_bytes=n * (2 * size + 256)) as store:
        keys = Keys.join([store.insert(values) for _ in range(n // 64)])
        _gather(run, f"{size / 1000:g} KB a field and row", store, keys, 2 * size)


def _gather(run: Run, case: str, store: Store, keys: Keys, row_bytes: float) -> None:
    names = [name for name in store.fields if name != "length"]
    batch = max(1, int(run.plan.read_bytes / row_bytes))
    plan = run.plan
    copy = np.ones(2 * run.plan.read_bytes, np.uint8)
    read: list[int] = []

    def one(which: Keys) -> int:  # the batch's memory is free again at its end
        found = fetch(store, which, output="numpy", threads=1)
        return sum(found[name].nbytes for name in names)

    def lap() -> Lap:
        which = [keys[run.random.integers(0, len(keys), batch)] for _ in range(plan.calls)]

        def body() -> None:
            for each in which:
                read.append(one(each))

        return harness.lap(plan.calls, body)

    lap()
    size = int(np.mean(read))
    blocks = plan.gather_bytes >> 20

    def floor_lap() -> Lap:
        begins = run.random.integers(0, (blocks << 20) - size, plan.calls).tolist()

        def body() -> None:
            for begin in begins:
                np.copyto(copy[:size], source[begin : begin + size])

        return harness.lap(plan.calls, body)

    piece = int(row_bytes) // 64 * 64

    def pieces_lap() -> Lap:
        places = [run.random.integers(0, ((blocks << 20) - piece) // 64, batch, np.uint32) for _ in range(plan.calls)]

        def body() -> None:
            for each in places:
                _native.gather_floor(source, copy[: batch * piece], each, piece, 64, False)

        return harness.lap(plan.calls, body)

    systems = [
        System("floor", floor_lap, floor=True),
        System("geartrain", lap),
        System("a memcpy a row, in C", pieces_lap),
    ]
    # The floor's source is shared memory as well.
    with Store.create(run.store_name(), {"x": Field((1 << 20,), "uint8")}, max_length=1, capacity=blocks) as other:
        source = other.column("x").reshape(-1)
        source[:] = 1
        laps = harness.take_turns(systems, repeats=plan.repeats, budget_s=plan.case_s)
    cpu_s = {name: [one.cpu_seconds for one in each] for name, each in laps.items()}
    floor_s = harness.quantiles(cpu_s["floor"])[0]
    for name, each in cpu_s.items():
        copied = batch * piece if name == "a memcpy a row, in C" else size
        row = harness.rate_row(case, name, GATHER, "GB/s", each, copied / 1e9, floor_s * copied / size)
        run.result.rows.append(row)


__all__ = ["GATHER", "MEMORY", "TAIL", "USUAL", "gather", "gather_of_size", "growing_memory", "memory"]
