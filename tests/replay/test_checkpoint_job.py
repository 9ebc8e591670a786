"""Shards are saved together, complete everywhere or not there, and come back to any number of ranks."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import patience

import geartrain as gt
import geartrain.replay.distributed.checkpoint as shards
import geartrain.store.checkpoint_writer as saving
from geartrain.errors import CheckpointError, PeerLostError, RanksDisagreeError, StoreExistsError, WaitTimeoutError
from geartrain.replay.distributed.checkpoint import load_checkpoint, newest_step, save_checkpoint
from geartrain.replay.distributed.checkpoint_requests import torchrun_shard
from geartrain.replay.distributed.checkpoint_steps import describe_steps
from geartrain.store.checkpoint_reader import Checkpoint
from geartrain.tools.testing import ThreadRankGroup, run_ranks

FIELDS = {
    "x": gt.Field((3,), "float32"),
    "id": gt.Field((), "int64", per_row=True),
    "prompt": gt.Field((), "int32", per_row=True),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "CHUNK_BYTES", 600)  # ten rows
    monkeypatch.setattr(saving, "PIECE_BYTES", 250)
    monkeypatch.setattr(shards, "POLL_S", 0.02)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no test pulls the plug
    for name in ("GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def put(store: gt.Store, first: int, n: int) -> gt.Keys:
    ids = np.arange(first, first + n)
    return store.insert(
        {
            "x": np.repeat(ids, 12).reshape(n, 4, 3).astype(np.float32),
            "id": ids,
            "prompt": (ids // 5).astype(np.int32),
        },
        lengths=1 + ids % 4,
        priorities=(ids * 7) % 11 / 4,
        versions=ids * 3,
    )


@contextmanager
def stores_of(store_name: Any, sizes: list[int], **options: Any) -> Iterator[list[gt.Store]]:
    """A store for each shard, with rows 1000, 1001, ... in the first, 2000, ... in the second; some were removed."""
    with ExitStack() as stack:
        made = []
        for number, size in enumerate(sizes):
            store = stack.enter_context(gt.Store.create(store_name(), FIELDS, max_length=4, capacity=60, **options))
            keys = put(store, 1000 * (number + 1), size) if size else None
            if keys is not None:
                store.delete(keys[::7])
                put(store, 1000 * (number + 1) + 500, 2)
            made.append(store)
        yield made


def save_all(stores: list[gt.Store], directory: Any, **options: Any) -> list[gt.saving.Saved]:
    """Saves with one rank a store; `directory` is one for all or one for each."""
    places = directory if isinstance(directory, list) else [directory] * len(stores)
    return run_ranks(len(stores), lambda r: save_checkpoint(stores[r.rank], places[r.rank], r, **options))


def load_all(store_name: Any, directory: Any, n: int, **options: Any) -> list[tuple[gt.Store, Any, Any]]:
    names = [store_name() for _ in range(n)]
    places = directory if isinstance(directory, list) else [directory] * n
    return run_ranks(n, lambda r: load_checkpoint(places[r.rank], names[r.rank], r, shard=(r.rank, n), **options))


def books(store: gt.Store) -> list[tuple[Any, ...]]:
    """What is known of a store's rows, in the order of their numbers, but for keys and sequence numbers."""
    keys = store.keys()
    keys = keys[np.argsort(keys.row)]
    if not len(keys):
        return []
    batch, status = gt.fetch(store, keys, output="numpy"), store.status(keys)
    known = ("priority", "length", "version", "times_sampled", "inserted_at_ns")
    return list(zip(batch["id"].tolist(), batch["x"].tolist(), *(status[book].tolist() for book in known), strict=True))


def population(stores: list[gt.Store]) -> list[tuple[Any, ...]]:
    return [row for store in stores for row in books(store)]


def commits(stores: list[gt.Store], after: list[int] | None = None) -> list[int]:
    """The ids in the order of their commits over all shards, those that a FIFO passed left out."""
    found = []
    for number, store in enumerate(stores):
        sequences = store.status()["sequence"]
        ids = gt.fetch(store, store.keys(), output="numpy")["id"] if len(store) else []
        least = 0 if after is None else after[number]
        found += [(int(s), number, int(i)) for s, i in zip(sequences, ids, strict=True) if s > least]
    return [i for _, _, i in sorted(found)]


def close(loaded: list[tuple[gt.Store, Any, Any]]) -> None:
    for store, _, _ in loaded:
        store.close()


# --- saving and loading -----------------------------------------------------------------------------------------


