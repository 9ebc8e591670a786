"""What must be true after a round: of the store's records, and of its rows against what the processes noted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from replay_calls import replay_of

import geartrain as gt
from storm.journal import COMMITTED, DELETED, DELETING, DELIVERED, OPEN, Entry, read
from storm.rows import torn

Defects = list[str]


def audit(store: gt.Store) -> Defects:
    """The store's own records, with every other process dead."""
    store.reap()
    found = [f"audit: {sentence}" for sentence in store.audit()]
    stats = store.stats()
    held = {state: stats[state] for state in ("writing", "open", "exhausted_unreleased") if stats[state]}
    if held:
        found.append(f"blocks that belong to nobody alive: {held}")
    if stats["free"] + stats["committed"] != store.capacity:
        found.append(f"{stats['free']} free and {stats['committed']} committed rows are not {store.capacity}")
    if stats["committed"] != len(store):
        found.append(f"{stats['committed']} committed rows, and {len(store)} selectable ones")
    return found


def contents(store: gt.Store) -> tuple[list[int], Defects]:
    """The tags of all rows in the order of their commits, and those of rows that are not whole."""
    keys = store.keys()
    if not len(keys):
        return [], []
    batch = gt.fetch(store, keys, output="numpy", threads=1)
    wrong = torn(batch)
    return [int(tag) for tag in batch["tag"]], [f"torn rows {wrong[:5]}"] if wrong else []


def rows(store: gt.Store, kind: str, journals: list[Path]) -> tuple[Defects, Counter[str]]:
    """Every row that is there was written, once; every row that was committed is there unless it had to go.

    What had to go: deleted rows; where the store is small, the oldest; where rows are sampled once, those that a
    learner may have drawn; where they age, any.
    """
    found: Defects = []
    tags, wrong = contents(store)
    found += wrong
    there = Counter(tags)
    if repeated := [tag for tag, times in there.items() if times > 1]:
        found.append(f"rows {repeated[:5]} are there more than once")
    known: set[int] = set()
    figures: Counter[str] = Counter()
    delivered: Counter[int] = Counter()
    for path in journals:
        entries = list(read(path))
        delivered.update(entry.tag for entry in entries if entry.state == DELIVERED and entry.tag)
        mine = [entry for entry in entries if entry.state != DELIVERED]
        known.update(entry.tag for entry in mine)
        figures["rows committed"] += sum(entry.state in (COMMITTED, DELETING, DELETED) for entry in mine)
        found += _of_one(mine, there, kind, path.name)
    if unknown := set(there) - known:
        found.append(f"rows {sorted(unknown)[:5]} are there that nobody wrote")
    if kind == "sampled once" and (twice := [tag for tag, times in delivered.items() if times > 1]):
        found.append(f"rows {twice[:5]} were sampled more than once")
    if kind == "sampled once" and (both := set(delivered) & set(there)):
        found.append(f"rows {sorted(both)[:5]} were sampled, and are there to be sampled again")
    figures["rows delivered once"] += len(delivered) if kind == "sampled once" else 0
    figures["rows proven"] += len(tags)
    return found, figures


def _of_one(entries: list[Entry], there: Counter[int], kind: str, name: str) -> Defects:
    found: Defects = []
    if gone := [entry.tag for entry in entries if entry.state == DELETED and entry.tag in there]:
        found.append(f"{name}: rows {gone[:5]} were deleted, and are there")
    committed = [entry for entry in entries if entry.state == COMMITTED]
    if kind == "roomy" and (lost := [entry.tag for entry in committed if entry.tag not in there]):
        found.append(f"{name}: committed rows {lost[:5]} are lost, {len(lost)} in all")
    if kind == "small":
        # The oldest rows go first: what is left of one writer's whole rows is the end of what it committed.
        present = [entry.tag in there for entry in committed if entry.kind != OPEN]
        if present != sorted(present):
            picture = "".join("-+"[each] for each in present[-80:])
            found.append(f"{name}: rows are lost, or went before older ones: {picture}")
    return found


def drawn(store: gt.Store, kind: str) -> Defects:
    """Batches are drawn as from a store that nothing has befallen."""
    if kind in ("sampled once", "aging") or len(store) < 1:  # where drawing, or waiting, removes rows
        return []
    with replay_of(store, gt.selection.Prioritized(seed=1), 16, prefetch=0, output="numpy", threads=1) as replay:
        wrong = [tag for _ in range(3) for tag in torn(replay.sample())]
    status = store.status()
    scale = 2.0 ** store.options["priority_fraction_bits"]
    exact = int(np.rint(status["priority"] * scale).astype(np.uint64).sum())
    total = int(store.native.total_priority())
    found = [f"torn rows {wrong[:5]} were drawn"] if wrong else []
    if exact != total:
        found.append(f"the priorities add up to {exact}, the store says {total}")
    return found


def checkpoint(
    folder: Path, name: str, written: set[int], contents: Callable[[gt.Store], tuple[list[int], Defects]] = contents
) -> tuple[Defects, int]:
    """A checkpoint that is there is whole: it loads, and every row of it was written. And how many rows it has.

    `contents` returns the tags of what is in a store, each once, and what is wrong with it.
    """
    if not folder.exists():
        return [], 0
    with gt.Store.load(folder, name) as store:
        found = audit(store)
        tags, wrong = contents(store)
        store.unlink()
    unknown = set(tags) - written
    found += wrong
    if unknown:
        found.append(f"rows {sorted(unknown)[:5]} are in a checkpoint, and nobody wrote them")
    if len(tags) != len(set(tags)):
        found.append("rows are in a checkpoint more than once")
    return [f"{folder}: {each}" for each in found], len(tags)


def written(journals: list[Path]) -> set[int]:
    """All tags that somebody began to write."""
    return {entry.tag for path in journals for entry in read(path) if entry.state != DELIVERED}
