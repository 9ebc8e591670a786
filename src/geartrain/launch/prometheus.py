"""Prometheus endpoint of a host, and of a job's processes there, over HTTP: read from shared memory at each scrape."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

from geartrain.core.shared_files import Trust
from geartrain.errors import GeartrainError, MissingDependencyError
from geartrain.launch.host_metrics import collector_of
from geartrain.launch.host_snapshot import take_snapshot
from geartrain.launch.metrics import COUNTS, ProcessMetrics


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
            from prometheus_client import CollectorRegistry, start_http_server
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
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
            raise GeartrainError(f"cannot serve metrics on {host}:{port}: {error}") from None
        self.port: int = self._server.server_port
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
            self._thread.join()


__all__ = ["PrometheusEndpoint"]
