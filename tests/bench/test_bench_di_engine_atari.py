"""DI-engine's DQN over two queues: runs, tables and refusals of its launcher, with a program in the place of Python."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import geartrain_bench.di_engine.atari as atari

FOUND = {"seconds": 4.0, "cpu_s": 3.0, "env_steps": 192, "train_iterations": 50}


def python(folder: Path, nng: str, geartrain: str) -> str:
    """An executable that is called as `worker.py QUEUE FOLDER EPOCHS`, and does what is said for a queue."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nif [ "$2" = nng ]; then {nng}; else {geartrain}; fi\nexec sleep 60\n')
    path.chmod(0o755)
    return str(path)


def writes(seconds: float) -> str:
    return f'echo \'{json.dumps(FOUND | {"seconds": seconds})}\' > "$3/new"; mv "$3/new" "$3/result.json"'


def test_the_table_has_the_ratio_of_both_queues_and_no_worker_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noting = f"echo $$ >> {tmp_path}/pids; "
    program = python(tmp_path, noting + writes(12.0), noting + writes(4.0))
    atari.main(["--python", program, "--epochs", "2", "--rounds", "2", "--json", str(tmp_path / "out.json")])
    said = capsys.readouterr().out
    assert "nng takes 3.00 times as long" in said
    assert "12.0 s (12.0 to 12.0), 192 environment steps" in said
    assert [len(runs) for runs in json.loads((tmp_path / "out.json").read_text())["runs"].values()] == [2, 2]
    for pid in (tmp_path / "pids").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_run_that_stalls_is_counted_and_tried_once_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = python(tmp_path, f"[ -e {tmp_path}/second ] && {writes(9.0)} || touch {tmp_path}/second", writes(3.0))
    atari.main(["--python", program, "--rounds", "1", "--limit-s", "2"])
    assert "9.0 s (9.0 to 9.0), 192 environment steps, 1 runs stalled" in capsys.readouterr().out


def test_a_worker_that_ends_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    program = python(tmp_path, "echo no such module >&2; exit 1", writes(3.0))
    with pytest.raises(SystemExit, match="a worker over nng has ended:\nno such module"):
        atari.main(["--python", program])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--epochs", "0"], "above zero"),
        (["--limit-s", "nan"], "above zero"),
        (["--rate-mbit", "200"], "between --hosts 2"),
        (["--python", "/nowhere/python"], "is not a program"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else "",
)
def test_senseless_options_are_refused(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        atari.main([*([] if "--python" in arguments else ["--python", "/bin/sh"]), *arguments])
    assert error.value.code == 2
    assert why in capsys.readouterr().err
