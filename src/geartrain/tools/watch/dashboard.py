"""Grafana dashboard over the host's metrics, as `geartrain metrics --dashboard` prints it."""

from __future__ import annotations

from typing import Any

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_HOSTS = '{instance=~"$instance"}'
_WIDTH, _HEIGHT = 24, 8


def _rate(metric: str, by: str) -> str:
    """The rate of a counter, added up by labels."""
    return f"sum by ({by}) (rate(geartrain_{metric}_total{_HOSTS}[$__rate_interval]))"


def _now(metric: str) -> str:
    """A gauge, or a counter, as it is."""
    return f"geartrain_{metric}{_HOSTS}"


# Heading -> lines of panels, which share the width. A panel is its title, the unit, and a query by its legend.
_Panel = tuple[str, str, dict[str, str]]
_PANELS: dict[str, list[list[_Panel]]] = {
    "Causes": [
        [
            ("Stopped processes", "none", {"{{process}} (pid {{pid}})": f"{_now('process_stopped')} == 1"}),
            (
                "Share of the time that processes wait",
                "percentunit",
                {"{{process}} of {{job}}": _rate("process_wait_seconds", "job,process")},
            ),
            (
                "Seconds since a process reported progress",
                "s",
                {"{{process}} of {{job}}": _now("process_silent_seconds")},
            ),
        ]
    ],
    "Stores": [
        [
            ("Rows inserted", "wps", {"{{store}}": _rate("store_inserted", "store")}),
            ("Rows sampled", "rps", {"{{store}}": _rate("store_sampled", "store")}),
            ("Rows removed", "wps", {"{{store}} {{reason}}": _rate("store_removed", "store,reason")}),
        ],
        [
            ("Rows", "short", {"{{store}}": _now("store_rows")}),
            (
                "Limiter: lead",
                "short",
                {"{{store}}": f"{_now('limiter_lead')} and on (store, instance) geartrain_limiter_enabled == 1"},
            ),
            (
                "Limiter: waits of all threads",
                "percentunit",
                {
                    "{{store}} inserts": _rate("limiter_insert_wait_seconds", "store"),
                    "{{store}} samples": _rate("limiter_sample_wait_seconds", "store"),
                },
            ),
            (
                "Torn copies and stale keys",
                "ops",
                {
                    "{{store}} torn": _rate("store_torn", "store"),
                    "{{store}} stale keys": _rate("store_stale_keys", "store"),
                },
            ),
        ],
        [
            (
                "Shared memory",
                "bytes",
                {
                    "used on {{instance}}": f"{_now('shm_bytes')} - {_now('shm_free_bytes')}",
                    "{{store}}": _now("store_bytes"),
                },
            ),
            ("Memory of processes", "bytes", {"{{process}} (pid {{pid}})": _now("process_resident_bytes")}),
            (
                "CPU of processes",
                "percentunit",
                {"{{process}} (pid {{pid}})": _rate("process_cpu_seconds", "process,pid")},
            ),
        ],
    ],
    "Replays": [
        [
            ("Batches", "ops", {"{{process}} of {{store}}": _rate("replay_batches", "store,process")}),
            ("Bytes delivered", "Bps", {"{{process}} of {{store}}": _rate("replay_bytes", "store,process")}),
            (
                "Share of the time: waiting, making",
                "percentunit",
                {
                    "{{process}} waits": _rate("replay_wait_seconds", "store,process"),
                    "{{process}} makes": _rate("replay_make_seconds", "store,process"),
                },
            ),
        ]
    ],
    "RPC and collectives": [
        [
            ("Messages sent", "ops", {"{{node}} to {{peer}}": _rate("rpc_messages_sent", "node,peer")}),
            (
                "Bytes",
                "Bps",
                {
                    "{{node}} to {{peer}}": _rate("rpc_bytes_sent", "node,peer"),
                    "{{peer}} to {{node}}": _rate("rpc_bytes_received", "node,peer"),
                },
            ),
            (
                "Open calls and backlog",
                "short",
                {"{{node}} at {{peer}}": _now("rpc_open_calls"), "backlog of {{node}}": _now("rpc_backlog")},
            ),
        ],
        [
            ("All-reduces", "ops", {"{{group}} rank {{rank}}": _rate("group_operations", "group,rank")}),
            ("Bytes of all-reduces", "Bps", {"{{group}} rank {{rank}}": _rate("group_array_bytes", "group,rank")}),
            ("Pending all-reduces", "short", {"{{group}} rank {{rank}}": _now("group_pending")}),
        ],
    ],
    "Actors and weights": [
        [
            ("Steps", "ops", {"{{process}} of {{job}}": _rate("process_steps", "job,process")}),
            (
                "Age of the newest weights",
                "s",
                {"{{weights}}": f"time() - {_now('weights_published_timestamp_seconds')}"},
            ),
            (
                "Versions behind",
                "short",
                {
                    "{{process}} of {{weights}}": f"{_now('weights_version')} - on (weights, instance) group_right "
                    + _now("weights_reader_version")
                },
            ),
            ("Restarts", "short", {"{{process}} of {{job}}": _now("process_restarts")}),
        ]
    ],
}


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it: plain data."""
    hosts = {"query": "label_values(geartrain_shm_bytes, instance)", "refId": "instances"}
    return {
        "title": "geartrain",
        "uid": "geartrain-host",
        "tags": ["geartrain"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "annotations": {"list": []},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {},
                    "hide": 0,
                },
                {
                    "name": "instance",
                    "label": "Host",
                    "type": "query",
                    "datasource": _SOURCE,
                    "definition": hosts["query"],
                    "query": hosts,
                    "includeAll": True,
                    "allValue": ".*",
                    "multi": True,
                    "current": {"text": "All", "value": "$__all"},
                    "refresh": 2,
                    "hide": 0,
                },
            ]
        },
        "panels": _panels(),
    }


def _panels() -> list[dict[str, Any]]:
    """All headings and panels with their places."""
    made: list[dict[str, Any]] = []
    y = 0
    for heading, lines in _PANELS.items():
        place = {"h": 1, "w": _WIDTH, "x": 0, "y": y}
        made.append({"type": "row", "title": heading, "collapsed": False, "panels": [], "gridPos": place})
        y += 1
        for line in lines:
            width = _WIDTH // len(line)
            for at, panel in enumerate(line):
                made.append(_panel(*panel) | {"gridPos": {"h": _HEIGHT, "w": width, "x": at * width, "y": y}})
            y += _HEIGHT
    return [{**each, "id": number} for number, each in enumerate(made, 1)]


def _panel(title: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + at), "expr": query, "legendFormat": legend, "datasource": _SOURCE}
            for at, (legend, query) in enumerate(queries.items())
        ],
    }


__all__ = ["dashboard"]
