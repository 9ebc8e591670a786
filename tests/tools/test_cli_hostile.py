"""Every option of every command, with values that cannot be meant: refused with one line, before any work.

The calls are generated from the commands themselves, so that a new option is tested on the day it is added, and a new
command fails here until it says what a sound call of it is. What takes long or does not end is replaced by
something short.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import patience

pytest.importorskip("typer")

import typer.testing

import geartrain as gt
import geartrain.tools.doctor as doctor
import geartrain_bench
from geartrain.__main__ import main
from geartrain.integrations import export_store, import_dataset
from geartrain.tools.cli import app

COMMAND = typer.main.get_command(app)

WORDS = ("", " ", "-", "nan", "a\nb", ":bomb:", "[red]x[/]", "[/", "\udcff", "x" * 5000, "../" * 40, "%s{0}")
#: By the type of an option: values that no option of that type takes.
NUMBERS = {
    "integer": ("", "x", "2.5", "nan", "inf", "1e3", "9" * 30, "-" + "9" * 30, "0x10"),
    "float": ("", "x", "nan", "inf", "-inf", "1e999", "1,5"),
}
KINDS = {"integer": ("'int'", "integer", "[int]"), "float": ("float",)}
#: By option: values of the right type that make no sense, beside those above.
SENSELESS = {
    "import": {
        "--capacity": ("0", "-1"),
        "--max-length": ("0", "-5"),
        "--on-too-long": ("skipp", *WORDS),
        "--format": ("hdf", *WORDS),
        "--cast": ("float64", "float64=", "=float32", "float64=float31", "a=b=c", *WORDS),
        "--option": (
            *("split", "=3", "no_such=1", "untimed=3", "untimed=no_such", "lengths=3", "ends=x", *WORDS),
            *(f"{name}=1" for name in inspect.signature(import_dataset).parameters),
        ),
        "--field": ("no-such", "=", "=obs", "obs=", *WORDS),
        "--episodes": ("-1", "99999", "1-3", "0:0", "::0", "3:1", ":::", "1,,2", "1,1", *WORDS),
        "--where": ("length", "length>", ">3", "length==4", "length>99999", "no_such=1", "length=x", *WORDS),
        "--into": ("", "missing/folder/x.gt", "/dev/null/x", "/proc/x.gt", "/tmp", "x" * 300, "a/" * 3000),
        "source": ("/no/such", "/dev/null", "/dev/zero", "/etc", "/proc/self/mem", *WORDS),
    },
    "export": {
        "store": ("/no/such", "/dev/null", "/etc", "/proc/self/mem", *WORDS),
        "path": ("", "missing/folder/x.npz", "/dev/null/x.npz", "/proc/x.npz", "/tmp", "x" * 300 + ".npz", *WORDS),
        "--format": ("hdf", *WORDS),
        "--field": ("no-such", "=", "=x", "x=", *WORDS),
        "--cast": ("float64", "float64=", "=float32", "float64=float31", "a=b=c", *WORDS),
        "--option": (
            *("split", "=3", "no_such=1", "compress=maybe", "compress=3", *WORDS),
            *(f"{name}=1" for name in inspect.signature(export_store).parameters),
        ),
        "--trust": ("all", "User", *WORDS),
    },
    "inspect": {
        "--rows": ("0", "-1", "10001"),
        "--png": ("", "missing/folder/x", "/dev/null", "/proc/x"),
        "name": ("/no/such", "/etc", "/dev/null", "/dev/zero", "/proc/self/mem", *WORDS),
        "--trust": ("all", "User", *WORDS),
    },
    "top": {
        "names": ("", " ", "a\nb", "\udcff"),
        "--every-s": ("0", "-1", "3601"),
        "--trust": ("all", "User", *WORDS),
    },
    "metrics": {
        "--port": ("-1", "65536"),
        "--host": ("300.1.1.1", "no such host", *WORDS),
        "--trust": ("all", "User", *WORDS),
    },
    "trace": {
        "paths": ("/no/such", "/dev/null", "/tmp", "list.json", "bytes.json", "constants.json", *WORDS),
        "--out": ("", "missing/folder/x.json", "/tmp", "/proc/x.json"),
    },
    "checkpoint": {
        "name": ("/no/such", "/etc", "/dev/null", "/proc/self/mem", *WORDS),
        "path": ("", "missing/folder/x", "/dev/null", "/proc/x", "data.npz", "\udcff"),
        "--every": ("0s", "10", "-1m", "10 x", "1e-3s", "900d", *WORDS),
        "--keep": ("0", "-1"),
        "--trust": ("all", "User", *WORDS),
    },
    "remove": {
        "name": ("/no/such", "/etc", "/dev/null", "/proc/self/mem", *WORDS),
        "--trust": ("all", "User", *WORDS),
    },
    "doctor": {
        "--peer": ("nonsense", "tcp=127.0.0.1:1", "id=x;tcp=a:b", "id=" + 32 * "0" + ";tcp=127.0.0.1:99999", *WORDS),
        "--transport": ("pigeon", *WORDS),
        "--host": ("300.1.1.1", "no such host", *WORDS),
        "--timeout-s": ("0", "-1"),
        "--megabytes": ("0", "-1", "68", "1e-9"),
    },
    "bench": {
        "name": ("no-such", *WORDS),
        "--json": ("", "missing/folder/x.json", "/tmp", "/proc/x.json"),
        "--plot": ("", "missing/folder/x.png", "/tmp", "plot.doc", "plot"),
        "--baseline-python": ("reverb", "=x", "reverb=", "reverb=/no/such", "reverb=/tmp", *WORDS),
        "--device": ("tpu", *WORDS),
        "--train-ms": ("-1",),
        "--case": ("SAC",),
    },
    "reducer": {
        "--bind": ("x", "127.0.0.1", ":", "127.0.0.1:99999", "127.0.0.1:-1", "127.0.0.1:²", "300.1.1.1:0", *WORDS),
        "--secret-file": ("", "/no/such", "/tmp", "/dev/null"),
        "--metrics-port": ("-1", "65536"),
        "--window": ("0", "-1"),
        "--every-s": ("-1",),
        "--grace-s": ("-1",),
    },
    "launch": {
        "job": (
            *("no.toml", "no_such_module", "no_such.py", "json:no_such", "json:dumps", "folder.toml", "binary.toml"),
            *("broken.py", "raising.py", "types-1.toml", "types-2.toml", "types-3.toml", "types-4.toml", *WORDS),
        ),
        "--folder": ("", "missing/folder/x", "/dev/null", "job.toml", "/proc/x"),
        "--timeout-s": ("0", "-1"),
        "--every-s": ("-1", "0"),
        "--metrics-port": ("-1", "65536"),
        "--metrics-host": ("",),
        "--hosts": ("0", "-1"),
        "--host": ("-1", "7"),
        "--master": ("x", "host", ":", "host:", ":1", "host:0", "host:99999", "host:²", *WORDS),
        "--coordinator-port": ("-1", "0", "65536"),
        "--ray": ("", " ", "a\nb", "\udcff"),
    },
    "generate slurm": {
        "job": ("no.toml", "no_such_module", "json:no_such", "broken.py", "raising.py", "types-3.toml", *WORDS),
        "--hosts": ("0", "-1", "100001"),
        "--option": ("partition", "=gpu", "Partition=x", "--mem=1", "nodes=3", 'mem="', "mem=\\", "mem=a\nb", *WORDS),
        "--setup": ("", " ", "a\nb", "\udcff"),
        "--python": ("", " ", "a\nb", "\udcff"),
    },
    "generate kubernetes": {
        "job": ("no.toml", "no_such_module", "json:no_such", "broken.py", "raising.py", "types-3.toml", *WORDS),
        "--image": ("", " ", "a b", "a\nb", "\udcff"),
        "--hosts": ("0", "-1", "100001"),
        "--description": ("", " ", "a\nb", "\udcff"),
        "--name": ("Upper", "a.b", "x" * 60, *(word for word in WORDS if word not in ("", "nan"))),
        "--namespace": ("Upper", "a.b", *(word for word in WORDS if word not in ("", "nan"))),
        "--secret": ("Upper", "a.b", *(word for word in WORDS if word not in ("", "nan"))),
        "--env": ("A", "=b", "1A=b", "A=a\nb", *WORDS),
        "--gpu-resource": ("", "a b", "/", "a/b/c", "a\nb"),
        "--max-restarts": ("-1", "1000001"),
    },
    "plan ranks": {
        "--hosts": ("0", "-1"),
        "--gpus": ("0", "-1"),
        "--rows": ("0", "-1"),
        "--batch": ("0", "-1", "7"),
        "--row-bytes": ("0", "-1"),
        "--link-gbit": ("0", "-1"),
        "--step-ms": ("-1",),
        "--share": ("2", "-1"),
        "--cores": ("0", "-1"),
        "--memory-gb": ("0", "-1"),
        "--constants": ("", "/no/such", "/tmp", "/dev/null", "list.json", "constants.json", "types.json", "bytes.json"),
        "--check": ("", "/no/such", "/tmp", "/dev/null", "list.json", "constants.json", "cases.json", "bytes.json"),
        "--json": ("", "missing/folder/x.json", "/tmp", "/proc/x.json"),
    },
    "plan allreduce": {
        "--workers": ("0", "8x", "x1Gbit", "8x0Gbit", "8xnanGbit", "999999999x1Gbit", "²x1Gbit", "8x1e999Gbit", *WORDS),
        "--bytes": ("-1", "nan", "1e999", "3 parsecs", *WORDS),
        "--reducers": ("8x", "1e999Gbit", ":bomb:", "x" * 5000),
        "--rtt": ("-1ms", "1", "nan", "1e999s", *WORDS),
        "--price-worker": ("-1",),
        "--price-reducer": ("-1",),
        "--compute": ("-1s", "1", "nan", "1e999s", *WORDS),
        "--json": ("", "missing/folder/x.json", "/tmp", "/proc/x.json"),
        "--plot": ("", "missing/folder/x.png", "/tmp", "plot.doc"),
    },
}  # fmt: skip
#: Sound calls, which the hostile ones differ from in one word.
SOUND = {
    "import": ["data.npz", "--into", "{store}", "--quiet"],
    "export": ["{existing}", "rows.npz", "--quiet", "--overwrite"],
    "inspect": [],
    "top": ["--once", "--every-s", "0.1"],
    "metrics": ["--dashboard"],
    "trace": ["trace.json"],
    "checkpoint": ["{existing}", "{folder}"],
    "remove": ["{existing}"],
    "doctor": ["--listen"],
    "bench": ["store"],
    "reducer": [],
    "launch": ["job.toml", "--folder", "run"],
    "generate slurm": ["job.toml", "--hosts", "2"],
    "generate kubernetes": ["shared.toml", "--image", "registry/x:1", "--hosts", "2"],
    "plan ranks": ["--hosts", "2", "--gpus", "1", "--batch", "8", "--rows", "1e4"],
    "plan allreduce": ["--workers", "2x1Gbit", "--reducers", "1x1Gbit", "--bytes", "1MB", "--price-worker", "1",
                       "--price-reducer", "1"],
}  # fmt: skip
#: Calls that need another sound one around the option: this instead of the command's own.
AROUND = {
    ("inspect", "--rows"): ["{existing}"],
    ("inspect", "--png"): ["{existing}", "--rows", "1"],
    ("checkpoint", "name"): ["--", "{value}", "series"],
    ("checkpoint", "path"): ["--", "{existing}", "{value}"],
    ("metrics", "--port"): [],
    ("metrics", "--host"): ["--port", "0"],
    ("doctor", "--peer"): [],
    ("doctor", "--transport"): ["--peer", "id=" + 32 * "0" + ";tcp=127.0.0.1:1"],
    ("doctor", "--timeout-s"): ["--peer", "id=" + 32 * "0" + ";tcp=127.0.0.1:1"],
    ("doctor", "--megabytes"): ["--peer", "id=" + 32 * "0" + ";tcp=127.0.0.1:1"],
    ("bench", "--train-ms"): ["ranks"],
    ("bench", "--case"): ["store"],  # which has none by name
    ("launch", "--hosts"): ["job.toml", "--folder", "run", "--host", "0", "--master", "127.0.0.1:29500"],
    ("launch", "--host"): ["job.toml", "--folder", "run", "--hosts", "2", "--master", "127.0.0.1:29500"],
    ("launch", "--master"): ["job.toml", "--folder", "run", "--hosts", "2", "--host", "0"],
    ("launch", "--coordinator-port"): [
        "job.toml", "--folder", "run", "--hosts", "2", "--host", "0", "--master", "127.0.0.1:29500",
    ],
}  # fmt: skip
#: What a refusal is about the world and not about the words: a file or store that is not there or holds something else.
OPERATING = {
    *(("import", each) for each in ("source", "--into", "--field", "--episodes", "--where", "--option")),
    *(("export", each) for each in ("store", "path", "--field", "--option")),
    *(("inspect", "name"), ("metrics", "--host"), ("trace", "paths"), ("remove", "name")),
    ("checkpoint", "name"),
    *(("doctor", "--peer"), ("doctor", "--host")),
    *(("reducer", "--bind"), ("reducer", "--secret-file")),
}  # fmt: skip


def commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def kind_of(parameter: Any) -> str:
    """ "integer", "float" or "text"; typer keeps the type in different places from one version to the next."""
    descriptor = getattr(parameter, "type_descriptor", None)
    found = str(descriptor.annotation if descriptor is not None else parameter.type.name)
    return next((kind for kind, words in KINDS.items() if any(word in found for word in words)), "text")


def hostile() -> Iterator[tuple[str, str, list[str]]]:
    """Command, option, and the words after the command: a sound call with one senseless value."""
    for name, command in commands(COMMAND):
        senseless = dict(SENSELESS[name])
        arguments = [each.name for each in command.params if each.param_type_name == "argument"]
        for parameter in command.params:
            option = parameter.opts[0]
            if parameter.param_type_name == "argument":
                option = parameter.name
            values = [*NUMBERS.get(kind_of(parameter), ()), *senseless.pop(option, ())]
            if getattr(parameter, "is_flag", False):
                values = []
            elif option != "--help":
                assert values, f"{name} {option}: no senseless value is known"
            for value in dict.fromkeys(values):
                sound = AROUND.get((name, option), SOUND[name])
                if "{value}" in sound:
                    words = [value if word == "{value}" else word for word in sound]
                elif parameter.param_type_name == "argument":
                    # `--` keeps a value that begins with a dash from being read as an option.
                    at, given = arguments.index(option), sound[: len(arguments)]
                    words = [*sound[len(arguments) :], "--", *given[:at], value, *given[at + 1 :]]
                else:
                    words = [*_without(sound, option), f"{option}={value}"]
                yield name, option, words
        assert not senseless, f"{name} has no {', '.join(senseless)}"
        yield name, "--no-such-option", [*SOUND[name], "--no-such-option=1"]
    yield "", "", ["no-such-command"]
    yield "plan", "", ["no-such-command"]
    yield "generate", "", ["no-such-command"]


def _without(words: list[str], option: str) -> list[str]:
    if option not in words:
        return words
    at = words.index(option)
    return [*words[:at], *words[at + 2 :]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one file of each kind that calls name."""
    place = tmp_path_factory.mktemp("hostile")
    np.savez(place / "data.npz", obs=np.zeros((2, 3, 4), "float32"), ids=np.arange(2))
    (place / "job.toml").write_text('name = "hostile"\n[learner]\nrun = ["true"]\n')
    (place / "shared.toml").write_text('name = "hostile"\nshared_memory_gb = 1\n[learner]\nrun = ["true"]\n')
    (place / "folder.toml").mkdir()
    (place / "binary.toml").write_bytes(bytes(range(256)))
    learner = '[learner]\nrun = ["true"]\n'
    for number, text in enumerate(
        (
            'name = "x"\nrole = 5\n' + learner,
            'name = "x"\ntimeout_s = "soon"\n' + learner,
            'name = "x"\ndirectory = 3\n' + learner,
            'name = "x"\n' + learner + "env = 3\n",
        ),
        1,
    ):
        (place / f"types-{number}.toml").write_text(text)
    (place / "broken.py").write_text("def job(:\n")
    (place / "raising.py").write_text("def job():\n    raise KeyError('x')\n")
    (place / "list.json").write_text("[1]")
    (place / "trace.json").write_text("[]")
    (place / "bytes.json").write_bytes(bytes(range(256)))
    (place / "constants.json").write_text(json.dumps({"constants": {"cores": 2}}))
    from geartrain.tools.plan.machine import DEFAULTS

    wrong = dict.fromkeys(DEFAULTS.as_json(), "x")
    (place / "types.json").write_text(json.dumps({"constants": wrong}))
    (place / "cases.json").write_text(
        json.dumps({"bench": "ranks", "constants": DEFAULTS.as_json(), "cases": [{"arm": "ordered"}, 3]})
    )
    return place


