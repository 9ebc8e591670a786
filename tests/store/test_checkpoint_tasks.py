"""Checkpoints of stores with axes, strings or tasks: rows in all states come back, and only what is new is written."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from saved_stores import small_files
from tasked_stores import INSERTED, answer, contents, everything, in_all_states, insert, make_store, reward

import geartrain as gt
from geartrain.errors import ArgumentError, CheckpointError, WaitTimeoutError
from geartrain.store.checkpoint_chunks import PieceWriter
from geartrain.store.checkpoint_reader import Checkpoint


def test_a_checkpoint_brings_back_rows_in_all_states(tmp_path: Path) -> None:
    with in_all_states() as store:
        assert store.save(tmp_path / "ckpt").rows == 6
        with gt.Store.load(tmp_path / "ckpt") as loaded:
            assert loaded.native.audit() == []
            assert everything(loaded) == everything(store)
            assert loaded.fields == store.fields and loaded.tasks == store.tasks
            assert [part.tolist() for part in loaded.native.taken(5)] == [
                part.tolist() for part in store.native.taken(5)
            ]
            stats = loaded.task_stats()
            assert [stats[name]["due"] for name in ("answer", "reward")] == [2, 1]  # claims came back
            claim = loaded.claim("answer", 1)
            assert claim["number"].tolist() == [4]
            assert not next(iter(claim)).partial  # only what is done is kept
            claim.put(ids=[[1, 2]], length=[[1, 1]])
            reward(loaded, 2)
            insert(loaded, 7)
            assert loaded.native.audit() == []


def test_a_store_with_axes_and_no_tasks_is_saved(tmp_path: Path) -> None:
    fields = {"chosen": gt.Field(("chosen",), "int32"), "text": gt.Text(), "id": gt.Field((), "int64")}
    with gt.Store.create(fields, capacity=4, span_bytes=1 << 14) as store:
        store.insert({"chosen": [[1, 2], [], [3]], "text": ["a", "", "c"], "id": [5, 6, 7]})
        store.delete(store.keys()[1:2])
        store.save(tmp_path / "ckpt")
        with gt.Store.load(tmp_path / "ckpt") as loaded:
            assert contents(loaded) == contents(store)
            assert loaded.keys() == store.keys()
            assert loaded.native.audit() == []


def test_a_key_of_a_row_that_was_freed_stays_stale(tmp_path: Path) -> None:
    with make_store() as store:
        insert(store, 0)
        answer(store, 1)
        reward(store, 1)
        key = store.keys()
        store.delete(key)
        store.save(tmp_path / "ckpt")
        with gt.Store.load(tmp_path / "ckpt") as loaded:
            insert(loaded, *range(8))
            assert loaded.delete(gt.Keys.of_rows(key.row, key.generation, loaded.id)) == 1


def test_only_what_is_new_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_files(monkeypatch, chunk_bytes=1 << 20, piece_bytes=1000)
    with make_store(capacity=64, span_bytes=1 << 20) as store:
        insert(store, *[1000] * 30)
        first = store.save(tmp_path / "ckpt")
        answer(store, 4)
        second = store.save(tmp_path / "ckpt")
        assert second.bytes_linked > 100_000 and second.bytes_written < first.bytes_written - 100_000
        with gt.Store.load(tmp_path / "ckpt") as loaded:
            assert everything(loaded) == everything(store)
            reward(loaded, 4)
            third = loaded.save(tmp_path / "ckpt")
            assert third.not_linked is None and third.bytes_linked > 100_000
            with gt.Store.load(tmp_path / "ckpt") as again:
                assert everything(again) == everything(loaded)


def test_dead_bytes_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_files(monkeypatch, chunk_bytes=20_000, piece_bytes=1000)
    with make_store(capacity=16, span_bytes=1 << 18) as store:
        for number in range(40):
            insert(store, 500)
            answer(store, 1)
            reward(store, 1)
            if number >= 8:
                store.delete(store.keys()[:1])
            store.save(tmp_path / "ckpt")
        with Checkpoint(tmp_path / "ckpt") as found:
            living = int(found.parts()["bytes"].sum())
            on_disk = sum(chunk["bytes"] for chunk in found.manifest["chunks"])
            assert on_disk <= 1.5 * living + 1
        with gt.Store.load(tmp_path / "ckpt") as loaded:
            assert everything(loaded) == everything(store)


def test_rows_that_are_worked_on_are_saved_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_files(monkeypatch, chunk_bytes=2000, piece_bytes=1000)
    over = threading.Event()
    with make_store(capacity=32, span_bytes=1 << 18) as store:

        def load_prompts() -> None:
            number = 0
            while not over.is_set():
                number += 1
                row = {"number": [number], "prompt": [[number] * 50], "text": [str(number)]}
                with suppress(WaitTimeoutError):
                    store.insert(row, timeout_s=0.2)

        def do_answers() -> None:
            while not over.is_set():
                if claim := store.claim("answer", 3):
                    numbers = claim["number"].tolist()
                    claim.put(ids=[[n] * 30 for n in numbers], length=[[10, 20]] * len(numbers))

        def do_rewards() -> None:
            while not over.is_set():
                if claim := store.claim("reward", 3):
                    numbers = claim["number"].tolist()
                    claim.put(reward=[[n, n] for n in numbers], why=[[str(n)] * 2 for n in numbers])

        def train() -> None:
            while not over.is_set():
                store.delete(store.keys()[:2])

        threads = [threading.Thread(target=work) for work in (load_prompts, do_answers, do_rewards, train)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(15):
                saved = store.save(tmp_path / "ckpt")
                assert saved.left_out == 0
                with gt.Store.load(tmp_path / "ckpt") as loaded:
                    assert loaded.native.audit() == []
                    check_numbers(loaded)
        finally:
            over.set()
            for thread in threads:
                thread.join()


def check_numbers(store: gt.Store) -> None:
    """Every part of every row has the number of its row."""
    while claim := store.claim("answer", 100):
        numbers = claim["number"].tolist()
        assert claim["prompt"].numpy().tolist() == [n for n in numbers for _ in range(50)]
        claim.put(ids=[[n] * 30 for n in numbers], length=[[10, 20]] * len(numbers))
    while claim := store.claim("reward", 100):
        numbers = claim["number"].tolist()
        assert claim["ids"].numpy().tolist() == [n for n in numbers for _ in range(30)]
        claim.put(reward=[[n, n] for n in numbers], why=[[str(n)] * 2 for n in numbers])
    if len(store):
        batch = gt.fetch(store, store.keys(), output="numpy")
        numbers = batch["number"].tolist()
        assert batch["reward"].tolist() == [n for n in numbers for _ in range(2)]
        assert list(batch["why"]) == [str(n) for n in numbers for _ in range(2)]


def test_a_store_that_is_only_read_is_not_saved(tmp_path: Path) -> None:
    name = f"{tmp_path}/store"
    gt.Store.create(name, INSERTED, capacity=4, span_bytes=1 << 14).close()
    with gt.Store.open(name, mode="r") as store, pytest.raises(ArgumentError, match="open it for writing"):
        store.save(tmp_path / "ckpt")


def test_a_save_that_fails_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_files(monkeypatch, chunk_bytes=500, piece_bytes=1000)
    with make_store(capacity=16) as store:
        insert(store, *range(4))
        store.save(tmp_path / "ckpt")
        before = everything(store)
        answer(store, 4)
        insert(store, *range(4))
        write = PieceWriter.write
        for calls in range(7):  # of the writer: chunks, tables
            left = [calls]

            def fails(writer: Any, array: Any, left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(5, "Input/output error")
                write(writer, array)

            with monkeypatch.context() as patch:
                patch.setattr(PieceWriter, "write", fails)
                with suppress(CheckpointError):
                    store.save(tmp_path / "ckpt")
                    break
            with gt.Store.load(tmp_path / "ckpt") as loaded:
                assert everything(loaded)["parts"] == before["parts"]
        assert calls > 2
        with gt.Store.load(tmp_path / "ckpt") as loaded:
            assert everything(loaded)["parts"] == everything(store)["parts"]


def test_a_checkpoint_with_tasks_is_these_bytes(tmp_path: Path) -> None:
    golden = Path(__file__).parent / "data" / "checkpoint-with-tasks"
    with gt.Store.load(golden) as store:
        assert store.native.audit() == []
        with in_all_states() as made:
            assert without_times(everything(store)) == without_times(everything(made))
            assert store.fields == made.fields and store.tasks == made.tasks and store.options == made.options
        store.save(tmp_path / "again")
    for file in ("rows.bin", "parts.bin"):
        assert (tmp_path / "again" / file).read_bytes() == (golden / file).read_bytes()
    manifests = [json.loads((place / "manifest.json").read_text()) for place in (golden, tmp_path / "again")]
    chunks = [manifest["chunks"][0]["file"] for manifest in manifests]
    assert (golden / chunks[0]).read_bytes() == (tmp_path / "again" / chunks[1]).read_bytes()
    for name in ("places", "axes", "tasks", "fields", "options", "state", "rows", "listed_rows", "parts", "version"):
        assert manifests[0][name] == manifests[1][name], name


def without_times(found: dict[str, Any]) -> dict[str, Any]:
    rows = {row: [*values[:1], *values[2:]] for row, values in found["rows"].items()}
    return {**found, "rows": rows}
