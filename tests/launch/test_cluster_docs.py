"""The job of docs/clusters.md runs as it is written there, wherever the page says that it does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import preloaded
import pytest
from deadlines import patience
from slurm_cluster import SlurmCluster, why_not

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"
WHY_NO_SLURM = why_not()


def write_job(folder: Path, name: str, steps: int) -> None:
    """The files of the page's job, but for its name and the number of steps."""
    found = dict(re.findall(r"^```(?:toml|py)\n# (\S+)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    assert sorted(found) == ["collectors.py", "walk.py", "walk.toml"]
    for wanted, instead in (('name = "walk"', f'name = "{name}"'), ("steps = 200", f"steps = {steps}")):
        assert found["walk.toml"].count(wanted) == 1, wanted
        found["walk.toml"] = found["walk.toml"].replace(wanted, instead)
    for file, text in found.items():
        (folder / file).write_text(text)


def check(folder: Path, hosts: int, steps: int) -> None:
    """Every host's job has finished, and each rank has had its part of every batch."""
    found = [json.loads(path.read_text()) for path in folder.glob("runs/*/summary.json")]
    assert [each["outcome"] for each in found] == ["finished"] * hosts
    # Folders are named by the time: on two hosts either may be the older one.
    found.sort(key=lambda each: min(name for name in each["processes"] if name.startswith("learner-")))
    for host, each in enumerate(found):
        learner = each["processes"][f"learner-{host}"]
        assert (learner["steps"], learner["samples"]) == (steps, steps * 64 // hosts)
        assert not any(each["restarts"].values())
    gains = {each["processes"][f"learner-{host}"]["metrics"]["gain"] for host, each in enumerate(found)}
    assert len(gains) == 1, "ranks that all-reduce have one model"
    assert abs(gains.pop() - 1.0) < 0.05, "and it learns what an action does"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_job_runs_on_one_machine(store_name, tmp_path, preloaded_children):
    pytest.importorskip("typer")
    write_job(tmp_path, store_name(), 20)
    done = preloaded.run(
        [sys.executable, "-m", "geartrain", "launch", "walk.toml"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=patience(100),
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    check(tmp_path, 1, 20)


@pytest.mark.slow
def test_the_manifest_for_kubernetes_is_written(tmp_path):
    yaml = pytest.importorskip("yaml")
    (command,) = re.findall(r"^(geartrain generate kubernetes .* > walk.yaml)$", PAGE.read_text(), re.MULTILINE)
    write_job(tmp_path, "walk", 20)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env={**os.environ, "PATH": path}, check=True)
    made = yaml.safe_load((tmp_path / "walk.yaml").read_text())
    (group,) = made["spec"]["replicatedJobs"]
    assert (group["name"], group["template"]["spec"]["completions"]) == ("hosts-0-1", 2)
    pod = group["template"]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["emptyDir"]["sizeLimit"] == "1024Mi"
    assert pod["containers"][0]["resources"]["limits"] == {"memory": "5120Mi"}
    assert "kubectl create secret generic walk-secret " in PAGE.read_text()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(WHY_NO_SLURM is not None, reason=f"no Slurm cluster can be made here: {WHY_NO_SLURM}")
def test_the_job_runs_under_slurm(store_name, tmp_path):
    commands = re.findall(r"^```\n(geartrain generate slurm .*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(commands) == 1
    generate, submit = commands[0].splitlines()
    assert submit == "sbatch walk.sbatch"
    write_job(tmp_path, store_name(), 20)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", generate], cwd=tmp_path, env={**os.environ, "PATH": path}, check=True)
    with tempfile.TemporaryDirectory(prefix="gt-slurm-") as folder, SlurmCluster(Path(folder)) as cluster:
        number = cluster.run("sbatch", "--parsable", str(tmp_path / "walk.sbatch")).strip()
        ended = cluster.wait_for_job(number)
    said = "".join(each.read_text() for each in tmp_path.glob("*.out"))
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), said
    assert (ended["MinMemoryNode"], ended["CPUs/Task"]) == ("5G", "4")  # 2 + 2 x 1 + 1 GiB; 2 + 2 x 1 processors
    check(tmp_path, 2, 20)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_job_and_actors_of_ones_own_run_on_ray(store_name, tmp_path):
    pytest.importorskip("ray")
    write_job(tmp_path, store_name(), 20)
    path = tmp_path / "collectors.py"
    assert path.read_text().count('"collected"') == 1
    path.write_text(path.read_text().replace('"collected"', repr(store_name())))
    more = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    outputs = []
    for command in (["-m", "geartrain", "launch", "walk.toml", "--ray", "local"], ["collectors.py"]):
        argv, env = [sys.executable, *command], {**os.environ, **more}
        limit_s = patience(120)
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=limit_s, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    check(tmp_path, 1, 20)
    assert "200 rows\n1.0 is the mean reward" in outputs[1]
