"""Files and bytes of strangers where geartrain looks at its host: left out or told, and nothing ends or waits."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from deadlines import patience
from typer.testing import CliRunner

import geartrain as gt
from geartrain import weights
from geartrain.core import counters, process_report
from geartrain.core.metrics_server import MOST_CLIENTS
from geartrain.launch.host_snapshot import take_snapshot
from geartrain.launch.prometheus import PrometheusEndpoint
from geartrain.store.checkpoint_format import json_checksum
from geartrain.tools.cli.app import app


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of segments that no other program uses."""
    monkeypatch.setenv("GEARTRAIN_DIR", str(tmp_path))
    monkeypatch.setenv(process_report.PERIOD_VARIABLE, "0")
    return tmp_path


#: What would stand on a line of its own, if the end of a line in a name were obeyed.
FORGED = "no store is damaged"


def obeyed(shown: str) -> set[str]:
    """What a terminal would obey, of what it is shown."""
    return {each for each in shown if not each.isprintable() and each != "\n"}


def litter(host: Path) -> None:
    """What any user of a host can leave in /dev/shm."""
    folder = os.fsencode(host)
    prefixes = (
        b"geartrain.",
        b"geartrain.anonymous-",
        b"geartrain-weights.",
        b"geartrain-board-",
        b"geartrain-report-",
    )
    for prefix in prefixes:
        for name in (b"\xff\xfe\x80", f"a\n{FORGED}\x1b[2J\x9b2J\u202e\u2066\u200f".encode(), b"n" * 200):
            (host / os.fsdecode(prefix + name + (b".json" if b"report" in prefix else b""))).write_bytes(b"{" * 5000)
        os.mkfifo(folder + b"/" + prefix + b"1.json")
        os.mkdir(folder + b"/" + prefix + b"2.json")
        os.symlink(folder + b"/" + prefix + b"3.json", folder + b"/" + prefix + b"3.json")
    report = {"format": process_report.FORMAT, "pid": os.getpid(), "started": 1, "namespace": "", "at_s": time.time()}
    one = {"kind": "replay", "name": "\ud800", "figures": {"error": "\ud800"}, "rates": {}}
    whole = {**report, "period_s": 1, "command": "\ud800", "objects": [one]}
    (host / "geartrain-report-4.json").write_text(json.dumps(whole))


def test_names_that_are_no_text_hinder_nobody(host: Path) -> None:
    litter(host)
    text = json.dumps(take_snapshot(), ensure_ascii=False)
    text.encode()
    assert "geartrain-report-4.json" in json.loads(text)["unreadable"]
    assert all(name.encode() for name in [*counters.names(), *weights.names()])
    process_report.remove_stale()
    weights.reap()
    with gt.Store.create(None, {"x": gt.Field((2,), "float32")}, max_length=1, capacity=4) as store:
        assert len(store) == 0
    for command in (["top", "--once"], ["top", "--json"], ["inspect"], ["inspect", "--json"], ["doctor"]):
        ran = CliRunner().invoke(app, command)
        assert ran.exit_code in (0, 1) and isinstance(ran.exception, SystemExit | None), (command, ran.exception)
        assert not obeyed(ran.output), command
        assert not any(line.lstrip("│ ").startswith(FORGED) for line in ran.output.splitlines()), command


