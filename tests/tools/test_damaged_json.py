"""Files of JSON and TOML from others, every entry of which may be anything: errors of geartrain's, and no others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_checkpoints import put, save_all, stores_of
from json_damage import as_bytes, damaged, places_of, texts_of_no_object

import geartrain as gt
from geartrain import launch
from geartrain.checkpoints.job import load_checkpoint, newest_step
from geartrain.checkpoints.steps import describe_steps
from geartrain.core import trace
from geartrain.errors import CheckpointError, GeartrainError, JournalError
from geartrain.store.checkpoint_format import json_checksum
from geartrain.store.journal_directory import JournalDirectory
from geartrain.tools.plan import check
from geartrain.tools.plan.machine import DEFAULTS, read_constants, read_result
from geartrain.weights.layout import Schema
from geartrain_bench import plot_saved
from geartrain_bench.harness.timing import BenchResult, Row


def with_checksum(content: Any) -> bytes:
    return as_bytes({**content, "checksum": json_checksum(content)})


def outcome(read: Callable[[], object]) -> str:
    """The name of geartrain's error; "" where it was read. Other errors are raised."""
    try:
        read()
    except GeartrainError as error:
        assert len(str(error)) < 6000
        return type(error).__name__
    return ""


def outcomes(
    path: Path, contents: Iterable[tuple[str, Any]], read: Callable[[], object], encode: Callable[[Any], bytes]
) -> list[str]:
    """How reading ended for each content of a file."""
    found = []
    for what, content in contents:
        path.write_bytes(encode(content))
        try:
            found.append(outcome(read))
        except Exception as error:
            raise AssertionError(what) from error
    return found


@pytest.fixture
def checkpoint(store_name: Any, tmp_path: Path) -> Path:
    """A job's checkpoint of two shards, with a replay's state."""
    state = {"seed": 3, "step": 4, "state": [{"after/0": 5, "after/1": 7}], "exponents": [1.0]}
    with stores_of(store_name, [6, 5]) as stores:
        save_all(stores, tmp_path / "job", state=state)
    return tmp_path / "job"


def test_a_record_of_any_content_is_told_and_ends_nothing(checkpoint: Path) -> None:
    record = checkpoint / "step-00000004" / "replay.json"
    whole = record.read_bytes()
    content = dict(read_result(record))
    del content["checksum"]

    def look() -> None:
        (step,) = describe_steps(checkpoint)
        assert step["complete"] == (step["damaged"] is None)
        assert newest_step(checkpoint) == (4 if step["complete"] else None)
        if not step["complete"]:
            raise CheckpointError(step["damaged"])

    for text in texts_of_no_object():
        record.write_bytes(text)
        with pytest.raises(CheckpointError, match=r"replay\.json is damaged"):
            look()
    found = outcomes(record, damaged(content, 150, 1), look, with_checksum)
    assert set(found) == {"", "CheckpointError"} and found.count("CheckpointError") > 30
    record.unlink()
    os.mkfifo(record)
    with pytest.raises(CheckpointError, match="not a regular file"):
        look()
    record.unlink()
    record.write_bytes(whole)
    look()


@pytest.mark.parametrize("runs", [8, pytest.param(300, marks=pytest.mark.slow)])
def test_loading_by_a_record_of_any_content_ends_in_an_error_or_a_store(
    checkpoint: Path, store_name: Any, runs: int
) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from geartrain.tools.cli.app import app

    record = checkpoint / "step-00000004" / "replay.json"
    content = dict(read_result(record))
    del content["checksum"]

    def load() -> None:
        shown = CliRunner().invoke(app, ["inspect", str(checkpoint)])
        assert shown.exit_code == 0, shown.exception
        name = store_name()
        store, _, _ = load_checkpoint(checkpoint, name, shard=(0, 1), reshard=True)
        with store:
            assert store.audit() == []

    found = outcomes(record, damaged(content, runs, 2), load, with_checksum)
    assert "" in found and "CheckpointError" in found