def test_shards_come_back_as_they_were_saved_with_the_replays_state(store_name: Any, tmp_path: Path) -> None:
    state = {"seed": 3, "step": 42, "state": [{"after/0": 5, "after/1": 7}], "exponents": [1.0]}
    with stores_of(store_name, [30, 0, 13]) as stores:
        saved = save_all(stores, tmp_path, state=state)
        assert saved[0].path == tmp_path / "step-00000042" and saved[0].rows == sum(map(len, stores))
        assert sorted(path.name for path in saved[0].path.iterdir()) == [
            "replay.json",
            "shard-00000-of-00003",
            "shard-00001-of-00003",
            "shard-00002-of-00003",
        ]
        loaded = load_all(store_name, tmp_path, 3)
        for (store, found, report), before in zip(loaded, stores, strict=True):
            assert store.keys() == before.keys() and books(store) == books(before) and store.audit() == []
            assert found == state
            assert (report.step, report.rows, report.adopted, report.saved_shards) == (42, len(before), 0, 3)
        close(loaded)


def test_ranks_that_share_a_store_save_it_once_and_share_it_again(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [30, 12]) as stores:
        names = [stores[0].name, stores[0].name, stores[1].name, stores[1].name]

        def save(ranks: ThreadRankGroup) -> Any:
            with gt.Store.open(names[ranks.rank]) as store:
                return save_checkpoint(store, tmp_path, ranks, step=1)

        saved = run_ranks(4, save)
        assert len({(each.rows, each.bytes_written) for each in saved}) == 1
        (step,) = describe_steps(tmp_path)
        assert [shard["ranks"] for shard in step["shards"]] == [[0, 1], [2, 3]]
        fresh = [store_name(), store_name()]

        def load(ranks: ThreadRankGroup) -> Any:
            return load_checkpoint(tmp_path, fresh[ranks.rank // 2], ranks, shard=(ranks.rank // 2, 2))

        loaded = run_ranks(4, load)
        ids = [store.native.describe()["store_id"] for store, _, _ in loaded]
        assert ids[0] == ids[1] and ids[2] == ids[3] and ids[0] != ids[2]
        assert books(loaded[1][0]) == books(stores[0]) and books(loaded[2][0]) == books(stores[1])
        close(loaded)


def test_a_process_alone_needs_no_ranks(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [20]) as (store,):
        save_checkpoint(store, tmp_path, step=7)
        loaded, state, report = load_checkpoint(tmp_path, store_name())
        assert state is None and report.shard == (0, 1) and books(loaded) == books(store)
        loaded.close()


def test_a_later_step_writes_what_is_new_and_old_steps_go(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [50, 50]) as stores:
        first = save_all(stores, tmp_path, step=10)[0]
        again = save_all(stores, tmp_path, step=20)[0]
        assert first.bytes_linked == 0 and again.bytes_linked > 0 and again.not_linked is None
        assert again.bytes_linked + again.bytes_written == pytest.approx(first.bytes_written, rel=0.01)
        for store in stores:
            put(store, 7000, 1)
        third = save_all(stores, tmp_path, step=30)[0]
        row = sum(field.block_nbytes(4) for field in FIELDS.values())
        assert third.bytes_written - again.bytes_written == pytest.approx(2 * row, abs=700), "two rows, two entries"
        assert [step["step"] for step in describe_steps(tmp_path)] == [30, 20]
        save_all(stores, tmp_path, step=31, keep=1)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000031"]
        loaded = load_all(store_name, tmp_path, 2)
        assert population([store for store, _, _ in loaded]) == population(stores)
        # And what was loaded goes on incrementally.
        onward = save_all([store for store, _, _ in loaded], tmp_path, step=40)[0]
        assert onward.bytes_linked == third.bytes_linked + 2 * row
        close(loaded)


def test_every_host_may_have_its_own_disk(store_name: Any, tmp_path: Path) -> None:
    disks = [tmp_path / "a", tmp_path / "b"]
    with stores_of(store_name, [20, 30]) as stores:
        for step in (1, 2, 3):
            save_all(stores, disks, step=step)
        for number, disk in enumerate(disks):
            assert [step["step"] for step in describe_steps(disk)] == [3, 2]
            assert [path.name for path in disk.glob("step-00000003/shard-*")] == [f"shard-0000{number}-of-00002"]
        assert (disks[0] / "step-00000003/replay.json").read_bytes() == (
            disks[1] / "step-00000003/replay.json"
        ).read_bytes()
        loaded = load_all(store_name, disks, 2)
        assert population([store for store, _, _ in loaded]) == population(stores)
        close(loaded)
        with pytest.raises(CheckpointError, match=r"shard-0000\d-of-00002 is missing: shard \d of 2 of step 3"):
            load_all(store_name, [disks[1], disks[0]], 2)  # the hosts have changed places


def test_the_newest_step_is_the_newest_that_is_complete_everywhere(store_name: Any, tmp_path: Path) -> None:
    disks = [tmp_path / "a", tmp_path / "b"]
    with stores_of(store_name, [20, 30]) as stores:
        for step in (1, 2):
            save_all(stores, disks, step=step)
        (disks[1] / "step-00000002/replay.json").unlink()  # its host died before it wrote it
        assert newest_step(disks[0]) == 2 and newest_step(disks[1]) == 1 and newest_step(tmp_path / "none") is None
        assert run_ranks(2, lambda r: newest_step(disks[r.rank], r)) == [1, 1]
        loaded = load_all(store_name, disks, 2)
        assert [report.step for _, _, report in loaded] == [1, 1]
        with pytest.raises(CheckpointError, match=r"step 2 is not complete on all ranks .* rank 1 has 1"):
            load_all(store_name, disks, 2, step=2)
        save_all([store for store, _, _ in loaded], disks, step=2)  # the same step, once more
        assert [[s["step"] for s in describe_steps(disk)] for disk in disks] == [[2, 1], [2, 1]]
        close(loaded)
        loaded = load_all(store_name, disks, 2)
        assert [report.step for _, _, report in loaded] == [2, 2]
        close(loaded)


def test_a_step_can_be_saved_again(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [20, 30]) as stores:
        save_all(stores, tmp_path, step=5)
        put(stores[0], 4000, 3)
        for _ in range(3):
            saved = save_all(stores, tmp_path, step=5)[0]
            assert saved.bytes_linked > 0
        assert len(list((tmp_path / "step-00000005").iterdir())) == 3
        loaded = load_all(store_name, tmp_path, 2)
        assert population([store for store, _, _ in loaded]) == population(stores)
        close(loaded)


def test_going_back_behind_a_complete_step_has_to_be_said(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [20, 30]) as stores:
        save_all(stores, tmp_path, step=5)
        with pytest.raises(CheckpointError, match=r"step 5 .* is complete and newer than step 4"):
            save_all(stores, tmp_path, step=4)


def test_only_what_belongs_to_a_step_is_removed_with_it(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [20]) as stores:
        for step in (1, 2, 3):
            place = tmp_path / f"step-{step:08d}"
            (place / "model").mkdir(parents=True)
            if step == 1:
                (place / "notes.txt").write_text("mine")
            save_all(stores, tmp_path, step=step, keep=1, companions=["model"])
        (tmp_path / "step-00000009").mkdir()  # somebody's, not ours
        save_all(stores, tmp_path, step=4, keep=1)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/[mn]*")) == [
        "step-00000001/notes.txt",
        "step-00000003/model",  # nobody said that it should go
    ]
    assert (tmp_path / "step-00000009").exists() and not (tmp_path / "step-00000002").exists()


# --- what is refused --------------------------------------------------------------------------------------------


def test_another_number_of_shards_must_be_asked_for(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [20, 30]) as stores:
        save_all(stores, tmp_path, step=5)
        with pytest.raises(CheckpointError, match="saved from 2 shards, 3 are asked for; reshard=True"):
            load_all(store_name, tmp_path, 3)


def test_a_failure_on_one_rank_is_an_error_on_all_and_leaves_nothing(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stores_of(store_name, [20, 30]) as stores:
        save_all(stores, tmp_path, step=5)
        (chunk, *_) = sorted((tmp_path / "step-00000005" / "shard-00001-of-00002").glob("chunk-*.bin"))
        data = bytearray(chunk.read_bytes())
        data[300] ^= 1
        chunk.write_bytes(data)
        names = [store_name(), store_name()]
        errors: dict[int, Exception] = {}

        def load(ranks: ThreadRankGroup) -> None:
            with pytest.raises(CheckpointError) as caught:
                load_checkpoint(tmp_path, names[ranks.rank], ranks, shard=(ranks.rank, 2))
            errors[ranks.rank] = caught.value

        run_ranks(2, load)
        assert f"{chunk.name} is damaged: block 1 " in str(errors[1])
        assert "failed on rank 1: CheckpointError" in str(errors[0])
        for name in names:
            assert not Path(f"/dev/shm/geartrain.{name}").exists()

        real = shards.save
        others = stores[0].native

        def failing(store: Any, *args: Any, **options: Any) -> Any:
            if store is not others:
                raise OSError(28, "No space left on device")
            return real(store, *args, **options)

        monkeypatch.setattr(shards, "save", failing)

        def save(ranks: ThreadRankGroup) -> None:
            with pytest.raises((CheckpointError, OSError)) as caught:
                save_checkpoint(stores[ranks.rank], tmp_path, ranks, step=6)
            errors[ranks.rank] = caught.value

        run_ranks(2, save)
        assert "No space left" in str(errors[1]) and "failed on rank 1" in str(errors[0])
        assert [step["step"] for step in describe_steps(tmp_path) if step["complete"]] == [5]
        assert not list(tmp_path.glob("step-00000006/*"))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"step": 6}, "ranks 0 and 1 save with another step: 5 and 6"),
        ({"state": {"seed": 1}}, "ranks 0 and 1 save with another state"),
        ({"shard": (0, 2)}, "says shard=None|shards must be numbered"),
    ],
)
def test_ranks_that_disagree_are_told_apart(store_name: Any, tmp_path: Path, other: Any, said: str) -> None:
    options = [{"step": 5, "state": {"seed": 0}}, {"step": 5, "state": {"seed": 0}, **other}]
    with stores_of(store_name, [20, 30]) as stores, pytest.raises(RanksDisagreeError, match=said):
        run_ranks(2, lambda r: save_checkpoint(stores[r.rank], tmp_path, r, **options[r.rank]))


