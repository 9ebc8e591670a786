"""Files of an export: what is there is replaced only when asked, and an export that ends early leaves nothing."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported import PATHS, same
from imports import imported, store_name
from mounts import file_system

import geartrain as gt
from geartrain.errors import ArgumentError, DatasetExistsError, NoSpaceError
from geartrain.integrations import export_store
from geartrain.integrations.datasets.export_arrays import NpyWriter


@pytest.mark.parametrize("path", ["", " ", "a\0b", "\udcff", 5, None])
def test_what_is_no_path_is_refused(path: Any, store: gt.Store) -> None:
    with pytest.raises(ArgumentError, match="path"):
        export_store(store, path, format="npy", progress=False)


@pytest.mark.parametrize("format", PATHS)
def test_what_is_there_is_replaced_only_when_asked_and_only_by_its_like(
    format: str, store: gt.Store, tmp_path: Path
) -> None:
    path = tmp_path / PATHS[format]
    export_store(store, path, format=format, fields=["obs", "goal"], progress=False)
    with pytest.raises(DatasetExistsError, match="exists already"):
        export_store(store, path, format=format, progress=False)
    link = tmp_path / "link"
    link.symlink_to(path)
    export_store(store, link, format=format, overwrite=True, progress=False)
    assert link.is_symlink()
    with imported(path) as found:
        same(found, store)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    with pytest.raises(DatasetExistsError, match="is not replaced"):
        export_store(store, mine, format=format, overwrite=True, progress=False)
    assert (mine / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("format", "files"),
    [
        ("npz", ["rows.npz/mine.npy"]),
        ("npz", ["rows.npz/"]),
        ("npz", ["rows.npz"]),
        ("parquet", ["rows.parquet/mine.parquet"]),
        ("parquet", ["rows.parquet/"]),
        ("npy", ["rows/weights.npy"]),
        ("npy", ["rows/ends.npy", "rows/thesis.tex"]),
        ("npy", ["rows/ends.npy", "rows/more.npy/thesis.tex"]),
        ("npy", ["rows/ends.npy", "rows/linked.npy -> thesis.tex"]),
        ("lerobot", ["rows/meta/info.json", "rows/thesis.tex"]),
        ("lerobot", ["rows/meta/info.json", "rows/data/thesis.tex"]),
        ("lerobot", ["rows/meta/info.json", "rows/data -> meta"]),
        ("lerobot", ["rows/meta/info.json", "rows/data/chunk-000 -> ../meta"]),
        ("minari", ["rows/data/metadata.json", "rows/thesis.tex"]),
        ("minari", ["rows/data/metadata.json", "rows/data/code/thesis.tex"]),
        ("minari", ["rows/metadata.json", "rows/thesis.tex"]),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_a_folder_with_files_of_others_is_never_replaced(
    format: str, files: list[str], store: gt.Store, tmp_path: Path
) -> None:
    about = json.dumps({"codebase_version": "v3.0", "data_format": "hdf5"})
    for file in files:
        name, _, link = file.partition(" -> ")
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if link:
            path.symlink_to(link)
        elif name.endswith("/"):
            path.mkdir()
        else:
            path.write_text(about)
    before = sorted(tmp_path.rglob("*"))
    options: dict[str, Any] = {"fps": 5} if format == "lerobot" else {}
    with pytest.raises(DatasetExistsError, match="is not replaced"):
        export_store(
            store, before[0], format=format, fields="obs", skip_unsupported=True, overwrite=True, progress=False,
            **options,
        )  # fmt: skip
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_is_replaced_by_a_folder(store: gt.Store, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    export_store(store, tmp_path / "rows", format="npy", overwrite=True, progress=False)
    with imported(tmp_path / "rows") as found:
        same(found, store)


def test_a_dataset_that_somebody_else_writes_meanwhile_stays(
    store: gt.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = NpyWriter.finish

    def beaten(self: NpyWriter) -> None:
        finish(self)
        (tmp_path / "x.npz").write_text("theirs")

    monkeypatch.setattr(NpyWriter, "finish", beaten)
    with pytest.raises(DatasetExistsError, match="another process wrote"):
        export_store(store, tmp_path / "x.npz", progress=False)
    assert [each.read_text() for each in tmp_path.iterdir()] == ["theirs"]


def test_a_path_that_cannot_be_written_is_an_error_before_any_work(store: gt.Store, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="its folder does not exist"):
        export_store(store, tmp_path / "missing" / "x.npz", progress=False)
    with pytest.raises(OSError, match="cannot be written"):
        export_store(store, "/proc/x.npz", progress=False)
    with pytest.raises(ArgumentError, match="has a name of 259 bytes, and file systems take at most 255"):
        export_store(store, tmp_path / ("x" * 255 + ".npz"), progress=False)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("format", [*PATHS, "lerobot"])
def test_a_full_disk_is_one_error_and_leaves_nothing(format: str, tmp_path: Path) -> None:
    fields = {"obs": gt.Field((1000,), "uint8")}
    with gt.Store.create(store_name(), fields, max_length=100, capacity=40) as store:
        rng = np.random.default_rng(0)
        store.insert({"obs": rng.integers(0, 256, (40, 100, 1000), np.uint8)})
        with file_system(tmp_path, "2m"):
            needs_to_know = format in ("npz", "npy")
            with pytest.raises(NoSpaceError, match="needs 4,000,320 bytes" if needs_to_know else "No space left"):
                options = {"fps": 5} if format == "lerobot" else {}
                export_store(store, tmp_path / "x", format=format, progress=False, **options)
            assert not any(tmp_path.iterdir())
            if needs_to_know:  # what the check beforehand cannot see
                before = NpyWriter.needed_bytes
                try:
                    NpyWriter.needed_bytes = classmethod(lambda *_: 0)  # type: ignore[assignment, method-assign]
                    with pytest.raises(NoSpaceError, match="No space left"):
                        export_store(store, tmp_path / "x", format="npy", progress=False)
                finally:
                    NpyWriter.needed_bytes = before  # type: ignore[method-assign]
                assert not any(tmp_path.iterdir())


def test_a_limit_of_file_sizes_is_named(store: gt.Store, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        with pytest.raises(NoSpaceError, match="File too large"):
            export_store(store, tmp_path / "x", format="npy", progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not any(tmp_path.iterdir())


def test_an_interrupt_leaves_nothing(store: gt.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: NpyWriter, group: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(NpyWriter, "write", interrupted)
    for path in ("x.npz", "x"):
        with pytest.raises(KeyboardInterrupt):
            export_store(store, tmp_path / path, format="npz" if "." in path else "npy", progress=False)
    assert not any(tmp_path.iterdir())


def test_sigterm_leaves_nothing_of_the_command(
    store: gt.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Callable[..., Any]
) -> None:
    def terminated(self: NpyWriter, group: Any) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_BLOCK, [])  # a point where pending handlers run
        raise AssertionError("no handler")

    def unhandled(*_: object) -> None:
        raise AssertionError("the handler from before")

    monkeypatch.setattr(NpyWriter, "write", terminated)
    before = signal.signal(signal.SIGTERM, unhandled)
    try:
        done = run_command("export", store.name, str(tmp_path / "x.npz"), "--quiet")
        assert signal.getsignal(signal.SIGTERM) is unhandled
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done.exit_code == 143, done.output
    assert "stopped by SIGTERM" in done.stderr
    assert not any(tmp_path.iterdir())


def test_leftovers_of_a_killed_export_are_removed_by_the_next(
    store: gt.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = NpyWriter.write
    mine = tmp_path / ".x.npz.mine.saving.lock"
    mine.touch()

    def killed(self: NpyWriter, group: Any) -> int:
        os._exit(9)

    monkeypatch.setattr(NpyWriter, "write", killed)
    child = os.fork()
    if child == 0:
        export_store(store, tmp_path / "x.npz", progress=False)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert any(tmp_path.glob(".x.npz.*.saving/parts"))
    found: list[str] = []

    def beside(self: NpyWriter, group: Any) -> int:
        if not found:  # another export to the same path, while this one is at work
            found.extend(each.name for each in tmp_path.iterdir() if each != mine)
            export_store(store, tmp_path / "x.npz", progress=False)
        return write(self, group)

    monkeypatch.setattr(NpyWriter, "write", beside)
    with pytest.raises(DatasetExistsError, match="another process wrote"):
        export_store(store, tmp_path / "x.npz", progress=False)
    assert len(found) == 1, "the folder of the export at work"
    assert sorted(each.name for each in tmp_path.iterdir()) == [mine.name, "x.npz"]
    with imported(tmp_path / "x.npz") as again:
        same(again, store)


def test_a_file_has_the_mode_that_the_umask_leaves(store: gt.Store, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export_store(store, tmp_path / "x.npz", progress=False)
    finally:
        os.umask(before)
    assert (tmp_path / "x.npz").stat().st_mode & 0o777 == 0o640
