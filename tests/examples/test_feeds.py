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
from geartrain.actors import StepResult

torch = pytest.importorskip("torch", reason="the learners are torch models")
pytest.importorskip("rich", reason="the examples draw their progress bars with rich")

EXAMPLES = Path(__file__).parents[2] / "examples"
LENGTHS = (30, 7, 21, 1, 25, 19)
STEPS = 2
TASKS = {"hopper_feeds": "Hopper", "mat_feeds": "Battles"}
pytestmark = pytest.mark.usefixtures("one_thread")

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


@pytest.mark.parametrize("task", ["hopper_feeds", pytest.param("mat_feeds", marks=pytest.mark.slow)], indirect=True)
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


def test_the_expert_is_what_the_undisturbed_episodes_tell(feeds, task, store):
    rows = gt.fetch(store, store.keys(), output="numpy")
    if task.name == "hopper_feeds":
        wanted = float(np.mean([rows["return_to_go"][i, 0] for i in range(len(LENGTHS)) if not rows["kicked"][i]]))
    else:
        wanted = 2 / 3
    assert feeds.kept(task, store).expert == pytest.approx(wanted)


def test_numbers_of_other_episodes_are_refused(feeds, task, store):
    episodes = feeds.kept(task, store)
    for row, end in ((len(LENGTHS), 0), (-1, 0), (1, LENGTHS[1]), (0, -1)):
        with pytest.raises(SystemExit, match="other episodes"):
            next(feeds.from_array(task, episodes, np.array([[[row, end]]])))


def test_torchrl_feeds_windows_of_single_episodes_with_the_newest_step_at_the_right(feeds, task, store):
    pytest.importorskip("torchrl", reason="one feed is torchrl's")
    episodes = feeds.kept(task, store)
    seen = np.zeros(len(LENGTHS), int)
    what = "obs" if task.name == "hopper_feeds" else "agents"
    for batch in feeds.from_torchrl(task, episodes, 0, 20):
        assert batch.mask.shape == (task.batch, task.context)
        assert batch.mask[:, -1].all() and (batch.mask[:, 1:] | ~batch.mask[:, :-1]).all(), "no step after a gap"
        for name in task.fields:
            assert batch[name].numpy().dtype == episodes.columns[name].dtype
            assert (batch[name][~batch.mask] == 0).all()
        for window, mask in zip(batch[what].numpy(), batch.mask.numpy(), strict=True):
            equal = (episodes.columns[what] == window[-1]).reshape(*episodes.columns[what].shape[:2], -1)
            row, end = np.argwhere(equal.all(-1))[0]
            first = end - mask.sum() + 1
            assert first == max(0, end - task.context + 1), "as many steps as there are"
            assert np.array_equal(window[mask], episodes.columns[what][row, first : end + 1])
            seen[row] += 1
    assert (seen > 0.5 * 20 * task.batch / len(LENGTHS)).all(), "episodes are equally likely"


