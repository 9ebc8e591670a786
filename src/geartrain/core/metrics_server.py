"""HTTP endpoint for Prometheus. It limits the cost of its clients, whatever they send.

One thread serves all clients with asyncio. http.server parses requests, and prometheus-client writes the values.

- Values are read again if the last reading ended more than `FRESH_S` ago. Otherwise scrapes share one reading.
- A client may send one request. The server closes its connection after the answer, or `CLIENT_S` after the client
  connected, whatever was sent or read by then.
- If there are more than `MOST_CLIENTS`, the server closes the oldest connection, because the new one may be a scrape.

A forked child closes its copies of the sockets at the fork. Clients are therefore disconnected when the parent closes
their connections or dies. The port is free when the parent has closed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal, NamedTuple, cast

from geartrain.core.lifetime import Lifetime, on_error
from geartrain.core.threads import DaemonThread
from geartrain.errors import GeartrainError, MissingDependencyError

#: Clients at a time.
MOST_CLIENTS = 64
#: From a client's coming until its answer must have been sent.
CLIENT_S = 10.0
#: Age of the values that a scrape is answered with, at most, but for the time that reading them took.
FRESH_S = 1.0
#: Size of a request, its headers included.
MOST_REQUEST_BYTES = 1 << 16
#: Connections that the kernel holds ready while values are read.
_QUEUE = 128
#: Of those, how many are taken before clients that are there already are heard again.
_ACCEPTED_AT_ONCE = 16
_CLOSE_S = 1.0
_END_OF_REQUEST = re.compile(rb"\r?\n\r?\n")


class Metric(NamedTuple):
    """One metric. The name of a counter is shown with `_total`."""

    name: str
    kind: Literal["counter", "gauge"]
    about: str
    labels: tuple[str, ...]


#: Values of metrics, by the values of their labels.
Values = Iterable[tuple[Metric, Mapping[tuple[str, ...], float]]]


class MetricsServer(Lifetime, elsewhere="make another one there"):
    """Serves metrics on a thread of its own until `close`.

    GET and HEAD of any path are answered, other methods refused (405).

    Args:
        read: returns the metrics and their values; called on the server's thread, after a scrape came.
        host, port: to listen on; port 0 is a free one.

    Attributes:
        port: that it listens on.
        url: to read the metrics from.

    Raises:
        MissingDependencyError: prometheus-client is not installed.
        GeartrainError: the port cannot be had.
    """

    def __init__(self, read: Callable[[], Values], host: str, port: int) -> None:
        app = _app(read)
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            self._listening = socket.create_server(
                cast(Any, address), family=family, backlog=_QUEUE, dualstack_ipv6=both
            )
        except (OSError, UnicodeError, OverflowError) as error:  # no name of a host; no port
            raise GeartrainError(f"cannot serve metrics on {host}:{port}: {error}") from None
        self.port: int = self._listening.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = DaemonThread(self._run, "geartrain metrics", (app,))
        super().__init__("the metrics server")
        self._closing = threading.RLock()  # a signal's handler may close while its thread does
        self._clients: dict[_Client, None] = {}  # the oldest first
        with on_error(self._loop.close), on_error(self._listening.close):  # no more threads
            self._thread.start()
        self._begin()

    def close(self) -> None:
        """Stops the server; any thread may, more than once. In a forked child, which has none, it does nothing.

        A reading under way is waited for, a second at most, and ends by itself.
        """
        if self._forked:
            return
        with self._closing:  # a second caller returns when the first one is done
            if not self._end():
                return
            with contextlib.suppress(RuntimeError):  # a signal's handler has closed it in between, and the loop with it
                self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(_CLOSE_S)

    def _after_fork(self) -> None:
        # Closes the child's copies of the sockets.
        self._listening.close()
        # The transports' numbers stay taken, by nothing: they would close them again, whatever had the number by then.
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for client in self._clients:
            if (number := client.fileno()) >= 0:
                os.dup2(nothing, number, inheritable=False)
        os.close(nothing)

    def _run(self, app: Callable[..., Any]) -> None:
        self._loop.run_until_complete(self._serve(app))
        self._loop.close()

    async def _serve(self, app: Callable[..., Any]) -> None:
        loop = self._loop
        clients = self._clients
        loop.set_exception_handler(lambda *_: None)  # of clients that have hung up
        server = await loop.create_server(
            lambda: _Client(loop, app, clients), sock=self._listening, backlog=_ACCEPTED_AT_ONCE
        )
        self._listening.listen(_QUEUE)  # asyncio has one number for both
        await self._ended.wait()
        # A client that is accepted and no transport yet is hung up on by nobody once the server is closed.
        until_s = time.monotonic() + _CLOSE_S / 2
        while (coming := asyncio.all_tasks() - {asyncio.current_task()}) and time.monotonic() < until_s:
            await asyncio.wait(coming, timeout=_CLOSE_S / 2)
        # A child that was forked just now may not have closed its copy yet: no copy listens from here on.
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        server.close()
        for client in list(clients):
            client.hang_up()
        await asyncio.sleep(0)  # closes their sockets


class _Client(asyncio.Protocol):
    """One request, and its answer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, app: Callable[..., Any], clients: dict[_Client, None]) -> None:
        self._loop, self._app, self._clients = loop, app, clients
        self._said = bytearray()
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._deadline = self._loop.call_later(CLIENT_S, self.hang_up)
        self._clients[self] = None
        if len(self._clients) > MOST_CLIENTS:
            next(iter(self._clients)).hang_up()

    def data_received(self, data: bytes) -> None:
        if self._answered:
            return  # is read: a connection that is closed with bytes unread is reset, which may destroy the answer
        before = len(self._said)
        self._said += data
        if _END_OF_REQUEST.search(self._said, max(0, before - 3)) or len(self._said) > MOST_REQUEST_BYTES:
            self._answer()

    def eof_received(self) -> None:
        """Closes, once the answer is sent."""
        if not self._answered:
            self._answer()

    def connection_lost(self, error: Exception | None) -> None:
        self._deadline.cancel()
        self._clients.pop(self, None)

    def hang_up(self) -> None:
        self._clients.pop(self, None)
        with contextlib.suppress(OSError):  # it has hung up itself
            self._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._transport.abort()

    def fileno(self) -> int:
        """The descriptor of its socket; -1 once that is closed."""
        number: int = self._transport.get_extra_info("socket").fileno()
        return number

    def _answer(self) -> None:
        self._answered = True
        self._transport.write(_Request(bytes(self._said), self._app).answer)
        self._transport.write_eof()
        self._said.clear()


