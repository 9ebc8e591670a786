"""The endpoint for Prometheus: scrapes share one reading, and no client costs more than its share of anything."""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from deadlines import patience

import geartrain.core.metrics_server as metrics_server
from geartrain.core.metrics_server import MOST_CLIENTS, Metric, MetricsServer, Values

pytest.importorskip("prometheus_client")

GAUGE = Metric("some_gauge", "gauge", "A gauge", ("which",))


class Figures:
    """What is read, how often, and how slowly."""

    def __init__(self) -> None:
        self.readings = 0
        self.takes_s = 0.0
        self.value = 1.0
        self.label = "a"
        self.fails = False

    def read(self) -> Values:
        self.readings += 1
        time.sleep(self.takes_s)
        if self.fails:
            raise OSError("the disk is gone")
        return [(GAUGE, {(self.label,): self.value})]


@pytest.fixture
def figures() -> Figures:
    return Figures()


@pytest.fixture
def server(figures: Figures) -> Iterator[MetricsServer]:
    with_read = MetricsServer(figures.read, "127.0.0.1", 0)
    yield with_read
    with_read.close()


def dial(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), patience(20))


def heard(client: socket.socket) -> bytes:
    """All that the server says until it hangs up."""
    said = b""
    try:
        while more := client.recv(1 << 16):
            said += more
    except ConnectionResetError:
        pass
    return said


def ask(
    server: MetricsServer, method: str, path: str = "/metrics", body: bytes | None = None
) -> tuple[int, dict[str, str], bytes]:
    asking = http.client.HTTPConnection("127.0.0.1", server.port, patience(20))
    try:
        asking.request(method, path, body)
        answer = asking.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        asking.close()


def test_many_scrapes_at_once_share_one_reading_and_one_thread(server: MetricsServer, figures: Figures) -> None:
    figures.takes_s = 0.2
    threads = threading.active_count()
    clients = [dial(server) for _ in range(MOST_CLIENTS)]
    for client in clients:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert threading.active_count() == threads
    answers = [heard(client) for client in clients]
    for client in clients:
        client.close()
    assert all(b" 200 OK\r\n" in each and b'some_gauge{which="a"} 1.0' in each for each in answers)
    assert figures.readings == 1


def test_a_scrape_after_the_values_have_aged_reads_them_again(
    server: MetricsServer, figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "FRESH_S", 0.0)
    for value in (3.0, 4.0):
        figures.value = value
        assert f'some_gauge{{which="a"}} {value}'.encode() in ask(server, "GET")[2]
    assert figures.readings == 2


def test_head_has_the_headers_of_get_and_no_body(server: MetricsServer) -> None:
    got, head = ask(server, "GET"), ask(server, "HEAD")
    for each in (got, head):
        each[1].pop("date")
        assert each[0] == 200 and each[1]["connection"] == "close"
    assert head[1] == got[1] and head[2] == b"" and int(head[1]["content-length"]) == len(got[2]) > 0


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "get", "ODD"])
def test_other_methods_are_told_which_are_allowed(server: MetricsServer, figures: Figures, method: str) -> None:
    status, headers, _ = ask(server, method, body=b"x" * 100_000 if method == "POST" else None)
    assert (status, headers["allow"], headers["connection"]) == (405, "GET, HEAD", "close")
    assert figures.readings == 0


def test_a_reading_that_fails_is_an_answer_and_the_next_one_is_tried(server: MetricsServer, figures: Figures) -> None:
    figures.fails = True
    status, headers, body = ask(server, "GET")
    assert status == 500 and headers["connection"] == "close" and b"OSError: the disk is gone" in body
    figures.fails = False
    assert ask(server, "GET")[0] == 200


def test_of_more_clients_than_there_are_places_the_oldest_are_hung_up_on(server: MetricsServer) -> None:
    clients = [dial(server) for _ in range(3 * MOST_CLIENTS)]
    assert ask(server, "GET")[0] == 200
    ended = 0
    for client in clients:
        if select.select([client], [], [], 0)[0]:
            assert heard(client) == b""
            ended += 1
        client.close()
    assert ended == 2 * MOST_CLIENTS + 1, "and one for the scrape"


def test_a_client_that_sends_its_request_slowly_is_hung_up_on_while_it_sends(
    server: MetricsServer, figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "CLIENT_S", 0.3)
    began_s = time.monotonic()
    with dial(server) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nX-Long: ")
        with pytest.raises(ConnectionError):
            while time.monotonic() - began_s < patience(10):
                slow.sendall(b"x")
                time.sleep(0.02)
    assert time.monotonic() - began_s >= 0.3
    assert figures.readings == 0


