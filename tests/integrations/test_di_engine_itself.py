"""The queue inside DI-engine, in an environment of its own: GEARTRAIN_TEST_DI_PYTHON names its Python.

docs/di-engine.md says how to make that environment; geartrain is installed in it, or found through PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from deadlines import patience

PYTHON = os.environ.get("GEARTRAIN_TEST_DI_PYTHON", "")
WORKER = Path(__file__).parents[1] / "support" / "di_engine_worker.py"
EXAMPLES = Path(__file__).parents[2] / "examples"
DITASK = "from geartrain.integrations.di_engine.ditask import main; main()"

pytestmark = [
    pytest.mark.skipif(
        not PYTHON, reason="GEARTRAIN_TEST_DI_PYTHON does not name the Python of an environment with DI-engine"
    ),
    pytest.mark.timeout(400),  # to import DI-engine takes some seconds for each process
]


@contextmanager
def started(arguments: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            [PYTHON, *arguments],
            stdout=file,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(patience(30))


def run(case: str, directory: Path, **runner: Any) -> dict[int, dict[str, Any]]:
    """What each node found."""
    log = directory / "log"
    with started([str(WORKER), case, str(directory), json.dumps({"n_parallel_workers": 2, **runner})], log) as process:
        assert process.wait(patience(180)) == 0, log.read_text()[-4000:]
    return found_in(directory)


def found_in(directory: Path) -> dict[int, dict[str, Any]]:
    return {int(p.stem.removeprefix("node-")): json.loads(p.read_text()) for p in directory.glob("node-*.json")}


def test_all_kinds_of_values_arrive_as_what_they_were(tmp_path: Path) -> None:
    found = run("events", tmp_path, labels=["a"])
    assert found[1] == {"labels": ["a"]}
    assert found[0] == {
        "args": [True, 1, "text", None],
        "grown": True,
        "config": ["EasyDict", 0.1],
        "tree": [True, True],
        "context": ["OnlineRLContext", 7],
        "trajectories": 5000.0,
        "model": ["OrderedDict", ["bias", "weight"]],
        "once": [1],
        "after_off": 0,
        "way": "shm",
        "ran": "GeartrainMQ",
    }


def test_tasks_get_remote_events_once_and_keep_local_ones_over_tcp_as_well(tmp_path: Path) -> None:
    found = run("tasks", tmp_path, protocol="tcp", ports=[0, 0], init_method=f"file://{tmp_path}/store")
    assert found[0]["got"] == ["both 0", "both 1", "local 0", "remote 1"]
    assert found[1]["got"] == ["both 0", "both 1", "local 1", "remote 0"]
    assert "node.1" in found[1]["labels"]


def test_a_task_that_recovers_from_its_own_failure_hears_again(tmp_path: Path) -> None:
    found = run("recover", tmp_path, auto_recover=True)
    assert found[0]["runs"] == 2
    assert found[0]["heard"] >= 1
    assert found[1] == {"ended": True}


def test_a_worker_killed_in_a_transfer_is_noticed_and_the_others_go_on_and_end(tmp_path: Path) -> None:
    runner = {"n_parallel_workers": 1, "init_method": f"file://{tmp_path}/store"}
    arguments = [[str(WORKER), "killed", str(tmp_path), json.dumps({**runner, "node_ids": [i]})] for i in range(3)]
    logs = [tmp_path / f"log-{i}" for i in range(3)]
    with started(arguments[0], logs[0]) as one, started(arguments[1], logs[1]) as two, started(arguments[2], logs[2]):
        ends = time.monotonic() + patience(120)
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < ends, logs[0].read_text()[-4000:]
            time.sleep(0.05)
        time.sleep(1.0)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        killed = time.monotonic()
        assert one.wait(patience(60)) == 0, logs[0].read_text()[-4000:]
        assert two.wait(patience(60)) == 0, logs[1].read_text()[-4000:]
        assert time.monotonic() - killed < patience(30)
    found = found_in(tmp_path)
    assert found[0]["lost"] == found[1]["lost"] == [2]
    assert (found[0]["words"], found[1]["words"]) == ([1], [0])


def test_ditask_knows_the_options_and_refuses_what_is_not_there(tmp_path: Path) -> None:
    door = [PYTHON, "-m", "geartrain.integrations.di_engine", "ditask"]
    shown = subprocess.run([*door, "--help"], capture_output=True, text=True, timeout=patience(100), check=True).stdout
    for option in ("--mq-type", "--init-method", "--local-cuda-devices", "--cuda-device-map", "torchrpc:cuda"):
        assert option in shown
    main = tmp_path / "main_of_nothing.py"
    main.write_text("def main():\n    raise AssertionError('it must not come to this')\n")
    place = ["--package", str(tmp_path), "--main", "main_of_nothing.main"]
    for given, said in (
        (["--mq-type", "torchrpc:cuda", "--cuda-device-map", "1_0_0"], "no CUDA device here"),
        (["--cuda-device-map", "1_0"], "--cuda-device-map takes"),
        (["--attach-to", "0_0_0"], "give --init-method"),
        (["--mq-type", "nng", "--init-method", "tcp://a:1"], "is no queue of geartrain: leave out init_method"),
    ):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [*door, *place, "--ports", "0", *given],
            capture_output=True,
            text=True,
            timeout=patience(100),
            check=False,
            env=environment,
        )
        assert done.returncode == 1
        assert said in done.stderr


@pytest.mark.long
def test_dqn_learns_with_learner_evaluator_and_collector_as_commands_of_their_own(tmp_path: Path) -> None:
    curve = tmp_path / "curve.json"
    given = ["-c", DITASK, "--package", str(EXAMPLES), "--main", "di_engine_dqn.main", "--mq-type", "torchrpc"]
    given += ["--init-method", f"file://{tmp_path}/store"]
    environment = {"GEARTRAIN_SECRET": "a test's", "DQN_CURVE": str(curve)}
    roles = [["--labels", "learner"], ["--labels", "evaluator", "--attach-to", "0"]]
    roles += [["--labels", "collector", "--attach-to", "0_0_0,1"]]
    commands = [[*given, "--node-ids", str(i), *role] for i, role in enumerate(roles)]
    logs = [tmp_path / f"log-{i}" for i in range(3)]
    best = 0.0
    with started(commands[0], logs[0], **environment) as learner, started(commands[1], logs[1], **environment):
        with started(commands[2], logs[2], **environment):
            ends = time.monotonic() + patience(330)
            while best < 100 and time.monotonic() < ends:
                assert learner.poll() in (None, 0), logs[0].read_text()[-4000:]
                time.sleep(0.5)
                best = max(value for _, value in json.loads(curve.read_text())) if curve.exists() else 0.0
    returns = [value for _, value in json.loads(curve.read_text())]
    assert returns[0] < 50
    assert best >= 100, returns
