"""Reports of processes: what they have, who reads damaged ones, who removes those of ended processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import deadlines
import numpy as np
import preloaded
import pytest
from deadlines import patience
from reports import Owner, until

import geartrain.errors as errors
from geartrain.core import process_report
from geartrain.launch.host_metrics import values_of
from geartrain.launch.host_snapshot import take_snapshot

pytest.importorskip("typer")
pytest.importorskip("rich")

from geartrain.tools.watch.screen import Screen, plain_lines
from geartrain.tools.watch.watcher import Watcher


@pytest.fixture(autouse=True)
def host(reporting_host: Path) -> Path:
    return reporting_host


def test_a_process_reports_its_replays_and_nodes_and_leaves_none_behind(host: Path) -> None:
    program = (
        "import numpy as np, geartrain as gt, sys\n"
        "store = gt.Store.create('mine', {'x': gt.Field((2,), 'float32')}, max_length=1, capacity=9)\n"
        "store.insert({'x': np.zeros((9, 1, 2), np.float32)})\n"
        "replay = gt.Replay(store, gt.selection.Uniform(seed=0), batch_size=4, output='numpy')\n"
        "node = gt.rpc.Node('reporter')\n"
        "closed = gt.rpc.Node('closed'); closed.close()\n"
        "replay.sample(); replay.sample()\n"
        "sys.stdin.read()\n"
    )
    process = preloaded.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    with deadlines.killed(process):
        assert process.stdin is not None

        def reported() -> Any:
            mine = [each for each in take_snapshot()["processes"] if each["pid"] == process.pid]
            return mine and {one["kind"]: one for one in mine[0]["objects"]}

        found = until(  # a report may come between the batches
            lambda: (said := reported()) and "node" in said and said["replay"]["figures"]["batches"] == 2 and said
        )
        assert found["replay"]["name"] == "mine"
        assert found["replay"]["figures"]["waiting_s"] == 0.0
        assert found["node"]["name"] == "reporter" and found["node"]["figures"]["backlog"] == 0
        until(lambda: reported()["replay"]["rates"].get("batches") == 0.0)
        process.stdin.close()
        assert process.wait(patience(30)) == 0
    assert not (host / f"geartrain-report-{process.pid}.json").exists()


def test_a_report_of_a_killed_process_is_nobodys_and_goes_with_the_next(host: Path) -> None:
    program = "import geartrain as gt, time\nnode = gt.rpc.Node('killed')\ntime.sleep(600)\n"
    process = preloaded.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    path = host / f"geartrain-report-{process.pid}.json"

    def processes() -> list[Any]:
        return [each for each in take_snapshot()["processes"] if each["pid"] != os.getpid()]

    until(path.exists)
    process.kill()
    process.wait(patience(30))
    assert not processes()
    report = json.loads(path.read_text())
    path.write_text(json.dumps({**report, "pid": os.getpid(), "started": 1}))  # the pid is another process's by now
    assert not processes()
    assert process_report.remove_stale() == [path.name]


def report(**more: Any) -> dict[str, Any]:
    """What a process of another namespace has just written."""
    about = {"started": None, "namespace": "another", "command": "c", "at_s": time.time(), "period_s": 1.0}
    return {"format": process_report.FORMAT, "pid": os.getpid(), **about, "objects": [], **more}


def one(kind: str, **figures: Any) -> dict[str, Any]:
    return {"kind": kind, "name": "n", "figures": figures, "rates": {}}


def nested(levels: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for _ in range(levels):
        figures = {"in": figures}
    return figures


DAMAGED = {
    "deep": "[" * 200_000,
    "pid inf": json.dumps(report(pid=float("inf"))),
    "pid 0": json.dumps(report(pid=0)),
    "pid large": json.dumps(report(pid=10**30)),
    "at_s inf": json.dumps(report(at_s=float("inf"))),
    "at_s nan": json.dumps(report(at_s=float("nan"))),
    "later": json.dumps(report(at_s=time.time() + 1e6)),
    "period": json.dumps(report(period_s=1e300)),
    "rate": json.dumps(report(objects=[{"kind": "k", "name": "n", "figures": {}, "rates": {"a": 10**400}}])),
    "figures": json.dumps(report(objects=[{"kind": "k", "name": "n", "figures": nested(400), "rates": {}}])),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_report_ends_neither_the_reports_of_others_nor_top(host: Path, damage: str) -> None:
    bad = host / "geartrain-report-1.json"  # of a process that lives
    bad.write_text(DAMAGED[damage])
    owner = Owner()
    process_report.register(owner, "replay", lambda _: {"name": "whole", "calls": 3})
    mine = host / f"geartrain-report-{os.getpid()}.json"
    until(mine.exists, 10)
    snapshots, findings, _ = Watcher().look()
    assert list(snapshots[0]["unreadable"]) == [bad.name]
    assert [each["pid"] for each in snapshots[0]["processes"]] == [os.getpid()]
    plain_lines(snapshots, findings, 100)


@pytest.mark.parametrize(
    "wrong",
    [
        one("node", backlog=0, peers="text"),
        one("node", backlog=0, peers={"a": {"open": "text"}}),
        one("node", backlog=float("nan"), peers={}),
        one("group", rank=0),
        one("replay", stores="rows"),
        one("replay", error="ValueError: on purpose"),
    ],
    ids=["peers", "a peer", "nan", "a rank", "stores", "an error"],
)
def test_an_object_with_wrong_figures_is_an_error_of_its_own(host: Path, wrong: dict[str, Any]) -> None:
    (host / "geartrain-report-1.json").write_text(json.dumps(report(objects=[wrong, one("other", a=1)])))
    snapshots, findings, _ = Watcher().look()
    (process,) = snapshots[0]["processes"]
    assert "error" in process["objects"][0]["figures"] and process["objects"][1]["figures"] == {"a": 1}
    plain_lines(snapshots, findings, 100)
    values_of(snapshots[0])


def ended_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait(patience(30))
    return process.pid


def test_what_ended_processes_left_unfinished_or_unreadable_is_removed(host: Path) -> None:
    ended = ended_pid()
    kept = ["geartrain-report-x.json", "geartrain-report-1.json", f"geartrain-report-{os.getpid()}.new"]
    removed = [f"geartrain-report-{ended}.json", f"geartrain-report-{ended}.new"]
    for name in kept + removed:
        (host / name).write_text("[1, 2")
    assert sorted(process_report.remove_stale()) == removed
    assert sorted(each.name for each in host.iterdir()) == sorted(kept)


def test_figures_that_json_cannot_hold_are_an_error_of_their_object_alone(host: Path) -> None:
    circular: dict[str, Any] = {}
    circular["in"] = circular
    figures: dict[str, Any] = {
        "whole": {"v": np.arange(3), "large": np.zeros((10, 100)), "one": np.float32(0.5), "other": Path("/x")},
        "key": {"v": {(1, 2): 3}},
        "circular": circular,
        "number": {"v": 10**400},
        "large": {"v": "x" * (1 << 20)},
    }
    owners = [Owner() for _ in figures]
    for owner, name in zip(owners, figures, strict=True):
        process_report.register(owner, "other", lambda _, name=name: {"name": name, **figures[name]})
    (found,) = until(lambda: list(process_report.read_reports()), 10)
    by_name = {each.name: each.figures for each in found.objects}
    assert by_name.keys() == figures.keys()
    assert by_name["whole"] == {"v": [0, 1, 2], "large": "1000 elements", "one": 0.5, "other": "/x"}
    assert all(each.keys() == {"error"} for name, each in by_name.items() if name != "whole"), by_name
    process_report._reporter.close()
    assert not list(host.iterdir())


def test_a_write_that_fails_leaves_no_file(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(KeyboardInterrupt):
        process_report._reporter._write(host / "geartrain-report-1.json", [], 0, 1.0)
    assert not list(host.iterdir())


def test_a_report_has_as_many_objects_as_its_readers_read(host: Path) -> None:
    owners = [Owner() for _ in range(300)]
    for owner in owners:
        process_report.register(owner, "node", lambda _: {"name": "n", "v": "x" * 10_000})
    mine = host / f"geartrain-report-{os.getpid()}.json"

    def whole() -> Any:
        # The first report may be of those alone that were registered until then.
        found = [each for each in process_report.read_reports() if isinstance(each, process_report.ProcessReport)]
        return found and len(found[0].objects) + found[0].left_out == 300 and found[0]

    found = until(whole, 10)
    assert 1 << 19 < mine.stat().st_size <= 1 << 20 and 90 < len(found.objects) < 110
    screen = Screen([take_snapshot()])
    assert f"no room for: {found.left_out}" in screen.lines(200, 20)[0].plain


def test_a_forked_child_of_multiprocessing_leaves_no_report(host: Path) -> None:
    program = (
        "import multiprocessing, time, geartrain.core.process_report as report\n"
        "class Owner: pass\n"
        "owner = Owner()\n"
        "report.register(owner, 'node', lambda _: {'name': 'n'})\n"
        "def child(path=report.segments_directory()):\n"
        "    import os\n"
        "    report.register(owner, 'node', lambda _: {'name': 'n'})\n"
        "    while not (path / f'geartrain-report-{os.getpid()}.json').exists(): time.sleep(0.01)\n"
        "process = multiprocessing.get_context('fork').Process(target=child)\n"
        "process.start(); process.join(); assert process.exitcode == 0\n"
        "print(*(each.name for each in report.segments_directory().iterdir() if str(process.pid) in each.name))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=patience(60))
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")
    assert not list(host.iterdir())


def test_reports_are_off_where_the_period_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(process_report.PERIOD_VARIABLE, "0")
    assert process_report.period_s() == 0
    for wrong in ("-1", "nan", "often"):
        monkeypatch.setenv(process_report.PERIOD_VARIABLE, wrong)
        with pytest.raises(errors.ArgumentError, match="0 \\(no reports\\) to 3600"):
            process_report.period_s()
