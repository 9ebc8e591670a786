"""The command line does what its help says, and refuses with one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import geartrain as gt

pytest.importorskip("typer")


def geartrain(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "geartrain", *args],
        env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def make(name: str, **options: Any) -> gt.Store:
    store = gt.Store.create(
        name, {"obs": gt.Field((10, 2), "float32"), "id": gt.Field((), "int64")}, capacity=8, **options
    )
    store.insert(
        {"obs": np.zeros((5, 10, 2), "float32"), "id": np.arange(5)}, weights=[0, 0.001, 1, 10, 100], versions=range(5)
    )
    return store


def test_help_names_every_command() -> None:
    shown = geartrain("--help").stdout
    for command in ("import", "inspect", "remove", "doctor", "bench"):
        assert command in shown


def test_inspect_shows_schema_rows_bytes_and_weights(store_name: Any) -> None:
    with make(store_name()) as store:
        shown = geartrain("inspect", store.name).stdout
        assert "5 of 8 rows" in shown and "50 steps" in shown and "1 processes attached" in shown
        assert "obs" in shown and "(10, 2)" in shown and "float32" in shown
        assert "1 rows have weight 0" in shown and "█" in shown
        about = json.loads(geartrain("inspect", store.name, "--json").stdout)
        assert about["rows"] == 5 and about["steps"] == 50 and about["versions"] == [0, 4]
        assert sum(about["weights"]["rows"]) == 4 and about["weights"]["zero"] == 1
        assert store.name in geartrain("inspect").stdout
        assert "every row is accounted for" in geartrain("inspect", store.name, "--audit").stdout
        assert len(store) == 5, "looking changes nothing"


def test_what_a_killed_run_left_can_be_looked_at_audited_and_removed(store_name: Any) -> None:
    name = store_name()
    pid = os.fork()
    if pid == 0:
        _kept = make(name)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert "none (left behind)" in geartrain("inspect").stdout
    assert "every row is accounted for" in geartrain("inspect", name, "--audit").stdout
    assert "no process attached" in geartrain("inspect", name).stdout, "an audit leaves it as it was"
    assert f"removed {name} (5 rows" in geartrain("remove", name).stdout
    assert not Path(f"/dev/shm/geartrain.{name}").exists()


def test_a_store_in_use_is_not_removed_unless_forced(store_name: Any) -> None:
    with make(store_name()) as store:
        refused = geartrain("remove", store.name)
        assert refused.returncode == 1 and "1 living processes" in refused.stderr
        assert store.path.exists()
        assert geartrain("remove", store.name, "--force").returncode == 0
        assert not store.path.exists()


def test_inspect_shows_a_checkpoint(store_name: Any, tmp_path: Path) -> None:
    with make(store_name()) as store:
        store.save(tmp_path / "ckpt")
    assert "5 rows" in geartrain("inspect", str(tmp_path / "ckpt")).stdout


def test_import_makes_a_store_from_a_file_of_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", obs=rng.normal(size=(6, 12, 3)), reward=np.ones((6, 12)))
    done = geartrain(
        "import", str(tmp_path / "data.npz"), "--into", str(tmp_path / "data.gt"), "--cast", "float64=float32"
    )
    assert done.returncode == 0, done.stderr
    with gt.Store.open(tmp_path / "data.gt") as store:
        assert len(store) == 6 and store.fields["obs"] == gt.Field((12, 3), "float32")
    again = geartrain("import", str(tmp_path / "data.npz"), "--into", str(tmp_path / "data.gt"))
    assert again.returncode == 1 and "exists already" in again.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["inspect", "no-such-store"], "No such file"),
        (["remove", "no-such-store"], "No such file"),
        (["import", "/no/such/data", "--into", "x"], "/no/such/data"),
        (["inspect", "/etc/hostname"], "less than a segment's head"),
    ],
)
def test_bad_input_is_one_line_and_no_traceback(args: list[str], said: str) -> None:
    done = geartrain(*args)
    assert done.returncode == 1
    assert said in done.stderr and "Traceback" not in done.stderr and done.stderr.startswith("error:")


def test_doctor_says_what_is_viable_and_why_not() -> None:
    findings = json.loads(geartrain("doctor", "--json").stdout)
    by_name = {finding["what"]: finding for finding in findings}
    assert by_name["shared memory"]["viable"] and "/dev/shm" in by_name["shared memory"]["because"]
    assert all(finding["because"] for finding in findings)
    assert "viable" in geartrain("doctor").stdout


def test_without_its_packages_the_command_says_how_to_install_them(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')")
    done = geartrain("doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "pip install 'geartrain[cli]'" in done.stderr