def test_another_schema_is_named_by_field_and_ranks(store_name: Any, tmp_path: Path) -> None:
    other = {**FIELDS, "x": gt.Field((2,), "float32")}
    with (
        gt.Store.create(store_name(), FIELDS, max_length=4, capacity=4) as one,
        gt.Store.create(store_name(), other, max_length=4, capacity=4) as two,
    ):
        with pytest.raises(
            RanksDisagreeError, match=r"rank 1 has another schema than that of rank 0: field 'x' is .*shape=\(2,\)"
        ):
            save_all([one, two], tmp_path, step=1)
    with gt.Store.create(store_name(), FIELDS, max_length=4, capacity=4) as one:
        with gt.Store.create(store_name(), FIELDS, max_length=4, capacity=4, remover="lifo") as two:
            with pytest.raises(RanksDisagreeError, match="remover is fifo and lifo"):
                save_all([one, two], tmp_path, step=1)


def test_bad_arguments_are_refused_on_every_rank(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [20]) as (store,):
        for options, said in (
            ({}, "a step is a whole number"),
            ({"step": -1}, "a step is a whole number"),
            ({"step": 1, "keep": 0}, "at least one step must be kept"),
            ({"state": {"step": 1, "x": object()}}, "must be JSON"),
        ):
            with pytest.raises(CheckpointError, match=said):
                save_checkpoint(store, tmp_path, **options)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=r"no step complete on all ranks .* rank 0 has none"):
            load_checkpoint(tmp_path, store_name())
        save_checkpoint(store, tmp_path, step=1)
        name = store_name()
        for options, said in (
            ({"shard": (2, 2)}, "a shard is"),
            ({"shard": (1, 2)}, "no rank asks for shard 0"),
            ({"capacity": 5}, "need reshard"),
            ({"max_rows": 5}, "limits come from the checkpoint"),
            ({"reshard": True, "shard": (0, 1), "step": 3}, "step 3 is not complete"),
        ):
            with pytest.raises((CheckpointError, RanksDisagreeError), match=said):
                load_checkpoint(tmp_path, name, **options)  # type: ignore[arg-type]
        with pytest.raises(StoreExistsError):
            load_checkpoint(tmp_path, store.name)
        record = tmp_path / "step-00000001" / "replay.json"
        text = record.read_text()
        record.write_text(text.replace('"step": 1', '"step": 2'))
        with pytest.raises(CheckpointError, match=r"replay\.json is damaged: its checksum"):
            load_checkpoint(tmp_path, name)
        record.write_text(text[:50])
        with pytest.raises(CheckpointError, match=r"replay\.json is damaged: it is not the JSON"):
            load_checkpoint(tmp_path, name)
        record.write_text(text)
        shard = record.parent / "shard-00000-of-00001"
        store.save(shard)  # by hand, so that it is not the one that the step was completed with
        with pytest.raises(CheckpointError, match="is not the checkpoint that step 1 was completed with"):
            load_checkpoint(tmp_path, name)


