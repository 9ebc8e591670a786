"""Doctor tells where segments live, how much room there is, and what to do."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from mounts import file_system
from packaging.requirements import Requirement
from typer.testing import CliRunner

import geartrain as gt
import geartrain.tools.doctor as doctor
from geartrain.tools.cli.app import app
from geartrain.tools.doctor import collectives_waits, shared_memory


def test_the_directory_its_size_and_its_free_space_are_told(monkeypatch):
    monkeypatch.delenv("GEARTRAIN_DIR", raising=False)
    found = shared_memory()
    total = shutil.disk_usage("/dev/shm").total
    assert found.because.startswith("segments live in /dev/shm (the default, ")
    assert f"GB free of {total / 1e9:.2f} GB" in found.because


def test_another_directory_is_told_with_what_chose_it(monkeypatch, tmp_path, name):
    monkeypatch.setenv("GEARTRAIN_DIR", str(tmp_path))
    with gt.Store.create(name, {"x": gt.Field((), "int64", per_row=True)}, capacity=4):
        found = shared_memory()
    assert f"segments live in {tmp_path} (GEARTRAIN_DIR, " in found.because
    assert "1 files of geartrain in it" in found.because


@pytest.mark.parametrize(
    ("directory", "said"),
    [
        ("/no/such/place", "is no directory; set GEARTRAIN_DIR"),
        ("relative", "must be an absolute path, found 'relative'"),
    ],
)
def test_a_directory_that_cannot_be_used_is_not_viable(monkeypatch, directory, said):
    monkeypatch.setenv("GEARTRAIN_DIR", directory)
    found = shared_memory()
    assert found.state == "broken" and found.remedy and said in found.because


def test_a_directory_of_a_containers_size_is_not_viable_and_the_remedy_is_told(monkeypatch, tmp_path):
    with file_system(tmp_path, "64m"):
        monkeypatch.setenv("GEARTRAIN_DIR", str(tmp_path))
        found = shared_memory()
    assert found.state == "broken" and found.remedy == "too small: docker run --shm-size=16g"
    for said in ("tmpfs", "0.07 GB free of 0.07 GB", "docker run --shm-size=16g", "--ipc=host", "set GEARTRAIN_DIR"):
        assert said in found.because


@pytest.mark.parametrize("hidden", [False, True], ids=["here", "without any package"])
def test_every_capability_is_one_line_of_80_columns_after_a_summary(monkeypatch, hidden):
    monkeypatch.setenv("COLUMNS", "80")
    if hidden:
        monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _: None)
    findings = doctor.examine()
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    shown = run("doctor").splitlines()
    assert shown[0].startswith("geartrain ") and "--verbose" in shown[1]
    counts = {state: int(number) for number, state in re.findall(r"(\d+) (ok|missing|broken)", shown[1])}
    assert sum(counts.values()) == len(findings) and not shown[2]
    for finding, line in zip(findings, shown[3:], strict=True):
        assert line.startswith(finding.what) and len(line) <= 80
        assert (finding.state == "ok") == line.endswith("  ok") == (finding.remedy == "")
        assert finding.state != "missing" or f"  missing: {finding.remedy}" in line
        counts[finding.state] -= 1
    assert not any(counts.values())
    packages = [line for line in shown if "pip install" in line]
    assert len(packages) >= len(doctor.OPTIONAL) or not hidden
    verbose = " ".join(run("doctor", "--verbose").split())
    assert all(" ".join(finding.because.split()) in verbose for finding in findings)


def test_a_package_that_cannot_be_imported_is_broken_and_ends_nothing(monkeypatch, tmp_path):
    (tmp_path / "h5py.py").write_text("raise OSError('libhdf5.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "h5py", raising=False)
    found = {each["what"]: each for each in json.loads(run("doctor", "--json"))}
    broken = found["h5py (D4RL files)"]
    assert broken["state"] == "broken" and "libhdf5.so: cannot open shared object file" in broken["because"]
    assert found["minari"]["state"] in ("ok", "missing", "broken") and len(found) > 20


def installed_by(extra: str) -> set[str]:
    """Names of what an extra of ours asks for, those of extras that it names included."""
    names: set[str] = set()
    for each in map(Requirement, importlib.metadata.requires("geartrain") or ()):
        if each.marker is not None and each.marker.evaluate({"extra": extra}):
            names |= {each.name} | each.extras  # gymnasium[mujoco] brings mujoco
            names |= {name for further in each.extras if each.name == "geartrain" for name in installed_by(further)}
    return names


def test_the_extra_that_a_missing_package_names_installs_it():
    for module, extra in doctor.OPTIONAL.values():
        assert module.replace("_", "-") in installed_by(extra), f"{extra} does not install {module}"


# --- inspect and remove ---------------------------------------------------------------------------------------------


def run(*args: str) -> str:
    done = CliRunner().invoke(app, list(args))
    assert done.exit_code == 0, done.output
    return done.output


def test_what_waits_of_collectives_do_is_told():
    found = collectives_waits()
    assert found.state == "ok"
    assert re.search(r"poll for 50 us and then sleep, .* with more than \d+ ranks .*spin_us=1e6", found.because)


def test_inspect_and_remove_look_where_the_variable_says(monkeypatch, tmp_path):
    monkeypatch.setenv("GEARTRAIN_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    fields = {"x": gt.Field((), "int64", per_row=True)}
    with gt.Store.create("of-the-group", fields, capacity=4, trust="group", persist=True) as store:
        store.insert({"x": np.arange(3)})
        assert "may write to it" in json.loads(run("inspect", "--json"))[0]["error"]
        assert "3 of 4 rows" in run("inspect", "of-the-group", "--trust", "group")
        assert "every row is accounted for" in run("inspect", "of-the-group", "--trust", "group", "--audit")
    refused = CliRunner().invoke(app, ["remove", "of-the-group"])
    assert refused.exit_code == 1 and store.path.exists()
    assert "removed of-the-group (3 rows" in run("remove", "of-the-group", "--trust", "group")
    assert "no stores in" in run("inspect")


def test_what_is_no_segment_is_removed_by_force_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("GEARTRAIN_DIR", str(tmp_path))
    path = tmp_path / "geartrain.broken"
    path.touch(0o600)
    path.write_bytes(b"x" * 40_000)
    refused = CliRunner().invoke(app, ["remove", "broken"])
    assert refused.exit_code == 1 and path.exists()
    assert "which no store could be read from" in run("remove", "broken", "--force")
    assert not path.exists()
    os.mkfifo(path, 0o600)
    assert CliRunner().invoke(app, ["remove", "broken", "--force"]).exit_code == 1
    assert Path(path).exists()


def test_tables_cut_no_path_or_name_that_a_reader_would_copy(monkeypatch, tmp_path, name):
    path = tmp_path / ("deep" * 12) / ("deeper" * 12)
    path.mkdir(parents=True)
    monkeypatch.setenv("GEARTRAIN_DIR", str(path))
    assert str(path) in CliRunner().invoke(app, ["doctor", "--verbose"]).output
    long = f"{name}-{'store' * 20}"
    with gt.Store.create(long, {"x": gt.Field((), "int64", per_row=True)}, capacity=4):
        shown = CliRunner().invoke(app, ["inspect"]).output
    assert long in "".join(re.findall(r"^│([^│]*)│", shown, re.MULTILINE)).replace(" ", "")
