"""One learner, three feeds: equal windows give equal bits, and torchrl's are windows of the same episodes."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from deadlines import patience

import geartrain as gt

torch = pytest.importorskip("torch", reason="the learners are torch models")
pytest.importorskip("rich", reason="the examples draw their progress bars with rich")

EXAMPLES = Path(__file__).parents[2] / "examples"
LENGTHS = (30, 7, 21, 1, 25, 19)
STEPS = 2
TASKS = {"hopper_feeds": "Hopper", "mat_feeds": "Battles"}

ALONE = """
import importlib, json, sys
from pathlib import Path
import numpy as np, torch
sys.path.insert(0, sys.argv[1])
import feeds
torch.set_num_threads(1)
folder = Path(sys.argv[2])
task = getattr(importlib.import_module(sys.argv[3]), sys.argv[4])()
episodes = feeds.Episodes.read(folder / "episodes.npz")
drawn = np.load(folder / "drawn.npy")
found = feeds.run(task, feeds.from_array(task, episodes, drawn), episodes, 5, len(drawn), set(), lambda model: 0.0)
assert not [name for name in sys.modules if name.split(".")[0] == "geartrain"]
print(json.dumps(found))
"""


@pytest.fixture
def feeds(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("feeds")


@pytest.fixture(params=TASKS)
def task(feeds, request):
    return getattr(importlib.import_module(request.param), TASKS[request.param])()


@pytest.fixture
def store(task, store_name):
    """Episodes of the task's shapes, ragged, of random values; every second one is disturbed."""
    if task.name == "hopper_feeds":
        fields = importlib.import_module("offline_gato_hopper").FIELDS
    else:
        fields = {
            "agents": gt.Field((5, 12), "float32"),
            "available": gt.Field((5, 10), "bool"),
            "action": gt.Field((5,), "int64"),
            "won": gt.Field((), "bool", per_row=True),
            "disturbed": gt.Field((), "bool", per_row=True),
        }
    rng = np.random.default_rng(0)
    with gt.Store.create(store_name(), fields, max_length=32, capacity=len(LENGTHS)) as store:
        for number, length in enumerate(LENGTHS):
            with store.row(priority=float(length)) as row:
                for name, field in fields.items():
                    if field.per_row:
                        row[name] = number % 2 == 1 if name != "won" else number != 2
                    elif name == "available":
                        row[name][:length] = True
                    else:
                        values = row[name][:length]
                        integer = np.issubdtype(values.dtype, np.integer)
                        values[...] = rng.integers(10, size=values.shape) if integer else rng.normal(size=values.shape)
                row.length = length
        yield store


@pytest.mark.slow
@pytest.mark.parametrize("task", ["hopper_feeds", "mat_feeds"], indirect=True)
def test_the_array_of_another_process_gives_the_losses_and_weights_of_the_store_to_the_bit(
    feeds, task, store, tmp_path
):
    feeds.kept(task, store).write(tmp_path / "episodes.npz")
    episodes = feeds.Episodes.read(tmp_path / "episodes.npz")
    drawn = np.zeros((STEPS, task.batch, 2), np.int32)
    feed = feeds.from_geartrain(task, store, 5, STEPS, drawn)
    ours = feeds.run(task, feed, episodes, 5, STEPS, set(), lambda model: 0.0)
    assert ours["geartrain_imported"] and len(ours["losses"]) == STEPS
    np.save(tmp_path / "drawn.npy", drawn)
    module = next(name for name, each in TASKS.items() if each == type(task).__name__)
    command = [sys.executable, "-c", ALONE, str(EXAMPLES), str(tmp_path), module, TASKS[module]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)
    assert done.returncode == 0, done.stderr
    plain = json.loads(done.stdout.splitlines()[-1])
    assert not plain["geartrain_imported"]
    assert plain["losses"] == ours["losses"]
    assert plain["weights"] == ours["weights"]
    drawn[0, 0, 1] = 0 if drawn[0, 0, 1] else LENGTHS[drawn[0, 0, 0]] - 1  # other numbers, other weights
    feed = feeds.from_array(task, episodes, drawn[:1])
    other = feeds.run(task, feed, episodes, 5, STEPS, set(), lambda model: 0.0)
    assert other["losses"][0] != ours["losses"][0]


# --- battles --------------------------------------------------------------------------------------------------------

STALKER, ZEALOT = 2, 3


@pytest.mark.slow  # JAX compiles for many seconds
@pytest.mark.timeout(600)
def test_a_team_is_fed_from_end_to_end(feeds, tmp_path):
    pytest.importorskip("jaxmarl", reason="SMAX is an extra: pip install 'geartrain[smax]'")
    found = {}
    for feed in ("geartrain", "array"):
        command = [sys.executable, str(EXAMPLES / "mat_feeds.py"), "--quick", "--feed", feed, "--out", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience(280), check=False)
        assert done.returncode == 0, done.stderr
        found[feed] = json.loads((tmp_path / f"{feed}-0.json").read_text())
    assert found["geartrain"]["weights"] == found["array"]["weights"]
    assert not found["array"]["geartrain_imported"]
    assert found["array"]["episodes"] == 4
