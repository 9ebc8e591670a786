"""A checkpoint is complete or absent, tells damage by file and block, and brings everything back."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mounts import file_system
from saved_stores import FIELDS, chunks, contents, fill, small_files
from tasked_stores import in_all_states

import geartrain as gt
import geartrain._native as _native
import geartrain.store.checkpoint_chunks as saving
from geartrain.errors import ArgumentError, CheckpointError, NoSpaceError, SchemaError
from geartrain.store.checkpoint_directory import HeldDirectory
from geartrain.store.checkpoint_format import manifest_of, write_json
from geartrain.store.checkpoint_reader import Checkpoint


@pytest.mark.parametrize("remover", ["fifo", "lifo", "lowest_priority"])
def test_a_restored_store_is_the_saved_one(store_name: Any, tmp_path: Path, remover: Any) -> None:
    with gt.Store.create(
        store_name(), FIELDS, max_length=20, capacity=64, remover=remover, max_times_sampled=50
    ) as store:
        fill(store, 100)
        store.delete(store.keys()[5:9])
        store.update_priorities(store.keys()[:4], [0.0, 1.0, 2.0, 3.0])
        gt.Replay(store, gt.selection.Uniform(), 16, prefetch=0, output="numpy").sample()
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
    with gt.Store.create(store_name(), FIELDS, max_length=20, capacity=40) as store:
        fill(store, 40)
        replay = gt.Replay(store, gt.selection.Prioritized(seed=3), 8, window=5, output="numpy", prefetch=2)
        for _ in range(5):
            replay.sample()
        state = json.loads(json.dumps(replay.state_dict()))
        store.save(tmp_path / "ckpt")
        going_on = [replay.sample() for _ in range(5)]
        with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
            resumed = gt.Replay(restored, gt.selection.Prioritized(seed=3), 8, window=5, output="numpy")
            resumed.load_state_dict(state)
            for batch in going_on:
                again = resumed.sample()
                assert again.keys == batch.keys
                assert bool((again["obs"] == batch["obs"]).all()) and bool((again.start == batch.start).all())
            resumed.close()
        replay.close()


def test_an_empty_store_can_be_saved(store_name: Any, tmp_path: Path) -> None:
    with gt.Store.create(store_name(), FIELDS, max_length=20, capacity=4) as store:
        store.save(tmp_path / "ckpt")
        with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
            assert len(restored) == 0 and restored.audit() == []


def test_rows_being_written_are_free_in_the_checkpoint(store_name: Any, tmp_path: Path) -> None:
    with gt.Store.create(store_name(), FIELDS, max_length=20, capacity=4) as store:
        fill(store, 2)
        row = store.row()
        store.save(tmp_path / "ckpt")
        row.abandon()
        with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
            assert restored.stats()["free"] == 2 and restored.stats()["writing"] == 0


def test_keys_from_before_a_restore_stay_stale_when_their_rows_were_gone(store_name: Any, tmp_path: Path) -> None:
    with gt.Store.create(store_name(), FIELDS, max_length=20, capacity=4) as store:
        gone = fill(store, 4)
        store.delete(gone)
        store.save(tmp_path / "ckpt")
        with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
            fill(restored, 4, seed=1)
            with pytest.raises(ArgumentError, match="to another store"):
                restored.update_priorities(gone, np.ones(4))
            assert restored.update_priorities(gone.of_store(restored.id), np.ones(4)) == 4


def test_saving_again_replaces_the_old_checkpoint(store_name: Any, tmp_path: Path) -> None:
    with gt.Store.create(store_name(), FIELDS, max_length=20, capacity=8) as store:
        fill(store, 2)
        store.save(tmp_path / "ckpt")
        fill(store, 3, seed=1)
        store.save(tmp_path / "ckpt")
        with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
            assert len(restored) == 5
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_saving_through_a_symbolic_link_keeps_the_link(store_name: Any, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    with gt.Store.create(store_name(), FIELDS, max_length=15, capacity=8) as store:
        fill(store, 3)
        store.save(tmp_path / "link")
        store.save(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        with gt.Store.load(tmp_path / "real", store_name()) as loaded:
            assert contents(loaded) == contents(store)
        with pytest.raises(CheckpointError, match=r"dangling is a symbolic link to .*nowhere, which does not exist"):
            store.save(tmp_path / "dangling")
        assert not (tmp_path / "nowhere").exists()


def test_a_directory_that_cannot_be_written_is_an_error_that_names_the_checkpoint(store_name: Any) -> None:
    with gt.Store.create(store_name(), {"x": gt.Field((), "int64", per_row=True)}, capacity=4) as store:
        store.insert({"x": np.arange(3)})
        with pytest.raises(CheckpointError, match="cannot save the checkpoint /proc/nothing: "):
            store.save("/proc/nothing")  # nobody makes directories in /proc


def test_a_full_disk_is_named(store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with gt.Store.create(store_name(), FIELDS, max_length=15, capacity=8) as store:
        fill(store, 3)
        monkeypatch.setattr(saving.PieceWriter, "write", full)
        with pytest.raises(NoSpaceError, match=r"/ckpt: No space left on device; [\d,]+ bytes are free"):
            store.save(tmp_path / "ckpt")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_looked_at_and_a_disk_without_inodes_are_named(store_name: Any, tmp_path: Path) -> None:
    with gt.Store.create(store_name(), FIELDS, max_length=15, capacity=8) as store:
        fill(store, 3)
        with pytest.raises(CheckpointError, match=r"cannot save the checkpoint .*/a: File name too long"):
            store.save(tmp_path / ("a/" * 3000))
        with file_system(tmp_path, "4m", "nr_inodes=2"):
            with pytest.raises(NoSpaceError, match=r"/series: No space left on device; no inodes are free"):
                store.save(tmp_path / "first" / "series" / "ckpt")


def test_foreign_files_are_never_replaced(store_name: Any, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"meow")
    with gt.Store.create(store_name(), FIELDS, max_length=20, capacity=8) as store:
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
    """A checkpoint of several chunks, whose files have several blocks each."""
    small_files(monkeypatch, chunk_bytes=20_000, piece_bytes=2000)
    with gt.Store.create(store_name(), FIELDS, max_length=20, capacity=200) as store:
        fill(store, 150)
        store.save(tmp_path / "ckpt")
    return tmp_path / "ckpt"


@pytest.mark.parametrize("how", ["flipped", "cut"])
@pytest.mark.parametrize("tasks", [False, True])
def test_a_checkpoint_that_is_damaged_anywhere_is_an_error_that_names_file_and_block(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, tasks: bool
) -> None:
    small_files(monkeypatch, chunk_bytes=1 << 20, piece_bytes=1000)
    with in_all_states() if tasks else gt.Store.create(FIELDS, max_length=15, capacity=10) as store:
        if not tasks:
            fill(store, 8)
        store.save(tmp_path / "ckpt")
    with Checkpoint(tmp_path / "ckpt") as found:
        names = ["manifest.json", *found.manifest["files"]]
    for file in names:
        path = tmp_path / "ckpt" / file
        whole = path.read_bytes()
        for at in range(0, len(whole), 5):
            path.write_bytes(whole[:at] if how == "cut" else whole[:at] + bytes([whole[at] ^ 0x11]) + whole[at + 1 :])
            flipped = rf"{file} is damaged: block {at // 1000} .*Load an older"
            told = flipped if how == "flipped" and file != names[0] else "ckpt"
            with pytest.raises(CheckpointError, match=told), Checkpoint(tmp_path / "ckpt") as damaged:
                damaged.verify()
            if at % 500 == 0:
                name = store_name()
                with pytest.raises(CheckpointError, match=told):
                    gt.Store.load(tmp_path / "ckpt", name)
                assert not Path(f"/dev/shm/geartrain.{name}").exists(), "a load that failed leaves no store"
        path.write_bytes(whole)
    gt.Store.load(tmp_path / "ckpt").close()


def test_a_short_missing_or_altered_part_is_named(saved: Path, store_name: Any) -> None:
    chunk = saved / chunks(saved)[0]
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match=rf"{chunk.name} has \d+ bytes"):
        gt.Store.load(saved, store_name())
    chunk.unlink()
    with pytest.raises(CheckpointError, match=rf"{chunk.name} is missing"):
        gt.Store.load(saved, store_name())
    chunk.write_bytes(whole)
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


def unreadable(path: Path) -> None:
    """Has a file's name lead to one that is regular and cannot be read: EIO."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