def test_a_note_of_any_content_adopts_nothing(store_name: Any, tmp_path: Path) -> None:
    name = store_name()
    with stores_of(store_name, [6]) as stores:
        save_all(stores, tmp_path, step=1)
    with gt.Store.create(name, stores[0].fields, max_length=4, capacity=60) as store:
        put(store, 1, 3)
        note = tmp_path / "step-00000001" / f"restored-{store.id:016x}.json"
        for text in texts_of_no_object():
            note.write_bytes(text)
            with pytest.raises(CheckpointError, match="not the one"):
                load_checkpoint(tmp_path, name, adopt=True)


@pytest.mark.parametrize("kind", ["rows", "parts"])
def test_a_journals_manifest_of_any_content_is_an_error_or_a_journal(
    store_name: Any, tmp_path: Path, kind: str
) -> None:
    if kind == "rows":
        fields = {"x": gt.Field((2,), "float32")}
        with gt.Store.create(store_name(), fields, max_length=3, capacity=8, journal=tmp_path / "j") as store:
            store.insert({"x": np.ones((4, 3, 2), "float32")})
    else:
        tasks = {"work": gt.Task({"y": gt.Field(("n",), "int8")}, keep_partial=True), "train": gt.Task(after="work")}
        given: Any = {"capacity": 8, "span_bytes": 1 << 14, "tasks": tasks, "journal": tmp_path / "j"}
        with gt.Store.create(store_name(), {"x": gt.Text(), "z": gt.Field((2,), "int8")}, **given) as store:
            store.insert({"x": ["a", "b"], "z": np.ones((2, 2), "int8")})
    manifest = tmp_path / "j" / "journal.json"
    content = dict(read_result(manifest))
    del content["checksum"]

    def look() -> None:
        JournalDirectory(tmp_path / "j").contents()

    found = outcomes(manifest, damaged(content, 200, 3), look, with_checksum)
    assert set(found) == {"", "JournalError"} and found.count("JournalError") > 80
    for text in texts_of_no_object():
        manifest.write_bytes(text)
        with pytest.raises(JournalError, match="is damaged"):
            look()


def test_a_schema_of_weights_of_any_content_is_an_error_or_a_schema() -> None:
    content = [[["a", "b"], "<f4", [2, 3], 0, 24], [["c"], "<i8", [], 64, 8], [["d"], "<f8", [0, 3], 128, 0]]
    whole = Schema.from_json(as_bytes(content))
    memory = np.zeros(256, "u1")
    assert [view.shape for view in whole.views(memory)] == [(2, 3), (), (0, 3)]

    def look(text: bytes) -> None:
        schema = Schema.from_json(text)
        if schema.nbytes <= len(memory):
            list(schema.views(memory))

    for text in [*texts_of_no_object(), *(as_bytes(one) for _, one in damaged(content, 300, 8))]:
        outcome(lambda text=text: look(text))
    assert outcome(lambda: look(as_bytes([[["d"], "<f8", [0, 2**62, 8], 0, 0]]))) == "IncompatibleStoreError"


def test_a_saved_benchmark_of_any_content_is_drawn_or_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = Row("4 KB x 32, 2 threads", "floor", "sample", "GB/s", 1.0, 1.0, 1.0, 1.0, 1.0)
    result = BenchResult("store", "geartrain bench store", {"cpu": "x", "cores": 2}, {"numpy": "2"}, [row])
    saved = tmp_path / "saved.json"

    def draw() -> None:
        plot_saved(saved, tmp_path / "plot.png")

    drawn = {"case", "p50", "p95", "unit", "machine", "metric", "cpu"}
    shown = [
        one for one in damaged(result.as_json(), 60, 4) if one[0].split("'")[1:2] and one[0].split("'")[1] in drawn
    ]
    found = outcomes(saved, shown[:4], draw, as_bytes)
    assert set(found) <= {"", "ArgumentError"}
    every = damaged(result.as_json(), 200, 5)
    refused = outcomes(saved, every, lambda: BenchResult.of_json(read_result(saved)), as_bytes)
    assert set(refused) == {"", "ArgumentError"}
    for text in texts_of_no_object():
        saved.write_bytes(text)
        assert outcome(draw) == "ArgumentError"


