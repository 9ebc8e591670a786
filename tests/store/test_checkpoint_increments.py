"""Incremental checkpoints: only what is new is written, and each is whole by itself."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved_stores import chunks, contents, small_files

import geartrain as gt
import geartrain.store.checkpoint_chunks as chunks_of_all
import geartrain.store.checkpoint_directory as checkpoint_directory
from geartrain.errors import CheckpointError

BLOCK = {"x": gt.Field((100,), "uint8", per_row=True), "id": gt.Field((), "int64", per_row=True)}

ROW = 108


def put(store: gt.Store, first: int, n: int) -> gt.Keys:
    ids = np.arange(first, first + n)
    return store.insert(
        {"x": np.repeat(ids[:, None] % 251, 100, 1).astype(np.uint8), "id": ids}, priorities=ids % 7 + 1.0
    )


def data_bytes(saved: Any) -> int:
    """Bytes written of blocks, without the row table and the manifest."""
    table = (saved.path / "rows.bin").stat().st_size + (saved.path / "manifest.json").stat().st_size
    return int(saved.bytes_written) - table


def check(directory: Path, store: gt.Store, name: str) -> None:
    with gt.Store.load(directory, name) as restored:
        assert restored.keys() == store.keys() and restored.audit() == []
        assert contents(restored) == contents(store)


def test_an_unchanged_store_is_saved_without_writing_a_block(store_name: Any, tmp_path: Path) -> None:
    with gt.Store.create(store_name(), BLOCK, capacity=100) as store:
        keys = put(store, 0, 80)
        first = store.save(tmp_path / "ckpt")
        assert (first.rows, first.bytes_linked, first.not_linked) == (80, 0, None)
        assert data_bytes(first) == 80 * ROW
        store.update_priorities(keys, np.arange(80.0))
        second = store.save(tmp_path / "ckpt")
        assert data_bytes(second) == 0 and second.bytes_linked == 80 * ROW
        check(tmp_path / "ckpt", store, store_name())


def test_a_ring_writes_the_rows_that_are_new_and_nothing_else(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_files(monkeypatch, chunk_bytes=100 * ROW)
    with gt.Store.create(store_name(), BLOCK, capacity=2000) as store:
        put(store, 0, 2000)
        store.save(tmp_path / "ckpt")
        written = [0]
        for turn in range(80):  # more than once around
            put(store, 2000 + 30 * turn, 30)
            saved = store.save(tmp_path / "ckpt")
            written.append(data_bytes(saved))
            on_disk = saved.bytes_written + saved.bytes_linked - (2000 * 56)
            assert on_disk < 2000 * ROW * 1.5 + 20_000
        assert sum(written) == 80 * 30 * ROW, "in a ring whole chunks die, and none need be written anew"
        assert len(chunks(tmp_path / "ckpt")) < 80 + chunks_of_all.MAX_SMALL, "none is smaller than a quarter"
        check(tmp_path / "ckpt", store, store_name())


def test_rows_that_die_at_random_cost_no_more_than_twice_their_bytes(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_files(monkeypatch, chunk_bytes=100 * ROW)
    rng = np.random.default_rng(0)
    with gt.Store.create(store_name(), BLOCK, capacity=2000) as store:
        put(store, 0, 2000)
        store.save(tmp_path / "ckpt")
        written = []
        for turn in range(80):
            store.delete(store.keys()[rng.choice(2000, 30, replace=False)])
            put(store, 2000 + 30 * turn, 30)
            saved = store.save(tmp_path / "ckpt")
            written.append(data_bytes(saved))
            assert saved.bytes_written + saved.bytes_linked - 2000 * 56 < 2000 * ROW * 1.5 + 20_000
        assert written[0] == 30 * ROW
        assert sum(written[30:]) < 2.2 * 50 * 30 * ROW
        check(tmp_path / "ckpt", store, store_name())


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_between_saves_each_checkpoint_is_the_store(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    small_files(monkeypatch, chunk_bytes=int([400, 1000, 3000, 200][seed]))
    monkeypatch.setattr(chunks_of_all, "MAX_SMALL", 3)
    rng = np.random.default_rng(seed)
    remover: Any = ["fifo", "lifo", "lowest_priority", "fifo"][seed]
    store = gt.Store.create(store_name(), BLOCK, capacity=60, remover=remover)
    at = linked = 0
    for turn in range(40):
        for _ in range(rng.integers(0, 4)):
            n = int(rng.integers(1, 30))
            put(store, at, n)
            at += n
        if len(store):
            chosen = store.keys()[rng.integers(0, len(store), 5)]
            store.update_priorities(chosen, rng.random(5) * 9)
            if rng.random() < 0.5:
                store.delete(chosen[:2])
        directory = tmp_path / f"ckpt-{rng.integers(2)}"
        base = tmp_path / f"ckpt-{rng.integers(2)}"
        saved = store.save(directory, base=base if base.exists() and rng.random() < 0.5 else None)
        linked += saved.bytes_linked
        check(directory, store, store_name())
        if turn % 10 == 9:  # and lineages go on through a restore
            restored = gt.Store.load(directory, store_name())
            again = restored.save(directory)
            assert again.not_linked is None and (again.bytes_linked > 0 or not len(restored))
            store.close()
            store = restored
    store.close()
    assert linked > 0


def test_many_small_saves_do_not_make_many_files(store_name: Any, tmp_path: Path) -> None:
    with gt.Store.create(store_name(), BLOCK, capacity=300) as store:
        for turn in range(100):
            put(store, turn, 1)
            store.save(tmp_path / "ckpt")
        assert len(chunks(tmp_path / "ckpt")) <= chunks_of_all.MAX_SMALL + 1
        check(tmp_path / "ckpt", store, store_name())


def test_rows_are_not_taken_from_another_store_that_looks_alike(store_name: Any, tmp_path: Path) -> None:
    with (
        gt.Store.create(store_name(), BLOCK, capacity=9) as store,
        gt.Store.create(store_name(), BLOCK, capacity=9) as o,
    ):
        put(store, 0, 9)
        put(o, 100, 9)
        store.save(tmp_path / "ckpt")
        saved = o.save(tmp_path / "ckpt")  # same rows, generations and sequence numbers; other bytes
        assert saved.bytes_linked == 0 and "not of this store" in str(saved.not_linked)
        check(tmp_path / "ckpt", o, store_name())


def test_two_futures_of_one_checkpoint_do_not_mix(store_name: Any, tmp_path: Path) -> None:
    with gt.Store.create(store_name(), BLOCK, capacity=9) as store:
        put(store, 0, 5)
        store.save(tmp_path / "ckpt")
        with gt.Store.load(tmp_path / "ckpt", store_name()) as other:
            put(store, 100, 3)
            put(other, 200, 3)
            store.save(tmp_path / "ckpt")
            saved = other.save(tmp_path / "ckpt")
            assert saved.bytes_linked == 0, "what is there now is not what the other was made from"
            check(tmp_path / "ckpt", other, store_name())


def test_copies_of_a_store_file_that_went_their_own_ways_do_not_mix(tmp_path: Path, store_name: Any) -> None:
    with gt.Store.create(tmp_path / "one.gt", BLOCK, capacity=9) as store:
        put(store, 0, 5)
    shutil.copy(tmp_path / "one.gt", tmp_path / "two.gt")
    with gt.Store.open(tmp_path / "one.gt") as one, gt.Store.open(tmp_path / "two.gt") as two:
        put(one, 100, 3)
        put(two, 200, 3)
        one.save(tmp_path / "ckpt")
        two.save(tmp_path / "ckpt")
        check(tmp_path / "ckpt", two, store_name())


def test_a_file_system_that_refuses_links_gets_a_full_checkpoint_and_the_reason_is_told(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gt.Store.create(store_name(), BLOCK, capacity=9) as store:
        put(store, 0, 5)
        store.save(tmp_path / "ckpt")

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
        saved = store.save(tmp_path / "ckpt")
        assert saved.bytes_linked == 0 and "Operation not permitted" in str(saved.not_linked)
        assert data_bytes(saved) == 5 * ROW
        check(tmp_path / "ckpt", store, store_name())


def test_a_base_elsewhere_is_linked_to_and_may_be_removed_afterwards(store_name: Any, tmp_path: Path) -> None:
    with gt.Store.create(store_name(), BLOCK, capacity=9) as store:
        put(store, 0, 5)
        store.save(tmp_path / "one")
        put(store, 5, 2)
        saved = store.save(tmp_path / "two", base=tmp_path / "one")
        assert data_bytes(saved) == 2 * ROW and saved.bytes_linked == 5 * ROW
        shutil.rmtree(tmp_path / "one")
        check(tmp_path / "two", store, store_name())
        full = store.save(tmp_path / "two", incremental=False)
        assert full.bytes_linked == 0 and data_bytes(full) == 7 * ROW
        with pytest.raises(CheckpointError, match="not a checkpoint"):
            store.save(tmp_path / "three", base=tmp_path / "one")
        with pytest.raises(CheckpointError, match="takes no base"):
            store.save(tmp_path / "three", base=tmp_path / "two", incremental=False)


def test_a_damaged_checkpoint_is_replaced_by_a_whole_one(store_name: Any, tmp_path: Path) -> None:
    with gt.Store.create(store_name(), BLOCK, capacity=9) as store:
        put(store, 0, 5)
        store.save(tmp_path / "ckpt")
        (tmp_path / "ckpt" / chunks(tmp_path / "ckpt")[0]).unlink()
        with pytest.raises(CheckpointError, match="is missing"):
            store.save(tmp_path / "two", base=tmp_path / "ckpt")
        saved = store.save(tmp_path / "ckpt")
        assert "is missing" in str(saved.not_linked)
        check(tmp_path / "ckpt", store, store_name())


def test_what_killed_savers_left_is_removed_by_the_next_and_what_others_write_is_not(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork: Callable[[Callable[[], object]], int]
) -> None:
    with gt.Store.create(store_name(), BLOCK, capacity=9) as store:
        put(store, 0, 5)

        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def save_and_die() -> None:
            chunks_of_all.write_json = die  # type: ignore[assignment]
            store.save(tmp_path / "ckpt")

        os.waitpid(fork(save_and_die), 0)
        (left,) = tmp_path.glob(".ckpt.*.saving")
        with checkpoint_directory.sibling(tmp_path / "ckpt") as anothers:
            assert not left.exists()
            store.save(tmp_path / "ckpt")
            assert anothers.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
