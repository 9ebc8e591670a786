"""A checkpoint is complete or absent, tells damage by file and block, and brings everything back."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain import checkpoint
from geartrain.errors import CheckpointError, SchemaError

FIELDS = {
    "obs": gt.Field((20, 3), "float32"),
    "half": gt.Field((20, 2), "bfloat16"),
    "id": gt.Field((), "int64"),
}


def fill(store: gt.Store, n: int, seed: int = 0) -> gt.Keys:
    rng = np.random.default_rng(seed)
    return store.insert(
        {
            "obs": rng.normal(size=(n, 15, 3)).astype("float32"),
            "half": rng.integers(0, 2**16, (n, 15, 2), np.uint16).view(bfloat16()),
            "id": np.arange(n) + 1000 * seed,
        },
        lengths=rng.integers(1, 16, n),
        weights=rng.random(n) * 10,
        versions=rng.integers(0, 9, n),
    )


def bfloat16() -> Any:
    return pytest.importorskip("ml_dtypes").bfloat16


def contents(store: gt.Store) -> tuple[Any, ...]:
    batch = gt.fetch(store, store.keys())
    books = store.status()
    return (
        {
            name: batch[name].view(__import__("torch").uint8).tolist() if name == "half" else batch[name].tolist()
            for name in batch
        },
        {book: books[book].tolist() for book in books},
    )


@pytest.mark.parametrize("remover", ["fifo", "lifo", "lowest_weight"])
def test_a_restored_store_is_the_saved_one(store_name: Any, tmp_path: Path, remover: Any) -> None:
    with gt.Store.create(store_name(), FIELDS, capacity=64, remover=remover, max_times_sampled=50) as store:
        fill(store, 100)
        store.delete(store.keys()[5:9])
        store.update_weights(store.keys()[:4], [0.0, 1.0, 2.0, 3.0])
        gt.Replay(store, gt.selection.Uniform(), 16, prefetch=0).sample()
        store.save(tmp_path / "ckpt")
        with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
            assert restored.keys() == store.keys()
            assert contents(restored) == contents(store)
            assert restored.stats() == store.stats()
            assert restored.options == store.options
            assert restored.audit() == []
            # What comes next is the same too: the same rows make room, in the same order, for the same keys.
            assert fill(store, 30, seed=1) == fill(restored, 30, seed=1)
            assert contents(restored)[0] == contents(store)[0]


def test_a_resumed_replay_draws_what_the_uninterrupted_one_would_have(store_name: Any, tmp_path: Path) -> None:
    with gt.Store.create(store_name(), FIELDS, capacity=40) as store:
        fill(store, 40)
        replay = gt.Replay(store, gt.selection.Weighted(seed=3), 8, window=5, as_="torch", prefetch=2)
        for _ in range(5):
            replay.sample()
        state = json.loads(json.dumps(replay.state_dict()))
        store.save(tmp_path / "ckpt")
        going_on = [replay.sample() for _ in range(5)]
        with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
            resumed = gt.Replay(restored, gt.selection.Weighted(seed=3), 8, window=5)
            resumed.load_state_dict(state)
            for batch in going_on:
                again = resumed.sample()
                assert again.rows == batch.rows
                assert bool((again["obs"] == batch["obs"]).all()) and bool((again.start == batch.start).all())
            resumed.close()
        replay.close()


def test_an_empty_store_can_be_saved(store_name: Any, tmp_path: Path) -> None:
    with gt.Store.create(store_name(), FIELDS, capacity=4) as store:
        store.save(tmp_path / "ckpt")
        with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
            assert len(restored) == 0 and restored.audit() == []


def test_rows_being_written_are_free_in_the_checkpoint(store_name: Any, tmp_path: Path) -> None:
    with gt.Store.create(store_name(), FIELDS, capacity=4) as store:
        fill(store, 2)
        row = store.row()
        store.save(tmp_path / "ckpt")
        row.abandon()
        with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
            assert restored.stats()["free"] == 2 and restored.stats()["writing"] == 0


def test_keys_from_before_a_restore_stay_stale_when_their_rows_were_gone(store_name: Any, tmp_path: Path) -> None:
    with gt.Store.create(store_name(), FIELDS, capacity=4) as store:
        gone = fill(store, 4)
        store.delete(gone)
        store.save(tmp_path / "ckpt")
        with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
            fill(restored, 4, seed=1)
            assert restored.update_weights(gone, np.ones(4)) == 4


def test_saving_again_replaces_the_old_checkpoint(store_name: Any, tmp_path: Path) -> None:
    with gt.Store.create(store_name(), FIELDS, capacity=8) as store:
        fill(store, 2)
        store.save(tmp_path / "ckpt")
        fill(store, 3, seed=1)
        store.save(tmp_path / "ckpt")
        with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
            assert len(restored) == 5
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_foreign_files_are_never_replaced(store_name: Any, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"meow")
    with gt.Store.create(store_name(), FIELDS, capacity=8) as store:
        fill(store, 2)
        with pytest.raises(CheckpointError, match=r"cat\.jpg"):
            store.save(tmp_path / "photos")
        store.save(tmp_path / "ckpt")
        (tmp_path / "ckpt" / "notes.txt").write_text("mine")
        with pytest.raises(CheckpointError, match=r"notes\.txt"):
            store.save(tmp_path / "ckpt")
    assert (tmp_path / "photos" / "cat.jpg").read_bytes() == b"meow"
    assert (tmp_path / "ckpt" / "notes.txt").read_text() == "mine"


@pytest.fixture
def saved(store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose files have several blocks each."""
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 2000)
    with gt.Store.create(store_name(), FIELDS, capacity=200) as store:
        fill(store, 150)
        store.save(tmp_path / "ckpt")
    return tmp_path / "ckpt"