def test_a_measurement_of_any_content_is_compared_or_refused(tmp_path: Path) -> None:
    case = {
        "case": "200 Mbit/s", "arm": "ordered", "strategy": "uniform", "hosts": 2, "ranks": 2, "batch": 8, "rows": 100,
        "row_bytes": 100, "link_gbit": 0.2, "train_ms": 0.0, "moved_bytes": 1.0, "median_samples_per_s": 2.0,
    }  # fmt: skip
    content = {"bench": "ranks", "constants": DEFAULTS.as_json(), "cases": [case]}
    path = tmp_path / "ranks.json"

    def look() -> None:
        read_constants(path)
        check(read_result(path))

    assert len(places_of(content)) > 25
    found = outcomes(path, damaged(content, 60, 6), look, as_bytes)
    assert set(found) == {"", "ArgumentError"}
    for text in texts_of_no_object():
        path.write_bytes(text)
        assert outcome(look) == "ArgumentError"


def test_a_trace_of_any_content_is_read_or_refused(tmp_path: Path) -> None:
    event = {"ph": "X", "pid": 1, "tid": 2, "name": "sample", "ts": 1.0, "dur": 2.0, "cat": "replay", "args": {"n": 1}}
    named = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "x", "wall_offset_us": 0.0}}
    path = tmp_path / "trace.json"
    found = outcomes(path, damaged([event, named], 200, 7), lambda: trace.merge([path, path]), as_bytes)
    assert set(found) == {"", "ArgumentError"}


VALUES = (
    *(
        "true",
        "0",
        "-1",
        "3",
        "9223372036854775808",
        "1.5",
        "nan",
        "inf",
        '""',
        '"x"',
        '"a\\u0000b"',
        "[]",
        "[1]",
        "{}",
    ),
    *('["x"]', '[["x"]]', "{ a = 1 }", "{ a = {} }", "2026-01-01", "12:00:00", "[" * 50 + "]" * 50),
)
KEYS = {
    "": ("name", "directory", "timeout_s", "stop_s", "keep_store", "trust", "serve_stores", "hosts", "role", "actor"),
    "learner": ("run", "processes", "args", "env", "max_restarts", "hosts", "name", "kind"),
    "actor": ("environments", "policy", "processes", "seed", "publish_every", "overlap", "priority", "steps", "env"),
    "reducer": ("processes", "window_bytes", "hosts"),
    "role.other": ("run", "kind", "processes", "args", "env", "hosts"),
}
TABLES: dict[str, dict[str, str]] = {
    "": {"name": '"job"'},
    "learner": {"run": '"launched:learn"'},
    "actor": {"environments": '"launched:environments"', "policy": '"launched:remote_policy"'},
    "reducer": {"processes": "1"},
    "role.other": {"run": '["python"]'},
}


@pytest.mark.parametrize("table", KEYS)
def test_a_job_of_any_content_is_described_or_refused(tmp_path: Path, table: str) -> None:
    path = tmp_path / "job.toml"

    def write(key: str, value: str) -> bytes:
        lines = []
        for name, entries in TABLES.items():
            if table == "" and key == name:
                continue  # it is the key's value
            lines += [f"[{name}]"] * bool(name)
            lines += [
                f"{one} = {given}" for one, given in {**entries, **({key: value} if name == table else {})}.items()
            ]
        return "\n".join(lines).encode()

    for key in KEYS[table]:
        for value in VALUES:
            path.write_bytes(write(key, value))
            try:
                outcome(lambda: launch.load(str(path)))
            except Exception as error:
                raise AssertionError(f"[{table}] {key} = {value}") from error
    path.write_bytes(b"name = " + b"[" * 100_000)
    assert outcome(lambda: launch.load(str(path))) == "ArgumentError"
