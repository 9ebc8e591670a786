"""One endpoint serves metrics of all that a host has; the dashboard asks for nothing that is not there."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import deadlines
import preloaded
import pytest
from deadlines import patience

import geartrain.launch.host_metrics as host_metrics
from geartrain.core import process_report
from geartrain.core.counters import SharedCounters
from geartrain.launch.host_snapshot import take_snapshot
from geartrain.launch.metrics import COLUMNS
from geartrain.tools.watch.dashboard import dashboard

parser = pytest.importorskip("prometheus_client.parser")


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of segments that no other program uses."""
    monkeypatch.setenv("GEARTRAIN_DIR", str(tmp_path))
    monkeypatch.setenv(process_report.PERIOD_VARIABLE, "0.1")
    return tmp_path


def busy() -> str:
    """A program with one of everything, which says so and waits."""
    return (
        "import sys, numpy as np, geartrain as gt\n"
        "from geartrain import collectives, rpc, weights\n"
        "store = gt.Store.create('busy', {'x': gt.Field((2,), 'float32')}, max_length=1, capacity=9, persist=False)\n"
        "store.insert({'x': np.zeros((9, 1, 2), np.float32)})\n"
        "store.limiter.set(samples_per_insert=2, error_buffer=100)\n"
        "replays = [gt.Replay(store, gt.selection.Uniform(seed=0), 4, output='numpy') for _ in range(2)]\n"
        "for replay in replays: replay.sample()\n"
        "tasks = {'answer': gt.Task({'ids': gt.Field(('tokens',), 'int32')}), 'train': gt.Task(after='answer')}\n"
        "rows = gt.Store.create('tasks', {'x': gt.Field((), 'int64')}, tasks=tasks, capacity=8, span_bytes=4096)\n"
        "rows.insert({'x': np.arange(2)}); claim = rows.claim('answer', 1)\n"
        "publisher = weights.Publisher('busy-w'); publisher.publish(7, {'w': np.zeros(3, np.float32)})\n"
        "reader = weights.Reader('busy-w'); reader.latest()\n"
        "rpc.function(name='busy.echo')(lambda x: x)\n"
        "peer = rpc.Node('peer'); node = rpc.Node('node', peers={'peer': peer.address})\n"
        "assert node.call('peer', 'busy.echo', 5) == 5\n"
        "group = collectives.Group(0, 1); group.all_reduce(np.ones(4, np.float32))\n"
        "reducer = collectives.Reducer('127.0.0.1:0')\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )


def test_one_endpoint_serves_metrics_of_everything_and_the_dashboard_asks_for_no_other(host: Path) -> None:
    program = preloaded.Popen([sys.executable, "-c", busy()], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with deadlines.killed(program), SharedCounters.create("launch-odd\nname", 1, COLUMNS) as counters:
        assert program.stdout is not None and program.stdout.readline() == "ready\n"
        counters.slot(0)["steps"], counters.slot(0)["beat_s"], counters.slot(0)["pid"] = 5.0, 1.0, program.pid
        kinds = {"replay", "node", "group", "reducer", "reader"}
        until_s = time.monotonic() + patience(30)
        while not kinds <= {one["kind"] for each in take_snapshot()["processes"] for one in each["objects"]}:
            assert time.monotonic() < until_s
            time.sleep(0.02)
        command = [sys.executable, "-m", "geartrain", "metrics", "--port", "0"]
        served = preloaded.Popen(command, stdout=subprocess.PIPE)
        with deadlines.killed(served):
            assert served.stdout is not None
            url = served.stdout.readline().split()[-1]
            text = urllib.request.urlopen(url, timeout=patience(30)).read().decode()
            served.send_signal(signal.SIGTERM)
            assert served.wait(patience(30)) == 0
    found = {family.name: family for family in parser.text_string_to_metric_families(text)}

    def value(name: str, **labels: str) -> float:
        (sample,) = [
            each
            for each in found[name].samples
            if each.labels.items() >= labels.items() and not each.name.endswith("_created")
        ]
        return float(sample.value)

    assert found.keys() == host_metrics.METRICS.keys()
    assert {name for name, family in found.items() if not family.samples} == set(), "each has a value"
    assert value("geartrain_store_rows", store="busy") == 9
    assert value("geartrain_replay_rows", store="busy") == 8 <= value("geartrain_store_sampled", store="busy")
    assert value("geartrain_replay_batches", store="busy") == 2, "of both replays"
    assert value("geartrain_task_due", store="tasks", task="answer") == 1
    assert value("geartrain_limiter_error_buffer", store="busy") == 100
    assert value("geartrain_weights_version", weights="busy-w") == 7
    assert value("geartrain_weights_reader_version", weights="busy-w") == 7
    assert value("geartrain_rpc_messages_received", node="node", peer="peer") >= 1
    assert value("geartrain_group_operations", group="default", rank="0") == 1
    assert value("geartrain_process_steps", job="odd\\nname") == 5
    assert value("geartrain_process_stopped", pid=str(program.pid)) == 0

    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    names = {each for query in queries for each in re.findall(r"geartrain_\w+", query)}
    samples = {each.name for family in found.values() for each in family.samples}
    assert names <= samples, names - samples
    for query in queries:
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
        for name, windowed in re.findall(r"(rate\()?(geartrain_\w+)(?=\{)", query):
            counted = windowed.endswith("_total")
            assert bool(name) == counted or "stopped" in windowed, f"{windowed}: rates are of counters"
    labels = {name: set(metric.labels) | {"instance"} for name, metric in host_metrics.METRICS.items()}
    for panel in panels:
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            of = [labels[name.removesuffix("_total")] for name in re.findall(r"geartrain_\w+", target["expr"])]
            assert shown <= set.union(*of), f"{panel['title']}: {shown}"


def test_every_metric_has_a_unit_or_is_a_number_and_stands_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    for name, metric in host_metrics.METRICS.items():
        assert re.fullmatch(r"geartrain_[a-z_]+", name) and metric.about and not name.endswith("_total")
        prefix = "_".join(name.split("_")[:2])
        assert f"`{prefix}_" in page, name


def test_the_dashboard_comes_from_the_command_line() -> None:
    done = preloaded.run([sys.executable, "-m", "geartrain", "metrics", "--dashboard"], timeout=patience(60))
    assert json.loads(done.stdout)["title"] == "geartrain"


def test_objects_with_the_same_labels_add_up_their_counters_and_show_the_largest_gauge() -> None:
    def replay(batches: int, waiting_s: float) -> dict[str, Any]:
        figures = dict.fromkeys(("rows", "bytes", "redrawn", "wait_s", "make_s"), 0)
        return {"kind": "replay", "name": "s", "figures": {**figures, "batches": batches, "waiting_s": waiting_s}}

    empty = {"stores": [], "weights": [], "jobs": [], "pids": {}, "shm": {"bytes": 1, "free_bytes": 1}}
    objects = [replay(3, 1.5), replay(4, 0.5)]
    found = host_metrics.values_of({**empty, "processes": [{"pid": 1, "command": "\udce4", "objects": objects}]})
    assert found["geartrain_replay_batches"] == {("s", "\\udce4"): 7.0}
    assert found["geartrain_replay_waiting_seconds"] == {("s", "\\udce4"): 1.5}
    assert found["geartrain_store_rows"] == {}
