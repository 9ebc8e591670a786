"""The command line does what its help says, and refuses with one line."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
from deadlines import patience
from mounts import file_system

import geartrain as gt
from geartrain import weights

pytest.importorskip("typer")
import typer
from typer.testing import CliRunner

from geartrain.tools.cli.app import app


def geartrain(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return preloaded.run(
        [sys.executable, "-m", "geartrain", *args],
        env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1", **environment},
        timeout=patience(60),
    )


def make(name: str, **options: Any) -> gt.Store:
    store = gt.Store.create(
        name,
        {"obs": gt.Field((2,), "float32"), "id": gt.Field((), "int64", per_row=True)},
        max_length=10,
        capacity=8,
        **options,
    )
    store.insert(
        {"obs": np.zeros((5, 10, 2), "float32"), "id": np.arange(5)},
        priorities=[0, 0.001, 1, 10, 100],
        versions=range(5),
    )
    return store


def test_help_names_every_command() -> None:
    shown = geartrain("--help").stdout
    for command in ("import", "inspect", "checkpoint", "remove", "doctor", "bench"):
        assert command in shown


def test_a_paragraph_of_help_fills_the_lines_of_any_terminal() -> None:
    for width in (80, 110):
        lines = [line.strip() for line in geartrain("import", "-h", COLUMNS=str(width)).stdout.splitlines()]
        first = next(at for at, line in enumerate(lines) if line.startswith("Reads Minari"))
        paragraph = lines[first : lines.index("", first)]
        for line, after in itertools.pairwise(paragraph):
            assert len(line) + 1 + len(after.split()[0]) > width - 4, line


def test_version_is_told_without_a_command() -> None:
    assert geartrain("--version").stdout.startswith(f"geartrain {gt.__version__}, Python 3.")


def test_inspect_shows_schema_rows_bytes_and_weights(store_name: Any) -> None:
    with make(store_name()) as store:
        shown = geartrain("inspect", store.name).stdout
        assert "5 of 8 rows" in shown and "50 steps" in shown and "1 process attached" in shown
        assert "obs" in shown and "(2,)" in shown and "float32" in shown
        assert "1 rows have priority 0" in shown and "█" in shown
        about = json.loads(geartrain("inspect", store.name, "--json").stdout)
        assert about["rows"] == 5 and about["steps"] == 50 and about["versions"] == [0, 4]
        assert sum(about["priorities"]["rows"]) == 4 and about["priorities"]["zero"] == 1
        assert store.name in geartrain("inspect").stdout
        assert "every row is accounted for" in geartrain("inspect", store.name, "--audit").stdout
        audited = json.loads(geartrain("inspect", store.name, "--audit", "--json").stdout)
        assert audited["problems"] == [] and audited["rows"] == 5
        assert len(store) == 5, "looking changes nothing"


def test_inspect_says_what_it_does_not_audit(store_name: Any, tmp_path: Path) -> None:
    with make(store_name()) as store:
        store.save(tmp_path / "saved")
    for words, code, said in (
        (["--audit"], 2, "--audit is for one store: name it"),
        ([store.name, "--audit", "--rows", "1"], 2, "--audit and --rows exclude each other"),
        ([str(tmp_path / "saved"), "--audit"], 1, "names a checkpoint"),
        ([str(tmp_path / "saved"), "--rows", "1"], 1, "--rows is for stores"),
    ):
        done = geartrain("inspect", *words)
        assert done.returncode == code and said in done.stderr and not done.stdout, done


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
        assert refused.returncode == 1 and "1 living process uses" in refused.stderr
        assert store.path.exists()
        assert geartrain("remove", store.name, "--force").returncode == 0
        assert not store.path.exists()


def test_inspect_shows_a_journal(store_name: Any, tmp_path: Path) -> None:
    fields = {"obs": gt.Field((3,), "float32")}
    with gt.Store.create(store_name(), fields, max_length=4, capacity=8, journal=tmp_path / "journal") as store:
        store.insert({"obs": np.zeros((5, 4, 3), np.float32)})
    path = tmp_path / "journal"
    shown = geartrain("inspect", str(path)).stdout
    assert "journal: 5 rows of a store of 8" in shown and "obs" in shown
    with (path / "segment-00000001.bin").open("ab") as file:
        file.write(b"half a frame")
    about = json.loads(geartrain("inspect", str(path), "--json").stdout)
    assert (about["rows"], about["segments"], about["unfinished_bytes"]) == (5, 1, 12)


def test_inspect_shows_a_checkpoint(store_name: Any, tmp_path: Path) -> None:
    with make(store_name()) as store:
        store.save(tmp_path / "ckpt")
    assert "5 rows" in geartrain("inspect", str(tmp_path / "ckpt")).stdout


def test_import_takes_the_ends_of_flat_arrays_by_their_name_and_tells_options_as_they_are_written(
    tmp_path: Path,
) -> None:
    ends = np.isin(np.arange(12), (3, 11))
    np.savez(tmp_path / "flat.npz", x=np.zeros((12, 3)), reward=np.zeros((12, 1)), terminals=ends)
    flat, into = str(tmp_path / "flat.npz"), str(tmp_path / "flat.gt")
    refused = geartrain("import", flat, "--into", into)
    assert refused.returncode == 1 and "--option untimed=, or give --option ends= if" in " ".join(
        refused.stderr.split()
    )
    refused = geartrain("import", flat, "--into", into, "--option", "ends=dones")
    assert refused.returncode == 1 and "ends names no array: dones; there are x, reward, terminals" in refused.stderr
    done = geartrain("import", flat, "--into", into, "--option", "ends=terminals")
    assert done.returncode == 0 and "2 rows, 12 steps" in done.stdout, done.stderr
    with gt.Store.open(into) as store:
        assert set(store.fields) == {"x", "reward", "terminals"}


def test_import_says_that_a_table_with_a_record_a_step_has_episodes_of_one_step(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    records = {"flat": {"episode": [0, 0, 1], "x": [1.0, 2.0, 3.0]}, "lists": {"x": [[1.0, 2.0], [3.0]]}}
    for name, columns in records.items():
        parquet.write_table(arrow.table(columns), tmp_path / f"{name}.parquet")
        done = geartrain("import", str(tmp_path / f"{name}.parquet"), "--into", str(tmp_path / f"{name}.gt"))
        told = " ".join(done.stdout.split())
        assert done.returncode == 0 and ("every record became an episode of one step" in told) == (name == "flat"), told
    parquet.write_table(arrow.table({"name": ["a"], "x": [1.0]}), tmp_path / "text.parquet")
    refused = geartrain("import", str(tmp_path / "text.parquet"), "--into", str(tmp_path / "text.gt"))
    assert refused.returncode == 1 and "Leave these out with --skip-unsupported" in " ".join(refused.stderr.split())


def test_import_makes_a_store_from_a_file_of_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", obs=rng.normal(size=(6, 12, 3)), reward=np.ones((6, 12)))
    done = geartrain(
        "import", str(tmp_path / "data.npz"), "--into", str(tmp_path / "data.gt"), "--cast", "float64=float32"
    )
    assert done.returncode == 0, done.stderr
    with gt.Store.open(tmp_path / "data.gt") as store:
        assert len(store) == 6 and store.fields["obs"] == gt.Field((3,), "float32")
    again = geartrain("import", str(tmp_path / "data.npz"), "--into", str(tmp_path / "data.gt"))
    assert again.returncode == 1 and "exists already" in again.stderr


def test_a_killed_import_is_told_from_a_store_that_is_kept(tmp_path: Path, store_name: Any) -> None:
    np.savez(tmp_path / "data.npz", obs=np.ones((6, 12, 3)))
    whole, half = store_name(), store_name()
    assert geartrain("import", str(tmp_path / "data.npz"), "--into", whole).returncode == 0
    pid = os.fork()
    if pid == 0:  # as an import is killed: with some rows in a store that is to be kept
        _kept = make(half, persist=True)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    try:
        lines = geartrain("inspect").stdout.splitlines()
        told = {name: next(line for line in lines if name in line) for name in (whole, half)}
        assert "none (kept)" in told[whole] and "none (left behind)" in told[half], told
        assert "no process attached; those that were have been killed" in geartrain("inspect", half).stdout
        assert "killed" not in geartrain("inspect", whole).stdout
        for name, killed in ((whole, False), (half, True)):
            assert json.loads(geartrain("inspect", name, "--json").stdout)["closed_in_order"] == (not killed)
            again = geartrain("import", str(tmp_path / "data.npz"), "--into", name)
            said = " ".join(again.stderr.split())
            assert again.returncode == 1 and f"geartrain remove {name}" in said, said
            assert ("an import that was not finished" in said) == killed, said
    finally:
        for name in (whole, half):
            assert geartrain("remove", name).returncode == 0


def test_a_store_on_a_read_only_file_system_is_not_said_to_be_removed(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    with file_system(tmp_path / "small", "4m") as small:
        make(str(small / "kept.gt")).close()
        subprocess.run(["mount", "-o", "remount,ro", small], check=True)
        done = geartrain("remove", str(small / "kept.gt"))
        assert done.returncode == 1 and "cannot be removed" in done.stderr and not done.stdout, done
        assert (small / "kept.gt").exists()


def test_inspect_of_a_directory_shows_its_latest_checkpoint_or_says_what_it_lacks(
    store_name: Any, tmp_path: Path
) -> None:
    with make(store_name()) as store:
        assert geartrain("checkpoint", store.name, str(tmp_path / "series")).returncode == 0
    assert "5 rows" in geartrain("inspect", str(tmp_path / "series")).stdout
    (tmp_path / "empty").mkdir()
    done = geartrain("inspect", str(tmp_path / "empty"))
    assert done.returncode == 1 and "is a directory without a checkpoint" in " ".join(done.stderr.split())
    done = geartrain("inspect", GEARTRAIN_DIR=str(tmp_path / "absent"))
    assert "absent, which is no directory" in " ".join(done.stdout.split())


def test_sigterm_ends_an_import_without_a_trace(tmp_path: Path) -> None:
    """Schedulers and `timeout` end commands with SIGTERM."""
    np.savez(tmp_path / "data.npz", obs=np.zeros((200, 1000, 100), "float32"))
    into = tmp_path / "data.gt"
    importing = preloaded.Popen(
        [sys.executable, "-m", "geartrain", "import", str(tmp_path / "data.npz"), "--into", str(into)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    ends = time.monotonic() + patience(60)
    while not into.exists():
        assert importing.poll() is None and time.monotonic() < ends
        time.sleep(0.001)
    importing.terminate()
    _, told = importing.communicate(timeout=patience(60))
    assert importing.returncode == 143 and "stopped by SIGTERM" in told, told
    assert not into.exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("choose split= from train, or 'all'", "choose --option split= from train, or 'all'"),
        (
            "with max_length=12, or with on_too_long='truncate' or 'skip'",
            "with --max-length 12, or with --on-too-long truncate or skip",
        ),
        ("on_too_long is one of 'error', found 'foo'", "--on-too-long is one of 'error', found 'foo'"),
        ("write it with fields='other=name'", "write it with --field other=name"),
        ("the fields you want in fields=", "the fields you want in --field"),
        ("cast='bfloat16=float32' converts it", "--cast bfloat16=float32 converts it"),
        ("give format=, one of npz, npy", "give --format, one of npz, npy"),
        ("exists already; overwrite=True (--overwrite) replaces", "exists already; --overwrite replaces"),
        ("'format=x' is no file", "'format=x' is no file"),
    ],
)
def test_errors_of_imports_and_exports_name_the_options_of_the_command_line(text: str, told: str) -> None:
    from geartrain.tools.cli.dataset_options import in_words_of_options

    assert in_words_of_options(text) == told


@pytest.mark.parametrize(
    ("option", "instead"),
    [("fields", "it is --field"), ("max_length", "it is --max-length"), ("source", "the command's first argument")],
)
def test_what_is_no_option_of_a_format_is_refused_with_the_option_that_it_is(option: str, instead: str) -> None:
    from geartrain.errors import ArgumentError
    from geartrain.integrations import import_dataset
    from geartrain.tools.cli.dataset_options import key_values

    with pytest.raises(ArgumentError, match=instead):
        key_values([f"{option}=1"], import_dataset)


def test_an_episode_that_is_too_long_is_refused_in_the_words_of_the_command_line(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", obs=np.ones((6, 12, 3)))
    source, into = str(tmp_path / "data.npz"), str(tmp_path / "data.gt")
    done = geartrain("import", source, "--into", into, "--max-length", "5")
    assert done.returncode == 1 and "--max-length 12, or with --on-too-long truncate or skip" in " ".join(
        done.stderr.split()
    )
    done = geartrain("import", source, "--into", into, "--on-too-long", "foo")
    assert done.returncode == 2 and "--on-too-long is one of" in done.stderr


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


def test_doctor_says_what_works_and_why_not() -> None:
    findings = json.loads(geartrain("doctor", "--json").stdout)
    by_name = {finding["what"]: finding for finding in findings}
    assert by_name["shared memory"]["state"] == "ok" and "/dev/shm" in by_name["shared memory"]["because"]
    assert all(finding["because"] for finding in findings)


def test_without_its_packages_the_command_says_how_to_install_them(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')")
    command = [sys.executable, "-m", "geartrain", "doctor"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience(60), check=False)
    assert done.returncode == 1 and "pip install 'geartrain[cli]'" in done.stderr


@pytest.fixture
def listening() -> Iterator[str]:
    """The address that `geartrain doctor --listen` printed, in a process of its own."""
    process = preloaded.Popen(
        [sys.executable, "-m", "geartrain", "doctor", "--listen"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(patience(10)) == 0
        process.stdout.close()


def test_doctor_reaches_a_peer_and_says_how_fast_and_why_not_faster(listening: str) -> None:
    done = geartrain("doctor", "--peer", listening)
    assert done.returncode == 0, done.stderr
    for words in ("shm, the fastest that works", "the peer is another process", "us p50", "GB/s", "segment", "view"):
        assert words in done.stdout
    forced = geartrain("doctor", "--peer", listening, "--transport", "tcp", "--megabytes", "2", "--json")
    found = json.loads(forced.stdout)
    assert found["transport"] == "tcp" and found["forced"] and not found["authenticated"]
    assert found["round_trip_us"]["p99"] >= found["round_trip_us"]["p50"] > 0
    assert found["there_gb_s"] > 0 and found["back_gb_s"] > 0
    assert sum(found["bytes_by_path"]["sent"].values()) > 6e6
    assert sum(found["bytes_by_path"]["received"].values()) > 6e6


def test_doctor_fails_with_the_reason_where_a_peer_is_not_reached(listening: str) -> None:
    for arguments, code, words in (
        (("--peer", listening, "--transport", "inproc"), 1, "the peer is another process"),
        (
            ("--peer", listening, "--transport", "pigeon"),
            2,
            "transport is one of 'inproc', 'shm', 'tcp', found 'pigeon'",
        ),
        (("--peer", "id=" + 32 * "0" + ";tcp=127.0.0.1:1"), 1, "Connection refused"),
        (("--peer", "nonsense"), 2, "not an address"),
        (("--peer", listening, "--megabytes", "1e9"), 2, "up to 67.1 MB"),
        (("--transport", "tcp"), 2, "--transport is for --peer"),
        (("--listen", "--host", "0.0.0.0"), 1, "secret"),
    ):
        done = geartrain("doctor", *arguments)
        assert done.returncode == code
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    done = geartrain("doctor", "--peer", listening, GEARTRAIN_SECRET="s")
    assert done.returncode == 1 and "no secret" in done.stderr


def test_inspect_and_remove_know_weights(names: Any) -> None:
    name = names()
    with weights.Publisher(name) as publisher:
        assert "none yet" in geartrain("inspect", name).stdout
        publisher.publish(41, {"w": np.ones(250_000, "float32")})
        publisher.publish(42, {"w": np.ones(250_000, "float32")})
        listed = geartrain("inspect").stdout
        assert name in listed and "42" in listed and "alive" in listed
        about = json.loads(geartrain("inspect", name, "--json").stdout)
        assert about["version"] == 42 and about["published"] == 2 and about["version_bytes"] == 1_000_000
        assert about["has_publisher"] and about["in_use"]
        assert name in [entry["name"] for entry in json.loads(geartrain("inspect", "--json").stdout)]
        refused = geartrain("remove", name)
        assert refused.returncode == 1 and "--force" in refused.stderr
    killed = preloaded.run(
        [
            sys.executable,
            "-c",
            "import os, sys, numpy as np\nfrom geartrain import weights\n"
            "kept = weights.Publisher(sys.argv[1])\nkept.publish(7, {'w': np.ones(3)})\nos.kill(os.getpid(), 9)",
            name,
        ],
        timeout=patience(60),
    )
    assert killed.returncode == -signal.SIGKILL
    assert json.loads(geartrain("inspect", name, "--json").stdout)["in_use"] is False
    assert "behind)" in geartrain("inspect", name).stdout
    assert "version 7" in geartrain("remove", name).stdout
    assert name not in weights.names()


def test_a_board_of_a_killed_maker_is_shown_as_left_behind_and_can_be_removed(name: str) -> None:
    code = f"""