def test_a_client_that_does_not_read_its_answer_is_hung_up_on(
    server: MetricsServer, figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "CLIENT_S", 1.0)
    figures.label = "x" * (24 << 20)  # more than the kernel takes for a client that does not read
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.settimeout(patience(20))
        client.connect(("127.0.0.1", server.port))
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        time.sleep(1.5)
        figures.label = "y"
        monkeypatch.setattr(metrics_server, "FRESH_S", 0.0)
        assert ask(server, "GET")[0] == 200
        said = heard(client)
    head, _, body = said.partition(b"\r\n\r\n")
    promised = next(int(line.split()[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
    assert 0 < len(body) < promised


def test_a_request_that_does_not_end_is_refused_by_its_size(server: MetricsServer, figures: Figures) -> None:
    for request in (b"GET /" + b"x" * (1 << 17), b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 40_000):
        with dial(server) as client:
            client.sendall(request)
            said = heard(client)
        assert not said or said.split()[1] in (b"414", b"431"), said[:80]
    assert figures.readings == 0


def test_the_server_closes_beside_clients_and_refuses_new_ones(server: MetricsServer) -> None:
    with dial(server) as silent, dial(server) as half:
        half.sendall(b"GET /")
        assert ask(server, "GET")[0] == 200
        began_s = time.monotonic()
        server.close()
        server.close()
        assert time.monotonic() - began_s < patience(1)
        assert heard(silent) == heard(half) == b""
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=patience(5))


def test_a_client_that_comes_as_the_server_closes_is_hung_up_on() -> None:
    for pause_s in [0.0, 0.0005, 0.001] * 10:
        server = MetricsServer(lambda: [], "127.0.0.1", 0)
        time.sleep(pause_s)
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            server.close()
            client.settimeout(patience(5))
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""


# --- forks ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def forked_child() -> Iterator[int]:
    """A child that does nothing, until it is killed at the end."""
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_beside_a_forked_child_clients_are_hung_up_on_and_the_port_is_freed(server: MetricsServer) -> None:
    with dial(server) as silent, dial(server) as half:
        half.sendall(b"GET /")
        assert ask(server, "GET")[0] == 200  # the others have come by then
        with forked_child():
            assert ask(server, "GET")[0] == 200
            server.close()
            for client in (silent, half):
                client.settimeout(patience(5))
                assert heard(client) == b""
            with pytest.raises(ConnectionRefusedError):
                dial(server)
            again = MetricsServer(lambda: [], "127.0.0.1", server.port)
            assert ask(again, "GET")[0] == 200
            again.close()


def test_a_copy_of_the_listener_that_a_child_has_not_closed_yet_accepts_nobody(server: MetricsServer) -> None:
    copy = os.dup(server._listening.fileno())
    assert ask(server, "GET")[0] == 200
    server.close()
    with pytest.raises(ConnectionRefusedError):
        dial(server)
    again = MetricsServer(lambda: [], "127.0.0.1", server.port)
    assert ask(again, "GET")[0] == 200
    again.close()
    os.close(copy)


def test_when_a_server_is_killed_beside_its_forked_child_its_clients_are_hung_up_on() -> None:
    reader, writer = os.pipe()
    go, fork_now = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            one = MetricsServer(lambda: [], "127.0.0.1", 0)
            os.write(writer, b"%d\n" % one.port)
            os.read(go, 1)
            with forked_child() as child:
                os.write(writer, b"%d\n" % child)
                signal.pause()
        finally:
            os._exit(1)
    said = os.fdopen(reader, "r")
    port = int(said.readline())
    with socket.create_connection(("127.0.0.1", port), patience(20)) as silent:
        asking = http.client.HTTPConnection("127.0.0.1", port, patience(20))
        asking.request("GET", "/")
        assert asking.getresponse().status == 200
        asking.close()
        os.write(fork_now, b"!")
        child = int(said.readline())
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        try:
            silent.settimeout(patience(5))
            assert heard(silent) == b""
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), patience(5))
        finally:
            os.kill(child, signal.SIGKILL)
    for fd in (writer, go, fork_now):
        os.close(fd)
    said.close()


def test_what_a_forked_child_opens_is_not_closed_with_the_parents_clients(server: MetricsServer) -> None:
    with dial(server) as silent:
        assert ask(server, "GET")[0] == 200
        child = os.fork()
        if child == 0:
            code = 1
            try:
                opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]
                server.close()
                server._after_fork()
                for number in opened:
                    os.fstat(number)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        silent.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert b" 200 OK" in heard(silent)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_the_url_leads_to_the_metrics(figures: Figures, host: str) -> None:
    if host == "::1" and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this host has no IPv6")
    with MetricsServer(figures.read, host, 0) as server:
        with urllib.request.urlopen(server.url, timeout=patience(20)) as got:
            assert b"some_gauge" in got.read()
