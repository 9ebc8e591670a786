"""Serves the metrics of a host, and of a job's processes on it, to Prometheus. Each scrape reads shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from geartrain.core.metrics_server import Metric, MetricsServer, Values
from geartrain.core.printable import printable
from geartrain.core.shared_files import Trust
from geartrain.launch.host_metrics import METRICS, values_of
from geartrain.launch.host_snapshot import take_snapshot
from geartrain.launch.metrics import COUNTS, ProcessMetrics


class PrometheusEndpoint(MetricsServer):
    """Serves the metrics of this host, and of a job's processes, until `close`.

    The host's metrics are `host_metrics.METRICS`. The metrics of each process of the job have the label `process`:

    - counters `geartrain_job_steps_total`, `..._samples_total`, `..._rows_total`, `..._episodes_total`
    - counters of seconds `..._wait_seconds_total`, `..._policy_seconds_total`, `..._environment_seconds_total`,
      `..._store_seconds_total`
    - gauges `geartrain_job_version` and, with the label `name`, `geartrain_job_metric`

    Args:
        read: returns the metrics of all processes, by name; None for those of the host alone. Called on the server's
            thread.
        trust: whose segments are read, as for `Store.open`.
        host, port: to listen on; port 0 is a free one.

    Raises:
        MissingDependencyError: prometheus-client is not installed.
        GeartrainError: the port cannot be had.
    """

    def __init__(
        self, read: Callable[[], dict[str, ProcessMetrics]] | None, host: str, port: int, trust: Trust = "user"
    ) -> None:
        def values() -> Values:
            for name, found in values_of(take_snapshot(trust)).items():
                yield METRICS[name], found
            if read is not None:
                yield from _of_job({printable(process): metrics for process, metrics in read().items()})

        super().__init__(values, host, port)


def _of_job(found: Mapping[str, ProcessMetrics]) -> Iterator[tuple[Metric, Mapping[tuple[str, ...], float]]]:
    for column in COUNTS:
        name = f"{column.removesuffix('_s')}_seconds" if column.endswith("_s") else column
        counter = Metric(f"geartrain_job_{name}", "counter", f"Total {name}", ("process",))
        yield counter, {(process,): metrics.counts[column] for process, metrics in found.items()}
    versions: dict[tuple[str, ...], float] = {}
    latest: dict[tuple[str, ...], float] = {}
    for process, metrics in found.items():
        if metrics.version is not None:
            versions[process,] = metrics.version
        latest |= {(process, printable(name)): value for name, value in metrics.metrics.items()}
    yield Metric("geartrain_job_version", "gauge", "Version of the weights", ("process",)), versions
    yield Metric("geartrain_job_metric", "gauge", "Latest metrics", ("process", "name")), latest


__all__ = ["PrometheusEndpoint"]