def test_the_table_tells_equal_runs_from_others(feeds, task, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the table's picture is drawn with matplotlib")
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
    assert feeds.show(task, tmp_path) == 0
    assert "| array | 1 of 1 passed | 60 | 9.0 | 10.0 | 50.00 | 0.970 |" in capsys.readouterr().out
    feeds.plot(tmp_path, tmp_path / "picture.png", task)
    assert (tmp_path / "picture.png").stat().st_size > 5000
    (tmp_path / "array-0.json").write_text(json.dumps(one | {"feed": "array", "weights": "b"}))
    assert feeds.show(task, tmp_path) == 1
    assert "DIFFER" in capsys.readouterr().out


# --- battles --------------------------------------------------------------------------------------------------------

STALKER, ZEALOT = 2, 3


def scene(ours, theirs):
    """State and possible actions of one battle: (kind, x, y, share of health) of each unit, of both teams."""
    units = np.zeros((len(ours) + len(theirs), 10), "float32")
    for unit, (kind, x, y, health) in zip(units, [*ours, *theirs], strict=True):
        if health > 0:
            unit[[0, 1, 2, 4 + kind]] = health, x, y, 1
    available = np.ones((len(ours), 5 + len(theirs)), bool)
    for i, (kind, x, y, health) in enumerate(ours):
        for j, (_, a, b, alive) in enumerate(theirs):
            available[i, 5 + j] = alive > 0 and health > 0 and np.hypot(a - x, b - y) < (6 if kind == STALKER else 2)
        available[i, :4] = health > 0
    state = np.concatenate([units.ravel(), np.zeros(2 * len(units), "float32")])
    return state[None], available[None]


@pytest.mark.parametrize(
    ("ours", "theirs", "wanted"),
    [
        # both shoot the weaker one, though the other is nearer
        ([(STALKER, 10, 16, 1), (STALKER, 10, 17, 1)], [(ZEALOT, 12, 16, 1), (ZEALOT, 14, 16, 0.5)], [6, 6]),
        # out of reach: east and north, to the enemy that is weak
        ([(ZEALOT, 10, 16, 1), (ZEALOT, 16, 8, 1)], [(ZEALOT, 16, 16, 0.1), (ZEALOT, 30, 2, 1)], [1, 0]),
        # a hurt shooter goes west, away from who is near; the other one shoots
        ([(STALKER, 10, 16, 0.4), (STALKER, 10, 19, 1)], [(ZEALOT, 12, 16, 1)], [3, 5]),
        # but the last one stands
        ([(STALKER, 10, 16, 0.4), (STALKER, 10, 19, 0)], [(ZEALOT, 12, 16, 1)], [5, 4]),
        # and nobody walks into the wall
        ([(STALKER, 2, 16, 0.4), (STALKER, 9, 16, 1)], [(ZEALOT, 4, 16.5, 1)], [2, 5]),
        # far from the enemy, who is ahead waits
        ([(ZEALOT, 10, 16, 1), (ZEALOT, 6, 16, 1)], [(ZEALOT, 24, 16, 1)], [4, 1]),
    ],
)
def test_the_scripted_team(feeds, ours, theirs, wanted):
    focus_fire = importlib.import_module("focus_fire").focus_fire
    state, available = scene(ours, theirs)
    assert focus_fire(state, available)[0].tolist() == wanted


class Duel:
    """Battles of a zealot and a zealot of a tenth of its health, which stands; they last eight steps at most."""

    agents, actions = 1, 6

    def __init__(self, n):
        self.n = n

    def reset(self, seed):
        self.apart, self.left = np.arange(self.n) * 2.0 + 1, np.full(self.n, 8)
        return self.look()

    def look(self):
        scenes = [scene([(ZEALOT, 10, 16, 1)], [(ZEALOT, 10 + apart, 16, 0.1)]) for apart in self.apart]
        state, available = (np.concatenate(each) for each in zip(*scenes, strict=True))
        return {"agents": self.apart[:, None, None].astype("float32"), "available": available, "state": state}

    def step(self, actions):
        self.won = shot = actions[:, 0] == 5
        self.apart = self.apart + 2.0 * (actions[:, 0] == 3) - 2.0 * (actions[:, 0] == 1)
        self.left -= 1
        after = self.look()
        return StepResult(after, shot.astype("float32"), shot, ~shot & (self.left == 0), after, np.ones(self.n, bool))


def test_rows_hold_what_the_scripted_team_wants_whatever_is_done(feeds, store_name, monkeypatch):
    mat_feeds = importlib.import_module("mat_feeds")
    monkeypatch.setattr(mat_feeds, "DISTURBED", 0.6)
    battles = Duel(6)
    first = battles.reset(0)
    fields = {
        "agents": gt.Field((1, 1), "float32"),
        "available": gt.Field((1, 6), "bool"),
        "action": gt.Field((1,), "int64"),
        "won": gt.Field((), "bool", per_row=True),
        "disturbed": gt.Field((), "bool", per_row=True),
    }
    with gt.Store.create(store_name(), fields, max_length=9, capacity=6) as store:
        mat_feeds.record(store, battles, first, 0)
        episodes = feeds.kept(mat_feeds.Battles(), store)
    apart, action = episodes.columns["agents"][..., 0, 0], episodes.columns["action"][..., 0]
    for number, length in enumerate(episodes.lengths):
        wanted = np.where(apart[number, :length] < 2, 5, np.where(apart[number, :length] > 0, 1, 3))
        assert action[number, :length].tolist() == wanted.tolist()
        if number % 2 == 0:
            assert apart[number, :length].tolist() == [1.0 + 2 * left for left in range(number, -1, -1)]
    strays = [np.diff(apart[number, : episodes.lengths[number]]).tolist() for number in (1, 3, 5)]
    assert any(step != -2.0 for each in strays for step in each), "in the others something else is done"
    assert episodes.expert == 1.0


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
