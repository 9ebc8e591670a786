"""Prometheus endpoint of a host, and of a job's processes there, over HTTP: read from shared memory at each scrape."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, cast

from geartrain.core.shared_files import Trust
from geartrain.errors import GeartrainError, MissingDependencyError
from geartrain.launch.host_metrics import collector_of
from geartrain.launch.host_snapshot import take_snapshot
from geartrain.launch.metrics import COUNTS, ProcessMetrics

#: Clients at a time.
MOST_CONNECTIONS = 64
#: Longest wait for a client that is in the middle of a request, or of its answer.
CLIENT_S = 10.0


class PrometheusEndpoint:
    """Serves the metrics of this host, and of a job's processes, until `close`.

    Those of the host are `host_metrics.METRICS`. For each process of the job, by the label `process`: counters
    `geartrain_job_steps_total`, `..._samples_total`, `..._rows_total`, `..._episodes_total`, and of seconds
    `..._wait_seconds_total`, `..._policy_seconds_total`, `..._environment_seconds_total`, `..._store_seconds_total`;
    gauges `geartrain_job_version` and, by the label `name`, `geartrain_job_metric`.

    Args:
        read: returns the metrics of all processes, by name; None for those of the host alone. Called on threads of the
            server.
        trust: whose segments are read, as for `Store.open`.
        host, port: to listen on; port 0 is a free one.

    Raises:
        MissingDependencyError: prometheus-client is not installed.
        GeartrainError: the port cannot be had.
    """

    def __init__(
        self, read: Callable[[], dict[str, ProcessMetrics]] | None, host: str, port: int, trust: Trust = "user"
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
            from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
            from prometheus_client.registry import Collector
        except ImportError:
            raise MissingDependencyError("metrics need prometheus-client: pip install 'geartrain[metrics]'") from None

        class JobCollector(Collector):
            def collect(self) -> Iterable[Any]:
                found = {} if read is None else read()
                for column in COUNTS:
                    name = f"{column.removesuffix('_s')}_seconds" if column.endswith("_s") else column
                    counter = CounterMetricFamily(f"geartrain_job_{name}", f"Total {name}", labels=["process"])
                    for process, metrics in found.items():
                        counter.add_metric([process], metrics.counts[column])
                    yield counter
                version = GaugeMetricFamily("geartrain_job_version", "Version of the weights", labels=["process"])
                latest = GaugeMetricFamily("geartrain_job_metric", "Latest metrics", labels=["process", "name"])
                for process, metrics in found.items():
                    if metrics.version is not None:
                        version.add_metric([process], metrics.version)
                    for name, value in metrics.metrics.items():
                        latest.add_metric([process, name], value)
                yield version
                yield latest

        registry = CollectorRegistry()
        registry.register(collector_of(lambda: take_snapshot(trust)))
        if read is not None:
            registry.register(JobCollector())
        try:
            self._server = _Server(host, port, make_wsgi_app(registry))
        except (OSError, UnicodeError, OverflowError) as error:  # no name of a host; no port
            raise GeartrainError(f"cannot serve metrics on {host}:{port}: {error}") from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.name = "geartrain metrics"
        self._thread.start()
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Stops the server; any thread may, more than once. In a forked child, which has none, it frees the socket."""
        if self._pid != os.getpid():
            self._server.socket.close()
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._server.shutdown()
            self._server.server_close()
            self._server.hang_up()
            self._thread.join()


class _Server(ThreadingMixIn, TCPServer):
    """Serves each client on a thread of its own, and so many at a time: a further one ends the oldest.

    A scrape is over in less than a second. What is old is a client that says nothing, says it slowly, or does not read.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int, app: Callable[..., Any]) -> None:
        self.app = app
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, None] = {}  # the oldest first
        self.address_family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        super().__init__(cast(Any, address), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begins to serve a client, once there is a place for it."""
        until_s = time.monotonic() + 1.0
        while (more := len(self._clients) + 1 - MOST_CONNECTIONS) > 0 and time.monotonic() < until_s:
            self.hang_up(more)
            time.sleep(1e-3)  # until their threads have ended
        with self._lock:
            self._clients[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Ends a client."""
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def hang_up(self, oldest: int | None = None) -> None:
        """Has the threads of all clients end, or of the oldest ones."""
        with self._lock:
            for client in list(self._clients)[:oldest]:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing, of a client that has hung up, or was hung up on."""


class _Handler(BaseHTTPRequestHandler):
    """One request of a client, whatever it says."""

    timeout = CLIENT_S
    server: _Server

    def do_GET(self) -> None:
        """Answers with the metrics."""
        path, _, query = self.path.partition("?")
        asked = {
            "REQUEST_METHOD": self.command,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "HTTP_ACCEPT": self.headers.get("Accept"),
            "HTTP_ACCEPT_ENCODING": self.headers.get("Accept-Encoding"),
        }
        answer: list[Any] = []
        try:
            body = b"".join(self.server.app(asked, lambda *said: answer.extend(said)))
        except Exception as error:
            self.send_error(500, explain=f"{type(error).__name__}: {error}"[:1000])
            return
        self.send_response(int(answer[0].split()[0]))
        for name, value in answer[1]:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_OPTIONS = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing, of what clients say."""


__all__ = ["PrometheusEndpoint"]
