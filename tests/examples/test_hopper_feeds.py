"""One learner, three feeds: equal windows give equal bits, and torchrl's are windows of the same episodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from deadlines import patience

import geartrain as gt

torch = pytest.importorskip("torch", reason="the learner is a torch model")
pytest.importorskip("rich", reason="the examples draw their progress bars with rich")

EXAMPLES = Path(__file__).parents[2] / "examples"
LENGTHS = (30, 7, 21, 1, 25, 19)
STEPS = 2
pytestmark = pytest.mark.usefixtures("one_thread")

ALONE = """
import json, sys
from pathlib import Path
import numpy as np, torch
sys.path.insert(0, sys.argv[1])
import hopper_feeds as feeds
torch.set_num_threads(1)
folder = Path(sys.argv[2])
episodes = feeds.Episodes.read(folder / "episodes.npz")
drawn = np.load(folder / "drawn.npy")
found = feeds.run(feeds.from_array(episodes, drawn), episodes, 5, len(drawn), set(), lambda model: 0.0)
assert not [name for name in sys.modules if name.split(".")[0] == "geartrain"]
print(json.dumps(found))
"""


@pytest.fixture
def feeds(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import hopper_feeds

    return hopper_feeds


@pytest.fixture
def store(feeds, store_name):
    """Episodes of Hopper's shapes, ragged, of random values."""
    import offline_gato_hopper as demo

    rng = np.random.default_rng(0)
    with gt.Store.create(store_name(), demo.FIELDS, max_length=32, capacity=len(LENGTHS)) as store:
        for number, length in enumerate(LENGTHS):
            with store.row(priority=float(length)) as row:
                for name in feeds.FIELDS:
                    row[name][:length] = rng.normal(size=row[name][:length].shape)
                row["kicked"] = number % 2 == 1
                row.length = length
        yield store


def test_the_array_of_another_process_gives_the_losses_and_weights_of_the_store_to_the_bit(feeds, store, tmp_path):
    feeds.record(store, tmp_path / "episodes.npz")
    episodes = feeds.Episodes.read(tmp_path / "episodes.npz")
    drawn = np.zeros((STEPS, 32, 2), np.int32)
    ours = feeds.run(feeds.from_geartrain(store, 5, STEPS, drawn), episodes, 5, STEPS, set(), lambda model: 0.0)
    assert ours["geartrain_imported"] and len(ours["losses"]) == STEPS
    np.save(tmp_path / "drawn.npy", drawn)
    command = [sys.executable, "-c", ALONE, str(EXAMPLES), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)
    assert done.returncode == 0, done.stderr
    plain = json.loads(done.stdout.splitlines()[-1])
    assert not plain["geartrain_imported"]
    assert plain["losses"] == ours["losses"]
    assert plain["weights"] == ours["weights"]
    drawn[0, 0, 1] = 0 if drawn[0, 0, 1] else LENGTHS[drawn[0, 0, 0]] - 1  # other numbers, other weights
    other = feeds.run(feeds.from_array(episodes, drawn[:1]), episodes, 5, STEPS, set(), lambda model: 0.0)
    assert other["losses"][0] != ours["losses"][0]


def test_numbers_of_other_episodes_are_refused(feeds, store, tmp_path):
    feeds.record(store, tmp_path / "episodes.npz")
    episodes = feeds.Episodes.read(tmp_path / "episodes.npz")
    for row, end in ((len(LENGTHS), 0), (-1, 0), (1, LENGTHS[1]), (0, -1)):
        with pytest.raises(SystemExit, match="other episodes"):
            next(feeds.from_array(episodes, np.array([[[row, end]]])))


def test_torchrl_feeds_windows_of_single_episodes_with_the_newest_step_at_the_right(feeds, store, tmp_path):
    pytest.importorskip("torchrl", reason="one feed is torchrl's")
    feeds.record(store, tmp_path / "episodes.npz")
    episodes = feeds.Episodes.read(tmp_path / "episodes.npz")
    seen = np.zeros(len(LENGTHS), int)
    for batch in feeds.from_torchrl(episodes, 0, 20):
        assert batch.mask.shape == (32, 20)
        assert batch.mask[:, -1].all() and (batch.mask[:, 1:] | ~batch.mask[:, :-1]).all(), "no step after a gap"
        assert all((batch[name][~batch.mask] == 0).all() for name in feeds.FIELDS)
        for window, mask in zip(batch["obs"].numpy(), batch.mask.numpy(), strict=True):
            row, end = np.argwhere((episodes.columns["obs"] == window[-1]).all(-1))[0]
            first = end - mask.sum() + 1
            assert first == max(0, end - 19), "as many steps as there are, 20 at most"
            assert np.array_equal(window[mask], episodes.columns["obs"][row, first : end + 1])
            seen[row] += 1
    assert (seen > 0.5 * 640 / len(LENGTHS)).all(), "episodes are equally likely"


def test_the_table_tells_equal_runs_from_others(feeds, tmp_path, capsys):
    point = {"step": 60, "share": 0.97, "train_s": 10.0, "cpu_s": 9.0}
    one = {
        "seed": 0,
        "steps": 2,
        "losses": [1.0, 0.5],
        "weights": "a",
        "points": [point],
        "passed": point,
        "wait_s": 0.1,
    }
    for feed in ("geartrain", "array"):
        (tmp_path / f"{feed}-0.json").write_text(json.dumps(one | {"feed": feed}))
    assert feeds.show(tmp_path) == 0
    assert "| array | 1 of 1 passed | 60 | 9.0 | 10.0 | 50.00 | 0.970 |" in capsys.readouterr().out
    (tmp_path / "array-0.json").write_text(json.dumps(one | {"feed": "array", "weights": "b"}))
    assert feeds.show(tmp_path) == 1
    assert "DIFFER" in capsys.readouterr().out
