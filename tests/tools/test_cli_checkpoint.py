"""`geartrain checkpoint`: once, every so often, across the job's restart, on a full disk, until Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
from deadlines import patience, until
from mounts import file_system
from tasked_stores import answer, everything, in_all_states

import geartrain as gt
from geartrain.errors import CheckpointError
from geartrain.store.checkpoint_reader import Checkpoint
from geartrain.store.checkpoint_series import LATEST, saved_in

pytest.importorskip("typer")
from typer.testing import CliRunner

from geartrain.tools.cli.app import app

FIELDS = {"x": gt.Field((1000,), "float32")}


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "geartrain", "checkpoint", *args]


def geartrain(*args: str) -> subprocess.CompletedProcess[str]:
    return preloaded.run(command(*args), env=environment(), timeout=patience(60))


def environment() -> dict[str, str]:
    return {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}


def make(name: str, rows: int = 4, **options: Any) -> gt.Store:
    store = gt.Store.create(name, FIELDS, max_length=8, capacity=64, **options)
    insert(store, rows)
    return store


def insert(store: gt.Store, rows: int) -> None:
    store.insert({"x": np.ones((rows, 8, 1000), "float32")}, threads=1)


def test_a_store_is_saved_once(tmp_path: Path, name: str) -> None:
    with make(name):
        done = geartrain(name, str(tmp_path / "series"))
        assert done.returncode == 0, done.stderr
        assert "4 rows, 0.1 MB written" in done.stdout
    with gt.Store.load(tmp_path / "series" / LATEST, name) as store:
        assert len(store) == 4
    done = geartrain(name, str(tmp_path / "series"))
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)


@pytest.mark.parametrize("wrong", ["10", "0s"])
def test_times_that_are_none_are_refused_before_anything_is_done(tmp_path: Path, name: str, wrong: str) -> None:
    done = geartrain(name, str(tmp_path / "series"), f"--every={wrong}")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "10m" in done.stderr
    assert not (tmp_path / "series").exists()


def test_it_goes_on_across_the_jobs_restart_and_a_full_disk_and_ends_by_ctrl_c(tmp_path: Path, name: str) -> None:
    (tmp_path / "small").mkdir()
    with file_system(tmp_path / "small", "2m") as small:
        series = small / "series"
        store = make(name)
        with preloaded.Popen(
            command(name, str(series), "--every", "0.1s", "--keep", "2"),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                _watch(process, store, series, small, name)
            finally:
                process.kill()


def _watch(process: Any, store: gt.Store, series: Path, small: Path, name: str) -> None:
    def rows() -> int:
        if not (series / LATEST).exists():
            return -1
        with Checkpoint(series / LATEST) as found:
            return found.rows

    lines: list[str] = []
    printed: list[str] = []
    readers = [
        threading.Thread(target=to.extend, args=(stream,))
        for to, stream in ((lines, process.stderr), (printed, process.stdout))
    ]
    for reader in readers:
        reader.start()
    until(lambda: rows() == 4, "the store was not saved")
    (small / "filler").write_bytes(bytes(1_750_000))
    insert(store, 24)
    until(lambda: any("No space left on device" in line for line in lines), "the disk was not full")
    assert rows() == 4
    before = saved_in(series)
    store.close()
    assert not store.path.exists(), "the command had joined it"
    until(lambda: any("waiting for the store" in line for line in lines))
    (small / "filler").unlink()
    with make(name, rows=9) as again:
        until(lambda: rows() == 9, "the store that came back was not saved")
        insert(again, 1)
        until(lambda: rows() == 10)
    until(lambda: 1 <= len(saved_in(series)) <= 2, "older checkpoints stayed")  # one more while another is saved
    assert before != saved_in(series)
    until(
        lambda: any("10 rows" in line for line in printed), "what was saved was not told"
    )  # it is told when it lies there
    process.send_signal(signal.SIGINT)
    assert process.wait(patience(30)) == 130
    for reader in readers:
        reader.join()
    assert lines[-1] == "error: stopped by Ctrl-C\n"
    assert all(line.startswith("error: ") for line in lines)
    assert sum("waiting for the store" in line for line in lines) == 1


@pytest.mark.parametrize("broken", ["full", "pipe"])
def test_what_cannot_be_printed_ends_no_saving_and_repeats_none(tmp_path: Path, name: str, broken: str) -> None:
    series = tmp_path / "series"
    if broken == "full":
        stdout = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, stdout = os.pipe()
        os.close(reader)
    with make(name) as store:
        with preloaded.Popen(
            command(name, str(series), "--every", "0.1s", "--keep", "3"),
            env=environment(),
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            os.close(stdout)
            try:
                for rows in (4, 5, 6):  # one checkpoint each, and none for the ticks between
                    until(lambda rows=rows: _rows(series) == [*range(4, rows + 1)], f"not saved once with {rows} rows")
                    insert(store, 1)
                until(lambda: _rows(series) == [5, 6, 7])
            finally:
                process.send_signal(signal.SIGINT)
                assert process.wait(patience(30)) in (130, 120)  # 120: what is left to print cannot be
                assert "error: stopped by Ctrl-C" in process.stderr.read()


@pytest.mark.timeout(60)
def test_ctrl_c_ends_saving_also_while_what_cannot_be_printed_is_printed(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import geartrain.tools.cli.checkpoint as checkpoint

    class Output:
        def print(self, *_: Any, **__: Any) -> None:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(patience(30))
            finally:
                raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(checkpoint, "out", Output())
    monkeypatch.setattr(sys, "argv", ["geartrain", "checkpoint", name, str(tmp_path / "series"), "--every", "1h"])
    with make(name), pytest.raises(SystemExit) as ended:
        app()
    assert ended.value.code == 130


def _rows(series: Path) -> list[int]:
    found = []
    for path in saved_in(series):
        with contextlib.suppress(CheckpointError), Checkpoint(path) as one:
            found.append(one.rows)
    return found


def test_inspect_tells_how_many_rows_of_a_store_with_tasks_are_in_which_state() -> None:
    golden = Path(__file__).parents[1] / "store" / "data" / "checkpoint-with-tasks"
    found = CliRunner().invoke(app, ["inspect", str(golden)])
    assert "1 finished, 3 under way, 2 kept by batches" in " ".join(found.output.split())
    assert "task reward" in found.output


def test_a_store_with_tasks_is_saved_beside_its_job(names: Any, tmp_path: Path) -> None:
    name = names()
    with in_all_states(name=name) as store:
        assert CliRunner().invoke(app, ["checkpoint", name, str(tmp_path / "all")]).exit_code == 0
        answer(store, 1)
        assert CliRunner().invoke(app, ["checkpoint", name, str(tmp_path / "all")]).exit_code == 0
        with gt.Store.load(tmp_path / "all" / LATEST) as loaded:
            assert everything(loaded)["parts"] == everything(store)["parts"]
        assert store.audit() == []
    assert not store.path.exists(), "it was joined for the time of the saves alone"
