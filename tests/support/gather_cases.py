"""Random batches, gathered by the Triton kernel and by the native code: they have to agree to the bit.

`python tests/support/gather_cases.py SEED COUNT` runs some where Triton interprets (TRITON_INTERPRET=1), and prints
what differed as JSON; tests/gpu runs them on a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import torch

import geartrain as gt
from geartrain.core.dtypes import DTYPES, as_tensor
from geartrain.device.kernels.gather_layout import CONVERTED_FROM, CONVERTED_TO
from geartrain.device.kernels.gather_reference import reference_gather, reference_window
from geartrain.replay.device.options import Convert
from geartrain.replay.device.target import gather_plan_of
from geartrain.replay.fetch_plan import FetchPlan

DTYPES_TRIED = [
    "bool", "uint8", "int8", "int16", "uint16", "int32", "float16", "bfloat16", "float32", "float64", "int64",
    "complex64", "complex128", "float8_e4m3fn",
]  # fmt: skip


def random_store(rng: np.random.Generator, name: str) -> gt.Store:
    """A few rows of a few fields, lengths and generations of all kinds, and every byte of the blocks random."""
    length = int(rng.integers(1, 40))
    fields = {}
    for i in range(int(rng.integers(1, 5))):
        dtype = str(rng.choice(DTYPES_TRIED))
        step = tuple(int(n) for n in rng.integers(1, 12, int(rng.integers(0, 3))))
        fields[f"f{i}"] = gt.Field(step, dtype, per_row=bool(rng.random() >= 0.75) and i > 0)
    store = gt.Store.create(name, fields, max_length=length, capacity=int(rng.integers(3, 12)))
    for _ in range(int(rng.integers(1, 4))):  # rows are evicted and written anew
        for _ in range(store.capacity):
            with store.row(version=int(rng.integers(-5, 2**40))) as row:
                for field, spec in fields.items():
                    row.torch(field)
                    column = store.column(field)
                    raw = rng.integers(0, 2 if spec.dtype == "bool" else 100, spec.block_nbytes(length), dtype=np.uint8)
                    column[row.index] = raw.view(column.dtype).reshape(spec.block_shape(length))
                row.length = int(rng.integers(1, length + 1))
    return store


def random_conversions(rng: np.random.Generator, store: gt.Store) -> dict[str, Convert]:
    found = {}
    for name, field in store.fields.items():
        if field.dtype in CONVERTED_FROM and rng.random() < 0.5:
            scale, shift = (1.0, 0.0) if rng.random() < 0.3 else (1 / 255, float(rng.normal()))
            found[name] = Convert(str(rng.choice(CONVERTED_TO)), scale, shift)
    return found


def run_case(seed: int, name: str, device: str) -> str | None:
    """What differed, or None."""
    rng = np.random.default_rng(seed)
    with random_store(rng, name) as store:
        window = None if rng.random() < 0.3 else int(rng.integers(1, 2 * store.max_length + 2))
        pad: Any = str(rng.choice(["left", "right"]))
        packed = bool(rng.random() < 0.3)
        names = [str(f) for f in rng.permutation(list(store.fields))][: int(rng.integers(1, len(store.fields) + 1))]
        plan = FetchPlan.make(store, names, window, pad, "torch", 1)
        convert = {n: c for n, c in random_conversions(rng, store).items() if n in names}
        keys = store.keys()
        rows = rng.integers(0, len(keys), int(rng.integers(1, 9)))
        row, generation = keys.row[rows].astype(np.int64), keys.generation[rows].copy()
        stale = rng.random(len(rows)) < 0.2
        generation[stale] -= rng.choice([1, 2], int(stale.sum())).astype(np.uint32)
        attempt = int(rng.integers(0, 3))
        draw = (int(rng.integers(0, 2**63)), int(rng.integers(0, 2**40)), 64 * attempt) if rng.random() < 0.6 else None
        numbers = rng.integers(0, 2**32, len(rows), dtype=np.uint32) if draw and rng.random() < 0.5 else None
        ends = None
        if draw is None and window is not None and rng.random() < 0.7:
            ends = rng.integers(0, store.max_length, len(rows)).astype(np.int32)
        places = None if packed or rng.random() < 0.6 else rng.permutation(len(rows) + 2)[: len(rows)].astype(np.uint32)
        return _compare(store, plan, convert, packed, row, generation, ends, draw, numbers, places, device)


def _compare(
    store: gt.Store,
    plan: FetchPlan,
    convert: dict[str, Convert],
    packed: bool,
    row: Any,
    generation: Any,
    ends: Any,
    draw: Any,
    numbers: Any,
    places: Any,
    device: str,
) -> str | None:
    gather = gather_plan_of(plan, convert, packed)
    n = len(row)
    room = n + 2 if places is not None else n
    layout = gather.arena(room)
    segment = torch.from_numpy(store.native.segment())
    drawn = None if draw is None else (draw[0], draw[1], draw[2] // 64)

    def on(array: Any) -> Any:
        return None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(device)

    args = {"ends": on(ends), "draw": None, "numbers": on(numbers)}
    if plan.window:
        args["draw"] = drawn
    cu = gather.count_steps(segment, on(row), **args) if packed else None
    arena = torch.full((layout.nbytes,), 77, dtype=torch.uint8, device=device)
    written = int(row[0]) if len(row) == 5 else -1  # somebody is writing to that row in place
    content = _content_number(store, written)
    content += written >= 0
    gather.launch(segment, arena, layout, on(row), on(generation), places=on(places), cu_seqlens=cu, **args)
    arena = arena.cpu()
    slow = torch.full((layout.nbytes,), 77, dtype=torch.uint8)
    listed = {"ends": ends, "draw": args["draw"], "numbers": numbers, "places": places}
    cu_list = None if cu is None else cu.cpu().tolist()
    reference_gather(gather, segment, slow, layout, row.tolist(), generation.tolist(), cu_seqlens=cu_list, **listed)
    content -= written >= 0
    what = f"{store.fields} {convert} window {plan.window} pad_left {plan.pad_left} packed {packed} n {n}"
    torn = arena[layout.torn :][:room].bool()
    if not torch.equal(torn, slow[layout.torn :][:room].bool()):
        return f"{what}: torn rows differ"
    where = np.arange(n) if places is None else places.astype(np.int64)
    good = [i for i in range(n) if not torn[where[i]]]
    if not torch.equal(arena[: layout.torn], slow[: layout.torn]) and not torn.any():
        at = torch.nonzero(arena != slow).flatten()
        return f"{what}: differs from the reference at {at.tolist()[:20]} of {layout}: {arena[at][:20]} {slow[at][:20]}"
    native = _native_batch(plan, gather, row, generation, ends, args["draw"], numbers)
    torn_there = [bool(t) or r == written for t, r in zip(native.torn, row, strict=True)]
    if torn_there != [bool(torn[where[i]]) for i in range(n)]:
        return f"{what}: torn rows differ from the native ones"
    for number, (field, name) in enumerate(zip(gather.fields, plan.names, strict=True)):
        dtype = DTYPES[store.fields[name].dtype]
        for i in good:
            expected = as_tensor(native.arrays[number][i : i + 1], dtype)[0]
            if packed and field.timed:
                expected = expected[torch.from_numpy(native.mask[i])]
            if field.result is not None:
                real = torch.from_numpy(native.mask[i]) if field.timed and not packed else None
                expected = convert[name].apply(expected, real)
            raw = expected.contiguous().reshape(-1).view(torch.uint8) if expected.numel() else torch.empty(0)
            stands = (cu_list[i] if cu_list is not None else int(where[i]) * gather.steps) if field.timed else where[i]
            found = arena[layout.fields[number] + int(stands) * field.result_bytes :][: len(raw)]
            if not torch.equal(found, raw):
                return f"{what}: field {name} {dtype.name}, row {i} differs from the native one"
    for i in good:
        place = int(where[i])
        for at, dtype, value in (
            (layout.starts, torch.int32, native.starts[i]),
            (layout.lengths, torch.int32, native.lengths[i]),
            (layout.versions, torch.int64, native.versions[i]),
        ):
            if int(arena[at + dtype.itemsize * place :][: dtype.itemsize].view(dtype)) != int(value):
                return f"{what}: books of row {i} differ"
        if not packed:
            mask = arena[layout.mask + place * gather.steps :][: gather.steps].bool().numpy()
            if not np.array_equal(mask, native.mask[i]):
                return f"{what}: mask of row {i} differs"
    return None


def _content_number(store: gt.Store, row: int) -> Any:
    """A row's content number, (1,), a view of the segment."""
    layout = store.native.layout()
    at = layout["status"] + max(0, row) * layout["status_stride"] + layout["inserted_at_ns"]
    return store.native.segment()[at : at + 8].view(np.uint64)


def _native_batch(plan: FetchPlan, gather: Any, row: Any, generation: Any, ends: Any, draw: Any, numbers: Any) -> Any:
    lengths = plan.store.native.lengths(row.astype(np.uint32))
    if draw is not None:
        numbers = np.arange(len(row), dtype=np.uint32) if numbers is None else numbers
        ends = gt._native.window_ends(draw[0], draw[1], draw[2], numbers, lengths)
        for i, length in enumerate(lengths):  # the slow way finds the same windows
            start, count = reference_window(gather, int(length), None, draw, int(numbers[i]))
            assert start + count - 1 == ends[i]
    return plan.fetch(row.astype(np.uint32), generation, ends)


def main() -> None:
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    differing = []
    for i in range(seed, seed + count):
        found = run_case(i, f"test-gather-{os.getpid()}-{i}", "cpu")
        if found is not None:
            differing.append(f"case {i}: {found}")
    print(json.dumps(differing))


if __name__ == "__main__":
    main()
