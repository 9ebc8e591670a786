"""Watching a host: rates and causes of waits over its snapshots, the screen of `geartrain top`, Prometheus metrics."""
