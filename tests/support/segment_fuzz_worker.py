"""Opens mutated copies of real segments and uses those that open: `segment_fuzz_worker.py SEED RUNS DIRECTORY`.

Anything but an error of geartrain ends the process. The last line of stdout counts how the runs ended, as JSON.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import json
import mmap
import random
import struct
import sys
from pathlib import Path

import numpy as np
from segment_images import (
    CLIENTS,
    CONTROL,
    FIELD_RECORDS,
    HEADER_BYTES,
    MUTEX_BYTES,
    RECORD_BYTES,
    REGIONS,
    STATUS,
    images,
    refit,
)

import geartrain as gt
import geartrain._native as _native
from geartrain.errors import GeartrainError, ReplayError, StoreError

TELLING = (0, 1, 2, 7, 15, 16, 17, 63, 64, 255, 4096, 1 << 31, 0xFFFFFFFE, 0xFFFFFFFF, 1 << 32, 1 << 63, (1 << 64) - 1)
# Where a change means something: (offset, bytes, how often).
PLACES = (
    (32, REGIONS - 32, 3),  # the header's limits
    (REGIONS, HEADER_BYTES - REGIONS, 2),
    (CONTROL + 64, 96, 4),  # ends of lists, counts
    (FIELD_RECORDS, 2 * RECORD_BYTES, 3),
    (CLIENTS, 2 * 64, 2),
    (STATUS, 16 * 48, 4),
    (STATUS + 4096, 5 * 4096, 3),  # words, trees, bits, heap
    (0, STATUS, 1),
)
AFTER_OPEN = (2, 5, 6)  # of PLACES: what other processes change; no client's record, which this process waits for


def mutate(image: bytearray | mmap.mmap, chance: random.Random, places: tuple[int, ...]) -> None:
    """Changes a few bytes of the telling parts."""
    for _ in range(chance.randint(1, 4)):
        number = chance.choices(places, [PLACES[i][2] for i in places])[0]
        first, size, _often = PLACES[number]
        width = chance.choice((1, 4, 8))
        at = first + chance.randrange(size // width) * width
        value = chance.choice(TELLING) if chance.random() < 0.7 else chance.getrandbits(64)
        data = struct.pack("<Q", value)[:width]
        if at + width <= len(image):
            image[at : at + width] = data


def use(store: gt.Store, *, writable: bool = True) -> None:
    """Every kind of call; each may fail by an error of its own."""
    rows = _native.Candidates(store.native)
    numbers, nothing = np.arange(4, dtype=np.uint32), np.empty(0, np.uint32)
    calls = [
        store.keys,
        store.status,
        store.stats,
        lambda: rows.draw(True, 1, 2, 0, numbers),
        lambda: rows.draw(False, 1, 2, 0, numbers, 4),
        lambda: rows.draw_distinct(True, 1, 2, 0, 3, nothing),
        lambda: rows.first(0, 4, 0, nothing),
        lambda: gt.fetch(store, store.keys(), output="numpy"),
        lambda: float(store.column("x")[:, 0].sum()),
    ]
    if writable:
        store.limiter.off()
        calls += [
            lambda: store.insert({"x": np.ones((5, 2, 3), "float32"), "id": np.arange(5)}),
            lambda: store.update_priorities(store.keys(), np.ones(len(store.keys()))),
            lambda: store.raise_priorities(0.5),
            lambda: store.native.count_samples(store.keys().row, store.keys().generation),
            lambda: store.delete(store.keys()[:2]),
            store.native.free_rows,
            store.reap,
            store.audit,
        ]
    for call in calls:
        with contextlib.suppress(StoreError, ReplayError):
            call()


def run(image: bytes, path: Path, chance: random.Random) -> str:
    changed = bytearray(image)
    if chance.random() < 0.9:
        mutate(changed, chance, tuple(range(len(PLACES))))
    if chance.random() < 0.1:
        changed = changed[: chance.randrange(len(changed))]
    if len(changed) > STATUS and chance.random() < 0.6:
        refit(changed)
    path.unlink(missing_ok=True)  # the file of the run before may still be mapped
    path.touch(0o600)
    path.write_bytes(changed)
    try:
        if chance.random() < 0.2:
            use(gt.Store.open(path, mode="r", adopt=True), writable=False)
            return "looked at"
        store = gt.Store.open(path, adopt=chance.random() < 0.7, timeout_s=0.5)
    except StoreError as error:
        return type(error).__name__
    use(store)
    if chance.random() < 0.5:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            mutate(memory, chance, AFTER_OPEN)
        use(store)
    store.native.rebuild()
    problems = store.audit()
    assert problems == [], problems
    store.close()
    return "used"


def main() -> None:
    """Runs; prints the seed of a run that fails before the traceback."""
    seed, runs, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    faulthandler.enable()
    seeds = images(directory)
    ended: collections.Counter[str] = collections.Counter()
    for number in range(runs):
        chance = random.Random(seed * 1_000_003 + number)
        try:
            ended[run(chance.choice(seeds), directory / "segment", chance)] += 1
        except BaseException:
            print(f"run {number} of seed {seed}", file=sys.stderr)
            raise
    print(json.dumps(ended))


assert MUTEX_BYTES <= 64
assert issubclass(StoreError, GeartrainError)
if __name__ == "__main__":
    main()