@pytest.fixture
def call(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store_name: Any) -> Iterator[Callable[..., Any]]:
    """Runs a call in this process, in `place`, with the work replaced."""
    import geartrain.collectives.reducer_main as reducer_main
    import geartrain.launch.launcher as launcher
    import geartrain.tools.peer_probe as peer_probe

    stopped = threading.Event()
    stopped.set()

    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("GEARTRAIN_SECRET", raising=False)
    for module in (reducer_main, peer_probe):
        monkeypatch.setattr(module, "set_by", lambda *_: contextlib.nullcontext(stopped))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(launcher.Launcher, "run", lambda self: None)
    load = geartrain_bench.load

    def bench(*, full: bool = False, train_ms: Any = None, **options: Any) -> None: ...

    def loaded(name: str, device: str = "cpu") -> Any:
        load(name, device)
        return bench

    monkeypatch.setattr(geartrain_bench, "load", loaded)
    monkeypatch.setattr(sys, "path", list(sys.path))
    store = gt.Store.create(store_name(), {"x": gt.Field((2,), "float32")}, max_length=3, capacity=2, persist=True)
    store.insert({"x": np.zeros((1, 3, 2), "f")})
    existing = store.name
    store.close()
    monkeypatch.setattr(typer.testing, "_get_command", lambda _: COMMAND)  # made once: it takes longer than a call

    def run(command: str, words: list[str], charset: str = "utf-8") -> Any:
        names = {"{store}": store_name(), "{existing}": existing, "{folder}": str(tmp_path / "folder")}
        runner = typer.testing.CliRunner(charset=charset)
        return runner.invoke(app, [*command.split(), *(names.get(word, word) for word in words)])

    yield run
    for left in ("/dev/shm/geartrain." + existing,):
        Path(left).unlink(missing_ok=True)


