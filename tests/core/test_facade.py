"""`import geartrain as gt`: every public name is there, and costs what it needs when it is first used."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

import geartrain as gt
from geartrain.errors import MissingDependencyError

# Public names that are subclasses of torch's; without it they are an error that says what to install.
NEED_TORCH = {"ReplayDataset"}
TORCH = importlib.util.find_spec("torch") is not None

# What gt.Store and gt.Replay may cost above `import numpy`: calls of functions, as a share of those that NumPy's own
# import makes. It is 0.41, and the same on every machine, however busy that is.
LARGEST_SHARE = 0.5


def in_a_fresh_process(code: str, **environment: str) -> dict[str, object]:
    program = f"import json, sys, time\nfound = {{}}\n{code}\nprint(json.dumps(found))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_every_public_name_is_found_and_listed():
    for name in gt.__all__:
        assert name in dir(gt)
        if TORCH or name not in NEED_TORCH:
            assert getattr(gt, name) is not None
        else:
            with pytest.raises(MissingDependencyError, match=rf"{name} needs torch: pip install"):
                getattr(gt, name)
    with pytest.raises(AttributeError, match="no attribute 'Weighted'"):
        gt.Weighted  # noqa: B018


def test_every_public_name_works_as_the_first_one():
    """One of each file is used as the first thing of geartrain, in a fork of its own of a process with NumPy."""
    names = [name for name in gt.__all__ if TORCH or name not in NEED_TORCH]
    names = list({gt._NAMES.get(name, (name,))[0]: name for name in names}.values())
    found = in_a_fresh_process(
        f"""
import os, traceback, numpy
for name in {names}:
    ours, childs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            import geartrain as gt
            assert getattr(gt, name) is not None and gt.__version__
            os.write(childs, b"well")
        except BaseException:
            os.write(childs, traceback.format_exc().encode())
        os._exit(0)
    os.close(childs)
    with open(ours) as told:
        found[name] = told.read()
    os.waitpid(child, 0)
assert "geartrain" not in sys.modules
"""
    )
    assert found == dict.fromkeys(names, "well")


def test_store_and_replay_load_neither_torch_nor_processes_nor_the_network():
    found = in_a_fresh_process(
        "import numpy\n"
        "numpys = set(sys.modules)\n"  # subprocess among them on CPython 3.10
        "import geartrain as gt\n"
        "gt.Store, gt.Replay, gt.selection.Uniform\n"
        "found['modules'] = sorted(set(sys.modules) - numpys)"
    )
    modules = found["modules"]
    assert isinstance(modules, list)
    unwanted = ("torch", "triton", "rich", "typer", "subprocess", "multiprocessing", "tempfile", "socket", "asyncio")
    assert not {*unwanted, "decimal"} & set(modules)
    rooms = {module.split(".")[1] for module in modules if module.startswith("geartrain.")}
    # Of devices only the options are loaded.
    assert not {"geartrain.replay.device.target", "geartrain.device.pinned_memory", "logging"} & set(modules)
    assert not rooms & {"rpc", "weights", "actors", "collectives", "launch", "integrations", "tools", "transport"}


def test_store_and_replay_are_imported_quickly(tmp_path):
    code = """
calls = [0]
def count(frame, event, argument):
    calls[0] += event in ("call", "c_call")
sys.setprofile(count)
import numpy
numpys = calls[0]
import geartrain as gt
gt.Store, gt.Replay
sys.setprofile(None)
found["share"] = (calls[0] - numpys) / numpys
"""
    # As installed packages are: with bytecode, which the first process writes.
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    in_a_fresh_process(code, **bytecode)
    share = in_a_fresh_process(code, **bytecode)["share"]
    assert float(str(share)) < LARGEST_SHARE


def test_transport_loads_no_replay():
    found = in_a_fresh_process(
        "import geartrain.transport\n"
        "found['rooms'] = sorted({name.split('.')[1] for name in sys.modules if name.startswith('geartrain.')})"
    )
    assert set(map(str, found["rooms"])) <= {"transport", "core", "errors", "_native"}, found
