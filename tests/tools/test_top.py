"""`geartrain top` shows what a host does, and names who stands still; it disturbs nothing, whatever it finds."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import deadlines
import grpo
import numpy as np
import preloaded
import pytest
from deadlines import patience
from reports import Owner, make, until

import geartrain as gt
from geartrain import collectives, rpc, weights
from geartrain.core import process_report
from geartrain.core.counters import SharedCounters
from geartrain.launch.host_metrics import values_of
from geartrain.launch.host_snapshot import take_snapshot
from geartrain.launch.metrics import COLUMNS
from geartrain.rpc.probe import ABOUT

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from geartrain.tools.cli.app import app
from geartrain.tools.watch.causes import find_causes
from geartrain.tools.watch.rates import add_rates
from geartrain.tools.watch.screen import Screen, plain_lines
from geartrain.tools.watch.sections import sections_of
from geartrain.tools.watch.terminal import keys_of
from geartrain.tools.watch.watcher import Watcher

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True)
def host(reporting_host: Path) -> Path:
    return reporting_host


@pytest.mark.usefixtures("preloaded_children")
def test_a_stopped_actor_is_named_as_the_cause_of_the_learners_wait(tmp_path: Path, host: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        f'name = "watched"\ndirectory = "{SUPPORT}"\n[learner]\nrun = "watched:learn"\n'
        '[role.actor]\nkind = "actor"\nrun = "watched:act"\n'
    )
    launcher = preloaded.Popen(
        [sys.executable, "-m", "geartrain", "launch", str(job), "--folder", str(tmp_path / "logs"), "--lines"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with deadlines.killed(launcher):
        watcher = Watcher()

        def processes() -> dict[str, dict[str, Any]]:
            (snapshot,), _, _ = watcher.look()
            return {each["name"]: each for job in snapshot["jobs"] for each in job["processes"]}

        def busy() -> dict[str, dict[str, Any]] | None:
            found = processes()
            rates = [each["rates"].get("steps", 0.0) for each in found.values()]
            named = found.keys() == {"learner-0", "actor-0"}  # by the launcher's report, its first
            return found if named and min(rates) > 0 else None

        found = until(busy)
        actor = found["actor-0"]["pid"]
        deadlines.stop(actor)
        try:

            def blamed() -> Any:
                _, findings, _ = watcher.look()
                # Before the limiter's lead is used up, its waits have another reason.
                waits = [each for each in findings if each.level == "waits" and "learner-0" in each.about]
                return waits and "when more rows are inserted" in waits[0].text and (findings, waits[0])

            findings, wait = until(blamed)
            name = f"actor-0 of watched (pid {actor})"
            assert wait.cause == [name]
            assert findings[0].level == "stopped" and findings[0].cause == [name]
            assert f"{name} is stopped" in findings[0].text and "because of it learner-0 of watched" in findings[0].text
            shown = preloaded.run(
                [sys.executable, "-m", "geartrain", "top", "--once", "--every-s", "0.2"],
                env={**os.environ, "COLUMNS": "140", "NO_COLOR": "1"},
                timeout=patience(60),
            ).stdout
            assert re.search(r"^! actor-0 of watched .* is stopped", shown), shown
            assert re.search(r"^actor-0 +STOPPED", shown, re.MULTILINE), shown
            assert re.search(r"^watched .* sample waits", shown, re.MULTILINE) or "waits for batches" in shown
        finally:
            os.kill(actor, signal.SIGCONT)
        until(lambda: not [each for each in watcher.look()[1] if each.level == "stopped"])


def test_a_look_leaves_no_trace_in_what_it_reads(host: Path) -> None:
    with make() as store, SharedCounters.create("of-mine", 1, ("steps",)):
        before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in host.iterdir()}
        clients = store.native.live_clients()
        for _ in range(3):
            take_snapshot()
        after = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in host.iterdir()}
        assert (after, store.native.live_clients()) == (before, clients)


def test_what_vanishes_or_is_damaged_is_an_entry_and_no_end(host: Path) -> None:
    with make("whole") as whole:
        (host / "geartrain.cut").write_bytes(whole.path.read_bytes()[:5000])
        (host / "geartrain.nothing").write_bytes(b"")
        (host / "geartrain.\x1b[2Jbell\a").write_bytes(b"\0" * 9000)
        (host / "geartrain-weights.bad").write_bytes(b"x" * 5000)
        (host / "geartrain-board-bad").write_bytes(b"{" * 5000)
        (host / "geartrain-report-1.json").write_text("[1, 2")
        (host / "geartrain-report-2.json").write_text('{"format": "geartrain-report-9"}')
        (host / "geartrain-report-3.json").symlink_to("/etc/passwd")
        snapshots, findings, _ = Watcher().look()
        by_name = {each["name"]: each for each in snapshots[0]["stores"]}
        assert by_name["whole"]["rows"] == 5
        assert all("error" in by_name[name] for name in ("cut", "nothing", "\x1b[2Jbell\a"))
        assert "error" in snapshots[0]["weights"][0] and "error" in snapshots[0]["jobs"][0]
        assert sorted(snapshots[0]["unreadable"]) == [f"geartrain-report-{n}.json" for n in (1, 2, 3)]
        for width in (200, 80, 20):
            lines = plain_lines(snapshots, findings, width)
            assert not [line for line in lines if "\x1b" in line.plain or "\a" in line.plain]
        json.dumps(snapshots)


def a_replay(stack: contextlib.ExitStack) -> gt.Replay:
    store = stack.enter_context(make("sampled", persist=False))
    replay = stack.enter_context(gt.Replay(store, gt.selection.Uniform(seed=0), 4, output="numpy"))
    replay.sample()
    return replay


def a_node(stack: contextlib.ExitStack) -> rpc.Node:
    peer = stack.enter_context(rpc.Node("peer"))
    node = stack.enter_context(rpc.Node("node", peers={"peer": peer.address}))
    assert node.call("peer", ABOUT)["name"] == "peer"
    return node


def a_reader(stack: contextlib.ExitStack) -> weights.Reader:
    publisher = stack.enter_context(weights.Publisher("read"))
    publisher.publish(7, {"w": np.zeros(3, np.float32)})
    reader = stack.enter_context(weights.Reader("read"))
    reader.latest()
    return reader


def of_processes(kind: Any) -> Callable[[contextlib.ExitStack], Owner]:
    """A job or pool: what its owner reports of a process that is there."""

    def made(stack: contextlib.ExitStack) -> Owner:
        counters = stack.enter_context(SharedCounters.create(f"launch-of-{kind}", 1, COLUMNS))
        counters.slot(0)["pid"], counters.slot(0)["beat_s"] = os.getpid(), time.time()
        process = {"name": "actor-0", "kind": "actor", "pid": os.getpid(), "restarts": 1, "exit_code": None}
        owner = Owner()
        process_report.register(
            owner, kind, lambda _: {"name": kind, "counters": f"launch-of-{kind}", "processes": [process]}
        )
        return owner

    return made


#: One of each kind that a process reports.
OBJECTS: dict[str, Callable[[contextlib.ExitStack], object]] = {
    "replay": a_replay,
    "node": a_node,
    "group": lambda stack: stack.enter_context(collectives.Group(0, 1)),
    "reducer": lambda stack: stack.enter_context(collectives.Reducer("127.0.0.1:0")),
    "reader": a_reader,
    "job": of_processes("job"),
    "pool": of_processes("pool"),
}


@pytest.mark.parametrize("kinds", [*([kind] for kind in OBJECTS), list(OBJECTS)], ids="-".join)
def test_every_kind_of_object_has_its_line_in_every_view(host: Path, kinds: list[str]) -> None:
    assert set(OBJECTS) == set(get_args(process_report.Kind))
    with contextlib.ExitStack() as stack:
        made = [OBJECTS[kind](stack) for kind in kinds]
        tasked = stack.enter_context(grpo.new_store("tasked"))
        grpo.insert(tasked, range(3))
        claim = tasked.claim("answer", 2)
        watcher = Watcher()
        stack.callback(watcher.close)

        def reported() -> Any:
            snapshots, findings, _ = watcher.look()
            there = [one for each in snapshots[0]["processes"] for one in each["objects"]]
            assert not [one for one in there if "error" in one["figures"]]
            rated = {one["kind"] for one in there if one["rates"] or one["kind"] in ("job", "pool")}
            return rated >= set(kinds) and (snapshots, findings)

        snapshots, findings = until(reported)
        assert len(made) == len(kinds) and len(claim) == 2
    sections = {each.title: each for each in sections_of(snapshots)}
    of = {"replay": "replays", "node": "peers", "reader": "weights", "job": "processes", "pool": "processes"}
    for kind in kinds:
        assert sections[of.get(kind, "groups")].lines, kind
    if len(kinds) == len(OBJECTS):
        empty = {
            (section.title, column.name)
            for section in sections.values()
            for at, column in enumerate(section.columns)
            if all(line.values[at] is None for line in section.lines)
        }
        assert empty == {("replays", "now waits"), ("groups", "lost"), ("groups", "failed")}, "of what did not happen"
    screen = Screen(snapshots)
    for number, section in enumerate(sections.values(), 1):
        for key in (str(number), *("s" for _ in section.columns), "enter", "esc"):
            screen.press(key)
            assert len(screen.lines(200, 50)) == 50
    assert len(plain_lines(snapshots, findings, 80)) > len(kinds)
    assert any(values_of(snapshots[0]).values())


def test_rates_are_over_the_time_between_two_looks_and_none_of_a_store_made_anew(host: Path) -> None:
    with make() as store:
        before = take_snapshot()
        store.insert({"x": np.zeros((30, 1, 2), np.float32)})
        now = take_snapshot()
        now["at_s"] = before["at_s"] + 2.0
        assert add_rates(before, now)["stores"][0]["rates"]["inserted"] == 15.0
    with make():
        assert add_rates(now, take_snapshot())["stores"][0]["rates"] == {}
    assert add_rates(None, now)["stores"][0]["rates"] == {}


def snapshot(**more: Any) -> dict[str, Any]:
    """A host of three ranks and an agent, where nothing waits."""

    def group(rank: int, issued: int, operations: int, rate: float) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "rank": rank,
            "world_size": 3,
            "epoch": 0,
            "issued": issued,
            "operations": operations,
        }
        figures |= {"failed": "", "lost_reducers": 0}
        return {"kind": "group", "name": "grads", "figures": figures, "rates": {"operations": rate, "array_bytes": 0.0}}

    def node(name: str, peers: dict[str, Any], received: float) -> dict[str, Any]:
        rates = {f"peers.{peer}.messages_received": received for peer in peers}
        return {"kind": "node", "name": name, "figures": {"peers": peers, "backlog": 0}, "rates": rates}

    counts = {"open": 1, "transport": "shm", "messages_sent": 9, "messages_received": 8, "bytes_sent": 1}
    objects = {
        10: [group(0, 7, 6, 0.0)],
        11: [group(1, 6, 6, 0.0)],
        12: [group(2, 7, 6, 0.0), node("caller", {"agent-0": {**counts, "bytes_received": 1}}, 0.0)],
        13: [node("agent-0", {}, 0.0)],
    }
    processes = [
        {"pid": pid, "command": f"rank{pid - 10}", "age_s": 0.2, "period_s": 1.0, "objects": each}
        for pid, each in objects.items()
    ]
    pids = {
        str(pid): {
            "state": "S",
            "stopped": False,
            "command": "python",
            "cpu_s": 1.0,
            "rss_bytes": 1 << 20,
            "threads": 2,
        }
        for pid in objects
    }
    made = {
        "format": "geartrain-host-1", "id": "1", "host": "one", "at_s": 100.0, "stores": [], "weights": [], "jobs": [],
        "shm": {"directory": "/dev/shm", "bytes": 100, "free_bytes": 90}, "processes": processes, "pids": pids,
        "unreadable": {},
    }  # fmt: skip
    return {**made, **more}


def test_the_rank_that_began_the_fewest_all_reduces_is_the_cause() -> None:
    found = [each for each in find_causes([snapshot()]) if "all-reduce" in each.text]
    assert [each.about for each in found] == ["rank 0 of grads", "rank 2 of grads"]
    assert all(each.cause == ["rank1 (pid 11)"] for each in found)


def test_a_stopped_agent_is_the_cause_of_calls_without_a_reply() -> None:
    stopped = snapshot()
    stopped["pids"]["13"] |= {"stopped": True, "state": "T"}
    first, *rest = find_causes([stopped])
    assert (first.level, first.cause) == ("stopped", ["agent-0 (pid 13)"]) and "because of it caller" in first.text
    assert any(each.text.endswith("its process is stopped") and each.cause == first.cause for each in rest)


def test_causes_are_found_across_hosts() -> None:
    here, there = snapshot(), snapshot(host="two")
    here["processes"] = here["processes"][:1]
    there["processes"] = there["processes"][1:]
    there["pids"]["11"] |= {"stopped": True, "state": "T"}
    found = find_causes([here, there])
    assert (found[0].level, found[0].host) == ("stopped", "two")
    wait = next(each for each in found if each.about == "rank 0 of grads")
    assert wait.cause == ["rank1 (pid 11)"] and wait.host == "one"
    assert {section.title: len(section.lines) for section in sections_of([here, there])}["groups"] == 3


@pytest.mark.parametrize("lost", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["all", "lost"])
def test_all_hosts_of_a_job_are_asked_through_their_launchers(
    tmp_path: Path, host: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    monkeypatch.setenv("GEARTRAIN_SECRET", "of the job")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = (
        "import sys, geartrain as gt\n"
        "from geartrain.launch.coordinator import Coordinator\n"
        "from geartrain.launch.hosts import HostPosition\n"
        f"number, position = int(sys.argv[1]), HostPosition(int(sys.argv[1]), 3, coordinator_port={port})\n"
        "store = gt.Store.create(f'on-{number}', {'x': gt.Field((), 'float32')}, max_length=1, capacity=4)\n"
        "coordinator = Coordinator(position, 'same', lambda: None)\n"
        "print(coordinator.address, flush=True)\n"
        "sys.stdin.read()\n"
        "coordinator.close(); store.close()\n"
    )
    launchers, addresses = [], []
    with contextlib.ExitStack() as stack:
        for number in range(2):  # the third one never joins
            folder = host if number == 0 else tmp_path / "other"
            folder.mkdir(exist_ok=True)
            one = preloaded.Popen(
                [sys.executable, "-c", program, str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "GEARTRAIN_DIR": str(folder)},
            )
            launchers.append(stack.enter_context(deadlines.killed(one)))
            assert one.stdout is not None
            addresses.append(one.stdout.readline().strip())
            assert addresses[-1]
        report = {"counters": "launch-far", "coordinator": addresses[0], "host": 0, "hosts": 3, "processes": []}
        stack.enter_context(SharedCounters.create("launch-far", 1, COLUMNS))
        owner = type("Owner", (), {})()
        process_report.register(owner, "job", lambda _: {"name": "far", **report})
        watcher = Watcher(all_hosts=True)
        stack.callback(watcher.close)
        snapshots, _, missing = until(lambda: (found := watcher.look()) and len(found[0]) == 2 and found)
        assert [[each["name"] for each in one["stores"]] for one in snapshots] == [["on-0"], ["on-1"]]
        assert [one["host"].rpartition(" ")[2] for one in snapshots] == ["(0)", "(1)"], "they have one name"
        assert missing == ["far, host 2: it has not joined, or is lost"]
        if not lost:
            return
        deadlines.stop(launchers[1].pid)  # and a wait of seconds for each
        _, _, missing = watcher.look()
        assert any(each.startswith("far, host 1: ") for each in missing), missing
        os.kill(launchers[1].pid, signal.SIGCONT)
        launchers[0].kill()
        launchers[0].wait(patience(30))
        snapshots, _, missing = watcher.look()
        assert len(snapshots) == 1 and missing[0].startswith("launchers of far: ")


@pytest.mark.parametrize(("names", "what"), [(["a"], "the store a (8.0 MB)"), (["a", "b"], "2 stores (a, b; 16.0 MB)")])
def test_stores_that_nobody_uses_are_named_with_their_bytes(names: list[str], what: str) -> None:
    limiter = {"enabled": False, "lead": 0.0, "samples_per_insert": 0.0, "error_buffer": 1.0, "min_size_to_sample": 1}
    limiter |= {"selectable": 1, "unit": "rows"}
    stores = [{"name": n, "clients": [], "bytes": 8_000_000, "rates": {}, "rows": 1, "limiter": limiter} for n in names]
    texts = [each.text for each in find_causes([snapshot(stores=stores)])]
    assert f"no process uses {what}: `geartrain remove NAME` frees the memory" in texts


def test_a_consumer_in_the_middle_of_a_long_wait_waits_all_of_the_time() -> None:
    def line(waiting_s: float) -> Any:
        figures = {"waiting_s": waiting_s, "selection": "Uniform"}
        replay = {"kind": "replay", "name": "live", "figures": figures, "rates": {"wait_s": 0.02}}
        report = {"pid": 7, "command": "train.py", "age_s": 0.0, "objects": [replay]}
        snapshot = {"host": "a", "stores": [], "weights": [], "jobs": [], "processes": [report], "pids": {}}
        snapshot["unreadable"] = {}
        section = next(one for one in sections_of([snapshot]) if one.title == "replays")
        waits = [column.name for column in section.columns].index("waits")
        return section.lines[0].values[waits]

    assert line(0.0) == 0.02 and line(0.3) == 0.02 and line(14.0) == 1.0


def test_silence_is_told_from_standing_still() -> None:
    quiet = snapshot()
    quiet["processes"][0]["age_s"] = 60.0
    assert "has not reported for 60 s" in next(each.text for each in find_causes([quiet]) if each.level == "lost")


@pytest.mark.parametrize("width", [1, 2, 20, 80, 300])
@pytest.mark.parametrize("height", [1, 3, 24])
def test_every_size_of_a_terminal_gets_lines_that_fit(width: int, height: int) -> None:
    screen = Screen()
    assert len(screen.lines(width, height)) <= height
    screen.update([snapshot()], find_causes([snapshot()]), ["host-2: nobody answers"])
    for keys in ("0", "1", "2", "5", "5\r", "4", "4jj\r", "\t\t"):
        for key in keys_of(keys.encode()):
            assert screen.press(key)
        lines = screen.lines(width, height)
        assert len(lines) == height
        assert all(line.cell_len <= width for line in lines), keys


def test_keys_sort_choose_and_dive() -> None:
    screen = Screen([snapshot()])
    for key in keys_of(b"2"):
        screen.press(key)
    shown = [line.plain for line in screen.lines(100, 20)]
    assert [line.split()[0] for line in shown if line.startswith(("rank", "caller", "agent"))] == [
        "agent-0",
        "caller",
        "rank0",
        "rank1",
    ]
    for key in keys_of(b"sssrr"):  # by memory, largest first; and back
        screen.press(key)
    assert "▼" in "".join(line.plain for line in screen.lines(100, 20))
    for key in keys_of(b"\x1b[B\x1b[B\r"):
        screen.press(key)
    assert "rss_bytes" in "".join(line.plain for line in screen.lines(100, 60))
    assert screen.press("esc") and not screen.dive
    assert not screen.press("q")


def test_stores_in_use_come_first_and_names_choose_lines(host: Path) -> None:
    with make("b-used"):
        make("a-idle", persist=True).close()
        (snapshot,), findings, _ = Watcher().look()
        stores, processes = sections_of([snapshot])[:2]
        assert [line.values[0] for line in stores.sorted(0, False)] == ["b-used", "a-idle"]
        assert [line.values[0] for line in stores.sorted(0, True)] == ["b-used", "a-idle"]
        assert [line.values[0] for line in stores.sorted(1, False)] == ["a-idle", "b-used"]  # by rows
        assert processes.lines
        shown = [each.plain for each in plain_lines([snapshot], findings, 140, ["idle"])]
        assert any(line.startswith("a-idle") for line in shown) and not any("b-used" in line for line in shown)
        shown = [each.plain for each in plain_lines([snapshot], findings, 140, ["elsewhere"])]
        assert shown[-1] == "no line has elsewhere in it"
        shown = [each.plain for each in Screen([snapshot], names=["b-", "a-"]).lines(140, 40)]
        assert "only b-, a-" in shown[0] and any(line.startswith("a-idle") for line in shown)
    refused = preloaded.run([sys.executable, "-m", "geartrain", "top", "idle", "--json"], timeout=patience(60))
    assert refused.returncode == 2 and "--json prints everything" in refused.stderr


def test_without_a_terminal_it_says_what_to_do() -> None:
    done = preloaded.run([sys.executable, "-m", "geartrain", "top"], timeout=patience(60))
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("error: ") and "--once" in done.stderr and done.stderr.count("\n") == 1


def test_json_has_hosts_and_findings(host: Path) -> None:
    with make():
        done = preloaded.run(
            [sys.executable, "-m", "geartrain", "top", "--json", "--every-s", "0.1"], timeout=patience(60)
        )
    found = json.loads(done.stdout)
    assert found["hosts"][0]["stores"][0]["rates"]["inserted"] == 0.0
    others = [each for each in found["findings"] if each["about"] != str(host)]  # but for a disk that is almost full
    assert others == [] and found["missing"] == []


class Emulator:
    """What a terminal shows of the bytes that `geartrain top` writes; anything that it does not know fails the test."""

    KNOWN = re.compile(r"\x1b\[(\?\d+[hl]|[\d;]*[HmJK])|[\r\n]|[^\x00-\x1f\x7f]+")

    def __init__(self, width: int, height: int) -> None:
        self.size, self.modes, self.rest = (width, height), set[str](), b""
        self.cells: dict[tuple[int, int], str] = {}
        self.row = self.column = 0

    def write(self, data: bytes) -> None:
        text = (self.rest + data).decode(errors="ignore")
        self.rest = b""
        at = 0
        while at < len(text):
            found = self.KNOWN.match(text, at)
            if found is None:
                assert len(text) - at < 12 and text[at] == "\x1b", f"unknown: {text[at : at + 20]!r}"
                self.rest = text[at:].encode()
                return
            self._obey(found.group(0))
            at = found.end()

    def _obey(self, one: str) -> None:
        if one == "\r":
            self.column = 0
        elif one == "\n":
            self.row += 1
            assert self.row < self.size[1], "the screen scrolls"
        elif one.startswith("\x1b[?"):
            (self.modes.add if one.endswith("h") else self.modes.discard)(one[3:-1])
        elif one.endswith("H") and one.startswith("\x1b"):
            self.row, self.column = (int(n or 1) - 1 for n in (one[2:-1] or "1;1").split(";"))
        elif one[0] == "\x1b":
            if one[-1] == "J":
                self.cells.clear()
        else:
            for each in one:
                assert self.column < self.size[0], "a line is wider than the terminal"
                self.cells[self.row, self.column] = each
                self.column += 1

    def text(self) -> str:
        width, height = self.size
        return "\n".join("".join(self.cells.get((y, x), " ") for x in range(width)).rstrip() for y in range(height))


@contextlib.contextmanager
def in_a_terminal(width: int, height: int) -> Iterator[tuple[int, int, Emulator]]:
    """`geartrain top` with a terminal of its own: pid, the terminal's other end, what it shows."""
    pid, master = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": "70", "LINES": "9"}  # of another terminal
        os.execv(sys.executable, [sys.executable, "-m", "geartrain", "top", "--every-s", "0.1"])
    try:
        resize(master, width, height)
        yield pid, master, Emulator(width, height)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(master)