@pytest.mark.parametrize("command", [name for name, _ in commands(COMMAND)])
def test_the_sound_call_that_hostile_ones_differ_from_is_sound(command: str, call: Any) -> None:
    done = call(command, SOUND[command])
    assert done.exit_code == 0, (done.output, done.exception)


@pytest.mark.parametrize("command", [name for name, _ in commands(COMMAND)])
def test_every_command_writes_to_a_stdout_that_is_ascii(command: str, call: Any) -> None:
    for words in (["{existing}"] if command == "inspect" else SOUND[command], ["--help"]):
        done = call(command, words, charset="ascii")
        assert done.exit_code == 0, (done.output, done.exception)


def test_names_that_stdout_cannot_show_are_escaped(call: Any, store_name: Any) -> None:
    with gt.Store.create(store_name(), {"größe": gt.Field((), "float32")}, max_length=3, capacity=2) as store:
        assert "gr\\xf6\\xdfe" in call("inspect", [store.name], charset="ascii").stdout


CALLS = list(hostile())


@pytest.mark.parametrize("command", sorted({name for name, _, _ in CALLS}))
def test_hostile_calls_are_refused_with_one_line(command: str, call: Any, place: Path) -> None:
    before = sorted(place.rglob("*"))
    wrong = []
    for name, option, words in CALLS:
        if name != command:
            continue
        done = call(name, words)
        allowed = (1, 2) if (name, option) in OPERATING else (2,)
        raised = done.exception is not None and not isinstance(done.exception, SystemExit)
        lines = done.stderr.splitlines()
        if raised or done.exit_code not in allowed or len(lines) != 1 or not lines[0].startswith("error: "):
            said = repr(done.exception) if raised else done.stderr[:300]
            wrong.append(f"{name} {[word[:60] for word in words]}: {done.exit_code}, {said}")
    made = [str(each) for each in sorted(place.rglob("*")) if each not in before and "__pycache__" not in each.parts]
    assert not wrong, f"{len(wrong)} of {sum(name == command for name, _, _ in CALLS)}:\n" + "\n".join(wrong)
    assert not made, f"refused calls have left {made}"