def test_torchrun_says_which_shard_is_this_hosts() -> None:
    of = torchrun_shard
    assert of({}) == (0, 1)
    assert of({"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "3", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "2"}) == (2, 3)
    assert of({"GROUP_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}) == (1, 2)
    with pytest.raises(CheckpointError, match="give shard="):
        of({"GROUP_RANK": "1", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "4"})


# --- time and death ---------------------------------------------------------------------------------------------


def test_a_slow_shard_is_waited_for_and_a_stuck_one_is_not(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, gate = shards.save, threading.Event()

    def held(store: Any, *args: Any, **options: Any) -> Any:
        if store is slow:
            assert gate.wait(patience(20))
        return real(store, *args, **options)

    monkeypatch.setattr(shards, "save", held)
    with stores_of(store_name, [20, 30]) as stores:
        slow = stores[1].native
        group = ThreadRankGroup.make(2, timeout_s=2.0)  # less than the write takes
        opener = threading.Timer(2.5, gate.set)
        opener.start()
        run_ranks(group, lambda r: save_checkpoint(stores[r.rank], tmp_path, r, step=1))
        opener.join()
        gate.clear()
        began_s = time.monotonic()
        with pytest.raises(WaitTimeoutError, match=r"rank 1 was not ready within 0\.3 s"):
            save_all(stores, tmp_path, step=2, timeout_s=0.3)
        assert time.monotonic() - began_s < patience(5)
        gate.set()
        for thread in threading.enumerate():
            if thread.name == "geartrain-shards":
                thread.join(patience(10))
        loaded = load_all(store_name, tmp_path, 2)
        assert [report.step for _, _, report in loaded] == [1, 1]
        close(loaded)


@pytest.mark.parametrize("own_disks", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_rank_may_die_at_any_exchange_and_a_step_stays_restorable(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_disks: bool, again: bool
) -> None:
    monkeypatch.setattr(shards, "POLL_S", 10.0)  # so that the exchanges are the same every time
    survived = set()
    for die_at in range(100):
        places = [tmp_path / str(die_at) / (str(k) if own_disks else "0") for k in range(2)]
        with stores_of(store_name, [12, 15]) as stores:
            save_all(stores, places, step=1, keep=1)
            before = population(stores)
            for store in stores:
                put(store, 5000, 3)
            after = population(stores)
            group = ThreadRankGroup.make(2)
            group[1].die_at = die_at
            ended = True
            try:
                run_ranks(
                    group,
                    lambda r, at=places: save_checkpoint(stores[r.rank], at[r.rank], r, step=1 if again else 2, keep=1),
                )
            except PeerLostError:
                ended = False
            loaded = load_all(store_name, places, 2)
            found = population([store for store, _, _ in loaded])
            assert found in (before, after)
            survived.add(found == after)
            close(loaded)
            if ended:
                assert found == after
                break
            # And the next save goes on as if nothing had happened.
            save_all(stores, places, step=3, keep=1)
            assert all([step["step"] for step in describe_steps(place)] == [3] for place in places)
    assert ended and die_at >= 8 and survived == {False, True}


def test_a_step_that_is_removed_before_it_is_opened_is_passed_over_for_a_newer_one(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stores_of(store_name, [20, 30]) as stores:
        save_all(stores, tmp_path, step=1)
        want = population(stores)
        real, lock, saved = shards.saved_shard, threading.Lock(), []

        def removed(place: Path, record: dict[str, Any], k: int, *args: Any) -> Any:
            with lock:
                if k == 1 and not saved:  # the other rank may have opened its shard, or not
                    saved.append(save_all(stores, tmp_path, step=2, keep=1))
            return real(place, record, k, *args)

        monkeypatch.setattr(shards, "saved_shard", removed)
        loaded = load_all(store_name, tmp_path, 2)
        assert saved
        assert [report.step for _, _, report in loaded] == [2, 2]
        assert population([store for store, _, _ in loaded]) == want
        close(loaded)
        saved.clear()
        save_all(stores, tmp_path, step=3, keep=2)
        with pytest.raises(CheckpointError, match="step 2 is not complete"):
            monkeypatch.setattr(
                shards, "saved_shard", lambda *args: [saved, shutil.rmtree(tmp_path / "step-00000002"), real(*args)][2]
            )
            load_all(store_name, tmp_path, 1, step=2, reshard=True)


@pytest.mark.parametrize("reshard", [False, True])
def test_a_step_that_is_being_loaded_is_removed_by_the_next_save_after(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reshard: bool
) -> None:
    with stores_of(store_name, [20, 30]) as stores:
        save_all(stores, tmp_path, step=1)
        want = population(stores)
        real, saved, first = Checkpoint.records, [], threading.Semaphore(1)

        def removing(self: Checkpoint) -> Any:
            if first.acquire(blocking=False):
                for number, store in enumerate(stores):
                    store.delete(store.keys()[:10])
                    put(store, 5000 * (number + 1), 5)
                saved.append(save_all(stores, tmp_path, step=2, keep=1))
            return real(self)

        monkeypatch.setattr(Checkpoint, "records", removing)
        loaded = load_all(store_name, tmp_path, 1 if reshard else 2, reshard=reshard)
        assert saved
        # The shard that was open comes from step 1; had another rank not opened its own yet, both start again.
        steps = {report.step for _, _, report in loaded}
        assert steps in ({1}, {2}) if not reshard else steps == {1}
        found = population([store for store, _, _ in loaded])
        assert found == (want if steps == {1} else population(stores))
        close(loaded)
        save_all(stores, tmp_path, step=3, keep=1)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("own_disks", [False, True])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("phase", ["_write_shard", "write_record", "replace_record", "prune_steps"])
def test_a_rank_may_die_before_it_does_what_the_others_have_done(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, again: bool, own_disks: bool
) -> None:
    places = [tmp_path / (str(k) if own_disks else "0") for k in range(2)]
    with stores_of(store_name, [12, 15]) as stores:
        save_all(stores, places, step=1, keep=1)
        before = population(stores)
        for store in stores:
            put(store, 5000, 3)
        after = population(stores)
        group = ThreadRankGroup.make(2)
        real, first_is_done = getattr(shards, phase), threading.Event()

        def die(*args: Any, **options: Any) -> Any:
            if threading.current_thread() in doomed:
                assert first_is_done.wait(patience(20))
                group[1].abort("it was killed")
                raise PeerLostError("killed")
            result = real(*args, **options)
            first_is_done.set()
            return result

        doomed: set[threading.Thread] = set()
        run_phase = shards._run_phase

        def marking(ranks: Any, doing: str, body: Callable[[], Any], timeout_s: float) -> Any:
            def marked() -> Any:
                if ranks.rank == 1:
                    doomed.add(threading.current_thread())
                return body()

            return run_phase(ranks, doing, marked, timeout_s)

        monkeypatch.setattr(shards, phase, die)
        monkeypatch.setattr(shards, "_run_phase", marking)
        with pytest.raises(PeerLostError):
            run_ranks(
                group, lambda r: save_checkpoint(stores[r.rank], places[r.rank], r, step=1 if again else 2, keep=1)
            )
        monkeypatch.setattr(shards, phase, real)
        monkeypatch.setattr(shards, "_run_phase", run_phase)
        loaded = load_all(store_name, places, 2)
        assert population([store for store, _, _ in loaded]) in (before, after)
        close(loaded)
        save_all(stores, places, step=3, keep=1)
        assert all([step["step"] for step in describe_steps(place)] == [3] for place in places)


@pytest.mark.parametrize("own_disks", [False, True])
def test_a_rank_that_loses_the_others_does_not_take_its_shard_away_from_them(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_disks: bool
) -> None:
    monkeypatch.setattr(shards, "POLL_S", 10.0)
    for calls in range(1, 5):  # rank 1 hears nothing after that many answers, which rank 0 got in full
        places = [tmp_path / str(calls) / (str(k) if own_disks else "0") for k in range(2)]
        with stores_of(store_name, [12, 15]) as stores:
            save_all(stores, places, step=1, keep=1)
            group = ThreadRankGroup.make(2)
            real, left = group[1].all_gather_object, [calls]

            def deaf(mine: Any, real: Any = real, left: list[int] = left) -> Any:
                answer = real(mine)
                left[0] -= 1
                if left[0] == 0:
                    raise PeerLostError("the last answer was lost")
                return answer

            group[1].all_gather_object = deaf  # type: ignore[method-assign]
            with pytest.raises(PeerLostError):
                run_ranks(group, lambda r, at=places: save_checkpoint(stores[r.rank], at[r.rank], r, step=2, keep=1))
            loaded = load_all(store_name, places, 2)
            assert population([store for store, _, _ in loaded]) == population(stores)
            close(loaded)


@pytest.mark.parametrize("own_disks", [False, True])
def test_killed_at_any_instant_the_last_step_can_be_restored(
    store_name: Any, tmp_path: Path, fork: Callable[[Callable[[], object]], int], own_disks: bool
) -> None:
    places = [tmp_path / (str(k) if own_disks else "0") for k in range(2)]
    rng = np.random.default_rng(0)
    last = 0
    with stores_of(store_name, [30, 20]) as stores:
        save_all(stores, places, step=1)
        for _ in range(12):
            child = fork(lambda last=last: _save_from(last, [s.name for s in stores], places))
            time.sleep(patience(float(rng.uniform(0.02, 0.2))))  # the instant of death is what is drawn here
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            loaded = load_all(store_name, places, 2)
            step = loaded[0][2].step
            assert step >= last
            for store, _, _ in loaded:
                assert store.audit() == []
                extra = [i for i, *_ in books(store) if i >= 10_000]
                assert max(extra, default=10_000) - 10_000 in (step, 0) or step == 1
            last = step
            close(loaded)
        assert last > 12, "it got somewhere between the kills"
        save_all(stores, places, step=100_000)
    for place in places:
        assert sorted(path.name for path in place.iterdir()) == [f"step-{last:08d}", "step-00100000"]
        assert sorted(path.name[:5] for path in (place / "step-00100000").iterdir())[0] == "repla"


def _save_from(last: int, names: list[str], places: list[Path]) -> None:
    stores = [gt.Store.open(name) for name in names]
    for step in range(max(last, 1) + 1, 100_000):
        for store in stores:
            put(store, 10_000 + step, 1)
        run_ranks(2, lambda r, step=step: save_checkpoint(stores[r.rank], places[r.rank], r, step=step))


# --- another number of ranks ------------------------------------------------------------------------------------


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


# --- what survived in shared memory -----------------------------------------------------------------------------


def train_and_die(name: str, directory: Path, *, load: bool) -> None:
    """A run: priorities change with every batch. It saves at step 5, goes on for 3 steps and is killed."""
    if load:
        store, _, _ = load_checkpoint(directory, name)
        replay = gt.Replay(store, gt.selection.Prioritized(seed=2), 8, prefetch=0, output="numpy")
    else:
        store = gt.Store.create(name, FIELDS, max_length=4, capacity=60)
        put(store, 0, 40)
        replay = gt.Replay(store, gt.selection.Prioritized(seed=2), 8, prefetch=0, output="numpy")
        steps(replay, 5)
        save_checkpoint(store, directory, state=replay.state_dict())
    steps(replay, 3)
    put(store, 500, 2)
    os.kill(os.getpid(), signal.SIGKILL)


def steps(replay: gt.Replay, n: int) -> list[list[int]]:
    drawn = []
    for _ in range(n):
        batch = replay.sample()
        drawn.append(batch["id"].tolist())
        replay.update_priorities(batch.keys, (batch["id"] + replay.step) % 13 / 3)
    return drawn


def test_a_shard_that_survived_is_adopted_and_the_batches_are_those_of_the_uninterrupted_run(
    store_name: Any, tmp_path: Path, fork: Callable[[Callable[[], object]], int]
) -> None:
    with gt.Store.create(store_name(), FIELDS, max_length=4, capacity=60) as store:
        put(store, 0, 40)
        replay = gt.Replay(store, gt.selection.Prioritized(seed=2), 8, prefetch=0, output="numpy")
        steps(replay, 5)
        uninterrupted = steps(replay, 6)
    name = store_name()
    os.waitpid(fork(lambda: train_and_die(name, tmp_path, load=False)), 0)
    with pytest.raises(StoreExistsError):
        load_checkpoint(tmp_path, name)
    store, state, report = load_checkpoint(tmp_path, name, adopt=True)
    assert state is not None
    assert (report.adopted, report.newer, report.gone, report.rows) == (40, 2, 0, 42)
    assert store.audit() == []
    store.delete(store.keys()[40:])  # what came after the checkpoint; the uninterrupted run had not got it
    replay = gt.Replay(store, gt.selection.Prioritized(seed=2), 8, prefetch=0, output="numpy")
    replay.load_state_dict(state)
    assert steps(replay, 6) == uninterrupted
    store.close()


def test_a_store_that_was_loaded_and_not_yet_saved_is_adopted_as_well(
    store_name: Any, tmp_path: Path, fork: Callable[[Callable[[], object]], int]
) -> None:
    first, name = store_name(), store_name()
    os.waitpid(fork(lambda: train_and_die(first, tmp_path, load=False)), 0)
    os.waitpid(fork(lambda: train_and_die(name, tmp_path, load=True)), 0)
    store, _, report = load_checkpoint(tmp_path, name, adopt=True)
    assert (report.adopted, report.newer, report.gone) == (40, 2, 0)
    with gt.Store.load(tmp_path / "step-00000005" / "shard-00000-of-00001", store_name()) as saved:
        assert books(store)[:40] == books(saved), "counts of samples included"
    store.close()


def test_a_cut_shard_is_adopted_and_rows_that_are_gone_are_counted(
    store_name: Any, tmp_path: Path, fork: Callable[[Callable[[], object]], int]
) -> None:
    with stores_of(store_name, [20, 30]) as stores:
        save_all(stores, tmp_path, step=1)
    names = [store_name() for _ in range(3)]

    def load_and_die() -> None:
        loaded = run_ranks(3, lambda r: load_checkpoint(tmp_path, names[r.rank], r, shard=(r.rank, 3), reshard=True))
        loaded[1][0].delete(loaded[1][0].keys()[:4])
        loaded[1][0].update_priorities(loaded[1][0].keys(), np.full(len(loaded[1][0]), 3.0))
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(fork(load_and_die), 0)

    def load(ranks: ThreadRankGroup) -> Any:
        return load_checkpoint(tmp_path, names[ranks.rank], ranks, shard=(ranks.rank, 3), reshard=True, adopt=True)

    loaded = run_ranks(3, load)
    counts = [(report.adopted, report.newer, report.gone) for _, _, report in loaded]
    sizes = [len(store) for store, _, _ in loaded]
    assert counts == [(sizes[0], 0, 0), (sizes[1], 0, 4), (sizes[2], 0, 0)] and sizes[1] == sizes[0] - 4
    fresh = load_all(store_name, tmp_path, 3, reshard=True)
    assert books(loaded[1][0]) == [row for row in books(fresh[1][0]) if row in books(loaded[1][0])]
    close(loaded + fresh)


def test_a_strangers_segment_is_not_adopted(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [20, 20]) as stores:
        save_checkpoint(stores[0], tmp_path, step=1)
        with pytest.raises(CheckpointError, match="geartrain remove"):
            load_checkpoint(tmp_path, stores[1].name, adopt=True)
        assert len(stores[1]), "and it is as it was"
        store, _, report = load_checkpoint(tmp_path, store_name(), adopt=True)  # nothing there: it is read
        assert report.adopted == 0 and books(store) == books(stores[0])
        store.close()


def test_steps_are_described_for_people(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [20, 30]) as stores:
        save_all(stores, [tmp_path / "a", tmp_path / "b"], state={"seed": 4, "step": 9})
    (tmp_path / "a" / "step-00000012" / "shard-00000-of-00002").mkdir(parents=True)
    newest, complete = describe_steps(tmp_path / "a")
    assert (newest["step"], newest["complete"], newest["shards"]) == (12, False, [])
    assert (complete["step"], complete["complete"], complete["world"]) == (9, True, 2)
    assert complete["state"] == {"seed": 4, "step": 9}
    assert [shard["here"] for shard in complete["shards"]] == [True, False]
    assert json.dumps(complete)


def test_inspect_shows_steps_and_shards(store_name: Any, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    import geartrain.tools.cli.app as app

    with stores_of(store_name, [20, 30]) as stores:
        for step in (8, 9):
            save_all(stores, [tmp_path / "a", tmp_path / "b"], state={"seed": 4, "step": step})
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "a")], env={"COLUMNS": "120"}).stdout
    assert "shard-00000-of-00002" in shown and "step 9, the newest" in shown and "seed 4" in shown
    steps = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path / "a"), "--json"]).stdout)
    assert [step["step"] for step in steps] == [9, 8]
    shard = tmp_path / "a" / "step-00000009" / "shard-00000-of-00002"
    assert "of them shared with" in CliRunner().invoke(app, ["inspect", str(shard)]).stdout


# --- processes --------------------------------------------------------------------------------------------------


def test_processes_save_in_parallel_over_gloo_and_other_processes_load(
    store_name: Any, tmp_path: Path, fork: Callable[[Callable[[], object]], int]
) -> None:
    dist = pytest.importorskip("torch.distributed")
    from geartrain.replay.distributed.rank_group import TorchRankGroup

    def job(number: int, size: int, body: Callable[[Any, int], object]) -> list[int]:
        def run(rank: int) -> None:
            meeting = dist.FileStore(str(tmp_path / f"meeting-{number}"), size)
            dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size)
            ranks = TorchRankGroup(range(size), timeout_s=patience(20.0))
            body(ranks, rank)
            ranks.close()
            dist.destroy_process_group()

        children = [fork(lambda rank=rank: run(rank)) for rank in range(size)]
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

    names = [store_name() for _ in range(3)]
    with stores_of(store_name, [20, 30]) as stores:
        rows = population(stores)

        def save(ranks: Any, rank: int) -> None:
            with gt.Store.open(stores[rank // 2].name) as store:  # two processes a host
                for step in (1, 2):
                    assert save_checkpoint(store, tmp_path, ranks, step=step).rows == len(rows)

        def load(ranks: Any, rank: int) -> None:
            store, _, report = load_checkpoint(tmp_path, names[rank], ranks, shard=(rank, 3), reshard=True)
            assert report.step == 2
            store.close(keep=True)

        assert job(1, 4, save) == [0] * 4
        assert job(2, 3, load) == [0] * 3
        loaded = [gt.Store.open(name, adopt=True) for name in names]
        assert population(loaded) == rows
        for store in loaded:
            store.close()