def test_names_in_checkpoints_and_datasets_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    odd = f"a\n{FORGED}\x1b[2J\x9b\u202e"
    with gt.Store.create(None, {"x": gt.Field((2,), "float32")}, max_length=1, capacity=4) as store:
        store.save(tmp_path / "saved")
    (manifest,) = (tmp_path / "saved").glob("**/manifest.json")
    content = json.loads(manifest.read_text())
    del content["checksum"]
    content["created"] = odd
    manifest.write_text(json.dumps({**content, "checksum": json_checksum(content)}))
    np.savez(tmp_path / "odd.npz", **{odd: np.zeros((2, 3)), "length": np.array([1, 9])})
    odd_file = tmp_path / odd.replace("/", "")
    odd_file.write_bytes(b"{")
    for command, code in (
        (["inspect", str(tmp_path / "saved")], 0),
        (["inspect", str(odd_file)], 1),
        (["import", str(tmp_path / "odd.npz"), "--into", str(tmp_path / "into.gt")], 0),
        (["inspect", str(tmp_path / "into.gt"), "--rows", "1"], 0),
        (["inspect", str(tmp_path / "into.gt")], 0),
        (["import", str(odd_file), "--into", str(tmp_path / "into.gt")], 1),
        (["trace", str(odd_file)], 2),
    ):
        ran = CliRunner().invoke(app, command)
        assert ran.exit_code == code and isinstance(ran.exception, SystemExit | None), (command, ran.output)
        assert not obeyed(ran.output), command
        assert not any(line.startswith(FORGED) for line in ran.output.splitlines()), command


# --- the endpoint of metrics ------------------------------------------------------------------------------------------


@pytest.fixture
def endpoint() -> Iterator[PrometheusEndpoint]:
    pytest.importorskip("prometheus_client")
    one = PrometheusEndpoint(None, "127.0.0.1", 0)
    yield one
    one.close()


def scrape(port: int, **headers: str) -> str:
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    with urllib.request.urlopen(asked, timeout=patience(10)) as answer:
        return str(answer.read().decode())


def test_metrics_are_served_whatever_files_there_are(host: Path, endpoint: PrometheusEndpoint) -> None:
    litter(host)
    for accepted in ("text/plain", "application/openmetrics-text; version=1.0.0", "*/*; q=nan", "\xff"):
        assert "geartrain_shm_bytes" in scrape(endpoint.port, Accept=accepted)


GARBAGE = (
    b"\0" * 4096,
    b"\xff\xfe" * 100 + b"\r\n\r\n",
    b"GET " + b"/" * (1 << 17) + b" HTTP/1.1\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(500)) + b"\r\n",
    b"GET /metrics HTTP/9.9.9\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\nx",
    b"GET /metrics?name[]=" + b"%ff" * 1000 + b" HTTP/1.1\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nContent-Length: -1\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)


def test_garbage_at_the_endpoint_is_answered_or_hung_up_on_and_nothing_is_printed(
    endpoint: PrometheusEndpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    for garbage in GARBAGE:
        with socket.create_connection(("127.0.0.1", endpoint.port), patience(10)) as dialled:
            said = b""
            try:
                dialled.sendall(garbage)
                dialled.shutdown(socket.SHUT_WR)
                while more := dialled.recv(1 << 16):
                    said += more
            except OSError:
                pass  # it was hung up on
            assert not said or said.startswith((b"HTTP/", b"<!DOCTYPE", b"\n<!DOCTYPE")), said[:100]
    for linger in (b"", b"GET /metrics HTTP/1.1\r\n\r\n"):  # and resets, before and beside the answer
        with socket.create_connection(("127.0.0.1", endpoint.port)) as dialled:
            dialled.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            dialled.sendall(linger)
    assert "geartrain_shm_bytes" in scrape(endpoint.port)
    assert capfd.readouterr() == ("", "")


def test_silent_clients_take_no_place_and_no_thread_from_scrapes(endpoint: PrometheusEndpoint) -> None:
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(3 * MOST_CLIENTS)]
    try:
        for one in silent[::2]:
            one.send(b"GET /metr")
        began_s = time.monotonic()
        assert "geartrain_shm_bytes" in scrape(endpoint.port)
        assert time.monotonic() - began_s < patience(5)
        assert threading.active_count() - before <= 0
    finally:
        for one in silent:
            one.close()


def test_the_endpoint_closes_beside_silent_clients(endpoint: PrometheusEndpoint) -> None:
    with socket.create_connection(("127.0.0.1", endpoint.port)) as silent:
        began_s = time.monotonic()
        endpoint.close()
        assert time.monotonic() - began_s < patience(2)
        silent.settimeout(patience(5))
        with contextlib.suppress(ConnectionResetError):
            assert silent.recv(1) == b""