def test_ctrl_c_while_the_parts_of_the_command_are_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "geartrain.tools.cli", Interrupted("geartrain.tools.cli"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "error: stopped by Ctrl-C\n"


def test_ctrl_c_in_a_command_is_one_line(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupted)
    done = call("doctor", [])
    assert done.exit_code == 130
    assert done.stderr == "error: stopped by Ctrl-C\n"


def test_names_are_shown_as_they_are(call: Any, store_name: Any) -> None:
    name = store_name() + "-:bomb:-[red]"
    with gt.Store.create(name, {":x: [b]": gt.Field((2,), "float32")}, max_length=3, capacity=2) as store:
        shown = call("inspect", [name]).stdout
        assert name in shown
        assert ":x: [b]" in shown
        assert name in call("remove", [name, "--force"]).stdout
        assert not store.path.exists()


def test_a_folder_that_is_not_there_is_not_created_for_an_output(call: Any, place: Path) -> None:
    done = call("plan ranks", [*SOUND["plan ranks"], "--json", "missing/plan.json"])
    assert done.exit_code == 2
    assert "missing/plan.json" in done.stderr
    assert not (place / "missing").exists()
    assert call("plan ranks", [*SOUND["plan ranks"], "--json", "plan.json"]).exit_code == 0
    assert json.loads((place / "plan.json").read_text())["clusters"]


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--help", "inspect --json", "top --once"])
@pytest.mark.parametrize("stdout", ["| head -c 1", "> /dev/full", ">&-", ">&- 2>&-"])
def test_a_stdout_that_is_full_closed_or_not_read_is_no_traceback(words: str, stdout: str, tmp_path: Path) -> None:
    line = f"set -o pipefail; {sys.executable} -m geartrain {words} {stdout}"
    ran = subprocess.run(
        ["bash", "-c", line],
        env={**os.environ, "GEARTRAIN_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=patience(30),
        check=False,
    )
    assert ran.returncode in (0, 1)
    assert "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr, ran.stderr
    if "full" in stdout:
        assert ran.returncode == 1 and ran.stderr.count("\n") == 1 and "No space left" in ran.stderr