def resize(master: int, width: int, height: int) -> None:
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))


def read_until(master: int, screen: Emulator, look: Any) -> None:
    until_s = time.monotonic() + patience(30)
    while not look():
        assert time.monotonic() < until_s, screen.text()
        if select.select([master], [], [], 0.1)[0]:
            screen.write(os.read(master, 65536))


def until_drawn(master: int, width: int, height: int) -> Emulator:
    """The first whole frame that fits this size; those before it are of another."""
    seen = b""
    until_s = time.monotonic() + patience(30)
    while True:
        assert time.monotonic() < until_s, seen[-2000:]
        if select.select([master], [], [], 0.1)[0]:
            seen += os.read(master, 65536)
        for frame in seen.split(b"\x1b[H")[1:-1]:
            screen = Emulator(width, height)
            with contextlib.suppress(AssertionError):
                screen.write(frame)
                if screen.row == height - 1:
                    return screen


def test_in_a_terminal_it_draws_obeys_keys_fits_and_leaves_it_as_it_was(host: Path) -> None:
    with make("seen", persist=False), in_a_terminal(90, 24) as (pid, master, screen):
        before = termios.tcgetattr(master)
        read_until(master, screen, lambda: re.search(r"^seen +5 ", screen.text(), re.MULTILINE))
        assert "1049" in screen.modes and screen.text().startswith("geartrain top")
        assert not termios.tcgetattr(master)[3] & (termios.ECHO | termios.ICANON)
        os.write(master, b"1")
        read_until(master, screen, lambda: "name▲" in screen.text())
        os.write(master, b"\r")
        read_until(master, screen, lambda: "counters.inserted" in screen.text())
        os.write(master, b"\x1b")
        read_until(master, screen, lambda: "name▲" in screen.text())
        os.write(master, b"p")
        read_until(master, screen, lambda: screen.text().startswith("PAUSED"))
        resize(master, 20, 8)  # the kernel sends SIGWINCH
        small = until_drawn(master, 20, 8)
        assert "1 stores" in small.text()
        os.write(master, b"\x03")  # Ctrl-C
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 130
        last = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while more := os.read(master, 65536):
                last += more
        assert last.rfind(b"\x1b[?1049l") > last.rfind(b"\x1b[?1049h"), "the other screen is gone"
        assert last.rfind(b"\x1b[?25h") > last.rfind(b"\x1b[?25l"), "the cursor is back"
        assert termios.tcgetattr(master)[3] & termios.ECHO and before[3] & termios.ECHO


