"""Checkpoints that are read while others are saved to the same path, by any number of processes."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import patience

import geartrain as gt
import geartrain.store.checkpoint_chunks as saving
from geartrain.errors import CheckpointError
from geartrain.store.checkpoint_reader import Checkpoint

FIELDS = {"id": gt.Field((), "int64", per_row=True), "x": gt.Field((100,), "int64", per_row=True)}
CAPACITY = 60
# The command is an extra of its own; where it is not installed, loads are tried alone.
COMMAND = importlib.util.find_spec("typer") is not None


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "CHUNK_BYTES", 8000)  # ten rows
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no test pulls the plug


def put(store: gt.Store, first: int, n: int) -> None:
    ids = np.arange(first, first + n)
    store.insert({"id": ids, "x": np.repeat(ids, 100).reshape(n, 100)})


def ids_of(store: gt.Store) -> list[int]:
    """The ids of a store's rows, sorted, once every row was found to be whole."""
    batch = gt.fetch(store, store.keys(), output="numpy")
    assert (batch["x"] == batch["id"][:, None]).all()
    found: list[int] = sorted(batch["id"].tolist())
    return found


def save_for_ever(name: str, directory: Path, incremental: bool) -> Callable[[], None]:
    def run() -> None:
        store = gt.Store.open(name)
        first = 1_000_000 * os.getpid()
        while True:
            put(store, first, 7)
            first += 7
            store.save(directory, incremental=incremental)

    return run


@contextmanager
def running(fork: Callable[[Callable[[], object]], int], *bodies: Callable[[], object]) -> Iterator[None]:
    """Processes that run until the block ends, and are found alive then."""
    children = [fork(body) for body in bodies]
    try:
        yield
        for child in children:
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "a saver ended"
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def inspected(directory: Path) -> dict[str, Any]:
    """What `geartrain inspect DIRECTORY --json` says."""
    from typer.testing import CliRunner

    from geartrain.tools.cli.app import app

    shown = CliRunner().invoke(app, ["inspect", str(directory), "--json"])
    assert shown.exit_code == 0, shown.output
    return dict(json.loads(shown.output))


@pytest.mark.parametrize("times", [10, pytest.param(1000, marks=pytest.mark.long)])
def test_a_load_beside_saves_to_the_same_path_gets_one_of_them(
    store_name: Any, tmp_path: Path, fork: Any, times: int
) -> None:
    """Loads while two processes save to the same path, one of them without links."""
    with gt.Store.create(store_name(), FIELDS, capacity=CAPACITY) as store:
        put(store, 0, CAPACITY)
        store.save(tmp_path / "ckpt")
        bodies = [save_for_ever(store.name, tmp_path / "ckpt", incremental) for incremental in (True, False)]
        rng, saves = np.random.default_rng(0), set()
        with running(fork, *bodies):
            for _ in range(times):
                time.sleep(float(rng.uniform(0, 0.002)))
                with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
                    ids = ids_of(restored)
                    assert restored.audit() == []
                    saves.add(tuple(ids))
                if COMMAND:
                    assert inspected(tmp_path / "ckpt")["rows"] <= CAPACITY
        assert len(saves) > 1
        store.save(tmp_path / "ckpt")  # it removes what the killed ones have left
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".making")] == ["ckpt"]


def test_a_load_beside_saves_on_a_file_system_without_locks_starts_again(
    store_name: Any, tmp_path: Path, fork: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with gt.Store.create(store_name(), FIELDS, capacity=CAPACITY) as store:
        put(store, 0, CAPACITY)
        store.save(tmp_path / "ckpt", incremental=False)
        real, replaced = Checkpoint.records, []

        def replacing(self: Checkpoint) -> Any:
            if len(replaced) < 2:
                replaced.append(store.save(tmp_path / "ckpt", incremental=False))
            return real(self)

        monkeypatch.setattr(Checkpoint, "records", replacing)
        with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
            assert ids_of(restored) == list(range(CAPACITY))
        assert len(replaced) == 2


def test_what_is_open_stays_as_it_was_and_is_removed_by_its_last_reader(store_name: Any, tmp_path: Path) -> None:
    with gt.Store.create(store_name(), FIELDS, capacity=CAPACITY) as store:
        put(store, 0, CAPACITY)
        store.save(tmp_path / "ckpt")
        one, other = Checkpoint(tmp_path / "ckpt"), Checkpoint(tmp_path / "ckpt")
        for first in (1000, 2000, 3000):
            put(store, first, CAPACITY)
            store.save(tmp_path / "ckpt")
        assert len(list(tmp_path.iterdir())) == 2  # what is read, and the newest
        with gt.Store.load(one, store_name()) as restored:
            assert ids_of(restored) == list(range(CAPACITY))
        one.close()
        one.close()
        with pytest.raises(CheckpointError, match="was closed"):
            one.records()
        assert len(other.records()) == CAPACITY
        other.close()
        assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
        with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
            assert ids_of(restored) == list(range(3000, 3000 + CAPACITY))


def test_a_base_that_is_replaced_while_it_is_read_gives_no_wrong_rows(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The manifest of one checkpoint and the row table of the next would place rows in chunks of other rows.
    with gt.Store.create(store_name(), FIELDS, capacity=CAPACITY) as store:
        put(store, 0, CAPACITY)
        store.save(tmp_path / "ckpt")
        real, replaced = Checkpoint.__init__, []

        def replacing(self: Checkpoint, directory: Path) -> None:
            if not replaced:
                replaced.append(True)
                put(store, 1000, 25)
                store.save(tmp_path / "ckpt", incremental=False)
            real(self, directory)

        monkeypatch.setattr(Checkpoint, "__init__", replacing)
        store.save(tmp_path / "ckpt")
        assert replaced
        with gt.Store.load(tmp_path / "ckpt", store_name()) as restored:
            assert ids_of(restored) == ids_of(store) == [*range(25, CAPACITY), *range(1000, 1025)]


def test_savers_that_all_make_the_same_new_checkpoint_succeed(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gt.Store.create(store_name(), FIELDS, capacity=CAPACITY) as store:
        put(store, 0, CAPACITY)
        together, real = threading.Barrier(4), saving.write_json

        def write_json(*args: Any) -> None:  # the last before it gets its name
            real(*args)
            together.wait(patience(10))

        monkeypatch.setattr(saving, "write_json", write_json)
        for number in range(8):
            with ThreadPoolExecutor(4) as pool:
                for saved in [
                    pool.submit(store.save, tmp_path / f"ckpt-{number}", incremental=False) for _ in range(4)
                ]:
                    saved.result(patience(20))
            with gt.Store.load(tmp_path / f"ckpt-{number}", store_name()) as restored:
                assert ids_of(restored) == list(range(CAPACITY))
    assert len(list(tmp_path.iterdir())) == 8


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", ".", "pipe"])
def test_a_manifest_names_files_of_its_directory_only(store_name: Any, tmp_path: Path, name: str) -> None:
    with gt.Store.create(store_name(), FIELDS, capacity=CAPACITY) as store:
        put(store, 0, 5)
        store.save(tmp_path / "ckpt")
    os.mkfifo(tmp_path / "ckpt" / "pipe")
    (tmp_path / "secret").write_bytes(b"x")
    path = tmp_path / "ckpt" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    manifest["files"][name] = {"bytes": 1, "piece_bytes": 1, "crc32": [0]}
    saving.write_json(path, manifest)
    with pytest.raises(CheckpointError, match=r"is not the name of a file in|is not a file"):
        gt.Store.load(tmp_path / "ckpt", store_name())
