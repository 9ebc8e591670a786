"""Unknown names, keywords and words of a choice: the error says which known one is close."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import geartrain as gt
import geartrain.core.counters as counters
import geartrain.weights as weights
from geartrain import launch
from geartrain.core.arguments import did_you_mean, some_of
from geartrain.errors import ArgumentError, FieldError, SchemaError, SourceError, StoreMissingError
from geartrain.integrations import export_store, import_dataset

FIELDS = {"reward": gt.Field((), "float32", per_row=True)}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[gt.Store]:
    """A store in a folder of segments that no other program uses: errors name the newest ones there, twenty at most."""
    monkeypatch.setenv("GEARTRAIN_DIR", str(tmp_path))
    with gt.Store.create("test-hopper", FIELDS, capacity=4) as made:
        made.insert({"reward": np.zeros(2, np.float32)})
        yield made


def _job(tmp_path: Path, text: str) -> launch.Job:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return launch.load(str(path))


def _npz(tmp_path: Path) -> str:
    np.savez(tmp_path / "data.npz", obs=np.zeros((2, 3, 4), np.float32))
    return str(tmp_path / "data.npz")


CASES: dict[str, tuple[Callable[[gt.Store, Path], Any], type[Exception], str]] = {
    "a store": (lambda store, _: gt.Store.open(store.name[:-1]), StoreMissingError, "hopper"),
    "a store to read": (lambda store, _: gt.Store.open(store.name[:-1], mode="r"), StoreMissingError, "hopper"),
    "a field": (lambda store, _: store.column("rewrad"), FieldError, "'reward'"),
    "a field to insert": (lambda store, _: store.insert({"rewards": [0.0]}), FieldError, "'reward'"),
    "a field of a batch": (
        lambda store, _: gt.fetch(store, store.keys(), output="numpy")["rewards"], FieldError, "'reward'",
    ),
    "a dtype": (lambda *_: gt.Field((), "flaot32"), SchemaError, "'float32'"),
    "a word": (lambda store, _: store.insert({"reward": [0.0]}, casting="save"), ArgumentError, "'safe'"),
    "a remover": (lambda *_: gt.Store.create(FIELDS, capacity=2, remover="FIFO"), ArgumentError, "'fifo'"),
    "an option of a store": (
        lambda store, _: gt.Store.open(store.name, FIELDS, create="missing", capactiy=4), ArgumentError, "'capacity'",
    ),
    "an option of a load": (lambda store, path: _loaded(store, path, resreve=True), ArgumentError, "'reserve'"),
    "an option of a role": (lambda *_: launch.learners("m:f", max_restart=1), ArgumentError, "'max_restarts'"),
    "a key of a description": (
        lambda _, path: _job(path, 'name = "x"\ntimeot_s = 1\n[learner]\nrun = "m:f"\n'), ArgumentError, "'timeout_s'",
    ),
    "a table of a description": (
        lambda _, path: _job(path, 'name = "x"\n[learners]\nrun = "m:f"\n'), ArgumentError, "'learner'",
    ),
    "a key of a role": (
        lambda _, path: _job(path, 'name = "x"\n[learner]\nrun = "m:f"\nprocess = 2\n'), ArgumentError, "'processes'",
    ),
    "a format": (lambda store, path: export_store(store, path / "x", format="parket"), ArgumentError, "'parquet'"),
    "an option of a format": (
        lambda _, path: import_dataset(_npz(path), str(path / "x"), untime=True), ArgumentError, "'untimed'",
    ),
    "a field of a dataset": (
        lambda _, path: import_dataset(_npz(path), str(path / "x"), fields="ob"), SourceError, "'obs'",
    ),
}  # fmt: skip


def _loaded(store: gt.Store, path: Path, **options: Any) -> gt.Store:
    store.save(path / "checkpoint")
    return gt.Store.load(path / "checkpoint", **options)


@pytest.mark.parametrize("what", CASES)
def test_what_is_unknown_is_refused_with_what_is_close(store: gt.Store, tmp_path: Path, what: str) -> None:
    call, error, near = CASES[what]
    with pytest.raises(error, match=rf"; did you mean .*{re.escape(near)}.*\?$"):
        call(store, tmp_path)


def test_what_is_missing_is_told_with_what_there_is(
    store: gt.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreMissingError, match=rf"The stores here are .*{store.name}"):
        gt.Store.open("zzz")
    with weights.Publisher("pi", directory=tmp_path), pytest.raises(StoreMissingError, match="there are pi"):
        weights.describe("zzz", directory=tmp_path)
    with counters.SharedCounters.create(store.name, 1, ["steps"]):
        with pytest.raises(StoreMissingError, match=f"there are .*{store.name}"):
            counters.SharedCounters.open("zzz")

    killed = tmp_path / "killed"
    killed.mkdir()
    monkeypatch.setenv("GEARTRAIN_DIR", str(killed))
    for day in range(30):
        left = killed / f"geartrain.killed-{day:02}"
        left.touch()
        os.utime(left, (1e9 + day, 1e9 + day))
    with pytest.raises(StoreMissingError, match=r"The stores here are killed-29, .*, killed-10 and 10 more"):
        gt.Store.open("zzz")


def test_nothing_is_meant_where_nothing_is_close() -> None:
    assert did_you_mean("zebra", ["fifo", "lifo"]) == did_you_mean(3, ["fifo"]) == did_you_mean(None, []) == ""
    assert did_you_mean({"capactiy", "zebra"}, ["capacity"]) == "; did you mean 'capacity'?"
    assert some_of([]) == "none"
    assert some_of("abcde", 3) == "a, b, c and 2 more"