def test_tasks_of_a_store_are_shown_with_who_holds_the_oldest_claim(store_name: Callable[[], str]) -> None:
    with grpo.new_store(store_name()) as store:
        grpo.insert(store, range(3))
        claim = store.claim("answer", 2, output="numpy")
        store.delete(claim.keys[1])
        store.advance(7)
        store.limiter.set(in_flight=9)
        snapshot = add_rates(None, take_snapshot())
        values = values_of(snapshot)
        assert values["geartrain_task_due"][store.name, "answer"] == 1
        assert values["geartrain_task_claimed"][store.name, "answer"] == 1
        assert values["geartrain_store_under_way"][store.name,] == 2
        assert values["geartrain_store_in_flight"][store.name,] == 2
        assert values["geartrain_store_clock"][store.name,] == 7
        assert values["geartrain_limiter_most_in_flight"][store.name,] == 9
        tasks = next(each for each in sections_of([snapshot]) if each.title == "tasks")
        line = next(each for each in tasks.lines if each.values[:2] == [store.name, "answer"])
        cells = dict(zip((column.name for column in tasks.columns), line.values, strict=True))
        assert cells["claimed by"].endswith(f"(pid {os.getpid()})") and 0 <= cells["oldest"] < patience(10)
        shown = CliRunner().invoke(app, ["inspect", store.name]).output
        assert "answer" in shown and str(os.getpid()) in shown
        assert "clock 7, 2 rows in flight" in shown and "at most 9" in shown
        stores = next(each for each in sections_of([snapshot]) if each.title == "stores")
        assert any("2 of 9 in flight" in line.values for line in stores.lines)
        about = json.loads(CliRunner().invoke(app, ["inspect", store.name, "--json"]).output)
        assert about["tasks"]["answer"]["figures"]["claimed"] == 1 and about["axes"] == ["prompt", "tokens", "answers"]
        assert about["tasks"]["answer"]["oldest_pid"] == os.getpid()


