"""A trace loads, its slices nest, its flows pair up, and it is bounded; without one there is nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import deadlines
import preloaded
import pytest
from deadlines import patience

import geartrain.core.trace as trace
from geartrain.errors import ArgumentError

PROGRAM = Path(__file__).parents[1] / "support" / "traced.py"


@pytest.fixture(autouse=True)
def stopped() -> Any:
    """No test leaves a recording behind."""
    yield
    trace.stop()


def run(tmp_path: Path, path: Path) -> list[dict[str, Any]]:
    """The trace of two processes, which append to one file; the variable is read when geartrain is imported."""
    environment = {**os.environ, trace.VARIABLE: str(path), "GEARTRAIN_DIR": str(tmp_path)}
    command = [sys.executable, str(PROGRAM), str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
    for rank in ranks:
        with deadlines.killed(rank):
            assert rank.wait(patience(60)) == 0
    return trace.load(path)


def test_flows_of_batches_calls_and_all_reduces_pair_up_over_processes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = run(tmp_path, path)
    assert path.read_text().startswith("[\n") and json.loads(path.read_text().rstrip().rstrip(",") + "]") == events
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert sorted(names.values()) == ["node-0", "node-1"]
    begun = {(each["cat"], each["id"]): each for each in events if each["ph"] == "s"}
    ended = {(each["cat"], each["id"]): each for each in events if each["ph"] == "f"}
    assert len(begun) == sum(each["ph"] == "s" for each in events), "an arrow begins once"
    assert len(ended) == sum(each["ph"] == "f" for each in events)
    assert ended.keys() <= begun.keys()
    assert {cat for cat, _ in begun.keys() - ended.keys()} <= {"replay"}, "batches that nobody took"
    slices = [each for each in events if each["ph"] == "X"]
    for key, end in ended.items():
        begin = begun[key]
        assert begin["ts"] <= end["ts"], key
        for each in (begin, end):  # Perfetto binds it to the slice around it
            around = [
                one
                for one in slices
                if one["tid"] == each["tid"] and one["ts"] - 0.01 <= each["ts"] <= one["ts"] + one["dur"] + 0.01
            ]
            assert around, each
        crosses = names[begin["pid"]] != names[end["pid"]]
        assert crosses == (key[0] != "replay"), key
    flows = Counter(cat for cat, _ in ended)
    assert flows == {"replay": 12, "collective": 6, "rpc": 8}, flows
    found = Counter(each["name"] for each in slices)
    assert found["batch"] == 12 and found["make batch"] >= 12
    assert found["call traced.echo"] == 1 and found["send traced.echo"] == 1 and found["run traced.echo"] == 3
    assert found["run double"] == found["run traced.fail"] == 1
    assert found["begin all-reduce of default"] == 6
    by_thread: dict[Any, list[tuple[float, float]]] = {}
    for each in slices:
        by_thread.setdefault(each["tid"], []).append((each["ts"], each["ts"] + each["dur"]))
    for spans in by_thread.values():  # the format's rule for slices of a thread
        for begin, end in spans:
            for other, over in spans:
                assert not (begin + 0.01 < other < end - 0.01 and over > end + 0.01), "slices that overlap do not nest"


def test_events_in_memory_are_bounded_and_what_is_dropped_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(trace, "MOST", 10)
    monkeypatch.setattr(trace, "EVERY_S", 1e6)
    trace.start(tmp_path / "trace.json")
    for number in range(50):
        trace.slice_of(f"slice {number}", "test", 1.0, 2.0)
    trace.stop()
    events = trace.load(tmp_path / "trace.json")
    assert sum(each["ph"] == "X" for each in events) == 9  # and the thread's name
    assert [each["name"] for each in events if each.get("cat") == "trace"] == ["41 events dropped"]


def test_a_full_disk_or_a_folder_that_is_gone_stops_no_training(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    trace.start(folder / "trace.json")
    folder.rmdir()
    trace.slice_of("slice", "test", 1.0, 2.0)
    trace.stop()
    with pytest.raises(ArgumentError, match="in an existing folder"):
        trace.start(folder / "trace.json")


def test_off_there_is_no_recorder_no_thread_and_no_file(tmp_path: Path) -> None:
    assert not trace.on
    trace.slice_of("slice", "test", 1.0, 2.0)
    assert not [each for each in threading.enumerate() if each.name == "geartrain-trace"]
    trace.start(tmp_path / "%h.json")
    assert trace.on
    trace.stop()
    assert not trace.on and not list(tmp_path.iterdir())


def test_a_forked_child_records_its_own_events(tmp_path: Path, fork: Any) -> None:
    path = tmp_path / "trace.json"
    trace.start(path)
    trace.slice_of("parent", "test", 1.0, 2.0)

    def child() -> None:
        trace.slice_of("child", "test", 1.0, 2.0)
        trace.stop()

    pid = fork(child)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    trace.stop()
    slices = {(each["name"], each["pid"]) for each in trace.load(path) if each["ph"] == "X"}
    assert slices == {("parent", os.getpid()), ("child", pid)}


def test_a_forked_child_of_multiprocessing_writes_the_end_of_its_trace(tmp_path: Path) -> None:
    program = (
        "import multiprocessing, sys, geartrain.core.trace as trace\n"
        "trace.EVERY_S = 1e6\n"
        "trace.start(sys.argv[1])\n"
        "def child(): trace.slice_of('last', 'test', 1.0, 2.0)\n"
        "process = multiprocessing.get_context('fork').Process(target=child)\n"
        "process.start(); process.join(); assert process.exitcode == 0\n"
    )
    path = tmp_path / "trace.json"
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False, timeout=patience(60))
    assert done.returncode == 0
    assert [each["name"] for each in trace.load(path) if each["ph"] == "X"] == ["last"]


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ('{"ph": "X"}', "pid is no whole number: None"),
        ('{"ph": "X", "name": "a", "pid": "1", "ts": 1}', "pid is no whole number: '1'"),
        ('{"ph": "X", "pid": 1, "ts": 1}', "name is no text: None"),
        ('{"ph": "X", "name": ["a"], "pid": 1}', "name is no text"),
        ('{"ph": "X", "name": "a", "pid": 1, "ts": "z"}', "ts is no number: 'z'"),
        ('{"ph": "X", "name": "a", "pid": 1, "ts": NaN}', "ts is no number: nan"),
        (f'{{"ph": "X", "name": "a", "pid": 1, "ts": 1{"0" * 400}}}', "ts is no number: 1000"),
        ('{"ph": "M", "name": "process_name", "pid": 1, "args": 3}', "args are no object: 3"),
        ('{"ph": "M", "name": "process_name", "pid": 1, "args": {"wall_offset_us": "x"}}', "wall_offset_us is no num"),
    ],
)
def test_an_event_that_no_trace_has_is_named(tmp_path: Path, event: str, why: str) -> None:
    (tmp_path / "wrong.json").write_text(f"[\n{event},\n")
    for read in (trace.load, lambda path: trace.merge([path])):
        with pytest.raises(ArgumentError, match=why):
            read(tmp_path / "wrong.json")


def test_events_of_other_programs_have_fewer_keys(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(
        '[\n{"ph": "M", "name": "process_name", "pid": 1},\n{"ph": "X", "name": "a", "pid": 1, "cat": []},\n'
    )
    pytest.importorskip("typer")
    told = preloaded.run([sys.executable, "-m", "geartrain", "trace", str(path)], timeout=patience(60))
    assert told.returncode == 0 and len(trace.merge([path])) == 2
    assert told.stdout.splitlines()[-1] == f"next, open {path} at https://ui.perfetto.dev"


def test_traces_of_hosts_are_joined_by_their_wall_clocks(tmp_path: Path) -> None:
    paths = []
    for host, offset in (("a", 1000.0), ("b", 5000.0)):
        about = {"name": host, "host": host, "wall_offset_us": offset}
        at = {"pid": 7, "tid": 7}
        events = [
            {"ph": "M", "name": "process_name", **at, "args": about},
            {"ph": "X", "name": host, "cat": "rpc", "ts": 10.0, "dur": 1.0, **at, "args": {}},
            {"ph": "s", "name": "replay", "cat": "replay", "id": "7.1", "ts": 10.0, **at},
        ]
        paths.append(tmp_path / f"{host}.json")
        paths[-1].write_text("[\n" + "".join(json.dumps(each) + ",\n" for each in events))
    merged = trace.merge(paths)
    assert [each["ts"] for each in merged if each["ph"] == "X"] == [1010.0, 5010.0]
    assert len({each["pid"] for each in merged}) == len({each["id"] for each in merged if "id" in each}) == 2
    paths[0].write_text(paths[0].read_text() + '{"ph": "X", "na')  # a full disk
    assert len(trace.load(paths[0])) == 3
    joined = tmp_path / "joined.json"
    pytest.importorskip("typer")
    command = [sys.executable, "-m", "geartrain", "trace", *map(str, paths), "--out", str(joined)]
    told = preloaded.run(command, timeout=patience(60))
    assert told.stdout.startswith("2 processes; slices: 2 of rpc; 0 flows") and trace.load(joined) == trace.merge(paths)
    assert told.stdout.splitlines()[-1] == f"next, open {joined} at https://ui.perfetto.dev"
    told = preloaded.run(command[:-2], timeout=patience(60))
    assert told.stdout.splitlines()[-1].endswith(f"geartrain trace {' '.join(map(str, paths))} --out trace.json")
    for text in ("", "{}", "nothing", "[1]", '[{"a": 1}]'):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(ArgumentError, match="is not a trace"):
            trace.load(tmp_path / "wrong.json")