def test_a_manifest_that_the_disk_cannot_read_is_named(saved: Path, store_name: Any) -> None:
    unreadable(saved / "manifest.json")
    told = rf"{saved}/manifest\.json cannot be read: Input/output error"
    with pytest.raises(CheckpointError, match=told):
        gt.Store.load(saved, store_name())
    with gt.Store.create(store_name(), FIELDS, max_length=20, capacity=8) as store:
        with pytest.raises(CheckpointError, match=told):  # it may be another's: nothing is replaced
            store.save(saved)
        with pytest.raises(CheckpointError, match=told):
            store.save(saved.with_name("next"), base=saved)
    assert (saved / "rows.bin").exists()


@pytest.mark.parametrize("number", [0, 1])
def test_a_file_that_the_disk_cannot_read_is_named(saved: Path, number: int) -> None:
    file = ["rows.bin", *chunks(saved)][number]
    with Checkpoint(saved) as found:
        records = found.records()
        unreadable(saved / file)
        told = rf"{saved}/{file} cannot be read: Input/output error"
        with pytest.raises(CheckpointError, match=told):
            found.verify()
        if number == 1:
            with pytest.raises(CheckpointError, match=told):
                found.row_blocks(records, 0, 2, "obs")
            with pytest.raises(CheckpointError, match=told):
                found.values(records, "id")