def test_tasks_of_a_store_on_several_hosts_are_added_up(store_name: Callable[[], str]) -> None:
    with grpo.new_store(store_name()) as store:
        grpo.insert(store, range(5))
        before = take_snapshot()
        first = store.claim("answer", 2, output="numpy")
        grpo.work(store, "answer", first)
        claim = store.claim("answer", 1, output="numpy")
        snapshots = []
        for number, elapsed_s in enumerate((1.0, 2.0)):
            now = json.loads(json.dumps(take_snapshot())) | {"host": f"host{number}", "id": str(number)}
            now["at_s"] = before["at_s"] + elapsed_s
            snapshots.append(add_rates(before, now))
            (mine,) = (each for each in now["stores"] if each["name"] == store.name)
            mine["tasks"]["answer"]["oldest_age_s"] = 10.0 * (number + 1)
        tasks = next(each for each in sections_of(snapshots, [store.name]) if each.title == "tasks")
        names = [column.name for column in tasks.columns]
        lines = {(line.values[0], line.values[1]): dict(zip(names, line.values, strict=True)) for line in tasks.lines}
        assert len(lines) == 3 * len(grpo.TASKS) and len(claim) == 1
        total = lines[f"2 hosts:{store.name}", "answer"]
        assert (total["done/s"], total["due"], total["claimed"], total["done"]) == (2.0 + 1.0, 4, 2, 4)
        assert total["oldest"] == 20.0 and total["claimed by"].startswith("host1:") and str(os.getpid()) in str(total)
        assert lines[f"host0:{store.name}", "answer"]["done/s"] == 2.0
        assert "2 hosts:" not in str(sections_of(snapshots[:1], [store.name]))


