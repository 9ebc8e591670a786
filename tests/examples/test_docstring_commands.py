"""The commands in the examples' docstrings run as they stand there."""

from __future__ import annotations

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deadlines import patience

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Takes minutes; needs other hosts; is run by tests/collectives/test_process_group_processes.py.
NOT_RUN = ("pipeline_gato.py", "torchrun ...", "allreduce_ddp.py")


def scripts(example: Path) -> list[str]:
    """The indented blocks of a docstring: shell scripts, each of one or several commands."""
    about = ast.get_docstring(ast.parse(example.read_text()), clean=False) or ""
    return [block for block in re.findall(r"(?:^ {4}.*\n)+", about, re.MULTILINE) if re.search("^ +[a-z]+ .*", block)]


def torchrun_scripts() -> Iterator[Any]:
    for example in sorted(EXAMPLES.glob("*.py")):
        for number, script in enumerate(scripts(example)):
            if "torchrun" in script and not any(each in script for each in NOT_RUN):
                mark = pytest.mark.slow if "--max-restarts" in script else pytest.mark.long
                yield pytest.param(script, marks=mark, id=f"{example.stem}-{number}")


@pytest.mark.parametrize("example", [each for each in EXAMPLES.glob("*.py") if scripts(each)], ids=lambda e: e.stem)
def test_what_follows_a_command_is_a_comment(example: Path) -> None:
    for script in scripts(example):
        for line in re.findall(r"^ {4}(?:pip|python|torchrun|mpiexec|geartrain|export).*", script, re.MULTILINE):
            command = line.strip().partition(" #")[0].rstrip()
            assert "  " not in command, f"{command!r} ends in words that a shell would take for arguments"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("script", list(torchrun_scripts()))
def test_a_script_of_a_docstring_runs_as_it_stands(script: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for engine in ("deepspeed", "megatron"):
        if engine in script:
            pytest.importorskip(engine)
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("data"))
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="geartrain-docs-", dir="/dev/shm") as segments:
        free.bind(("127.0.0.1", 0))
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "GEARTRAIN_DIR": segments,
            "PET_MASTER_PORT": str(free.getsockname()[1]),  # torchrun's default is taken by any other job of the host
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
        free.close()
        done = subprocess.run(
            ["bash", "-e", "-c", script], cwd=tmp_path, env=environment, timeout=patience(300),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:]
        assert not [path for path in Path(segments).iterdir() if "report" not in path.name]
    if "--crash-at" in script:
        assert "going on from step 60: 256 of 256 rows were still in memory" in done.stdout
        assert re.search(r"in 120 steps$", done.stdout, re.MULTILINE)


def test_a_restart_on_the_key_value_store_of_the_run_before_ends_before_it_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(EXAMPLES)
    import memory_task

    def joins(*_: object) -> None:
        raise ConnectionError("it has joined")

    monkeypatch.setattr("torch.distributed.init_process_group", joins)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    found = []
    for restarts, shared in (("0", "True"), ("1", "False"), ("1", "True")):
        settings = {"LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        settings |= {"TORCHELASTIC_RESTART_COUNT": restarts, "TORCHELASTIC_USE_AGENT_STORE": shared}
        settings["TORCHELASTIC_ERROR_FILE"] = "error.json"
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        with pytest.raises((ConnectionError, SystemExit)) as raised:
            memory_task.start()
        found.append(str(raised.value))
    assert found[:2] == ["it has joined"] * 2
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in found[2]