@pytest.mark.parametrize("file", ["rows.bin", "field-00.bin", "field-01.bin", "field-02.bin"])
def test_one_flipped_bit_is_found_and_named_by_file_and_block(saved: Path, store_name: Any, file: str) -> None:
    data = bytearray((saved / file).read_bytes())
    piece = json.loads((saved / "manifest.json").read_text())["files"][file]["piece_bytes"]
    at = len(data) * 2 // 3
    data[at] ^= 0x10
    (saved / file).write_bytes(data)
    name = store_name()
    with pytest.raises(CheckpointError, match=rf"{file} is damaged: block {at // piece} "):
        gt.Store.load(saved, name)
    assert not Path(f"/dev/shm/geartrain.{name}").exists(), "a load that failed leaves no store"


def test_a_short_missing_or_altered_part_is_named(saved: Path, store_name: Any) -> None:
    field = saved / "field-00.bin"
    whole = field.read_bytes()
    field.write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match=r"field-00\.bin has \d+ bytes"):
        gt.Store.load(saved, store_name())
    field.unlink()
    with pytest.raises(CheckpointError, match=r"field-00\.bin is missing"):
        gt.Store.load(saved, store_name())
    field.write_bytes(whole)
    manifest = saved / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"rows": 150', '"rows": 149'))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        gt.Store.load(saved, store_name())
    manifest.write_text(text[:100])
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        gt.Store.load(saved, store_name())
    manifest.unlink()
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        gt.Store.load(saved, store_name())


def test_another_version_and_unknown_options_are_refused(saved: Path, store_name: Any) -> None:
    with pytest.raises(CheckpointError, match="capacity"):
        gt.Store.load(saved, store_name(), capacity=7)
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["version"] = 99
    del manifest["checksum"]
    manifest["checksum"] = checkpoint._manifest_checksum(manifest)
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="version 99"):
        gt.Store.load(saved, store_name())


def test_a_row_table_that_contradicts_itself_is_refused(store_name: Any) -> None:
    with gt.Store.create(store_name(), FIELDS, capacity=2) as store:
        native = store.native
        native.allocate(2)
        u32, u64, i64 = (
            (lambda *v: np.array(v, np.uint32)),
            (lambda *v: np.array(v, np.uint64)),
            (lambda *v: np.array(v, np.int64)),
        )
        with pytest.raises(SchemaError, match="contradicts itself"):
            native.restore(u32(0, 0), u32(1, 1), u32(1, 1), u32(1, 1), u32(0, 0), u64(1, 2), u64(0, 0), i64(0, 0), 3)


