"""Monitoring of a host: rates and causes of waits from its snapshots, `geartrain top`, Prometheus metrics."""