def test_another_version_and_unknown_options_are_refused(saved: Path, store_name: Any) -> None:
    with pytest.raises(CheckpointError, match="capacity"):
        gt.Store.load(saved, store_name(), capacity=7)
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["version"] = 99
    del manifest["checksum"]
    write_json(saved / "manifest.json", manifest)
    with pytest.raises(CheckpointError, match="version 99"):
        gt.Store.load(saved, store_name())


def test_a_row_table_that_contradicts_itself_is_refused(store_name: Any) -> None:
    with gt.Store.create(store_name(), FIELDS, max_length=20, capacity=2) as store:
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
    with gt.Store.create(store_name(), FIELDS, max_length=20, capacity=300) as store:
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
    with gt.Store.create(store_name(), FIELDS, max_length=20, capacity=10) as store:
        fill(store, 10)
        real = saving._native.fetch

        def overwriting(*args: Any) -> Any:
            fill(store, 3, seed=2)  # evicts the three oldest before they are copied
            return real(*args)

        monkeypatch.setattr(saving._native, "fetch", overwriting)
        store.save(tmp_path / "ckpt")
        monkeypatch.undo()
        with HeldDirectory(tmp_path / "ckpt") as held:
            manifest = manifest_of(held)
        assert (manifest["rows"], manifest["rows_left_out"]) == (7, 3)
        with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
            assert len(restored) == 7 and restored.audit() == []


def test_the_bytes_of_a_checkpoint_are_the_documented_ones(store_name: Any, tmp_path: Path) -> None:
    fields = {"x": gt.Field((), "uint16"), "flag": gt.Field((), "bool", per_row=True)}
    with gt.Store.create(store_name(), fields, max_length=2, capacity=3) as store:
        store.insert(
            {"x": np.array([[1, 2], [3, 4]], np.uint16), "flag": np.array([True, False])},
            priorities=[1.0, 0.5],
            versions=[7, -1],
        )
        store.save(tmp_path / "ckpt")
        at = store.status()["inserted_at_ns"].tolist()
        store_id = store.native.describe()["store_id"]
    ckpt = tmp_path / "ckpt"
    (chunk,) = chunks(ckpt)
    assert (ckpt / chunk).read_bytes() == bytes([1, 0, 2, 0, 3, 0, 4, 0, 1, 0])
    assert (ckpt / "rows.bin").read_bytes() == b"".join(
        [
            struct.pack("<QQqIIIIIIII", 1, at[0], 7, 0, 1, 65536, 2, 0, 0, 0, 2),
            struct.pack("<QQqIIIIIIII", 2, at[1], -1, 1, 1, 32768, 2, 0, 0, 1, 2),
            struct.pack("<QQqIIIIIIII", 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0),
        ]
    )
    manifest = json.loads((ckpt / "manifest.json").read_text())
    assert manifest["format"] == "geartrain-checkpoint" and manifest["version"] == 6
    assert manifest["fields"][0] == {"name": "x", "shape": [2], "dtype": "uint16", "timed": True}
    assert manifest["chunks"] == [{"file": chunk, "bytes": 10}]
    assert int(manifest["store"]["id"], 16) == store_id


@pytest.mark.slow
def test_a_checkpoint_larger_than_two_gigabytes_comes_back(store_name: Any, tmp_path: Path) -> None:
    fields = {"x": gt.Field((1 << 20,), "uint8", per_row=True)}
    with gt.Store.create(store_name(), fields, capacity=2200) as store:
        block = np.arange(1 << 20, dtype=np.uint64).astype(np.uint8)
        for i in range(2200):
            with store.row() as row:
                row["x"], row.length = block, 1
                row["x"][:8] = np.frombuffer(struct.pack("<Q", i), np.uint8)
        store.save(tmp_path / "ckpt")
        assert sum(path.stat().st_size for path in (tmp_path / "ckpt").glob("chunk-*.bin")) > 2**31
    with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
        column = restored.column("x")
        for i in (0, 1, 2047, 2048, 2199):
            assert struct.unpack("<Q", column[i, :8].tobytes())[0] == i
            assert np.array_equal(column[i, 8:], block[8:])


def test_a_save_takes_two_chunks_of_memory_and_gives_them_back(store_name: Any, tmp_path: Path) -> None:
    with gt.Store.create(store_name(), {"x": gt.Field((1 << 20,), "uint8", per_row=True)}, capacity=160) as store:
        for _ in range(10):
            store.insert({"x": np.ones((16, 1 << 20), np.uint8)})
        before, kept, most = private_bytes(), _native.pool_counts()["bytes_kept"], [0]
        write = saving.PieceWriter.write

        def look(writer: saving.PieceWriter, array: Any) -> None:
            most.append(private_bytes())
            write(writer, array)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saving.PieceWriter, "write", look)
            store.save(tmp_path / "ckpt")
        assert max(most) - before < (64 + 8) << 20
        assert private_bytes() - before < 8 << 20
        assert _native.pool_counts()["bytes_kept"] - kept < 8 << 20


def private_bytes() -> int:
    """Memory of this process that is neither a file's nor shared."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10
