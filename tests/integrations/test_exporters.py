"""Export of stores and checkpoints: what comes back is what was there, to the bit; nothing is lost without a word."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from imports import imported, rows, store_name
from mounts import file_system

import geartrain as gt
import geartrain.integrations.datasets.stored_rows as stored_rows
from geartrain.core.dtypes import DTYPES
from geartrain.errors import (
    ArgumentError,
    CheckpointError,
    DatasetExistsError,
    NoSpaceError,
    SourceError,
    StoreClosedError,
    StoreMissingError,
)
from geartrain.integrations import export_store
from geartrain.integrations.datasets.export_arrays import NpyWriter
from geartrain.store.checkpoint_reader import Checkpoint

FIELDS = {
    "obs": gt.Field((3,), "float32"),
    "action": gt.Field((), "int64"),
    "goal": gt.Field((2,), "float16", per_row=True),
}
PATHS = {"npz": "rows.npz", "npy": "rows", "parquet": "rows.parquet"}
NUMPY_DTYPES = [name for name, dtype in DTYPES.items() if dtype.numpy_name is not None]


def values(field: gt.Field, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Any bits of the dtype, NaNs and negative zeros among them."""
    if field.dtype == "bool":
        return rng.random((*shape, *field.shape)) < 0.5
    raw = rng.integers(0, 256, (int(np.prod((*shape, *field.shape))) * field.itemsize,), np.uint8)
    return raw.view(field.numpy_dtype).reshape(*shape, *field.shape)