def _save_for_ever(name: str, directory: str) -> None:
    store = gt.Store.open(name)
    while True:
        store.save(directory)


def test_a_process_killed_while_saving_leaves_the_previous_checkpoint_or_the_new_one(
    store_name: Any, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    with gt.Store.create(store_name(), FIELDS, capacity=300) as store:
        fill(store, 300)
        store.save(tmp_path / "ckpt")
        rng = np.random.default_rng(0)
        for _ in range(15):
            saver = context.Process(target=_save_for_ever, args=(store.name, str(tmp_path / "ckpt")))
            saver.start()
            saver.join(timeout=float(rng.uniform(0.005, 0.08)))
            assert saver.pid is not None
            os.kill(saver.pid, signal.SIGKILL)
            saver.join()
            with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
                assert restored.keys() == store.keys()


def test_rows_overwritten_while_saving_are_left_out_and_counted(
    store_name: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    with gt.Store.create(store_name(), FIELDS, capacity=10) as store:
        fill(store, 10)
        real = checkpoint._native.fetch

        def overwriting(*args: Any) -> Any:
            fill(store, 3, seed=2)  # evicts the three oldest before they are copied
            return real(*args)

        monkeypatch.setattr(checkpoint._native, "fetch", overwriting)
        store.save(tmp_path / "ckpt")
        monkeypatch.undo()
        manifest = checkpoint.read_manifest(tmp_path / "ckpt")
        assert (manifest["rows"], manifest["rows_left_out"]) == (7, 3)
        with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
            assert len(restored) == 7 and restored.audit() == []


def test_the_bytes_of_a_checkpoint_are_the_documented_ones(store_name: Any, tmp_path: Path) -> None:
    fields = {"x": gt.Field((2,), "uint16"), "flag": gt.Field((), "bool")}
    with gt.Store.create(store_name(), fields, capacity=3) as store:
        store.insert(
            {"x": np.array([[1, 2], [3, 4]], np.uint16), "flag": np.array([True, False])},
            weights=[1.0, 0.5],
            versions=[7, -1],
        )
        store.save(tmp_path / "ckpt")
        at = store.status()["inserted_at_ns"].tolist()
    ckpt = tmp_path / "ckpt"
    assert (ckpt / "field-00.bin").read_bytes() == bytes([1, 0, 2, 0, 3, 0, 4, 0])
    assert (ckpt / "field-01.bin").read_bytes() == bytes([1, 0])
    assert (ckpt / "rows.bin").read_bytes() == b"".join(
        [
            struct.pack("<QQqIIIIII", 1, at[0], 7, 0, 1, 65536, 2, 0, 0),
            struct.pack("<QQqIIIIII", 2, at[1], -1, 1, 1, 32768, 2, 0, 0),
            struct.pack("<QQqIIIIII", 0, 0, 0, 2, 0, 0, 0, 0, 0),
        ]
    )
    manifest = json.loads((ckpt / "manifest.json").read_text())
    assert manifest["format"] == "geartrain-checkpoint" and manifest["version"] == 1
    assert manifest["fields"][0] == {"name": "x", "shape": [2], "dtype": "uint16", "timed": True}


@pytest.mark.slow
def test_a_checkpoint_larger_than_two_gigabytes_comes_back(store_name: Any, tmp_path: Path) -> None:
    fields = {"x": gt.Field((1 << 20,), "uint8", timed=False)}
    with gt.Store.create(store_name(), fields, capacity=2200) as store:
        block = np.arange(1 << 20, dtype=np.uint64).astype(np.uint8)
        for i in range(2200):
            with store.row() as row:
                row["x"] = block
                row["x"][:8] = np.frombuffer(struct.pack("<Q", i), np.uint8)
        store.save(tmp_path / "ckpt")
        assert (tmp_path / "ckpt" / "field-00.bin").stat().st_size > 2**31
    with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
        column = restored.column("x")
        for i in (0, 1, 2047, 2048, 2199):
            assert struct.unpack("<Q", column[i, :8].tobytes())[0] == i
            assert np.array_equal(column[i, 8:], block[8:])
