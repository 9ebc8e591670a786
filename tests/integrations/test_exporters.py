"""Export of stores and checkpoints: what comes back is what was there, to the bit; nothing is lost without a word."""

from __future__ import annotations

import json
import logging
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from exported import FIELDS, PATHS, fill, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from imports import imported, rows, store_name

import geartrain as gt
import geartrain.integrations.datasets.stored_rows as stored_rows
from geartrain.core.dtypes import DTYPES
from geartrain.errors import (
    ArgumentError,
    CheckpointError,
    SourceError,
    StoreClosedError,
    StoreMissingError,
)
from geartrain.integrations import export_store
from geartrain.integrations.datasets.export_arrays import NpyWriter
from geartrain.store.checkpoint_reader import Checkpoint

NUMPY_DTYPES = [name for name, dtype in DTYPES.items() if dtype.numpy_name is not None]

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
            row.extend(4)
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
            with pytest.raises(SourceError, match="has no row to export"):
                export_store(store, tmp_path / path, format="npy", progress=False)
    assert not any(tmp_path.iterdir())
    with pytest.raises(StoreClosedError):
        export_store(store, tmp_path / "x.npz", progress=False)
    with pytest.raises(StoreMissingError):
        export_store("no-such-store", tmp_path / "x.npz", progress=False)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "hdf5"}, ArgumentError, "format is one of .*, found 'hdf5'"),
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
