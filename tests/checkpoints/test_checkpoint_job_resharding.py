"""A job's checkpoint on another number of ranks: the same population, the same order of commits, the same draws."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_checkpoints import close, commits, load_all, population, save_all, stores_of

import geartrain as gt
from geartrain.checkpoints.job import save_checkpoint
from geartrain.errors import CheckpointError
from geartrain.tools.testing import ThreadRankGroup, run_ranks

pytestmark = pytest.mark.usefixtures("small_chunks")


def test_resharding_keeps_the_population_and_the_order_of_commits(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [31, 0, 17, 40]) as stores:
        rows, order = population(stores), commits(stores)
        passed = [10, 0, 4, 22]
        left = commits(stores, passed)
        totals = [store.stats()["inserted"] for store in stores]
        state: dict[str, Any] = {
            "seed": 1,
            "step": 100,
            "state": [{f"after/{k}": at for k, at in enumerate(passed)}],
            "exponents": [1.0],
        }
        save_all(stores, tmp_path / "4", state=state)
    here = "4"
    for n in (3, 8, 1, 5):
        loaded = load_all(store_name, tmp_path / here, n, reshard=True)
        shards_now = [store for store, _, _ in loaded]
        assert population(shards_now) == rows
        sizes = [len(store) for store in shards_now]
        assert max(sizes) - min(sizes) <= 1
        state = loaded[0][1]
        cursors = [state["state"][0][f"after/{k}"] for k in range(n)]
        assert len(set(cursors)) == 1 and commits(shards_now, cursors) == left
        assert all(found == state for _, found, _ in loaded)
        if here == "4":  # rows that the FIFO had passed come first; among themselves they keep their order
            assert [i for i in commits(shards_now) if i not in left] == [i for i in order if i not in left]
        for store in shards_now:
            assert store.audit() == [] and store.native.next_sequence() == len(rows) + 1
        assert sum(store.stats()["inserted"] for store in shards_now) == sum(totals)
        assert sum(store.capacity for store in shards_now) >= 4 * 60
        here = str(n)
        save_all(shards_now, tmp_path / here, state=state)
        close(loaded)


def test_a_resharded_population_draws_the_same_rows(store_name: Any, tmp_path: Path) -> None:
    """What a single store that holds all rows draws does not depend on the shards it came through."""
    strategies = [
        gt.selection.Prioritized(seed=5),
        gt.selection.Uniform(seed=5),
        gt.selection.Prioritized(seed=5, replacement=False),
        gt.selection.TopK(),
        gt.selection.Lifo(),
    ]
    drawn = []
    with stores_of(store_name, [31, 17, 40]) as stores:
        save_all(stores, tmp_path / "3", step=1)
    for way in (["3"], ["3", "2"], ["3", "7", "2"]):
        for before, after in itertools.pairwise(way):
            if not (tmp_path / after).exists():
                loaded = load_all(store_name, tmp_path / before, int(after), reshard=True)
                save_all([store for store, _, _ in loaded], tmp_path / after, step=1)
                close(loaded)
        ((store, _, _),) = load_all(store_name, tmp_path / way[-1], 1, reshard=True)
        drawn.append(
            [
                gt.Replay(store, strategy, 16, prefetch=0, output="numpy").sample()["id"].tolist()
                for strategy in strategies
            ]
        )
        store.close()
    assert drawn[0] == drawn[1] == drawn[2]


STRATEGIES = {
    "uniform": gt.selection.Uniform(seed=1),
    "stratified": gt.selection.Uniform(seed=2, stratified=True),
    "prioritized": gt.selection.Prioritized(seed=3, beta=0.4),
    "distinct": gt.selection.Prioritized(seed=4, replacement=False),
    "top-k": gt.selection.TopK(),
    "lifo": gt.selection.Lifo(),
    "fifo": gt.selection.Fifo(),
    "group": gt.selection.GroupSampling("prompt", 2, seed=5),
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_job_goes_on_with_the_same_global_batches_on_another_number_of_ranks(
    store_name: Any, tmp_path: Path, strategy: Any
) -> None:
    def train(store: gt.Store, ranks: ThreadRankGroup, state: Any, directory: Path | None) -> list[Any]:
        made = []
        with gt.Replay(store, strategy, 16, window=2, output="numpy", prefetch=0, group=ranks) as replay:
            if state is not None:
                replay.load_state_dict(state)
            for step in range(5):
                batch = replay.sample()
                made.append((batch.draw.tolist(), batch["id"].tolist(), batch.start.tolist()))
                if directory is not None and step == 2:
                    save_checkpoint(store, directory, ranks, state=replay.state_dict())
                elif step < 4:
                    replay.update_priorities(batch.keys, (batch["id"] + replay.step) % 9 / 2)
        return made

    def whole(parts: list[list[Any]]) -> list[list[tuple[int, ...]]]:
        return [sorted(row for part in parts for row in zip(*part[step], strict=True)) for step in range(len(parts[0]))]

    with stores_of(store_name, [50, 30, 57, 40]) as stores:
        uninterrupted = whole(run_ranks(4, lambda r: train(stores[r.rank], r, None, tmp_path)))
    for n in (4, 1, 2, 8):
        together = "prompt" if n != 4 and isinstance(strategy, gt.selection.GroupSampling) else None
        loaded = load_all(store_name, tmp_path, n, reshard=True, together=together)
        resumed = whole(run_ranks(n, lambda r, at=loaded: train(at[r.rank][0], r, at[r.rank][1], None)))
        assert resumed[:2] == uninterrupted[3:], n
        close(loaded)


def test_rows_that_belong_together_are_not_parted(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [52, 23]) as stores:
        rows = population(stores)
        save_all(stores, tmp_path, step=1)
    for n in (2, 3, 6, 30):
        loaded = load_all(store_name, tmp_path, n, reshard=True, together="prompt")
        shards_now = [store for store, _, _ in loaded]
        assert population(shards_now) == rows
        last = None
        for store in shards_now:
            if len(store):
                keys = store.keys()
                prompts = gt.fetch(store, keys[np.argsort(keys.row)], output="numpy")["prompt"].tolist()
                assert prompts[0] != last
                last = prompts[-1]
        if n <= 3:
            sizes = [len(store) for store in shards_now]
            assert max(sizes) - min(sizes) <= 5, "a cut moves by half a group at most"
        close(loaded)
    for field, said in (("x", "a field of one whole number"), ("y", "no field 'y'")):
        with pytest.raises(gt.errors.ArgumentError, match=said):
            load_all(store_name, tmp_path, 3, reshard=True, together=field)


def test_the_room_of_resharded_stores_can_be_chosen(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [20, 30], max_rows=50, max_times_sampled=9) as stores:
        save_all(stores, tmp_path, step=1)
    loaded = load_all(store_name, tmp_path, 3, reshard=True)
    assert {(s.capacity, s.options["max_rows"], s.options["max_times_sampled"]) for s, _, _ in loaded} == {(40, 34, 9)}
    close(loaded)
    loaded = load_all(store_name, tmp_path, 3, reshard=True, capacity=77)
    assert {store.capacity for store, _, _ in loaded} == {77}
    close(loaded)
    with pytest.raises(CheckpointError, match="capacity=3 is too small"):
        load_all(store_name, tmp_path, 3, reshard=True, capacity=3)


def test_a_single_replays_fifo_goes_on_over_shards_and_back(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [40]) as (store,):
        replay = gt.Replay(store, gt.selection.Fifo(), 6, prefetch=0, output="numpy")
        replay.sample()
        save_checkpoint(store, tmp_path / "1", state=replay.state_dict())
        going_on = [replay.sample()["id"].tolist() for _ in range(3)]
    loaded = load_all(store_name, tmp_path / "1", 3, reshard=True)
    assert loaded[0][1]["state"] == [{"after/0": 6, "after/1": 6, "after/2": 6}]
    save_all([store for store, _, _ in loaded], tmp_path / "3", state=loaded[0][1])
    close(loaded)
    ((store, state, _),) = load_all(store_name, tmp_path / "3", 1, reshard=True)
    replay = gt.Replay(store, gt.selection.Fifo(), 6, prefetch=0, output="numpy")
    replay.load_state_dict(state)
    assert [replay.sample()["id"].tolist() for _ in range(3)] == going_on
    store.close()


def test_a_mixtures_store_is_resharded_in_its_part_of_the_state(store_name: Any, tmp_path: Path) -> None:
    state = {"seed": 1, "step": 2, "state": [{"other": 3}, {"after/0": 9, "after/1": 0}]}
    with stores_of(store_name, [20, 30]) as stores:
        save_all(stores, tmp_path, state=state)
    loaded = load_all(store_name, tmp_path, 3, reshard=True, part=1)
    passed = loaded[0][1]["state"][1]["after/2"]
    assert loaded[0][1]["state"] == [{"other": 3}, {f"after/{k}": passed for k in range(3)}]
    assert loaded[0][1]["step"] == 2 and passed == 7, "of the first nine commits two were deleted"
    close(loaded)
    with pytest.raises(CheckpointError, match="the state has 2 stores, part=2 is none of them"):
        load_all(store_name, tmp_path, 3, reshard=True, part=2)


def test_a_damaged_chunk_is_found_by_the_rank_that_needs_it(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [20, 30]) as stores:
        save_all(stores, tmp_path, step=5)
    chunk = sorted((tmp_path / "step-00000005" / "shard-00001-of-00002").glob("chunk-*.bin"))[-1]
    data = bytearray(chunk.read_bytes())
    data[10] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{chunk.name} is damaged: block 0"):
        load_all(store_name, tmp_path, 3, reshard=True)
    shutil.rmtree(chunk.parent)
    with pytest.raises(CheckpointError, match="shard 1 of 2 of step 5 is not on this disk"):
        load_all(store_name, tmp_path, 1, reshard=True)