import os, signal
from geartrain.core.counters import SharedCounters
counters = SharedCounters.create({name!r}, 2, ("steps", "version"))
counters.slot(0)["steps"] = 40
counters.slot(1)["steps"] = 2
print("made", flush=True)
signal.pause()
"""
    for _ in range(5):  # any process that creates counters meanwhile removes those that were left behind
        maker = preloaded.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert maker.stdout is not None
        assert maker.stdout.readline() == "made\n"
        listed = geartrain("inspect")
        assert re.search(rf"{name} .* 2 .* a living process .* steps 42", listed.stdout), listed.stdout
        assert geartrain("remove", name).returncode == 1
        maker.kill()
        maker.wait()
        told, shown, removed = (
            geartrain("inspect", name, "--json"),
            geartrain("inspect", name),
            geartrain("remove", name),
        )
        if removed.returncode == 0:
            break
    about = json.loads(told.stdout)
    assert about["in_use"] is False
    assert about["totals"] == {"steps": 42.0, "version": 0.0}
    assert "left behind" in shown.stdout
    assert removed.stdout == f"removed the counters {name}\n"
    assert geartrain("remove", name).returncode == 1


def commands(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it."""
    yield words, command
    for name, one in getattr(command, "commands", {}).items():
        yield from commands(one, *words, name)


ALL_COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("words", ALL_COMMANDS, ids=" ".join)
def test_help_fits_80_columns_with_every_option_and_example_whole(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = CliRunner().invoke(app, [*words, "--help"])
    assert said.exit_code == 0
    lines = said.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in said.output
    for parameter in ALL_COMMANDS[words].params:
        for name in parameter.opts if parameter.param_type_name == "option" else ():
            assert re.search(rf"{name}(?![\w-])", said.output), name
    asked = re.findall(
        r"Example: (.*?)(?:\n\n|\Z)", inspect.cleandoc(ALL_COMMANDS[words].callback.__doc__ or ""), re.DOTALL
    )
    told = re.findall(r"Example:\s*\n((?:.*\\\s*\n)*.*)", said.output)  # a shell takes such lines as one
    assert [each.replace("\\", " ").split() for each in told] == [each.split() for each in asked]