@pytest.mark.parametrize("claimed", [True, False])
def test_a_replay_that_waits_for_a_task_names_it_and_its_claimer(store_name: Callable[[], str], claimed: bool) -> None:
    with grpo.new_store(store_name()) as store, store.expect_writers():
        grpo.insert(store, range(5))
        grpo.work(store, "answer", store.claim("answer", 3, output="numpy"))
        claim = store.claim("reward", 2, output="numpy") if claimed else None
        with gt.Replay(store, gt.selection.Fifo(), 2, output="numpy"):
            now = add_rates(None, take_snapshot())
        figures = {"stores": [store.name], "waiting_s": 7.0, "batch_size": 2, "selection": "Fifo"}
        replay = {"kind": "replay", "name": store.name, "figures": figures, "rates": {}}
        now["processes"] = [{"pid": 7, "command": "learn", "age_s": 0.0, "period_s": 1.0, "objects": [replay]}]
        now["stores"] = [each for each in now["stores"] if each["name"] == store.name]
        (wait,) = (each for each in find_causes([now]) if each.level == "waits")
        due, by = (1, [str(os.getpid())]) if claimed else (3, [])
        assert f"for 7 s: its task 'reward' lags by 3 rows, {due} due and {3 - due} claimed" in wait.text
        assert [each.rpartition("pid ")[2].rstrip(")") for each in wait.cause] == by
        assert claim is None or len(claim) == 2