class _Request(BaseHTTPRequestHandler):
    """A request as bytes, and the answer to it as bytes, for any content."""

    def __init__(self, said: bytes, app: Callable[..., Any]) -> None:
        self.client_address = ("", 0)
        self.rfile, self.wfile = io.BytesIO(said), io.BytesIO()
        self.raw_requestline = self.rfile.readline(MOST_REQUEST_BYTES + 1)
        self.requestline, self.request_version, self.command = "", "", ""
        if len(self.raw_requestline) > MOST_REQUEST_BYTES:
            self.send_error(414)
        elif self.parse_request():  # otherwise it has answered
            self._answer(app)
        self.answer = self.wfile.getvalue()

    def _answer(self, app: Callable[..., Any]) -> None:
        if self.command not in ("GET", "HEAD"):
            self._send(405, [("Allow", "GET, HEAD"), ("Content-Type", "text/plain")], b"GET or HEAD\n")
            return
        path, _, query = self.path.partition("?")
        asked = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "HTTP_ACCEPT": self.headers.get("Accept"),
            "HTTP_ACCEPT_ENCODING": self.headers.get("Accept-Encoding"),
        }
        said: list[Any] = []
        try:
            body = b"".join(app(asked, lambda *status: said.extend(status)))
        except Exception as error:
            self.send_error(500, explain=f"{type(error).__name__}: {error}"[:1000])
            return
        self._send(int(said[0].split()[0]), said[1], body)

    def _send(self, code: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
        self.send_response(code)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing of the clients' requests."""


def _app(read: Callable[[], Values]) -> Callable[..., Any]:
    """A WSGI application whose answers share one reading."""
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        from prometheus_client.registry import Collector
    except ImportError:
        raise MissingDependencyError("metrics need prometheus-client: pip install 'geartrain[metrics]'") from None

    class Reading(Collector):
        def __init__(self) -> None:
            self._found: list[Any] = []
            self._until_s = 0.0

        def collect(self) -> Iterable[Any]:
            if time.monotonic() >= self._until_s:
                self._found = [family_of(metric, values) for metric, values in read()]
                self._until_s = time.monotonic() + FRESH_S
            return self._found

        def describe(self) -> Iterable[Any]:
            return []

    def family_of(metric: Metric, values: Mapping[tuple[str, ...], float]) -> Any:
        family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        made = family(metric.name, metric.about, labels=metric.labels)
        for labels, value in values.items():
            made.add_metric(labels, value)
        return made

    registry = CollectorRegistry()
    registry.register(Reading())
    return make_wsgi_app(registry)


__all__ = ["CLIENT_S", "FRESH_S", "MOST_CLIENTS", "Metric", "MetricsServer", "Values"]