def fill(store: gt.Store, n: int, seed: int = 0) -> np.ndarray:
    """Inserts n ragged rows of random bits; returns their lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, store.max_length + 1, n)
    data = {
        name: values(field, (n,) if field.per_row else (n, store.max_length), rng)
        for name, field in store.fields.items()
    }
    store.insert(data, lengths=lengths)
    return lengths


@pytest.fixture
def store() -> Iterator[gt.Store]:
    with gt.Store.create(store_name(), FIELDS, max_length=7, capacity=20) as made:
        fill(made, 12)
        yield made


def same(found: gt.Store, expected: gt.Store) -> None:
    """Both hold the same rows in the same order: lengths, dtypes, shapes and bytes."""
    assert found.fields == expected.fields
    mine, theirs = rows(found), rows(expected)
    assert len(mine) == len(theirs)
    for row, other in zip(mine, theirs, strict=True):
        for name, array in other.items():
            assert row[name].shape == array.shape
            assert row[name].tobytes() == array.tobytes(), name


fields_of_any_kind = st.builds(
    gt.Field,
    st.lists(st.integers(1, 3), max_size=3).map(tuple),
    st.sampled_from(NUMPY_DTYPES),
    per_row=st.booleans(),
)


@pytest.mark.parametrize("format", PATHS)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    schema=st.dictionaries(
        st.sampled_from(["obs", "obs.x", "a b", "µ", "reward"]), fields_of_any_kind, min_size=1, max_size=4
    ),
    n=st.integers(1, 9),
    max_length=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_store_comes_back_to_the_bit(
    format: str, schema: dict[str, gt.Field], n: int, max_length: int, seed: int, tmp_path_factory: Any
) -> None:
    if format == "parquet":  # which has no complex numbers
        schema = {name: field for name, field in schema.items() if not field.dtype.startswith("complex")}
        schema = schema or {"obs": gt.Field((2,), "float32")}
    path = tmp_path_factory.mktemp("any") / PATHS[format]
    if all(field.per_row for field in schema.values()):
        max_length = 1
    with gt.Store.create(store_name(), schema, max_length=max_length, capacity=n) as made:
        fill(made, n, seed)
        report = export_store(made, path, format=format, progress=False)
        assert (report.rows, report.overwritten) == (n, 0)
        assert report.steps == int(made.status()["length"].sum())
        with imported(path) as found:
            same(found, made)


@pytest.mark.parametrize("format", PATHS)
def test_groups_of_rows_make_no_difference(
    format: str, store: gt.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_rows, "GROUP_BYTES", 1)  # a row at a time
    report = export_store(store, tmp_path / PATHS[format], format=format, progress=False)
    assert str(report).startswith("12 rows, ")
    with imported(tmp_path / PATHS[format]) as found:
        same(found, store)
    assert [each.name for each in tmp_path.iterdir()] == [PATHS[format]]


@pytest.mark.parametrize("format", PATHS)
def test_a_checkpoint_comes_back_in_the_order_of_its_commits(format: str, tmp_path: Path) -> None:
    with gt.Store.create(store_name(), FIELDS, max_length=5, capacity=9) as store:
        fill(store, 6, 1)
        store.save(tmp_path / "saved")
        fill(store, 7, 2)  # evicts some: the next save links the chunk that has the others
        store.save(tmp_path / "saved")
        path = tmp_path / PATHS[format]
        assert export_store(str(tmp_path / "saved"), path, format=format, metadata=True, progress=False).rows == 9
        with imported(path, fields=list(FIELDS)) as found:
            same(found, store)
        with imported(path) as found:
            about = store.status()
            for name in ("sequence", "version", "priority", "times_sampled", "inserted_at_ns"):
                kept = [row[f"row.{name}"] for row in rows(found)]
                assert np.array(kept).tolist() == about[name].tolist(), name
        with Checkpoint(tmp_path / "saved") as opened:
            export_store(opened, tmp_path / "again.npz", progress=False)
        with imported(tmp_path / "again.npz") as found:
            same(found, store)
        chunk = max((tmp_path / "saved").glob("*.bin"), key=lambda each: each.stat().st_size)
        damaged = bytearray(chunk.read_bytes())
        damaged[3] ^= 1
        chunk.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="first bad"):
            export_store(tmp_path / "saved", tmp_path / "bad.npz", progress=False)
        assert not (tmp_path / "bad.npz").exists()


def test_parquet_is_nested_columns_for_anybody(store: gt.Store, tmp_path: Path) -> None:
    export_store(store, tmp_path / "rows.parquet", progress=False, compression="snappy")
    table = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    for record, row in zip(table, rows(store), strict=True):
        np.testing.assert_array_equal(np.array(record["obs"], "f").reshape(-1, 3), row["obs"])
        assert record["action"] == row["action"].tolist()
        assert len(record["goal"]) == 2


def test_fields_are_chosen_renamed_and_converted_by_name(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    fields = {"w": gt.Field((2,), "bfloat16"), "obs.a": gt.Field((), "uint8"), "obs.b": gt.Field((), "uint8")}
    with gt.Store.create(store_name(), fields, max_length=3, capacity=2) as store:
        w = np.random.default_rng(0).normal(size=(2, 3, 2)).astype(ml_dtypes.bfloat16)
        store.insert({"w": w, "obs.a": np.ones((2, 3), "u1"), "obs.b": np.zeros((2, 3), "u1")})
        with pytest.raises(SourceError, match=r"w \(bfloat16, which Parquet has no type for; cast='bfloat16=float32'"):
            export_store(store, tmp_path / "x.parquet", progress=False)
        report = export_store(
            store, tmp_path / "x.parquet", fields=["state=obs", "w"], cast="bfloat16=float32", progress=False
        )
        with imported(tmp_path / "x.parquet") as found:
            assert set(found.fields) == {"state.a", "state.b", "w"}
            np.testing.assert_array_equal(np.stack([row["w"] for row in rows(found)]), w.astype("f"))
        assert report.left_out == {}
        report = export_store(store, tmp_path / "x.npz", skip_unsupported=True, fields=["w", "obs.a"], progress=False)
        assert set(report.left_out) == {"w", "obs.b"}
        assert "obs.b (not asked for)" in str(report)
        assert "w (bfloat16" in str(report)


def test_rows_that_are_overwritten_meanwhile_are_left_out_and_counted(
    store: gt.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stored_rows, "GROUP_BYTES", 4 * (7 * 20 + 4))  # four rows
    before = rows(store)
    write = NpyWriter.write

    def evicting(self: NpyWriter, group: Any) -> int:
        done = write(self, group)
        if group.first == 0:
            store.delete(store.keys()[5:11])
        return done

    monkeypatch.setattr(NpyWriter, "write", evicting)
    with caplog.at_level(logging.WARNING):
        report = export_store(store, tmp_path / "rows.npz", progress=False)
    assert (report.rows, report.overwritten) == (6, 6)
    assert "6 were overwritten" in caplog.text
    with imported(tmp_path / "rows.npz") as found:
        kept = before[:5] + before[11:]
        for row, other in zip(rows(found), kept, strict=True):
            assert all(row[name].tobytes() == other[name].tobytes() for name in other)


def test_a_row_that_is_being_extended_is_written_as_far_as_it_is(tmp_path: Path) -> None:
    with gt.Store.create(store_name(), {"x": gt.Field((), "int64")}, max_length=9, capacity=3) as store:
        with store.row() as row:
            row["x"][:4] = np.arange(4)
            row.publish(length=2)
            report = export_store(store, tmp_path / "rows.npz", progress=False)
            row.length = 4
    assert (report.rows, report.steps, report.still_open) == (1, 2, 1)
    assert "1 were being extended" in str(report)
    assert np.load(tmp_path / "rows.npz")["x"].tolist() == [0, 1]


@pytest.mark.parametrize("format", PATHS)
def test_memory_is_bounded_by_a_group_of_rows(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rows, "GROUP_BYTES", 1 << 20)
    with gt.Store.create(store_name(), {"x": gt.Field((4096,), "uint8")}, max_length=16, capacity=400) as store:
        for _ in range(400):
            with store.row() as row:
                row["x"][:], row.length = 7, 16
        export_store(store, tmp_path / "warm.npz", progress=False)
        tracemalloc.start()
        try:
            report = export_store(store, tmp_path / PATHS[format], format=format, progress=False)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert report.nbytes == 400 * 16 * 4096
    assert peak < report.nbytes / 4


def test_no_row_is_an_error(tmp_path: Path) -> None:
    with gt.Store.create(store_name(), FIELDS, max_length=7, capacity=20) as store:
        for path in PATHS.values():
            with pytest.raises(SourceError, match="holds no row to export"):
                export_store(store, tmp_path / path, format="npy", progress=False)
    assert not any(tmp_path.iterdir())
    with pytest.raises(StoreClosedError):
        export_store(store, tmp_path / "x.npz", progress=False)
    with pytest.raises(StoreMissingError):
        export_store("no-such-store", tmp_path / "x.npz", progress=False)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "hdf5"}, ArgumentError, "format 'hdf5' is unknown"),
        ({"format": "auto"}, ArgumentError, r"does not end in \.npz or \.parquet"),
        ({"fields": "no"}, SourceError, "has no field 'no'; it has action, goal, obs"),
        ({"cast": "float32"}, ArgumentError, "a cast is found=wanted"),
        ({"compression": "zstd"}, ArgumentError, "the npy exporter has no option compression"),
        ({"format": "npz", "compress": "x"}, ArgumentError, "the option compress of the npz exporter is a bool"),
        ({"format": "parquet", "compression": "rar"}, ArgumentError, "compression is one of"),
        ({"fields": {"ends": "action"}}, SourceError, "the layout has an array 'ends' of its own"),
        ({"fields": {"a/b": "action"}}, SourceError, "no name of a file"),
        ({"format": "lerobot", "metadata": True}, ArgumentError, "no place for the metadata"),
        ({"format": "lerobot"}, SourceError, "goal .once a row"),
        ({"format": "lerobot", "fields": ["obs"]}, ArgumentError, "needs the option fps"),
        ({"format": "minari"}, SourceError, "goal .once a row"),
        ({"format": "minari", "fields": ["obs", "action"]}, SourceError, "have no reward, terminated, truncated"),
        ({"trust": "nobody"}, ArgumentError, "trust"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_told_and_leave_nothing(
    options: dict[str, Any], error: type[Exception], message: str, store: gt.Store, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        export_store(store, tmp_path / "x", **{"format": "npy", "progress": False, **options})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["", " ", "a\0b", "\udcff", 5, None])
def test_what_is_no_path_is_refused(path: Any, store: gt.Store) -> None:
    with pytest.raises(ArgumentError, match="a path is needed"):
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
    with pytest.raises(DatasetExistsError, match="will not be replaced"):
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
    with pytest.raises(DatasetExistsError, match="will not be replaced"):
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
    with pytest.raises(DatasetExistsError, match="somebody else"):
        export_store(store, tmp_path / "x.npz", progress=False)
    assert [each.read_text() for each in tmp_path.iterdir()] == ["theirs"]


def test_a_path_that_cannot_be_written_is_an_error_before_any_work(store: gt.Store, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="its folder does not exist"):
        export_store(store, tmp_path / "missing" / "x.npz", progress=False)
    with pytest.raises(OSError, match="cannot be written"):
        export_store(store, "/proc/x.npz", progress=False)
    with pytest.raises(OSError, match="cannot be written"):
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


def test_a_store_of_the_command_line_is_only_looked_at(
    store: gt.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], run_command: Callable[..., Any]
) -> None:
    before = store.stats()
    done = run_command("export", store.name, str(tmp_path / "x.parquet"))
    assert done.exit_code == 0, done.output
    assert "12 rows" in done.stdout
    assert store.stats() == before
    with imported(tmp_path / "x.parquet") as found:
        same(found, store)
    done = run_command("export", store.name, str(tmp_path / "x.parquet"))
    assert done.exit_code == 1
    assert "exists already" in done.stderr
    done = run_command("export", store.name, str(tmp_path / "x"), "--format", "lerobot", "--field", "obs", "--option",
                       "fps=20", "--quiet")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "x/meta/info.json").read_text())["fps"] == 20


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
    mine = tmp_path / ".x.npz.mine.exporting.lock"
    mine.touch()

    def killed(self: NpyWriter, group: Any) -> int:
        os._exit(9)

    monkeypatch.setattr(NpyWriter, "write", killed)
    child = os.fork()
    if child == 0:
        export_store(store, tmp_path / "x.npz", progress=False)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert any(each.name.endswith(".exporting.parts") for each in tmp_path.iterdir())
    found: list[str] = []

    def beside(self: NpyWriter, group: Any) -> int:
        if not found:  # another export to the same path, while this one is at work
            found.extend(each.name for each in tmp_path.iterdir() if each != mine)
            export_store(store, tmp_path / "x.npz", progress=False)
        return write(self, group)

    monkeypatch.setattr(NpyWriter, "write", beside)
    with pytest.raises(DatasetExistsError, match="somebody else"):
        export_store(store, tmp_path / "x.npz", progress=False)
    assert len(found) == 2, "the parts and the lock of the export at work"
    assert sorted(each.name for each in tmp_path.iterdir()) == [mine.name, "x.npz"]
    with imported(tmp_path / "x.npz") as again:
        same(again, store)


@pytest.fixture
def run_command() -> Callable[..., Any]:
    pytest.importorskip("typer")
    import typer.testing

    from geartrain.tools.cli import app

    return lambda *words: typer.testing.CliRunner().invoke(app, list(words))


def test_a_file_has_the_mode_that_the_umask_leaves(store: gt.Store, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export_store(store, tmp_path / "x.npz", progress=False)
    finally:
        os.umask(before)
    assert (tmp_path / "x.npz").stat().st_mode & 0o777 == 0o640
